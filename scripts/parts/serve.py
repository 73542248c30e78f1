"""vLLM servers of a model on this machine, a solver or a judge for rewards, and the process that owns them.

That process prints one line of JSON once all servers answer: base_urls (OpenAI's protocol, on the loopback device) and
api_key. The servers end with it: on Ctrl-C, on SIGTERM and, where its stdin is a pipe, when that closes, which the
kernel does when the run that started it is gone, for whatever reason.

`Servers`, `start_servers` and `start_solver` are for the run's process. All else is for the process that owns the
servers, which scripts/serve.py starts by hand.
"""

import argparse
import contextlib
import functools
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:  # started as a program: imports start at the root, where utils is
    sys.path[0] = str(Path(__file__).resolve().parents[2])

START_TIMEOUT_S = 1200.0  # a large model may have to be read from a slow disk
# torchrun's variables describe the process that started this one: they are wrong for a server
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
DEFAULTS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2"}  # GiB


# --- In the run's process ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Servers:
    """vLLM servers of a model, for OpenAI clients. They end with `process`, which writes to `log`."""

    base_urls: list[str]
    api_key: str
    process: subprocess.Popen
    log: Path

    def check(self) -> None:
        """Raise UserError with the end of the log if a server has ended."""
        import utils

        if self.process.poll() is not None:
            raise utils.UserError(self.log.read_text(errors="replace")[-3000:])

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def start_servers(model: str, log_dir: Path, name: str = "solver", **flags: object) -> Servers:
    """Start vLLM servers of a model, with the flags of parse_options, and wait until they answer. Logs are
    log_dir/name*.log. The servers end with Servers.stop or this process, also if that is killed. Raises UserError."""
    import utils

    log = log_dir / f"{name}.log"
    flags |= {"log_dir": log_dir, "name": name}
    arguments = [f"--{flag}={value}" for flag, value in flags.items()]
    process: Any = utils.start_program(log, "parts/serve.py", model, *arguments)
    answer = process.stdout.readline()  # nothing if a server does not come up
    utils.need(answer != "", f"no server of {model}: {log.read_text(errors='replace')[-3000:]}")
    return Servers(**json.loads(answer), process=process, log=log)


def start_solver(args: Any, run_dir: Path, world: Any) -> tuple[Servers | None, Any]:
    """Have the first rank start the solver's servers; returns them, or None on other ranks, and the flags with their
    addresses. All ranks that score. Raises UserError."""
    import utils

    started: list[Servers] = []
    start_here = functools.partial(start_solver_here, args, run_dir, started)
    base_urls, api_key = utils.on_main(start_here, world)
    os.environ["SOLVER_API_KEY"] = api_key
    servers = started[0] if started else None
    return servers, replace(args, solver_base_url=base_urls)


def start_solver_here(args: Any, run_dir: Path, started: list[Servers]) -> tuple[str, str]:
    """Start the solver's servers, which are appended to `started`; returns their URLs and key."""
    import torch

    import utils
    from scripts.parts import solver

    gpus = torch.cuda.device_count()
    in_use = 1 if args.single_gpu_mode else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    enough_gpus = gpus == 0 or gpus >= in_use + args.solver_num_engines
    utils.need(
        enough_gpus,
        f"--solver_num_engines {args.solver_num_engines}: each takes a GPU of its own, and {in_use} of {gpus} are the "
        "run's: lower it, or start a server with a smaller share of a GPU yourself and give --solver_base_url",
    )
    servers = start_servers(
        args.solver_model_name_or_path,
        run_dir,
        num_engines=args.solver_num_engines,
        devices_in_use=in_use,
        max_model_len=args.max_prompt_token_length + args.response_length + args.solver_response_length + 512,
        max_num_seqs=solver.MAX_CONCURRENCY,
        model_dtype=args.model_dtype,
        seed=args.seed,
    )
    started.append(servers)
    return ",".join(servers.base_urls), servers.api_key


# --- In the process that owns the servers -----------------------------------------------------------------------------


class Ended(Exception):
    """A server has ended or does not come up; the message has its last lines."""


@dataclass(frozen=True)
class Server:
    """One vLLM server: its address for OpenAI clients, its log if it has one, and the first of its processes."""

    base_url: str
    log: Path | None
    process: subprocess.Popen

    def is_up(self, key: str) -> bool:
        """Whether the server answers to its key: another program may have taken the port."""
        request = urllib.request.Request(f"{self.base_url}/models", headers={"Authorization": f"Bearer {key}"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def check(self) -> None:
        """Raise Ended with the end of the log if the server has ended."""
        if self.process.poll() is not None:
            last_lines = self.log.read_text(errors="replace")[-3000:] if self.log else "above"
            raise Ended(f"the server of {self.log or self.base_url} has ended. Its last words:\n{last_lines}")

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # all its processes have ended by themselves
        self.process.wait()


def server_devices(num: int, devices_in_use: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each of `num` servers: the devices after those in use; the last one may be shared."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    if not devices:
        return [""] * num
    last = len(devices) - 1
    return [devices[min(devices_in_use + i, last)] for i in range(num)]


def server_command(options: argparse.Namespace) -> list[str]:
    """A server's command line without its port. Raises OSError or ValueError if the model cannot be found."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(options.model, revision=options.model_revision).get_text_config()
    positions = config.max_position_embeddings
    dtype = options.model_dtype
    if dtype == "auto" and not torch.cuda.is_available():  # vLLM would take bfloat16 even where that is emulated
        import utils
        from scripts.parts import machine

        dtype, _ = machine.choose_dtype(utils.Flags())
    flags = {
        "model": options.model,
        "served-model-name": options.model,
        "dtype": dtype,
        "seed": options.seed,
        "max-model-len": min(options.max_model_len or positions, positions),
        "max-num-seqs": options.max_num_seqs,
        "gpu-memory-utilization": options.gpu_memory_utilization,
        "generation-config": "vllm",  # else the model's own sampling defaults count
        "uvicorn-log-level": "warning",  # no line per request
        "host": "127.0.0.1",
    }
    # not `vllm serve`, which refuses to start where vLLM is installed as vllm-cpu
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enable-prefix-caching"]
    if options.model_revision:
        flags["revision"] = options.model_revision
    if not torch.cuda.is_available():  # as utils.VLLMEngine
        flags["block-size"] = 32
        flags["max-num-batched-tokens"] = max(8192, flags["max-model-len"])
        command += ["--enforce-eager", "--no-enable-chunked-prefill"]
    for flag, value in flags.items():
        command += [f"--{flag}", str(value)]
    return command


def start(options: argparse.Namespace, key: str, directory: str, servers: list[Server]) -> None:
    """Start the servers, each in a process group of its own, with `directory` for their temporary files."""
    command = server_command(options)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(TORCHRUN)}
    env = DEFAULTS | inherited
    env["VLLM_API_KEY"] = key
    env.pop("VLLM_SERVER_DEV_MODE", None)  # endpoints without the key that reset caches and show the configuration
    env["TMPDIR"] = directory
    env["VLLM_RPC_BASE_PATH"] = directory
    for i, devices in enumerate(server_devices(options.num_engines, options.devices_in_use)):
        wanted_port = options.port + i if options.port else 0
        port = free_port(wanted_port)
        env["CUDA_VISIBLE_DEVICES"] = devices
        log = None
        if options.log_dir:
            log = options.log_dir / f"{options.name}_{i}.log"
        with log.open("w") if log else contextlib.nullcontext(sys.stderr) as out:
            process = subprocess.Popen(
                [*command, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,  # to end all its processes at once
            )
        servers.append(Server(f"http://127.0.0.1:{port}/v1", log, process))


def free_port(wanted: int) -> int:
    """The wanted port, or for 0 any free one. Raises OSError if it is in use."""
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server may just have ended there
        free.bind(("127.0.0.1", wanted))
        return free.getsockname()[1]


def serve(options: argparse.Namespace, servers: list[Server], directory: str) -> None:
    """Start the servers, which are appended to `servers`, print their addresses, and stay until one ends: Ended."""
    key = secrets.token_hex(16)
    deadline = time.monotonic() + START_TIMEOUT_S
    start(options, key, directory, servers)
    while not all(server.is_up(key) for server in servers):
        for server in servers:
            server.check()
        if time.monotonic() > deadline:
            raise Ended(f"no answer of {options.model} after {START_TIMEOUT_S:.0f} s: see {servers[0].log}")
        time.sleep(0.2)
    model = options.model
    urls = [server.base_url for server in servers]
    print(json.dumps({"base_urls": urls, "api_key": key}))
    print(f"SOLVER_API_KEY={key} ... --solver_model_name_or_path {model} --solver_base_url {','.join(urls)}")
    print(f"OPENAI_API_KEY={key} ... --llm_judge_model {model} --llm_judge_base_url {urls[0]}", flush=True)
    while True:
        for server in servers:
            server.check()
        time.sleep(0.5)


def end_with_stdin() -> None:
    """Have SIGTERM and Ctrl-C end this process in good order, and stdin's end too, if stdin is a pipe."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=wait_for_stdin, daemon=True).start()


def wait_for_stdin() -> None:
    """Send SIGTERM to this process when stdin closes."""
    while os.read(0, 64):  # not sys.stdin, whose lock this thread would hold at the interpreter's end
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def parse_options(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    parser.add_argument("--log_dir", type=Path, help="directory for NAME_0.log, ...; default: all output to stderr")
    parser.add_argument("--name", default="server", help="of the logs")
    return parser.parse_args()


def main(description: str | None = __doc__) -> int:
    options = parse_options(description)
    servers: list[Server] = []
    end_with_stdin()
    with tempfile.TemporaryDirectory(prefix="vllm_", ignore_cleanup_errors=True) as directory:
        try:
            serve(options, servers, directory)
        except (Ended, OSError, ValueError) as error:
            print(f"serve.py: {error}", file=sys.stderr)
        finally:
            for server in servers:
                server.kill()
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
