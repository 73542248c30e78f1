"""--dry_run's estimate of memory against the bytes that an update really holds; its splits by hand."""

import copy
import json
import textwrap
from dataclasses import replace

import pytest
from transformers import AutoConfig

import grpo
import grpo_fast
import utils
from scripts.parts import estimate
from tests import programs

# Rank 0 of several, alone: torch's fake process group exchanges nothing, and shards and buffers have their real sizes.
MEASURE = """
    import gc, json, os, sys, tempfile, weakref
    import utils, grpo, torch
    from scripts.parts import estimate
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from transformers import AutoConfig, AutoModelForCausalLM

    class Peak(TorchDispatchMode):
        # peak: most bytes of storages that live at the same time, but for those that lived before
        def __init__(self):
            super().__init__()
            self.live, self.peak, self.before = {}, 0, {}
            self.watch(gc.get_objects())
            self.live, self.before = {}, self.live

        def watch(self, things):
            tensors = [x for x in things if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
            more = False  # whether one of them came into being or was grown
            for storage in [getattr(x, "_local_tensor", x).untyped_storage() for x in tensors]:
                key, size = storage._cdata, storage.nbytes()
                if not any(key in known and known[key][0]() is not None for known in (self.before, self.live)):
                    self.live[key], more = [weakref.ref(storage), size], True
                elif self.live.get(key, [storage, size])[1] < size:
                    self.live[key][1], more = size, True
            return more

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = compute(function, args, kwargs or {})
            if self.watch(tree_leaves((out,))):
                living = [(key, ref, storage) for key, (ref, _) in self.live.items() if (storage := ref()) is not None]
                self.live = {key: [ref, storage.nbytes()] for key, ref, storage in living}
                self.peak = max(self.peak, sum(size for _, size in self.live.values()))
            return out

    def compute(function, args, kwargs):
        # products in bfloat16 as float32 ones that are rounded: a processor without instructions takes 20 times as long
        if function._overloadpacket not in PRODUCTS or args[0].dtype != torch.bfloat16:
            return function(*args, **kwargs)
        return function(*[x.float() if isinstance(x, torch.Tensor) else x for x in args], **kwargs).bfloat16()

    PRODUCTS = [torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm]

    def measure(directory, ranks, vocabulary, hidden, **flags):
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        # of the ranks that share a pack each gets what it sends: numbers, which memory left as it is may not be
        torch.distributed._functional_collectives.all_to_all_single = lambda x, *_: x.clone()
        dist.all_gather = lambda outs, x, group: [out.copy_(x) for out in outs]
        world = utils.World(0, 0, ranks, torch.device("cpu"))
        config = AutoConfig.for_model(
            "llama", hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=2, vocab_size=vocabulary, tie_word_embeddings=False,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        found = Peak()
        apart = []  # what is in host memory
        if "optimizer" in flags.get("offload", ()):
            from scripts.parts import optimizers
            made = optimizers.host_memory
            optimizers.host_memory = lambda like: apart.append(made(like)) or apart[-1]
        args = grpo.Args(model_name_or_path=directory, max_logprob_gap=0.0, use_rho_correction=False, **flags)
        learner = grpo.load_learner(args, world)
        prompt = utils.Prompt(0, tuple(range(32)), "", ("7",), ("gsm8k",))

        def step(tokens, micro_batches):
            r = grpo.Rollout(prompt, 0, 0, [5] * tokens, [-1.0] * tokens, [True] * tokens, [0] * tokens, "stop")
            r.advantage = 1.0
            batches = [[grpo.make_batch([[[r]]], world.device) for _ in range(micro_batches)]]
            grpo.update(learner, batches, args, world, utils.Metrics())

        step(32, 1)  # Adam's state comes into being
        gc.collect()
        found.watch(gc.get_objects())
        if "reference" in flags.get("offload", ()):
            apart += [p._local_tensor for p in learner.ref_policy.parameters()]
        for tensor in apart:
            del found.live[tensor.untyped_storage()._cdata]
            found.before[tensor.untyped_storage()._cdata] = weakref.ref(tensor.untyped_storage()), 0
        with found:
            step(args.pack_length - 31, 2)
        dist.destroy_process_group()
        setup = estimate.Setup(args, ranks, True, grpo.LOGPROB_CHUNK)
        return found.peak, estimate.memory_parts(setup, estimate.count(setup, config))

    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps([measure(directory, **setting) for setting in json.loads(sys.argv[1])]), flush=True)
    os._exit(0)
"""
BASE = {"ranks": 4, "model_dtype": "bfloat16", "vocabulary": 2000, "hidden": 256, "pack_length": 512}
SETTINGS = [
    BASE | {"deepspeed_stage": 0, "model_dtype": "float32"},
    BASE | {"deepspeed_stage": 3, "gradient_checkpointing": True, "model_dtype": "float32"},
    BASE | {"deepspeed_stage": 3, "vocabulary": 8000, "pack_length": 1200},  # logits
    BASE | {"deepspeed_stage": 2, "pack_length": 64, "vocabulary": 16000},  # weights, embeddings
]
LONG = BASE | {"deepspeed_stage": 3, "vocabulary": 500, "hidden": 128, "pack_length": 2048, "model_dtype": "float32"}
ADAPTED = BASE | {"lora_rank": 16, "deepspeed_stage": 3}
SETTINGS += [  # adapters on a frozen model: activations, logits
    ADAPTED | {"gradient_checkpointing": True, "model_dtype": "float32", "vocabulary": 500, "pack_length": 512},
    ADAPTED | {"sequence_parallel_size": 2, "pack_length": 1024, "vocabulary": 8000},
]
AWAY = BASE | {"gradient_checkpointing": True, "deepspeed_stage": 3, "model_dtype": "float32", "pack_length": 128}
SETTINGS += [
    AWAY | {"offload": ["reference", "optimizer"], "vocabulary": 8000},
    AWAY | {"offload": ["reference"], "deepspeed_stage": 2, "ranks": 8, "fsdp_shard_size": 2},
]
SETTINGS += [  # without a wrapper: weights, the head's gradient
    BASE | {"ranks": 1, "deepspeed_stage": 0, "model_dtype": "float32", "vocabulary": 16000, "pack_length": 64},
]
SETTINGS += [LONG | {"sequence_parallel_size": size} for size in (1, 4)]  # activations
QWEN_7B = AutoConfig.for_model(  # 7,615,616,512 weights
    "qwen2", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False,
)  # fmt: skip
MATRICES_7B = 28 * (2 * 3584 * (3584 + 512) + 3 * 3584 * 18944)
HEAD_7B = 152064 * 3584
H100 = estimate.GPUS["h100"]


def setup_of(learners=8, shared_gpu=True, **flags):
    """A run of packs of 4,096 tokens, sharded and with gradient checkpointing unless the flags say otherwise."""
    usual = {"deepspeed_stage": 3, "gradient_checkpointing": True, "pack_length": 4096}
    args = grpo.Args(model_name_or_path="x", **usual | flags)
    return estimate.Setup(args, learners, shared_gpu, grpo.LOGPROB_CHUNK)


def parts_of(setup, config=QWEN_7B, ref_config=None):
    return estimate.memory_parts(setup, estimate.count(setup, config, ref_config))


@pytest.mark.house  # an edit may need more memory
@pytest.mark.runs
def test_estimate_against_an_update():
    done = programs.run(["-c", textwrap.dedent(MEASURE), json.dumps(SETTINGS)], OMP_NUM_THREADS=1)
    assert done.returncode == 0, done.stderr[-3000:]
    shares = []
    for setting, (peak, parts) in zip(SETTINGS, json.loads(done.stdout.splitlines()[-1]), strict=True):
        estimated = estimate.learner_bytes(parts)
        print(f"estimate / peak {estimated / peak:.2f}, {peak / 2**20:.0f} MiB, {setting}")
        assert 0.95 < estimated / peak < 1.2, (setting, peak, parts)
        if LONG.items() <= setting.items():
            rest = sum(size for name, size in parts.items() if not name.startswith(("engine", "activations")))
            logits = 12 * 500 * min(1024, 2048 // setting["sequence_parallel_size"])
            shares.append(peak - rest - 500 * 128 * 8 - logits)  # the head's gradient
    assert shares[0] / shares[1] == pytest.approx(4, rel=0.1)  # what an update holds beside weights and the like


def test_a_7b_model_by_hand():
    parts = parts_of(setup_of())
    assert parts["weights"] == parts["gradients"] == 2 * parts["reference"] == 7_615_616_512 * 4 / 8
    assert parts["engine_weights"] == 2 * 7_615_616_512 and parts["engine_token"] == 2 * 28 * 4 * 128 * 2
    # the head's gradient in float32 and bfloat16, 1024 x 152064 logits; 28 layer inputs; one layer
    head = HEAD_7B * 6 + 12 * 1024 * 152064
    assert parts["activations and head"] > head + 28 * 4096 * 3584 * 2
    assert parts["activations and head"] < head + 28 * 4096 * 3584 * 2 + 4096 * 3584 * 80
    assert parts_of(setup_of(learners=16))["Adam"] == parts["Adam"] / 2
    assert parts_of(setup_of(learners=16, fsdp_shard_size=8))["Adam"] == parts["Adam"]


def test_adapters_of_a_7b_model_by_hand():
    """Rank 16 at the seven matrices of each layer: 16 x (inputs + outputs), float32; the model is frozen, in bfloat16,
    its own reference, and without adapters in the engine."""
    setup = setup_of(lora_rank=16)
    parts = parts_of(setup)
    whole = parts_of(setup_of())
    trained = 16 * 28 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert parts["weights"] == (4 * trained + 2 * 7_615_616_512) / 8
    assert 2 * parts["gradients"] == parts["Adam"] == 8 * trained / 8
    assert parts["reference"] == 0 < whole["reference"]
    assert parts_of(setup, ref_config=QWEN_7B)["reference"] >= 2 * 7_615_616_512 / 8  # a teacher
    assert parts["engine_weights"] == whole["engine_weights"] and parts["engine_token"] == whole["engine_token"]
    less = whole["activations and head"] - parts["activations and head"]  # the head takes no gradient
    assert less == pytest.approx(HEAD_7B * 6, rel=0.05)


def test_memory_of_a_teacher():
    """A 7B teaches a 0.5B: 2 bytes a weight, over the learners; what its forward gathers is more than the update's."""
    small = AutoConfig.for_model(
        "qwen2", hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    setup = setup_of(learners=4, pack_length=2048)
    alone = parts_of(setup, small)
    counted = estimate.count(setup, small, QWEN_7B)
    taught = estimate.memory_parts(setup, counted)
    assert alone["reference"] == 2 * 494_032_768 / 4
    assert {**taught, "reference": 0} == {**alone, "reference": 0}
    shared = setup_of(sequence_parallel_size=7)  # attention repeats the 4 keys and values of the policy alone
    plain, copied = (estimate.count(shared, QWEN_7B, config) for config in (None, copy.deepcopy(QWEN_7B)))
    assert plain.activations == copied.activations
    update = sum(taught[name] for name in ("gradients", "gathered", "activations and head"))
    ends = 2 * HEAD_7B + 3584
    gathered = ends + 2 * (7_615_616_512 - ends) / 28
    logits = 12 * 1024 * 152064
    assert taught["reference"] == pytest.approx(2 * 7_615_616_512 / 4 + 2 * gathered + logits - update)
    assert parts_of(setup, QWEN_7B, small)["reference"] == 2 * 494_032_768 / 4


def test_mlps_alone_are_recomputed():
    """Kept then: all of a layer but what is as wide as its MLP, of which a whole layer's recomputation keeps one."""
    kept = []
    for flags in ({}, {"gradient_checkpointing_part": "mlp"}, {"gradient_checkpointing": False}):
        kept.append(parts_of(setup_of(**flags))["activations and head"])
    layer, mlp, none = kept
    assert layer < mlp < none - 28 * 4096 * 3 * 18944 * 2  # gate, up and their product, at least


def test_dry_run_prints_it_and_warns(tiny_models, monkeypatch, capfd):
    flags = ["--model_name_or_path", str(tiny_models()), "--dry_run", "--vllm_gpu_memory_utilization", "0.5"]

    def plan_of(*more, script=grpo):
        script.main(utils.parse_args(script.Args, [*flags, *more]))
        return capfd.readouterr().out

    out = plan_of()
    assert "memory " in out and "WARNING" not in out and "splits" not in out
    monkeypatch.setenv("PLAN_GPU", "4090")  # also where there is no GPU
    assert "24 GiB" in plan_of()
    out = plan_of("--num_learners_per_node", "2", "--vllm_num_engines", "3", script=grpo_fast)
    assert "splits   of 5 GPUs" in out and out.count("<- these flags") == 1
    assert "splits" not in plan_of("--single_gpu_mode", script=grpo_fast)
    monkeypatch.setenv("PLAN_GPU", "h1000")
    assert "not estimated" in plan_of()
    monkeypatch.delenv("PLAN_GPU")
    assert "WARNING" in plan_of("--pack_length", "500_000_256")
    assert "not estimated" in plan_of("--model_name_or_path", "no/such")


def test_an_engine_that_sleeps_and_buckets_on_their_way():
    """A learner and an engine of 0.7 do not fit a card of 80 GiB together, but in turn."""
    card = estimate.Card(80 * 2**30, "", H100)

    def warns(**flags):
        setup = setup_of(pack_length=512, vllm_gpu_memory_utilization=0.7, **flags)
        return "WARNING" in estimate.memory_text(setup, estimate.count(setup, QWEN_7B), card)

    assert not warns() and warns(vllm_sleep="off") and not warns(shared_gpu=False)
    assert parts_of(setup_of(shared_gpu=False))["buckets"] == 4 * grpo_fast.BUCKET_BYTES + 2 * HEAD_7B


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2"])
def test_any_architecture(tiny_models, arch):
    parts = parts_of(setup_of(learners=2, deepspeed_stage=0), AutoConfig.from_pretrained(tiny_models(arch)))
    assert all(size > 0 for size in parts.values())


def test_pinned_memory_is_counted_in_powers_of_two():
    """torch rounds each pinned block up."""
    sizes = (2, 2**21, 2**21 + 1, 6_000_000)
    assert [estimate.pinned_bytes([size], 0.5) for size in sizes] == [1, 2**20, 2**21, 2**22]
    exact = parts_of(setup_of(learners=3))
    away = parts_of(setup_of(learners=3, offload=["optimizer"]))
    assert 1.1 * exact["Adam"] < away["host"] < 2 * exact["Adam"] and away["Adam"] == 0


# --- Splits -----------------------------------------------------------------------------------------------------------

# 2 x 3 responses of 100 tokens to prompts of 10: 620 tokens with prompts once
STEP = {"num_unique_prompts_rollout": 2, "num_samples_per_prompt_rollout": 3, "beta": 0.0, "load_ref_policy": False}
STEP |= {"max_prompt_token_length": 10, "response_length": 100, "gradient_checkpointing": False}
PAIRS = 2 * 10**2 / 2 + 6 * 100 * (10 + 100 / 2)
FORWARD = 2 * MATRICES_7B * 620 + 4 * 28 * 3584 * PAIRS + 2 * HEAD_7B * 600


@pytest.mark.parametrize("flags, forwards", [
    ({}, 3),
    ({"gradient_checkpointing": True}, 4),
    ({"gradient_checkpointing": True, "gradient_checkpointing_part": "mlp"}, 3 + 28 * 3 * 3584 * 18944 / MATRICES_7B),
    ({"load_ref_policy": True}, 4),
    ({"num_epochs": 2}, 7),  # old logprobs
    ({"num_mini_batches": 2}, 4),
    ({"lora_rank": 1}, 2),
])  # fmt: skip
def test_operations_of_a_step_by_hand(flags, forwards):
    setup = setup_of(**STEP | flags)
    counted = estimate.count(setup, QWEN_7B)
    near = 1e-3 if "lora_rank" in flags else 1e-9  # the adapters' own operations
    assert estimate.step_operations(setup, counted) == pytest.approx(forwards * FORWARD, rel=near)


def test_seconds_of_an_engine_by_hand():
    """Two engines, 3 responses each, of which a cache for two holds two at once: 150 decoding steps read all weights,
    and each of 300 tokens a cache of 60 on average."""
    setup = setup_of(**STEP)
    counted = estimate.count(setup, QWEN_7B)
    cache = 300 * 60 * 2 * 28 * 4 * 128 * 2
    moved = 150 * 2 * 7_615_616_512 + cache
    found = estimate.sampling_seconds(setup, counted, 2, 2, H100)
    assert found == pytest.approx(moved / 3.35e12)
    roomy = estimate.sampling_seconds(setup, counted, 2, 100, H100)
    assert roomy == pytest.approx((100 * 2 * 7_615_616_512 + cache) / 3.35e12)
    wide = replace(setup, args=replace(setup.args, vllm_tensor_parallel_size=2))
    assert estimate.sampling_seconds(wide, counted, 2, 100, H100) == pytest.approx(roomy / 2)
    slow = replace(H100, operations=1e12)  # then the operations take longer than the reads
    operations = 3 * (2 * MATRICES_7B * 110 + 4 * 28 * 3584 * 110**2 / 2 + 2 * HEAD_7B * 100)
    assert estimate.sampling_seconds(setup, counted, 2, 100, slow) == pytest.approx(operations / 1e12)


def splits_of(learners=4, engines=4, card=None, **flags):
    setup = setup_of(learners, False, num_learners_per_node=[learners], vllm_num_engines=engines, **flags)
    card = card or estimate.Card(80 * 2**30, "h100", H100)
    return estimate.splits(setup, estimate.count(setup, QWEN_7B), card, card.sheet)


GSM8K = {"num_unique_prompts_rollout": 1024, "num_samples_per_prompt_rollout": 5, "num_mini_batches": 4}
GSM8K |= {"max_prompt_token_length": 105, "response_length": 232, "async_steps": 1, "vllm_gpu_memory_utilization": 0.9}


def test_splits_of_8_h100_are_ordered_by_their_step():
    """Learners share their operations: 6 take two thirds of the time of 4. One learner has no room for a 7B model."""
    found = splits_of(**GSM8K)
    assert sorted((s.learners, s.engines) for s in found) == [(n, 8 - n) for n in range(1, 8)]
    by_learners = {s.learners: s for s in found}
    assert by_learners[6].learning == pytest.approx(by_learners[4].learning * 4 / 6)
    assert by_learners[6].sampling > by_learners[4].sampling
    roomy = [s for s in found if not s.lack]
    assert [s.learners for s in found if s.lack] == [1] and found[-1].lack
    steps = [max(s.learning, s.sampling) for s in roomy]
    assert steps == sorted(steps) and roomy[0].learners == 6
    turns = [s.learning + s.sampling for s in splits_of(**GSM8K | {"async_steps": 0}) if not s.lack]
    assert turns == sorted(turns) and turns[0] > steps[0]


def test_splits_keep_to_the_flags():
    """Engines of two GPUs, learners that share packs by twos and copies by fours; small cards hold none."""
    assert {s.learners for s in splits_of(4, 2, vllm_tensor_parallel_size=2)} == {2, 4, 6}
    assert {s.learners for s in splits_of(sequence_parallel_size=2)} == {2, 4, 6}
    assert {s.learners for s in splits_of(sequence_parallel_size=2, fsdp_shard_size=4)} == {4}
    small = estimate.Card(24 * 2**30, "4090", estimate.GPUS["4090"])
    assert all(s.lack for s in splits_of(card=small, **GSM8K))
