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
Flags and their refusals come first, to be looked up: begin at make_request. To change the algorithm: README, Fork it.

Shapes: P prompts and G rollouts per prompt in a step, N = P * G, B rows of a micro-batch, T tokens of the longest row,
V vocabulary, W ranks. Per-token tensors are (B, T), aligned to `targets`: position t is about predicting targets[t].
Logprobs, KL and entropy are in nats.
"""

import contextlib
import functools
import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import utils  # isort: skip  (pins thread counts, so it comes before torch)

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import rewards
from utils import Gap, Group, Metrics, Prompt, Rollout, Sampler, Timer, World

# --- Flags: open-instruct's names; defaults of its GRPO page where the page has one -----------------------------------


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
    """Leave groups of equal outcomes (scores before penalties) out of the update. Loss denominators count the rest."""
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
    lr_scheduler_type: Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
    ] = "linear"
    """A schedule of transformers that takes no more than warmup_ratio and the run's length."""
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
class Args(GRPOFlags, utils.Flags):
    """GRPO on a Hugging Face causal LM. Booleans: --flag, --no_flag, --flag true, --flag False."""

    def check(self, world_size: int = 1, fast: bool = False) -> None:
        """Refuse contradictions and impossible arithmetic before anything loads. Raises UserError: flags and fix."""
        utils.Flags.check(self)
        utils.positive(self, "num_unique_prompts_rollout num_samples_per_prompt_rollout num_mini_batches num_epochs")
        utils.positive(self, "total_episodes per_device_train_batch_size eval_pass_at_k ref_policy_update_freq")
        utils.positive(self, "beta clip_higher entropy_coef learning_rate weight_decay max_grad_norm", zero=True)
        utils.positive(self, "rho_clamp_upper_bound rho_mask_lower_bound rho_mask_upper_bound", zero=True)
        self.check_batch(world_size, fast)
        self.check_loss()
        self.check_sampling()
        rewards.configure(self, connect=False)

    def check_batch(self, world_size: int, fast: bool) -> None:
        """The arithmetic of a step on `world_size` ranks of grpo.py (1 with `fast`, grpo_fast.py)."""
        refuse, p, g = self.refuse, self.num_unique_prompts_rollout, self.num_samples_per_prompt_rollout
        prompts, samples = "--num_unique_prompts_rollout", "--num_samples_per_prompt_rollout"
        longest, learners = self.max_prompt_token_length + self.response_length, self.num_learners_per_node
        if self.pack_length < longest:
            refuse(f"--pack_length < --max_prompt_token_length + --response_length: raise --pack_length to {longest}")
        if g == 1 and self.advantage_normalization_type != "none":
            kind = "--advantage_normalization_type"
            refuse(f"{samples} with {kind} is zero for all: raise it, or take {kind} none")
        if g == 1 and self.filter_zero_std_samples:
            refuse(f"{samples} with --filter_zero_std_samples drops all: raise it, or add --no_filter_zero_std_samples")
        if p % world_size:
            refuse(f"{prompts} is not a multiple of the {world_size} ranks: take {p + -p % world_size}")
        if not fast and world_size % self.sequence_parallel_size:
            refuse(f"--sequence_parallel_size does not divide the {world_size} ranks: start a multiple of it, or less")
        if (mine := p // max(1, world_size // self.sequence_parallel_size)) % self.num_mini_batches:
            refuse(f"{prompts} on {world_size} ranks is {mine} a rank, which --num_mini_batches does not divide")
        if self.total_episodes < p * g:
            refuse(f"--total_episodes is less than a step of {prompts} x {samples} = {p * g}")
        shares_gpu = (not fast or self.single_gpu_mode) and torch.cuda.is_available() and self.rollout_backend == "vllm"
        most = 0.6 if fast or self.vllm_sleep == "off" else 0.8
        if self.vllm_gpu_memory_utilization > most and shares_gpu:
            refuse(f"--vllm_gpu_memory_utilization leaves the learner on the same GPU no room: 0.3 to {most}")
        if fast:
            return
        for_fast = self.for_fast()
        if learners != [1] and sum(learners) != world_size:
            fast_or = for_fast and f"grpo_fast.py, which has {for_fast}, or "
            fix = f"start {fast_or}grpo.py with torchrun --nproc_per_node={(learners or [1])[0]}"
            refuse(f"--num_learners_per_node but {world_size} ranks run: {fix}")
        if self.vllm_tensor_parallel_size > 1 and not self.dry_run:
            raise utils.UserError(f"{for_fast}: grpo.py has one GPU per engine; start grpo_fast.py")
        own_servers = self.solver_model_name_or_path and not self.solver_base_url
        if own_servers and world_size != int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
            refuse("--solver_model_name_or_path: on several nodes start servers yourself and give --solver_base_url")

    def for_fast(self) -> str:
        """The flags given that only grpo_fast.py acts on."""
        names = ("vllm_num_engines", "vllm_tensor_parallel_size", "async_steps", "inflight_updates")
        return " ".join(f"--{n} {getattr(self, n)}" for n in names if getattr(self, n) > getattr(Args, n))

    def check_loss(self) -> None:
        """What contradicts itself in loss and optimizer."""
        refuse, refresh, dual = self.refuse, self.ref_policy_update_freq, self.clip_dual
        low, high, clamp = self.rho_mask_lower_bound, self.rho_mask_upper_bound, self.rho_clamp_upper_bound
        utils.need(0 < self.alpha <= 1, f"--alpha {self.alpha}: must be in (0, 1]")
        utils.need(0 <= self.clip_lower <= 1, f"--clip_lower {self.clip_lower}: must be in [0, 1]")
        utils.need(0 <= self.warmup_ratio < 1, f"--warmup_ratio {self.warmup_ratio}: must be in [0, 1)")
        if self.warmup_ratio and self.lr_scheduler_type == "constant":
            refuse("--warmup_ratio with --lr_scheduler_type warms nothing up: take constant_with_warmup")
        if self.lora_rank and refresh is not None:
            refuse("--ref_policy_update_freq with --lora_rank has no second model to move: drop one of them")
        if self.lora_rank and self.load_states:
            refuse("--load_states with --lora_rank: other runs' states are whole models, drop --lora_rank")
        if self.beta and not self.load_ref_policy:
            refuse("--beta needs a reference policy: drop --no_load_ref_policy or set --beta 0")
        if refresh is not None and not self.load_ref_policy:
            refuse("--ref_policy_update_freq needs a reference policy: drop --no_load_ref_policy")
        if self.ref_model_name_or_path:
            self.check_teacher()
        if dual and (dual <= 1 or self.loss_fn != "dapo"):
            refuse("--clip_dual: must be above 1, with --loss_fn dapo; 0 is off")
        if (kind := self.loss_denominator) not in ("token", "sequence"):
            with contextlib.suppress(ValueError):
                kind = float(kind)
            if isinstance(kind, str) or not 0 < kind < math.inf:
                refuse("--loss_denominator: token, sequence or a positive number")
        if not self.use_rho_correction and (low or high or self.rho_mask_sequence_level):
            refuse("--rho_mask_* bounds act through --use_rho_correction: drop --no_use_rho_correction or the bounds")
        if clamp and clamp < 1:
            refuse("--rho_clamp_upper_bound truncates exact agreement: at least 1, or 0 for off")
        if low >= 1 or (high and high <= 1):
            refuse("--rho_mask_lower_bound must be below 1 and --rho_mask_upper_bound above 1, to keep rho 1; 0 is off")
        if self.use_rho_correction and self.vllm_top_p != 1:
            fix = "set --vllm_top_p 1.0 or --no_use_rho_correction"
            refuse(f"--vllm_top_p cuts the distribution, which biases --use_rho_correction: {fix}")
        if not self.kl_in_reward:
            return
        if self.beta == 0:
            refuse("--kl_in_reward subtracts beta * KL: it needs --beta above 0")
        if self.mask_truncated_completions:
            refuse("--kl_in_reward needs the KL of whole groups, which --mask_truncated_completions cuts: drop one")
        if self.advantage_normalization_type.startswith("standard") and not self.force_kl_in_reward:
            # so that responses of equal outcome get advantages of about 1, however small beta
            words = "divides KL differences by their own standard deviation"
            fix = "--advantage_normalization_type centered, or add --force_kl_in_reward"
            refuse(f"--kl_in_reward with --advantage_normalization_type {words}: take {fix}")

    def check_teacher(self) -> None:
        """What contradicts a teacher."""
        refuse, teacher = self.refuse, "--ref_model_name_or_path"
        if self.ref_policy_update_freq is not None:
            refuse(f"--ref_policy_update_freq would mix the policy into {teacher}: drop one of them")
        if not self.load_ref_policy:
            refuse(f"{teacher} is the reference policy: drop --no_load_ref_policy")
        if not self.beta or self.kl_in_reward:
            return
        if self.filter_zero_std_samples:
            words = "drops groups of equal scores, whose KL teaches all the same"
            refuse(f"--filter_zero_std_samples with {teacher} {words}: add --no_filter_zero_std_samples")
        if KL_ESTIMATORS[self.kl_estimator] == 0:
            words = "has a gradient of zero on average, from which nothing is learned"
            refuse(f"--kl_estimator with {teacher} {words}: take kl2, the gradient of the KL")

    def check_sampling(self) -> None:
        """What contradicts itself in sampling, reward and evaluation."""
        refuse, solved, evaluates = self.refuse, self.no_resampling_pass_rate, self.dataset_mixer_eval_list != []
        if solved is not None and not 0 < solved <= 1:
            refuse("--no_resampling_pass_rate: must be in (0, 1]; or leave it out")
        if self.active_sampling and not self.filter_zero_std_samples:
            refuse("--active_sampling refills groups that --filter_zero_std_samples drops: it needs that flag")
        if self.overlong_buffer_length >= self.response_length:
            refuse("--overlong_buffer_length must be less than --response_length")
        if self.eval_on_step_0 and not evaluates:
            refuse("--eval_on_step_0 needs --dataset_mixer_eval_list")
        if self.load_batches and (evaluates or self.active_sampling or self.reward_file):
            refuse("--load_batches: drop --dataset_mixer_eval_list --active_sampling --reward_file: nothing is sampled")


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


# --- Sample, score, compare within the group --------------------------------------------------------------------------


def make_request(r: Rollout, args: Args, evaluation: bool = False) -> utils.Request:
    """What the engine is asked for: the next turn of r. The seed depends on (run seed, position, sample, turn) only, so
    the same rollouts come out of any number of ranks; evaluation has its own seeds, temperature and length."""
    turn = [len(r.turns) // 2] if r.turns else []  # each was answered
    seed = utils.derive_seed(args.seed, r.position, r.sample, int(evaluation), *turn)
    default = args.temperature if args.eval_pass_at_k > 1 else 0.0  # several greedy responses would be equal
    temperature = (args.eval_temperature or default) if evaluation else args.temperature
    length, stop = room(r, args, evaluation), ()
    if r.prompt.environment is not None:
        length, stop = min(length, args.per_turn_max_tokens or length), r.prompt.environment.stop
    top_p = args.vllm_top_p if temperature > 0 else 1.0
    ids = (*r.prompt.token_ids, *r.token_ids.tolist()) if r.turns else r.prompt.token_ids
    return utils.Request(ids, seed, temperature, length, top_p, stop)


def room(r: Rollout, args: Args, evaluation: bool) -> int:
    """Tokens that a rollout may still grow by."""
    return ((evaluation and args.eval_response_length) or args.response_length) - len(r.token_ids)


def sample_rollouts(
    engine: Sampler, prompts: Sequence[tuple[int, Prompt]], samples: int, args: Args, evaluation: bool = False
) -> list[Group]:
    """A group of `samples` responses for each (position, prompt), each answered by its environment and handed to its
    verifiers the moment it ends, while the others go on."""
    groups = [[Rollout(prompt, position, j) for j in range(samples)] for position, prompt in prompts]
    rollouts = [r for group in groups for r in group]
    requests = [make_request(r, args, evaluation) for r in rollouts]
    engine.generate(requests, lambda i, generation: end_turn(rollouts[i], generation, engine, args, evaluation))
    return groups


def sample_probes(engine: Sampler, position: int, prompt: Prompt, samples: int, args: Args) -> list[Group]:
    """A group to measure the logprob gap on: one turn each, which nobody answers or scores."""
    group = [Rollout(prompt, position, j) for j in range(samples)]
    engine.generate([make_request(r, args) for r in group], lambda i, generation: group[i].append(generation))
    return [group]


def end_turn(
    r: Rollout, generation: utils.Generation, engine: Sampler, args: Args, evaluation: bool = False
) -> Future[utils.Request | None] | None:
    """Take in what the policy says. None: the rollout is over and on its way to its verifiers; else the future of the
    request for the next turn, or of None, once the environment has answered.

    r.turns has a dict for each turn, {role: assistant, content, tokens, cached, finish_reason}, and for each answer,
    {role, content, tokens, status, seconds, reward, done, metrics, state}. Their tokens add up to r.token_ids.
    """
    with utils.LOCK:
        r.append(generation)
        r.over = r.prompt.environment is None
        if not r.over:
            ids = generation.token_ids
            turn = {"role": "assistant", "content": text_of(ids, engine), "tokens": len(ids)}
            r.turns.append(turn | {"cached": generation.cached, "finish_reason": generation.finish_reason})
            r.over = len(r.turns) // 2 >= args.max_steps or room(r, args, evaluation) <= 0
    return start_scoring(r, engine, args) if r.over else ask(r, engine, args, evaluation)


def text_of(token_ids: np.ndarray, engine: Sampler) -> str:
    """The text of tokens but an end token; a <think> that is a special token survives."""
    ends = len(token_ids) > 0 and token_ids[-1] in engine.eos_ids
    ids = token_ids[:-1] if ends else token_ids  # an array: of a list transformers looks at each element's type
    return str(engine.tokenizer.decode(ids, skip_special_tokens=False))


def start_scoring(r: Rollout, engine: Sampler, args: Args) -> None:
    """Fill the text of a rollout that is over and hand it, of several turns the last one, to its prompt's verifiers."""
    r.text, said = text_of(r.token_ids, engine), [t for t in r.turns if t["role"] == "assistant"]
    if args.apply_verifiable_reward:
        text = said[-1]["content"] if said else r.text
        for label, verifier in zip(r.prompt.ground_truths, r.prompt.verifiers, strict=True):
            record = rewards.RewardRecord(text, label, verifier, len(r.token_ids), r.prompt.conversation)
            r.scoring.append(rewards.submit(record))
    with utils.LOCK:
        r.turns = [{name: value for name, value in t.items() if name != "state"} for t in r.turns]


def score_rollouts(rollouts: Sequence[Rollout], args: Args) -> None:
    """Wait for the verifiers; fill results, verifiable, format_score, outcome and score of each rollout."""
    for r in rollouts:
        r.results, r.scoring = [future.result() for future in r.scoring], []
        r.verifiable = sum(result.score for result in r.results)
        if r.prompt.environment is not None:
            answers = [t for t in r.turns if t["role"] != "assistant"]
            failed = sum(x for t in answers for name, x in t["metrics"].items() if name.endswith("/failures"))
            good = not failed and any(t["content"] for t in answers)
            r.verifiable = 0.0 if args.only_reward_good_outputs and not good else r.verifiable
            missing = any(t["status"] == "infra_error" for t in answers)
            r.verifiable = math.nan if missing else r.verifiable + sum(t["reward"] for t in answers)
        r.format_score = rewards.format_reward(r.text)
        stopped, tokens_left = r.finish_reason == "stop", args.response_length - len(r.token_ids)
        r.outcome, r.score = rewards.combine_rewards(args, r.verifiable, r.format_score, stopped, tokens_left)


def compute_advantages(scores: Tensor, group_size: int, normalization: str) -> Tensor:
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


def set_advantages(groups: Sequence[Group], args: Args) -> None:
    """Fill advantage from score, and tokenless. make_batch gives the advantage to every token."""
    scores = torch.tensor([[r.score for r in group] for group in groups])  # (P, G)
    advantages = compute_advantages(scores.flatten(), scores.shape[1], args.advantage_normalization_type)
    for group, values in zip(groups, advantages.view(scores.shape).tolist(), strict=True):
        tokenless = [r.score for r in group if not np.count_nonzero(r.mask)]
        for r, advantage in zip(group, values, strict=True):
            r.advantage, r.tokenless = advantage, tokenless


def has_gradient(group: Group) -> bool:
    """True when the group's outcomes differ (missing ones apart): else its advantages are zero, but for penalties."""
    return len(utils.distinct_outcomes(group)) > 1


def score_group(group: Group, args: Args) -> bool:
    """Fill scores; whether the group is one of the step's: active_sampling wants a gradient."""
    score_rollouts(group, args)
    return has_gradient(group) or not args.active_sampling


def sample_groups(
    engine: Sampler, prompts: list[Prompt], state: dict, args: Args, world: World, timer: Timer
) -> tuple[list[Group], list[Group]]:
    """This rank's groups of a step (P / W of them, scored, with advantages) and all groups sampled; moves the state's
    cursor and exclusions.

    Rank r takes positions cursor + r, cursor + r + W, ..., see `stream_offset`. With active_sampling rounds of P
    prompts go on until every rank has its P / W groups with a gradient.
    """
    wanted, size = args.num_unique_prompts_rollout // world.size, args.num_samples_per_prompt_rollout
    chosen: list[Group] = []
    sampled: list[Group] = []
    excluded = frozenset(state["excluded"])
    for _ in range(MAX_SAMPLING_ROUNDS if args.active_sampling else 1):
        cursor = state["cursor"]
        positions = range(cursor + stream_offset(args, world), cursor + args.num_unique_prompts_rollout, world.size)
        state["cursor"] += args.num_unique_prompts_rollout
        with timer("generation"):
            order = args.seed if args.shuffle else None
            pairs = [(position, utils.prompt_at(prompts, position, order, excluded)) for position in positions]
            groups = sample_rollouts(engine, pairs, size, args)
        with timer("reward"):
            chosen += [group for group in groups if score_group(group, args)]
            set_advantages(groups, args)
        sampled += groups
        if utils.all_reduce([float(len(chosen) < wanted)], world)[0] == 0:  # all ranks
            break
    everyone = utils.all_gather(exclude_solved(excluded, sampled, args), world)
    state["excluded"] = sorted(frozenset().union(*everyone))
    return chosen[:wanted], sampled


def stream_offset(args: Args, world: World) -> int:
    """The first of a step's positions that is this rank's; it takes every W-th from there. Without
    --sequence_parallel_size its rank. S ranks that share packs have together what one rank of W / S would have."""
    place, member = divmod(world.rank, args.sequence_parallel_size)
    return place + member * (world.size // args.sequence_parallel_size)


def exclude_solved(excluded: frozenset[int], sampled: Sequence[Group], args: Args) -> frozenset[int]:
    """`excluded` and the prompts whose mean score reached no_resampling_pass_rate of their highest score."""
    rate = args.no_resampling_pass_rate
    if rate is None:
        return excluded
    means = [(group[0].prompt, sum(r.outcome for r in group) / len(group)) for group in sampled]  # NaN: unsolved
    return excluded | {p.index for p, mean in means if mean >= rate * rewards.max_score(args, len(p.verifiers))}


def share_groups(groups: list[Group], args: Args) -> list[Group]:
    """This rank's groups and those of the ranks that work on the same packs, in stream order. All ranks."""
    return sorted(sum(utils.share(groups, args), []), key=lambda group: group[0].position)


def split_groups(groups: Sequence[Group], args: Args) -> list[list[Rollout]]:
    """What trains in each of num_mini_batches: equal shares of the groups, but for one where they do not divide."""
    n, m = len(groups), args.num_mini_batches
    return [trainable(groups[n * i // m : n * (i + 1) // m], args) for i in range(m)]


def trainable(groups: Sequence[Group], args: Args) -> list[Rollout]:
    """The rollouts of `groups` that enter the update: no constant groups, no missing scores, no masked truncations, no
    responses without a token of the policy. Advantages were computed before, on whole groups."""
    kept = [r for group in groups if has_gradient(group) or not args.filter_zero_std_samples for r in group]
    kept = [r for r in kept if np.count_nonzero(r.mask) and not math.isnan(r.score)]
    return [r for r in kept if r.finish_reason == "stop" or not args.mask_truncated_completions]


# --- Turns: an environment answers the policy, which goes on ----------------------------------------------------------


def ask(r: Rollout, engine: Sampler, args: Args, evaluation: bool = False) -> Future[utils.Request | None]:
    """Have the environment answer the last turn of r, in a thread: see end_turn."""
    environment, row, last = r.prompt.environment, r.prompt.episode, r.turns[-1]
    assert environment is not None
    said = [{"role": t["role"], "content": t["content"]} for t in r.turns]
    turn = 1 + len(said) // 2  # answers stand between the turns
    now = {"messages": row["messages"] + said, "text": last["content"], "turn": turn}
    now |= {"steps_left": args.max_steps - turn, "stopped": last["finish_reason"] == "stop"}
    state = r.turns[-2]["state"] if len(said) > 1 else None

    def take_answer() -> utils.Request | None:
        answer = rewards.ask_environment(environment.path, state, row | now, args.env_timeout)
        left, ended = room(r, args, evaluation), r.token_ids[-1] in engine.eos_ids
        ids, text = environment.answer(answer.pop("texts"), ended, left, engine.tokenizer)
        with utils.LOCK:
            r.over = answer["done"] or (ended and not environment.role)
            if not r.over and len(ids) >= left:
                r.over, r.finish_reason = True, "length"
            ids = [] if r.over else ids
            r.append_answer(ids)
            if text or answer["reward"] or answer["metrics"] or not r.over:
                r.turns.append({"role": environment.role or "tool", "content": text, "tokens": len(ids)} | answer)
        return start_scoring(r, engine, args) if r.over else make_request(r, args, evaluation)

    return rewards.ENV_THREADS.submit(take_answer)


# --- Packs and batches ------------------------------------------------------------------------------------------------


Piece = list[Rollout]  # responses to one prompt that share a copy of it
Pack = list[Piece]  # what one row of a batch holds


@dataclass
class Batch:
    """Rows for one forward. Every per-token tensor is (B, T), aligned to `targets`; the shift happens here only."""

    input_ids: Tensor
    targets: Tensor
    response_mask: Tensor  # bool: the policy chose targets[t], train on it
    seq_ids: Tensor  # 1, 2, ... the response a position belongs to; 0 for prompts and padding
    advantages: Tensor
    vllm_logprobs: Tensor
    position_ids: Tensor | None = None  # None: 0, 1, 2, ...
    layout: utils.Layout | None = None  # who attends to whom in a pack; None: causal
    old_logprobs: Tensor | None = None  # None: the policy itself, detached
    ref_logprobs: Tensor | None = None
    new_logprobs: Tensor | None = None  # of the last pass over it, before that pass's optimizer step
    tops: Tensor | None = None  # with a teacher: the policy's most likely tokens, as numbers of float32
    ref_tops: Tensor | None = None
    rollouts: list[Rollout] = field(default_factory=list)  # in the order of seq_ids
    places: Any = None  # (n,) of the flattened rows: where response_mask is True
    host_places: Any = None  # the same, where it was made: a list of one tensor
    responses: int = 0  # with at least one token to train on

    def __post_init__(self):
        if self.places is None:  # FSDP copies a batch by its fields; asked of a GPU, either would wait for it
            self.places = self.response_mask.flatten().nonzero()[:, 0]
            self.host_places = [self.places]
            self.responses = self.seq_ids.flatten()[self.places].unique().numel()

    def part(self, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """input_ids, position_ids, targets and places of this rank's columns."""
        positions = torch.arange(self.input_ids.shape[1], device=self.input_ids.device).expand_as(self.input_ids)
        positions = positions if self.position_ids is None else self.position_ids
        ids, positions, targets = (utils.columns(x, group) for x in (self.input_ids, positions, self.targets))
        (places,), n = self.host_places, ids.shape[1]
        rows, columns = places // self.targets.shape[1], places % self.targets.shape[1]
        places = (rows * n + columns % n)[columns // n == group.rank()]
        return ids, positions, targets, places.to(ids.device)

    def to(self, device: torch.device) -> "Batch":
        vars(self).update({name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)})
        return self


def pack_rollouts(
    rollouts: Sequence[Rollout], packing: str, pack_length: int, learners: int = 1, pair_cost: float = 0.0
) -> list[list[Pack]]:
    """Each learner's packs of at most `pack_length` tokens; every rollout is in exactly one.

    packing  shared: responses of a prompt share one copy of it; plain: each response has its own; rows: one a pack.
    Pieces go to learners so that tokens and costs (tokens + pair_cost * attended pairs) are even, then into as few
    packs as best-fit-decreasing needs, evenly filled. Groups are cut smaller until tokens are within 2 %.
    """
    if not rollouts:
        return [[] for _ in range(learners)]
    limit = pack_length
    while True:
        pieces = make_pieces(rollouts, limit if packing == "shared" else 0)
        tokens = [piece_length(p) for p in pieces]
        costs = [n + pair_cost * attended_pairs(p) for n, p in zip(tokens, pieces, strict=True)]
        shares = utils.balance(tokens, costs, learners)
        loads = [sum(tokens[i] for i in share) for share in shares]
        if packing != "shared" or max(loads) <= 1.02 * sum(loads) / learners or len(pieces) == len(rollouts):
            break
        limit //= 2
    budget = 0 if packing == "rows" else pack_length
    bins = [utils.pack_bins([tokens[i] for i in share], [costs[i] for i in share], budget) for share in shares]
    return [[[pieces[share[i]] for i in pack] for pack in b] for share, b in zip(shares, bins, strict=True)]


def make_pieces(rollouts: Sequence[Rollout], max_tokens: int) -> list[Piece]:
    """Neighbouring rollouts of one prompt in pieces of at most `max_tokens`, one rollout where that is too few."""
    pieces: list[Piece] = []
    for r in rollouts:
        if pieces and pieces[-1][0].position == r.position and piece_length([*pieces[-1], r]) <= max_tokens:
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
    y_1 .. y_m: where p_n stands y_1 is predicted. A segment continues the prompt's positions and attends to the prompt
    and itself: see utils.Layout. A row of one response needs none: causal attention never looks right, at the padding.
    """
    lengths = [sum(map(piece_length, pack)) for pack in packs]
    shape = (len(packs), max(lengths))
    input_ids, targets, position_ids, seq_ids = np.zeros((4, *shape), np.int64)
    mask, (advantages, vllm_logprobs) = np.zeros(shape, np.bool_), np.zeros((2, *shape), np.float32)
    rollouts, many_responses = [], any(sum(map(len, pack)) > 1 for pack in packs)
    for i, pack in enumerate(packs):
        end = 0
        for piece in pack:
            prompt = np.array(piece[0].prompt.token_ids)
            part, end = slice(end, end + len(prompt) - 1), end + len(prompt) - 1
            input_ids[i, part], position_ids[i, part] = prompt[:-1], np.arange(len(prompt) - 1)
            for r in piece:
                part, end = slice(end, end + len(r.token_ids)), end + len(r.token_ids)
                rollouts.append(r)
                targets[i, part], input_ids[i, part] = r.token_ids, np.concatenate([prompt[-1:], r.token_ids[:-1]])
                position_ids[i, part] = np.arange(len(prompt) - 1, len(prompt) - 1 + len(r.token_ids))
                seq_ids[i, part], mask[i, part] = len(rollouts), r.mask
                advantages[i, part], vllm_logprobs[i, part] = r.advantage, r.logprobs
    t = torch.from_numpy
    batch = Batch(t(input_ids), t(targets), t(mask), t(seq_ids), t(advantages), t(vllm_logprobs), rollouts=rollouts)
    if many_responses:
        if len(packs) > 1:
            raise ValueError("a pack of several responses is a batch of its own")
        batch.position_ids = torch.from_numpy(position_ids)
        parts = [(len(p[0].prompt.token_ids) - 1, [len(r.token_ids) for r in p]) for p in packs[0]]
        batch.layout = utils.Layout(parts, device)
    return batch.to(device)


def micro_batches(packs: Sequence[Pack], packing: str, args: Args, device: torch.device) -> list[Batch]:
    """A batch for each pack; for `packing` rows one for each per_device_train_batch_size of them."""
    size = args.per_device_train_batch_size if packing == "rows" else 1
    return [make_batch(packs[i : i + size], device) for i in range(0, len(packs), size)]


def _idle_batch(device: torch.device) -> Batch:
    """Two tokens without weight, for a rank that has fewer micro-batches than the others."""
    zeros, floats, mask = torch.zeros((1, 2), dtype=torch.long), torch.zeros(1, 2), torch.ones((1, 2), dtype=torch.bool)
    return Batch(zeros, zeros, mask, zeros, floats, floats, old_logprobs=floats, ref_logprobs=floats).to(device)


# --- Policy -----------------------------------------------------------------------------------------------------------


class HeadLogprobs(torch.autograd.Function):
    """log softmax(hidden W^T / temperature)[target] and its distribution's entropy, without keeping any logits.

    Forward and backward make the logits of `chunk` tokens at a time, in float32 after the head. With p the softmax, H
    the entropy and g, h the gradients of logprob and entropy, the gradient of a logit is
    (g (onehot - p) - h p (log p + H)) / temperature. `compiled`: a chunk's passes over its logits are fused.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature: float, chunk: int, compiled: bool = False):
        logprobs, entropy, normalizers = torch.empty(3, len(targets), device=hidden.device)  # of (n, H), (V, H), (n,)
        work = chunk_function(HeadLogprobs.forward_chunk, compiled)
        for i in range(0, len(targets), chunk):
            part = slice(i, i + chunk)
            normalizers[part], logprobs[part], entropy[part] = work(hidden[part], weight, targets[part], temperature)
        ctx.save_for_backward(hidden, weight, targets, entropy, normalizers)
        ctx.set_materialize_grads(False)
        ctx.options = temperature, chunk, compiled
        return logprobs, entropy

    @staticmethod
    def logits(hidden, weight, temperature: float):
        logits = (hidden @ weight.T).float()  # (chunk, V)
        return logits if temperature == 1 else logits.div_(temperature)

    @staticmethod
    def forward_chunk(hidden, weight, targets, temperature: float):
        logits = HeadLogprobs.logits(hidden, weight, temperature)
        normalizer = logits.logsumexp(1)
        logp = logits.sub_(normalizer[:, None])
        return normalizer, logp.gather(1, targets[:, None])[:, 0], -torch.linalg.vecdot(logp.exp(), logp)

    @staticmethod
    def backward_chunk(hidden, weight, targets, normalizer, entropy, g, h, temperature: float):
        logp = HeadLogprobs.logits(hidden, weight, temperature).sub_(normalizer[:, None])

        def but_for_onehot(logp):  # (chunk, V) or (chunk, 1), which it uses up
            if h is None:
                return logp.exp_().mul_(-g[:, None])
            p = logp.exp()
            return p.mul_(logp.add_(entropy[:, None]).mul_(h[:, None] / temperature).add_(g[:, None])).neg_()

        at_target = but_for_onehot(logp.gather(1, targets[:, None])) + g[:, None]  # a copy, before logp is used up
        return but_for_onehot(logp).to(weight.dtype).scatter_(1, targets[:, None], at_target.to(weight.dtype))

    @staticmethod
    def backward(ctx, g, h):
        hidden, weight, targets, entropy, normalizers = ctx.saved_tensors
        temperature, chunk, compiled = ctx.options
        hidden_grad, trains = torch.empty_like(hidden), ctx.needs_input_grad[1]
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if trains else None
        g = torch.zeros_like(entropy) if g is None else g / temperature
        work = chunk_function(HeadLogprobs.backward_chunk, compiled)
        for i in range(0, len(targets), chunk):
            part = slice(i, i + chunk)
            rest = normalizers[part], entropy[part], g[part], None if h is None else h[part], temperature
            grad = work(hidden[part], weight, targets[part], *rest)
            hidden_grad[part] = grad @ weight
            if trains:
                weight_grad += grad.T @ hidden[part]
        return hidden_grad, weight_grad.to(weight.dtype) if trains else None, None, None, None, None


@functools.cache
def chunk_function(work: Callable, compiled: bool, backend: str | Callable = "inductor") -> Callable:
    """`work` of HeadLogprobs, or compiled for any number of tokens: what reads and writes the logits once a pass."""
    if not compiled:
        return work
    fused = torch.compile(work, backend=backend)

    def run(hidden: Tensor, weight: Tensor, *more: Any) -> Any:
        own = [x.clone() if isinstance(x, Tensor) else x for x in (hidden, *more)]  # a view's offset would be guarded
        for x in own:
            if isinstance(x, Tensor):
                torch._dynamo.maybe_mark_dynamic(x, 0)  # the tokens; sizes of the weight stay numbers
        return fused(own[0], weight, *own[1:])

    return run


class Policy(torch.nn.Module):
    """A causal LM whose forward gives what GRPO needs: logprobs of the targets and entropies, never logits."""

    def __init__(self, model: Any, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.model: Any = model
        self.matrices, self.head = utils.matmul_parameters(model)
        self.width = utils.attention_width(model.config)
        self.pair_cost = 2 * self.width / self.matrices  # of attending to one more token, in tokens
        self.compiled = False  # --compile_layers
        self.note_tops, self.tops = False, None  # whether forward sets it: (B, T) the most likely tokens
        self.group = group  # of the ranks that share the tokens of a batch, see utils.sequence_group

    def flops(self, tokens: float, pairs: float, responses: float) -> float:
        """Floating-point operations of a forward: 2 per matrix weight and token, 4 per pair, head and layer width."""
        return 2 * self.matrices * tokens + 4 * self.width * pairs + 2 * self.head * responses

    def forward(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """log p(targets) and entropy of softmax(logits / temperature), float32 (B, T), zero outside the response mask.
        The head runs on masked positions only, LOGPROB_CHUNK at a time: logits of more tokens never exist. On a GPU it
        is compiled and takes three times as many, in the memory of one: it keeps no logits in float32."""
        # attention of another name than ours finds the sequences of a pack where positions start again
        ours = self.model.config._attn_implementation == utils.PACK_ATTENTION
        more: dict[str, Any] = {"layout": batch.layout} if ours and batch.layout is not None else {}
        ids, positions, targets, places = batch.input_ids, batch.position_ids, batch.targets, batch.places
        if self.group is not None:
            (ids, positions, targets, places), more["group"] = batch.part(self.group), self.group
        hidden = self.model.base_model(
            input_ids=ids, position_ids=positions, use_cache=False, **more
        ).last_hidden_state  # (B, T, H)
        weight, shape = self.model.get_output_embeddings().weight, targets.shape
        hidden, targets = hidden.flatten(0, 1).index_select(0, places), targets.flatten()[places]
        gpu = hidden.is_cuda
        options = temperature, LOGPROB_CHUNK * (3 if gpu else 1), gpu or self.compiled
        found: list[Tensor] = [*HeadLogprobs.apply(hidden, weight, targets, *options)]
        if self.note_tops:  # for another product with the head
            found.append(torch.cat([(x @ weight.detach().T).argmax(1) for x in hidden.detach().split(options[1])]))
        zeros, where = torch.zeros(shape, device=places.device), (places // shape[1], places % shape[1])
        found = [zeros.index_put(where, x.float()) for x in found]
        if self.group is not None:
            found = [utils.all_columns(x, batch.targets.shape[1], self.group) for x in found]
        self.tops = found[2] if self.note_tops else None
        return found[0], found[1]


def load_policy(args: Args, world: World, frozen: bool = False) -> Policy:
    """The model of --model_name_or_path as a sharded Policy; `frozen`: in compute dtype. All ranks."""
    model = utils.load_causal_lm(args).requires_grad_(not frozen)
    if args.lora_rank:
        utils.add_adapters(model, args)
    policy = Policy(model, utils.sequence_group(args))
    if args.gradient_checkpointing:
        utils.checkpoint_layers(policy.model, args.gradient_checkpointing_part)
    if args.compile_layers:
        policy.compiled = utils.compile_layers(policy.model)
    return utils.shard_model(policy, policy.model, args, world)


def make_optimizer(policy: Policy, args: Args) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW (weight decay on matrices only) and the learning-rate schedule, one tick per mini-batch."""
    from transformers import get_scheduler

    trained = [p for p in policy.parameters() if p.requires_grad]
    matrices, others = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, fused=True)
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # a step without gradient ticks too
    ticks = num_training_steps(args) * args.num_epochs * args.num_mini_batches
    scheduler = get_scheduler(args.lr_scheduler_type, optimizer, round(ticks * args.warmup_ratio), ticks)
    return optimizer, scheduler


@dataclass
class Learner:
    """What an update works on, sharded over the ranks."""

    policy: Policy
    ref_policy: Policy | None  # or the policy, without its adapters
    optimizer: torch.optim.Optimizer
    scheduler: Any

    def modules(self, args: Args) -> dict[str, Policy]:
        """Those that training changes."""
        moves = self.ref_policy is not None and args.ref_policy_update_freq
        return {"policy": self.policy} | ({"ref_policy": self.ref_policy} if moves else {})


def load_learner(args: Args, world: World) -> Learner:
    """A learner before its first update. All ranks."""
    policy, ref_policy = load_policy(args, world), None
    policy.note_tops = args.ref_model_name_or_path != ""
    if args.load_ref_policy and args.lora_rank and not args.ref_model_name_or_path:
        ref_policy = policy
    elif args.load_ref_policy:  # one that is refreshed has weights between those of the compute dtype
        frozen = args.ref_policy_update_freq is None
        ref_policy = load_policy(args.of_reference(), world, frozen).requires_grad_(False)
        ref_policy.note_tops = policy.note_tops
    return Learner(policy, ref_policy, *make_optimizer(policy, args))


@torch.no_grad()
def fill_logprobs(policy: Policy, batches: Sequence[Batch], name: str, rounds: int, args: Args) -> None:
    """Set `name` (old_ or ref_logprobs) of each batch. All ranks run `rounds` forwards: FSDP gathers in step."""
    with utils.without_adapters(policy.model) if name == "ref_logprobs" else contextlib.nullcontext():
        for i in range(rounds):
            batch = batches[i] if i < len(batches) else _idle_batch(next(policy.parameters()).device)
            setattr(batch, name, policy(batch, args.temperature)[0])
            if name == "ref_logprobs":
                batch.ref_tops = policy.tops


# --- Losses and the update --------------------------------------------------------------------------------------------


def response_mean(values: Tensor, mask: Tensor, seq_ids: Tensor) -> Tensor:
    """At each position the mean of `values` over the masked tokens of its response. All (B, T); seq_ids >= 0."""
    index, size = seq_ids.flatten(), seq_ids.numel() + 1  # a response has a token
    total = values.new_zeros(size).index_add(0, index, torch.where(mask, values, 0.0).flatten())
    count = values.new_zeros(size).index_add(0, index, mask.flatten().to(values.dtype))
    return (total / count.clamp(min=1))[seq_ids]


def policy_loss(
    new_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, seq_ids: Tensor, args: GRPOFlags
) -> tuple[Tensor, Tensor, Tensor]:
    """Per-token policy-gradient loss, the ratio, and where clipping was active. All (B, T), zero outside `mask`.

    dapo   ratio_t = exp(new_t - old_t);  L_t = max(-A ratio_t, -A clip(ratio_t, 1 - lower, 1 + higher))
           PPO, arXiv:1707.06347, eq. 7, with DAPO's two bounds, arXiv:2503.14476. clip_dual c > 1 adds
           L_t <- min(L_t, -c A) where A < 0: dual-clip PPO, arXiv:1912.09729.
    cispo  L_t = -A sg(clip(ratio_t, 1 - lower, 1 + higher)) new_t, lower inf in grpo_loss  MiniMax-M1, arXiv:2506.13585
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
    old_logprobs: Tensor, vllm_logprobs: Tensor, mask: Tensor, seq_ids: Tensor, args: GRPOFlags
) -> Tensor:
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


def kl_estimates(new_logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor) -> list[Tensor]:
    """Four per-token estimates of KL(policy || reference) from tokens of the policy, d = new - ref clamped to +-40.

    0 (kl1, k1)  d             unbiased, high variance
    1 (kl2, k2)  d^2 / 2       biased, low variance; for tokens of this very policy its gradient is the KL's
    2 (kl3, k3)  exp(-d) - 1 + d   unbiased, never negative; DeepSeekMath, arXiv:2402.03300, eq. 4
    3 (kl4)      ratio * d     k1 for tokens of an older policy, of which it alone has the KL's gradient, by way of
                               that of ratio = exp(new - old)
    Source of the numbering: Schulman, "Approximating KL divergence"; open-instruct.
    """
    d = (new_logprobs - ref_logprobs).clamp(-40, 40)
    return [d, d.square() / 2, torch.expm1(-d) + d, ratio * d]


def aggregate(per_token: Tensor, mask: Tensor, seq_ids: Tensor, kind: str, tokens: float, sequences: float) -> Tensor:
    """This micro-batch's part of the optimizer step's loss, a scalar; the parts of all ranks and micro-batches add up.

    token     sum_it L_it / tokens                       DAPO, arXiv:2503.14476, eq. 8
    sequence  sum_i (mean_t L_it) / sequences            GRPO, arXiv:2402.03300, eq. 3
    number c  sum_it L_it / c                            Dr. GRPO, arXiv:2503.20783
    `tokens` and `sequences` count over all ranks and micro-batches of the optimizer step: a local mean would make the
    gradient depend on how rollouts happen to be split.
    """
    per_token = torch.where(mask, per_token, 0.0)
    if kind == "sequence":
        index, size = seq_ids.flatten(), seq_ids.numel() + 1  # a response has a token
        counts = per_token.new_zeros(size).index_add(0, index, mask.flatten().to(per_token.dtype))  # tokens a response
        return (per_token / counts.clamp(min=1)[seq_ids]).sum() / sequences
    return per_token.sum() / (tokens if kind == "token" else float(kind))


def grpo_loss(
    new_logprobs: Tensor, entropy: Tensor, batch: Batch, tokens: float, sequences: float, args: Args, metrics: Metrics
) -> Tensor:
    """The micro-batch's part of the loss: aggregate(rho * L_t + beta * KL_t - entropy_coef * H_t). Fills metrics."""
    mask, seq_ids = batch.response_mask, batch.seq_ids
    old = new_logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    flags = replace(args, clip_lower=math.inf) if args.loss_fn == "cispo" else args  # it has no lower bound
    per_token, ratio, clipped = policy_loss(new_logprobs, old, batch.advantages, mask, seq_ids, flags)
    count, rows = float(len(batch.places)), float(batch.responses)

    def note(name: str, values: Tensor) -> None:
        metrics.add(name, torch.where(mask, values, 0.0).sum(), count)

    if args.use_rho_correction:
        rho = importance_weights(old, batch.vllm_logprobs, mask, seq_ids, args)
        per_token, clipped = per_token * rho, clipped & (rho > 0)
        note("val/rho_weight", rho)
        note("val/rho_drop_frac", (rho == 0).float())
        note("val/rho_clipfrac", (old - batch.vllm_logprobs).exp() > (args.rho_clamp_upper_bound or math.inf))
    over = mask, seq_ids, args.loss_denominator, tokens, sequences
    parts = {"policy": aggregate(per_token, *over)}
    if batch.ref_logprobs is not None:
        token_ratio = (new_logprobs - old).clamp(-20, 20).exp()  # with its gradient, which estimator 3 is about
        estimates = kl_estimates(new_logprobs, batch.ref_logprobs, token_ratio)
        kl = estimates[KL_ESTIMATORS[args.kl_estimator]]
        parts["kl"] = (0.0 if args.kl_in_reward else args.beta) * aggregate(kl, *over)
        for i, (estimate, summed) in enumerate(zip(estimates, ("kl", "kl2", "kl3", None), strict=True)):
            note(f"objective/kl{i}_avg", estimate)
            if summed:
                metrics.add(f"objective/{summed}", torch.where(mask, estimate, 0.0).sum(), rows)
        if batch.ref_tops is not None:
            metrics.add("objective/ref_top_agreement", ((batch.tops == batch.ref_tops) & mask).sum(), count)
    if args.entropy_coef:
        parts["entropy"] = -args.entropy_coef * aggregate(entropy, *over)
    for name, part in parts.items():
        metrics.add(f"loss/{name}_avg", part, 0.0)  # parts add up; take_step counts the optimizer steps
    note("policy/clipfrac_avg", clipped.float())
    note("policy/clipfrac_lower_avg", (batch.advantages < 0) & (ratio > (args.clip_dual or math.inf)))
    note("policy/entropy_avg", entropy)
    note("policy/approxkl_avg", (new_logprobs - old).square() / 2)
    note("policy/ppo_kl_avg", old - new_logprobs)
    note("val/ratio", ratio)
    note("val/ratio_sq", ratio.square())
    metrics.add("objective/entropy", -torch.where(mask, new_logprobs, 0.0).sum(), rows)
    return sum(parts.values())  # ty: ignore[invalid-explicit-return]


def put_kl_in_reward(batches: Sequence[Batch], args: Args, world: World, metrics: Metrics) -> None:
    """Advantages anew from score - beta * sum_t KL_t(old || ref), of whole groups, wherever their packs lie. All ranks.

    verl's use_kl_in_reward; the estimator is --kl_estimator. The sum over tokens grows with the length: a response
    without any keeps its score and counts in its group. float64: KLs far below the score's own rounding compare. What
    else make_batch has put into the advantages, a fork's reward per token, is lost here: add it again.
    """
    mine = []
    for batch in batches:
        places, old = batch.places, batch.old_logprobs
        assert old is not None and batch.ref_logprobs is not None  # `update` has filled them
        kl = kl_estimates(old, batch.ref_logprobs, torch.ones_like(old))[KL_ESTIMATORS[args.kl_estimator]]
        sums = torch.zeros(len(batch.rollouts) + 1, dtype=torch.float64, device=kl.device)
        sums = sums.index_add(0, batch.seq_ids.flatten()[places], kl.flatten()[places].double())[1:].tolist()
        for r, x in zip(batch.rollouts, sums, strict=True):
            mine.append((r.position, r.sample, r.score - args.beta * x, r.tokenless))
        metrics.add("objective/kl_in_reward", args.beta * sum(sums), len(sums))
    everyone = sum(utils.all_gather(mine, world)[:: args.sequence_parallel_size], [])
    advantages = {}
    for _, rows in itertools.groupby(sorted(everyone), key=lambda row: row[0]):
        positions, samples, rewards_less_kl, tokenless = zip(*rows, strict=True)
        scores = torch.tensor([*rewards_less_kl, *tokenless[0]], dtype=torch.float64)  # the latter are in no batch
        values = compute_advantages(scores, len(scores), args.advantage_normalization_type).tolist()
        advantages |= zip(zip(positions, samples, strict=True), values, strict=False)
    for batch in batches:
        for r in batch.rollouts:
            r.advantage = advantages[r.position, r.sample]
        values = torch.tensor([0.0] + [r.advantage for r in batch.rollouts], device=batch.advantages.device)
        batch.advantages = values[batch.seq_ids]


def needs_old_logprobs(args: Args, num_mini_batches: int) -> bool:
    """Whether the old logprobs take a forward of their own: in a single optimizer step they are the new ones."""
    return args.num_epochs * num_mini_batches > 1 or args.kl_in_reward


def prepare(
    learner: Learner, work: Sequence[tuple[Sequence[Batch], int]], args: Args, world: World, metrics: Metrics
) -> Gap:
    """What `update` needs from before any weight changes: ref_logprobs, old_logprobs, the KL in the reward. Returns the
    gap of the old logprobs, an empty one if they are not needed. All ranks."""
    gap, needs_old = Gap(), needs_old_logprobs(args, len(work))
    for batches, n in work:
        if learner.ref_policy is not None:
            with metrics.timer("ref_logprobs"):
                fill_logprobs(learner.ref_policy, batches, "ref_logprobs", n, args)
        if needs_old:
            with metrics.timer("old_logprobs"):
                fill_logprobs(learner.policy, batches, "old_logprobs", n, args)
            for batch in batches:
                gap.add(batch.old_logprobs, batch)  # ty: ignore[invalid-argument-type]
        if args.kl_in_reward:
            put_kl_in_reward(batches, args, world, metrics)
    if learner.ref_policy is not None:
        utils.shard_again(learner.ref_policy)  # its gathered copy is not needed any more
    return gap


def update(
    learner: Learner, mini_batches: Sequence[Sequence[Batch]], args: Args, world: World, metrics: Metrics
) -> tuple[dict[str, float], int]:
    """num_epochs passes over this rank's mini-batches (lists of micro-batches), an optimizer step for each.

    Returns the logprob gap's metrics and how many optimizer steps were skipped for a non-finite gradient. GapError:
    before any weight changes. All ranks, with as many mini-batches; the numbers of micro-batches may differ, even be 0.
    """
    metrics = metrics if utils.leads(args, world) else Metrics()
    rounds = utils.all_reduce([len(b) for b in mini_batches], world, dist.ReduceOp.MAX)
    work = [(batches, int(n)) for batches, n in zip(mini_batches, rounds, strict=True)]
    gap = prepare(learner, work, args, world, metrics)
    policy, single, bad = learner.policy, not needs_old_logprobs(args, len(work)), 0  # single: new are the old logprobs
    gap_metrics = {} if single else gap.check(args, world, "on this step's rollouts")
    for _ in range(args.num_epochs):
        for batches, n in work:
            mine = [float(sum(len(b.places) for b in batches)), float(sum(b.responses for b in batches))]
            tokens, sequences = (x / args.sequence_parallel_size for x in utils.all_reduce(mine, world))
            for i in range(n):
                utils.gradient_sync(policy, args, last=i == n - 1)
                idle = i >= len(batches)
                batch = _idle_batch(world.device) if idle else batches[i]
                new_logprobs, entropy = policy(batch, args.temperature)
                if idle:  # FSDP must reduce the same tensors on every rank
                    loss = 0.0 * new_logprobs.sum()
                else:
                    batch.tops = policy.tops
                    loss = grpo_loss(new_logprobs, entropy, batch, tokens, sequences, args, metrics)
                    batch.new_logprobs = new_logprobs.detach()
                    if single:
                        gap.add(new_logprobs, batch)
                        batch.old_logprobs = batch.new_logprobs
                (loss * world.size).backward()  # FSDP averages over ranks; our denominators are global already
            if single:
                gap_metrics = gap.check(args, world, "on this step's rollouts")
            if n:
                bad += not take_step(learner, args, world, metrics)
            metrics.add("lr", learner.scheduler.get_last_lr()[0])
            learner.scheduler.step()
            learner.optimizer.zero_grad()
    return gap_metrics, bad


def take_step(learner: Learner, args: Args, world: World, metrics: Metrics) -> bool:
    """An optimizer step with the clipped gradient; False, and nothing changes, if that is not finite. All ranks."""
    how = {} if world.device.type == "cuda" else {"foreach": False}  # a DTensor plans all of one call: 1 s of a start
    norm: Any = torch.nn.utils.clip_grad_norm_(learner.policy.parameters(), args.max_grad_norm or math.inf, **how)
    metrics.add("optim/grad_norm", norm := float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
    for name in ("loss/policy_avg", "loss/kl_avg", "loss/entropy_avg"):
        metrics.add(name, 0.0, args.sequence_parallel_size / world.size)  # 1 over all ranks: grpo_loss adds the values
    if math.isfinite(norm):
        learner.optimizer.step()
    return math.isfinite(norm)


@torch.no_grad()
def refresh_reference(ref_policy: Policy, policy: Policy, alpha: float) -> None:
    """ref <- alpha * policy + (1 - alpha) * ref, shard by shard (TR-DPO's soft update, arXiv:2404.09656)."""
    utils.shard_again(ref_policy)
    utils.shard_again(policy)
    for ref, new in zip(ref_policy.parameters(), policy.parameters(), strict=True):
        utils.shard_of(ref).lerp_(utils.shard_of(new), alpha)


# --- The run ----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a run is made of on a rank that learns, in this script and in grpo_fast.py: see set_up."""

    args: Args
    world: World  # of the learners
    start_time: float
    tokenizer: "utils.Tokenizer"
    train_prompts: list[Prompt]
    eval_prompts: list[Prompt]
    run_dir: Path
    learner: Learner
    state: dict[str, Any]  # see start_state
    checkpoints: utils.Checkpoints
    packing: str  # see choose_packing
    eval_world: World  # the ranks that sample and score for evaluation
    # set_up leaves these to the scripts
    engine: Sampler | None = None  # None on ranks that have none
    servers: Any = None  # see utils.start_reward_models
    logger: utils.Logger = field(init=False)  # see start_log


@dataclass
class Step:
    """What one step of a run works on, on this rank."""

    number: int
    groups: list[Group] = field(default_factory=list)  # to train on
    sampled: list[Group] = field(default_factory=list)  # these and all others
    packs: list[list[Pack]] = field(default_factory=list)  # of each mini-batch
    batches: list[list[Batch]] = field(default_factory=list)  # the same as tensors
    gap_metrics: dict[str, float] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    timer: Timer = field(default_factory=Timer)
    seconds: dict[str, float] = field(default_factory=dict)  # of other threads
    start_time: float = field(default_factory=time.perf_counter)


def start_state() -> dict[str, Any]:
    """A run's state beside weights and optimizer, before its first step: plain data that a checkpoint holds."""
    return {
        "step": 0,  # the last one that is done
        "cursor": 0,  # prompts consumed
        "episode": 0,
        "nonfinite_in_a_row": 0,
        "tokens": 0.0,  # of all steps
        "seconds": 0.0,  # of all steps
        "excluded": [],  # indices of prompts that are not sampled again
    }


def set_up(args: Args, world: World) -> Run:
    """A run before its engines start: prompts, directory and a learner, with --resume that of its newest checkpoint.
    All learners. Raises UserError for what cannot work."""
    start_time = time.perf_counter()
    torch.manual_seed(args.seed)
    utils.make_deterministic(args)
    tokenizer = utils.load_tokenizer(args)
    environment = utils.load_environment(args, tokenizer)
    if args.load_batches:
        train_prompts = dumped_prompts(args)
    else:
        train_prompts = utils.load_prompts("dataset_mixer_list", args, tokenizer, environment)
    eval_prompts = utils.load_prompts("dataset_mixer_eval_list", args, tokenizer, environment)
    utils.check_models(args)
    run_dir = utils.prepare_run_dir(args, utils.data_hash(train_prompts + eval_prompts), world)
    rewards.configure(args, connect=world.is_main)  # an absent judge is refused now, not after minutes of loading
    newest = None
    if args.resume:
        newest = utils.newest_checkpoint(run_dir, world)
        utils.need(newest is not None, f"--resume: {run_dir} has no whole checkpoint; see --overwrite")

    learner = load_learner(args, world)
    state = start_state()
    checkpoints = utils.Checkpoints(run_dir, args.keep_last_n_checkpoints, world)
    if newest is not None:
        state |= load_state(newest, learner, args, world)
    return Run(
        args=args,
        world=world,
        start_time=start_time,
        tokenizer=tokenizer,
        train_prompts=train_prompts,
        eval_prompts=eval_prompts,
        run_dir=run_dir,
        learner=learner,
        state=state,
        checkpoints=checkpoints,
        packing=choose_common_packing(learner, train_prompts[0], args, world),
        eval_world=world,
    )


def train(run: Run, step: Step, probe: Sequence[Group], args: Args) -> None:
    """The step's updates. Where no group has a gradient, the logprob gap is measured on `probe`. All ranks."""
    learner = run.learner
    world = run.world
    step.batches = [micro_batches(packs, run.packing, args, world.device) for packs in step.packs]
    step.gap_metrics, skipped = update(learner, step.batches, args, world, step.metrics)
    if not step.gap_metrics:
        rollouts = [r for group in probe for r in group][: args.per_device_train_batch_size]
        step.gap_metrics = measure_gap(learner.policy, [rollouts], "on this step's rollouts", args, world)
    step.metrics.count("optim/nonfinite_updates", skipped / world.size)  # every rank counts the same ones
    handle_nonfinite(run, step, skipped)
    if learner.ref_policy is not None and due(args.ref_policy_update_freq or 0, step.number):
        refresh_reference(learner.ref_policy, learner.policy, args.alpha)


def main(args: Args) -> Path | None:
    """Train; returns the run's directory (None after --dry_run)."""
    args = check_start(args)
    if args.dry_run:
        return None
    world = utils.init_distributed()
    args = choose_dtype(args, world)
    run = set_up(args, world)
    run.servers = utils.start_reward_models(args, run.run_dir, world)
    engine = None if args.load_batches else start_engine(run)
    gap_metrics = {} if engine is None else send_first_weights(run, engine)
    start_log(run, gap_metrics)

    state = run.state
    policy = run.learner.policy
    dtype = utils.DTYPES[args.model_dtype]
    for number in utils.STOP.steps(range(state["step"] + 1, num_training_steps(args) + 1)):
        step = Step(number)
        utils.take_state(args, number - 1, policy, run.learner.optimizer, engine, world)
        if engine is None:
            step.groups = load_groups(number, state, args, world)
            step.sampled = step.groups
        else:
            step.groups, step.sampled = sample_groups(engine, run.train_prompts, state, args, world, step.timer)
            engine.sleep()
        with step.timer("training"):
            for rollouts in split_groups(share_groups(step.groups, args), args):
                step.packs += pack_rollouts(rollouts, run.packing, args.pack_length, 1, policy.pair_cost)
            train(run, step, step.sampled, args)
        with step.timer("weight_sync"):
            if engine is not None:
                engine.load_weights(utils.full_weights(policy, dtype), version=number)

        # everything below reports or saves
        out = step_metrics(run, step)
        end_step(run, step, out)
        if save_state(run):
            break
    return finish(run)


# --- Before the first step --------------------------------------------------------------------------------------------


def check_start(args: Args) -> Args:
    """The flags as this script runs them, checked; prints the plan. Raises UserError for what cannot work."""
    args = args.beside_engine(True)
    planned = max(1, sum(args.num_learners_per_node)) if args.dry_run else 1
    ranks = int(os.environ.get("WORLD_SIZE", planned))
    args.check(ranks)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        args = utils.after_restart(args)
    if int(os.environ.get("RANK", 0)) == 0:
        utils.print_plan(args, fast=False, learners=ranks, shared_gpu=True, logprob_chunk=LOGPROB_CHUNK)
        ignored = args.for_fast()
        if ignored:
            print(f"WARNING: {ignored}: grpo.py samples on the learners' GPUs, strictly on-policy; start grpo_fast.py")
    return args


def choose_dtype(args: Args, world: World) -> Args:
    """The flags with the dtype that --model_dtype auto means on the first rank's machine. All ranks."""
    dtype, reason = utils.all_gather(utils.choose_dtype(args), world)[0]
    if world.is_main:
        print(f"dtype    {dtype}: {reason}")
    return replace(args, model_dtype=dtype)


def start_engine(run: Run) -> utils.Engine:
    """This rank's engine, with room for its share of a step's rollouts and of an evaluation's. All ranks."""
    args = run.args
    ranks = run.world.size
    trained = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout // ranks
    evaluated = math.ceil(len(run.eval_prompts) / ranks) * args.eval_pass_at_k
    engine = utils.make_engine(args, run.tokenizer, run.world, max(trained, evaluated))
    run.engine = engine
    return engine


def send_first_weights(run: Run, engine: utils.Engine) -> dict[str, float]:
    """Load this rank's engine with the policy's weights; returns the logprob gap of a probe. All ranks."""
    args = run.args
    world = run.world
    policy = run.learner.policy
    prompt = run.train_prompts[world.rank % len(run.train_prompts)]
    gap_metrics: dict[str, float] = {}
    for version, when, check in starts(policy, args, run.state["step"]):
        engine.load_weights(utils.full_weights(policy, utils.DTYPES[args.model_dtype]), version=version)
        probe = sample_probes(engine, world.rank, prompt, 1, args)
        engine.sleep(1)
        gap_metrics = check(policy, probe, when, args, world)
    return gap_metrics


class Start(NamedTuple):
    """Weights that the policy has before the first rollout, and the check of what an engine samples with them."""

    version: int
    when: str  # for the message of a failed check
    check: Callable[..., dict[str, float]]


def starts(policy: Policy, args: Args, step: int) -> Iterator[Start]:
    """What the engines get before the first rollout: with --lora_rank a trial of all adapters, then the policy's own
    weights. The policy has them until the next one is asked for."""
    if args.lora_rank:
        with utils.trial_adapters(policy, args.seed):
            yield Start(step - 1, "on a trial of all adapters", check_trial)
    yield Start(step, "before the first rollout", measure_gap)
    utils.shard_again(policy)  # an engine that slept wakes next, beside the memory that a check leaves in use


def check_trial(policy: Policy, groups: Sequence[Group], when: str, args: Args, world: World) -> dict[str, float]:
    """Raise GapError unless the engine has all adapters: see scripts/parts/adapter_trial.py. All ranks, inside
    utils.trial_adapters."""
    from scripts.parts import adapter_trial

    rollouts = [r for part in utils.share(groups, args) for group in part for r in group]
    batch = make_batch([[[r]] for r in rollouts], world.device)
    fill_logprobs(policy, [batch], "old_logprobs", 1, args)
    fill_logprobs(policy, [batch], "ref_logprobs", 1, args)  # without adapters
    adapter_trial.check(batch, when, args, world)
    return {}


def measure_gap(policy: Policy, groups: Sequence[Group], when: str, args: Args, world: World) -> dict[str, float]:
    """The logprob gap on fresh rollouts that are not trained on. All ranks, with equally many rollouts."""
    rollouts = [r for group in groups for r in group]
    rollouts = [r for part in utils.share(rollouts, args) for r in part]
    batches = micro_batches([[[r]] for r in rollouts], "rows", args, world.device)
    fill_logprobs(policy, batches, "old_logprobs", len(batches), args)
    gap = Gap()
    for batch in batches:
        gap.add(batch.old_logprobs, batch)  # ty: ignore[invalid-argument-type]
    return gap.check(args, world, when)


@torch.no_grad()
def choose_packing(policy: Policy, prompt: Prompt, args: Args, world: World) -> str:
    """How responses are packed: the first of shared, plain and rows that gives this model the logprobs of one response
    a row. All ranks, with the same prompt. Raises UserError for a model that --sequence_parallel_size cannot split."""
    from scripts.parts import packing

    candidates = packing.candidates(policy, args, world)
    if not candidates:
        return "rows"
    rollouts = packing.probe_rollouts(prompt)
    batches = {
        "shared": make_batch([make_pieces(rollouts, 2**62)], world.device),
        "plain": make_batch([make_pieces(rollouts, 0)], world.device),
        "rows": make_batch([[[r]] for r in rollouts], world.device),
    }
    return packing.first_that_agrees(candidates, policy, batches, args)


def choose_common_packing(learner: Learner, prompt: Prompt, args: Args, world: World) -> str:
    """The packing that the policy and a teacher of another architecture can both compute. All ranks."""
    packings = [choose_packing(learner.policy, prompt, args, world)]
    if learner.ref_policy is not None and args.ref_model_name_or_path:
        packings.append(choose_packing(learner.ref_policy, prompt, args.of_reference(), world))
    return max(packings, key=list(PACKING).index)


def load_groups(step: int, state: dict[str, Any], args: Args, world: World) -> list[Group]:
    """This rank's groups of a step from --load_batches; moves the state's cursor."""
    from scripts.parts import dumps

    groups = dumps.read_groups(step, args)
    state["cursor"] += len(groups)
    return groups[stream_offset(args, world) :: world.size]


def dumped_prompts(args: Args) -> list[Prompt]:
    """The prompts of the first step of --load_batches. Raises UserError now if the last step's dump is missing: else
    the run would end without a model."""
    from scripts.parts import dumps

    groups = dumps.read_groups(1, args)
    dumps.read_groups(num_training_steps(args), args)
    return [group[0].prompt for group in groups]


# --- Evaluation -------------------------------------------------------------------------------------------------------


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased pass@k from n samples: 1 - C(n - correct, k) / C(n, k) (Codex, arXiv:2107.03374, eq. 1)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def note_pass_at_k(group: Group, metrics: Metrics) -> None:
    """Metrics of a prompt's samples: pass@k for k = 1, 2, 4 and so on, over the samples that have a verdict."""
    judged = [r for r in group if not math.isnan(r.verifiable)]
    correct = sum(r.verifiable >= len(r.prompt.verifiers) - 1e-8 for r in judged)
    k = 1
    while k <= len(judged):
        name = "pass_at_1" if k == 1 else f"pass_at_{k}_unbiased"
        metrics.add(name, pass_at_k(len(judged), correct, k))
        k *= 2


def evaluate(run: Run) -> dict[str, float]:
    """Metrics `eval/...` over all evaluation prompts. All ranks of eval_world."""
    start = time.perf_counter()
    world = run.eval_world
    length = run.args.eval_response_length or run.args.response_length
    args = replace(run.args, response_length=length)  # penalties for length go by it
    assert run.engine is not None  # the ranks of eval_world have one
    prompts = [(prompt.index, prompt) for prompt in run.eval_prompts[world.rank :: world.size]]
    groups: list[Group] = []
    if prompts:
        groups = sample_rollouts(run.engine, prompts, args.eval_pass_at_k, args, evaluation=True)
    rollouts = [r for group in groups for r in group]
    score_rollouts(rollouts, args)

    metrics = Metrics()
    utils.note_rollouts(rollouts, args, metrics)
    for group in groups:
        note_pass_at_k(group, metrics)
    out = {}
    for name, value in metrics.reduce(world).items():
        short_name = name.removeprefix("val/").replace("objective/scores", "scores")
        out[f"eval/{short_name}"] = value
    out["time/eval"] = time.perf_counter() - start
    return out


# --- Metrics and the log ----------------------------------------------------------------------------------------------


def start_log(run: Run, gap_metrics: dict[str, float], roles: str = "") -> None:
    """Open the log, print what starts, with --eval_on_step_0 evaluate. All learners, while no engine samples."""
    args = run.args
    state = run.state
    state |= utils.device_speed(run.world.device, utils.DTYPES[args.model_dtype])
    state["clock"] = time.perf_counter()  # see step_metrics
    run.logger = utils.Logger(args, run.run_dir, num_training_steps(args), state["step"], run.world)
    if state["step"]:
        run.logger.say(f"resumed after step {state['step']}")
    gap = gap_metrics.get("debug/vllm_vs_local_logprob_diff_mean", math.nan)
    ready = time.perf_counter() - run.start_time
    run.logger.say(f"data     {len(run.train_prompts)} prompts, {len(run.eval_prompts)} for evaluation")
    run.logger.say(f"packing  {roles}{PACKING[run.packing].format(args.pack_length)}")
    run.logger.say(f"start    ready after {ready:.0f} s; logprob gap before the first rollout mean {gap:.1e}")
    if args.eval_on_step_0 and state["step"] == 0 and run.engine is not None:
        run.logger.log({"training_step": 0, "episode": 0} | gap_metrics | evaluate(run))


@dataclass
class Totals:
    """Sums of a step over all ranks that only enter ratios: they are no metrics."""

    trained: float  # rollouts
    sampled: float  # rollouts
    response_tokens: float  # of the sampled ones
    learner_flops: float


def step_metrics(run: Run, step: Step) -> dict[str, float]:
    """The step's metrics over all ranks; adds the step to the sums in the run's state. All ranks.

    The run's seconds count from one call to the next, the first from start_log: evaluation and saving are in them."""
    args = run.args
    world = run.world
    state = run.state
    seconds = step.timer.seconds | step.seconds
    seconds["time/total"] = time.perf_counter() - step.start_time
    utils.note_step(step.groups, step.sampled, args, step.metrics)
    if utils.leads(args, world):
        note_update(run.learner, step.packs, args, step.metrics)
    metrics = utils.finish_metrics(step.metrics.reduce(world), args) | step.gap_metrics | seconds
    totals = Totals(**{total.name: metrics.pop(total.name) for total in fields(Totals)})

    now = time.perf_counter()
    state["step"] = step.number
    state["episode"] += args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    state["seconds"] += now - state["clock"]
    state["clock"] = now
    metrics["training_step"] = step.number
    metrics["episode"] = state["episode"]
    metrics["epoch"] = state["cursor"] / len(run.train_prompts)
    metrics["other/real_batch_size_ratio"] = totals.trained / totals.sampled
    metrics["optim/skipped_steps"] = float(totals.trained == 0)
    metrics["val/num_total_tokens"] = state["tokens"]  # before this step
    metrics["val/num_learner_tokens"] = metrics["val/learner_tokens"] * world.size
    metrics["val/num_excluded_prompts"] = float(len(state["excluded"]))
    metrics["time/from_scratch"] = now - run.start_time

    tokens = metrics["val/num_step_tokens"]
    generation = seconds.get("time/generation", seconds["time/total"])
    longest_generation = seconds.get("time/group_generation_max") or generation
    possible_flops = seconds["time/training"] * world.size * state["flops_per_second"]
    metrics["learner_mfu"] = totals.learner_flops / possible_flops
    metrics["learner_tokens_per_second_step"] = tokens / seconds["time/total"]
    metrics["learner_tokens_per_second_overall"] = state["tokens"] / state["seconds"]
    metrics["val/actor_tokens_per_second"] = tokens / longest_generation
    metrics["val/response_tokens_per_second"] = totals.response_tokens / generation
    state["tokens"] += tokens
    return metrics


def note_update(learner: Learner, packs: Sequence[Sequence[Pack]], args: Args, metrics: Metrics) -> None:
    """Metrics of what this rank trained on."""
    pieces = [piece for mini_batch in packs for pack in mini_batch for piece in pack]
    trained = sum(len(piece) for piece in pieces)
    tokens = sum(piece_length(piece) for piece in pieces)
    pairs = sum(attended_pairs(piece) for piece in pieces)
    response_tokens = sum(len(r.token_ids) for piece in pieces for r in piece)
    # A backward costs as much as two forwards: the gradients of inputs and of weights. Frozen weights need no gradient.
    forwards = (2 if args.lora_rank else 3) * args.num_epochs
    forwards += needs_old_logprobs(args, len(packs))
    flops = forwards * learner.policy.flops(tokens, pairs, response_tokens)
    if learner.ref_policy is not None:
        flops += learner.ref_policy.flops(tokens, pairs, response_tokens)
    metrics.count("trained", trained)
    metrics.count("learner_flops", flops)
    metrics.add_all("val/learner_tokens", [tokens / args.sequence_parallel_size])
    metrics.add("other/packed_ratio", sum(len(mini_batch) for mini_batch in packs), trained)


def handle_nonfinite(run: Run, step: Step, skipped: int) -> None:
    """Dump the batches of a step with `skipped` updates; raises RuntimeError after three such steps in a row."""
    if not skipped:
        run.state["nonfinite_in_a_row"] = 0
        return
    run.state["nonfinite_in_a_row"] += 1
    dumped = []
    for batch in itertools.chain.from_iterable(step.batches):
        pieces = batch.layout and batch.layout.pieces
        dumped.append(vars(batch) | {"layout": pieces, "rollouts": None})
    torch.save(dumped, run.run_dir / f"nonfinite_step_{step.number}_rank_{run.world.rank}.pt")
    run.logger.say(f"step {step.number}: non-finite gradient, update skipped, batch dumped to {run.run_dir}")
    if run.state["nonfinite_in_a_row"] == 3:
        raise RuntimeError(f"non-finite gradients in 3 steps in a row; see {run.run_dir}/nonfinite_step_*.pt")


def due(every: int, step: int, last: int = 0) -> bool:
    """Whether something that happens every so many steps (0 and less: never), and after the `last`, happens now."""
    return every > 0 and (step % every == 0 or step == last)


def end_step(run: Run, step: Step, out: dict[str, float], line: str = "") -> None:
    """Save and evaluate where it is due, log `out` and a further line, write traces and dumps. All ranks."""
    args = run.args
    policy = run.learner.policy
    if run.servers is not None:
        run.servers.check()
    if due(args.save_freq, step.number):
        with step.timer("saving"):
            utils.save_model(policy, run.tokenizer, run.run_dir / f"step_{step.number}", args, run.world)
        out["time/saving"] = step.timer.seconds["time/saving"]
    evaluates = due(args.local_eval_every, step.number, num_training_steps(args))
    if evaluates and run.eval_prompts and run.engine is not None:
        out |= evaluate(run)
    run.logger.log(out)
    if line:
        run.logger.say(line)
    if step.number % SHOW_ROLLOUTS_EVERY == 1:
        run.logger.show(step.number, step.sampled)
    utils.record_step(step, run.packing, policy, args, run.world)


# --- Checkpoints, and the end -----------------------------------------------------------------------------------------


def save_state(run: Run, more_state: Callable[[], dict[str, Any]] = dict) -> str:
    """Start to write a resumable checkpoint, with what `more_state` returns, where one is due or a signal asks the run
    to stop. Returns the signal's name, or "". All ranks."""
    learner = run.learner
    step = run.state["step"]
    stopping = utils.stop_asked(run.world)
    if stopping or due(run.args.checkpoint_state_freq, step):
        extra = {name: run.state[name] for name in start_state()}
        extra["scheduler"] = learner.scheduler.state_dict()
        extra |= more_state()
        run.checkpoints.save(step, learner.modules(run.args), learner.optimizer, extra)
    if stopping:
        run.logger.say(f"{stopping}: stopped after step {step}; --resume goes on")
    return stopping


def load_state(path: Path, learner: Learner, args: Args, world: World) -> dict[str, Any]:
    """Load a checkpoint into the learner; returns the run's state. Learning rates follow the flags of now, from the
    checkpoint's tick on. All ranks."""
    scheduler = learner.scheduler
    state = utils.load_checkpoint(path, learner.modules(args), learner.optimizer, world)
    saved = state.pop("scheduler")
    base_rates = scheduler.base_lrs
    rates = []
    for base_rate, schedule in zip(base_rates, scheduler.lr_lambdas, strict=True):
        rates.append(base_rate * schedule(saved["last_epoch"]))
    scheduler.load_state_dict(saved | {"base_lrs": base_rates, "_last_lr": rates})
    for group, rate in zip(learner.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return state


def finish(run: Run) -> Path:
    """Save the model, if all steps are done, and end what the run has started; returns its directory. All ranks."""
    args = run.args
    run_dir = run.run_dir
    run.checkpoints.wait()
    finished = run.state["step"] == num_training_steps(args)
    if finished:
        utils.save_model(run.learner.policy, run.tokenizer, run_dir / "model", args, run.world)
    run.logger.close()
    if run.engine is not None:
        run.engine.stop(run.state["step"])
    if run.world.is_main:
        made = f"model {run_dir / 'model'}" if finished else f"no model yet, checkpoints in {run_dir / 'checkpoints'}"
        print(f"{made}, {utils.draw_report(run_dir)}")
    rewards.close()
    if run.servers is not None:
        run.servers.stop()
    dist.barrier()  # no rank leaves while another still writes
    if run.engine is not None:
        run.engine.close()
    if dist.is_initialized():  # an engine that shares the process group closes it
        dist.destroy_process_group()
    if args.push_to_hub and run.world.is_main and finished:  # the other ranks do not wait for the upload
        utils.push_model(run_dir)
    return run_dir


if __name__ == "__main__":
    utils.STOP.listen()
    try:
        main(utils.parse_args(Args))
    except utils.UserError as error:
        raise SystemExit(f"grpo.py: {error}") from None
    utils.exit_process()
