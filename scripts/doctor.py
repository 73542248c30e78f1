"""Check Python, packages, CPU or GPU, disk and engine: a line for each, with a fix for each problem.

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
import re
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
TIMEOUT_S = 300.0  # of a program
INSTALL = "bash scripts/setup.sh"
AFRESH = f"rm -rf .venv; {INSTALL}"


class Finding(NamedTuple):
    """state: ok, WARN or FAIL. fix: a line, for the other two."""

    state: str
    what: str
    said: str
    fix: str = ""


def run(*command: str) -> tuple[bool, str]:
    """(whether a program ran and succeeded, what it printed; after a failure the last line that names an error, else
    the last line: warnings at a program's exit come after its error)."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S)
    except (subprocess.TimeoutExpired, OSError) as error:
        return False, str(error)
    if done.returncode == 0:
        return True, done.stdout.strip()
    lines = (done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}").splitlines()
    errors = [line for line in lines if "Error" in line]
    return False, (errors or lines)[-1]


def python_version() -> Finding:
    said = f"{platform.python_version()} ({sys.executable})"
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        return Finding("FAIL", "Python", f"{said}; 3.11 to 3.14 are known", f"PYTHON=/path/to/python3.11 {INSTALL}")
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


def processor() -> tuple[Finding, str]:
    """(the finding, the dtype in which this processor is faster)."""
    machine = platform.machine()
    file = Path("/proc/cpuinfo")
    words = file.read_text().split() if file.exists() else ["avx2"]  # its flags among others
    fast = sorted({"avx512_bf16", "amx_bf16", "bf16"}.intersection(words))
    dtype = "bfloat16" if fast else "float32"
    why = f"{', '.join(fast)}: products of bfloat16" if fast else "no products of bfloat16, which would be emulated"
    said = f"{machine}, {os.cpu_count()} cores; {why}: {dtype} is the faster, which --model_dtype auto takes"
    if machine == "x86_64" and "avx2" not in words:
        said += "; no AVX2, which vLLM needs"
        return Finding("WARN", "processor", said, "--rollout_backend transformers"), dtype
    return Finding("ok", "processor", said), dtype


def openmp() -> Finding:
    threads = f"OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}"
    if "libiomp5" in Path("/proc/self/maps").read_text() or platform.machine() != "x86_64":
        return Finding("ok", "OpenMP", f"Intel's is preloaded where it has a build, {threads}")
    said = f"Intel's is not preloaded in this shell, {threads}: with torch's a step took 1.5 times as long"
    return Finding("WARN", "OpenMP", said, "source scripts/setup.sh (demo.sh and test.sh do it themselves)")


def sandbox() -> Finding:
    """The sandbox for programs in rewards. Only verifiers that run programs need it."""
    works, said = run(sys.executable, str(ROOT / "scripts" / "parts" / "sandbox.py"))
    state = "ok" if works and said.endswith("nothing that was tried") else "WARN"
    said = re.sub(" +", " ", said.replace("\n  ", ",").replace("\n", "; "))
    return Finding(state, "sandbox", said, "code rewards are refused; --allow_unsafe_code where that is fine")


def driver_version() -> tuple[str, str]:
    """(version of the NVIDIA driver, "" without a GPU that works; what nvidia-smi says then, if it is there)."""
    works, said = run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if works and said[:1].isdigit():
        return said.partition("\n")[0].strip(), ""
    return "", said if shutil.which("nvidia-smi") else ""


def gpu(driver: str, torch_says: str) -> Finding:
    """torch_says: CUDA version of the build, whether it can use a GPU, whether that has bfloat16; see TORCH_SAYS."""
    cuda, usable, bfloat16 = torch_says.split()
    if cuda == "None":
        return Finding("FAIL", "GPU", f"driver {driver}, but torch is a build for the CPU", AFRESH)
    if usable == "True":
        dtype = "bfloat16" if bfloat16 == "True" else "float32 (bfloat16 would be emulated: --model_dtype float32)"
        return Finding("ok", "GPU", f"driver {driver}, CUDA {cuda} of torch can use it; {dtype}")
    said = f"driver {driver}, but torch with CUDA {cuda} finds no GPU"
    fix = "CUDA 13 wants NVIDIA's driver 580 or newer, then a reboot; see CUDA_VISIBLE_DEVICES; in docker --gpus all"
    return Finding("FAIL", "GPU", said, fix)


TORCH_SAYS = """
import torch
usable = torch.cuda.is_available()
print(torch.version.cuda, usable, usable and torch.cuda.is_bf16_supported(including_emulation=False))
"""


def compiler() -> Finding:
    """What Triton needs for the small C program that starts each of its kernels."""
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not found or not header.exists():
        said = f"there is no {header if found else 'gcc or clang'}: no Triton kernel starts, so neither flex attention "
        said += "nor vLLM"
        packages = f"build-essential python3.{sys.version_info.minor}-dev"
        return Finding("FAIL", "compiler", said, f"apt-get install {packages} (Debian, Ubuntu)")
    return Finding("ok", "compiler", f"{found}, {header}")


def disk(need: int, what: str) -> Finding:
    free = shutil.disk_usage(ROOT).free / GIB
    said = f"{free:.1f} GiB free, {need} needed {what}"
    return Finding("ok" if free >= need else "FAIL", "disk", said, "make room, or clone to a larger disk")


def memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    fix = "a larger machine; or a smaller model: scripts/data/make_tiny_model.py"
    return Finding("ok" if total >= 12 else "WARN", "memory", f"{total:.1f} GiB; the demo takes 12", fix)


def engine(backend: str, dtype: str) -> Finding:
    """A token of a tiny random model by the engine that training uses, in a process of its own."""
    works, said = run(sys.executable, str(Path(__file__).resolve()), "one-token", backend, dtype)
    what = "vLLM" if backend == "vllm" else backend
    if works:
        return Finding("ok", what, said.splitlines()[-1])
    fix = f"{AFRESH}; until then --rollout_backend transformers" if backend == "vllm" else AFRESH
    return Finding("FAIL", what, f"no token: {said}", fix)


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
            works, said = run(sys.executable, "-c", TORCH_SAYS)
            dtype = "bfloat16" if works and said.endswith("True") else dtype
            yield gpu(driver, said) if works else Finding("FAIL", "GPU", said, AFRESH)
        yield compiler()
    else:
        found, dtype = processor()
        yield found
        if sys.platform == "linux":
            yield openmp()
        if why_none:
            fix = "install or repair NVIDIA's driver, or train on the CPU as it is"
            yield Finding("WARN", "GPU", f"nvidia-smi finds none: {why_none}", fix)
    yield sandbox()
    # .venv is 4.1 GiB on a CPU, and pip unpacks beside it what it copies there; for a GPU it is an estimate
    yield disk(2, "by the demo") if has_torch else disk(20 if driver else 7, "to install")
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
