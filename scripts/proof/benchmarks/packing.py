"""Benchmark of pack_rollouts: bench.py packing."""

import math
import statistics
from collections.abc import Sequence

import torch

import grpo
from scripts.proof.benchmarks.common import (
    BenchFlags,
    Result,
    draw_lengths,
    make_rollouts,
    ratio,
    side_by_side,
    spread,
)

Shares = list[list[grpo.Pack]]  # the packs of each learner


def next_fit(lengths: Sequence[int], pack_length: int, learners: int) -> tuple[list[list[list[int]]], list[list[int]]]:
    """open-instruct's packs (indices) of each learner, and those it drops. A pack is filled until the next sequence
    does not fit. Every learner gets the same number of packs, in order. The others are dropped."""
    limit = min(pack_length, sum(lengths) // learners)
    room = -1
    packs: list[list[int]] = []
    for i, length in enumerate(lengths):
        if length > room:
            packs.append([])
            room = limit
        packs[-1].append(i)
        room -= length
    count = len(packs) // learners
    shares = [packs[k * count : (k + 1) * count] for k in range(learners)]
    return shares, packs[learners * count :]


def pack_next_fit(
    rollouts: list[grpo.Rollout], lengths: list[int], pack_length: int, learners: int
) -> tuple[Shares, int]:
    """Packs of rollouts that share no prompt, as open-instruct makes them, and the number of packs it drops. `lengths`
    include the prompts."""
    shares, dropped = next_fit(lengths, pack_length, learners)
    packs = [[[[rollouts[i]] for i in indices] for indices in share] for share in shares]
    return packs, len(dropped)


def imbalance(loads: Sequence[float]) -> float:
    """The largest load over the mean."""
    return max(loads) / max(statistics.mean(loads), 1)


def describe(shares: Shares, pack_length: int, pair_cost: float) -> dict[str, float]:
    """The figures of packs."""
    tokens = []
    costs = []
    fewest = []
    response_tokens = 0
    for packs in shares:
        pieces = [piece for pack in packs for piece in pack]
        tokens.append(sum(map(grpo.piece_length, pieces)))
        fewest.append(math.ceil(tokens[-1] / pack_length))
        costs.append(tokens[-1] + pair_cost * sum(map(grpo.attended_pairs, pieces)))
        response_tokens += sum(len(r.token_ids) for piece in pieces for r in piece)
    return {
        "tokens": sum(tokens),
        "packs": sum(map(len, shares)),
        "fewest_packs": sum(fewest),
        "token_imbalance": imbalance(tokens),
        "cost_imbalance": imbalance(costs),
        "response_tokens": response_tokens,
    }


def bench_packing(options: BenchFlags) -> Result:
    """pack_rollouts with and without shared prompts, and next-fit of the responses with their prompts as they arrive.

    Prompts start together, and a group arrives when its longest response is done. An imbalance is the largest learner's
    load over the mean; a cost is tokens + pair_cost * attended pairs. fewest_packs: no packing of each learner's tokens
    has fewer. No weights are loaded.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        policy = grpo.Policy(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model)))
    groups = draw_lengths(options.sequences // options.samples, options)
    groups.sort(key=lambda group: max(group.responses))
    rollouts = make_rollouts(groups, 2, options.seed)
    lengths = [grpo.piece_length([rollout]) for rollout in rollouts]
    responses = sum(len(rollout.token_ids) for rollout in rollouts)
    table = {}
    ratios = {}
    for learners in options.learners:
        sizes = (options.pack_length, learners)
        sides = {
            "shared": lambda s=sizes: (grpo.pack_rollouts(rollouts, "shared", *s, policy.pair_cost), 0),
            "plain": lambda s=sizes: (grpo.pack_rollouts(rollouts, "plain", *s, policy.pair_cost), 0),
            "next-fit": lambda s=sizes: pack_next_fit(rollouts, lengths, *s),
        }
        seconds, packed = side_by_side(sides, options.repeat, warm_up=False)
        rows = {}
        for packing, (shares, dropped) in packed.items():
            row = spread(seconds[packing]) | describe(shares, options.pack_length, policy.pair_cost)
            row["packs"] += dropped
            row["response_tokens_lost"] = responses - row.pop("response_tokens")
            rows[packing] = row
            table[f"{packing}, {learners}"] = row
        for packing in ("shared", "plain"):
            name = f"{packing}, {learners} learners"
            row = rows[packing]
            ratios[f"{name}: tokens kept"] = ratio([responses], [responses - row["response_tokens_lost"]], 1.0)
            ratios[f"{name}: fewest packs over packs"] = ratio([row["packs"]], [row["fewest_packs"]])
        next_fit_packs = rows["next-fit"]["packs"]
        ratios[f"{name}: next-fit's packs over packs"] = ratio([row["packs"]], [next_fit_packs])
    settings = {"sequences": len(rollouts), "response_tokens": responses, "pair_cost": policy.pair_cost}
    return Result(settings, table, ratios)
