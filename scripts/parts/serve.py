"""vLLM servers of a model on this machine, beside a run: a solver for its rewards.

They speak OpenAI's protocol on the loopback device, to whoever has the key. Each ends with Servers.stop, and when the
process that started it is gone, for whatever reason.
"""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import torch
from transformers import AutoConfig

import utils
from scripts.parts import hub, solver

START_TIMEOUT_S = 1200.0  # a large model may have to be read from a slow disk
# torchrun's variables describe the process that started this one. VLLM_SERVER_DEV_MODE opens endpoints without a key.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
NOT_FOR_SERVERS = (*TORCHRUN, "VLLM_SERVER_DEV_MODE")
DEFAULTS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2"}  # GiB
# The command, and a shell beside it in its process group: that kills the group once stdin closes, which the kernel does
# when the run is gone.
WITH_STDIN = 'exec 3<&0; (read -r _ <&3; kill -9 0) & exec "$@" </dev/null 3<&-'


@dataclass(frozen=True)
class Servers:
    """vLLM servers of a model, for OpenAI clients: their processes by their logs."""

    base_urls: list[str]
    api_key: str
    processes: dict[Path, subprocess.Popen]

    def problem(self) -> str:
        """The end of the log of a server that has ended, else ""."""
        for log, process in self.processes.items():
            if process.poll() is not None:
                last_words = log.read_text(errors="replace")[-3000:].strip()
                return f"a vLLM server has ended, its log is {log}: {last_words}"
        return ""

    def stop(self) -> None:
        for process in self.processes.values():
            process.communicate()  # closes stdin


def start_servers(
    model: str, log_dir: Path, name: str = "solver", num_engines: int = 1, devices_in_use: int = 0, **flags: Any
) -> Servers:
    """Start vLLM servers of a model, with the flags of server_command, and wait until they answer. Logs are
    log_dir/name_*.log. Raises UserError if one does not come up."""
    directory = tempfile.mkdtemp(prefix="vllm_")
    utils.sweep(directory)
    servers = Servers([], secrets.token_hex(16), {})
    env = DEFAULTS | {name: value for name, value in os.environ.items() if not name.startswith(NOT_FOR_SERVERS)}
    env |= {"VLLM_API_KEY": servers.api_key, "TMPDIR": directory, "VLLM_RPC_BASE_PATH": directory}
    command = server_command(model, **flags)
    for i, devices in enumerate(server_devices(num_engines, devices_in_use)):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        log = log_dir / f"{name}_{i}.log"
        own = env | {"CUDA_VISIBLE_DEVICES": devices}
        with log.open("w") as out:
            servers.processes[log] = subprocess.Popen(
                ["sh", "-c", WITH_STDIN, "sh", *command, f"--port={port}"],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env=own,
                start_new_session=True,  # a process group of its own; and Ctrl-C is for the run to handle
            )
        servers.base_urls.append(f"http://127.0.0.1:{port}/v1")
    try:
        wait_until_up(servers)
    except BaseException:
        servers.stop()
        raise
    return servers


def wait_until_up(servers: Servers) -> None:
    """Raises UserError if a server ends, or has not answered after START_TIMEOUT_S."""
    deadline = time.monotonic() + START_TIMEOUT_S
    for url in servers.base_urls:
        while not is_up(url, servers.api_key):
            problem = servers.problem()
            utils.need(problem == "", problem)
            utils.need(time.monotonic() < deadline, f"{url}: no answer after {START_TIMEOUT_S:.0f} s, see its log")
            time.sleep(0.2)


def is_up(url: str, key: str) -> bool:
    """Whether the server answers to its key: another program may have taken the port."""
    try:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx2.get(f"{url}/models", headers=headers, timeout=5, trust_env=False).is_success
    except httpx2.HTTPError:
        return False


def server_devices(num: int, devices_in_use: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each of `num` servers: the devices after those in use; the last one may be shared."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    if not devices:
        return [""] * num
    last = len(devices) - 1
    return [devices[min(devices_in_use + i, last)] for i in range(num)]


def server_command(
    model: str,
    max_model_len: int,
    model_dtype: str,
    max_num_seqs: int = 256,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> list[str]:
    """A server's command line without its port. The key is no part of it. Raises OSError or ValueError if the model
    cannot be found."""
    directory = hub.model(model)  # of which the server asks the hub nothing
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    positions = config.get_text_config().max_position_embeddings
    length = min(max_model_len, positions)
    # not `vllm serve`, which refuses to start where vLLM is installed as vllm-cpu
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enable-prefix-caching"]
    command += [f"--model={directory}", f"--served-model-name={model}", f"--dtype={model_dtype}", f"--seed={seed}"]
    command += ["--trust-remote-code"] if trust_remote_code else []
    command += [f"--max-model-len={length}", f"--max-num-seqs={max_num_seqs}", "--gpu-memory-utilization=0.9"]
    command += ["--generation-config=vllm"]  # else the model's own sampling defaults count
    command += ["--host=127.0.0.1", "--uvicorn-log-level=warning"]  # no line per request
    if not torch.cuda.is_available():  # as utils.VLLMEngine
        command += ["--enforce-eager", "--no-enable-chunked-prefill", "--block-size=32"]
        command += [f"--max-num-batched-tokens={max(8192, length)}"]
    return command


def start_solver(args: Any, run_dir: Path, world: Any) -> tuple[Servers | None, Any]:
    """Have the first rank start the solver's servers; returns them, or None on other ranks, and the flags with their
    addresses. All ranks that score. Raises UserError."""
    started: list[Servers] = []

    def start_here() -> tuple[str, str]:
        started.append(servers_of_flags(args, run_dir))
        return ",".join(started[0].base_urls), started[0].api_key

    base_urls, os.environ["SOLVER_API_KEY"] = utils.on_main(start_here, world)
    servers = started[0] if started else None
    return servers, replace(args, solver_base_url=base_urls)


def servers_of_flags(args: Any, run_dir: Path) -> Servers:
    """Start the solver's servers on this machine. Raises UserError."""
    gpus = torch.cuda.device_count()
    in_use = 1 if args.single_gpu_mode else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    utils.need(
        gpus == 0 or gpus >= in_use + args.solver_num_engines,
        f"--solver_num_engines {args.solver_num_engines}: each takes a GPU of its own, and {in_use} of {gpus} are the "
        "run's: lower it, or start a server with a smaller share of a GPU yourself and give --solver_base_url",
    )
    return start_servers(
        args.solver_model_name_or_path,
        run_dir,
        num_engines=args.solver_num_engines,
        devices_in_use=in_use,
        max_model_len=args.max_prompt_token_length + args.response_length + args.solver_response_length + 512,
        max_num_seqs=solver.MAX_CONCURRENCY,
        model_dtype=args.model_dtype,
        seed=args.seed,
        trust_remote_code=args.trust_remote_code,
    )
