"""Show what this machine has and lacks for training: a line for each matter, with its fix.

    bash scripts/setup.sh --check    # the Python of .venv, else the one that would make it
    python scripts/doctor.py         # this Python

States are ok, WARN (works, but slower or without something) and FAIL (does not work). The exit status is 1 after a
FAIL, else 0. The program needs the standard library only, as it runs before anything is installed. The last check runs
the engine itself.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(ROOT)
GIB = 2**30
# .venv is 4.1 GiB on a CPU, and pip unpacks beside it what it copies there; for a GPU it is an estimate
INSTALL_GIB = {"requirements-cpu.txt": 7, "requirements.txt": 20}
RUN_GIB = 2  # the demo's model and run are 0.6
DEMO_MEMORY_GIB = 12  # the demo's header
ENGINE_TIMEOUT_S = 300.0
# docs.nvidia.com/deploy/cuda-compatibility, minor version compatibility: {CUDA's major version: oldest driver branch}
DRIVERS = {11: 450, 12: 525, 13: 580}
INSTALL = "bash scripts/setup.sh"
AFRESH = f"rm -rf .venv; {INSTALL}"


class Finding(NamedTuple):
    """state: ok, WARN or FAIL. fix: a line, for the other two."""

    state: str
    what: str
    said: str
    fix: str = ""


class Ended(NamedTuple):
    """A program that ran: exit status (None: it could not be started or took too long), what it wrote."""

    status: int | None
    output: str
    error: str


def run(*command: str, seconds: float = 120.0, cwd: Path = ROOT) -> Ended:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired:
        return Ended(None, "", f"no end within {seconds:.0f} s")
    except OSError as error:
        return Ended(None, "", str(error))
    return Ended(done.returncode, done.stdout.strip(), done.stderr.strip())


def last_line(ended: Ended) -> str:
    """The last line that names an error, else the last line: warnings at a program's exit come after its error."""
    lines = (ended.error or ended.output or f"status {ended.status}").splitlines()
    errors = [line for line in lines if "Error" in line]
    return (errors or lines)[-1]


def python_version() -> Finding:
    said = f"{platform.python_version()} ({sys.executable})"
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        return Finding("FAIL", "Python", f"{said}; 3.11 to 3.14 are known", f"PYTHON=/path/to/python3.11 {INSTALL}")
    if sys.prefix == sys.base_prefix and importlib.util.find_spec("ensurepip") is None:
        fix = f"apt-get install python3.{sys.version_info.minor}-venv (Debian, Ubuntu)"
        return Finding("FAIL", "Python", f"{said} has no venv module to install with", fix)
    return Finding("ok", "Python", said)


def pins(requirements: Path) -> list[tuple[str, str]]:
    """(name, version) of each line of the file that is meant for this machine."""
    from packaging.requirements import Requirement

    pinned = []
    for line in requirements.read_text().splitlines():
        if line and not line.startswith("#"):
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate():
                pinned.append((wanted.name, str(wanted.specifier).removeprefix("==")))
    return pinned


def installed(name: str) -> str | None:
    """Version without its local part (+cpu), None where the package is missing."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def packages(wanted: list[tuple[str, str]], name: str) -> Finding:
    found = {package: installed(package) for package, _ in wanted}
    if not any(found.values()):
        return Finding("FAIL", "packages", f"nothing of {name} is installed yet", INSTALL)
    wrong = [f"{p} is {found[p] or 'missing'}, not {pin}" for p, pin in wanted if found[p] != pin]
    if wrong:
        return Finding("FAIL", "packages", f"{'; '.join(wrong)} ({name})", INSTALL)
    return Finding("ok", "packages", f"{len(wanted)} as pinned in {name}")


def cpu_flags() -> set[str]:
    """Features as the kernel names them (x86: flags, ARM: Features)."""
    flags: set[str] = set()
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags.update(line.partition(":")[2].split())
    return flags


def processor(flags: set[str], machine: str) -> tuple[Finding, str]:
    """(the finding, the dtype in which this processor is faster)."""
    is_x86 = machine == "x86_64"
    fast = sorted(flags & ({"avx512_bf16", "amx_bf16"} if is_x86 else {"bf16"}))
    dtype = "bfloat16" if fast else "float32"
    why = f"{', '.join(fast)}: products of bfloat16" if fast else "no products of bfloat16, which would be emulated"
    said = f"{machine}, {os.cpu_count()} cores; {why}: {dtype} is the faster, which --model_dtype auto takes"
    if is_x86 and sys.platform == "linux" and "avx2" not in flags:
        said += "; no AVX2, which vLLM needs"
        return Finding("WARN", "processor", said, "--rollout_backend transformers"), dtype
    return Finding("ok", "processor", said), dtype


def openmp(maps: str, machine: str) -> Finding:
    """maps: the libraries of this process, as /proc/self/maps names them."""
    threads = f"OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}"
    if "libiomp5" in maps or machine != "x86_64":
        return Finding("ok", "OpenMP", f"Intel's is preloaded where it has a build, {threads}")
    said = f"Intel's is not preloaded in this shell, {threads}: with torch's a step took 1.5 times as long"
    return Finding("WARN", "OpenMP", said, "source scripts/setup.sh (demo.sh and test.sh do it themselves)")


def hybrids() -> Finding:
    """On a GPU, whether the kernels are there with which transformers runs recurrent and convolutional layers."""
    missing = [name for name in ("flash-linear-attention", "causal-conv1d") if installed(name) is None]
    if not missing:
        return Finding("ok", "hybrids", "flash-linear-attention and causal-conv1d are installed")
    said = f"{' and '.join(missing)}: not installed, so models with recurrent layers run a slow reference"
    return Finding(
        "WARN", "hybrids", said, f"{sys.executable} -m pip install {' '.join(missing)} (only for such models)"
    )


def sandbox() -> Finding:
    """The sandbox for programs in rewards. Only verifiers that run programs need it."""
    ended = run(sys.executable, str(ROOT / "scripts" / "parts" / "sandbox.py"))
    refused = "code rewards are refused; --allow_unsafe_code where that is fine"
    if ended.status != 0:
        return Finding("WARN", "sandbox", last_line(ended), refused)
    force, _, leaks = ended.output.removeprefix("in force: ").partition("open:")
    leaks = ", ".join(leaks.split("\n")).strip()
    layers = ", ".join(line.strip() for line in force.strip().splitlines())
    if leaks != "nothing that was tried":
        return Finding("WARN", "sandbox", f"{layers}; open: {leaks}", refused)
    return Finding("ok", "sandbox", layers)


def driver_version() -> tuple[str, str]:
    """(version of the NVIDIA driver, "" without a GPU that works; what nvidia-smi says then, if it is there)."""
    ended = run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", seconds=60)
    version = ended.output.partition("\n")[0].strip()
    if ended.status == 0 and version[:1].isdigit():
        return version, ""
    return "", last_line(ended) if shutil.which("nvidia-smi") else ""


def gpu(driver: str, torch_says: str) -> Finding:
    """torch_says: CUDA version of the build, whether it can use a GPU, whether that has bfloat16; see TORCH_SAYS."""
    cuda, usable, bfloat16 = torch_says.split()
    if cuda == "None":
        return Finding("FAIL", "GPU", f"driver {driver}, but torch is a build for the CPU", AFRESH)
    if usable == "True":
        dtype = "bfloat16" if bfloat16 == "True" else "float32 (bfloat16 would be emulated: --model_dtype float32)"
        return Finding("ok", "GPU", f"driver {driver}, CUDA {cuda} of torch can use it; {dtype}")
    oldest = DRIVERS.get(int(cuda.partition(".")[0]), 0)
    if int(driver.partition(".")[0]) < oldest:
        said = f"driver {driver} is too old for CUDA {cuda} of torch"
        return Finding("FAIL", "GPU", said, f"install NVIDIA's driver {oldest} or newer, then reboot")
    said = f"driver {driver} would do for CUDA {cuda} of torch, but torch finds no GPU"
    return Finding("FAIL", "GPU", said, "see CUDA_VISIBLE_DEVICES; reboot after a new driver; in docker --gpus all")


TORCH_SAYS = """
import torch
usable = torch.cuda.is_available()
print(torch.version.cuda, usable, usable and torch.cuda.is_bf16_supported(including_emulation=False))
"""


def compiler() -> Finding:
    """What Triton needs for the small C program that starts each of its kernels."""
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    lacking = []
    if not found:
        lacking.append("gcc or clang")
    if not header.exists():
        lacking.append(str(header))
    if lacking:
        said = f"there is no {' and no '.join(lacking)}: no Triton kernel starts, so neither flex attention nor vLLM"
        packages = f"build-essential python3.{sys.version_info.minor}-dev"
        return Finding("FAIL", "compiler", said, f"apt-get install {packages} (Debian, Ubuntu)")
    return Finding("ok", "compiler", f"{found}, {header}")


def disk(requirements: Path, anything: bool) -> Finding:
    free = shutil.disk_usage(ROOT).free / GIB
    need = RUN_GIB if anything else INSTALL_GIB[requirements.name]
    said = f"{free:.1f} GiB free, {need} needed {'by the demo' if anything else 'to install'}"
    return Finding("ok" if free >= need else "FAIL", "disk", said, "make room, or clone to a larger disk")


def memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    said = f"{total:.1f} GiB; the demo takes {DEMO_MEMORY_GIB}"
    fix = "a larger machine; or a smaller model: scripts/data/make_tiny_model.py"
    return Finding("ok" if total >= DEMO_MEMORY_GIB else "WARN", "memory", said, fix)


def engine(backend: str, dtype: str, seconds: float = ENGINE_TIMEOUT_S) -> Finding:
    """A token of a tiny random model by the engine that training uses, in a process of its own."""
    ended = run(sys.executable, str(Path(__file__).resolve()), "one-token", backend, dtype, seconds=seconds)
    what = "vLLM" if backend == "vllm" else backend
    if ended.status == 0:
        return Finding("ok", what, ended.output.splitlines()[-1])
    fix = f"{AFRESH}; until then --rollout_backend transformers" if backend == "vllm" else AFRESH
    return Finding("FAIL", what, f"no token: {last_line(ended)}", fix)


def one_token(backend: str, dtype: str) -> None:
    """In a process of its own: sample a token and say so."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import utils  # isort: skip  (before torch)
    import grpo
    from scripts.data.make_tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory() as directory:
        flags = ["--model_name_or_path", str(make_tiny_model(directory)), "--model_dtype", dtype]
        flags += ["--rollout_backend", backend, "--response_length", "16", "--vllm_enforce_eager"]
        args = utils.parse_args(grpo.Args, flags)
        sampler = utils.make_engine(args, utils.load_tokenizer(args), utils.init_distributed(), 1)
        (made,) = sampler.generate([utils.Request((5, 6, 7), seed=0, temperature=1.0, max_tokens=1)])
        print(f"sampled token {made.token_ids[0]} in {dtype}")
        sampler.close()
    utils.exit_process()


def findings() -> Iterator[Finding]:
    driver, why_none = driver_version()
    requirements = ROOT / ("requirements.txt" if driver else "requirements-cpu.txt")
    has_torch = importlib.util.find_spec("torch") is not None
    yield python_version()
    # what reads the pins is itself installed by them
    wanted = pins(requirements) if importlib.util.find_spec("packaging") else []
    yield packages(wanted, requirements.name)
    if driver:
        dtype = "float32"
        if has_torch:
            ended = run(sys.executable, "-c", TORCH_SAYS)
            dtype = "bfloat16" if ended.output.endswith("True") else dtype
            yield gpu(driver, ended.output) if ended.status == 0 else Finding("FAIL", "GPU", last_line(ended), AFRESH)
        yield compiler()
        yield hybrids()
    else:
        said, dtype = processor(cpu_flags(), platform.machine())
        yield said
        if sys.platform == "linux":
            yield openmp(Path("/proc/self/maps").read_text(), platform.machine())
        if why_none:
            fix = "install or repair NVIDIA's driver, or train on the CPU as it is"
            yield Finding("WARN", "GPU", f"nvidia-smi finds none: {why_none}", fix)
    yield sandbox()
    yield disk(requirements, has_torch)
    yield memory()
    if has_torch:
        has_vllm = any(name.startswith("vllm") for name, _ in wanted)
        if not has_vllm:
            said = f"has no build for {sys.platform}"
            yield Finding("WARN", "vLLM", said, "add --rollout_backend transformers to every command")
        yield engine("vllm" if has_vllm else "transformers", dtype)


def main() -> int:
    if sys.argv[1:2] == ["pins"]:  # setup.sh asks whether it has anything to do
        found = packages(pins(ROOT / sys.argv[2]), sys.argv[2])
        print(found.said)
        return int(found.state == "FAIL")
    if "--help" in sys.argv:
        print(__doc__)
        return 0
    failed = False
    for state, what, said, fix in findings():
        print(f"{state:4} {what:10} {said}" + (f"\n{'':16}fix: {fix}" if state != "ok" else ""), flush=True)
        failed |= state == "FAIL"
    return int(failed)


if __name__ == "__main__":
    sys.exit(one_token(*sys.argv[2:]) if sys.argv[1:2] == ["one-token"] else main())
