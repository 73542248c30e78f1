"""--dry_run's estimate of memory against the bytes that an update really holds, and by hand."""

import json
import textwrap
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

import grpo
import grpo_fast
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
            out = function(*args, **(kwargs or {}))
            if self.watch(tree_leaves((out,))):
                living = [(key, ref, storage) for key, (ref, _) in self.live.items() if (storage := ref()) is not None]
                self.live = {key: [ref, storage.nbytes()] for key, ref, storage in living}
                self.peak = max(self.peak, sum(size for _, size in self.live.values()))
            return out

    def measure(directory, ranks, vocabulary, hidden, **flags):
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        world = utils.World(0, 0, ranks, torch.device("cpu"))
        config = AutoConfig.for_model(
            "llama", hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=2, vocab_size=vocabulary, tie_word_embeddings=False,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        found = Peak()
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
        with found:
            step(args.pack_length - 31, 2)
        gc.collect()
        saved = Peak()
        with saved:
            for _ in utils.full_weights(learner.policy, utils.DTYPES[args.model_dtype]):
                continue
        dist.destroy_process_group()
        setup = estimate.Setup(args, ranks, True, grpo.LOGPROB_CHUNK)
        counted = estimate.count(setup, config)
        saving = [saved.peak, estimate.saved_bytes(setup, counted.policy)]
        return found.peak, estimate.memory_parts(setup, counted), saving

    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps([measure(directory, **setting) for setting in json.loads(sys.argv[1])]), flush=True)
    os._exit(0)
"""
BASE = {"ranks": 4, "model_dtype": "float32", "vocabulary": 2000, "hidden": 256, "pack_length": 512}
SETTINGS = [
    BASE | {"deepspeed_stage": 3, "gradient_checkpointing": True},
    BASE | {"deepspeed_stage": 3, "vocabulary": 500, "hidden": 128, "pack_length": 2048},  # activations
    BASE | {"deepspeed_stage": 2, "pack_length": 64, "vocabulary": 16000},  # weights, embeddings
    BASE | {"lora_rank": 16, "deepspeed_stage": 3, "gradient_checkpointing": True, "vocabulary": 500},
    BASE | {"ranks": 1, "deepspeed_stage": 0, "vocabulary": 16000, "pack_length": 64},  # without a wrapper
]
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
    for setting, (peak, parts, saving) in zip(SETTINGS, json.loads(done.stdout.splitlines()[-1]), strict=True):
        estimated = estimate.learner_bytes(parts)
        print(f"estimate / peak {estimated / peak:.2f}, {peak / 2**20:.0f} MiB, {setting}")
        assert 0.95 < estimated / peak < 1.2, (setting, peak, parts)
        print(f"a save: {saving[0] / 2**20:.1f} MiB, estimated {saving[1] / 2**20:.1f} MiB")
        assert saving[0] < 1.2 * saving[1], (setting, saving)


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


def test_an_engine_that_sleeps_and_buckets_on_their_way():
    """A learner and an engine of 0.7 do not fit a card of 80 GiB together, but in turn."""
    card = estimate.Card(80 * 2**30, "", H100)

    def warns(**flags):
        setup = setup_of(pack_length=512, vllm_gpu_memory_utilization=0.7, **flags)
        return "WARNING" in estimate.memory_text(setup, estimate.count(setup, QWEN_7B), card)

    assert not warns() and warns(vllm_sleep="off") and not warns(shared_gpu=False)
    assert parts_of(setup_of(shared_gpu=False))["buckets"] == 4 * grpo_fast.BUCKET_BYTES + 2 * HEAD_7B


# --- Splits -----------------------------------------------------------------------------------------------------------

# 2 x 3 responses of 100 tokens to prompts of 10: 620 tokens with prompts once
STEP = {"num_unique_prompts_rollout": 2, "num_samples_per_prompt_rollout": 3, "beta": 0.0, "load_ref_policy": False}
STEP |= {"max_prompt_token_length": 10, "response_length": 100, "gradient_checkpointing": False}
PAIRS = 2 * 10**2 / 2 + 6 * 100 * (10 + 100 / 2)
FORWARD = 2 * MATRICES_7B * 620 + 4 * 28 * 3584 * PAIRS + 2 * HEAD_7B * 600


@pytest.mark.parametrize("flags, forwards", [
    ({}, 3),
    ({"load_ref_policy": True}, 4),
    ({"num_epochs": 2}, 7),  # old logprobs
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


PUBLISHED = {"Qwen/Qwen2.5-0.5B-Instruct": 0.49, "Qwen/Qwen2.5-Math-7B": 7.61, "Qwen/Qwen3-4B-Instruct-2507": 4.0}
PUBLISHED |= {"meta-llama/Llama-3.2-1B": 1.23, "allenai/OLMo-2-1124-13B-SFT": 13.7}  # 1e9 weights, of their cards


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_well_known_model_is_counted_without_its_config(name):
    model = estimate.Model(estimate.known_config(name), torch.bfloat16)
    assert model.all / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def test_a_name_that_only_begins_like_a_known_one_is_not_known():
    assert estimate.known_config("x/Qwen2.5-0.5Bits") is None and estimate.known_config("Qwen2.5") is None
