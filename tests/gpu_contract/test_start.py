"""What the start of a run owes a GPU: memory given back, an order, kernels that fit."""

import contextlib
import os
import socket
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig

import grpo
import grpo_fast
import utils
from scripts.parts import addresses, checks, guards


class Enough(Exception):
    """A process has come as far as a test needs."""


# ---------------------------------------------------------------------------------------------------------------------
# Memory that an engine finds
# ---------------------------------------------------------------------------------------------------------------------


def test_what_computes_before_an_update_gives_its_memory_back(tiny_models, world):
    """After a forward without a backward FSDP keeps whole copies of the weights. An engine that starts after the
    packing probe, or wakes after the first gap, finds that much less."""
    args = grpo.Args(model_name_or_path=str(tiny_models()), model_dtype="float32", deepspeed_stage=2)
    policy = grpo.load_policy(args, world)
    prompt = utils.Prompt(0, (5, 6, 7), "", (), ())
    assert grpo.choose_packing(policy, prompt, args, world) != "rows"
    assert all(isinstance(p, DTensor) for p in policy.parameters())
    group = [utils.Rollout(prompt, 0, 0, [8, 9], [-1.0] * 2, [True] * 2, [0] * 2)]
    assert grpo.measure_gap(policy, [group], args, world).metrics
    assert not all(isinstance(p, DTensor) for p in policy.parameters())
    utils.shard_again(policy)  # as grpo.send_first_weights does
    assert all(isinstance(p, DTensor) for p in policy.parameters())


def enough(*_):
    raise Enough


@pytest.fixture
def run_engine(monkeypatch):
    """Function (args, number of the engine, store, device): run_engine as far as `enough`."""
    monkeypatch.setattr(grpo_fast, "start_watchdog", lambda *_: None)

    def run(args, number, store, device):
        monkeypatch.setattr(grpo_fast, "join", lambda *_: utils.World(0, 0, 1, torch.device(device)))
        with pytest.raises(Enough):
            grpo_fast.run_engine(args, grpo_fast.Roles(1, 2, 1, False, number), types.SimpleNamespace(store=store))

    return run


@pytest.mark.parametrize("number, waits_for", [(0, "learner loaded"), (1, "engine 0 loaded")])
def test_ranks_of_one_gpu_start_one_after_the_other(monkeypatch, run_engine, number, waits_for):
    """vLLM measures what is free on the device and stops when that grows meanwhile."""
    told = []
    store = types.SimpleNamespace(get=lambda k: told.append(f"wait for {k}"), set=lambda k, v: told.append(f"say {k}"))
    monkeypatch.setattr(utils, "load_tokenizer", lambda _: None)
    monkeypatch.setattr(utils, "make_engine", lambda *_: told.append("start"))
    monkeypatch.setattr(grpo_fast, "weights_group", enough)
    run_engine(grpo.Args(single_gpu_mode=True), number, store, "cpu")
    assert told == [f"wait for {waits_for}", "start", f"say engine {number} loaded"]


@pytest.mark.parametrize("device, flags, asked", [("cuda", True, "1"), ("cuda", False, ""), ("cpu", True, "0")])
def test_a_deterministic_engine_asks_for_kernels_that_do_not_know_their_batch(
    monkeypatch, run_engine, device, flags, asked
):
    monkeypatch.setattr(utils, "load_tokenizer", enough)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "")
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    run_engine(grpo_fast.Args(model_name_or_path="x", deterministic=flags), 0, None, device)
    assert os.environ.get("VLLM_BATCH_INVARIANT", "") == asked


def test_an_engine_may_share_a_gpu_and_a_learner_may_not(monkeypatch):
    """NCCL refuses two ranks on one GPU, after minutes of loading."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def check(flags):
        line = f"--model_name_or_path x --single_gpu_mode {flags}"
        checks.check_fast(utils.parse_args(grpo.Args, line.split()), None, 1)

    check("--num_learners_per_node 2 --vllm_num_engines 2")
    with pytest.raises(utils.UserError, match="need 3 GPUs"):
        check("--num_learners_per_node 3 --vllm_num_engines 1")


# ---------------------------------------------------------------------------------------------------------------------
# Nodes
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first, own, interface, refused", [
    ("10.0.0.1", "127.0.1.1", None, True),
    ("10.0.0.1", "127.0.1.1", "eth0", False),
    ("10.0.0.1", "10.0.0.2", None, False),
    ("127.0.1.1", "127.0.1.1", None, False),  # both agents are on this machine
])  # fmt: skip
def test_a_node_whose_name_is_a_loopback_address_is_refused(monkeypatch, first, own, interface, refused):
    """Debian's /etc/hosts: gloo then waits for minutes for a node that it can never reach."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setattr(socket, "gethostname", lambda: "node-1")
    found = {"node-0": first, "node-1": own}
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port: [(2, 1, 6, "", (found[name], 0))])
    with pytest.raises(utils.UserError, match="GLOO_SOCKET_IFNAME") if refused else contextlib.nullcontext():
        addresses.check_name_of_node()


def test_a_job_operators_variables_are_not_torchruns(monkeypatch):
    """MASTER_ADDR alone: this machine's ranks are started. WORLD_SIZE too, without torchrun: refused. Both once waited
    for a day, without a word, for a store that nobody hosts."""
    started = []
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(grpo_fast, "launch", started.append)
    line = "--model_name_or_path x --dataset_mixer_list reasoning_gym:chain_sum 10 --total_episodes 64"
    args = utils.parse_args(grpo.Args, line.split())
    grpo_fast.main(args)
    assert len(started) == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(utils.UserError, match="WORLD_SIZE"):
        grpo_fast.main(args)


def test_a_forward_is_a_sign_of_life(monkeypatch):
    """An update longer than --stall_timeout_s moves at each micro-batch, and was ended as a stall."""
    beats = []
    policy = torch.nn.Linear(2, 2)
    watchdog = types.SimpleNamespace(beat=lambda: beats.append(1))
    run = types.SimpleNamespace(learner=types.SimpleNamespace(policy=policy), tokenizer=None, run_dir=None)
    run.args = run.eval_world = None
    monkeypatch.setattr(grpo, "start_reward_models", lambda *_: None)
    monkeypatch.setattr(utils, "eos_token_ids", lambda *_: None)
    monkeypatch.setattr(grpo_fast, "start_watchdog", lambda *_: watchdog)
    monkeypatch.setattr(grpo_fast, "weights_group", lambda *_: (None, None))
    monkeypatch.setattr(addresses, "meet_engines", lambda *_: [])
    monkeypatch.setattr(grpo_fast, "Engines", lambda *_: None)
    monkeypatch.setattr(grpo_fast, "Sender", lambda *_: None)
    meeting = types.SimpleNamespace(store=types.SimpleNamespace(set=lambda *_: None))
    grpo_fast.start_sender(run, grpo_fast.Roles(1, 1, 1, True, 0), meeting)
    for _ in range(3):
        policy(torch.ones(2))
    assert len(beats) == 3


# ---------------------------------------------------------------------------------------------------------------------
# Flex attention on GPUs with little shared memory
# ---------------------------------------------------------------------------------------------------------------------

CONFIG = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, hidden_size=64, num_hidden_layers=2)


class Kernel(torch.autograd.Function):
    """Flex attention on a GPU where the backward may want more shared memory than there is."""

    seen: list[tuple[str, int]] = []
    fits = True

    @staticmethod
    def forward(ctx, query, key, value):
        Kernel.seen.append(("forward", query.shape[2]))
        return query.clone()

    @staticmethod
    def backward(ctx, gradient):
        Kernel.seen.append(("backward", gradient.shape[2]))
        if not Kernel.fits:
            raise RuntimeError("out of resource: shared memory, Required: 153600, Hardware limit: 101376")
        return gradient, None, None


@pytest.fixture
def small_gpu(monkeypatch):
    monkeypatch.setattr(Kernel, "seen", [])

    def flex(query, key, value, block_mask, scale, kernel_options, enable_gqa):
        assert enable_gqa and block_mask.shape[-2:] == (query.shape[2], query.shape[2])
        # without it packs of fewer than 128 tokens get kernels for decoding, which ended a run on an H100
        assert kernel_options["BACKEND"] == "TRITON"
        return Kernel.apply(query, key, value)

    monkeypatch.setattr(utils, "_flex_attention", lambda: flex)


@pytest.mark.parametrize("fits", [True, False])
def test_flex_attention_is_tried_before_a_run(small_gpu, monkeypatch, fits):
    """Forward and backward, over as many tokens as a pack has: they exceed the shared memory of some GPUs."""
    monkeypatch.setattr(Kernel, "fits", fits)
    why = utils.fit_flex_attention(CONFIG, torch.float32, 300, torch.device("cpu"))
    assert ("shared memory" in why) == (not fits) == bool(why)
    assert Kernel.seen == [("forward", 300), ("backward", 300)]


def test_too_little_memory_is_not_taken_for_a_kernel_that_does_not_run(small_gpu, monkeypatch):
    """With other options it would be too little again, and the run would go on slowly with a wrong reason."""

    def flex(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(utils, "_flex_attention", lambda: flex)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        utils.fit_flex_attention(CONFIG, torch.float32, 300, torch.device("cpu"))


def test_where_no_kernel_runs_each_response_has_a_row(tiny_models, world, monkeypatch, capsys):
    asked = []

    def fit(config, dtype, tokens, device):
        asked.append((config.hidden_size, dtype, tokens, torch.is_grad_enabled()))
        return "OutOfResources: shared memory"

    args = grpo.Args(model_name_or_path=str(tiny_models()), model_dtype="float32", pack_length=700)
    policy = grpo.load_policy(args, world)
    monkeypatch.setattr(utils, "fit_flex_attention", fit)
    gpu = utils.World(0, 0, 1, torch.device("cuda"))
    assert grpo.choose_packing(policy, utils.Prompt(0, (5, 6, 7), "", (), ()), args, gpu) == "rows"
    assert asked == [(policy.model.config.hidden_size, torch.float32, 700, True)]
    assert "OutOfResources: shared memory" in capsys.readouterr().out


def test_moments_are_not_made_in_what_a_backward_has_freed(tiny_models, world, monkeypatch):
    """Blocks in which Adam's moments lie cannot be given back, and the engine that wakes up needs them."""
    line = f"--model_name_or_path {tiny_models()} --model_dtype float32 --max_logprob_gap 0 --total_episodes 64"
    args = utils.parse_args(grpo.Args, line.split())
    learner = grpo.load_learner(args, world)
    moments = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: moments.append(len(learner.optimizer.state)))
    grpo.free_for_moments.cache_clear()
    for p in learner.policy.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(2):
        grpo.clip_gradient(learner.policy, args, replace(world, device=torch.device("cuda")), utils.Metrics())
        learner.optimizer.step()
    assert moments == [0]


def test_an_idle_batch_is_where_the_learner_computes():
    """The shards of --offload reference are elsewhere, and FSDP moves no Batch: the embedding of a rank with fewer
    micro-batches than the others met ids of the host."""
    seen = []

    class Offloaded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Linear(1, 1, device="meta")

        def forward(self, batch, temperature):
            seen.append(batch.input_ids.device)
            return batch.vllm_logprobs, None

    args = grpo.Args(model_name_or_path="model")
    grpo.fill_logprobs(Offloaded(), [], "ref_logprobs", 1, args)
    assert seen == [torch.device("cpu")]


def test_an_engine_that_sleeps_during_the_first_check_gets_its_weights_again(monkeypatch):
    told = []

    class Sleeper:
        asleep = False

        def sleep(self):
            told.append("sleep")
            self.asleep = True

    def load(run, engine, version):
        told.append(f"load {version}")
        engine.asleep = False

    monkeypatch.setattr(grpo, "load_engine", load)
    monkeypatch.setattr(grpo, "measure_gap", lambda *_: told.append("check"))
    monkeypatch.setattr(utils, "shard_again", lambda _: None)
    monkeypatch.setattr(grpo, "sample_probes", lambda *_: told.append("sample"))
    learner = types.SimpleNamespace(policy=None)
    run: Any = types.SimpleNamespace(args=None, world=utils.World(0, 0, 1, None), learner=learner, state={"step": 7})
    monkeypatch.setattr(guards, "Echo", lambda args: None)
    grpo.send_first_weights(run, Sleeper())
    assert told == ["load 7", "sample", "sleep", "check", "load 7"]
