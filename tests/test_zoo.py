"""tests/zoo/*.diff apply to today's tree, and the tests that they name fail on them (python -m tests.zoo)."""

import ast
import contextlib
import dataclasses
import functools
import json
import math
import multiprocessing
import subprocess
import sys
import time
import types
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

import grpo
import grpo_fast
import utils
from scripts import study
from scripts.parts import adapter_trial, addresses, checkpoints, packing, sharding, transformers_engine
from scripts.reports import checks
from scripts.studies import arms, tasks
from tests.conftest import REPO
from tests.test_wiring import make_collector
from tests.zoo import __main__ as zoo
from tests.zoo import costs

ANIMALS = zoo.animals()
NOTICED = zoo.known()
MOST_LINES = 5
BY_A_RUN = ("run", "metric")  # what the probe says is tested in tests/test_probe.py
EVERY = 8  # days in which each animal's test is tried once, in a whole run of the tests


def changed_lines(text):
    """Lines that a diff takes or gives; one that is changed is one."""
    body = [line for line in text.partition("\n--- a/")[2].splitlines() if not line.startswith(("---", "+++"))]
    return max(sum(line.startswith("-") for line in body), sum(line.startswith("+") for line in body))


@pytest.mark.parametrize("name", ANIMALS)
def test_it_applies_is_short_and_names_a_thread(name):
    animal = ANIMALS[name]
    subprocess.run(["git", "apply", "--check", str(animal.path)], cwd=REPO, check=True)
    assert changed_lines(animal.path.read_text()) <= MOST_LINES
    assert all(thread.partition("#")[2].isdecimal() for thread in animal.seen_in)


@functools.cache
def functions_of(file):
    return {node.name for node in ast.parse((REPO / file).read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", ANIMALS)
def test_its_test_exists(name):
    file, _, function = ANIMALS[name].test.partition("::")
    assert function.partition("[")[0] in functions_of(file)


def test_the_zoo_is_large_and_the_table_is_that_of_the_answers():
    assert len(ANIMALS) >= 30
    assert set(NOTICED) <= set(ANIMALS)
    assert all(by != "nobody" for by, *_ in NOTICED.values())
    assert (zoo.ZOO / "README.md").read_text().endswith(zoo.table(NOTICED))


def test_who_noticed_is_read_from_what_a_run_left():
    """A run that ended, before and after its first step; another way of packing; a gap; and nothing."""
    fine = {"training_step": 1, "debug/vllm_vs_local_logprob_diff_mean": 1e-7}
    rows = [fine | {"training_step": step} for step in range(1, 6)]
    stale = [*rows[:2], *(row | {"debug/vllm_vs_local_logprob_diff_mean": 0.01} for row in rows[2:])]
    flags = {"model_dtype": "float32"}
    animal = next(iter(ANIMALS.values()))
    clean = zoo.Run(0, "packing  shared", rows, flags)
    probed = "WARNING: this copy of grpo.py: no token has a gradient; fine if you meant it\npacking  shared"
    cases = {
        ("start: no token has a gradient", "0"): zoo.Run(0, probed, rows, flags),
        ("start: UserError: no", "0"): zoo.Run(1, "utils.UserError: no", [], {}),
        ("run: GapError: far", "3"): zoo.Run(1, "x\nutils.GapError: far", rows[:2], flags),
        ("start: packing  rows", "0"): zoo.Run(0, "packing  rows", rows, flags),
        ("metric: gap growth", "3"): zoo.Run(0, "packing  shared", stale, flags),
        None: zoo.Run(0, "packing  shared", rows, flags),
    }
    assert {want: zoo.seen_by_the_run(animal, run, clean) for want, run in cases.items()} == {k: k for k in cases}


@pytest.mark.parametrize(("name", "task"), [("fly", zoo.TASK), ("smollm2", "largest")])
def test_the_arms_of_the_costs_can_be_run(name, task):
    """Each animal's flags, and those of the clean code that it is compared with, pass the checks at start."""
    if not (REPO / "data" / "tasks" / task).exists():
        subprocess.run([sys.executable, REPO / "scripts/data/make_tasks.py"], check=True, capture_output=True)
    scale = dataclasses.replace(tasks.SCALES[name], model=tasks.SCALES["fly"].model)  # which is in the repository
    base = study.base_flags(scale, task, 4)
    texts = costs.arms(ANIMALS, name)
    for text in texts:
        arm = arms.parse_arm(text, "")
        module = grpo_fast if arm.script == "grpo_fast.py" else grpo
        words = [*arms.merge_flags(base, arm.flags), "--seed", "1", "--exp_name", "x"]
        utils.parse_args(module.Args, words).check(1, fast=module is grpo_fast)
    names = {text.partition(":")[0].partition("@")[0] for text in texts}
    studied = {name for name, animal in ANIMALS.items() if animal.study}
    assert names == studied | {costs.base_of(ANIMALS[name]) for name in studied}
    assert costs.clean_name("grpo.py --beta 0.5 --max_logprob_gap 0".split()) == "clean_beta_0.5"


FAST = ("rho_summed", "old_groups_discarded", "staleness_unbounded", "one_engine_of_two_is_stale")


def test_the_arms_of_grpo_fast_are_compared_with_their_own_clean_code():
    """The clean code of grpo_fast.py with the same flags, and no other. Engines that run five updates ahead are what
    --async_steps 5 has: a run with the bug would be ended by the bound that it breaks."""
    found = costs.arms({name: ANIMALS[name] for name in FAST})
    masks = "--rho_mask_sequence_level --rho_mask_lower_bound 0.8 --rho_mask_upper_bound 1.25"
    assert found == [
        "clean_grpo_fast_async_steps_4_rho_mask_sequence_level_rho_mask_lower_bound_0.8_rho_mask_upper_bound_1.25: "
        f"grpo_fast.py --async_steps 4 {masks}",
        "clean_grpo_fast_async_steps_1: grpo_fast.py --async_steps 1",
        "clean_grpo_fast_async_steps_1_vllm_num_engines_2: grpo_fast.py --async_steps 1 --vllm_num_engines 2",
        f"rho_summed@tests/zoo/rho_summed.diff: grpo_fast.py --async_steps 4 {masks}",
        "old_groups_discarded@tests/zoo/old_groups_discarded.diff: grpo_fast.py --async_steps 1",
        "staleness_unbounded: grpo_fast.py --async_steps 5",
        "one_engine_of_two_is_stale@tests/zoo/one_engine_of_two_is_stale.diff: grpo_fast.py --async_steps 1 "
        "--vllm_num_engines 2 --max_logprob_gap 0",
    ]
    assert f"(self.args.async_steps + {1 + 4})" in ANIMALS["staleness_unbounded"].path.read_text()  # 5 with 1 asked for


def test_costs_are_differences_from_the_clean_code_of_the_same_seed(tmp_path):
    """By hand: 3 seeds of both, a fourth of one; t(0.975, 2) = 4.303."""
    name = "first_token_masked"
    areas = {"clean": [0.5, 0.6, 0.7, 0.9], name: [0.2, 0.2, 0.2]}
    lines = [{"kind": "study"}, *({"kind": "arm", "name": arm} for arm in areas)]
    for arm, values in areas.items():
        for seed, area in enumerate(values):
            lines.append({"kind": "run", "arm": arm, "seed": seed, "area": area, "final": 2 * area})
    path = tmp_path / "costs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = costs.read(path, ANIMALS).values()
    assert found.seeds == 3
    reach = 4.3027 * 0.1 / 3**0.5
    assert found.differences["area"] == pytest.approx((-0.4, -0.4 - reach, -0.4 + reach), abs=1e-4)
    assert found.differences["final"].value == pytest.approx(-0.8)
    assert costs.worded(found).startswith("worse: area -0.40 [-0.65, -0.15], final -0.80")


def test_costs_at_both_scales_are_in_the_table(tmp_path, monkeypatch):
    animal = "first_token_masked"
    for scale, height in (("fly", 0.1), ("smollm2", 0.2)):
        lines = [{"kind": "study"}, {"kind": "arm", "name": "clean"}, {"kind": "arm", "name": animal}]
        for seed in (1, 2):
            of_seed = {"kind": "run", "seed": seed, "final": 0.5}
            lines.append(of_seed | {"arm": "clean", "area": 0.5})
            lines.append(of_seed | {"arm": animal, "area": height})
        path = tmp_path / f"{scale}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        monkeypatch.setitem(zoo.COSTS, scale, path)
    (line,) = (line for line in zoo.table(zoo.known()).splitlines() if line.startswith(f"| `{animal}`"))
    fly, _, large = line.partition("; 135M ")
    assert "area -0.40" in fly and "area -0.30" in large


def test_of_a_longer_run_the_first_steps_are_kept():
    """Heights 0, 1, 1 at steps 0, 4, 8, then 0: the area is (0.5 + 1) / 2."""
    curve = {"evaluated": [0, 4, 8, 12], "held_out": [0.0, 1.0, 1.0, 0.0]}
    row = {"kind": "run", "task": "t", "arm": "a", "seed": 1, "weights": "w", "curve": curve}
    kept = costs.kept_run(row, 8)
    assert (kept["area"], kept["final"]) == (0.75, 1.0)
    assert costs.kept_run(row, 12)["final"] == 0.0


def test_what_was_kept_of_earlier_records_stays(tmp_path):
    """A second record adds its runs, to the same number of steps; one of fewer steps is refused."""
    path = tmp_path / "costs.jsonl"

    def keep(arm, steps):
        curve = {"evaluated": [*range(0, steps + 1, 4)], "held_out": [0.5] * (steps // 4 + 1)}
        run = {"kind": "run", "task": "t", "arm": arm, "seed": 1, "weights": "w", "curve": curve}
        facts = {"kind": "arm", "name": arm, "script": "grpo.py", "flags": []}
        study = {"kind": "study", "steps": steps, "hash": arm}
        costs.keep([types.SimpleNamespace(study=study, arms={arm: facts}, runs={"one": run})], path)
        return [json.loads(line) for line in path.read_text().splitlines()]

    first = keep("clean", 8)
    both = keep("rho_summed", 12)
    assert [line for line in both if line in first] == first
    assert len(both) == 2 * len(first)
    assert {line["kept_steps"] for line in both if line["kind"] == "study"} == {8}
    with pytest.raises(ValueError, match="has the first 8 steps"):
        keep("clip_ignored", 4)


def checked(name, rows, **args):
    """Whether a check of the page is fine; None where it is not made."""
    rows = [{"training_step": step} | row for step, row in enumerate(rows, start=1)]
    return next((check["fine"] for check in checks.check_run(rows, args) if check["name"] == name), None)


@pytest.mark.parametrize(
    ("epochs", "fine"), [([0.1, 0.2, 0.3], True), ([0.1, 0.1], False), ([0.1, 0.2, 0.1], False), ([0.1], None)]
)
def test_prompts_that_come_again_are_seen_in_the_epoch(epochs, fine):
    assert checked("prompts go on", [{"epoch": epoch} for epoch in epochs]) is fine


@pytest.mark.parametrize(
    ("kind", "rates", "fine"),
    [
        ("linear", [1, 2, 1.5, 1], True),
        ("linear", [2, 1, 0.5, 0.6], False),
        ("constant_with_warmup", [1, 2, 2, 2], True),
        ("constant_with_warmup", [1, 2, 0.5, 1, 2], False),
        ("constant", [1, 1], True),
        ("cosine_with_restarts", [1, 0.5, 1], None),
    ],
)
def test_a_schedule_that_begins_anew_is_seen_in_the_rate(kind, rates, fine):
    assert checked("one peak of the learning rate", [{"lr": rate} for rate in rates], lr_scheduler_type=kind) is fine


@pytest.mark.parametrize(
    ("constant", "missing", "flags", "fine"),
    [(3, 0, {}, True), (2, 0, {}, False), (2, 1, {}, None), (2, 0, {"active_sampling": True}, None)],
)
def test_groups_that_no_filter_took_are_missed(constant, missing, flags, fine):
    """Three are not trained on, and so many are constant. With missing scores there are other reasons."""
    row = {"batch/groups_filtered": 3, "batch/filtered_prompts": constant, "batch/missing_rewards": missing}
    assert checked("groups left out", [row], **flags) is fine


def test_moments_that_were_not_restored_end_a_resume():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    zeros = {"w": {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2)}}
    saved = {"w": {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}}
    checkpoints.need_moments(zeros, optimizer)
    with pytest.raises(RuntimeError, match="did not reach"):
        checkpoints.need_moments(saved, optimizer)
    optimizer.state[weight] = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}
    checkpoints.need_moments(saved, optimizer)


def todays(names):
    """An eighth of the names, another one every day."""
    return [name for i, name in enumerate(names) if i % EVERY == time.time() // 86400 % EVERY]


@pytest.mark.runs
@pytest.mark.parametrize("name", todays([name for name, (*_, test) in NOTICED.items() if test]))
def test_its_test_fails_on_it(name, tmp_path):
    tree = zoo.copy_tree(tmp_path / "tree")
    zoo.put(ANIMALS[name], tree)
    assert zoo.fails_test(ANIMALS[name], tree)


def test_the_tokens_trained_on_are_those_that_were_sampled():
    """Though their text is tokenized otherwise."""
    prompt = utils.Prompt(0, (5,), "", (), ())
    r = utils.Rollout(prompt, 0, 0)

    class Tokenizer:
        decode = staticmethod(lambda ids, **_: "ab")
        __call__ = staticmethod(lambda text: {"input_ids": [9]})

    tokenizer = Tokenizer()
    engine: Any = types.SimpleNamespace(tokenizer=tokenizer, eos_ids=[2])
    generation = utils.Generation([7, 8, 2], [-1.0] * 3, "stop", [0] * 3)
    args = utils.parse_args(grpo.Args, ["--model_name_or_path", "x"])
    assert grpo.end_turn(r, generation, engine, args) is None
    assert r.token_ids.tolist() == [7, 8, 2]


def test_the_tokenizer_adds_nothing_to_what_the_template_writes():
    class Tokenizer:
        apply_chat_template = staticmethod(lambda messages, **_: "<s>hi")
        __call__ = staticmethod(lambda text, add_special_tokens=True: {"input_ids": [1] * add_special_tokens + [1, 7]})

    row = utils.Row(where="", messages=[{"role": "user", "content": "hi"}], ground_truths=["7"], verifiers=["gsm8k"])
    tokenizer: Any = Tokenizer()
    assert utils.make_prompt(row, 0, tokenizer, None, None, time.strftime).token_ids == (1, 7)


def test_the_engines_logprobs_are_those_of_its_temperature():
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    sampler = transformers_engine.SeededSampler([utils.Request((5,), 0, 0.5, 1)], torch.device("cpu"))
    chosen = sampler(torch.zeros(1, 1), logits).argmax()
    assert sampler.logprobs[0].item() == pytest.approx(torch.log_softmax(logits / 0.5, -1)[0, chosen].item())


@pytest.mark.runs  # imports vLLM
def test_a_request_finds_no_prefix_of_weights_loaded_before():
    salts = []
    engine: Any = utils.VLLMEngine.__new__(utils.VLLMEngine)
    engine.engine = types.SimpleNamespace(add_request=lambda name, prompt, params: salts.append(prompt["cache_salt"]))
    engine.stop_strings = []
    engine.eos_ids = [2]
    engine.asleep = 0
    for loads in (1, 1, 2):
        engine.loads = loads
        engine.add("a", utils.Request((5,), 0, 1.0, 1))
    assert salts[0] == salts[1] != salts[2]


def test_the_loss_gets_the_old_logprobs_of_the_batch():
    prompt = utils.Prompt(0, (5, 6), "", (), ())
    r = utils.Rollout(prompt, 0, 0, token_ids=[7], logprobs=[-1.0], mask=[True], versions=[0])
    batch = grpo.make_batch([[[r]]], torch.device("cpu"))
    batch.old_logprobs = torch.full_like(batch.vllm_logprobs, -2.0)
    new = torch.zeros_like(batch.vllm_logprobs)
    assert batch.loss_inputs(new, new).old_logprobs is batch.old_logprobs


def test_each_step_goes_on_in_the_data():
    args = utils.parse_args(grpo.Args, "--model_name_or_path x --no_shuffle --num_unique_prompts_rollout 2".split())
    prompts = [utils.Prompt(i, (5,), "", (), ()) for i in range(4)]
    engine = types.SimpleNamespace(generate=lambda requests, on_end: None)
    world = utils.World(0, 0, 1, torch.device("cpu"))
    run: Any = types.SimpleNamespace(
        args=args, world=world, state=grpo.start_state(), engine=engine, train_prompts=prompts
    )
    steps = [grpo.sample_groups(run, utils.Timer())[1] for _ in range(2)]
    assert [[group[0].prompt.index for group in groups] for groups in steps] == [[0, 1], [2, 3]]


def test_a_reference_with_adapters_is_refused_in_words():
    inputs = torch.zeros(1, 2)
    mask = torch.ones(1, 2, dtype=torch.bool)
    batch: Any = types.SimpleNamespace(
        response_mask=mask, old_logprobs=inputs, vllm_logprobs=inputs, ref_logprobs=inputs, places=[0, 1]
    )
    args = utils.parse_args(grpo.Args, ["--model_name_or_path", "x"])
    with pytest.raises(utils.GapError, match="adapters on"):
        adapter_trial.check(batch, "now", args, utils.World(0, 0, 1, torch.device("cpu")))


@pytest.mark.parametrize(("gap", "is_refused"), [(1.1e-6, False), (2e-5, True), (math.nan, True)])
def test_rounding_is_no_missing_adapter(gap, is_refused):
    """Two tokens of the fly, whose adapters did 8.5e-5 to the first logprob and nothing to the second: seed 22 of
    the record was ended for the rounding of float32."""
    old = torch.tensor([[-1.0933, -1.9e-5]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    batch: Any = types.SimpleNamespace(response_mask=mask, old_logprobs=old, places=[0, 1])
    batch.vllm_logprobs = old + gap
    batch.ref_logprobs = old + torch.tensor([[8.5e-5, 0.0]])
    args = utils.parse_args(grpo.Args, ["--model_name_or_path", "x", "--model_dtype", "float32"])
    told = pytest.raises(utils.GapError, match="did not reach") if is_refused else contextlib.nullcontext()
    with told:
        adapter_trial.check(batch, "now", args, utils.World(0, 0, 1, torch.device("cpu")))


@pytest.mark.runs
@pytest.mark.parametrize("name", todays([name for name, (by, *_) in NOTICED.items() if by.startswith(BY_A_RUN)]))
def test_its_run_is_noticed_as_the_table_says(name, tmp_path):
    """By the same error or check at the same step. What grpo_fast.py says last depends on timing."""
    noticed, *_ = zoo.Keeper(tmp_path).ask(ANIMALS[name])
    by, step, *_ = NOTICED[name]
    parts = 1 if ANIMALS[name].run[0] == "grpo_fast.py" else 2
    assert noticed.by.split(": ")[:parts] == by.split(": ")[:parts]
    assert parts == 1 or noticed.step == step


class Layer(torch.nn.Module):
    """A layer with dropout of both kinds: a module of its own, and a number that attention reads."""

    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(0.1)
        self.attention_dropout = 0.1


def test_dropout_is_off_in_every_layer_that_has_it(monkeypatch):
    """Also while gradient checkpointing is on, which needs train()."""
    layer = Layer()
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: layer)
    monkeypatch.setattr(packing, "takes_our_attention", lambda *_: False)
    args = utils.parse_args(grpo.Args, ["--model_name_or_path", "x"])
    assert utils.load_causal_lm(args) is layer
    assert (layer.drop.p, layer.attention_dropout, layer.training) == (0.0, 0.0, True)


def test_dropout_that_is_left_on_is_told(capsys):
    layer = Layer()
    sharding.warn_of_dropout(torch.nn.Sequential(layer))
    assert "dropout is on in 2 layers, such as 0" in capsys.readouterr().out
    layer.drop.p = layer.attention_dropout = 0.0
    sharding.warn_of_dropout(torch.nn.Sequential(layer))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("index", [0, 1, 2])
def test_every_engine_loads_what_it_receives(index, monkeypatch):
    """Whichever engine it is: it loads all, and says which version it has."""
    here, there = multiprocessing.Pipe()
    engine = mock.MagicMock(busy=False, asleep=0, loads=0)
    engine.load_weights = functools.partial(utils.VLLMEngine.load_weights, engine)
    loaded = []
    engine.worker.reload_weights = lambda weights_iterator: loaded.extend(weights_iterator)
    world = utils.World(0, 0, 1, torch.device("cpu"))
    for module, name, value in (
        (grpo_fast, "join", world),
        (grpo_fast, "start_watchdog", None),
        (grpo_fast, "weights_group", (None, None)),
        (addresses, "meet_learner", there),
        (utils, "load_tokenizer", None),
        (utils, "make_engine", engine),
    ):
        monkeypatch.setattr(module, name, lambda *_, value=value: value)
    monkeypatch.setattr(grpo_fast, "receive_weights", lambda group, dtype, device, manifest, *_: iter(manifest))

    for message in (("announce",), ("weights", 3, ["a", "b"]), ("stop",)):
        here.send(message)
    monkeypatch.setattr(utils, "STOP", mock.MagicMock())
    args = utils.parse_args(grpo_fast.Args, ["--model_name_or_path", "x", "--model_dtype", "float32"])
    grpo_fast.run_engine(args, grpo_fast.Roles(1, 3, 1, False, index), mock.MagicMock())

    assert loaded == ["a", "b"] and engine.version == 3
    assert [here.recv()[:2] for _ in range(2)] == [("ready", None), ("loaded", 3)]


def test_a_tied_head_is_sent_under_its_own_name():
    """vLLM's CPU backend keeps a copy of it."""
    embedding = torch.nn.Embedding(4, 2)
    model: Any = types.SimpleNamespace(named_parameters=lambda: [("model.embed_tokens.weight", embedding.weight)])
    model.get_output_embeddings = model.get_input_embeddings = lambda: embedding
    assert dict(utils.named_weights(model)).keys() == {"model.embed_tokens.weight", "lm_head.weight"}


def test_groups_that_outlasted_an_update_are_trained_on():
    """To drop them would drop long responses: staleness is bounded where prompts are admitted."""
    collector = make_collector("7", "1", flags="--async_steps 1")
    collector.engines_have(0)
    collector.engines_have(2)
    assert (
        collector.version == 1 and [r.versions.max() for group in collector._collect().groups for r in group] == [0] * 4
    )


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_no_group_is_started_that_would_be_too_old(ahead):
    """A step has 2 groups: those of `ahead` steps more may be under way."""
    collector = make_collector("7", flags=f"--async_steps {ahead}")
    collector.engines_have(0)
    assert len(collector.in_flight) == 2 * (ahead + 1)


def test_a_group_is_compared_with_itself_alone():
    prompt = utils.Prompt(0, (5,), "", ("7",), ("gsm8k",))
    groups = [[grpo.Rollout(prompt, i, j, score=5.0 * i + j) for j in range(2)] for i in range(2)]
    grpo.set_advantages(groups, utils.parse_args(grpo.Args, ["--model_name_or_path", "x"]))
    assert [r.advantage for group in groups for r in group] == pytest.approx([-1.0, 1.0] * 2)
