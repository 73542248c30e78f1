"""Whether an engine has all adapters of --lora_rank, found out before the first rollout.

The adapters of a first update, with B near 0, change less than rounding does: an engine that lacks them looks healthy.
So the engine first samples with the noise of adapters.trial_adapters, which moves a logprob by about a nat.
"""

import math
from typing import Any

import torch
import torch.distributed as dist

import utils


def check(batch: Any, when: str, args: Any, world: utils.World) -> None:
    """Raise GapError unless each engine's logprobs are those of a learner with the adapters. All ranks.

    Each row of the grpo.Batch is a response of one engine. Its old logprobs are the learner's with the trial's
    adapters, its ref logprobs those without adapters: the difference is the adapters' effect. The gap of the worst
    engine may be a small share of the mean effect. In float32 that is 0.2 %: each of SmolLM2's 210 adapters has 0.7 %
    of the effect or more. In bfloat16 it is 30 %: rounding is 7 %, and more for less than 8 tokens. What a float32
    logprob is rounded by is no gap: of a small model with a short response it can be 1 % of the effect."""
    limit = 0.3
    least_tokens = 8
    rounding = 0.0
    if args.model_dtype == "float32":
        limit = 0.002
        least_tokens = 1
        rounding = 5e-6

    mask = batch.response_mask  # (B, T)
    gaps = (batch.old_logprobs - batch.vllm_logprobs).abs()  # (B, T)
    lengths = mask.sum(1).clamp(min=least_tokens)  # (B,)
    engine_gaps = torch.where(mask, gaps, 0.0).sum(1) / lengths  # (B,)
    worst = float(engine_gaps.max().nan_to_num(math.inf))
    (worst,) = utils.all_reduce([worst], world, dist.ReduceOp.MAX)

    effects = (batch.old_logprobs - batch.ref_logprobs)[mask].abs()  # (n,)
    effect, tokens = utils.all_reduce([float(effects.sum()), len(batch.places)], world)
    if effect == 0:
        raise utils.GapError(f"{when}: the reference's logprobs are computed with the adapters on (fill_logprobs)")
    if not worst <= max(limit * effect / tokens, rounding):  # not: NaN is beyond it
        share = worst * tokens / effect
        raise utils.GapError(
            f"{when}: learner and engine are apart by {share:.2%} of what adapters do to logprobs, "
            f"more than {limit:.1%}: an adapter did not reach the engine"
        )
