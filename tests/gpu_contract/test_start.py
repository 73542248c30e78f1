"""What the start of a run owes a GPU: memory given back, an order, kernels that fit."""

import contextlib
import os
import signal
import types
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

import grpo
import grpo_fast
import utils


class Enough(Exception):
    """A process has come as far as a test needs."""


# ---------------------------------------------------------------------------------------------------------------------
# Memory that an engine finds
# ---------------------------------------------------------------------------------------------------------------------


def test_the_packing_probe_gives_its_memory_back(tiny_models, world):
    """After a forward without a backward FSDP keeps whole copies of the weights; an engine that starts then finds that
    much less."""
    args = grpo.Args(model_name_or_path=str(tiny_models()), model_dtype="float32")
    policy = grpo.load_policy(args, world)
    assert grpo.choose_packing(policy, utils.Prompt(0, (5, 6, 7), "", (), ()), args, world) != "rows"
    assert all(isinstance(p, DTensor) for p in policy.parameters())


def test_the_first_gap_gives_its_memory_back(tiny_models, world):
    """The engine slept meanwhile and wakes for the first rollouts, before an update frees them."""
    args = grpo.Args(model_name_or_path=str(tiny_models()), model_dtype="float32")
    policy = grpo.load_policy(args, world)
    group = [utils.Rollout(utils.Prompt(0, (5, 6, 7), "", (), ()), 0, 0, [8, 9], [-1.0] * 2, [True] * 2)]
    for _, when, check in grpo.starts(policy, replace(args, max_logprob_gap=0.0), 0):
        assert check(policy, [group], when, replace(args, max_logprob_gap=0.0), world)
        assert not all(isinstance(p, DTensor) for p in policy.parameters())
    assert all(isinstance(p, DTensor) for p in policy.parameters())


@pytest.mark.parametrize("name, waits_for", [("engine 0", "learner loaded"), ("engine 1", "engine 0 loaded")])
def test_ranks_of_one_gpu_start_one_after_the_other(monkeypatch, name, waits_for):
    """vLLM measures what is free on the device and stops when that grows meanwhile."""
    told = []
    store = types.SimpleNamespace(get=lambda k: told.append(f"wait for {k}"), set=lambda k, v: told.append(f"say {k}"))
    roles = grpo_fast.Roles(1, 2, 1, False, int(name[-1]))
    world = utils.World(0, 0, 1, torch.device("cpu"))
    monkeypatch.setattr(grpo_fast, "join", lambda *_: world)
    monkeypatch.setattr(grpo_fast, "start_watchdog", lambda *_: None)
    monkeypatch.setattr(utils, "load_tokenizer", lambda _: None)
    monkeypatch.setattr(utils, "make_engine", lambda *_: told.append("start"))

    def enough(*_):
        raise Enough

    monkeypatch.setattr(grpo_fast, "weights_group", enough)
    with pytest.raises(Enough):
        grpo_fast.run_engine(grpo.Args(single_gpu_mode=True), roles, types.SimpleNamespace(store=store))
    assert told == [f"wait for {waits_for}", "start", f"say {name} loaded"]


@pytest.mark.parametrize("flags, fast, most", [("", False, 0.8), ("--vllm_sleep off", False, 0.6),
                                                ("--single_gpu_mode", True, 0.6), ("", True, 0.95)])  # fmt: skip
def test_a_shared_gpu_is_not_filled_by_the_engine(monkeypatch, flags, fast, most):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def check(share):
        line = f"--model_name_or_path x --vllm_gpu_memory_utilization {share} {flags}"
        utils.parse_args(grpo.Args, line.split()).check(1, fast)

    check(most)
    if most < 0.9:
        with pytest.raises(utils.UserError, match=rf"--vllm_gpu_memory_utilization 0\.9 .* 0\.3 to {most}"):
            check(0.9)


def test_sleep_is_refused_where_nothing_can(monkeypatch):
    def check(line, fast=False):
        args = utils.parse_args(grpo.Args, f"--model_name_or_path x --vllm_gpu_memory_utilization 0.5 {line}".split())
        args.check(1, fast)
        if fast:
            grpo_fast.check_fast_args(args, None, 1)

    with pytest.raises(utils.UserError, match="--vllm_sleep on: only vLLM on a GPU"):
        check("--vllm_sleep on")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check("--vllm_sleep on")
    with pytest.raises(utils.UserError, match="--vllm_sleep on: only vLLM on a GPU"):
        check("--vllm_sleep on --rollout_backend transformers")
    with pytest.raises(utils.UserError, match="--vllm_sleep on: engines of grpo_fast.py"):
        check("--vllm_sleep on", fast=True)


def test_an_engine_may_share_a_gpu_and_a_learner_may_not(monkeypatch):
    """NCCL refuses two ranks on one GPU, after minutes of loading."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def check(flags):
        line = f"--model_name_or_path x --single_gpu_mode {flags}"
        grpo_fast.check_fast_args(utils.parse_args(grpo.Args, line.split()), None, 1)

    check("--num_learners_per_node 2 --vllm_num_engines 2")
    with pytest.raises(utils.UserError, match="--num_learners_per_node .* need 3 GPUs on a node, 2 are visible"):
        check("--num_learners_per_node 3 --vllm_num_engines 1")


# ---------------------------------------------------------------------------------------------------------------------
# Nodes
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node, host", [("0", "head"), ("1", "10.0.0.2")])
def test_learner_0_gives_the_address_of_its_own_node(monkeypatch, node, host):
    """--num_learners_per_node 0 8: it is not on the node of torchrun's rank 0, whose name all ranks know."""
    told = {}

    class Listener:
        address = ("", 4321)

        def __init__(self, where, authkey):
            assert where[0] == ""  # on every interface

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def accept(self):
            raise Enough

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("GROUP_RANK", node)
    reached = contextlib.nullcontext(types.SimpleNamespace(getsockname=lambda: ("10.0.0.2", 5)))
    monkeypatch.setattr(grpo_fast.socket, "create_connection", lambda where: reached if where == ("head", 1) else None)
    monkeypatch.setattr(grpo_fast, "Listener", Listener)
    meeting = types.SimpleNamespace(host="head", port=1, store=types.SimpleNamespace(set=told.__setitem__))
    with pytest.raises(Enough):
        grpo_fast.meet_engines(meeting, grpo_fast.Roles(8, 8, 1, True, 0))
    assert told["address"].split()[:2] == [host, "4321"]


# ---------------------------------------------------------------------------------------------------------------------
# Flex attention on GPUs with little shared memory
# ---------------------------------------------------------------------------------------------------------------------

CONFIG = types.SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=64, head_dim=None)


class Kernel(torch.autograd.Function):
    """Flex attention on a GPU where the forward wants one stage and the backward small blocks."""

    seen: list[tuple[str, int]] = []
    fits = 0

    @staticmethod
    def forward(ctx, query, key, value, options):
        ctx.options = options
        Kernel.seen.append(("forward", query.shape[2]))
        if options.get("fwd_num_stages") != 1:
            raise RuntimeError("out of resource: shared memory, Required: 153600, Hardware limit: 101376")
        return query.clone()

    @staticmethod
    def backward(ctx, gradient):
        Kernel.seen.append(("backward", gradient.shape[2]))
        if ctx.options["bwd_BLOCK_M1"] > Kernel.fits:
            raise RuntimeError("out of resource: shared memory")
        return gradient, None, None, None


@pytest.fixture
def small_gpu(monkeypatch):
    monkeypatch.setattr(utils, "FLEX_OPTIONS", list(utils.FLEX_OPTIONS))
    monkeypatch.setattr(Kernel, "seen", [])

    def flex(query, key, value, block_mask, scale, kernel_options, enable_gqa):
        assert enable_gqa and block_mask.shape[-2:] == (query.shape[2], query.shape[2])
        return Kernel.apply(query, key, value, kernel_options)

    monkeypatch.setattr(utils, "_flex_attention", lambda: flex)


@pytest.mark.parametrize("fits, left", [(32, 2), (16, 1), (8, 0)])
def test_the_first_kernel_options_that_run_are_taken(small_gpu, monkeypatch, fits, left):
    """Forward and backward, over as many tokens as a pack has: the defaults exceed what some GPUs have."""
    monkeypatch.setattr(Kernel, "fits", fits)
    why = utils.fit_flex_attention(CONFIG, torch.float32, 300, torch.device("cpu"))
    teachers = utils.fit_flex_attention(CONFIG, torch.float32, 300, torch.device("cpu"))  # tried after the policy's
    assert bool(why) == bool(teachers)
    assert len(utils.FLEX_OPTIONS) == left and ("shared memory" in why) == (left == 0)
    assert {tokens for _, tokens in Kernel.seen} == {300} and Kernel.seen[-1][0] == "backward"
    assert Kernel.seen[0] == ("forward", 300)


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
    assert "WARNING: flex attention does not run here (OutOfResources: shared memory)" in capsys.readouterr().out


@pytest.mark.parametrize(("gpus", "steps", "threads"), [(8, 0, 12), (8, 4, 12), (0, 0, 96), (0, 4, 12)])
def test_ranks_share_the_cores(monkeypatch, gpus, steps, threads):
    """What the launcher itself may use, every rank would else take for its own: 8 x 96 threads on a node of GPUs. On a
    CPU learners and engines have all cores in turn where no rollout is ahead."""
    from torch.distributed.launcher import api

    monkeypatch.setattr(utils, "ALL_CORES", set(range(96)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "96")
    monkeypatch.setattr(api, "elastic_launch", lambda config, program: lambda *line: None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    line = f"--model_name_or_path x --num_learners_per_node 4 --vllm_num_engines 4 --async_steps {steps}"
    grpo_fast.launch(utils.parse_args(grpo.Args, [*line.split(), "--total_episodes", "4"]))
    assert os.environ["OMP_NUM_THREADS"] == str(threads)
    assert "GRPO_MEETING" not in os.environ, "what this process starts next, torchrun, would look for that file"
