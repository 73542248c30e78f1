"""Group Relative Policy Optimization (GRPO) for language models: the algorithm, synchronous, top to bottom.

    python grpo.py --model_name_or_path M --dataset_mixer_list data.jsonl 1.0      one process, GPU or CPU
    torchrun --nproc_per_node=8 grpo.py ...                                        8 ranks on 8 GPUs

Every rank holds a shard of the learner and its own vLLM engine on the same device. One step:

    sample    G responses for each of P prompts from the current weights       sample_groups
    score     each response with its row's verifier                            score_rollouts
    compare   within the group: A_i = (r_i - mean r) / std r                   compute_advantages
    update    clipped policy gradient, KL to a reference policy                grpo_loss, update
    sync      the new weights into the engine                                  engine.load_weights

Strictly on-policy: no rollout is older than the weights that train on it. grpo_fast.py imports the maths from here.
To change the algorithm, copy this file and edit it.

Shapes: P prompts and G rollouts per prompt in a step, N = P * G, B rows of a micro-batch, T tokens of the longest row,
V vocabulary, W ranks. Per-token tensors are (B, T), aligned to `targets`: position t is about predicting targets[t].
Logprobs, KL and entropy are in nats.
"""

import math
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import utils  # isort: skip  (pins thread counts, so it comes before torch)

import torch
import torch.distributed as dist

import rewards
from rewards import need
from utils import Group, Rollout

# ---------------------------------------------------------------------------------------------------------------------
# Flags: open-instruct's names; defaults of its GRPO page where the page has one
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GRPOFlags:
    """The algorithm."""

    # groups
    num_unique_prompts_rollout: int = 16
    """P, prompts per step over all ranks."""
    num_samples_per_prompt_rollout: int = 4
    """G, responses per prompt: the group whose mean is the baseline."""
    active_sampling: bool = False
    """Sample further prompts until P groups have a gradient (10 rounds at most); surplus groups are dropped."""
    no_resampling_pass_rate: float | None = None
    """Do not sample a prompt again whose mean score reached this share of the highest; None is off."""
    filter_zero_std_samples: bool = True
    """Leave groups of equal scores out of the update: their advantages are zero. Loss denominators count the rest."""
    mask_truncated_completions: bool = False
    """Leave responses that hit the length limit out of the update; they still count in their group's mean."""
    kl_in_reward: bool = False
    """Subtract beta * KL of the response from its score before advantages, in place of the loss's KL term."""
    force_kl_in_reward: bool = False
    """Allow kl_in_reward with standard normalization, which blows the KL of like outcomes up to advantages of 1."""

    # loss
    loss_fn: Literal["dapo", "cispo", "gspo"] = "dapo"
    """dapo: PPO clip (arXiv:2503.14476); cispo: clipped weight (2506.13585); gspo: sequence ratio (2507.18071)."""
    beta: float = 0.05
    """KL coefficient, per token; 0 is off."""
    kl_estimator: Literal["0", "1", "2", "3", "kl1", "kl2", "kl3", "kl4"] = "2"
    """0 k1, 1 k2, 2 k3 (default), 3 importance-weighted k1; kl1..kl4 are the same four by older names."""
    load_ref_policy: bool = True
    """Keep the frozen start policy to measure (beta 0) or penalize (beta > 0) the KL."""
    ref_policy_update_freq: int | None = None
    """Steps between refreshes of the reference policy: ref <- alpha * policy + (1 - alpha) * ref; None is never."""
    alpha: float = 0.6
    """Share of the policy in a reference refresh."""
    clip_lower: float = 0.2
    """The ratio is clipped below at 1 - clip_lower. cispo has no lower bound."""
    clip_higher: float = 0.2
    """The ratio is clipped above at 1 + clip_higher (open-instruct's code: 0.272; DAPO: 0.28)."""
    clip_dual: float = 0.0
    """dapo: bound the loss of negative advantages at clip_dual * |A| (verl: 3.0; arXiv:1912.09729); 0 is off."""
    entropy_coef: float = 0.0
    """Entropy bonus per token; 0 is off."""
    advantage_normalization_type: Literal["standard", "standard_unbiased", "centered", "none"] = "standard"
    """See compute_advantages (open-instruct's code: centered)."""
    loss_denominator: str = "token"
    """token: mean over all tokens; sequence: mean over responses of their token means; a number: sum / number."""
    use_rho_correction: bool = True
    """Weigh tokens by rho = exp(learner logprob - engine logprob), the mismatch of the two implementations."""
    rho_clamp_upper_bound: float = 2.0
    """Truncate rho above (TIS); 0 is off."""
    rho_mask_lower_bound: float = 0.0
    """Drop tokens whose rho is below (IcePop); 0 is off."""
    rho_mask_upper_bound: float = 0.0
    """Drop tokens whose rho is above; 0 is off."""
    rho_mask_sequence_level: bool = False
    """Apply the two mask bounds to each response's geometric mean of rho, dropping whole responses."""

    # optimizer
    learning_rate: float = 2e-5
    """Peak of AdamW."""
    lr_scheduler_type: str = "linear"
    """A schedule of transformers: linear, cosine, constant, constant_with_warmup, ..."""
    warmup_ratio: float = 0.0
    """Share of optimizer steps with rising learning rate."""
    weight_decay: float = 0.0
    """Of AdamW; biases and norms are excluded."""
    max_grad_norm: float = 1.0
    """Global gradient norm is clipped here; 0 is off."""
    per_device_train_batch_size: int = 1
    """Responses per forward and backward where they cannot be packed, and of a gap measurement; else a pack is one."""
    pack_length: int = 512
    """Most tokens of a pack, that is of a forward and backward; at least prompt + response."""
    share_prompts: bool = True
    """Compute a prompt once for all its responses in a pack, where the model's attention allows it."""
    total_episodes: int = 100_000
    """Rollouts of the whole run; steps = total_episodes // (P * G)."""
    num_epochs: int = 1
    """Passes over each step's rollouts."""
    num_mini_batches: int = 1
    """Optimizer steps per pass, each on its share of the prompts."""

    # evaluation
    local_eval_every: int = 100
    """Steps between evaluations; also after the last step. -1 is never."""
    eval_on_step_0: bool = False
    """Evaluate before the first update too."""
    eval_pass_at_k: int = 1
    """Responses per evaluation prompt; pass@1, 2, 4, ... up to it are unbiased estimates."""


@dataclass(frozen=True)
class Args(GRPOFlags, rewards.RewardFlags, utils.Flags):
    """GRPO on a Hugging Face causal LM. Booleans: --flag, --no_flag, --flag true, --flag False."""

    def check(self, world_size: int = 1, fast: bool = False) -> None:
        """Refuse contradictions and impossible arithmetic before anything loads. Raises UserError: flags and fix."""
        utils.Flags.check(self)
        utils.positive(
            self,
            "num_unique_prompts_rollout num_samples_per_prompt_rollout num_mini_batches num_epochs total_episodes "
            "per_device_train_batch_size eval_pass_at_k",
        )
        utils.not_negative(
            self,
            "beta clip_higher entropy_coef learning_rate weight_decay max_grad_norm rho_clamp_upper_bound "
            "rho_mask_lower_bound rho_mask_upper_bound",
        )
        self.check_batch(world_size, fast)
        self.check_loss()
        self.check_sampling()
        utils.check_scheduler_name(self.lr_scheduler_type)
        rewards.configure(self, connect=False)

    def check_batch(self, world_size: int, fast: bool) -> None:
        """The arithmetic of a step on `world_size` ranks of grpo.py (1 with `fast`, grpo_fast.py)."""
        p, g, m = self.num_unique_prompts_rollout, self.num_samples_per_prompt_rollout, self.num_mini_batches
        length, share = self.max_prompt_token_length + self.response_length, self.vllm_gpu_memory_utilization
        tp, kind = self.vllm_tensor_parallel_size, self.advantage_normalization_type
        need(
            self.pack_length >= length,
            f"--pack_length {self.pack_length} < --max_prompt_token_length {self.max_prompt_token_length} + "
            f"--response_length {self.response_length}: raise --pack_length to {length}",
        )
        need(
            g > 1 or kind == "none",
            f"--num_samples_per_prompt_rollout 1 leaves every {kind} advantage zero: raise it, or take "
            "--advantage_normalization_type none",
        )
        need(
            g > 1 or not self.filter_zero_std_samples,
            "--num_samples_per_prompt_rollout 1 with --filter_zero_std_samples drops every group: raise it, or add "
            "--no_filter_zero_std_samples",
        )
        need(
            p % world_size == 0,
            f"--num_unique_prompts_rollout {p} is not a multiple of the {world_size} ranks: take "
            f"{math.ceil(p / world_size) * world_size}",
        )
        need(
            p // world_size % m == 0,
            f"--num_unique_prompts_rollout {p} on {world_size} ranks is {p // world_size} prompts a rank, which "
            f"--num_mini_batches {m} does not divide",
        )
        need(
            self.total_episodes >= p * g,
            f"--total_episodes {self.total_episodes} is less than one step of --num_unique_prompts_rollout {p} x "
            f"--num_samples_per_prompt_rollout {g} = {p * g}",
        )
        need(
            fast or self.num_learners_per_node == [1] or sum(self.num_learners_per_node) == world_size,
            f"--num_learners_per_node {self.num_learners_per_node} but {world_size} ranks run: start grpo.py with "
            f"torchrun --nproc_per_node={(self.num_learners_per_node or [1])[0]}",
        )
        need(fast or tp == 1, f"--vllm_tensor_parallel_size {tp}: grpo.py has one GPU per engine; use grpo_fast.py")
        need(
            fast or share <= 0.8 or not torch.cuda.is_available() or self.rollout_backend != "vllm",
            f"--vllm_gpu_memory_utilization {share} leaves the learner no room on the GPU it shares with the engine: "
            "0.3 to 0.6",
        )
        need(
            not self.solver_model_name_or_path
            or bool(self.solver_base_url)
            or fast
            or world_size == int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
            "--solver_model_name_or_path starts servers for one node: on several start them and give --solver_base_url",
        )

    def check_loss(self) -> None:
        """What contradicts itself in loss and optimizer."""
        beta, ref, refresh, rate = self.beta, self.load_ref_policy, self.ref_policy_update_freq, self.warmup_ratio
        low, high, clamp = self.rho_mask_lower_bound, self.rho_mask_upper_bound, self.rho_clamp_upper_bound
        kind, denominator = self.advantage_normalization_type, self.loss_denominator
        need(beta == 0 or ref, f"--beta {beta} needs a reference policy: drop --no_load_ref_policy or set --beta 0")
        need(refresh is None or ref, "--ref_policy_update_freq needs a reference policy: drop --no_load_ref_policy")
        need(
            refresh is None or refresh > 0,
            f"--ref_policy_update_freq {refresh}: must be positive; leave it out for never",
        )
        need(0 < self.alpha <= 1, f"--alpha {self.alpha}: must be in (0, 1]")
        need(0 <= self.clip_lower <= 1, f"--clip_lower {self.clip_lower}: must be in [0, 1]")
        need(0 <= rate < 1, f"--warmup_ratio {rate}: must be in [0, 1)")
        need(
            self.clip_dual == 0 or (self.clip_dual > 1 and self.loss_fn == "dapo"),
            f"--clip_dual {self.clip_dual}: must be above 1, with --loss_fn dapo; 0 is off",
        )
        need(
            denominator in ("token", "sequence") or utils.number_in(denominator) > 0,
            f"--loss_denominator {denominator}: token, sequence or a positive number",
        )
        need(
            self.use_rho_correction or not (low or high or self.rho_mask_sequence_level),
            "--rho_mask_* bounds act through --use_rho_correction: drop --no_use_rho_correction or the bounds",
        )
        need(
            clamp == 0 or clamp >= 1,
            f"--rho_clamp_upper_bound {clamp} truncates exact agreement: at least 1, or 0 for off",
        )
        need(
            low < 1 and (high == 0 or high > 1),
            f"--rho_mask_lower_bound {low} must be below 1 and --rho_mask_upper_bound {high} above 1, else exact "
            "agreement is dropped; 0 is off",
        )
        need(
            self.vllm_top_p == 1 or not self.use_rho_correction,
            f"--vllm_top_p {self.vllm_top_p} makes engine logprobs those of the cut distribution and biases "
            "--use_rho_correction: set --vllm_top_p 1.0 or --no_use_rho_correction",
        )
        need(not self.kl_in_reward or beta > 0, "--kl_in_reward subtracts beta * KL: it needs --beta above 0")
        need(
            not (self.kl_in_reward and self.mask_truncated_completions),
            "--kl_in_reward needs the KL of every response of a group, --mask_truncated_completions leaves some out: "
            "drop one of them",
        )
        need(
            not self.kl_in_reward or not kind.startswith("standard") or self.force_kl_in_reward,
            f"--kl_in_reward with --advantage_normalization_type {kind} divides the group's KL differences by their "
            "own standard deviation, so that responses of equal outcome get advantages of about 1 however small beta: "
            "take --advantage_normalization_type centered, or add --force_kl_in_reward",
        )

    def check_sampling(self) -> None:
        """What contradicts itself in sampling, reward and evaluation."""
        passed = self.no_resampling_pass_rate
        need(
            passed is None or 0 < passed <= 1, f"--no_resampling_pass_rate {passed}: must be in (0, 1]; or leave it out"
        )
        need(
            self.filter_zero_std_samples or not self.active_sampling,
            "--active_sampling refills groups that --filter_zero_std_samples drops: it needs that flag",
        )
        need(
            self.overlong_buffer_length < self.response_length,
            f"--overlong_buffer_length {self.overlong_buffer_length} must be less than --response_length "
            f"{self.response_length}",
        )
        need(
            self.eval_pass_at_k == 1 or self.eval_temperature > 0,
            f"--eval_pass_at_k {self.eval_pass_at_k} greedy responses would be equal: set --eval_temperature",
        )
        need(
            not self.eval_on_step_0 or self.dataset_mixer_eval_list != [],
            "--eval_on_step_0 needs --dataset_mixer_eval_list",
        )
        need(
            not self.load_batches or not (self.dataset_mixer_eval_list or self.active_sampling or self.reward_file),
            "--load_batches samples and scores nothing: drop --dataset_mixer_eval_list --active_sampling --reward_file",
        )

    def batch_arithmetic(self, world_size: int) -> str:
        """The resolved batch arithmetic in a few lines."""
        p, g = self.num_unique_prompts_rollout, self.num_samples_per_prompt_rollout
        updates, steps = self.num_epochs * self.num_mini_batches, num_training_steps(self)
        longest = self.max_prompt_token_length + self.response_length
        return (
            f"step     {p} prompts x {g} samples = {p * g} rollouts, at most {p * g * longest:,} tokens\n"
            f"ranks    {world_size}, each {p // world_size} prompts = {p // world_size * g} rollouts\n"
            f"update   {self.num_epochs} epochs x {self.num_mini_batches} mini-batches = {updates} optimizer steps of "
            f"{p * g // self.num_mini_batches} rollouts, in packs of at most {self.pack_length:,} tokens\n"
            f"run      {self.total_episodes:,} episodes // {p * g} = {steps} steps, {steps * updates} optimizer steps"
        )


KL_ESTIMATORS = {"0": 0, "1": 1, "2": 2, "3": 3, "kl1": 0, "kl2": 1, "kl3": 2, "kl4": 3}
MAX_SAMPLING_ROUNDS = 10  # of active_sampling: a data set without any gradient must not sample for ever
PACKING = {
    "shared": "packs of {} tokens, a prompt computed once for all its responses",
    "plain": "packs of {} tokens, each response with its own prompt",
    "rows": "WARNING: this model's layers see across the responses of a pack, so each response has a row of its own",
}
LOGPROB_CHUNK = 1024  # tokens whose logits exist at once
SHOW_ROLLOUTS_EVERY = 10  # steps


def num_training_steps(args: Args) -> int:
    """Steps of the run: total_episodes // (P * G)."""
    return args.total_episodes // (args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout)


# ---------------------------------------------------------------------------------------------------------------------
# Sample, score, compare within the group
# ---------------------------------------------------------------------------------------------------------------------


def make_request(r: Rollout, args: Args, evaluation: bool = False) -> utils.Request:
    """What the engine is asked for. The seed depends on (run seed, position, sample) only, so the same rollouts come
    out of any number of ranks; evaluation has its own seeds, temperature and length."""
    seed = utils.derive_seed(args.seed, r.position, r.sample, int(evaluation))
    temperature = args.eval_temperature if evaluation else args.temperature
    length = (args.eval_response_length or args.response_length) if evaluation else args.response_length
    return utils.Request(r.prompt.token_ids, seed, temperature, length, args.vllm_top_p if temperature > 0 else 1.0)


def sample_rollouts(
    engine: utils.Sampler,
    prompts: Sequence[tuple[int, utils.Prompt]],
    samples: int,
    args: Args,
    tokenizer: Any = None,
    evaluation: bool = False,
) -> list[Group]:
    """A group of `samples` responses for each (position, prompt); with a tokenizer each is handed to its verifiers the
    moment it ends, while the others go on."""
    groups = [[Rollout(prompt, position, j) for j in range(samples)] for position, prompt in prompts]
    rollouts = [r for group in groups for r in group]

    def finished(i: int, generation: utils.Generation) -> None:
        rollouts[i].append(generation)
        if tokenizer is not None:
            start_scoring(rollouts[i], tokenizer, engine.eos_ids, args)

    engine.generate([make_request(r, args, evaluation) for r in rollouts], finished)
    return groups


def start_scoring(r: Rollout, tokenizer: Any, eos_ids: Sequence[int], args: Args) -> None:
    """Fill the text of a rollout and hand it to the verifiers of its prompt."""
    ids = r.token_ids[:-1] if r.token_ids[-1:] and r.token_ids[-1] in eos_ids else r.token_ids
    r.text = tokenizer.decode(ids, skip_special_tokens=False)  # a <think> that is a special token must survive
    if args.apply_verifiable_reward:
        for label, verifier in zip(r.prompt.ground_truths, r.prompt.verifiers, strict=True):
            record = rewards.RewardRecord(r.text, label, verifier, len(r.token_ids), r.prompt.conversation)
            r.scoring.append(rewards.submit(record))


def score_rollouts(rollouts: Sequence[Rollout], args: Args) -> None:
    """Wait for the verifiers; fill results, verifiable, format_score, outcome and score of each rollout."""
    for r in rollouts:
        r.results, r.scoring = [future.result() for future in r.scoring], []
        r.verifiable = sum(result.score for result in r.results)
        r.format_score = rewards.format_reward(r.text)
        stopped, tokens_left = r.finish_reason == "stop", args.response_length - len(r.token_ids)
        r.outcome, r.score = rewards.combine_rewards(args, r.verifiable, r.format_score, stopped, tokens_left)


def compute_advantages(scores: torch.Tensor, group_size: int, normalization: str) -> torch.Tensor:
    """Group-relative advantages, one scalar per rollout.

    standard           A_i = (r_i - mean r) / (std r + 1e-8), population std   DeepSeekMath, arXiv:2402.03300, 4.1.2
    standard_unbiased  A_i = (r_i - mean r) / (std r + 1e-6), ddof = 1         as verl
    centered           A_i = r_i - mean r                                      Dr. GRPO, arXiv:2503.20783
    none               A_i = r_i

    scores (N,), the `group_size` rollouts of a prompt adjacent; returns float32 (N,). A NaN score is a missing sample:
    the group is averaged without it and its advantage is 0. A group of equal scores gives exact zeros (but for none).
    Raises ValueError if N is not a multiple of group_size.
    """
    if scores.numel() % group_size:
        raise ValueError(f"{scores.numel()} scores are not groups of {group_size}")
    grouped = scores.double().view(-1, group_size)  # (P, G), float64: 3 x 0.1 must average to 0.1
    present = ~grouped.isnan()
    if normalization == "none":
        return torch.where(present, grouped, 0.0).flatten().float()
    count = present.sum(1, keepdim=True)
    mean = grouped.nansum(1, keepdim=True) / count
    centered = torch.where(present, grouped - mean, 0.0)
    if normalization != "centered":
        unbiased = normalization == "standard_unbiased"
        variance = centered.square().sum(1, keepdim=True) / (count - int(unbiased)).clamp(min=1)
        centered = centered / (variance.sqrt() + (1e-6 if unbiased else 1e-8))
    low = torch.where(present, grouped, math.inf).amin(1, keepdim=True)
    high = torch.where(present, grouped, -math.inf).amax(1, keepdim=True)
    return torch.where(low < high, centered, 0.0).flatten().float()


def set_advantages(group: Group, args: Args) -> None:
    """Fill advantage from score."""
    scores = torch.tensor([r.score for r in group])  # (G,)
    advantages = compute_advantages(scores, len(group), args.advantage_normalization_type)
    for r, advantage in zip(group, advantages.tolist(), strict=True):
        r.advantage = advantage


def has_gradient(group: Group) -> bool:
    """True when the group's outcomes differ (missing ones apart): else its advantages are zero, but for penalties."""
    return len(utils.distinct_outcomes(group)) > 1


def sample_groups(
    engine: utils.Sampler,
    prompts: list[utils.Prompt],
    state: dict[str, Any],
    tokenizer: Any,
    args: Args,
    world: utils.World,
    timer: utils.Timer,
) -> tuple[list[Group], list[Group]]:
    """This rank's groups of a step (P / W of them, scored, with advantages) and all groups sampled; moves the state's
    cursor and exclusions.

    Rank r takes positions cursor + r, cursor + r + W, ... With active_sampling rounds of P prompts go on until every
    rank has its P / W groups with a gradient.
    """
    wanted, size = args.num_unique_prompts_rollout // world.size, args.num_samples_per_prompt_rollout
    chosen: list[Group] = []
    sampled: list[Group] = []
    excluded = frozenset(state["excluded"])
    for _ in range(MAX_SAMPLING_ROUNDS if args.active_sampling else 1):
        cursor = state["cursor"]
        positions = range(cursor + world.rank, cursor + args.num_unique_prompts_rollout, world.size)
        state["cursor"] += args.num_unique_prompts_rollout
        with timer("generation"):
            pairs = [(position, utils.prompt_at(prompts, position, args.seed, excluded)) for position in positions]
            groups = sample_rollouts(engine, pairs, size, args, tokenizer)
        with timer("reward"):
            for group in groups:
                score_rollouts(group, args)
        for group in groups:
            set_advantages(group, args)
        sampled += groups
        chosen += [group for group in groups if not args.active_sampling or has_gradient(group)]
        if utils.all_reduce([float(len(chosen) < wanted)], world)[0] == 0:  # all ranks
            break
    everyone = utils.all_gather(exclude_solved(excluded, sampled, args), world)
    state["excluded"] = sorted(frozenset().union(*everyone))
    return chosen[:wanted], sampled


def exclude_solved(excluded: frozenset[int], sampled: Sequence[Group], args: Args) -> frozenset[int]:
    """`excluded` and the prompts whose mean score reached no_resampling_pass_rate of the highest score."""
    if args.no_resampling_pass_rate is None:
        return excluded
    enough = args.no_resampling_pass_rate * rewards.max_score(args)
    means = [(group[0].prompt.index, sum(r.outcome for r in group) / len(group)) for group in sampled]  # NaN: unsolved
    return excluded | {index for index, mean in means if mean >= enough}


def trainable(groups: Sequence[Group], args: Args) -> list[Rollout]:
    """The rollouts of `groups` that enter the update: no constant groups, no missing scores, no masked truncations, no
    empty responses.

    Advantages were computed before, on whole groups.
    """
    kept = [r for group in groups if has_gradient(group) or not args.filter_zero_std_samples for r in group]
    kept = [r for r in kept if r.token_ids and not math.isnan(r.score)]
    return [r for r in kept if r.finish_reason == "stop" or not args.mask_truncated_completions]


# ---------------------------------------------------------------------------------------------------------------------
# Packs and batches
# ---------------------------------------------------------------------------------------------------------------------


Piece = list[Rollout]  # responses to one prompt that share a copy of it
Pack = list[Piece]  # what one row of a batch holds


@dataclass
class Batch:
    """Rows for one forward. Every per-token tensor is (B, T), aligned to `targets`; the shift happens here only."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    response_mask: torch.Tensor  # bool: the policy chose targets[t], train on it
    seq_ids: torch.Tensor  # 1, 2, ... the response a position belongs to; 0 for prompts and padding
    advantages: torch.Tensor
    vllm_logprobs: torch.Tensor
    position_ids: torch.Tensor | None = None  # None: 0, 1, 2, ...
    layout: utils.Layout | None = None  # who attends to whom in a pack; None: causal
    old_logprobs: torch.Tensor | None = None  # None: the policy itself, detached
    ref_logprobs: torch.Tensor | None = None
    new_logprobs: torch.Tensor | None = None  # of the last pass over it, before that pass's optimizer step
    rollouts: list[Rollout] = field(default_factory=list)  # in the order of seq_ids


def pack_rollouts(
    rollouts: Sequence[Rollout], how: str, pack_length: int, learners: int = 1, pair_cost: float = 0.0
) -> list[list[Pack]]:
    """Each learner's packs of at most `pack_length` tokens; every rollout is in exactly one.

    how    shared: responses of a prompt share one copy of it; plain: each response has its own; rows: one a pack.
    Pieces go to learners so that tokens and costs (tokens + pair_cost * attended pairs) are even, then into as few
    packs as best-fit-decreasing needs, evenly filled. Groups are cut smaller until tokens are within 2 %.
    """
    if not rollouts:
        return [[] for _ in range(learners)]
    limit = pack_length
    while True:
        pieces = make_pieces(rollouts, limit if how == "shared" else 0)
        tokens = [piece_length(p) for p in pieces]
        costs = [n + pair_cost * attended_pairs(p) for n, p in zip(tokens, pieces, strict=True)]
        shares = utils.balance(tokens, costs, learners)
        loads = [sum(tokens[i] for i in share) for share in shares]
        if how != "shared" or max(loads) <= 1.02 * sum(loads) / learners or limit < min(tokens):
            break
        limit //= 2
    budget = 0 if how == "rows" else pack_length
    bins = [utils.pack_bins([tokens[i] for i in share], [costs[i] for i in share], budget) for share in shares]
    return [[[pieces[share[i]] for i in pack] for pack in b] for share, b in zip(shares, bins, strict=True)]


def make_pieces(rollouts: Sequence[Rollout], most: int) -> list[Piece]:
    """Neighbouring rollouts of one prompt in pieces of at most `most` tokens, one rollout where that is too few."""
    pieces: list[Piece] = []
    for r in rollouts:
        if pieces and pieces[-1][0].position == r.position and piece_length([*pieces[-1], r]) <= most:
            pieces[-1].append(r)
        else:
            pieces.append([r])
    return pieces


def piece_length(piece: Piece) -> int:
    """Tokens of a piece: the prompt but its last token once, then a segment for each response."""
    return len(piece[0].prompt.token_ids) - 1 + sum(len(r.token_ids) for r in piece)


def attended_pairs(piece: Piece) -> float:
    """(query, key) pairs of a piece: what attention costs."""
    n = len(piece[0].prompt.token_ids) - 1
    return n * n / 2 + sum(len(r.token_ids) * (n + len(r.token_ids) / 2) for r in piece)


def make_batch(packs: Sequence[Pack], device: torch.device) -> Batch:
    """Packs as rows, padded on the right. Several rows must have one response each.

    A piece is p_1 .. p_{n-1}, then for each response (y_1 .. y_m) the segment p_n y_1 .. y_{m-1} with targets
    y_1 .. y_m. A segment continues the prompt's positions and attends to the prompt and itself: see utils.Layout. A row
    of one response needs no layout: causal attention never looks right, at the padding.
    """
    lengths = [sum(map(piece_length, pack)) for pack in packs]
    shape = (len(packs), max(lengths))
    input_ids, targets, position_ids, seq_ids = torch.zeros(4, *shape, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.bool)
    advantages, vllm_logprobs = torch.zeros(2, *shape)
    rollouts, several = [], False
    for i, pack in enumerate(packs):
        end = 0
        several = several or sum(map(len, pack)) > 1
        for piece in pack:
            prompt = torch.tensor(piece[0].prompt.token_ids)
            part = slice(end, end := end + len(prompt) - 1)
            input_ids[i, part], position_ids[i, part] = prompt[:-1], torch.arange(len(prompt) - 1)
            for r in piece:
                part = slice(end, end := end + len(r.token_ids))
                rollouts.append(r)
                targets[i, part] = ids = torch.tensor(r.token_ids)
                input_ids[i, part] = torch.cat([prompt[-1:], ids[:-1]])
                position_ids[i, part] = torch.arange(len(ids)) + len(prompt) - 1
                seq_ids[i, part], mask[i, part] = len(rollouts), torch.tensor(r.mask)
                advantages[i, part], vllm_logprobs[i, part] = r.advantage, torch.tensor(r.logprobs)
    tensors: Any = (t.to(device) for t in (input_ids, targets, mask, seq_ids, advantages, vllm_logprobs))
    batch = Batch(*tensors, rollouts=rollouts)
    if several:
        if len(packs) > 1:
            raise ValueError("a pack of several responses is a batch of its own")
        batch.position_ids = position_ids.to(device)
        parts = [(len(p[0].prompt.token_ids) - 1, [len(r.token_ids) for r in p]) for p in packs[0]]
        batch.layout = utils.Layout(parts, device)
    return batch


def micro_batches(packs: Sequence[Pack], how: str, args: Args, device: torch.device) -> list[Batch]:
    """A batch for each pack; for `how` rows one for each per_device_train_batch_size of them."""
    size = args.per_device_train_batch_size if how == "rows" else 1
    return [make_batch(packs[i : i + size], device) for i in range(0, len(packs), size)]


def _idle_batch(device: torch.device) -> Batch:
    """Two tokens without weight, for a rank that has fewer micro-batches than the others."""
    zeros = torch.zeros((1, 2), dtype=torch.long, device=device)
    floats = torch.zeros((1, 2), device=device)
    mask = torch.ones_like(zeros, dtype=torch.bool)
    return Batch(zeros, zeros, mask, zeros, floats, floats, old_logprobs=floats, ref_logprobs=floats)


# ---------------------------------------------------------------------------------------------------------------------
# Policy
# ---------------------------------------------------------------------------------------------------------------------


class HeadLogprobs(torch.autograd.Function):
    """log softmax(hidden W^T / temperature)[target] and its distribution's entropy, without keeping any logits.

    Forward and backward make the logits of `chunk` tokens at a time, in float32 after the head. With p the softmax, H
    the entropy and g, h the gradients of logprob and entropy, the gradient of a logit is
    (g (onehot - p) - h p (log p + H)) / temperature.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature: float, chunk: int):  # (n, H), (V, H), (n,)
        logprobs, entropy, normalizers = torch.empty(3, len(targets), device=hidden.device)
        for i in range(0, len(targets), chunk):
            part = slice(i, i + chunk)
            logits = HeadLogprobs.logits(hidden[part], weight, temperature)
            normalizers[part] = logits.logsumexp(1)
            logp = logits.sub_(normalizers[part, None])
            logprobs[part] = logp.gather(1, targets[part, None])[:, 0]
            entropy[part] = -torch.linalg.vecdot(logp.exp(), logp)
        ctx.save_for_backward(hidden, weight, targets, entropy, normalizers)
        ctx.options = temperature, chunk
        return logprobs, entropy

    @staticmethod
    def logits(hidden, weight, temperature: float):
        logits = (hidden @ weight.T).float()  # (chunk, V)
        return logits if temperature == 1 else logits.div_(temperature)

    @staticmethod
    def backward(ctx, g, h):
        hidden, weight, targets, entropy, normalizers = ctx.saved_tensors
        temperature, chunk = ctx.options
        hidden_grad, weight_grad = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        g, h = g / temperature, h / temperature
        use_entropy = bool(h.any())
        for i in range(0, len(targets), chunk):
            part = slice(i, i + chunk)
            logp = HeadLogprobs.logits(hidden[part], weight, temperature).sub_(normalizers[part, None])
            if use_entropy:
                grad = logp.exp()
                grad.mul_(logp.add_(entropy[part, None]).mul_(h[part, None]).add_(g[part, None])).neg_()
            else:
                grad = logp.exp_().mul_(-g[part, None])
            grad.scatter_add_(1, targets[part, None], g[part, None])
            grad = grad.to(weight.dtype)
            hidden_grad[part] = grad @ weight
            weight_grad += grad.T @ hidden[part]
        return hidden_grad, weight_grad.to(weight.dtype), None, None, None


class Policy(torch.nn.Module):
    """A causal LM whose forward gives what GRPO needs: logprobs of the targets and entropies, never logits."""

    def __init__(self, model: Any):
        super().__init__()
        self.model: Any = model
        matrices, head = utils.matmul_parameters(model)
        self.matrices, self.head, self.width = matrices, head, utils.attention_width(model.config)
        self.pair_cost = 2 * self.width / matrices  # of attending to one more token, in tokens

    def flops(self, tokens: float, pairs: float, responses: float) -> float:
        """Floating-point operations of a forward: 2 per matrix weight and token, 4 per pair, head and layer width."""
        return 2 * self.matrices * tokens + 4 * self.width * pairs + 2 * self.head * responses

    def forward(self, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """log p(targets) and entropy of softmax(logits / temperature), float32 (B, T), zero outside the response mask.

        The head runs on masked positions only, LOGPROB_CHUNK at a time: logits of more tokens never exist.
        """
        # attention of another name than ours finds the sequences of a pack where positions start again
        ours = self.model.config._attn_implementation == utils.PACK_ATTENTION
        layout = {"layout": batch.layout} if ours and batch.layout is not None else {}
        hidden = self.model.base_model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **layout
        ).last_hidden_state  # (B, T, H)
        mask = batch.response_mask
        weight = self.model.get_output_embeddings().weight
        logprobs, entropy = HeadLogprobs.apply(hidden[mask], weight, batch.targets[mask], temperature, LOGPROB_CHUNK)
        zeros = torch.zeros(mask.shape, device=mask.device)
        return zeros.masked_scatter(mask, logprobs), zeros.masked_scatter(mask, entropy)


def load_policy(args: Args, world: utils.World) -> Policy:
    """The model of --model_name_or_path as a sharded Policy on this rank's device. All ranks."""
    policy = Policy(utils.load_causal_lm(args))
    if args.gradient_checkpointing:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return utils.shard_model(policy, policy.model, args, world)


def make_optimizer(policy: Policy, args: Args) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW (weight decay on matrices only) and the learning-rate schedule, one tick per mini-batch."""
    from transformers import get_scheduler

    matrices = [p for p in policy.parameters() if p.ndim >= 2]
    others = [p for p in policy.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, fused=True)
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # a step without gradient ticks too
    ticks = num_training_steps(args) * args.num_epochs * args.num_mini_batches
    scheduler = get_scheduler(args.lr_scheduler_type, optimizer, round(ticks * args.warmup_ratio), ticks)
    return optimizer, scheduler


@torch.no_grad()
def fill_logprobs(policy: Policy, batches: Sequence[Batch], name: str, rounds: int, args: Args) -> None:
    """Set `name` (old_ or ref_logprobs) of each batch. All ranks run `rounds` forwards: FSDP gathers in step."""
    for i in range(rounds):
        batch = batches[i] if i < len(batches) else _idle_batch(next(policy.parameters()).device)
        setattr(batch, name, policy(batch, args.temperature)[0])


# ---------------------------------------------------------------------------------------------------------------------
# Losses and the update
# ---------------------------------------------------------------------------------------------------------------------


def response_mean(values: torch.Tensor, mask: torch.Tensor, seq_ids: torch.Tensor) -> torch.Tensor:
    """At each position the mean of `values` over the masked tokens of its response. All (B, T); seq_ids >= 0."""
    index, size = seq_ids.flatten(), int(seq_ids.max()) + 1
    total = values.new_zeros(size).index_add(0, index, torch.where(mask, values, 0.0).flatten())
    count = values.new_zeros(size).index_add(0, index, mask.flatten().to(values.dtype))
    return (total / count.clamp(min=1))[seq_ids]


def policy_loss(
    new_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    seq_ids: torch.Tensor,
    args: GRPOFlags,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per-token policy-gradient loss, the ratio, and where clipping was active. All (B, T), zero outside `mask`.

    dapo   ratio_t = exp(new_t - old_t);  L_t = max(-A ratio_t, -A clip(ratio_t, 1 - lower, 1 + higher))
           PPO, arXiv:1707.06347, eq. 7, with DAPO's two bounds, arXiv:2503.14476. clip_dual c > 1 adds
           L_t <- min(L_t, -c A) where A < 0: dual-clip PPO, arXiv:1912.09729.
    cispo  L_t = -A sg(clip(ratio_t, 1 - lower, 1 + higher)) new_t                 MiniMax-M1, arXiv:2506.13585
    gspo   as dapo with the response's ratio exp(mean_t(new_t - old_t)), whose gradient is spread evenly over its
           tokens (GSPO-token), arXiv:2507.18071

    Log-ratios are clamped to +-20, so that exp stays finite; beyond that the gradient is zero.
    """
    new = torch.where(mask, new_logprobs, 0.0)
    log_ratio = new - torch.where(mask, old_logprobs, 0.0)
    if args.loss_fn == "gspo":
        log_ratio = response_mean(log_ratio.detach(), mask, seq_ids) + new - new.detach()
    ratio = log_ratio.clamp(-20, 20).exp()
    clipped_ratio = ratio.clamp(1 - args.clip_lower, 1 + args.clip_higher)
    advantages = torch.where(mask, advantages, 0.0)
    if args.loss_fn == "cispo":
        loss = -advantages * clipped_ratio.detach() * new
        clipped = ratio != clipped_ratio
    else:
        unclipped_loss, clipped_loss = -advantages * ratio, -advantages * clipped_ratio
        loss = torch.maximum(unclipped_loss, clipped_loss)
        clipped = clipped_loss > unclipped_loss
        if args.clip_dual:
            loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * args.clip_dual), loss)
    return loss, ratio.detach(), clipped & mask


def importance_weights(
    old_logprobs: torch.Tensor, vllm_logprobs: torch.Tensor, mask: torch.Tensor, seq_ids: torch.Tensor, args: GRPOFlags
) -> torch.Tensor:
    """rho_t = exp(old_t - vllm_t): learner over engine probability of a sampled token; (B, T), no gradient.

    Truncated at rho_clamp_upper_bound (truncated importance sampling, Ionides 2008; TIS). Tokens with rho outside
    [rho_mask_lower_bound, rho_mask_upper_bound] weigh 0 (IcePop, arXiv:2510.18855), or with rho_mask_sequence_level
    whole responses whose geometric mean exp(mean_t log rho_t) is outside. Every bound: 0 is off. Zero outside `mask`.
    """
    log_rho = torch.where(mask, old_logprobs - vllm_logprobs, 0.0).detach().clamp(-20, 20)
    rho = log_rho.exp()
    tested = response_mean(log_rho, mask, seq_ids).exp() if args.rho_mask_sequence_level else rho
    keep = mask & (tested >= args.rho_mask_lower_bound)
    if args.rho_mask_upper_bound:
        keep = keep & (tested <= args.rho_mask_upper_bound)
    if args.rho_clamp_upper_bound:
        rho = rho.clamp(max=args.rho_clamp_upper_bound)
    return torch.where(keep, rho, 0.0)


def kl_estimates(new_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, ratio: torch.Tensor) -> list[torch.Tensor]:
    """Four per-token estimates of KL(policy || reference) from tokens of the policy, d = new - ref clamped to +-40.

    0 (kl1, k1)  d             unbiased, high variance
    1 (kl2, k2)  d^2 / 2       biased, low variance
    2 (kl3, k3)  exp(-d) - 1 + d   unbiased, never negative; DeepSeekMath, arXiv:2402.03300, eq. 4
    3 (kl4)      ratio * d     k1 for tokens of an older policy; the only one whose gradient is the KL's, by way of
                               the gradient of ratio = exp(new - old)
    Source of the numbering: Schulman, "Approximating KL divergence"; open-instruct.
    """
    d = (new_logprobs - ref_logprobs).clamp(-40, 40)
    return [d, d.square() / 2, torch.expm1(-d) + d, ratio * d]


def aggregate(
    per_token: torch.Tensor, mask: torch.Tensor, seq_ids: torch.Tensor, kind: str, tokens: float, sequences: float
) -> torch.Tensor:
    """This micro-batch's part of the optimizer step's loss, a scalar; the parts of all ranks and micro-batches add up.

    token     sum_it L_it / tokens                       DAPO, arXiv:2503.14476, eq. 8
    sequence  sum_i (mean_t L_it) / sequences            GRPO, arXiv:2402.03300, eq. 3
    number c  sum_it L_it / c                            Dr. GRPO, arXiv:2503.20783
    `tokens` and `sequences` count over all ranks and micro-batches of the optimizer step: a local mean would make the
    gradient depend on how rollouts happen to be split.
    """
    per_token = torch.where(mask, per_token, 0.0)
    if kind == "sequence":
        index, size = seq_ids.flatten(), int(seq_ids.max()) + 1
        counts = per_token.new_zeros(size).index_add(0, index, mask.flatten().to(per_token.dtype))  # tokens a response
        return (per_token / counts.clamp(min=1)[seq_ids]).sum() / sequences
    return per_token.sum() / (tokens if kind == "token" else float(kind))


def grpo_loss(
    new_logprobs: torch.Tensor,
    entropy: torch.Tensor,
    batch: Batch,
    tokens: float,
    sequences: float,
    args: Args,
    metrics: utils.Metrics,
) -> torch.Tensor:
    """The micro-batch's part of the loss: aggregate(rho * L_t + beta * KL_t - entropy_coef * H_t). Fills metrics."""
    mask, seq_ids = batch.response_mask, batch.seq_ids
    old = new_logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    flags = replace(args, clip_lower=math.inf) if args.loss_fn == "cispo" else args  # it has no lower bound
    per_token, ratio, clipped = policy_loss(new_logprobs, old, batch.advantages, mask, seq_ids, flags)
    count, rows = mask.sum(), torch.tensor(float(count_responses(batch)))

    def note(name: str, values: torch.Tensor) -> None:
        metrics.add(name, torch.where(mask, values, 0.0).sum(), count)

    if args.use_rho_correction:
        rho = importance_weights(old, batch.vllm_logprobs, mask, seq_ids, args)
        per_token, clipped = per_token * rho, clipped & (rho > 0)
        raw = (old - batch.vllm_logprobs).exp()
        note("val/rho_weight", rho)
        note("val/rho_drop_frac", (rho == 0).float())
        note("val/rho_clipfrac", (raw > (args.rho_clamp_upper_bound or math.inf)).float())
    parts = {"policy": aggregate(per_token, mask, seq_ids, args.loss_denominator, tokens, sequences)}
    if batch.ref_logprobs is not None:
        token_ratio = (new_logprobs - old).clamp(-20, 20).exp()  # with its gradient, which estimator 3 is about
        estimates = kl_estimates(new_logprobs, batch.ref_logprobs, token_ratio)
        kl = estimates[KL_ESTIMATORS[args.kl_estimator]]
        beta = 0.0 if args.kl_in_reward else args.beta
        parts["kl"] = beta * aggregate(kl, mask, seq_ids, args.loss_denominator, tokens, sequences)
        for i, (estimate, whole) in enumerate(zip(estimates, ("kl", "kl2", "kl3", None), strict=True)):
            note(f"objective/kl{i}_avg", estimate)
            if whole:
                metrics.add(f"objective/{whole}", torch.where(mask, estimate, 0.0).sum(), rows)
    if args.entropy_coef:
        bonus = aggregate(entropy, mask, seq_ids, args.loss_denominator, tokens, sequences)
        parts["entropy"] = -args.entropy_coef * bonus
    for name, part in parts.items():
        metrics.add(f"loss/{name}_avg", part, 0.0)  # parts add up; `update` counts the optimizer steps
    note("policy/clipfrac_avg", clipped.float())
    note("policy/entropy_avg", entropy)
    note("policy/approxkl_avg", (new_logprobs - old).square() / 2)
    note("val/ratio", ratio)
    note("val/ratio_sq", ratio.square())
    metrics.add("objective/entropy", -torch.where(mask, new_logprobs, 0.0).sum(), rows)
    return sum(parts.values())  # ty: ignore[invalid-explicit-return]


def count_responses(batch: Batch) -> int:
    """Responses with at least one trained token in the batch."""
    return int(torch.unique(batch.seq_ids[batch.response_mask]).numel())


def put_kl_in_reward(batches: Sequence[Batch], args: Args, world: utils.World, metrics: utils.Metrics) -> None:
    """Advantages anew from score - beta * sum_t KL_t(old || ref), of whole groups, wherever their packs lie. All ranks.

    verl's use_kl_in_reward; the estimator is --kl_estimator. The sum over tokens grows with the length.
    """
    mine = []
    for batch in batches:
        mask, old = batch.response_mask, batch.old_logprobs
        assert old is not None and batch.ref_logprobs is not None  # `update` has filled them
        kl = kl_estimates(old, batch.ref_logprobs, torch.ones_like(old))[KL_ESTIMATORS[args.kl_estimator]]
        sums = kl.new_zeros(len(batch.rollouts) + 1).index_add(0, batch.seq_ids[mask], kl[mask])[1:].tolist()
        mine += [(r.position, r.sample, r.score - args.beta * x) for r, x in zip(batch.rollouts, sums, strict=True)]
        metrics.add("objective/kl_in_reward", args.beta * sum(sums), len(sums))
    groups: dict[int, list[tuple[int, float]]] = {}
    for position, sample, score in sorted(row for rows in utils.all_gather(mine, world) for row in rows):
        groups.setdefault(position, []).append((sample, score))
    advantages = {}
    for position, group in groups.items():
        scores = torch.tensor([score for _, score in group])
        values = compute_advantages(scores, len(group), args.advantage_normalization_type)
        advantages |= {(position, j): value for (j, _), value in zip(group, values.tolist(), strict=True)}
    for batch in batches:
        for r in batch.rollouts:
            r.advantage = advantages[r.position, r.sample]
        values = torch.tensor([0.0] + [r.advantage for r in batch.rollouts], device=batch.advantages.device)
        batch.advantages = values[batch.seq_ids]


def update(
    policy: Policy,
    ref_policy: Policy | None,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    mini_batches: Sequence[Sequence[Batch]],
    args: Args,
    world: utils.World,
    metrics: utils.Metrics,
) -> tuple[dict[str, float], int]:
    """num_epochs passes over this rank's mini-batches (lists of micro-batches), an optimizer step for each.

    Returns the logprob gap's metrics and how many optimizer steps were skipped for a non-finite gradient. Raises
    utils.GapError before any weight changes. All ranks, with the same number of mini-batches; they may hold different
    numbers of micro-batches, even none.
    """
    gap, gap_metrics, bad = utils.Gap(), {}, 0
    rounds = [int(n) for n in utils.all_reduce([len(b) for b in mini_batches], world, dist.ReduceOp.MAX)]
    several = args.num_epochs * len(mini_batches) > 1 or args.kl_in_reward
    for batches, n in zip(mini_batches, rounds, strict=True):
        if ref_policy is not None:
            fill_logprobs(ref_policy, batches, "ref_logprobs", n, args)
        if several:  # else the old policy is the current one, and its logprobs come for free below
            fill_logprobs(policy, batches, "old_logprobs", n, args)
            for batch in batches:
                gap.add(batch.old_logprobs, batch)  # ty: ignore[invalid-argument-type]
        if args.kl_in_reward:
            put_kl_in_reward(batches, args, world, metrics)
    if ref_policy is not None:
        utils.shard_again(ref_policy)  # its gathered copy is not needed any more
    if several:
        gap_metrics = gap.check(args, world, "on this step's rollouts")
    for _ in range(args.num_epochs):
        for batches, n in zip(mini_batches, rounds, strict=True):
            local = [float(sum(int(b.response_mask.sum()) for b in batches)), float(sum(map(count_responses, batches)))]
            tokens, sequences = utils.all_reduce(local, world)
            for i in range(n):
                utils.gradient_sync(policy, args, last=i == n - 1)
                idle = i >= len(batches)
                batch = _idle_batch(world.device) if idle else batches[i]
                new_logprobs, entropy = policy(batch, args.temperature)
                if idle:  # FSDP must reduce the same tensors on every rank
                    loss = 0.0 * new_logprobs.sum()
                else:
                    loss = grpo_loss(new_logprobs, entropy, batch, tokens, sequences, args, metrics)
                    batch.new_logprobs = new_logprobs.detach()
                    if not several:
                        gap.add(new_logprobs, batch)
                        batch.old_logprobs = batch.new_logprobs
                (loss * world.size).backward()  # FSDP averages over ranks; our denominators are global already
            if not several:
                gap_metrics = gap.check(args, world, "on this step's rollouts")
            if n:
                norm: Any = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm or math.inf)
                norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
                metrics.add("optim/grad_norm", norm)
                for name in ("loss/policy_avg", "loss/kl_avg", "loss/entropy_avg"):
                    metrics.add(name, 0.0, 1 / world.size)
                if math.isfinite(norm):
                    optimizer.step()
                else:
                    bad += 1
            metrics.add("lr", scheduler.get_last_lr()[0])
            scheduler.step()
            optimizer.zero_grad()
    return gap_metrics, bad


@torch.no_grad()
def refresh_reference(ref_policy: Policy, policy: Policy, alpha: float) -> None:
    """ref <- alpha * policy + (1 - alpha) * ref, shard by shard (TR-DPO's soft update, arXiv:2404.09656)."""
    utils.shard_again(ref_policy)
    utils.shard_again(policy)
    for ref, new in zip(ref_policy.parameters(), policy.parameters(), strict=True):
        utils.local(ref).lerp_(utils.local(new), alpha)


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation and metrics
# ---------------------------------------------------------------------------------------------------------------------


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased pass@k from n samples: 1 - C(n - correct, k) / C(n, k) (Codex, arXiv:2107.03374, eq. 1)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def evaluate(
    engine: utils.Sampler, prompts: Sequence[utils.Prompt], tokenizer: Any, args: Args, world: utils.World
) -> tuple[dict[str, float], list[Rollout]]:
    """Metrics `eval/...` over all evaluation prompts and this rank's rollouts. All ranks."""
    start = time.perf_counter()
    mine = [(p.index, p) for p in prompts[world.rank :: world.size]]
    n = args.eval_pass_at_k
    groups = sample_rollouts(engine, mine, n, args, tokenizer, evaluation=True) if mine else []
    rollouts = [r for group in groups for r in group]
    score_rollouts(rollouts, args)
    metrics = utils.Metrics()
    utils.describe_rollouts(rollouts, args, metrics)
    for group in groups:
        correct = sum(r.verifiable >= len(r.prompt.verifiers) - 1e-8 for r in group)
        for k in [1] + [2**e for e in range(1, n.bit_length()) if 2**e <= n]:
            metrics.add("pass_at_1" if k == 1 else f"pass_at_{k}_unbiased", pass_at_k(n, correct, k))
    out = {f"eval/{name.removeprefix('val/')}": value for name, value in metrics.reduce(world).items()}
    out = {name.replace("eval/objective/scores", "eval/scores"): value for name, value in out.items()}
    return out | {"time/eval": time.perf_counter() - start}, rollouts


# ---------------------------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------------------------


def measure_gap(policy: Policy, groups: Sequence[Group], when: str, args: Args, world: utils.World) -> dict[str, float]:
    """The logprob gap on a few fresh rollouts that are not being trained on. All ranks."""
    rollouts = [r for group in groups for r in group][: args.per_device_train_batch_size]
    batch = make_batch([[[r]] for r in rollouts], world.device)
    fill_logprobs(policy, [batch], "old_logprobs", 1, args)
    gap = utils.Gap()
    gap.add(batch.old_logprobs, batch)  # ty: ignore[invalid-argument-type]
    return gap.check(args, world, when)


@torch.no_grad()
def choose_packing(policy: Policy, prompt: utils.Prompt, args: Args, world: utils.World) -> str:
    """How responses are packed: the first of shared, plain, rows that gives this model the logprobs of one response a
    row. Tried on a probe, not assumed: recurrent and convolutional layers leak from one response into the next, and a
    sliding window is not in our masks. All ranks, with the same prompt.
    """
    window = getattr(policy.model.config, "sliding_window", None) or math.inf
    if args.max_prompt_token_length + args.response_length > window:
        return "rows"
    ours = policy.model.config._attn_implementation == utils.PACK_ATTENTION
    noise = 1e-4 if args.model_dtype == "float32" else 0.03  # of the logprobs' size
    ids = [token for token in prompt.token_ids for _ in range(2)][:4]  # short: a leak shows at the start of a response
    parts = [(i // 2, x) for i, x in enumerate((ids, ids[::-1], ids[::-1], ids))]
    rollouts = [Rollout(prompt, i, 0, x, [0.0] * len(x), [True] * len(x)) for i, x in parts]
    alone = make_batch([[[r]] for r in rollouts], world.device)
    want = policy(alone, 1.0)[0][alone.response_mask]
    for how in ("shared", "plain") if ours and args.share_prompts else ("plain",):
        together = make_batch([make_pieces(rollouts, 2**62 if how == "shared" else 0)], world.device)
        difference = policy(together, 1.0)[0][together.response_mask] - want
        if float(difference.abs().mean() / want.abs().mean()) < noise:
            return how
    return "rows"


def handle_nonfinite(
    bad: int, in_a_row: int, batches: Sequence[Sequence[Batch]], step: int, run_dir: Path, world: Any, logger: Any
) -> int:
    """Dump the batch of a skipped update; returns how many steps in a row were bad, raises RuntimeError at three."""
    if not bad:
        return 0
    plain = [vars(b) | {"layout": b.layout and b.layout.pieces, "rollouts": None} for m in batches for b in m]
    torch.save(plain, run_dir / f"nonfinite_step_{step}_rank_{world.rank}.pt")
    logger.say(f"step {step}: non-finite gradient, update skipped, batch dumped to {run_dir}")
    if in_a_row == 2:
        raise RuntimeError(f"non-finite gradients in 3 steps in a row; see {run_dir}/nonfinite_step_*.pt")
    return in_a_row + 1


def describe_update(
    policy: Policy,
    packs: Sequence[Sequence[Pack]],
    args: Args,
    bad: int,
    world: utils.World,
    metrics: utils.Metrics,
) -> None:
    """Metrics of what this rank trained on."""
    pieces = [piece for mini_batch in packs for pack in mini_batch for piece in pack]
    trained = sum(map(len, pieces))
    metrics.count("trained", trained)
    tokens, pairs = sum(map(piece_length, pieces)), sum(map(attended_pairs, pieces))
    several = args.num_epochs * args.num_mini_batches > 1 or args.kl_in_reward
    passes = 3 * args.num_epochs + args.load_ref_policy + several
    responses = sum(len(r.token_ids) for piece in pieces for r in piece)
    metrics.count("learner_flops", passes * policy.flops(tokens, pairs, responses))
    metrics.count("val/num_learner_tokens", tokens)
    metrics.add("other/packed_ratio", sum(map(len, packs)), trained)
    metrics.count("optim/nonfinite_updates", bad / world.size)  # every rank saw the same


def start_state() -> dict[str, Any]:
    """What changes from step to step beside weights and optimizer: plain data that a checkpoint holds."""
    return {
        "step": 0,
        "cursor": 0,  # prompts consumed
        "excluded": [],  # indices of prompts not to sample again
        "episode": 0,
        "nonfinite_in_a_row": 0,
        "tokens": 0.0,
        "seconds": 0.0,
    }


def save_state(checkpoints: Any, modules: dict, optimizer: Any, scheduler: Any, state: dict, **more: Any) -> None:
    """Start to write a resumable checkpoint of this step, `more` included. All ranks."""
    extra = {name: state[name] for name in start_state()} | {"scheduler": scheduler.state_dict()}
    checkpoints.save(state["step"], modules, optimizer, extra | more)


def load_state(path: Path | None, modules: dict, optimizer: Any, scheduler: Any, world: utils.World) -> dict[str, Any]:
    """Go back to a checkpoint; returns its state. All ranks. Raises UserError where there is none."""
    if path is None:
        raise utils.UserError("--resume: the run has no usable checkpoint; was --checkpoint_state_freq set?")
    state = utils.load_checkpoint(path, modules, optimizer, world)
    then, base = state.pop("scheduler"), scheduler.base_lrs  # of now: see load_checkpoint
    lrs = [lr * factor(then["last_epoch"]) for lr, factor in zip(base, scheduler.lr_lambdas, strict=True)]
    scheduler.load_state_dict(then | {"base_lrs": base, "_last_lr": lrs})
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        group["lr"] = lr
    return state


def rollouts_of(rows: Sequence[dict[str, Any]]) -> list[Rollout]:
    """The rollouts of rows of rollouts.jsonl, scored, without labels and verdicts."""
    names = [f.name for f in fields(Rollout) if f.name not in ("prompt", "scoring", "results")]
    prompts: dict[int, utils.Prompt] = {}
    rollouts = []
    for row in rows:
        prompt = utils.Prompt(row["position"], tuple(row["prompt_ids"]), row.get("prompt", ""), (), ())
        known: dict[str, Any] = {n: math.nan if row[n] is None else row[n] for n in names if n in row}
        rollouts.append(Rollout(prompts.setdefault(row["position"], prompt), **known))
    return rollouts


def load_groups(step: int, state: dict[str, Any], args: Args, world: utils.World) -> list[Group]:
    """This rank's groups of a step from --load_batches; moves the state's cursor."""
    rows, dump = utils.read_dump(Path(args.load_batches), step)
    groups: dict[int, Group] = {position: [] for position in dump["positions"]}
    for r in rollouts_of([row for row in rows if row["position"] in groups]):
        groups[r.position].append(r)
    sizes = {len(group) for group in groups.values()}
    wanted = (args.num_unique_prompts_rollout, {args.num_samples_per_prompt_rollout})
    if (len(groups), sizes) != wanted:
        raise utils.UserError(
            f"--load_batches {args.load_batches} step {step} has {len(groups)} groups of {sorted(sizes)} rollouts, not "
            f"--num_unique_prompts_rollout {wanted[0]} of --num_samples_per_prompt_rollout {max(wanted[1])}"
        )
    state["cursor"] += len(groups)
    return list(groups.values())[world.rank :: world.size]


def finish_step(
    metrics: utils.Metrics,
    gap_metrics: dict[str, float],
    seconds: dict[str, float],
    state: dict[str, Any],
    num_prompts: int,
    start_time: float,
    args: Args,
    world: utils.World,
) -> dict[str, float]:
    """The step's metrics over all ranks, with throughput and totals; updates the running totals in `state`."""
    out = utils.finish_metrics(metrics.reduce(world), args) | gap_metrics | seconds
    trained, sampled, flops = out.pop("trained"), out.pop("sampled"), out.pop("learner_flops")
    tokens, response_tokens = out["val/num_step_tokens"], out.pop("response_tokens")
    state["episode"] += int(sampled)
    state["tokens"] += tokens
    state["seconds"] += seconds["time/total"]
    return out | {
        "training_step": state["step"],
        "episode": state["episode"],
        "epoch": state["cursor"] / num_prompts,
        "other/real_batch_size_ratio": trained / sampled,
        "optim/skipped_steps": float(trained == 0),
        "val/num_total_tokens": state["tokens"],
        "val/num_excluded_prompts": float(len(state["excluded"])),
        "learner_mfu": flops / (seconds["time/training"] * world.size * state["flops_per_second"]),
        "time/from_scratch": time.perf_counter() - start_time,
        "learner_tokens_per_second_step": tokens / seconds["time/total"],
        "learner_tokens_per_second_overall": state["tokens"] / state["seconds"],
        "val/actor_tokens_per_second": response_tokens / seconds.get("time/generation", seconds["time/total"]),
    }


def main(args: Args) -> Path | None:
    """Train; returns the run's directory (None after --dry_run)."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    args.check(world_size)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        args = utils.after_restart(args)
    if int(os.environ.get("RANK", 0)) == 0:
        print(args.batch_arithmetic(world_size))
        if args.dry_run:
            print("dtype    {}: {}".format(*utils.choose_dtype(args)))
            print(utils.describe_sources(args))
            utils.print_memory(args, world_size, True, LOGPROB_CHUNK)
    if args.dry_run:
        return None

    # setup
    start_time = time.perf_counter()
    world = utils.init_distributed()
    dtype, why = utils.all_gather(utils.choose_dtype(args), world)[0]
    args = replace(args, model_dtype=dtype)
    if world.is_main:
        print(f"dtype    {dtype}: {why}")
    torch.manual_seed(args.seed)
    utils.make_deterministic(args)
    tokenizer = utils.load_tokenizer(args)
    if args.load_batches:
        train_prompts = [
            group[0].prompt for group in load_groups(1, start_state(), args, utils.World(0, 0, 1, world.device))
        ]
    else:
        train_prompts = utils.load_prompts("dataset_mixer_list", args, tokenizer)
    eval_prompts = utils.load_prompts("dataset_mixer_eval_list", args, tokenizer)
    utils.check_model_length(args)
    run_dir = utils.prepare_run_dir(args, utils.data_hash(train_prompts + eval_prompts), world)
    policy = load_policy(args, world)
    ref_policy = load_policy(args, world).requires_grad_(False) if args.load_ref_policy else None
    optimizer, scheduler = make_optimizer(policy, args)
    num_steps = num_training_steps(args)
    modules = {"policy": policy} | ({"ref_policy": ref_policy} if args.ref_policy_update_freq else {})
    state = start_state()
    checkpoints = utils.Checkpoints(run_dir, args.keep_last_n_checkpoints, world)
    if args.resume:
        state |= load_state(utils.newest_checkpoint(run_dir, world), modules, optimizer, scheduler, world)
    how = choose_packing(policy, train_prompts[0], args, world)
    servers = utils.start_reward_models(args, run_dir, world)
    engine: Any = None  # with --load_batches
    gap_metrics = {"debug/vllm_vs_local_logprob_diff_mean": math.nan}
    if not args.load_batches:
        concurrency = max(
            args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout // world.size,
            math.ceil(len(eval_prompts) / world.size) * args.eval_pass_at_k,
        )
        engine = utils.make_engine(args, tokenizer, world, concurrency)
        engine.load_weights(utils.full_weights(policy, utils.DTYPES[dtype]), version=state["step"])
        probe = sample_rollouts(engine, [(world.rank, train_prompts[world.rank % len(train_prompts)])], 1, args)
        gap_metrics = measure_gap(policy, probe, "before the first rollout", args, world)
    state |= utils.device_speed(world.device, utils.DTYPES[dtype])
    logger = utils.Logger(args, run_dir, num_steps, state["step"], world)
    gap = gap_metrics["debug/vllm_vs_local_logprob_diff_mean"]
    if state["step"]:
        logger.say(f"resumed after step {state['step']}")
    logger.say(
        f"{len(train_prompts)} prompts, {len(eval_prompts)} for evaluation; {PACKING[how].format(args.pack_length)}; "
        f"ready after {time.perf_counter() - start_time:.0f} s; logprob gap before the first rollout mean {gap:.1e}"
    )
    if args.eval_on_step_0 and state["step"] == 0:
        eval_metrics, _ = evaluate(engine, eval_prompts, tokenizer, args, world)
        logger.log({"training_step": 0, "episode": 0} | gap_metrics | eval_metrics)

    # the loop
    for step in utils.STOP.steps(range(state["step"] + 1, num_steps + 1)):
        step_start, timer, metrics = time.perf_counter(), utils.Timer(), utils.Metrics()
        if args.load_batches:
            groups = sampled = load_groups(step, state, args, world)
        else:
            groups, sampled = sample_groups(engine, train_prompts, state, tokenizer, args, world, timer)
        per_mini_batch = len(groups) // args.num_mini_batches or 1
        with timer("training"):
            packs = []
            for i in range(args.num_mini_batches):
                rollouts = trainable(groups[i * per_mini_batch : (i + 1) * per_mini_batch], args)
                packs += pack_rollouts(rollouts, how, args.pack_length, 1, policy.pair_cost)
            batches = [micro_batches(p, how, args, world.device) for p in packs]
            gap_metrics, bad = update(policy, ref_policy, optimizer, scheduler, batches, args, world, metrics)
            if not gap_metrics:  # no group has a gradient
                gap_metrics = measure_gap(policy, sampled, "on this step's rollouts", args, world)
        bad_in_a_row = handle_nonfinite(bad, state["nonfinite_in_a_row"], batches, step, run_dir, world, logger)
        state["nonfinite_in_a_row"] = bad_in_a_row
        if ref_policy is not None and args.ref_policy_update_freq and step % args.ref_policy_update_freq == 0:
            refresh_reference(ref_policy, policy, args.alpha)
        with timer("weight_sync"):
            if engine is not None:
                engine.load_weights(utils.full_weights(policy, utils.DTYPES[dtype]), version=step)

        # everything below reports or saves
        utils.check_servers(servers)
        state["step"] = step
        seconds = timer.seconds | {"time/total": time.perf_counter() - step_start}
        utils.describe_step(groups, sampled, args, metrics)
        describe_update(policy, packs, args, bad, world, metrics)
        out = finish_step(metrics, gap_metrics, seconds, state, len(train_prompts), start_time, args, world)
        if args.save_freq > 0 and step % args.save_freq == 0:
            with timer("saving"):
                utils.save_model(policy, tokenizer, run_dir / f"step_{step}", args, world)
            out["time/saving"] = timer.seconds["time/saving"]
        if eval_prompts and args.local_eval_every > 0 and (step % args.local_eval_every == 0 or step == num_steps):
            out |= evaluate(engine, eval_prompts, tokenizer, args, world)[0]
        logger.log(out)
        utils.record_step(step, sampled, groups, packs, batches, how, policy, args, world)
        if step % SHOW_ROLLOUTS_EVERY == 1:
            logger.show(step, sampled)
        stopping = utils.stop_asked(world)
        if stopping or (args.checkpoint_state_freq > 0 and step % args.checkpoint_state_freq == 0):
            save_state(checkpoints, modules, optimizer, scheduler, state)
        if stopping:
            logger.say(f"{stopping}: stopped after step {step}; --resume goes on")
            break

    checkpoints.wait()
    finished = state["step"] == num_steps
    if finished:
        utils.save_model(policy, tokenizer, run_dir / "model", args, world)
    logger.close()
    if world.is_main:
        made = f"model {run_dir / 'model'}" if finished else f"no model yet, checkpoints in {run_dir / 'checkpoints'}"
        print(f"{made}, {utils.draw_report(run_dir)}")
    rewards.close()
    utils.stop_servers(servers)
    dist.barrier()  # no rank leaves while another still writes
    if engine is not None:
        engine.close()
    utils.leave_distributed()
    if args.push_to_hub and world.is_main and finished:  # the other ranks wait for nothing
        utils.push_model(run_dir)
    return run_dir


if __name__ == "__main__":
    utils.STOP.listen()
    try:
        main(utils.parse_args(Args))
    except utils.UserError as error:
        raise SystemExit(f"grpo.py: {error}") from None
    utils.exit_process()
