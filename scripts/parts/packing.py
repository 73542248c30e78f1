"""Which way of packing a model allows: responses in one row must not see each other.

Its config says part of it, without weights: which layers do more than attend, and within what. The rest is tried on a
probe of four responses and not assumed: recurrent and convolutional layers leak from one response into the next. A GPU
may also lack the shared memory for flex attention.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import utils
from utils import Prompt, Rollout, World

WAYS = {  # the fastest first
    "shared": "packs of {} tokens, a prompt computed once for all its responses",
    "plain": "packs of {} tokens, each response with its own prompt",
    "rows": "WARNING: this model {}, so each response has a row of its own",
}
LAYERS = set("full_attention sliding_attention chunked_attention attention moe mlp dense sparse".split())  # of no state
RECURRENT = {"rwkv", "xlstm"}  # models that do not name their layers
KEEP_THEIR_WINDOW = {"doge", "phimoe", "qwen2_moe"}  # in a mask of their own: the attention is not told
HAVE_SINKS = {"deepseek_v4", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"}  # more terms in the softmax
SCALES = "final_logit_softcapping logit_scale logits_scaling lm_head_multiplier".split()  # of logits, after the head


def check(args: Any, name: str, config: Any) -> None:
    """Raises UserError for a model whose logprobs, or whose packs over several ranks, would be wrong."""
    for scale in SCALES:
        value = getattr(config, scale, None) or 1
        utils.need(value == 1, f"{name} has {scale} {value}, which the learner's head leaves out: take another model")
    if args.attn_implementation == "sdpa":
        cap = getattr(config, "attn_logit_softcapping", None)
        left_out = "which --attn_implementation sdpa leaves out: take eager"
        utils.need(not cap, f"{name} has attn_logit_softcapping {cap}, {left_out}")
        utils.need(config.model_type not in HAVE_SINKS, f"{name} has attention sinks, {left_out}")
    reason = reason_for_rows(config, args)
    if reason and args.sequence_parallel_size > 1:
        args.refuse(f"--sequence_parallel_size: {name} {reason}: take 1")


def reason_for_rows(config: Any, args: Any) -> str:
    """What of its config keeps a model's responses out of packs, as a clause, or ""."""
    layers = ", ".join(other_layers(config))
    if layers:
        return f"has {layers} layers, which do not tell the responses of a pack apart"
    return obstacle(config, args)


def other_layers(config: Any) -> list[str]:
    """The kinds of layers that look at other tokens not by attention alone."""
    named: set[str] = set()
    for kinds in ("layer_types", "layers_block_type"):
        named.update(getattr(config, kinds, None) or ())
    return sorted(named - LAYERS) or ["recurrent"] * (config.model_type in RECURRENT)


def obstacle(config: Any, args: Any) -> str:
    """Why a model needs the masks that transformers makes for it, as a clause, or ""."""
    length = args.max_prompt_token_length + args.response_length
    chunk = getattr(config, "attention_chunk_size", None)
    window = getattr(config, "sliding_window", None)
    if chunk and length > chunk:
        return f"attends within chunks of {chunk:,} tokens, fewer than a prompt and a response"
    if window and length > window and config.model_type in KEEP_THEIR_WINDOW:
        return f"has a window of {window:,} tokens, fewer than a prompt and a response, in masks of its own"
    return ""


def takes_our_attention(model: Any, args: Any) -> bool:
    """Whether a model computes utils.pack_attention in place of its own."""
    return args.attn_implementation == "sdpa" and model.is_backend_compatible() and not obstacle(model.config, args)


def expected(config: Any, args: Any) -> str:
    """How responses will be packed, by the config alone. If a probe at the start finds otherwise, a run says it."""
    config = config.get_text_config()
    reason = reason_for_rows(config, args)
    if reason:
        return WAYS["rows"].format(reason)
    way = "shared" if args.attn_implementation == "sdpa" else "plain"
    return WAYS[way].format(args.pack_length)


def told(way: str, learner: Any, args: Any) -> str:
    """How responses are packed; if each has a row of its own, why."""
    if way != "rows":
        return WAYS[way].format(args.pack_length)
    policies = [learner.policy]
    if args.ref_model_name_or_path:
        policies.append(learner.ref_policy)
    reasons = [reason_for_rows(policy.model.config, args) for policy in policies]
    if not utils.FLEX_OPTIONS:
        reasons.append("needs flex attention, which does not run here")
    reasons.append("has layers that see across the responses of a pack")
    return WAYS["rows"].format(next(filter(None, reasons)))


def slower(ways: Sequence[str]) -> str:
    """The way of packing for several models together."""
    return max(ways, key=list(WAYS).index)


def candidates(policy: Any, args: Any, world: World) -> list[str]:
    """The ways of packing to be tried, the cheapest first; none where one response a row is the only one. All ranks.
    Raises UserError for an attention that --sequence_parallel_size cannot split."""
    config = policy.model.config
    ours = config._attn_implementation == utils.PACK_ATTENTION
    needs_its_masks = obstacle(config, args)
    parallel = policy.group is not None
    if parallel and needs_its_masks:
        refuse_parallel(policy, args, needs_its_masks)
    if parallel and not ours:
        refuse_parallel(policy, args, "does not take our attention")
    packings = ["rows"] if parallel else []  # several ranks share even a row of one response
    on_gpu = world.device.type == "cuda"
    if needs_its_masks:
        return packings
    if ours and on_gpu and not flex_attention_runs(config, args, world):
        if not parallel:
            policy.model.set_attn_implementation("sdpa")  # which has masks for windows
        elif getattr(config, "sliding_window", None):
            refuse_parallel(policy, args, "has a window, for which flex attention does not run here")
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
        rollouts.append(Rollout(prompt, i // 2, 0, response, [0.0] * n, [True] * n, [0] * n))
    return rollouts


def first_that_agrees(packings: Sequence[str], policy: Any, batches: dict[str, Any], args: Any) -> str:
    """The first of the packings that gives the logprobs of one response a row, which one rank computes alone; "rows"
    if none does. `batches` are the probe in each packing. All ranks. Raises UserError as above."""
    noise = 1e-4 if args.model_dtype == "float32" else 0.03  # of rounding, as a share of the logprobs
    group = policy.group
    policy.group = None
    before = random_state()
    expected = response_logprobs(policy, batches["rows"])
    policy.group = group
    if args.gradient_checkpointing and not torch.equal(random_state(), before):
        args.refuse("--gradient_checkpointing: the model draws random numbers, which it would not draw again: leave it")
    agreeing = ""
    for packing in packings:
        gap = response_logprobs(policy, batches[packing]) - expected
        if float(gap.abs().mean() / expected.abs().mean()) < noise:
            agreeing = packing
            break
    if group is not None and not agreeing:
        reason = reason_for_rows(policy.model.config, args)
        refuse_parallel(policy, args, reason or "looks across positions not by attention alone")
    utils.shard_again(policy)  # an engine may start next, and takes a share of the free memory
    torch.cuda.empty_cache()
    return agreeing or "rows"


def random_state() -> torch.Tensor:
    """Torch's, of the device that computes."""
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def response_logprobs(policy: Any, batch: Any) -> torch.Tensor:
    """Logprobs (n,) of a batch's response tokens."""
    logprobs, _ = policy(batch, 1.0)  # (B, T)
    return logprobs[batch.response_mask]
