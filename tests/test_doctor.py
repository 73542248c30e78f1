"""scripts/doctor.py, by itself and as `bash scripts/setup.sh --check`: what is wrong is named, with its fix."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

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


def test_wrong_and_missing_pins_are_named(tmp_path):
    file = tmp_path / "requirements-cpu.txt"
    file.write_text('# a word\ntyro==0.0.1\nnosuchpackage==2.0\npytest==1; sys_platform == "plan9"\n')
    assert doctor.pins(file) == [("tyro", "0.0.1"), ("nosuchpackage", "2.0")]
    state, _, said, fix = doctor.packages(doctor.pins(file), file.name)
    assert state == "FAIL"
    assert f"tyro is {doctor.installed('tyro')}, not 0.0.1" in said and "nosuchpackage is missing, not 2.0" in said
    assert fix == "bash scripts/setup.sh"

    file.write_text(f"tyro=={doctor.installed('tyro')}\n")
    assert doctor.packages(doctor.pins(file), file.name).state == "ok"


def test_torch_of_the_cpu_index_is_as_pinned(monkeypatch):
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert doctor.packages([("torch", "2.13.0")], "requirements.txt").state == "ok"
    assert "torchvision" in doctor.packages([("torch", "2.13.0")], "requirements-cpu.txt").fix


def test_python_too_old_or_without_venv(monkeypatch):
    assert doctor.python_version().state == "ok"
    monkeypatch.setattr(doctor.sys, "base_prefix", sys.prefix)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert doctor.python_version().state == "FAIL" and "-venv" in doctor.python_version().fix
    monkeypatch.setattr(doctor.sys, "version_info", (3, 9, 2))
    assert "3.11 to 3.14" in doctor.python_version().said


@pytest.mark.skipif(sys.platform != "linux", reason="needs LD_PRELOAD")
def test_missing_preloads_are_named():
    library = next(Path(sys.prefix).glob("lib/libiomp5.so"), None)
    if library is None:
        pytest.skip("no Intel OpenMP is installed")
    ask = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from scripts import doctor\n"
    ask += "for one in doctor.preloads(open('/proc/self/maps').read(), 'x86_64'): print(*one)"
    said = {}
    for preload in (str(library), ""):
        env = os.environ | {"LD_PRELOAD": preload, "OMP_NUM_THREADS": "2"}
        said[preload] = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True).stdout
        assert "OMP_NUM_THREADS 2" in said[preload] and "WARN malloc the system's" in said[preload]
    assert said[str(library)].startswith("ok OpenMP Intel's is preloaded")
    assert said[""].startswith("WARN OpenMP Intel's is not preloaded") and "source scripts/setup.sh" in said[""]


@pytest.mark.parametrize(
    "machine, flags, dtype, word",
    [
        ("x86_64", "avx2 avx512f", "float32", "emulated"),
        ("x86_64", "avx2 bf16", "float32", "emulated"),  # ARM's name
        ("x86_64", "avx2 avx512f avx512_bf16", "bfloat16", "avx512_bf16"),
        ("x86_64", "avx2 amx_bf16 amx_tile", "bfloat16", "amx_bf16"),
        ("aarch64", "asimd bf16", "bfloat16", "bf16"),
        ("aarch64", "asimd fphp", "float32", "emulated"),
        ("arm64", "", "float32", "emulated"),
    ],
)
def test_processor_means_a_dtype(machine, flags, dtype, word):
    finding, found = doctor.processor(set(flags.split()), machine)
    assert (finding.state, found) == ("ok", dtype)
    assert word in finding.said and f"{dtype} is the faster" in finding.said


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processor_without_avx2_has_no_vllm():
    finding, dtype = doctor.processor({"sse4_2"}, "x86_64")
    assert (finding.state, finding.fix, dtype) == ("WARN", "--rollout_backend transformers", "float32")


@pytest.mark.parametrize("driver, state", [("470.57.02", "too old"), ("580.65.06", "finds no GPU")])
def test_gpu_driver_is_held_against_torchs_cuda(tmp_path, driver, state):
    program(tmp_path / "bin" / "nvidia-smi", f"echo {driver}")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "class version: cuda = '13.0'\nclass cuda: is_available = lambda: False"
    )
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    status, said = lines(sys.executable, str(ROOT / "scripts" / "doctor.py"), PATH=path, PYTHONPATH=str(tmp_path))
    assert status == 1
    assert said["GPU"].startswith(f"FAIL driver {driver}") and state in said["GPU"] and "CUDA 13.0" in said["GPU"]
    assert "requirements.txt" in said["packages"]  # those of a machine with a GPU
    assert ("install NVIDIA's driver 580 or newer" in said["GPU"]) == (driver == "470.57.02")
    assert said["compiler"] and said["network"]  # are asked for on such a machine


def test_gpu_that_works_and_torch_for_the_cpu():
    assert doctor.gpu("470.57.02", "13.0 True True").state == "ok"  # with NVIDIA's package of forward compatibility
    assert doctor.gpu("525.60.13", "12.8 False False").fix.startswith("see CUDA_VISIBLE_DEVICES")
    assert "build for the CPU" in doctor.gpu("580.65.06", "None False False").said
    assert "--model_dtype float32" in doctor.gpu("580.65.06", "12.8 True False").said


def test_broken_driver_is_named(tmp_path, monkeypatch):
    program(tmp_path / "nvidia-smi", "echo could not communicate with the NVIDIA driver; exit 9")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert doctor.driver_version() == ("", "could not communicate with the NVIDIA driver")


def test_a_compiler_and_pythons_header_are_asked_for(tmp_path, monkeypatch):
    """Triton builds a C program for each kernel: without it flex attention was told as "does not run here"."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    state, _, said, fix = doctor.compiler()
    assert state == "FAIL" and "no gcc or clang and no " in said and "Python.h" in said and "build-essential" in fix
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "clang" else None)
    assert "gcc" not in doctor.compiler().said and doctor.compiler().state == "FAIL"
    (tmp_path / "Python.h").touch()
    assert doctor.compiler().state == "ok" and "/usr/bin/clang" in doctor.compiler().said


@pytest.mark.parametrize(
    "address, interface, state, word",
    [
        ("127.0.1.1", None, "WARN", "several nodes would not meet"),
        ("127.0.1.1", "eth0", "ok", "GLOO_SOCKET_IFNAME eth0"),
        ("10.0.0.2", None, "ok", "node-1, means 10.0.0.2"),
        ("10.0.0.2", "ib7", "FAIL", "GLOO_SOCKET_IFNAME is ib7, and there is no such interface"),
        (None, None, "WARN", "means nothing"),
    ],
)
def test_a_host_that_other_nodes_cannot_reach_is_named(monkeypatch, address, interface, state, word):
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
    assert found.state == state and word in found.said, found
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
