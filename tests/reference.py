"""A whole step again, from the flags' documentation: float64, one response at a time, unpacked, nothing of grpo.py's.

    python -m tests.reference 240 [FIRST_SEED]      random configurations, and how far the project's numbers are off
    torchrun --nproc_per_node 2 -m tests.reference 24     on two ranks, weights sharded in each of the three ways

Each seed draws every flag of the algorithm and of the scores, prompts, responses (empty ones, cut ones, tokens made by
a tool) and verdicts (missing ones), and lets the project sample, score, pack and update. Then everything is computed
here. Weights are the project's before each optimizer step, so that each gradient is compared by itself and a difference
cannot grow; what AdamW makes of the project's gradient is compared too.
"""

import math
import os
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import grpo
import rewards
import utils

VOCAB = 512
EOS = 2

# --- What is drawn ----------------------------------------------------------------------------------------------------


def draw_args(rng: random.Random, model: object, ranks: int = 1) -> grpo.Args:
    """The algorithm's and the scores' flags at random, so that Args.check allows them."""
    parts = rng.choice((1, 1, 2, 3))
    samples = rng.choice((2, 3, 4))
    beta = rng.choice((0, 0.05, 0.5))
    in_reward = beta > 0 and rng.random() < 0.4
    ref = beta > 0 or rng.random() < 0.3
    loss_fn = rng.choice(("dapo", "dapo", "cispo", "gspo"))
    rho = rng.random() < 0.7
    keep_constant = rng.random() < 0.4
    buffer = rng.choice((0, 0, 5))
    verifiable = rng.random() < 0.9
    shape = rng.random()
    tv = rho and rng.random() < 0.3
    flags: dict = {
        "model_name_or_path": str(model),
        "model_dtype": "float32",
        "dither_master_weights": False,
        "response_length": 14,
        "max_prompt_token_length": 12,
        "max_logprob_gap": 0.0,
        "num_unique_prompts_rollout": ranks * parts * rng.choice((1, 2)),
        "deepspeed_stage": rng.choice((0, 2, 3)) if ranks > 1 else 0,
        "num_samples_per_prompt_rollout": samples,
        "num_mini_batches": parts,
        "num_epochs": rng.choice((1, 1, 2)),
        "active_sampling": not keep_constant and rng.random() < 0.4,
        "no_resampling_pass_rate": rng.choice((None, 0.5, 1.0)),
        "filter_zero_std_samples": not keep_constant,
        "mask_truncated_completions": not in_reward and rng.random() < 0.3,
        "kl_in_reward": in_reward,
        "force_kl_in_reward": in_reward,
        "loss_fn": loss_fn,
        "beta": beta,
        "kl_estimator": rng.choice(("0", "1", "2", "3", "kl1", "kl2", "kl3", "kl4")),
        "load_ref_policy": ref,
        "ref_policy_update_freq": rng.choice((None, 1, 2)) if ref else None,
        "alpha": rng.uniform(0.1, 1.0),
        "clip_lower": math.exp(rng.uniform(math.log(1e-3), math.log(0.4))),
        "clip_higher": math.exp(rng.uniform(math.log(1e-3), math.log(0.4))),
        "clip_dual": rng.uniform(1.0005, 1.2) if loss_fn == "dapo" and rng.random() < 0.4 else 0,
        "entropy_coef": rng.choice((0, 0.02)),
        "advantage_normalization_type": rng.choice(("standard", "standard_unbiased", "centered", "none")),
        "loss_denominator": rng.choice(("token", "sequence", "37")),
        "use_rho_correction": rho,
        "rho_clamp_upper_bound": rng.choice((0, rng.uniform(1.0, 1.6))),
        "rho_clamp_lower_bound": rng.choice((0, rng.uniform(0.4, 1.0))) if rho else 0,
        "rho_mask_lower_bound": rng.choice((0, rng.uniform(0.4, 0.95))) if rho and not tv else 0,
        "rho_mask_upper_bound": rng.uniform(0.1, 0.4) if tv else rng.choice((0, rng.uniform(1.05, 2.0))) if rho else 0,
        "rho_mask_sequence_level": rho and not tv and rng.random() < 0.4,
        "rho_mask_tv_divergence": tv,
        "learning_rate": 10 ** rng.uniform(-4, -2),
        "lr_scheduler_type": (schedule := rng.choice(("linear", "cosine", "constant", "constant_with_warmup"))),
        "warmup_ratio": rng.choice((0, 0.4)) * (schedule != "constant"),
        "weight_decay": rng.choice((0, 0.1)),
        "max_grad_norm": rng.choice((0, 1e-3, 1.0)),
        "per_device_train_batch_size": rng.choice((1, 2, 5)),
        "pack_length": rng.choice((32, 60, 1000)),
        "temperature": rng.uniform(0.8, 3.0),
        "apply_verifiable_reward": verifiable,
        "verification_reward": rng.choice((1.0, 10.0, 2.7)),
        "apply_r1_style_format_reward": not verifiable or shape < 0.4,
        "r1_style_format_reward": rng.choice((1.0, 0.3)),
        "additive_format_reward": verifiable and shape < 0.2,
        "non_stop_penalty": rng.random() < 0.3,
        "non_stop_penalty_value": rng.choice((0.0, -1.0)),
        "overlong_buffer_length": buffer,
        "total_episodes": 3 * 6 * 4 * 2 * ranks,
        "seed": rng.randrange(10**6),
    }
    return grpo.Args(**flags)


class Scripted(utils.Sampler):
    """An engine that answers with random tokens; empty answers, cut ones and logprobs that are a little off are made up
    too. A request's seed decides."""

    eos_ids = [EOS]

    def generate(self, requests, finished=None):
        for i, request in enumerate(requests):
            rng = random.Random(request.seed)
            n = rng.choice((0, *range(1, request.max_tokens)))
            ids = [rng.randrange(EOS + 1, VOCAB) for _ in range(n)]
            logprobs = torch.tensor([-6.2 + 0.3 * rng.gauss(0, 1) for _ in ids]).tolist()  # of float32
            finished(i, utils.Generation(ids, logprobs, rng.choice(("stop", "stop", "length")), [0] * n))
        return []


def decode(ids, **_):
    """Of a scripted response: its first token decides about format and verdicts."""
    return f"{ids[0] if len(ids) else ''} {'</think> <answer>y</answer>' if len(ids) and ids[0] % 3 else ''}"


def verdict(first: str, label: int) -> float:
    """The toy verifier: wrong, right, half right or missing."""
    return (0.0, 0.0, 1.0, 1.0, 0.5, math.nan)[(int(first) + label) % 6] if first else 0.0


def verify_toy(record):
    return rewards.Verdict("", verdict(record.response.split(" ")[0], int(record.ground_truth)))


def draw_prompts(rng: random.Random) -> list[utils.Prompt]:
    """Five prompts of unequal lengths with one or two verifiers."""
    prompts = []
    for i in range(5):
        ids = tuple(rng.randrange(EOS + 1, VOCAB) for _ in range(rng.randrange(1, 13)))
        labels = tuple(str(rng.randrange(6)) for _ in range(rng.choice((1, 1, 2))))
        prompts.append(utils.Prompt(i, ids, "", labels, ("toy",) * len(labels)))
    return prompts


# --- The model --------------------------------------------------------------------------------------------------------

Weights = dict[str, torch.Tensor]


def norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x, angles):
    """Rotary position embedding of (T, heads, d): pairs (i, i + d / 2) turn by angles (T, d / 2)."""
    a, b = x.chunk(2, -1)
    cos = angles.cos()[:, None]
    sin = angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def all_logits(w: Weights, ids: list[int], config) -> torch.Tensor:
    """(T, V) of a Llama, float64."""
    x = w["model.embed_tokens.weight"][ids]
    eps = config.rms_norm_eps
    d = config.hidden_size // config.num_attention_heads
    t = len(ids)
    # transformers has positions and frequencies in float32: what they mean is the model's business
    frequencies = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, d, 2).float() / d)
    angles = (torch.arange(t).float()[:, None] * frequencies).double()
    future = torch.ones(t, t, dtype=torch.bool).triu(1)
    for i in range(config.num_hidden_layers):
        layer = {name.removeprefix(f"model.layers.{i}."): p for name, p in w.items()}
        h = norm(x, layer["input_layernorm.weight"], eps)
        q, k, v = ((h @ layer[f"self_attn.{n}_proj.weight"].T).view(t, -1, d) for n in "qkv")
        q = rotate(q, angles)
        k = rotate(k, angles)
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(d)
        attention = scores.masked_fill(future, -math.inf).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", attention, v).flatten(1) @ layer["self_attn.o_proj.weight"].T
        h = norm(x, layer["post_attention_layernorm.weight"], eps)
        gate, up = (h @ layer[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ layer["mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x, w["model.norm.weight"], eps) @ head.T


def logprobs_of(w: Weights, r: grpo.Rollout, temperature: float, config) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the response's tokens and the entropies of their distributions, (T,) each."""
    n = len(r.token_ids)
    prompt = list(r.prompt.token_ids)
    rows = (all_logits(w, prompt + r.token_ids[:-1].tolist(), config)[len(prompt) - 1 :] / temperature).log_softmax(-1)
    return rows[range(n), r.token_ids.tolist()], -(rows.exp() * rows).sum(-1)


# --- The step ---------------------------------------------------------------------------------------------------------


@dataclass
class Response:
    """What is known about a response before its update."""

    rollout: grpo.Rollout
    outcome: float
    score: float
    advantage: float = math.nan
    old: torch.Tensor | None = None
    ref: torch.Tensor | None = None

    @property
    def mask(self):
        return torch.tensor(self.rollout.mask, dtype=torch.bool)


def judge(r: grpo.Rollout, a: grpo.Args) -> Response:
    """Outcome and score of a response."""
    first = str(r.token_ids[0]) if len(r.token_ids) else ""
    right = a.verification_reward * sum(verdict(first, int(label)) for label in r.prompt.ground_truths)
    formatted = len(r.token_ids) > 0 and r.token_ids[0] % 3 != 0
    bonus = a.r1_style_format_reward if formatted else 0.0
    if not a.apply_verifiable_reward:
        outcome = bonus
    elif not a.apply_r1_style_format_reward:
        outcome = right
    elif a.additive_format_reward:
        outcome = right + bonus
    else:
        outcome = right if formatted or math.isnan(right) else 0.0
    if a.non_stop_penalty and r.finish_reason != "stop" and not math.isnan(outcome):
        outcome = a.non_stop_penalty_value
    into = a.overlong_buffer_length - (a.response_length - len(r.token_ids))
    share = min(max(into / a.overlong_buffer_length, 0.0), 1.0) if a.overlong_buffer_length else 0.0
    return Response(r, outcome, outcome - share)


def compare(scores: list[float], kind: str) -> list[float]:
    """Advantages of a group; missing scores are no part of it."""
    there = [s for s in scores if not math.isnan(s)]
    if kind == "none":
        return [0.0 if math.isnan(s) else s for s in scores]
    if len(set(there)) < 2:
        return [0.0] * len(scores)
    mean = statistics.fmean(there)
    if kind == "centered":
        size = 1.0
    elif kind == "standard":
        size = statistics.pstdev(there) + 1e-8
    else:
        size = statistics.stdev(there) + 1e-6
    return [0.0 if math.isnan(s) else (s - mean) / size for s in scores]


def varied(group: list[Response]) -> bool:
    return len({r.outcome for r in group if not math.isnan(r.outcome)}) > 1


def best_outcome(prompt: utils.Prompt, a: grpo.Args) -> float:
    """Of a response that all verifiers of the prompt call right."""
    right = a.verification_reward * len(prompt.verifiers) if a.apply_verifiable_reward else 0.0
    alone = a.additive_format_reward or not a.apply_verifiable_reward
    return right + (a.r1_style_format_reward if a.apply_r1_style_format_reward and alone else 0.0)


def kl_terms(new, old, ref, name: str) -> torch.Tensor:
    d = new - ref
    kind = {"0": 1, "kl1": 1, "1": 2, "kl2": 2, "2": 3, "kl3": 3, "3": 4, "kl4": 4}[name]
    return {1: d, 2: d * d / 2, 3: (-d).exp() - 1 + d, 4: (new - old).exp() * d}[kind]


def prepare(groups, w: Weights, ref: Weights | None, a: grpo.Args, config) -> list[list[Response]]:
    """The responses of each mini-batch, with old and reference logprobs and advantages."""
    for group in groups:
        for r in group if w else ():
            with torch.no_grad():
                r.old = logprobs_of(w, r.rollout, a.temperature, config)[0] if r.rollout.mask.size else torch.zeros(0)
                if ref is not None:
                    r.ref = logprobs_of(ref, r.rollout, a.temperature, config)[0] if len(r.old) else torch.zeros(0)
        scores = [r.score for r in group]
        if a.kl_in_reward:
            kls = [kl_terms(r.old, r.old, r.ref, a.kl_estimator)[r.mask].sum().item() for r in group]
            scores = [score - a.beta * kl for score, kl in zip(scores, kls, strict=True)]
        for r, advantage in zip(group, compare(scores, a.advantage_normalization_type), strict=True):
            r.advantage = advantage
    parts = []
    n = len(groups)
    m = a.num_mini_batches
    for i in range(m):
        mine = [r for group in groups[n * i // m : n * (i + 1) // m] for r in group]
        constant = {id(r) for group in groups if not varied(group) for r in group if a.filter_zero_std_samples}
        cut = {id(r) for r in mine if a.mask_truncated_completions and r.rollout.finish_reason == "length"}
        parts.append([r for r in mine if r.mask.any() and not math.isnan(r.score) and not {id(r)} & (constant | cut)])
    return parts


def per_token_loss(new, r: Response, a: grpo.Args) -> tuple[torch.Tensor, torch.Tensor]:
    """(T,) policy loss of a response's tokens, and where clipping cost the gradient or the weight."""
    mask = r.mask
    adv = r.advantage
    log_ratio = new - r.old
    if a.loss_fn == "gspo":
        log_ratio = log_ratio[mask].mean().detach() + new - new.detach()
    ratio = log_ratio.exp()
    low = 0.0 if a.loss_fn == "cispo" else 1 - a.clip_lower
    high = 1 + a.clip_higher
    outside = (ratio < low) | (ratio > high)
    bounded = ratio.detach().clamp(low, high)
    if a.loss_fn == "cispo":
        return -adv * bounded * new, outside
    worse = outside & (-adv * bounded > -adv * ratio.detach())
    loss = torch.where(worse, -adv * bounded, -adv * ratio)
    if a.clip_dual and adv < 0:
        loss = torch.where(loss > -adv * a.clip_dual, torch.full_like(loss, -adv * a.clip_dual), loss)
    return loss, worse


def rho_weights(r: Response, a: grpo.Args) -> torch.Tensor:
    """(T,)"""
    log_rho = r.old - torch.tensor(r.rollout.logprobs, dtype=torch.float64)
    rho = log_rho.exp()
    tested = log_rho[r.mask].mean().exp().expand(rho.shape) if a.rho_mask_sequence_level else rho
    if a.rho_mask_tv_divergence:
        tested = (rho - 1).abs()[r.mask].mean().expand(rho.shape)
    keep = tested >= a.rho_mask_lower_bound
    if a.rho_mask_upper_bound:
        keep &= tested <= a.rho_mask_upper_bound
    if a.rho_mask_tv_divergence:
        keep |= ~((rho > 1) & (torch.tensor(r.advantage) > 0) | (rho < 1) & (torch.tensor(r.advantage) < 0))
    bounded = rho.clamp(min=a.rho_clamp_lower_bound).clamp(max=a.rho_clamp_upper_bound or math.inf)
    return torch.where(keep, bounded, 0.0)


def gradient(w: Weights, part: list[Response], a: grpo.Args, config, sums: dict) -> Weights:
    """Of the mini-batch's loss at the weights `w`, clipped; adds to `sums` what the step's metrics are made of."""
    leaves = {name: p.clone().requires_grad_() for name, p in w.items()}
    tokens = sum(int(r.mask.sum()) for r in part)
    for r in part:
        new, entropy = logprobs_of(leaves, r.rollout, a.temperature, config)
        policy, clipped = per_token_loss(new, r, a)
        rho = rho_weights(r, a) if a.use_rho_correction else torch.ones_like(policy)
        terms = {"policy": policy * rho}
        if r.ref is not None:
            terms["kl"] = (0.0 if a.kl_in_reward else a.beta) * kl_terms(new, r.old, r.ref, a.kl_estimator)
        if a.entropy_coef:
            terms["entropy"] = -a.entropy_coef * entropy
        total = {name: values[r.mask].sum() for name, values in terms.items()}  # of the response
        if a.loss_denominator == "sequence":
            size = int(r.mask.sum()) * len(part)
        else:
            size = tokens if a.loss_denominator == "token" else float(a.loss_denominator)
        (sum(total.values()) / size).backward()
        for name, value in total.items():
            sums[f"loss/{name}_avg"] = sums.get(f"loss/{name}_avg", 0.0) + value.item() / size
        noted = {"policy/clipfrac_avg": clipped & (rho > 0), "policy/entropy_avg": entropy}
        noted["val/ratio"] = (new - r.old).exp()
        noted["policy/clipfrac_lower_avg"] = (noted["val/ratio"] > (a.clip_dual or math.inf)) & (r.advantage < 0)
        if a.loss_fn == "gspo":
            noted["val/ratio"] = (new - r.old)[r.mask].mean().exp().expand(rho.shape)
        if a.use_rho_correction:
            noted |= {"val/rho_weight": rho, "val/rho_drop_frac": rho == 0}
        if r.ref is not None:
            noted |= {f"objective/kl{i}_avg": kl_terms(new, r.old, r.ref, str(i)) for i in range(4)}
        for name, values in noted.items():
            n, total_ = sums.get(name, (0, 0.0))
            sums[name] = n + int(r.mask.sum()), total_ + values[r.mask].double().sum().item()
    grads = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in leaves.items()}
    size = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
    sums.setdefault("norms", []).append(size)
    factor = min(1.0, a.max_grad_norm / (size + 1e-6)) if a.max_grad_norm else 1.0
    return {name: g * factor for name, g in grads.items()}


def learning_rate(tick: int, a: grpo.Args) -> float:
    """Of the optimizer step after `tick` others; mini-batches without anything to train on count."""
    steps = a.total_episodes // (a.num_unique_prompts_rollout * a.num_samples_per_prompt_rollout)
    ticks = steps * a.num_epochs * a.num_mini_batches
    warm = round(ticks * a.warmup_ratio)
    if a.lr_scheduler_type == "constant":
        return a.learning_rate
    if tick < warm:
        return a.learning_rate * tick / warm
    if a.lr_scheduler_type == "constant_with_warmup":
        return a.learning_rate
    done = (tick - warm) / (ticks - warm)
    return a.learning_rate * (1 - done if a.lr_scheduler_type == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


class AdamW:
    """Decoupled weight decay on matrices (arXiv:1711.05101), betas 0.9 and 0.999, epsilon 1e-8."""

    def __init__(self):
        self.n = 0
        self.m = {}
        self.v = {}

    def step(self, w: Weights, grads: Weights, lr: float, decay: float) -> Weights:
        self.n += 1
        out = {}
        for name, g in grads.items():
            self.m[name] = 0.9 * self.m.get(name, 0.0) + 0.1 * g
            self.v[name] = 0.999 * self.v.get(name, 0.0) + 0.001 * g * g
            m = self.m[name] / (1 - 0.9**self.n)
            v = self.v[name] / (1 - 0.999**self.n)
            out[name] = w[name] * (1 - lr * decay * (w[name].ndim > 1)) - lr * m / (v.sqrt() + 1e-8)
        return out


# --- The comparison ---------------------------------------------------------------------------------------------------


def doubled(policy: grpo.Policy, grads: bool = False) -> Weights:
    """The whole weights, or their gradients. All ranks."""
    utils.shard_again(policy)
    named = [(name.removeprefix("model."), p.grad if grads else p) for name, p in policy.named_parameters()]
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach().double().clone() for name, p in named}


def distance(a: Weights, b: Weights) -> float:
    return math.sqrt(sum(float((a[name] - b[name]).square().sum()) for name in a))


def size_of(a: Weights) -> float:
    return math.sqrt(sum(float(x.square().sum()) for x in a.values()))


def near(ours: float, want: float, tolerance: float, what: str) -> None:
    if not (math.isnan(ours) and math.isnan(want)) and not abs(ours - want) <= tolerance * max(1.0, abs(want)):
        raise AssertionError(f"{what}: {ours!r}, the reference has {want!r}")


def compare_step(seed: int, model, world: utils.World, steps: int = 2) -> list[float]:
    """Steps of a random configuration by the project and by this file. Returns the relative error of each gradient.

    Raises AssertionError for anything else that differs: who is sampled, outcomes, scores, advantages, groups, numbers
    of optimizer steps, learning rates, what AdamW does, metrics, the reference policy. All ranks.
    """
    rng = random.Random(seed)
    a = draw_args(rng, model, world.size)
    a.check(world.size)
    prompts = draw_prompts(rng)
    packing = rng.choice(("shared", "plain", "rows"))
    rewards.VERIFIERS["toy"] = rewards.Verifier(verify_toy)
    tokenizer: object = SimpleNamespace(decode=decode)
    policy = grpo.load_policy(a, world)
    config = policy.model.config
    ref_policy = grpo.load_policy(a, world).requires_grad_(False) if a.load_ref_policy else None
    if ref_policy is not None:  # else the first step's KL is 0
        for p in ref_policy.parameters():
            utils.shard_of(p).mul_(1.01)
    optimizer, scheduler = grpo.make_optimizer(policy, a)
    learner = grpo.Learner(policy, ref_policy, optimizer, scheduler)
    seen: list = []  # of each optimizer step: weights before it, gradient, learning rate

    def before(opt, *_):
        seen.append((doubled(policy), doubled(policy, grads=True), opt.param_groups[0]["lr"]))

    optimizer.register_step_pre_hook(before)
    engine = Scripted()
    engine.tokenizer = tokenizer
    state = grpo.start_state()
    mine = {"cursor": 0, "excluded": set()}
    tick = 0
    errors = []
    adam = AdamW()
    for step in range(1, steps + 1):
        # the project's step
        run = SimpleNamespace(engine=engine, train_prompts=prompts, state=state, args=a, world=world)
        groups, sampled = grpo.sample_groups(run, utils.Timer())
        for r in (r for group in sampled for r in group if len(r.token_ids)):
            dice = random.Random(repr((seed, r.position, r.sample)))
            if dice.random() < 0.3:
                r.mask[:] = [k == 0 or dice.random() < 0.6 for k in range(len(r.mask))]  # a tool's tokens
        w = doubled(policy)
        ref = doubled(ref_policy) if ref_policy is not None else None
        packs = [grpo.pack_rollouts(part, packing, a.pack_length)[0] for part in grpo.split_groups(groups, a)]
        batches = [grpo.micro_batches(p, packing, a, world.device) for p in packs]
        metrics = utils.Metrics()
        with sdpa_kernel(SDPBackend.MATH):  # the flash kernel's exp has 20 bits
            _, bad = grpo.update(learner, batches, a, world, metrics)
        made = utils.finish_metrics(metrics.reduce(world), a)
        if ref_policy is not None and a.ref_policy_update_freq and step % a.ref_policy_update_freq == 0:
            grpo.refresh_reference(ref_policy, policy, a.alpha)

        # sampling: whole rounds of prompts in stream order, those that were solved before replaced
        everyone = utils.all_gather(([g[0].position for g in groups], sampled), world)
        judged = {g[0].position: [judge(r, a) for r in g] for _, part in everyone for g in part}
        size = a.num_unique_prompts_rollout
        share = a.num_unique_prompts_rollout // world.size
        rounds = 0
        kept: list[list] = [[] for _ in range(world.size)]  # of each rank
        while not rounds or (a.active_sampling and min(map(len, kept)) < share and rounds < 10):
            for i, position in enumerate(range(mine["cursor"], mine["cursor"] + size)):
                group = judged[position]
                prompt = grpo.prompt_at(prompts, position, a.seed, frozenset(mine["excluded"]))
                assert all(r.rollout.prompt == prompt for r in group), "another prompt"
                kept[i % world.size] += [group] if varied(group) or not a.active_sampling else []
            mine["cursor"] = mine["cursor"] + size
            rounds = rounds + 1
        assert len(judged) == size * rounds and state["cursor"] == mine["cursor"]
        kept = [part[:share] for part in kept]
        assert [names for names, _ in everyone] == [[g[0].rollout.position for g in part] for part in kept]
        for group in judged.values() if a.no_resampling_pass_rate else ():
            prompt = group[0].rollout.prompt
            mean = sum(r.outcome for r in group) / len(group)
            mine["excluded"] |= {prompt.index} if mean >= a.no_resampling_pass_rate * best_outcome(prompt, a) else set()
        assert state["sampler"]["excluded"] == mine["excluded"]

        # scores, advantages, optimizer steps
        parts = [sum(shares, []) for shares in zip(*(prepare(p, w, ref, a, config) for p in kept), strict=True)]
        trained = {id(r) for part in parts for r in part}
        for r in (r for part in kept for group in part for r in group):
            near(r.rollout.outcome, r.outcome, 1e-12, "outcome")
            near(r.rollout.score, r.score, 1e-12, "score")
            if id(r) in trained or not a.kl_in_reward:
                near(r.rollout.advantage, r.advantage, 3e-3 if a.kl_in_reward else 2e-6, "advantage")
                r.advantage = r.rollout.advantage if a.kl_in_reward else r.advantage  # KLs nearly cancel
        sums: dict = {}
        lrs = []
        for part in parts * a.num_epochs:
            lrs.append(learning_rate(tick, a))
            tick += 1
            if not part:
                continue
            at, grads, lr = seen.pop(0)
            near(lr, lrs[-1], 1e-9, "learning rate")
            want = gradient(at, part, a, config, sums)
            if size_of(want) > 1e-7:
                errors.append(distance(grads, want) / size_of(want))
            else:
                near(size_of(grads), size_of(want), 1e-7, "gradient of nothing")
            then = adam.step(at, grads, lr, a.weight_decay)
            after = seen[0][0] if seen else doubled(policy)
            for name in then:
                allowed = 1.5e-7 * at[name].abs() + 1e-5 * lr + 1e-9
                assert ((then[name] - after[name]).abs() <= allowed).all(), f"AdamW: {name}"
        assert not seen and not bad, "another number of optimizer steps"

        # metrics and the reference policy
        norms = sums.pop("norms", [])
        near(made["lr"], statistics.fmean(lrs), 1e-9, "lr")
        if norms:
            near(made["optim/grad_norm"] / statistics.fmean(norms) if any(norms) else 1.0, 1.0, 1e-4, "grad_norm")
        for name, found in sums.items():
            value = found[1] / found[0] if isinstance(found, tuple) else found / len(norms)
            # a ratio may be so near its bound that float32 and float64 disagree
            near(made[name], value, 2.5 / found[0] if name == "policy/clipfrac_avg" else 2e-5, name)
        if ref is not None and a.ref_policy_update_freq and step % a.ref_policy_update_freq == 0:
            now = doubled(policy)
            want = {name: a.alpha * now[name] + (1 - a.alpha) * ref[name] for name in now}
            assert distance(doubled(ref_policy), want) <= 1e-6 * size_of(want), "the reference policy"
    return errors


def main() -> None:
    from scripts.data.make_tiny_model import make_tiny_model

    number = int(sys.argv[1])
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    world = utils.init_distributed()
    errors = []
    failed = []
    with tempfile.TemporaryDirectory() as directory:
        models = [make_tiny_model(f"{directory}/{tied}", tied=tied) for tied in (True, False) if world.is_main]
        models = utils.all_gather(models, world)[0]
        for seed in range(first, first + number):
            try:
                errors += compare_step(seed, models[seed % 2], world)
            except AssertionError as error:
                failed.append(seed)
                print(f"seed {seed}, rank {world.rank}: {error}")
    utils.all_gather(None, world)
    if not world.is_main:
        os._exit(0)
    errors.sort()
    print(f"{number} configurations, {len(failed)} differ {failed}")
    quantiles = {q: errors[min(int(q * len(errors)), len(errors) - 1)] for q in (0.5, 0.9, 0.99, 1.0)}
    print(f"{len(errors)} gradients, relative error: " + ", ".join(f"{q:.0%} {e:.1e}" for q, e in quantiles.items()))
    sys.stdout.flush()
    os._exit(bool(failed))


if __name__ == "__main__":
    main()
