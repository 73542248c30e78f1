"""The memory estimate of --dry_run against the bytes that an update really holds."""

import ast
import functools
import json
import shutil
import textwrap
from dataclasses import fields, replace
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

import grpo
import grpo_fast
import utils
from scripts.parts.plan import ESTIMATED_BY
from scripts.proof import memory
from tests import programs
from tests.conftest import REPO

# Rank 0 of several, alone: torch's fake process group exchanges nothing, and shards and buffers have their real sizes.
MEASURE = """
    import gc, json, os, sys, tempfile, weakref
    import utils, grpo, torch
    from scripts.proof import memory
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
            from scripts.parts import offload
            made = offload.host_memory
            offload.host_memory = lambda like: apart.append(made(like)) or apart[-1]
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
        setup = {name: value for name, value in vars(args).items() if name in memory.Setup.__dataclass_fields__}
        return found.peak, memory.memory_estimate(memory.Setup(**setup, learners=ranks), config)

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
SETTINGS += [  # adapters on a frozen model: its weights, activations, logits
    ADAPTED | {"deepspeed_stage": 0, "vocabulary": 16000, "pack_length": 64},
    ADAPTED | {"gradient_checkpointing": True, "model_dtype": "float32", "vocabulary": 500, "pack_length": 512},
    ADAPTED | {"vocabulary": 8000, "pack_length": 1200},
    ADAPTED | {"lora_rank": 128, "ranks": 2},
    ADAPTED | {"sequence_parallel_size": 2, "pack_length": 1024},
]
AWAY = BASE | {"gradient_checkpointing": True, "deepspeed_stage": 3, "model_dtype": "float32", "pack_length": 128}
SETTINGS += [
    AWAY | {"offload": ["optimizer"]},
    AWAY | {"offload": ["reference", "optimizer"], "vocabulary": 8000},
    AWAY | {"offload": ["reference"], "deepspeed_stage": 2, "ranks": 8, "fsdp_shard_size": 2},
]
ALONE = BASE | {"ranks": 1, "deepspeed_stage": 0, "model_dtype": "float32"}  # without a wrapper
SETTINGS += [
    ALONE | {"vocabulary": 16000, "pack_length": 64},  # weights, the head's gradient
    ALONE | {"gradient_checkpointing": True, "vocabulary": 500, "pack_length": 64},
    BASE | {"ranks": 1, "deepspeed_stage": 0, "vocabulary": 8000, "pack_length": 64},  # its reference has none
]
SETTINGS += [LONG | {"sequence_parallel_size": size} for size in (1, 2, 4)]  # activations


@pytest.mark.runs
def test_estimate_against_an_update():
    done = programs.run(["-c", textwrap.dedent(MEASURE), json.dumps(SETTINGS)], OMP_NUM_THREADS=1)
    assert done.returncode == 0, done.stderr[-3000:]
    shares = []
    for setting, (peak, parts) in zip(SETTINGS, json.loads(done.stdout.splitlines()[-1]), strict=True):
        estimate = memory.learner_bytes(parts)
        print(f"estimate / peak {estimate / peak:.2f}, {peak / 2**20:.0f} MiB, {setting}")
        assert 0.95 < estimate / peak < 1.2, (setting, peak, parts)
        if LONG.items() <= setting.items():
            rest = sum(size for name, size in parts.items() if not name.startswith(("engine", "activations")))
            logits = 12 * 500 * min(1024, 2048 // setting["sequence_parallel_size"])
            shares.append(peak - rest - 500 * 128 * 8 - logits)  # the head's gradient
    # what an update holds beside weights and the like is a half and a quarter
    assert [shares[0] / share for share in shares] == [1, pytest.approx(2, rel=0.1), pytest.approx(4, rel=0.1)]


def test_a_7b_model_by_hand():
    """Qwen2.5-7B: 7,615,616,512 weights, 28 layers, 4 key-value heads of 128."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "qwen2", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False,
    )  # fmt: skip
    setup = memory.Setup(learners=8, deepspeed_stage=3, gradient_checkpointing=True, pack_length=4096)
    parts = memory.memory_estimate(setup, config)
    assert parts["weights"] == parts["gradients"] == 2 * parts["reference"] == 7_615_616_512 * 4 / 8
    assert parts["engine_weights"] == 2 * 7_615_616_512 and parts["engine_token"] == 2 * 28 * 4 * 128 * 2
    # 152064 x 3584 head: its gradient in float32 and bfloat16, 1024 x 152064 logits; 28 layer inputs; one layer
    head = 152064 * 3584 * 6 + 12 * 1024 * 152064
    assert parts["activations and head"] > head + 28 * 4096 * 3584 * 2
    assert parts["activations and head"] < head + 28 * 4096 * 3584 * 2 + 4096 * 3584 * 80
    assert memory.memory_estimate(replace(setup, learners=16), config)["Adam"] == parts["Adam"] / 2


def test_adapters_of_a_7b_model_by_hand():
    """Rank 16 at the seven matrices of each layer: 16 x (inputs + outputs), float32; the model is frozen, in bfloat16,
    its own reference, and without adapters in the engine."""
    config = memory.qwen(*memory.SHAPES["Qwen2.5-7B"])
    setup = memory.Setup(learners=8, deepspeed_stage=3, gradient_checkpointing=True, pack_length=4096, lora_rank=16)
    parts, whole = (memory.memory_estimate(replace(setup, lora_rank=rank), config) for rank in (16, 0))
    trained = 16 * 28 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert parts["weights"] == (4 * trained + 2 * 7_615_616_512) / 8
    assert 2 * parts["gradients"] == parts["Adam"] == 8 * trained / 8
    assert parts["reference"] == 0 < whole["reference"]
    assert memory.memory_estimate(setup, config, config)["reference"] >= 2 * 7_615_616_512 / 8  # a teacher
    assert parts["engine_weights"] == whole["engine_weights"] and parts["engine_token"] == whole["engine_token"]
    less = whole["activations and head"] - parts["activations and head"]  # the head takes no gradient
    assert less == pytest.approx(152064 * 3584 * 6, rel=0.05)


def test_mlps_alone_are_recomputed():
    """Kept then: all of a layer but what is as wide as its MLP, of which a whole layer's recomputation keeps one."""
    config = memory.qwen(*memory.SHAPES["Qwen2.5-7B"])
    setup = memory.Setup(learners=8, deepspeed_stage=3, pack_length=4096)
    layer, mlp, none = (
        memory.memory_estimate(replace(setup, **flags), config)["activations and head"]
        for flags in (
            {"gradient_checkpointing": True},
            {"gradient_checkpointing": True, "gradient_checkpointing_part": "mlp"},
            {},
        )
    )
    assert layer < mlp < none - 28 * 4096 * 3 * 18944 * 2  # gate, up and their product, at least


def test_dry_run_prints_it_and_warns(tiny_models, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = ["--model_name_or_path", str(tiny_models()), "--dry_run", "--vllm_gpu_memory_utilization", "0.5"]
    grpo.main(utils.parse_args(grpo.Args, flags))
    out = capfd.readouterr().out
    assert "learner, GiB a GPU: weights 0.0" in out and "engine, 0.5 of" in out and "WARNING" not in out
    assert "\npacking  packs of 512 tokens, a prompt computed once for all its responses\n" in out
    monkeypatch.setenv("PLAN_GPU", "4090")  # also where there is no GPU: the share of a GPU that the learner is on too
    grpo.main(utils.parse_args(grpo.Args, flags[:3]))
    out = capfd.readouterr().out
    assert "memory   of a GPU: 24 GiB (4090)" in out and "engine, 0.4 of 24 GiB" in out
    monkeypatch.setenv("PLAN_GPU", "h1000")
    grpo.main(utils.parse_args(grpo.Args, flags[:3]))
    assert "memory   not estimated: no data sheet of a GPU h1000; there are h100, " in capfd.readouterr().out
    monkeypatch.delenv("PLAN_GPU")
    long = ["--response_length", "500_000_000", "--pack_length", "500_000_256"]
    grpo.main(utils.parse_args(grpo.Args, flags + long))
    out = capfd.readouterr().out
    assert "a token, 0 responses" in out and "WARNING: that is" in out
    grpo.main(utils.parse_args(grpo.Args, ["--model_name_or_path", "no/such-model", "--dry_run"]))
    assert "memory   not estimated: no config.json of no/such-model" in capfd.readouterr().out


def test_an_engine_that_sleeps_and_buckets_on_their_way():
    setup = memory.Setup(learners=8, deepspeed_stage=3, gradient_checkpointing=True, vllm_gpu_memory_utilization=0.7)
    config = memory.qwen(*memory.SHAPES["Qwen2.5-7B"])
    text = memory.estimate_text(setup, config)
    assert "responses of 512 tokens at once, asleep during updates" in text and "WARNING" not in text
    awake = memory.estimate_text(replace(setup, vllm_sleep="off"), config)
    assert "asleep" not in awake and "WARNING: that is" in awake
    apart = replace(setup, shared_gpu=False)
    assert "asleep" not in memory.estimate_text(apart, config)
    buckets = memory.memory_estimate(apart, config)["buckets"]
    assert buckets == 4 * grpo_fast.BUCKET_BYTES + 2 * 152064 * 3584
    small = memory.memory_estimate(replace(apart, model_dtype="float32"), memory.qwen(64, 128, 2, 2, 1, True))
    assert small["buckets"] == small["engine_weights"]


PARTS = {"weights": 1.0, "Adam": 1.0, "reference": 0.0}
OLMO_3 = {"model_type": "olmo3", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
OLMO_3 |= {"num_attention_heads": 4, "sliding_window": 16}
HYBRID = OLMO_3 | {"model_type": "olmo_hybrid", "layer_types": ["linear_attention", "full_attention"] * 2}


@pytest.mark.parametrize("config, flags, line", [
    (OLMO_3, {"sequence_parallel_size": 2}, "packs of 512 tokens, a prompt computed once for all its responses"),
    (OLMO_3, {"attn_implementation": "eager"}, "packs of 512 tokens, each response with its own prompt"),
    (HYBRID, {}, "WARNING: this model has linear_attention layers, which do not tell the responses of a pack apart, "
     "so each response has a row of its own"),
    (HYBRID, {"sequence_parallel_size": 2}, "a row of its own; --sequence_parallel_size 2 is refused"),
])  # fmt: skip
def test_the_plan_says_what_packing_a_model_will_get(config, flags, line, tmp_path, monkeypatch, capsys):
    """From its config alone: there are no weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(memory, "memory_estimate", lambda *_: {"engine_weights": 1.0, "engine_token": 1.0} | PARTS)
    (tmp_path / "config.json").write_text(json.dumps(config))
    memory.tell(memory.Setup((str(tmp_path),), **flags))
    (told,) = [row for row in capsys.readouterr().out.splitlines() if row.startswith("packing  ")]
    assert told.endswith(line)


def test_an_estimate_is_kept_for_the_next_start(tiny_models, tmp_path, monkeypatch):
    """Until anything changes that it depends on; where nothing can be kept it is made again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, made = tmp_path / "model", []
    shutil.copytree(tiny_models(), model)
    monkeypatch.setattr(memory, "estimate_text", lambda *given: made.append(given) or f"text {len(made)}")
    setup = memory.Setup((str(model),))
    assert [memory.remembered(setup) for _ in range(3)] == ["text 1"] * 3
    assert memory.remembered(replace(setup, pack_length=64)) == "text 2"
    teacher = replace(setup, ref_model_name_or_path=str(model))
    assert memory.remembered(teacher) == memory.remembered(teacher) == "text 3" and len(made[-1]) == 3
    config = model / "config.json"
    config.write_text(config.read_text() + " ")
    assert memory.remembered(setup) == "text 4" and memory.remembered(teacher) == "text 5"
    monkeypatch.setenv("XDG_CACHE_HOME", str(config))  # no directory
    assert [memory.remembered(setup) for _ in range(2)] == ["text 6", "text 7"]


def test_an_estimate_depends_on_the_programs_that_make_it(tiny_models, tmp_path, monkeypatch):
    """All that memory.py imports from the project; one that changed makes it again."""
    tree = ast.parse(Path(memory.__file__).read_text())
    imported = {
        f"{node.module}.{name.name}" if node.module == "scripts.parts" else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("scripts.")
        for name in node.names
    }
    assert {f"{name.replace('.', '/')}.py" for name in imported | {"scripts.proof.memory"}} == set(memory.SOURCES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = []
    monkeypatch.setattr(memory, "estimate_text", lambda *given: made.append(given) or f"text {len(made)}")
    for source in memory.SOURCES:
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).write_text("")
    monkeypatch.setattr(memory, "__file__", str(tmp_path / "scripts/proof/memory.py"))
    setup = memory.Setup((str(tiny_models()),))
    for n, source in enumerate(memory.SOURCES, start=1):
        (tmp_path / source).write_text("changed")
        assert memory.remembered(setup) == memory.remembered(setup) == f"text {n}"


SMALLEST = memory.SHAPES["Qwen2.5-0.5B"]


def test_the_readmes_table(monkeypatch):
    readme = (REPO / "scripts/proof/README.md").read_text()
    setup, config = memory.Setup(deepspeed_stage=3, gradient_checkpointing=True), memory.qwen(*SMALLEST)
    model = memory.meta_model(config, torch.bfloat16)
    kept = functools.cache(functools.partial(memory.kept_for_backward, model))  # the same for any number of learners
    monkeypatch.setattr(memory, "meta_model", lambda *_: model)
    monkeypatch.setattr(memory, "kept_for_backward", lambda _, tokens: kept(tokens))
    assert memory.row("Qwen2.5-0.5B", config, setup) in readme
    assert all(f"| {name} |" in readme for name in memory.SHAPES)


def test_flags_are_those_of_the_training_scripts():
    """The same names, types and defaults, and --dry_run hands all of them over."""
    ours, theirs = ({f.name: f for f in fields(cls)} for cls in (memory.Setup, grpo.Args))
    shared = ours.keys() & theirs.keys()
    for name in shared:
        assert memory.Setup.__dataclass_fields__[name].default == theirs[name].default, name
        assert get_type_hints(memory.Setup)[name] == get_type_hints(grpo.Args)[name], name
    assert ours.keys() - shared == {"models", "table", "learners", "logprob_chunk", "shared_gpu", "gpu"}
    assert set(ESTIMATED_BY) == shared and memory.Setup().logprob_chunk == grpo.LOGPROB_CHUNK


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2"])
def test_any_architecture(tiny_models, arch):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tiny_models(arch))
    parts = memory.memory_estimate(memory.Setup(), config)
    assert all(size > 0 for size in parts.values())


def test_pinned_memory_is_counted_in_powers_of_two():
    """torch rounds each pinned block up: a 32B's moments took 1.45 times what the table said."""
    assert [memory.pinned_bytes([size], 0.5) for size in (2, 2**21, 2**21 + 1, 6_000_000)] == [1, 2**20, 2**21, 2**22]
    config = memory.qwen(*memory.SHAPES["Qwen2.5-0.5B"])
    away = memory.Setup(learners=3, deepspeed_stage=3, offload=["optimizer"])
    exact = memory.memory_estimate(memory.Setup(learners=3, deepspeed_stage=3), config)["Adam"]
    assert 1.1 * exact < memory.memory_estimate(away, config)["host"] < 2 * exact
