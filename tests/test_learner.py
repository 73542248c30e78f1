"""The learner's update: the same whatever the split of the rollouts, and equal to a plain implementation."""

import dataclasses
import json
import math
import shutil
import textwrap
import threading
import types

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
import rewards
import utils
from scripts.parts import dumps, guards
from scripts.parts.transformers_engine import TransformersEngine
from tests import programs
from tests.test_math import LOSS_FNS

VOCAB = 512


def make_args(model, *flags):
    # logits of size 10 carry 1e-6 of float32 rounding: the temperature brings them down, so that 1e-6 can be asked for
    base = "--beta 0 --no_load_ref_policy --model_dtype float32 --learning_rate 1e-2 --max_grad_norm 0 --temperature 3"
    base += " --lr_scheduler_type constant --max_logprob_gap 0 --total_episodes 640 --per_device_train_batch_size 4"
    return utils.parse_args(grpo.Args, ["--model_name_or_path", str(model), *base.split(), *map(str, flags)])


def make_rollouts(groups=4, size=3, seed=0):
    """Groups of random rollouts of unequal lengths; engine logprobs are a little off, as a real engine's are."""
    generator = torch.Generator().manual_seed(seed)
    rollouts = []
    for i in range(groups):
        prompt_ids = torch.randint(0, VOCAB, (3 + 2 * i,), generator=generator).tolist()
        prompt = utils.Prompt(i, tuple(prompt_ids), "", ("1",), ("gsm8k",))
        for j in range(size):
            n = int(torch.randint(1, 14, (1,), generator=generator))
            ids = torch.randint(0, VOCAB, (n,), generator=generator).tolist()
            logprobs = (-6.2 + 0.3 * torch.randn(n, generator=generator)).tolist()
            advantage = (1.5, -0.5, 1.0)[j % 3]  # not summing to 0: a sum that cancels has no relative precision
            row = grpo.Rollout(prompt, i, j, ids, logprobs, [True] * n, [0] * n, "stop", advantage=advantage)
            rollouts.append(dataclasses.replace(row, outcome=float(j == 0), score=float(j == 0)))
    return rollouts


def sgd(policy):
    """Plain SGD, so that weights show the gradient. An update swamps the weights, whose rounding would show."""
    return torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=1024.0)


def update(learner, mini_batches, args, world, packing="shared"):
    """The metrics of an update of a learner."""
    batches = []
    for rollouts in mini_batches:
        packs = grpo.pack_rollouts(rollouts, packing, args.pack_length)[0]
        batches.append(grpo.micro_batches(packs, packing, args, world.device))
    metrics = utils.Metrics()
    with sdpa_kernel(SDPBackend.MATH):  # the flash kernel's exp has 20 bits: 1e-6 of noise of its own
        gap, bad = grpo.update(learner, batches, args, world, metrics)
    return utils.finish_metrics(metrics.reduce(world), args) | gap.metrics | {"bad": bad}


def run_update(args, world, mini_batches, optimizer="sgd", ref=False, packing="shared", shift=0.0):
    """Weights after one update of a fresh policy, and metrics."""
    policy = grpo.load_policy(args, world)
    ref_policy = grpo.load_policy(args, world).requires_grad_(False) if ref else None
    if shift:
        for p in ref_policy.parameters():
            utils.shard_of(p).mul_(1 + shift)
    adam, scheduler = grpo.make_optimizer(policy, args)
    chosen = adam if optimizer == "adam" else sgd(policy)
    found = update(grpo.Learner(policy, ref_policy, chosen, scheduler), mini_batches, args, world, packing)
    weights = {k: v.clone() for k, v in utils.full_weights(policy, torch.float32)}
    return weights, found


def start_weights(args, world):
    return {k: v.clone() for k, v in utils.full_weights(grpo.load_policy(args, world), torch.float32)}


def assert_same_update(a, b, start, tolerance=1e-6):
    """The two updates (not just the weights) agree relative to their size, and every tensor moved."""
    assert all((a[name] - start[name]).norm() > 0 for name in a)
    difference = math.sqrt(sum((a[name] - b[name]).norm() ** 2 for name in a))
    size = math.sqrt(sum((a[name] - start[name]).norm() ** 2 for name in a))
    assert difference <= tolerance * size, f"relative difference {difference / size:.2e}"


def plain_logprobs(model, r, temperature):
    """Logprobs of a response's tokens, (T,), and those of the whole vocabulary, (T, V), by torch alone."""
    start = len(r.prompt.token_ids) - 1
    ids = torch.tensor([[*r.prompt.token_ids, *r.token_ids]])
    rows = torch.log_softmax(model(ids).logits[0].float() / temperature, -1)[start:-1]
    return rows.gather(1, torch.tensor(r.token_ids)[:, None])[:, 0], rows


LOSSES = [
    [],
    ["--loss_denominator", "sequence", "--loss_fn", "gspo"],
    ["--loss_denominator", "50", "--loss_fn", "cispo", "--entropy_coef", "0.01"],
]
LOSSES += [["--loss_fn", name] for name in LOSS_FNS if name not in ("dapo", "gspo", "cispo")]  # of a fork


@pytest.mark.parametrize("flags", LOSSES, ids=lambda flags: "-".join(flags[1::2]) or "default")
def test_update_does_not_depend_on_the_split(tiny_models, world, monkeypatch, flags):
    args = make_args(tiny_models(), *flags)
    rollouts = make_rollouts()
    packs = [("shared", 30), ("shared", 60), ("shared", 1000), ("plain", 30), ("plain", 60), ("plain", 1000)]
    whole, start = assert_no_split_shows(args, world, monkeypatch, packs, (1, 5, 100))
    checkpointed, _ = run_update(dataclasses.replace(args, gradient_checkpointing=True), world, [rollouts])
    assert_same_update(whole, checkpointed, start)


def assert_no_split_shows(args, world, monkeypatch, packs, sizes):
    """The same update for packs (packing, length), rows (sizes), order and chunk. Weights with it, and without."""
    rollouts = make_rollouts()
    start = start_weights(args, world)
    whole, _ = run_update(dataclasses.replace(args, pack_length=1000), world, [rollouts])
    for packing, most in packs:
        other, _ = run_update(dataclasses.replace(args, pack_length=most), world, [rollouts], packing=packing)
        assert_same_update(whole, other, start)
    for size in sizes:
        rows = dataclasses.replace(args, per_device_train_batch_size=size)
        assert_same_update(whole, run_update(rows, world, [rollouts], packing="rows")[0], start)
    reversed_rows, _ = run_update(args, world, [rollouts[::-1]])
    assert_same_update(whole, reversed_rows, start)
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "LOGPROB_CHUNK", 3)
        chunked, _ = run_update(args, world, [rollouts])
    assert_same_update(whole, chunked, start)
    return whole, start


def test_a_response_is_scored_while_others_are_sampled(monkeypatch):
    scored = threading.Event()

    def verify(record):
        scored.set()
        return rewards.Verdict(record.response, float(record.response == "a"))

    def generate(requests, finished):
        finished(0, utils.Generation([97, 0], [-1.0, -1.0], "stop", [0, 0]))
        assert scored.wait(20), "the engine was waited for"
        finished(1, utils.Generation([98, 0], [-1.0, -1.0], "stop", [0, 0]))

    monkeypatch.setitem(rewards.VERIFIERS, "slow", rewards.Verifier(verify))
    tokenizer = types.SimpleNamespace(decode=lambda ids, **_: "".join(map(chr, ids)))
    engine = types.SimpleNamespace(generate=generate, tokenizer=tokenizer, eos_ids=[0])
    args = make_args("m", "--num_samples_per_prompt_rollout", 2)
    rollouts = grpo.new_group(utils.Prompt(0, (1, 2), "", ("1",), ("slow",)), 0, 2)
    grpo.sample_rollouts(engine, [rollouts], args)
    for _ in range(2):  # a second call finds no verifiers to wait for
        grpo.score_rollouts(rollouts, args)
        assert [(r.text, r.score, r.results[0].status) for r in rollouts] == [("a", 10.0, "ok"), ("b", 0.0, "ok")]


def test_an_advantage_may_be_an_array_over_the_tokens(world):
    """In packs of every kind, after a trace, and with --kl_in_reward: KLs 0.5, 0 and 0.1 off scores 1, 0, 0 change the
    centered advantages by -0.3, 0.2 and 0.1."""
    flags = "--kl_in_reward --beta 0.5 --kl_estimator 0 --advantage_normalization_type centered"
    prompt = utils.Prompt(0, (1, 2), "", ("1",), ("gsm8k",))
    group = [grpo.Rollout(prompt, 0, j, score=s) for j, s in enumerate([1, 0, 0])]
    for r, advantage in zip(group, ([0.25, -1.0], [0.5], [1.0, 2.0, 3.0, 4.0]), strict=True):
        n = len(advantage)
        r.append(utils.Generation([5] * n, [0.0] * n, "stop", [0] * n))
        r.advantage = np.array(advantage) if n > 1 else 0.5
    traces = [json.loads(json.dumps(dumps.rollout_row(r, 1), default=str)) for r in group]
    for kept in (group, dumps.rollouts_of(traces)):
        for packs in ([[kept]], [[[r] for r in kept]], [[[r]] for r in kept]):
            batch = grpo.make_batch(packs, world.device)
            found = [batch.advantages[batch.seq_ids == i].tolist() for i in (1, 2, 3)]
            assert found == [[0.25, -1.0], [0.5], [1.0, 2.0, 3.0, 4.0]]

    batch = grpo.make_batch([[group]], world.device)
    batch.ref_logprobs = torch.zeros_like(batch.vllm_logprobs)
    kls = torch.tensor([0.0, 1.0 / 2, 0.0, 0.2 / 4])  # by seq_id, of a token
    batch.old_logprobs = torch.where(batch.response_mask, kls[batch.seq_ids], 0.0)
    grpo.put_kl_in_reward([batch], make_args("m", *flags.split()), world, utils.Metrics())
    want = [[-0.05, -1.3], [-1 / 3 + 0.2], [1.1, 2.1, 3.1, 4.1]]
    for i, values in enumerate(want, start=1):
        assert batch.advantages[batch.seq_ids == i].tolist() == pytest.approx(values)


def test_replayed_tokens_have_no_part_in_the_gap(world):
    """Version -1: no engine has sampled them with these weights. If all are, there is nothing to measure."""
    args = make_args("m", "--max_logprob_gap", 0.5)
    rollouts = make_rollouts()[:3]
    rollouts[1].versions[:] = -1
    for packs, want in (([[rollouts]], 0.25), ([[[r]] for r in rollouts], 0.25), ([[rollouts[1:2]]], None)):
        batch = grpo.make_batch(packs, world.device)
        is_replayed = torch.tensor([False, *(r.versions[0] < 0 for r in batch.rollouts)])[batch.seq_ids]
        batch.old_logprobs = batch.vllm_logprobs + torch.where(is_replayed, 50.0, 0.25)
        gap = guards.Gap()
        gap.add(batch)
        found = gap.reduce(args, world)
        assert found.metrics.get("debug/vllm_vs_local_logprob_diff_max") == (want and pytest.approx(want))


def test_non_finite_gradient_skips_the_update(tiny_models, world):
    rollouts = make_rollouts()
    args = make_args(tiny_models())
    rollouts[0].advantage = math.inf
    weights, metrics = run_update(args, world, [rollouts])
    assert metrics["bad"] == 1
    assert all(torch.equal(weights[k], v) for k, v in start_weights(args, world).items())


class VocabularyTensors(TorchDispatchMode):
    """Row counts of all tensors whose last dimension is the vocabulary."""

    def __init__(self):
        super().__init__()
        self.rows = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim and out.shape[-1] == VOCAB:
            self.rows.add(out.numel() // VOCAB)
        return out


def test_logits_of_all_tokens_never_exist(tiny_models, world, monkeypatch):
    """The largest (rows, vocabulary) tensor of forward and backward is a chunk, however many tokens train."""
    monkeypatch.setattr(grpo, "LOGPROB_CHUNK", 8)
    args = make_args(tiny_models())
    rollouts = make_rollouts(groups=8)
    tokens = sum(len(r.token_ids) for r in rollouts)
    assert tokens > 100
    policy = grpo.load_policy(args, world)
    batch = grpo.make_batch([grpo.make_pieces(rollouts, 64)], world.device)
    with VocabularyTensors() as seen:
        logprobs, entropy = policy(batch, 1.0)
        (logprobs.sum() + entropy.sum()).backward()
    weight = {policy.model.config.hidden_size}  # its transpose is (hidden, vocabulary)
    assert max(seen.rows - weight) == 8 and tokens not in seen.rows


def long_rollouts():
    """A group whose piece is longer than utils.SHORT_PIECE, so that its responses attend one by one."""
    rollouts = make_rollouts(groups=2)
    for r in rollouts[:3]:
        r.token_ids = (r.token_ids[0] + np.arange(100)) % VOCAB
        r.logprobs = r.logprobs[:1].repeat(100)
        r.mask = np.full(100, True)
        r.versions = np.zeros(100, np.int32)
    assert grpo.piece_length(rollouts[:3]) > utils.SHORT_PIECE
    return rollouts


@pytest.mark.parametrize(
    "arch, share, make",
    [
        ("llama", True, make_rollouts),
        ("llama", True, long_rollouts),
        ("qwen2", False, long_rollouts),
        ("qwen2", True, make_rollouts),
        ("qwen3", False, make_rollouts),
        ("qwen3", True, long_rollouts),
    ],
)
def test_a_pack_is_its_sequences_alone(tiny_models, world, arch, share, make):
    """Logprobs, loss and gradient of one pack equal those of one response a row; without the layout they do not."""
    args = make_args(tiny_models(arch), "--pack_length", "1000")
    rollouts = make()
    policy = grpo.load_policy(args, world)
    pack = grpo.make_pieces(rollouts, 1000 if share else 0)
    assert [len(piece) for piece in pack] == ([3] * (len(rollouts) // 3) if share else [1] * len(rollouts))
    together = grpo.make_batch([pack], world.device)
    apart = grpo.make_batch([[[r]] for r in rollouts], world.device)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        logprobs = policy(together, 1.0)[0][together.response_mask]
        torch.testing.assert_close(logprobs, policy(apart, 1.0)[0][apart.response_mask], rtol=1e-6, atol=1e-6)
        leaking = policy(dataclasses.replace(together, layout=None), 1.0)[0][together.response_mask]
    assert (leaking - logprobs).abs().max() > 1e-2
    packing = "shared" if share else "plain"
    (a, one), (b, other) = (run_update(args, world, [rollouts], packing=x) for x in (packing, "rows"))
    assert one["loss/policy_avg"] == pytest.approx(other["loss/policy_avg"], rel=1e-6)
    assert_same_update(a, b, start_weights(args, world))
    assert grpo.choose_packing(policy, rollouts[0].prompt, args, world) == "shared"


@pytest.mark.parametrize("attention, packing", [("sdpa", "shared"), ("eager", "plain")])
def test_other_attentions_find_the_sequences_of_a_pack_by_position(tiny_models, world, attention, packing):
    args = make_args(tiny_models("qwen3"), "--attn_implementation", attention)
    policy = grpo.load_policy(args, world)
    assert grpo.choose_packing(policy, make_rollouts()[0].prompt, args, world) == packing


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [3.0, 0.02])
def test_a_leaking_model_has_one_response_a_row(tiny_models, world, dtype, size):
    """A layer that mixes neighbouring tokens, as convolutions and recurrences do, is found by the probe. The small leak
    changes the logprobs of a response by some 0.01 nats."""
    args = make_args(tiny_models("llama"), "--model_dtype", dtype)
    policy = grpo.load_policy(args, world)
    assert grpo.choose_packing(policy, make_rollouts()[0].prompt, args, world) == "shared"
    first = policy.model.base_model.layers[0]
    first.register_forward_hook(lambda _module, _inputs, out: out + size * torch.roll(out, 1, dims=1))
    assert grpo.choose_packing(policy, make_rollouts()[0].prompt, args, world) == "rows"


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_reference_refresh(tiny_models, world, stage):
    """Also right after forwards without backward, which leave whole bfloat16 copies in place of the master weights."""
    args = make_args(tiny_models(), "--model_dtype", "bfloat16", "--deepspeed_stage", stage)
    policy, ref = [grpo.load_policy(args, world) for _ in range(2)]
    batch = grpo.make_batch([[[r]] for r in make_rollouts()], world.device)
    with torch.no_grad():
        for p in policy.parameters():
            utils.shard_of(p).add_(1.0)
        policy(batch, 1.0), ref(batch, 1.0)
        grpo.refresh_reference(ref, policy, 0.25)
        ref(batch, 1.0)
    get_model_state_dict(ref)  # what a checkpoint does
    before = start_weights(args, world)
    for name, weight in utils.full_weights(ref, torch.float32):
        torch.testing.assert_close(weight, before[name] + 0.25)


TWO_RANKS = """
    import torch
    import utils, grpo
    from scripts.parts import dumps
    from tests.test_learner import make_args, make_rollouts, run_update
    world = utils.init_distributed()
    groups = [make_rollouts()[i:i + 3] for i in range(0, 12, 3)]
    even = [r for i, group in enumerate(groups) if i % 2 == world.rank for r in group]
    one_has_all = [r for group in groups for r in group] if world.rank else []
    for name, mine in (("even", even), ("all-on-one-rank", one_has_all)):
        for stage in (0, 2, 3):
            args = make_args({model!r}, "--deepspeed_stage", stage)
            weights, metrics = run_update(args, world, [mine], optimizer="sgd")
            half = make_args({model!r}, "--deepspeed_stage", stage, "--model_dtype", "bfloat16")
            dithered = dumps.weights_hash(grpo.load_policy(half, world), world)
            if world.is_main:
                torch.save((weights, metrics, dithered), f"{out}/{{name}}_{{stage}}.pt")
    torch.distributed.barrier()
    utils.exit_process()
"""


@pytest.mark.runs
def test_two_ranks_make_the_update_of_one(tiny_models, tmp_path, world):
    model = tiny_models()
    script = tmp_path / "two_ranks.py"
    script.write_text(textwrap.dedent(TWO_RANKS.format(model=str(model), out=tmp_path)))
    done = programs.run([*programs.torchrun(2), script], OMP_NUM_THREADS=1)
    assert done.returncode == 0, done.stderr[-3000:]
    args = make_args(model)
    start = start_weights(args, world)
    one, one_metrics = run_update(args, world, [make_rollouts()])
    one_dithered = dumps.weights_hash(grpo.load_policy(make_args(model, "--model_dtype", "bfloat16"), world), world)
    for name in ("even", "all-on-one-rank"):
        for stage in (0, 2, 3):
            two, metrics, dithered = torch.load(tmp_path / f"{name}_{stage}.pt")
            assert dithered == one_dithered  # start weights, dithered before sharding
            assert_same_update(one, two, start)
            for key in ("optim/grad_norm", "loss/policy_avg", "val/rho_weight", "objective/entropy"):
                assert metrics[key] == pytest.approx(one_metrics[key], rel=1e-5), json.dumps(metrics)


def test_transformers_engine_samples_each_request_as_it_asks_whatever_the_model_says(tiny_models, world, tmp_path):
    """A repetition penalty of generation_config.json, as Qwen2.5 has one, is not the policy's. And in grpo_fast.py an
    evaluation, which is greedy, is asked for while rollouts with --vllm_top_p are."""
    model = shutil.copytree(tiny_models(), tmp_path / "model")
    (model / "generation_config.json").write_text('{"repetition_penalty": 9.0, "do_sample": true, "top_k": 2}')
    made = []
    for path in (tiny_models(), model):
        args = utils.parse_args(grpo.Args, f"--model_name_or_path {path} --model_dtype float32".split())
        engine = TransformersEngine(args, utils.load_tokenizer(args), world, 4)
        asked = {"train": utils.Request((5, 6, 7, 8), 3, 1.0, 24, 0.5), "eval": utils.Request((5, 6, 7), 4, 0.0, 24)}
        alone = engine.generate([asked["train"]])[0].token_ids.tolist()
        for name, request in asked.items():
            engine.add(name, request)
        together = dict(answer for _ in asked if engine.busy for answer in engine.step())
        assert alone == together["train"].token_ids.tolist()
        made.append([together[name].token_ids.tolist() for name in asked])
    assert made[0] == made[1]
