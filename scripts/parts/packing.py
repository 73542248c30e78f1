"""Which way of packing a model allows: responses in one row must not see each other.

This is tried on a probe of four responses and not assumed: recurrent and convolutional layers leak from one response
into the next, a sliding window is not in our masks, and a GPU may lack the shared memory for flex attention.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import utils
from utils import Prompt, Rollout, World


def candidates(policy: Any, args: Any, world: World) -> list[str]:
    """The ways of packing to be tried, the cheapest first; none where one response a row is the only one. All ranks.
    Raises UserError for an attention that --sequence_parallel_size cannot split."""
    config = policy.model.config
    ours = config._attn_implementation == utils.PACK_ATTENTION
    within_window = utils.within_window(config, args)
    parallel = policy.group is not None
    if parallel and not within_window:
        refuse_parallel(policy, args, f"attends within a window of {config.sliding_window} tokens")
    if parallel and not ours:
        refuse_parallel(policy, args, "does not take our attention")
    packings = ["rows"] if parallel else []  # several ranks share even a row of one response
    on_gpu = world.device.type == "cuda"
    if not within_window or (ours and on_gpu and not flex_attention_runs(config, args, world)):
        return packings
    return ["shared", "plain", *packings] if ours else ["plain", *packings]


def refuse_parallel(policy: Any, args: Any, reason: str) -> None:
    args.refuse(f"--sequence_parallel_size: {type(policy.model).__name__} {reason}: take 1")


def flex_attention_runs(config: Any, args: Any, world: World) -> bool:
    """Whether flex attention runs with this model's heads on all ranks' GPUs; else prints a warning. All ranks."""
    with torch.enable_grad():
        problem = utils.fit_flex_attention(config, utils.DTYPES[args.model_dtype], args.pack_length, world.device)
    problem = max(utils.all_gather(problem, world))
    if problem and world.is_main:
        print(f"WARNING: flex attention does not run here ({problem}): each response gets a row of its own")
    return not problem


def probe_rollouts(prompt: Prompt) -> list[Rollout]:
    """Two prompts with two short responses each: a leak shows at the start of the response that it leaks into."""
    prompt = replace(prompt, token_ids=prompt.token_ids[-4:])
    doubled = [token for token in prompt.token_ids for _ in range(2)]
    forwards = doubled[:4]
    backwards = forwards[::-1]
    rollouts = []
    for i, response in enumerate((forwards, backwards, backwards, forwards)):
        n = len(response)
        rollouts.append(Rollout(prompt, i // 2, 0, response, [0.0] * n, [True] * n))
    return rollouts


def first_that_agrees(packings: Sequence[str], policy: Any, batches: dict[str, Any], args: Any) -> str:
    """The first of the packings that gives the logprobs of one response a row, which one rank computes alone; "rows"
    if none does. `batches` are the probe in each packing. All ranks. Raises UserError as above."""
    noise = 1e-4 if args.model_dtype == "float32" else 0.03  # of rounding, as a share of the logprobs
    group = policy.group
    policy.group = None
    expected = response_logprobs(policy, batches["rows"])
    policy.group = group
    agreeing = ""
    for packing in packings:
        gap = response_logprobs(policy, batches[packing]) - expected
        if float(gap.abs().mean() / expected.abs().mean()) < noise:
            agreeing = packing
            break
    if group is not None and not agreeing:
        layers = sorted({*(getattr(policy.model.config, "layer_types", None) or ())} - {"full_attention"})
        kinds = f" ({', '.join(layers)})" if layers else ""
        refuse_parallel(policy, args, f"looks across positions not by attention alone{kinds}")
    utils.shard_again(policy)  # an engine may start next, and takes a share of the free memory
    torch.cuda.empty_cache()
    return agreeing or "rows"


def response_logprobs(policy: Any, batch: Any) -> torch.Tensor:
    """Logprobs (n,) of a batch's response tokens."""
    logprobs, _ = policy(batch, 1.0)  # (B, T)
    return logprobs[batch.response_mask]
