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
ENGINE_TIMEOUT_S = 300.0
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
    """torch_says: CUDA version of the build, and whether it can use a GPU; see TORCH_SAYS."""
    cuda, usable = torch_says.split()
    if cuda == "None":
        return Finding("FAIL", "GPU", f"driver {driver}, but torch is a build for the CPU", AFRESH)
    if usable == "True":
        return Finding("ok", "GPU", f"driver {driver}, CUDA {cuda} of torch can use it")
    said = f"driver {driver}, but torch with CUDA {cuda} can use no GPU"
    fix = "a newer driver (580 for CUDA 13), then reboot; CUDA_VISIBLE_DEVICES; in docker --gpus all"
    return Finding("FAIL", "GPU", said, fix)


TORCH_SAYS = "import torch; print(torch.version.cuda, torch.cuda.is_available())"


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


def engine(backend: str) -> Finding:
    """A token of a tiny random model by the engine that training uses, in a process of its own."""
    ended = run(sys.executable, str(Path(__file__).resolve()), "one-token", backend, seconds=ENGINE_TIMEOUT_S)
    what = "vLLM" if backend == "vllm" else backend
    if ended.status == 0:
        return Finding("ok", what, ended.output.splitlines()[-1])
    fix = f"{AFRESH}; until then --rollout_backend transformers" if backend == "vllm" else AFRESH
    return Finding("FAIL", what, f"no token: {last_line(ended)}", fix)


def one_token(backend: str) -> None:
    """In a process of its own: sample a token and say so, with the dtype that a run takes here."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import utils  # isort: skip  (before torch)
    import grpo
    from scripts.data.make_tiny_model import make_tiny_model
    from scripts.parts import plan

    with tempfile.TemporaryDirectory() as directory:
        flags = ["--model_name_or_path", str(make_tiny_model(directory)), "--vllm_enforce_eager"]
        args = utils.parse_args(grpo.Args, [*flags, "--rollout_backend", backend, "--response_length", "16"])
        dtype, why = plan.choose_dtype(args)
        args = utils.replace(args, model_dtype=dtype)
        sampler = utils.make_engine(args, utils.load_tokenizer(args), utils.init_distributed(), 1)
        (made,) = sampler.generate([utils.Request((5, 6, 7), seed=0, temperature=1.0, max_tokens=1)])
        print(f"sampled token {made.token_ids[0]} in {dtype}: {why}")
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
        if has_torch:
            ended = run(sys.executable, "-c", TORCH_SAYS)
            yield gpu(driver, ended.output) if ended.status == 0 else Finding("FAIL", "GPU", last_line(ended), AFRESH)
        yield compiler()
        yield hybrids()
    elif why_none:
        fix = "install or repair NVIDIA's driver, or train on the CPU as it is"
        yield Finding("WARN", "GPU", f"nvidia-smi finds none: {why_none}", fix)
    yield sandbox()
    if has_torch:
        has_vllm = any(name.startswith("vllm") for name, _ in wanted)
        if not has_vllm:
            said = f"has no build for {sys.platform}"
            yield Finding("WARN", "vLLM", said, "add --rollout_backend transformers to every command")
        yield engine("vllm" if has_vllm else "transformers")


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
