"""Each check of proof/gpu_hour.py passes what is healthy and fails a stub that is broken, without a GPU or a run."""

import json
import shlex

import pytest

from scripts.parts import windows
from scripts.proof import gpu_hour

STEP = {
    "optim/grad_norm": 0.5,
    "optim/nonfinite_updates": 0.0,
    "debug/vllm_vs_local_logprob_diff_mean": 0.001,
    "val/num_steps_off_policy": 1.0,
    "val/num_learner_tokens": 1000.0,
    "learner_mfu": 0.5,
    "time/training": 1.0,
    "val/sequence_lengths": 16.0,
    "memory/gpu_allocated_gib": 10.0,
}
STALE = "GapError: on this step's rollouts: mean |learner - engine| logprob 0.3 (max 2)"


class Stub(gpu_hour.Hour):
    """An hour whose programs are played: each writes the metrics of a healthy run, but for what `broken` changes."""

    broken = ""
    commands: list[str]

    def run(self, name, command):
        self.commands.append(shlex.join(command))
        status, output = self.play(name, command)
        (self.out / f"{name}.log").write_text(output)
        return status, output

    def play(self, name, command):
        if "--exp_name" in command:
            return self.play_run(name, command)
        broken = self.broken == name
        if name.startswith("trl_"):
            seconds = 0.5 if broken else 100.0
            steps = [{"total_s": seconds, "generation_s": 0.2, "completion_tokens": 256}] * 6
            (self.out / "trl_steps.json").write_text(json.dumps({"steps": steps}))
            return int(self.broken == f"{name}:crash"), "CUDA error"
        if "--compare" in command:
            line = {"kernels": "head 64: logprobs 1", "head": "head float32: off by 1", "host": "host ms: 300"}[name]
            return 0, f"{line} {'DIFFERENT' if broken else 'ok'}\n"
        if name == "load":
            value = 0.2 if broken else 0.9
            found = {"sides": {"copy": {"seconds": 1.0}}, "ratios": {"sync": {"value": value}}}
            return 0, f"loading\n{json.dumps(found)}\n"
        return (1, "FAIL GPU no driver") if broken else (0, "ok")  # doctor.py, nvidia-smi

    def play_run(self, name, command):
        """A run. Some are to be broken on purpose: the engine is stale, the process is killed."""
        run = self.out / "runs" / command[command.index("--exp_name") + 1]
        run.mkdir(parents=True, exist_ok=True)
        (run / "args.json").write_text(json.dumps({"model_name_or_path": "m"}))
        file = run / "metrics.jsonl"
        steps = [self.step(name, number) for number in range(1, 21 if name == "real_model" else 7)]
        is_broken = self.broken.startswith(f"{name}:")
        how = self.broken.partition(":")[2] if is_broken else ""
        first = 0
        status, output = 0, "ready after 3.0 s\n"
        if "stale" in command and how != "unnoticed":
            status, output = 1, "CUDA error" if how == "another reason" else STALE
            steps = [] if how == "too early" else steps[:2]
        if "killed" in command and how != "not killed":
            status, output = 137, "Killed"
            steps = steps[:4]
        if "--resume" in command and how != "from the start":
            first = 4 if how == "a step is missing" else 3
        if how == "crash":
            status, output = 1, "CUDA error: an illegal memory access"
        if how == "short":
            steps = steps[:3]
        before = file.read_text().splitlines()[:3] if "--resume" in command and first else []
        lines = before + [json.dumps(step) for step in steps[first:]]
        file.write_text("".join(f"{line}\n" for line in lines))
        return status, output

    def step(self, name, number):
        step = STEP | {"training_step": number, "objective/scores": 5.0 if name != "real_model" else 0.4 * number}
        step["time/total"] = 1.0 + len(self.commands)  # no two runs take the same time
        faults = {
            "nan": {"optim/grad_norm": float("nan")},
            "skipped": {"optim/nonfinite_updates": 1.0},
            "zero gradient": {"optim/grad_norm": 0.0},
            "gap": {"debug/vllm_vs_local_logprob_diff_mean": 0.06},
            "gap is nan": {"debug/vllm_vs_local_logprob_diff_mean": float("nan")},
            "old": {"val/num_steps_off_policy": 2.0},
            "slow": {"learner_mfu": 0.1},
            "slower": {"time/training": 2.0},
            "large": {"memory/gpu_allocated_gib": 20.0},
            "other scores": {"objective/scores": 6.0},
            "other gradient": {"optim/grad_norm": 0.6},
            "other tokens": {"val/num_learner_tokens": 1100.0},
            "learns nothing": {"objective/scores": 5.0},
        }
        how = self.broken.removeprefix(f"{name}:")
        return step | faults.get(how, {}) if self.broken.startswith(f"{name}:") else step


@pytest.fixture
def hour(tmp_path, monkeypatch):
    """An hour of eight H100, tiny models."""
    monkeypatch.setattr(gpu_hour, "GPUS", 8)
    monkeypatch.setattr(gpu_hour, "device_name", lambda: "nvidia h100")
    monkeypatch.setattr(gpu_hour, "model", lambda hour, shape, layers: tmp_path / "model")
    monkeypatch.setattr(gpu_hour, "estimated_gib", lambda flags: 10.0)
    monkeypatch.setattr(gpu_hour, "has_trl", lambda: True)
    monkeypatch.setattr(gpu_hour.roofline, "shape_of", lambda name: None)
    monkeypatch.setattr(gpu_hour.roofline, "mfu", lambda *_: (0.34, {}))  # 0.5 of what a product reaches
    speed = {"flops_per_second": 7e14, "bytes_per_second": 2e12}
    monkeypatch.setattr(gpu_hour.machine, "device_speed", lambda *_: speed)
    made = Stub(tmp_path, True)
    made.commands = []
    return made


RUN = ("crash", "short", "nan", "skipped", "zero gradient")
SYNC = (*RUN, "gap", "gap is nan")
BROKEN = {
    "machine": ["machine", "topology", "clocks"],
    "kernels": ["kernels"],
    "head": ["head"],
    "host": ["host"],
    "load": ["load"],
    "cold_start": [f"cold_start:{how}" for how in (*RUN, "old")],
    "warm_start": [f"warm_start:{how}" for how in (*RUN, "old")],
    "drain": [f"drain:{how}" for how in (*RUN, "old")],
    "tensor_parallel": [f"tensor_parallel:{how}" for how in (*RUN, "old")],
    "synchronous": [f"synchronous:{how}" for how in SYNC],
    "sleep": [f"sleep:{how}" for how in SYNC],
    "sharded": [f"sharded:{how}" for how in SYNC],
    "stale": [f"stale:{how}" for how in ("unnoticed", "another reason", "too early")],
    "stale_fast": [f"stale_fast:{how}" for how in ("unnoticed", "another reason", "too early")],
    "resume": [
        "resume_killed:not killed",
        *(f"resume:{how}" for how in (*SYNC, "from the start", "a step is missing")),
    ],
    "synchronous_fast": [
        *(f"float32:{how}" for how in SYNC),
        *(f"float32_fast:{how}" for how in (*RUN, "other scores", "other gradient", "other tokens")),
    ],
    "mfu_small": ["sleep:slow"],
    "mfu_large": [f"mfu_large:{how}" for how in (*SYNC, "slow")],
    "compiled_large": [f"compiled_large:{how}" for how in (*SYNC, "slow", "slower")],
    "memory": ["warm_start:large"],
    "trl": ["trl_float32", "trl_bfloat16", "trl_float32:crash"],
    "real_model": [f"real_model:{how}" for how in ("crash", "short", "learns nothing")],
}
NEEDS = {"mfu_small": "sleep", "memory": "warm_start", "compiled_large": "mfu_large", "trl": "sleep"}


def result_of(hour, name):
    """The result of a check, after that of the check whose figures it takes."""
    for check in (NEEDS.get(name), name):
        if check:
            gpu_hour.make_check(hour, check, gpu_hour.CHECKS[check])
    return hour.result(name)


def give_a_real_model(hour, monkeypatch):
    """What check_real_model looks for."""
    monkeypatch.setattr(gpu_hour, "ROOT", hour.out)
    for file in ("data/addition/train.jsonl", "speaks/config.json"):
        (hour.out / file).parent.mkdir(parents=True)
        (hour.out / file).write_text("{}")
    hour.real_model = hour.out / "speaks"
    hour.tiny = False


def test_every_check_has_a_stub():
    assert set(BROKEN) == set(gpu_hour.CHECKS)


@pytest.mark.parametrize("name", BROKEN)
def test_a_check_passes_what_is_healthy_and_fails_each_stub(hour, name, monkeypatch):
    if name == "real_model":
        give_a_real_model(hour, monkeypatch)
    healthy = result_of(hour, name)
    assert healthy["passed"] is True, healthy
    for stub in BROKEN[name]:
        hour.broken = stub
        found = result_of(hour, name)
        assert found["passed"] is False, f"{stub}: {found}"
        assert found["said"], stub


@pytest.mark.parametrize("broken", [False, True])
def test_a_window_over_places_in_the_pack_fails_the_kernels(tmp_path, world, monkeypatch, capsys, broken):
    monkeypatch.setattr(gpu_hour.utils, "init_distributed", lambda: world)
    if broken:
        monkeypatch.setattr(windows, "positions", lambda shared, segments: [*range(shared + sum(segments))])
    gpu_hour.compare_kernels(tmp_path)
    whole, windowed = capsys.readouterr().out.splitlines()
    assert whole.startswith("head 64 float32 199 tokens: ") and whole.endswith(" ok")
    assert windowed.startswith("head 64 float32 199 tokens window 20: ")
    assert windowed.endswith(" DIFFERENT" if broken else " ok")


def test_a_slow_gpu_fails_the_machine(hour, monkeypatch):
    speed = {"flops_per_second": 3e14, "bytes_per_second": 2e12}
    monkeypatch.setattr(gpu_hour.machine, "device_speed", lambda *_: speed)
    assert "TFLOP/s of 989" in result_of(hour, "machine")["said"]


def test_a_result_of_another_kind_of_gpu_does_not_count(hour, monkeypatch):
    """Else TRL's step on one card is divided by ours on another."""
    result_of(hour, "sleep")
    assert hour.result("sleep")["passed"]
    monkeypatch.setattr(gpu_hour, "device_name", lambda: "nvidia h200")
    assert hour.result("sleep") is None
    assert gpu_hour.check_trl(hour).said == "sleep did not pass"


def test_the_page_has_topology_and_clocks(hour):
    result_of(hour, "machine")
    (hour.out / "topology.log").write_text("GPU0 NV18 GPU1")
    assert "GPU0 NV18 GPU1" in gpu_hour.write_page(hour).read_text()


@pytest.mark.parametrize("gpus", [0, 1, 2, 3])
def test_what_needs_more_gpus_is_skipped(hour, gpus, monkeypatch):
    monkeypatch.setattr(gpu_hour, "GPUS", gpus)
    monkeypatch.setattr(gpu_hour, "device_name", lambda: "")
    least = {"stale_fast": 1, "sleep": 1, "trl": 1, "drain": 2, "sharded": 2, "tensor_parallel": 3}
    for name, number in least.items():
        assert (result_of(hour, name)["passed"] is None) == (gpus < number), name


@pytest.mark.parametrize("gib, large", [(80, "Qwen2.5-7B"), (24, "Qwen2.5-3B"), (8, None)])
def test_what_does_not_fit_is_skipped(hour, gib, large, monkeypatch):
    """On a card of 24 GB a layer of 7B does not fit, and the check takes a smaller shape in place of failing."""
    hour.tiny = False
    monkeypatch.setattr(gpu_hour, "GPUS", 1)
    monkeypatch.setattr(gpu_hour.memory, "gpu_bytes", lambda: gib * 2**30)
    found = gpu_hour.largest_model(hour)
    assert (found and found.shape) == large
    if large is None:
        names = ("cold_start", "synchronous", "stale", "resume", "synchronous_fast", "mfu_large", "compiled_large")
        for name in names:
            assert gpu_hour.CHECKS[name](hour).passed is None, name
        assert not hour.commands
    elif found:
        needed = gpu_hour.bytes_needed(found.shape, found.layers, 0.35, asleep=True)
        assert 0.5 * gib * 2**30 < needed <= gib * 2**30


def test_weights_move_and_a_timed_engine_sleeps(hour):
    """The learning rate is large and constant, the gap is asked for after every step; MFU is that of grpo.py."""
    result_of(hour, "cold_start")
    result_of(hour, "compiled_large")
    for command in hour.commands:
        assert "--learning_rate 1e-3 --lr_scheduler_type constant" in command
        assert "--max_logprob_gap 0.05" in command and "--local_eval_every 1 " in command
    timed = [command for command in hour.commands if "_large" in command]
    assert len(timed) == 2
    assert all(" grpo.py " in command and "--vllm_sleep on" in command for command in timed)
