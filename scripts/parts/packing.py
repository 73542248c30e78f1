"""Which way of packing a model allows: responses in one row must not see each other.

Its config says part of it, without weights: which layers do more than attend, and within what. The rest is tried on a
probe of four responses and not assumed. When one response of a pack is another one, the logprobs of the others must
stay what they are, bit by bit: recurrent and convolutional layers leak from one response into the next. A GPU may also
lack the shared memory for flex attention.
"""

import importlib.util
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
KERNELS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}  # module: package, for GPUs
RECURRENT = {"rwkv", "xlstm"}  # models that do not name their layers
KEEP_THEIR_WINDOW = {"doge", "phimoe", "qwen2_moe"}  # in a mask of their own: the attention is not told
HAVE_SINKS = {"deepseek_v4", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"}  # more terms in the softmax
SCALES = "final_logit_softcapping logit_scale logits_scaling lm_head_multiplier".split()  # of logits, after the head
# In nats. A pack may round a logprob in another way than a row does: the mean |difference|. But what one response does
# to another is 0.0 in every dtype, with experts 1e-6; a recurrent layer makes 0.3 and more
LIMITS = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.3}
LEAK = 1e-3


def check(args: Any, name: str, config: Any, auto_class: Any) -> None:
    """Raises UserError for a model whose logprobs, or whose packs over several ranks, would be wrong."""
    model = utils.model_class(config, auto_class)
    if args.attn_implementation == "sdpa" and not model._supports_sdpa and config.model_type not in HAVE_SINKS:
        args.refuse(f"--attn_implementation: {model.__name__} has no attention of this name: take eager")
    config = config.get_text_config()
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
    config = config.get_text_config()
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
    config = model.config.get_text_config()
    return args.attn_implementation == "sdpa" and model.is_backend_compatible() and not obstacle(config, args)


def expected(config: Any, args: Any) -> str:
    """How responses will be packed, by the config alone. If a probe at the start finds otherwise, a run says it."""
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
    reasons.append("has no flex attention here, or computes other logprobs in a pack than for a response alone")
    reason = next(filter(None, reasons))
    text = WAYS["rows"].format(reason)
    lines = [text, *slow_layers(policies)]
    return "\n".join(lines)


def slow_layers(policies: Sequence[Any]) -> list[str]:
    """A line for models whose recurrent layers have no kernel of their own on a GPU."""
    layers: set[str] = set()
    for policy in policies:
        config = policy.model.config.get_text_config()
        found = other_layers(config)
        layers.update(found)
    missing = [package for module, package in KERNELS.items() if importlib.util.find_spec(module) is None]
    if not layers or not missing or not torch.cuda.is_available():
        return []
    names = ", ".join(sorted(layers))
    packages = " ".join(missing)
    return [f"kernels  WARNING: {names} layers run transformers' slow reference: pip install {packages}"]


def slower(ways: Sequence[str]) -> str:
    """The way of packing for several models together."""
    return max(ways, key=list(WAYS).index)


def candidates(policy: Any, args: Any, world: World) -> list[str]:
    """The ways of packing to be tried, the cheapest first; none where one response a row is the only one. All ranks.
    Raises UserError for an attention that --sequence_parallel_size cannot split."""
    config = policy.model.config.get_text_config()
    ours = policy.model.config._attn_implementation == utils.PACK_ATTENTION
    parallel = policy.group is not None
    if parallel and not ours:
        refuse_parallel(policy, args, "does not take our attention")
    packings = ["rows"] if parallel else []  # several ranks share even a row of one response
    if reason_for_rows(config, args):
        return packings
    if ours and world.device.type == "cuda" and not flex_attention_runs(config, args, world):
        if not parallel:
            policy.model.set_attn_implementation("sdpa")  # which has masks for windows
        elif getattr(config, "sliding_window", None):
            refuse_parallel(policy, args, "has a window, for which flex attention does not run here")
        return packings
    return ["shared", "plain", *packings] if ours else ["plain"]


def refuse_parallel(policy: Any, args: Any, reason: str) -> None:
    args.refuse(f"--sequence_parallel_size: {type(policy.model).__name__} {reason}: take 1")


def flex_attention_runs(config: Any, args: Any, world: World) -> bool:
    """Whether flex attention runs with this model's heads on all ranks' GPUs; else prints a warning. All ranks."""
    with torch.enable_grad():
        problem = utils.fit_flex_attention(config, utils.DTYPES[args.model_dtype], args.pack_length, world.device)
    problem = max(utils.all_gather(problem, world))
    if problem:
        utils.say(f"WARNING: flex attention does not run here ({problem}): each response gets a row of its own")
    return not problem


def probe_rollouts(prompt: Prompt) -> list[list[Rollout]]:
    """Two prompts with two short responses each, and the same with one response of each prompt altered, the second or
    the first. A leak shows at the start of the response that it leaks into."""
    prompt = replace(prompt, token_ids=prompt.token_ids[-4:])
    forwards = [token for token in prompt.token_ids for _ in range(2)][:4]
    backwards = forwards[::-1]
    responses = [forwards, backwards, backwards, forwards]
    probes = []
    for altered in ((), (1, 3), (0, 2)):
        rollouts = []
        for i, tokens in enumerate(responses):
            if i in altered:
                tokens = [token - 1 if token else 1 for token in tokens]
            n = len(tokens)
            rollouts.append(Rollout(prompt, i // 2, 0, tokens, [0.0] * n, [True] * n, [0] * n))
        probes.append(rollouts)
    return probes


def first_that_agrees(packings: Sequence[str], policy: Any, batches: dict[str, list[Any]], args: Any) -> str:
    """The first of the packings that gives the logprobs of one response a row, which one rank computes alone, and in
    which no response sees another; "rows" if none does. `batches` are probe_rollouts in each packing. All ranks. Raises
    UserError for a model whose forward draws random numbers, and as above."""
    group = policy.group
    policy.group = None
    refuse_noise(policy, batches["rows"][0], args)
    alone = [response_logprobs(policy, batch) for batch in batches["rows"]]
    policy.group = group
    agreeing = ""
    for packing in packings:
        packed = [response_logprobs(policy, batch) for batch in batches[packing]]
        gap = float((packed[0] - alone[0]).abs().mean())
        # Experts may round a token by how many others they compute: rows show by how much
        if gap < LIMITS[args.model_dtype] and leak(packed) <= max(LEAK, 2 * leak(alone)):
            agreeing = packing
            break
    if group is not None and not agreeing:
        refuse_parallel(policy, args, "looks across positions not by attention alone")
    utils.shard_again(policy)  # an engine may start next, and takes a share of the free memory
    torch.cuda.empty_cache()
    return agreeing or "rows"


def leak(probes: Sequence[torch.Tensor]) -> float:
    """The largest change of a logprob of a response that is not altered. `probes` are the logprobs of probe_rollouts,
    (n,) each, in the order of the responses."""
    before, *altered = [logprobs.view(4, -1) for logprobs in probes]
    changes = [(after - before)[kept::2].abs().max() for kept, after in enumerate(altered)]
    return float(max(changes))


def refuse_noise(policy: Any, batch: Any, args: Any) -> None:
    """Raises UserError for a model whose logprobs are not the same each time: old and new ones would differ by noise,
    and --gradient_checkpointing would draw other numbers again."""
    logprobs = response_logprobs(policy, batch)
    if torch.equal(response_logprobs(policy, batch), logprobs):
        return
    name = type(policy.model).__name__
    args.refuse(
        f"--model_name_or_path: two forwards of {name} differ: it draws random numbers (dropout, jitter, noise)"
    )


def response_logprobs(policy: Any, batch: Any) -> torch.Tensor:
    """Logprobs (n,) of a batch's response tokens."""
    logprobs, _ = policy(batch, 1.0)  # (B, T)
    return logprobs[batch.response_mask]
