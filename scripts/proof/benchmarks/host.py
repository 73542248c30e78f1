"""What a micro-batch costs the host, whatever it computes: bench.py host."""

import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import grpo
import utils
from scripts.parts import sharding
from scripts.proof.benchmarks.common import BenchFlags, Result, in_rounds, ratio

RANKS = 8  # of which this process is the first; the others are not there, and collectives return at once
LAYERS = 24  # Qwen2.5-0.5B's
IN_A_GROUP = 8  # of its layers, see sharding.GROUP_BYTES
MICRO_BATCHES = 4  # of a call
GOALS = {"plain": 1 / 1.5, "recomputed": 1.0}  # plain transformers' time over ours


def make_model(directory: str) -> None:
    """A random Qwen2 of LAYERS narrow layers: as many operations as one of any width, and no work in them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen2",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=256,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def make_batches(device: torch.device) -> list[grpo.Batch]:
    """Packs of three tokens. Each is said to be of 64 rollouts with the prompts of GSM8K, which only the host sees."""
    batches = []
    for i in range(MICRO_BATCHES):
        prompt = utils.Prompt(i, tuple(range(105)), "", ("1",), ("gsm8k",))
        short = dataclasses.replace(prompt, token_ids=(5, 6))
        pack = [[grpo.Rollout(short, i, j, [7 + j], [-5.0], [True], [0], "stop", advantage=1.0 - j) for j in (0, 1)]]
        batch = grpo.make_batch([pack], device)
        batch.rollouts = np.array([dataclasses.replace(r, prompt=prompt) for r in pack[0] * 32], object)
        batches.append(batch)
    return batches


def plain_micro_batch(model: Any, ids: torch.Tensor) -> None:
    """Forward and backward of a Hugging Face model as its own Trainer makes them."""
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def milliseconds(work: Callable[[], Any], micro_batches: int = 1) -> float:
    """Of this process's CPU time, a micro-batch."""
    start = time.process_time()
    work()
    return (time.process_time() - start) * 1000 / micro_batches


def sides_of(directory: str, options: BenchFlags) -> Iterator[tuple[str, Callable[[], float]]]:
    """The sides and their clocks."""
    from transformers import AutoModelForCausalLM

    world = utils.World(0, 0, RANKS, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    narrow_layer = AutoModelForCausalLM.from_pretrained(directory).base_model.layers[0]
    sharding.GROUP_BYTES = 2 * IN_A_GROUP * sum(p.numel() for p in narrow_layer.parameters())
    flags = f"--model_name_or_path {directory} --model_dtype bfloat16 --no_load_ref_policy --beta 0 --deepspeed_stage 3"
    args = utils.parse_args(grpo.Args, [*flags.split(), *options.grpo_flags])
    batches = make_batches(world.device)
    ids = torch.tensor([[5, 6, 7]], device=world.device)
    for name, recomputes in (("plain", False), ("recomputed", True)):
        ours = dataclasses.replace(args, gradient_checkpointing=recomputes)
        policy = grpo.load_policy(ours, world)
        update = functools.partial(
            grpo.accumulate_gradient, policy, batches, MICRO_BATCHES, ours, world, utils.Metrics()
        )
        yield f"ours_{name}", functools.partial(milliseconds, update, MICRO_BATCHES)

        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(world.device).train()
        if recomputes:
            model.gradient_checkpointing_enable()
        yield (
            f"transformers_{name}",
            functools.partial(milliseconds, functools.partial(plain_micro_batch, model, ids)),
        )
    logprobs = functools.partial(grpo.fill_logprobs, policy, batches, "old_logprobs", MICRO_BATCHES, args)
    yield "ours_logprobs", functools.partial(milliseconds, logprobs, MICRO_BATCHES)


def bench_host(options: BenchFlags) -> Result:
    """Milliseconds of the host's CPU time for the forward and backward of a micro-batch of three tokens, on one thread:
    below them no GPU can go. 24 layers in bfloat16, --deepspeed_stage 3, rank 0 of 8. Flags of grpo.py change ours.

    ours_plain, ours_recomputed                  grpo.accumulate_gradient, without and with --gradient_checkpointing
    transformers_plain, transformers_recomputed  the model and its loss alone, without and with torch's checkpoint
    ours_logprobs                                a forward for old logprobs
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    with tempfile.TemporaryDirectory() as directory:
        make_model(directory)
        sides = dict(sides_of(directory, options))
    rounds = in_rounds(sides, options.repeat)
    table = {
        name: {"milliseconds": statistics.median(found), "min": min(found), "max": max(found)}
        for name, found in rounds.items()
    }
    ratios = {}
    for name, goal in GOALS.items():
        ratios[f"transformers over ours, {name}"] = ratio(rounds[f"ours_{name}"], rounds[f"transformers_{name}"], goal)
    return Result({"layers": LAYERS, "tokens": 3, "ranks": RANKS}, table, ratios)
