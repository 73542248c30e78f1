"""Serve a model with vLLM on this machine, as a solver or a judge for rewards, to whoever has the key.

    python scripts/parts/serve.py MODEL                                one server; says which flags use it
    python scripts/parts/serve.py MODEL --num_engines 4 --devices_in_use 4  four servers, on GPUs 4 to 7

The first line that it prints, once all servers answer, is JSON: base_urls (OpenAI's protocol, on the loopback device)
and api_key. They end with it: on Ctrl-C and SIGTERM and, where its stdin is a pipe, when that closes, which the kernel
does when what started it is gone, however that came about. --solver_model_name_or_path starts it so. Exit status 1,
with the server's last words, if one does not come up or ends. kill -9 of this program leaves its servers behind.
"""

import argparse
import json
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # started as a program: its folder stands for the root, where the four files are
    sys.path[0] = str(Path(__file__).resolve().parents[2])

START_TIMEOUT_S = 1200.0  # a large model may have to be read from a slow disk
# What torchrun says of the process that started us is not true of a server.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
DEFAULTS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2"}  # GiB


class Ended(Exception):
    """A server has ended or does not come up; the message has its last words."""


@dataclass(frozen=True)
class Server:
    """One vLLM server: its address for OpenAI clients, its file of words if it has one, and its process group."""

    base_url: str
    log: Path | None
    process: subprocess.Popen


def server_devices(num: int, devices_in_use: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each of `num` servers: the devices after those in use, the last for all that are left."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    return [devices[min(devices_in_use + i, len(devices) - 1)] if devices else "" for i in range(num)]


def server_command(options: argparse.Namespace) -> list[str]:
    """The command line of a server but for its port. Raises OSError or ValueError where the model is not to be had."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(options.model, revision=options.model_revision).get_text_config()
    positions, dtype = config.max_position_embeddings, options.model_dtype
    if dtype == "auto" and not torch.cuda.is_available():  # vLLM would take bfloat16 where it is emulated, too
        import utils

        dtype = utils.choose_dtype(utils.Flags())[0]
    flags = {
        "model": options.model,
        "served-model-name": options.model,
        "dtype": dtype,
        "seed": options.seed,
        "max-model-len": min(options.max_model_len or positions, positions),
        "max-num-seqs": options.max_num_seqs,
        "gpu-memory-utilization": options.gpu_memory_utilization,
        "generation-config": "vllm",  # else the model's own sampling defaults slip in
        "uvicorn-log-level": "warning",  # no line per request
        "host": "127.0.0.1",
    }
    switches = ["--enable-prefix-caching"]
    if options.model_revision:
        flags["revision"] = options.model_revision
    if not torch.cuda.is_available():  # as utils.VLLMEngine
        flags |= {"block-size": 32, "max-num-batched-tokens": max(8192, flags["max-model-len"])}
        switches += ["--enforce-eager", "--no-enable-chunked-prefill"]
    # `vllm serve` refuses to start where vLLM is installed as vllm-cpu
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *switches]
    return command + [part for flag, value in flags.items() for part in (f"--{flag}", str(value))]


def start(options: argparse.Namespace, key: str, directory: str, servers: list[Server]) -> None:
    """Start the servers, each in a process group of its own, with `directory` for their temporary files."""
    command = server_command(options)
    env = {name: value for name, value in os.environ.items() if not name.startswith(TORCHRUN)}
    env = DEFAULTS | env | {"VLLM_API_KEY": key, "TMPDIR": directory, "VLLM_RPC_BASE_PATH": directory}
    for i, devices in enumerate(server_devices(options.num_engines, options.devices_in_use)):
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of a server that has just ended
            free.bind(("127.0.0.1", options.port and options.port + i))
            port = free.getsockname()[1]
        log = options.log_dir / f"{options.name}_{i}.log" if options.log_dir else None
        with (log or Path(os.devnull)).open("w") as out:
            process = subprocess.Popen(
                [*command, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=out if log else sys.stderr,
                stderr=subprocess.STDOUT,
                env=env | {"CUDA_VISIBLE_DEVICES": devices},
                start_new_session=True,  # to end all its processes at once
            )
        servers.append(Server(f"http://127.0.0.1:{port}/v1", log, process))


def is_up(server: Server, key: str) -> bool:
    """Whether the server answers to its key: the port may be a stranger's by now."""
    request = urllib.request.Request(f"{server.base_url}/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def check(servers: list[Server]) -> None:
    """Raise Ended with the end of its log if a server has ended."""
    for server in servers:
        if server.process.poll() is not None:
            end = server.log.read_text(errors="replace")[-3000:] if server.log else "above"
            raise Ended(f"the server of {server.log or server.base_url} has ended. Its last words:\n{end}")


def serve(options: argparse.Namespace, servers: list[Server], directory: str) -> None:
    """Start the servers, say where they are, and stay until one ends."""
    key, deadline = secrets.token_hex(16), time.monotonic() + START_TIMEOUT_S
    start(options, key, directory, servers)
    while not all(is_up(server, key) for server in servers):
        check(servers)
        if time.monotonic() > deadline:
            raise Ended(f"no answer of {options.model} after {START_TIMEOUT_S:.0f} s: see {servers[0].log}")
        time.sleep(0.2)
    urls, model = [server.base_url for server in servers], options.model
    print(json.dumps({"base_urls": urls, "api_key": key}))
    print(f"SOLVER_API_KEY={key} ... --solver_model_name_or_path {model} --solver_base_url {','.join(urls)}")
    print(f"OPENAI_API_KEY={key} ... --llm_judge_model {model} --llm_judge_base_url {urls[0]}", flush=True)
    while True:
        check(servers)
        time.sleep(0.5)


def end_with_stdin() -> None:
    """Have SIGTERM end this program in good order, and send it when stdin, if that is a pipe, closes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    if stat.S_ISFIFO(os.fstat(0).st_mode):

        def listen() -> None:
            while os.read(0, 64):  # not sys.stdin, whose lock this thread would hold at the interpreter's end
                pass
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=listen, daemon=True).start()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="hub name or directory; it is served under this name")
    parser.add_argument("--num_engines", type=int, default=1, help="servers")
    parser.add_argument("--devices_in_use", type=int, default=0, help="GPUs to leave alone, the first ones")
    parser.add_argument("--max_model_len", type=int, help="tokens of prompt and answer; default: the model's positions")
    parser.add_argument("--model_revision", help="hub revision")
    parser.add_argument(
        "--model_dtype", default="auto", help="as vLLM names it; auto: what this CPU is fast in, the model's on a GPU"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu_memory_utilization", type=float, default=0.9, help="share of its GPU that each takes")
    parser.add_argument("--max_num_seqs", type=int, default=256, help="requests that each works on at the same time")
    parser.add_argument("--port", type=int, default=0, help="of the first server, the next ones follow; 0: free ones")
    parser.add_argument("--log_dir", type=Path, help="directory for NAME_0.log, ...; default: all words to stderr")
    parser.add_argument("--name", default="server", help="of the logs")
    options, servers = parser.parse_args(), []
    end_with_stdin()
    with tempfile.TemporaryDirectory(prefix="vllm_", ignore_cleanup_errors=True) as directory:
        try:
            serve(options, servers, directory)
        except (Ended, OSError, ValueError) as error:
            print(f"serve.py: {error}", file=sys.stderr)
        finally:
            for server in servers:
                try:
                    os.killpg(server.process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # all ended by themselves
                server.process.wait()
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
