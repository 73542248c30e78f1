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
import random
import shlex
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import utils  # isort: skip  (pins thread counts, so it comes before torch)

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import rewards
from rewards import NotNegative, Positive, Share, ShareAboveZero, ShareBelowOne
from utils import Group, Metrics, Prompt, Rollout, Sampler, Timer, World

# --- Flags: open-instruct's names; defaults of its GRPO page where the page has one -----------------------------------


@dataclass(frozen=True)
class GRPOFlags:
    """The algorithm."""

    # groups
    num_unique_prompts_rollout: Positive[int] = 16
    """P: prompts in a step, over all ranks."""
    num_samples_per_prompt_rollout: Positive[int] = 4
    """G: responses to each prompt. They are a group, and the group's mean score is the baseline."""
    active_sampling: bool = False
    """Sample more prompts until P groups have a gradient, in 10 rounds at most. Surplus groups are dropped."""
    no_resampling_pass_rate: ShareAboveZero[float | None] = None
    """Do not sample a prompt again once its mean score has reached this share of the highest score. None is off."""
    filter_zero_std_samples: bool = True
    """Leave groups with equal outcomes (scores before penalties) out of the update and of its denominators."""
    mask_truncated_completions: bool = False
    """Leave responses that reached the length limit out of the update. Their scores still count in the group's mean."""
    kl_in_reward: bool = False
    """Subtract beta * KL of the response from its score, before advantages, instead of adding a KL term to the loss."""
    force_kl_in_reward: bool = False
    """Allow kl_in_reward with standard normalization. If the outcomes of a group are alike, small differences of their
    KL then become advantages of about 1."""

    # loss
    loss_fn: Literal["dapo", "cispo", "gspo"] = "dapo"
    """dapo: PPO clip (arXiv:2503.14476); cispo: clipped weight (2506.13585); gspo: sequence ratio (2507.18071)."""
    beta: NotNegative[float] = 0.05
    """KL coefficient, per token. 0 is off."""
    kl_estimator: Literal["0", "1", "2", "3", "kl1", "kl2", "kl3", "kl4"] = "2"
    """kl1, kl2, kl3 (the default), or kl4 (kl1 with importance weights), see kl_estimates. 0 to 3 are open-instruct's
    names of these four."""
    load_ref_policy: bool = True
    """Keep the start policy, frozen, as the reference for the KL: it is measured (beta 0) or penalized (beta > 0)."""
    ref_policy_update_freq: Positive[int | None] = None
    """Steps between refreshes of the reference policy: ref <- alpha * policy + (1 - alpha) * ref. None is never."""
    alpha: ShareAboveZero[float] = 0.6
    """Share of the policy in a refresh of the reference policy."""
    clip_lower: Share[float] = 0.2
    """The ratio is clipped below at 1 - clip_lower. cispo has no lower bound."""
    clip_higher: NotNegative[float] = 0.2
    """The ratio is clipped above at 1 + clip_higher (open-instruct's code: 0.272; DAPO: 0.28)."""
    clip_dual: float = 0.0
    """dapo: the loss of a negative advantage is at most clip_dual * |A| (verl: 3.0; arXiv:1912.09729). 0 is off."""
    entropy_coef: NotNegative[float] = 0.0
    """Coefficient of the entropy bonus, per token. 0 is off."""
    advantage_normalization_type: Literal["standard", "standard_unbiased", "centered", "none"] = "standard"
    """standard: (score - mean) / standard deviation of the group; standard_unbiased: the same with the unbiased
    deviation; centered: score - mean (open-instruct's code); none: the score. See compute_advantages."""
    loss_denominator: str = "token"
    """token: mean over all tokens; sequence: mean over responses of their mean over tokens; a number: sum / number."""
    use_rho_correction: bool = True
    """Weight each token by rho = exp(learner logprob - engine logprob): the two compute in different numerics."""
    rho_clamp_upper_bound: NotNegative[float] = 2.0
    """A larger rho is truncated to this (TIS). 0 is off."""
    rho_clamp_lower_bound: NotNegative[float] = 0.0
    """A smaller rho is raised to this. 0 is off."""
    rho_mask_lower_bound: NotNegative[float] = 0.0
    """Tokens with a smaller rho are dropped (IcePop). 0 is off."""
    rho_mask_upper_bound: NotNegative[float] = 0.0
    """Tokens with a larger rho are dropped. 0 is off."""
    rho_mask_sequence_level: bool = False
    """The two mask bounds are for the geometric mean of a response's rho, and drop whole responses."""
    rho_mask_tv_divergence: bool = False
    """The two mask bounds are for a response's mean |rho - 1|. Of a response outside only the tokens are dropped that
    would take the policies further apart (VACO, arXiv:2603.01365)."""

    # optimizer
    learning_rate: NotNegative[float] = 2e-5
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
    ] = "linear"
    """Learning rate over the run: schedules of transformers that need only warmup_ratio and the number of steps."""
    warmup_ratio: ShareBelowOne[float] = 0.0
    """Share of the optimizer steps in which the learning rate rises."""
    weight_decay: NotNegative[float] = 0.0
    """Weight decay of AdamW. Biases and norms have none."""
    max_grad_norm: NotNegative[float] = 1.0
    """The norm of the whole gradient is clipped to this. 0 is off."""
    per_device_train_batch_size: Positive[int] = 1
    """Responses in one forward and backward of a model that cannot be packed, and in a measurement of the logprob gap.
    With packs, pack_length is the size of a forward and backward."""
    pack_length: int = 512
    """Most tokens of a pack: of a forward and backward. At least prompt and response together."""
    total_episodes: Positive[int] = 100_000
    """Rollouts of the whole run: steps = total_episodes // (P * G)."""
    num_epochs: Positive[int] = 1
    """Passes over the rollouts of each step."""
    num_mini_batches: Positive[int] = 1
    """Optimizer steps in a pass, each on its share of the prompts."""

    # evaluation
    local_eval_every: int = 100
    """Steps between evaluations; one more comes after the last step. -1 is never."""
    eval_on_step_0: bool = False
    """Evaluate before the first update too."""
    eval_pass_at_k: Positive[int] = 1
    """Responses to each evaluation prompt. pass@1, 2, 4, ... up to this number are unbiased estimates."""


@dataclass(frozen=True)
class Args(GRPOFlags, utils.Flags):
    """GRPO on a Hugging Face causal LM. A yes/no flag is --flag, --no_flag, --flag true or --flag false. --help WORD
    shows the flags that have WORD in their name or text."""

    def check(self, world_size: int = 1, fast: bool = False) -> None:
        """Refuse contradictions and impossible arithmetic before anything loads, see scripts/parts/checks.py. Raises
        UserError with flags, values and fix. `fast`: for grpo_fast.py, whose `world_size` is 1 here."""
        from scripts.parts import checks

        checks.check_args(self, world_size, fast)


KL_ESTIMATORS = {"0": 0, "1": 1, "2": 2, "3": 3, "kl1": 0, "kl2": 1, "kl3": 2, "kl4": 3}
MAX_SAMPLING_ROUNDS = 10  # of active_sampling: a data set without any gradient must not sample for ever
LOGPROB_CHUNK = 1024  # tokens whose logits exist at once
PROBE_TOKENS = 32  # of a response that only shows the logprob gap
SHOW_ROLLOUTS_EVERY = 10  # steps
EVALUATION_ROLLOUTS = 64  # of an evaluation that samples.jsonl keeps


def num_training_steps(args: Args) -> int:
    """Steps of the run: total_episodes // (P * G)."""
    return args.total_episodes // (args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout)


# --- Sample, score, compare within the group --------------------------------------------------------------------------


def all_rollouts(groups: Sequence[Group]) -> list[Rollout]:
    """The rollouts of groups, one group after the other."""
    return [r for group in groups for r in group]


def make_request(r: Rollout, args: Args) -> utils.Request:
    """The request for the next turn of r.

    Its seed depends on (run seed, position, sample, turn) only, so any number of ranks samples the same rollouts.
    An evaluation has seeds of its own.
    """
    prompt_ids = r.prompt.token_ids
    seed_parts = [r.position, r.sample, int(r.evaluation)]
    if r.turns:
        prompt_ids = (*prompt_ids, *r.token_ids.tolist())
        turns = own_turns(r)
        seed_parts.append(len(turns))

    max_tokens = remaining_tokens(r, args)
    stop: tuple[str, ...] = ()
    environment = r.prompt.environment
    if environment is not None:
        max_tokens = min(max_tokens, args.per_turn_max_tokens or max_tokens)
        stop = environment.stop

    top_p = args.vllm_top_p if args.temperature > 0 else 1.0
    seed = utils.derive_seed(args.seed, *seed_parts)
    return utils.Request(prompt_ids, seed, args.temperature, max_tokens, top_p, stop)


def remaining_tokens(r: Rollout, args: Args) -> int:
    """How many more tokens r may have."""
    return args.response_length - len(r.token_ids)


def new_group(prompt: Prompt, position: int, samples: int, evaluation: bool = False) -> Group:
    """`samples` rollouts of a prompt, without a token yet."""
    return [Rollout(prompt, position, j, evaluation=evaluation) for j in range(samples)]


def sample_rollouts(engine: Sampler, groups: Sequence[Group], args: Args) -> None:
    """Sample the rollouts of new groups, which may be of several sizes. Those that are over are only scored.

    A response that ends goes to its environment or to its verifiers at once, while the engine samples the others.
    """
    rollouts = []
    everything = all_rollouts(groups)
    for r in everything:
        if r.over:
            start_scoring(r, engine, args)
        else:
            rollouts.append(r)
    requests = [next_request(r, engine, args) for r in rollouts]
    engine.generate(requests, lambda i, generation: end_turn(rollouts[i], generation, engine, args))


def sample_probes(engine: Sampler, run: "Run", first: int, number: int, every: int) -> list[Group]:
    """Responses to measure the logprob gap on, one to each of `number` prompts: at most PROBE_TOKENS tokens, without an
    environment's answer or a score. Their positions are first, first + every and so on."""
    length = min(run.args.response_length, PROBE_TOKENS)
    args = replace(run.args, response_length=length)
    rollouts: list[Rollout] = []
    last = first + number * every
    for position in range(first, last, every):
        prompt = run.train_prompts[position % len(run.train_prompts)]
        rollouts += new_group(prompt, position, 1)
    requests = [make_request(r, args) for r in rollouts]
    engine.generate(requests, lambda i, generation: rollouts[i].append(generation))
    return [[r] for r in rollouts]


def end_turn(
    r: Rollout, generation: utils.Generation, engine: Sampler, args: Args
) -> Future[utils.Request | None] | None:
    """Add what the policy generated to r. If r is over, start its verifiers and return None.

    Otherwise its environment answers: return the future of the request for the next turn. The future gives None where
    the answer ends the rollout.
    """
    with utils.LOCK:
        r.append(generation)
        if r.prompt.environment is None:
            r.over = True
        else:
            add_turn(r, generation, engine)
            is_last = len(own_turns(r)) > args.max_steps
            r.over = is_last or remaining_tokens(r, args) <= 0

    if r.over:
        start_scoring(r, engine, args)
        return None
    return ask(r, engine, args)


def text_of(token_ids: np.ndarray, engine: Sampler) -> str:
    """The text of tokens without an end token; a <think> that is a special token survives."""
    if len(token_ids) > 0 and token_ids[-1] in engine.eos_ids:
        token_ids = token_ids[:-1]
    # an array: transformers looks at the type of each element of a list
    return str(engine.tokenizer.decode(token_ids, skip_special_tokens=False))


def start_scoring(r: Rollout, engine: Sampler, args: Args) -> None:
    """Fill the text of a rollout that is over, start its verifiers and free its environment. Of several turns the
    verifiers get the last."""
    r.text = text_of(r.token_ids, engine)
    scored_text = [r.text, *own_turns(r)][-1]
    prompt = r.prompt
    if args.apply_verifiable_reward:
        for label, verifier in zip(prompt.ground_truths, prompt.verifiers, strict=True):
            length = int(r.mask.sum())  # a tool's tokens are not the policy's
            record = rewards.RewardRecord(
                scored_text, label, verifier, length, prompt.conversation, prompt.reward_columns
            )
            r.scoring.append(rewards.submit(record))

    if r.state:
        from scripts.parts import environments

        environments.release(r.state, args.env_timeout)
    # new dicts without the environment's states: a checkpoint may hold the old ones
    with utils.LOCK:
        r.turns = [{key: turn[key] for key in turn if key != "state"} for turn in r.turns]


def own_turns(r: Rollout) -> list[str]:
    """What the policy said in each of its turns: a tool's text may have answers and tags, too."""
    return [turn["content"] for turn in r.turns if turn["role"] == "assistant"]


def score_rollouts(rollouts: Sequence[Rollout], args: Args) -> None:
    """Wait for the verifiers. Fill results, verifiable, format_score, outcome and score of each rollout. The format is
    checked on the policy's own turns only. Functions of a reward file that judge a group get all of a group's rollouts.
    """
    if args.reward_file:
        from scripts.parts import user_files

        user_files.judge_groups(rollouts)
    for r in rollouts:
        if r.scoring:  # a second call finds none and keeps the results
            r.results = [future.result() for future in r.scoring]
            r.scoring = []

        r.verifiable = sum(result.score for result in r.results)
        if r.prompt.environment is not None:
            r.verifiable += r.prompt.environment.reward_of(r)
        r.format_score = rewards.format_reward("".join(own_turns(r)) or r.text)
        stopped = r.finish_reason == "stop"
        tokens_left = remaining_tokens(r, args)
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
        freedom = (count - int(unbiased)).clamp(min=1)
        variance = centered.square().sum(1, keepdim=True) / freedom
        epsilon = 1e-6 if unbiased else 1e-8
        centered = centered / (variance.sqrt() + epsilon)

    # a group of equal scores: rounding may leave the mean beside them
    low = torch.where(present, grouped, math.inf).amin(1, keepdim=True)
    high = torch.where(present, grouped, -math.inf).amax(1, keepdim=True)
    return torch.where(low < high, centered, 0.0).flatten().float()


def advantages_of(scores: list[float], args: Args) -> list[float]:
    """The advantages of a group's scores."""
    exact = torch.tensor(scores, dtype=torch.float64)
    return compute_advantages(exact, len(scores), args.advantage_normalization_type).tolist()


def set_advantages(groups: Sequence[Group], args: Args) -> None:
    """Fill the advantage of each rollout from the scores of its group, and tokenless: the scores of the group's
    rollouts that have no token of the policy. Groups may differ in size."""
    for group in groups:
        advantages = advantages_of([r.score for r in group], args)
        tokenless = [r.score for r in group if not np.count_nonzero(r.mask)]
        for r, advantage in zip(group, advantages, strict=True):
            r.advantage = advantage
            r.tokenless = tokenless


def has_gradient(group: Group) -> bool:
    """Whether the group's outcomes differ. Missing ones (NaN) do not count."""
    return len(utils.distinct_outcomes(group)) > 1


def score_group(group: Group, args: Args) -> bool:
    """Fill scores. Returns whether the group counts for the step: active_sampling counts those with a gradient."""
    score_rollouts(group, args)
    return has_gradient(group) or not args.active_sampling


def sample_groups(run: "Run", timer: Timer) -> tuple[list[Group], list[Group]]:
    """This rank's groups of a step (P / W of them, scored, with advantages) and all groups that it sampled.

    A round samples P prompts, of which this rank takes every W-th from its stream_offset on. With active_sampling there
    are rounds until every rank has P / W groups with a gradient. Updates the state's cursor and sampler.
    """
    args = run.args
    world = run.world
    state = run.state
    assert run.engine is not None
    wanted = args.num_unique_prompts_rollout // world.size
    max_rounds = MAX_SAMPLING_ROUNDS if args.active_sampling else 1
    sampler = state["sampler"]
    chosen: list[Group] = []
    sampled: list[Group] = []

    for _ in range(max_rounds):
        start = state["cursor"] + stream_offset(args, world)
        state["cursor"] += args.num_unique_prompts_rollout
        with timer("generation"):
            positions = range(start, state["cursor"], world.size)
            groups = [next_group(run.train_prompts, position, sampler, args) for position in positions]
            sample_rollouts(run.engine, groups, args)
        with timer("reward"):
            chosen += [group for group in groups if score_group(group, args)]
            set_advantages(groups, args)
        sampled += groups

        is_short = len(chosen) < wanted
        (ranks_short,) = utils.all_reduce([float(is_short)], world)
        if ranks_short == 0:
            break

    seen = what_was_seen(sampled, args)
    by_rank = utils.all_gather(seen, world)
    in_stream_order = sorted(itertools.chain(*by_rank))
    state["sampler"] = next_sampler(sampler, in_stream_order, args)
    return chosen[:wanted], sampled


def stream_offset(args: Args, world: World) -> int:
    """The first of a step's positions that this rank samples; it takes every W-th from there on.

    Without --sequence_parallel_size it is the rank. A sequence-parallel group of S ranks takes, together, the positions
    that one rank takes in a world of W / S ranks.
    """
    group, member = divmod(world.rank, args.sequence_parallel_size)
    return group + member * (world.size // args.sequence_parallel_size)


def next_group(prompts: Sequence[Prompt], position: int, sampler: dict[str, Any], args: Args) -> Group:
    """A new group for a position of the stream: which prompt it is for and how many rollouts it has. `sampler` is the
    state that next_sampler returned.

    Both scripts call this. A fork that chooses other prompts, or other sizes, changes this function, next_sampler, and
    the state that start_state begins with. A group has at least one rollout. A rollout that already has its tokens, and
    is `over`, is not sampled.
    """
    order = args.seed if args.shuffle else None
    prompt = prompt_at(prompts, position, order, sampler["excluded"])
    return new_group(prompt, position, args.num_samples_per_prompt_rollout)


def prompt_at(prompts: Sequence[Prompt], position: int, seed: int | None, excluded: Collection[int] = ()) -> Prompt:
    """The prompt at a position of the endless stream. Epoch e is a permutation drawn from (seed, e). Without a seed it
    is the order of the file. An `excluded` prompt (by index) is replaced by the next one of the permutation that is not
    excluded. If all are excluded, it stays."""
    epoch, offset = divmod(position, len(prompts))
    order = permutation(len(prompts), seed, epoch)
    for i in range(len(order)):
        candidate = order[(offset + i) % len(order)]
        if candidate not in excluded:
            return prompts[candidate]
    return prompts[order[offset]]


@functools.lru_cache(maxsize=4)
def permutation(n: int, seed: int | None, epoch: int) -> Sequence[int]:
    """The order of n prompts in an epoch."""
    if seed is None:
        return range(n)
    return random.Random(utils.derive_seed(seed, epoch)).sample(range(n), n)


class Seen(NamedTuple):
    """What a sampled group tells the sampler. It sorts by position."""

    position: int
    index: int  # of the prompt
    outcomes: list[float]  # of its rollouts; NaN is missing
    highest: float  # outcome that the prompt allows


def what_was_seen(sampled: Sequence[Group], args: Args) -> list[Seen]:
    """A Seen of each scored group."""
    seen = []
    for group in sampled:
        prompt = group[0].prompt
        outcomes = [r.outcome for r in group]
        highest = rewards.max_score(args, len(prompt.verifiers))
        seen.append(Seen(group[0].position, prompt.index, outcomes, highest))
    return seen


def next_sampler(sampler: dict[str, Any], seen: Sequence[Seen], args: Args) -> dict[str, Any]:
    """The sampler's state after the groups `seen` of a step, which are those of all ranks, in stream order.

    It is plain data, because checkpoints keep it. The old state is not changed, because grpo_fast.py still uses it for
    positions that older weights have allowed. Here a prompt is excluded when its mean outcome reached
    no_resampling_pass_rate of the highest outcome.
    """
    excluded = set(sampler["excluded"])
    rate = args.no_resampling_pass_rate or math.inf
    for group in seen:
        mean = sum(group.outcomes) / len(group.outcomes)
        if mean >= rate * group.highest:  # never with NaN
            excluded.add(group.index)
    return sampler | {"excluded": excluded}


def share_groups(groups: Sequence[Group], args: Args) -> list[Group]:
    """This rank's groups and those of the ranks that work on the same packs, in stream order. All ranks."""
    shared = [group for member in utils.share(groups, args) for group in member]
    return sorted(shared, key=lambda group: group[0].position)


def split_groups(groups: Sequence[Group], args: Args) -> list[list[Rollout]]:
    """The rollouts to train on of each mini-batch. The mini-batches' numbers of groups differ by one at most."""
    n = args.num_mini_batches
    bounds = [len(groups) * i // n for i in range(n + 1)]
    mini_batches = []
    for start, end in itertools.pairwise(bounds):
        mini_batches.append(trainable(groups[start:end], args))
    return mini_batches


def trainable(groups: Sequence[Group], args: Args) -> list[Rollout]:
    """The rollouts of `groups` that enter the update.

    Left out: constant groups, missing scores, masked truncations, responses without a token of the policy. Advantages
    were computed before, on whole groups.
    """
    kept = []
    for group in groups:
        if args.filter_zero_std_samples and not has_gradient(group):
            continue
        for r in group:
            has_tokens = np.count_nonzero(r.mask) > 0
            is_missing = math.isnan(r.score)
            is_masked = args.mask_truncated_completions and r.finish_reason != "stop"
            if has_tokens and not is_missing and not is_masked:
                kept.append(r)
    return kept


# --- Packs and batches ------------------------------------------------------------------------------------------------

# A mini-batch, which is an optimizer step, is a list of packs. make_batch turns packs into a Batch, a micro-batch.
Piece = list[Rollout]  # responses to one prompt that share a copy of it
Pack = list[Piece]  # a row of a batch


@dataclass
class BatchPart:
    """The columns of a batch that one rank of a sequence-parallel group computes, (B, T / ranks)."""

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    places: Tensor  # (n,) of the flattened rows: where the response mask is True


@dataclass
class Batch:
    """Rows for one forward. Every per-token tensor is (B, T), aligned to `targets`; response_segment shifts."""

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
    rollouts: Any = ()  # in the order of seq_ids; no list, through whose elements FSDP would go in each forward
    # from the response mask, read before the batch goes to a GPU: reading it there would wait for the GPU
    places: Any = None  # (n,) of the flattened rows: where response_mask is True
    host_places: Any = None  # the same in host memory
    responses: int = 0  # with at least one token to train on

    def __post_init__(self):
        self.places = self.response_mask.flatten().nonzero()[:, 0]
        self.host_places = self.places
        owners = self.seq_ids.flatten()[self.places]
        self.responses = owners.unique().numel()

    def to(self, device: torch.device) -> "Batch":
        """The batch itself, with its tensors on `device`."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and name != "host_places":
                setattr(self, name, utils.send(value, device))
        return self

    def part(self, group: dist.ProcessGroup) -> BatchPart:
        """This rank's columns."""
        from scripts.parts import attention

        device = self.input_ids.device
        length = self.input_ids.shape[1]
        positions = self.position_ids
        if positions is None:
            positions = torch.arange(length, device=device).expand_as(self.input_ids)
        input_ids = attention.columns(self.input_ids, group)

        # the places within these columns, counted in rows of their width
        width = input_ids.shape[1]
        rows = self.host_places // length
        columns = self.host_places % length
        places = rows * width + columns % width
        places = places[columns // width == group.rank()]
        return BatchPart(
            input_ids,
            position_ids=attention.columns(positions, group),
            targets=attention.columns(self.targets, group),
            places=utils.send(places, device),
        )

    def loss_inputs(self, new_logprobs: Tensor, entropy: Tensor) -> "LossInputs":
        """The inputs of grpo_loss: the two outputs of the policy's forward, and the fields of this batch."""
        old_logprobs = self.old_logprobs
        if old_logprobs is None:
            old_logprobs = new_logprobs.detach()
        return LossInputs(
            new_logprobs=new_logprobs,
            old_logprobs=old_logprobs,
            vllm_logprobs=self.vllm_logprobs,
            ref_logprobs=self.ref_logprobs,
            advantages=self.advantages,
            entropy=entropy,
            mask=self.response_mask,
            seq_ids=self.seq_ids,
            tokens=float(len(self.places)),
            responses=float(self.responses),
        )


def pack_rollouts(
    rollouts: Sequence[Rollout], packing: str, pack_length: int, learners: int = 1, pair_cost: float = 0.0
) -> list[list[Pack]]:
    """Each learner's packs of at most `pack_length` tokens; every rollout is in exactly one.

    packing  shared: the responses to a prompt share one copy of it
             plain: each response has its own copy
             rows: each response has its own pack

    First pieces are divided among learners so that tokens and costs (tokens + pair_cost * attended pairs) are even.
    Pieces are cut smaller until no learner has 2 % more tokens than the mean. Then each learner's pieces are packed by
    best-fit-decreasing into as few packs as that needs, evenly filled.
    """
    if not rollouts:
        return [[] for _ in range(learners)]

    piece_limit = pack_length if packing == "shared" else 0
    while True:
        pieces = make_pieces(rollouts, piece_limit)
        tokens = [piece_length(piece) for piece in pieces]
        costs = [piece_length(piece) + pair_cost * attended_pairs(piece) for piece in pieces]
        shares = utils.balance(tokens, costs, learners)  # of each learner, as indices of pieces
        loads = [sum(tokens[i] for i in share) for share in shares]
        is_even = max(loads) <= 1.02 * sum(loads) / learners
        is_cut_up = len(pieces) == len(rollouts)
        if is_even or is_cut_up:
            break
        piece_limit //= 2

    bin_limit = 0 if packing == "rows" else pack_length
    packs: list[list[Pack]] = []
    for share in shares:
        learner_pieces = [pieces[i] for i in share]
        learner_tokens = [tokens[i] for i in share]
        learner_costs = [costs[i] for i in share]
        bins = utils.pack_bins(learner_tokens, learner_costs, bin_limit)
        packs.append([[learner_pieces[i] for i in indices] for indices in bins])
    return packs


def make_pieces(rollouts: Sequence[Rollout], max_tokens: int) -> list[Piece]:
    """Neighbouring rollouts of one prompt in pieces of at most `max_tokens`, one rollout where that is too few."""
    pieces: list[Piece] = []
    for r in rollouts:
        is_next = bool(pieces) and pieces[-1][0].position == r.position
        if is_next and piece_length([*pieces[-1], r]) <= max_tokens:
            pieces[-1].append(r)
        else:
            pieces.append([r])
    return pieces


def piece_length(piece: Piece) -> int:
    """Tokens of a piece: those shared, then a segment for each response."""
    return shared_length(piece) + sum(len(r.token_ids) for r in piece)


def shared_length(piece: Piece) -> int:
    """Tokens that the responses of a piece share: the prompt but its last token, which predicts in each of them."""
    return len(piece[0].prompt.token_ids) - 1


def attended_pairs(piece: Piece) -> float:
    """(query, key) pairs of a piece: what attention costs."""
    shared = shared_length(piece)
    pairs = shared * shared / 2
    for r in piece:
        length = len(r.token_ids)
        pairs += length * (shared + length / 2)
    return pairs


TOKEN_FIELDS = {  # of a Batch, with their types; 0 where a segment does not set them
    "input_ids": np.int64,
    "targets": np.int64,
    "position_ids": np.int64,
    "seq_ids": np.int64,
    "response_mask": np.bool_,
    "advantages": np.float32,
    "vllm_logprobs": np.float32,
}


def prompt_segment(prompt_ids: np.ndarray) -> dict[str, Any]:
    """p_1 .. p_{n-1}, which all responses of a piece attend to."""
    return {"input_ids": prompt_ids[:-1], "position_ids": np.arange(len(prompt_ids) - 1)}


def response_segment(prompt_ids: np.ndarray, r: Rollout, seq_id: int) -> dict[str, Any]:
    """p_n y_1 .. y_{m-1} with the targets y_1 .. y_m: where p_n stands y_1 is predicted.

    Positions continue those of the prompt. A value is an array with an element for each token, or one number for all of
    them. A fork's own field per token stands here, in TOKEN_FIELDS and in Batch.
    """
    return {
        "input_ids": np.concatenate([prompt_ids[-1:], r.token_ids[:-1]]),
        "targets": r.token_ids,
        "position_ids": len(prompt_ids) - 1 + np.arange(len(r.token_ids)),
        "seq_ids": seq_id,
        "response_mask": r.mask,
        "advantages": r.advantage,
        "vllm_logprobs": r.logprobs,
    }


def make_batch(packs: Sequence[Pack], device: torch.device) -> Batch:
    """Packs as rows, padded on the right. Several rows must have one response each.

    A piece is its prompt_segment, then a response_segment for each response, which attends to the prompt and to itself:
    see utils.Layout. A row of one response needs no layout: causal attention never looks right, at the padding.
    """
    # each row: the segments of its prompts and responses
    rollouts: list[Rollout] = []
    rows = []
    for pack in packs:
        segments = []
        for piece in pack:
            prompt_ids = np.array(piece[0].prompt.token_ids)
            segments.append(prompt_segment(prompt_ids))
            for r in piece:
                rollouts.append(r)
                segments.append(response_segment(prompt_ids, r, seq_id=len(rollouts)))
        rows.append(segments)

    # each field: the segments one after the other, (B, T)
    lengths = [sum(map(piece_length, pack)) for pack in packs]
    shape = (len(packs), max(lengths))
    arrays = {name: np.zeros(shape, dtype) for name, dtype in TOKEN_FIELDS.items()}
    for i, segments in enumerate(rows):
        start = 0
        for segment in segments:
            end = start + len(segment["input_ids"])
            for name, values in segment.items():
                arrays[name][i, start:end] = values
            start = end
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    batch = Batch(**tensors, rollouts=np.array(rollouts, object))

    if len(rollouts) == len(packs):  # one response in each row
        batch.position_ids = None
    elif len(packs) > 1:
        raise ValueError("a pack of several responses is a batch of its own")
    else:
        batch.layout = layout_of(packs[0], device)
    return batch.to(device)


def layout_of(pack: Pack, device: torch.device) -> utils.Layout:
    """Who attends to whom in a pack."""
    pieces = []
    for piece in pack:
        lengths = [len(r.token_ids) for r in piece]
        pieces.append((shared_length(piece), lengths))
    return utils.Layout(pieces, device)


def micro_batches(packs: Sequence[Pack], packing: str, args: Args, device: torch.device) -> list[Batch]:
    """Packs as batches: of one pack each, with `packing` rows of up to per_device_train_batch_size packs."""
    size = args.per_device_train_batch_size if packing == "rows" else 1
    return [make_batch(packs[start : start + size], device) for start in range(0, len(packs), size)]


def idle_batch() -> Batch:
    """Two tokens without weight, for a rank that has fewer micro-batches than the others."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids = torch.zeros((1, 2), dtype=torch.long)
    zeros = torch.zeros(1, 2)
    mask = torch.ones((1, 2), dtype=torch.bool)
    return Batch(ids, ids, mask, ids, zeros, zeros, old_logprobs=zeros, ref_logprobs=zeros).to(device)


# --- Policy -----------------------------------------------------------------------------------------------------------


class HeadLogprobs(torch.autograd.Function):
    """(logprobs of the targets, entropies) of softmax(hidden @ weight.T / temperature), float32 (n,) each, without
    keeping any logits.

    hidden (n, H), weight (V, H), targets (n,). With u = hidden @ weight.T, (n, V), p = softmax(u / T), and the target t
    of a token

        logprob  l = log p_t                    d l / d u_v = ([v = t] - p_v) / T
        entropy  H = -sum_v p_v log p_v         d H / d u_v = -p_v (log p_v + H) / T

    so that, with g and h the gradients of the loss by l and H,

        d loss / d u_v = [v = t] g / T - p_v (g / T + h / T (log p_v + H))

    Forward and backward make the logits of at most `chunk` tokens at a time, in float32, and keep two numbers a token
    between them: the normalizer logsumexp(u / T) and H. Operations on (chunk, V) tensors are in place: they decide how
    much memory a chunk takes. With `compiled` the passes over them are fused.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature: float, chunk: int, compiled: bool = False):
        logprobs, entropy, normalizers = torch.empty(3, len(targets), device=hidden.device)
        forward_chunk = chunk_function(HeadLogprobs.forward_chunk, compiled)
        for part in chunks(len(targets), chunk):
            outputs = forward_chunk(hidden[part], weight, targets[part], temperature)
            logprobs[part], entropy[part], normalizers[part] = outputs
        ctx.save_for_backward(hidden, weight, targets, entropy, normalizers)
        ctx.set_materialize_grads(False)
        ctx.temperature = temperature
        ctx.chunk = chunk
        ctx.compiled = compiled
        return logprobs, entropy

    @staticmethod
    def backward(ctx, g, h):
        hidden, weight, targets, entropy, normalizers = ctx.saved_tensors
        g = torch.zeros_like(entropy) if g is None else g / ctx.temperature
        if h is not None:
            h = h / ctx.temperature
        hidden_grad = torch.empty_like(hidden)
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = torch.zeros_like(weight, dtype=wide(weight.dtype))  # chunks add up in it
        backward_chunk = chunk_function(HeadLogprobs.backward_chunk, ctx.compiled)
        for part in chunks(len(targets), ctx.chunk):
            h_part = None if h is None else h[part]
            logits_grad = backward_chunk(
                hidden[part],
                weight,
                targets[part],
                normalizers[part],
                entropy[part],
                g[part],
                h_part,
                ctx.temperature,
            )
            hidden_grad[part] = logits_grad @ weight
            if weight_grad is not None:
                weight_grad += logits_grad.T @ hidden[part]
        if weight_grad is not None:
            weight_grad = weight_grad.to(weight.dtype)
        return hidden_grad, weight_grad, None, None, None, None

    @staticmethod
    def logits(hidden, weight, temperature: float):
        """The logits of a chunk, (chunk, V), float32 or, for float64, float64."""
        logits = hidden @ weight.T
        logits = logits.to(wide(logits.dtype))
        return logits if temperature == 1 else logits.div_(temperature)

    @staticmethod
    def forward_chunk(hidden, weight, targets, temperature: float):
        """Logprobs, entropies and normalizers of a chunk, (chunk,) each."""
        logits = HeadLogprobs.logits(hidden, weight, temperature)
        normalizers = logits.logsumexp(1)
        logp = logits.sub_(normalizers[:, None])
        logprobs = logp.gather(1, targets[:, None])[:, 0]
        entropy = -torch.linalg.vecdot(logp.exp(), logp)
        return logprobs, entropy, normalizers

    @staticmethod
    def backward_chunk(hidden, weight, targets, normalizers, entropy, g, h, temperature: float):
        """d loss / d u of a chunk, (chunk, V) in the weight's dtype. g and h are divided by the temperature already."""
        logits = HeadLogprobs.logits(hidden, weight, temperature)
        logp = logits.sub_(normalizers[:, None])
        columns = targets[:, None]
        target_logp = logp.gather(1, columns)  # a copy: logp is overwritten below
        target_grad = softmax_gradient(target_logp, entropy, g, h)
        target_grad += g[:, None]
        logits_grad = softmax_gradient(logp, entropy, g, h)
        logits_grad = logits_grad.to(weight.dtype)
        return logits_grad.scatter_(1, columns, target_grad.to(weight.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """What logits and sums over chunks are computed in: float32, and float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def chunks(n: int, size: int) -> Iterator[slice]:
    """0 .. n - 1 in parts of at most `size`."""
    for start in range(0, n, size):
        yield slice(start, start + size)


def softmax_gradient(logp, entropy, g, h):
    """-p (g + h (log p + H)), the part of d loss / d u that every logit has. Overwrites `logp`.

    logp (chunk, V) or (chunk, 1), the others (chunk,). h is None where the loss has no entropy.
    """
    if h is None:
        p = logp.exp_()
        return p.mul_(-g[:, None])
    p = logp.exp()
    factor = logp.add_(entropy[:, None])
    factor.mul_(h[:, None])
    factor.add_(g[:, None])
    p.mul_(factor)
    return p.neg_()


@functools.cache
def chunk_function(function: Callable, compiled: bool) -> Callable:
    """forward_chunk or backward_chunk; if `compiled`, one that reads and writes the logits once a pass."""
    if not compiled:
        return function
    return functools.partial(run_fused, torch.compile(function))


def run_fused(fused: Callable, hidden: Tensor, weight: Tensor, *others: Any) -> Any:
    """Call a compiled function so that one graph does for every number of tokens.

    The first dimension of all tensors but the weight is marked as dynamic. They are copied: torch.compile would make
    another graph for a view that starts elsewhere in its storage.
    """
    arguments = []
    for x in (hidden, *others):
        if isinstance(x, Tensor):
            x = x.clone()
            torch._dynamo.maybe_mark_dynamic(x, 0)
        arguments.append(x)
    return fused(arguments[0], weight, *arguments[1:])


class Policy(torch.nn.Module):
    """A causal LM whose forward gives what GRPO needs: logprobs of the targets and entropies, never logits."""

    def __init__(self, model: Any, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.model: Any = model
        self.matrices, self.head = utils.matmul_parameters(model)
        self.width = utils.attention_width(model.config)
        self.pair_cost = 2 * self.width / self.matrices  # of attending to one more token, in tokens
        self.compiled = False  # --compile_layers
        self.group = group  # of the ranks that share the tokens of a batch, see utils.sequence_group

    def flops(self, tokens: float, pairs: float, responses: float) -> float:
        """Floating-point operations of a forward: 2 per matrix weight and token, 4 per pair, head and layer width."""
        return 2 * self.matrices * tokens + 4 * self.width * pairs + 2 * self.head * responses

    def forward(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """log p(targets) and entropy of softmax(logits / temperature), float32 (B, T), zero outside the response mask.

        The head computes masked positions only, LOGPROB_CHUNK at a time, so the logits of more tokens never exist
        together. On a GPU the head is compiled and takes three times as many positions in the same memory, because it
        keeps no float32 logits.
        """
        part: Batch | BatchPart = batch
        options: dict[str, Any] = {}
        if self.group is not None:
            part = batch.part(self.group)
            options["group"] = self.group
        # other attentions than ours find the sequences of a pack where positions start again
        takes_layout = self.model.config._attn_implementation == utils.PACK_ATTENTION
        if takes_layout and batch.layout is not None:
            options["layout"] = batch.layout
        outputs = self.model.base_model(
            input_ids=part.input_ids, position_ids=part.position_ids, use_cache=False, **options
        )

        hidden = outputs.last_hidden_state.flatten(0, 1).index_select(0, part.places)  # (n, H)
        targets = part.targets.flatten()[part.places]  # (n,)
        head = self.model.get_output_embeddings()
        weight = head.weight  # (V, H)
        if getattr(head, "bias", None) is not None:
            # the bias is the weight of one more number, which is always 1
            hidden = torch.nn.functional.pad(hidden, (0, 1), value=1.0)
            weight = torch.cat([weight, head.bias[:, None]], 1)
        on_gpu = hidden.is_cuda
        compiled = on_gpu or self.compiled
        chunk = LOGPROB_CHUNK * (3 if on_gpu else 1)
        logprobs, entropy = HeadLogprobs.apply(hidden, weight, targets, temperature, chunk, compiled)
        return self.in_rows(logprobs, batch, part), self.in_rows(entropy, batch, part)

    def in_rows(self, values: Tensor, batch: Batch, part: Batch | BatchPart) -> Tensor:
        """Values (n,) of the masked positions of `part` as float32 (B, T) of the whole batch, zero elsewhere."""
        shape = part.targets.shape
        rows = part.places // shape[1]
        columns = part.places % shape[1]
        zeros = torch.zeros(shape, device=part.places.device)
        placed = zeros.index_put((rows, columns), values.float())  # no view: FSDP's hooks would miss its gradient
        if self.group is None:
            return placed
        from scripts.parts import attention

        length = batch.targets.shape[1]
        return attention.all_columns(placed, length, self.group)


def load_policy(args: Args, world: World, frozen: bool = False) -> Policy:
    """The model of --model_name_or_path as a sharded Policy; `frozen`: in compute dtype. All ranks."""
    model = utils.load_causal_lm(args)
    if frozen:
        model.requires_grad_(False)
    if args.lora_rank:
        from scripts.parts import adapters

        adapters.add_adapters(model, args)
    policy = Policy(model, utils.sequence_group(args))
    if args.compile_layers:
        utils.compile_layers(model)
        policy.compiled = True
    if args.gradient_checkpointing:
        utils.checkpoint_layers(model)
    return utils.shard_model(policy, model, args, world)


def make_optimizer(policy: Policy, args: Args) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW (weight decay on matrices only) and the learning-rate schedule, one tick per mini-batch."""
    from transformers import get_scheduler

    trained = [p for p in policy.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    others = [p for p in trained if p.ndim < 2]
    decayed = {"params": matrices, "weight_decay": args.weight_decay}
    undecayed = {"params": others, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([decayed, undecayed], lr=args.learning_rate, fused=True)

    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # a step without gradient ticks too
    ticks = num_training_steps(args) * args.num_epochs * args.num_mini_batches
    warmup_ticks = round(ticks * args.warmup_ratio)
    scheduler = get_scheduler(args.lr_scheduler_type, optimizer, warmup_ticks, ticks)
    return optimizer, scheduler


@dataclass
class Learner:
    """What an update works on, sharded over the ranks."""

    policy: Policy
    ref_policy: Policy | None  # or the policy, without its adapters
    optimizer: torch.optim.Optimizer
    scheduler: Any

    def modules(self, args: Args) -> dict[str, Policy]:
        """The models that training changes."""
        modules = {"policy": self.policy}
        if self.ref_policy is not None and args.ref_policy_update_freq:
            modules["ref_policy"] = self.ref_policy
        return modules


def load_learner(args: Args, world: World) -> Learner:
    """A learner before its first update. All ranks."""
    has_teacher = args.ref_model_name_or_path != ""
    policy = load_policy(args, world)
    ref_policy = None
    if args.load_ref_policy and args.lora_rank and not has_teacher:
        ref_policy = policy
    elif args.load_ref_policy:
        is_frozen = args.ref_policy_update_freq is None  # a refresh makes weights between those of the compute dtype
        ref_policy = load_policy(args.of_reference(), world, is_frozen).requires_grad_(False)
    optimizer, scheduler = make_optimizer(policy, args)
    return Learner(policy, ref_policy, optimizer, scheduler)


@torch.no_grad()
def fill_logprobs(policy: Policy, batches: Sequence[Batch], name: str, forwards: int, args: Args) -> None:
    """Set `name` (old_logprobs or ref_logprobs) of each batch.

    All ranks run the same number of `forwards`, with idle batches at the end, because FSDP gathers weights in each.
    """
    adapters = utils.without_adapters(policy.model) if name == "ref_logprobs" else contextlib.nullcontext()
    with adapters:
        for i in range(forwards):
            batch = batches[i] if i < len(batches) else idle_batch()
            logprobs, _ = policy(batch, args.temperature)
            setattr(batch, name, logprobs)


# --- Losses -----------------------------------------------------------------------------------------------------------


@dataclass
class LossInputs:
    """A micro-batch as the losses see it: see Batch.loss_inputs. Tensors are (B, T); outside `mask` they may be NaN."""

    new_logprobs: Tensor  # of the policy, with its gradient
    old_logprobs: Tensor  # of the policy before the step's updates
    vllm_logprobs: Tensor  # of the engine that sampled
    ref_logprobs: Tensor | None  # of the reference policy
    advantages: Tensor
    entropy: Tensor  # of the policy, with its gradient
    mask: Tensor  # bool: the policy chose the token, train on it
    seq_ids: Tensor  # the response a token belongs to, >= 0
    tokens: float  # where mask is True, in this micro-batch
    responses: float  # with such tokens, in this micro-batch

    def sum(self, values: Tensor) -> Tensor:
        """The sum of values (B, T) over the tokens to train on, a scalar."""
        return torch.where(self.mask, values, 0.0).sum()


@dataclass
class PolicyLoss:
    """What policy_loss makes of each token, (B, T)."""

    per_token: Tensor  # loss, zero outside the mask
    ratio: Tensor  # without gradient
    clipped: Tensor  # bool: clipping was active


@dataclass
class Totals:
    """Counts over all ranks and micro-batches of an optimizer step: the denominators of its loss."""

    tokens: float
    responses: float


def response_tokens(mask: Tensor, seq_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """How many tokens each response has in the mask, at least 1: (B * T + 1,) by seq_id."""
    counts = torch.zeros(seq_ids.numel() + 1, dtype=dtype, device=mask.device)  # more responses than tokens cannot be
    counts = counts.index_add(0, seq_ids.flatten(), mask.flatten().to(dtype))
    return counts.clamp(min=1)


def response_mean(values: Tensor, mask: Tensor, seq_ids: Tensor) -> Tensor:
    """At each position the mean of `values` over the masked tokens of its response. All (B, T); seq_ids >= 0."""
    counts = response_tokens(mask, seq_ids, values.dtype)
    masked = torch.where(mask, values, 0.0)
    sums = torch.zeros_like(counts).index_add(0, seq_ids.flatten(), masked.flatten())
    return (sums / counts)[seq_ids]


def policy_loss(inputs: LossInputs, args: GRPOFlags) -> PolicyLoss:
    """Policy-gradient loss of each token.

    dapo   ratio_t = exp(new_t - old_t);  L_t = max(-A ratio_t, -A clip(ratio_t, 1 - lower, 1 + higher))
           PPO, arXiv:1707.06347, eq. 7, with DAPO's two bounds, arXiv:2503.14476. clip_dual c > 1 adds
           L_t <- min(L_t, -c A) where A < 0: dual-clip PPO, arXiv:1912.09729.
    cispo  L_t = -A sg(clip(ratio_t, 1 - lower, 1 + higher)) new_t, lower inf (grpo_loss)  MiniMax-M1, arXiv:2506.13585
    gspo   as dapo with the response's ratio exp(mean_t(new_t - old_t)), whose gradient is spread evenly over its
           tokens (GSPO-token), arXiv:2507.18071

    Log-ratios are clamped to +-20, so that exp stays finite; beyond that the gradient is zero.
    """
    mask = inputs.mask
    new = torch.where(mask, inputs.new_logprobs, 0.0)
    old = torch.where(mask, inputs.old_logprobs, 0.0)
    advantages = torch.where(mask, inputs.advantages, 0.0)

    log_ratio = new - old
    if args.loss_fn == "gspo":
        mean_log_ratio = response_mean(log_ratio.detach(), mask, inputs.seq_ids)
        log_ratio = mean_log_ratio + new - new.detach()  # the value of the mean, the gradient of new
    ratio = log_ratio.clamp(-20, 20).exp()
    clipped_ratio = ratio.clamp(1 - args.clip_lower, 1 + args.clip_higher)

    if args.loss_fn == "cispo":
        loss = -advantages * clipped_ratio.detach() * new
        clipped = ratio != clipped_ratio
    else:
        unclipped_loss = -advantages * ratio
        clipped_loss = -advantages * clipped_ratio
        loss = torch.maximum(unclipped_loss, clipped_loss)
        clipped = clipped_loss > unclipped_loss
        if args.clip_dual:
            bound = -advantages * args.clip_dual
            loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return PolicyLoss(loss, ratio.detach(), clipped & mask)


def clamp_rho(rho: Tensor, args: GRPOFlags) -> Tensor:
    """rho within its two clamp bounds."""
    return rho.clamp(args.rho_clamp_lower_bound, args.rho_clamp_upper_bound or math.inf)


def importance_weights(inputs: LossInputs, args: GRPOFlags) -> Tensor:
    """rho_t = exp(old_t - vllm_t): learner over engine probability of a sampled token; (B, T), no gradient.

    A rho above rho_clamp_upper_bound is lowered to it (truncated importance sampling, Ionides 2008; TIS). A rho below
    rho_clamp_lower_bound is raised to it. Tokens that kept_by_rho leaves out have weight 0. A bound of 0 is off. Zero
    outside `mask`.
    """
    log_rho = torch.where(inputs.mask, inputs.old_logprobs - inputs.vllm_logprobs, 0.0)
    log_rho = log_rho.detach().clamp(-20, 20)
    keep = inputs.mask
    if args.rho_mask_lower_bound or args.rho_mask_upper_bound:
        keep = keep & kept_by_rho(log_rho, inputs, args)
    rho = clamp_rho(log_rho.exp(), args)
    return torch.where(keep, rho, 0.0)


def kept_by_rho(log_rho: Tensor, inputs: LossInputs, args: GRPOFlags) -> Tensor:
    """Where the rho_mask_* bounds drop no token, bool (B, T). Outside the mask the values mean nothing.

    log_rho (B, T) is of rho before it is clamped, zero outside the mask. For a token t of response i the bounds test

        rho_it                          the default              IcePop, arXiv:2510.18855
        exp(mean_t log rho_it)          rho_mask_sequence_level  the geometric mean: the same for the whole response
        mean_t |rho_it - 1|             rho_mask_tv_divergence   VACO, arXiv:2603.01365; open-instruct's definition

    The last estimates twice the total variation of the two policies on the response. Where it is outside the bounds,
    only those tokens are dropped whose update would increase it: log rho_it * A_it > 0. Means are over the tokens to
    train on.
    """
    tested = log_rho.exp()
    if args.rho_mask_sequence_level:
        tested = response_mean(log_rho, inputs.mask, inputs.seq_ids).exp()
    elif args.rho_mask_tv_divergence:
        distance = (tested - 1).abs()
        tested = response_mean(distance, inputs.mask, inputs.seq_ids)

    upper = args.rho_mask_upper_bound or math.inf
    is_inside = (tested >= args.rho_mask_lower_bound) & (tested <= upper)
    if args.rho_mask_tv_divergence:
        comes_closer = log_rho * inputs.advantages <= 0
        return is_inside | comes_closer
    return is_inside


def kl_estimates(new_logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor) -> list[Tensor]:
    """Four per-token estimates of KL(policy || reference) from tokens of the policy, d = new - ref clamped to +-40.

    0 (kl1, k1)  d             unbiased, high variance
    1 (kl2, k2)  d^2 / 2       biased, low variance; for tokens of this very policy its gradient is the KL's
    2 (kl3, k3)  exp(-d) - 1 + d   unbiased, never negative; DeepSeekMath, arXiv:2402.03300, eq. 4
    3 (kl4)      ratio * d     k1 for tokens of an older policy; for these it alone has the gradient of the KL, which
                               comes through ratio = exp(new - old)
    Source of the numbering: Schulman, "Approximating KL divergence"; open-instruct.
    """
    d = (new_logprobs - ref_logprobs).clamp(-40, 40)
    return [d, d.square() / 2, torch.expm1(-d) + d, ratio * d]


def aggregate(per_token: Tensor, inputs: LossInputs, totals: Totals, kind: str) -> Tensor:
    """This micro-batch's part of the optimizer step's loss, a scalar; the parts of all ranks and micro-batches add up.

    token     sum_it L_it / tokens                       DAPO, arXiv:2503.14476, eq. 8
    sequence  sum_i (mean_t L_it) / responses            GRPO, arXiv:2402.03300, eq. 3
    number c  sum_it L_it / c                            Dr. GRPO, arXiv:2503.20783
    A denominator of this micro-batch alone would make the gradient depend on how rollouts happen to be split.
    """
    if kind == "token":
        return inputs.sum(per_token) / totals.tokens
    if kind == "sequence":
        lengths = response_tokens(inputs.mask, inputs.seq_ids, per_token.dtype)[inputs.seq_ids]  # (B, T)
        shares = torch.where(inputs.mask, per_token, 0.0) / lengths
        return shares.sum() / totals.responses
    return inputs.sum(per_token) / float(kind)


def grpo_loss(inputs: LossInputs, totals: Totals, args: Args, metrics: Metrics) -> Tensor:
    """The micro-batch's part of the loss: aggregate(rho * L_t + beta * KL_t - entropy_coef * H_t). Fills metrics.

    The parts of an optimizer step add up, so loss/... metrics have a count of 0 here; take_step counts the step.
    """
    if args.loss_fn == "cispo":
        args = replace(args, clip_lower=math.inf)  # it has no lower bound
    policy = policy_loss(inputs, args)
    per_token = policy.per_token
    clipped = policy.clipped

    if args.use_rho_correction:
        rho = importance_weights(inputs, args)
        per_token = per_token * rho
        clipped = clipped & (rho > 0)
        note_rho(rho, inputs, args, metrics)
    loss = aggregate(per_token, inputs, totals, args.loss_denominator)
    metrics.add("loss/policy_avg", loss, 0.0)

    if inputs.ref_logprobs is not None:
        beta = 0.0 if args.kl_in_reward else args.beta
        ratio = (inputs.new_logprobs - inputs.old_logprobs).clamp(-20, 20).exp()  # its gradient is estimator 3's
        estimates = kl_estimates(inputs.new_logprobs, inputs.ref_logprobs, ratio)
        kl = estimates[KL_ESTIMATORS[args.kl_estimator]]
        kl_loss = beta * aggregate(kl, inputs, totals, args.loss_denominator)
        loss = loss + kl_loss
        metrics.add("loss/kl_avg", kl_loss, 0.0)
        note_kl(estimates, inputs, metrics)

    if args.entropy_coef:
        entropy_loss = -args.entropy_coef * aggregate(inputs.entropy, inputs, totals, args.loss_denominator)
        loss = loss + entropy_loss
        metrics.add("loss/entropy_avg", entropy_loss, 0.0)

    note_policy(policy.ratio, clipped, inputs, args, metrics)
    return loss


def note_tokens(values: dict[str, Tensor], inputs: LossInputs, metrics: Metrics) -> None:
    """Metrics that are means over tokens, from name -> (B, T)."""
    for name, value in values.items():
        metrics.add(name, inputs.sum(value), inputs.tokens)


def note_rho(rho: Tensor, inputs: LossInputs, args: Args, metrics: Metrics) -> None:
    """Metrics of the importance weights."""
    before = (inputs.old_logprobs - inputs.vllm_logprobs).exp()
    values = {
        "val/rho_weight": rho,
        "val/rho_drop_frac": rho == 0,
        "val/rho_clipfrac": clamp_rho(before, args) != before,
    }
    note_tokens(values, inputs, metrics)


def note_kl(estimates: Sequence[Tensor], inputs: LossInputs, metrics: Metrics) -> None:
    """Metrics of the KL estimates: means over tokens and, of the first three, over responses."""
    names = ("objective/kl", "objective/kl2", "objective/kl3")
    totals = [inputs.sum(estimate) for estimate in estimates]
    for i, total in enumerate(totals):
        metrics.add(f"objective/kl{i}_avg", total, inputs.tokens)
    for i, name in enumerate(names):
        metrics.add(name, totals[i], inputs.responses)


def note_policy(ratio: Tensor, clipped: Tensor, inputs: LossInputs, args: Args, metrics: Metrics) -> None:
    """Metrics of clipping, entropy and ratios."""
    new = inputs.new_logprobs
    difference = new - inputs.old_logprobs
    bound = args.clip_dual or math.inf
    clipped_dual = (inputs.advantages < 0) & (ratio > bound)
    values = {
        "policy/clipfrac_avg": clipped,
        "policy/clipfrac_lower_avg": clipped_dual,
        "policy/entropy_avg": inputs.entropy,
        "policy/approxkl_avg": difference.square() / 2,
        "policy/ppo_kl_avg": -difference,
        "val/ratio": ratio,
        "val/ratio_sq": ratio.square(),
    }
    note_tokens(values, inputs, metrics)
    metrics.add("objective/entropy", -inputs.sum(new), inputs.responses)


class KLReward(NamedTuple):
    """What the ranks exchange about a rollout. It sorts by position and sample."""

    position: int
    sample: int
    score: float
    penalized: float  # score less beta times its KL
    tokenless: list[float]  # scores of responses in no batch: they count in the group and train nothing


class Change(NamedTuple):
    """The advantage of a rollout before its group had the KL in its scores, and after."""

    before: float
    after: float


def advantage_changes(rewarded: Iterable[KLReward], args: Args) -> dict[tuple[int, int], Change]:
    """The Change of each rollout of all ranks, by position and sample."""
    groups: dict[int, list[KLReward]] = {}  # by position
    # in this order the rounding of the mean is the same for every split into packs
    for reward in sorted(rewarded):
        groups.setdefault(reward.position, []).append(reward)

    made = {}
    for group in groups.values():
        tokenless = group[0].tokenless
        before = advantages_of([reward.score for reward in group] + tokenless, args)
        after = advantages_of([reward.penalized for reward in group] + tokenless, args)
        for i, reward in enumerate(group):
            made[reward.position, reward.sample] = Change(before[i], after[i])
    return made


def put_kl_in_reward(batches: Sequence[Batch], args: Args, world: World, metrics: Metrics) -> None:
    """Compute the advantages again, from score - beta * sum_t KL_t(old || ref). All ranks.

    This is verl's use_kl_in_reward; the estimator is --kl_estimator. A group may have its packs on several ranks, so
    all ranks exchange their scores. A response without tokens of the policy has no KL: it keeps its score, and counts
    in its group. An advantage that is an array over the tokens is shifted by the change of its rollout's number.
    """
    rewarded = []
    for batch in batches:
        kls = response_kls(batch, args)
        metrics.add("objective/kl_in_reward", args.beta * sum(kls), len(kls))
        for r, kl in zip(batch.rollouts, kls, strict=True):
            penalized = r.score - args.beta * kl
            rewarded.append(KLReward(r.position, r.sample, r.score, penalized, r.tokenless))

    by_rank = utils.all_gather(rewarded, world)[:: args.sequence_parallel_size]
    everything = itertools.chain(*by_rank)
    changes = advantage_changes(everything, args)
    for batch in batches:
        values = []
        for r in batch.rollouts:
            change = changes[r.position, r.sample]
            if np.isscalar(r.advantage):
                r.advantage = change.after
            else:
                r.advantage = np.asarray(r.advantage) + change.after - change.before
            values.append(np.broadcast_to(r.advantage, len(r.token_ids)))
        per_token = torch.from_numpy(np.concatenate(values))
        per_token = utils.send(per_token.float(), batch.advantages.device)
        batch.advantages.masked_scatter_(batch.seq_ids > 0, per_token)


def response_kls(batch: Batch, args: Args) -> list[float]:
    """sum_t KL_t(old || ref) of each of the batch's rollouts.

    In float64, since KLs far below the rounding of a score in float32 still compare.
    """
    old = batch.old_logprobs
    assert old is not None and batch.ref_logprobs is not None  # prepare has filled them
    ratio = torch.ones_like(old)
    estimates = kl_estimates(old, batch.ref_logprobs, ratio)
    kl = estimates[KL_ESTIMATORS[args.kl_estimator]]

    token_kls = kl.flatten()[batch.places].double()  # (n,)
    owners = batch.seq_ids.flatten()[batch.places]  # (n,)
    sums = token_kls.new_zeros(len(batch.rollouts) + 1)
    sums = sums.index_add(0, owners, token_kls)
    return sums[1:].tolist()  # seq_id 0 is no response


# --- Update -----------------------------------------------------------------------------------------------------------


def needs_old_logprobs(args: Args, num_mini_batches: int) -> bool:
    """Whether the old logprobs need a forward of their own. With a single optimizer step they equal the new ones, but
    --kl_in_reward needs them before it."""
    return args.num_epochs * num_mini_batches > 1 or args.kl_in_reward


def update(
    learner: Learner, mini_batches: Sequence[Sequence[Batch]], args: Args, world: World, metrics: Metrics
) -> tuple[Any, int]:
    """num_epochs passes over this rank's mini-batches (lists of micro-batches), an optimizer step for each.

    Returns the logprob gap, a guards.Gap, and how many optimizer steps were skipped for a non-finite gradient. All
    ranks, with equally many mini-batches. Their numbers of micro-batches may differ between ranks, and may be 0.
    """
    if not utils.leads(args, world):
        metrics = Metrics()  # is not reported
    sizes = list(map(len, mini_batches))
    largest_sizes = utils.all_reduce(sizes, world, dist.ReduceOp.MAX)
    forwards = list(map(int, largest_sizes))  # of each mini-batch, the same on every rank
    gap = prepare(learner, mini_batches, forwards, args, world, metrics)
    is_single = not needs_old_logprobs(args, len(mini_batches))  # the new logprobs are the old ones

    skipped = 0
    for _ in range(args.num_epochs):
        for batches, n in zip(mini_batches, forwards, strict=True):
            accumulate_gradient(learner.policy, batches, n, args, world, metrics)
            if is_single:
                for batch in batches:
                    batch.old_logprobs = batch.new_logprobs
                    gap.add(batch)

            if n and not take_step(learner, args, world, metrics):
                skipped += 1
            metrics.add("lr", learner.scheduler.get_last_lr()[0])
            learner.scheduler.step()
            learner.optimizer.zero_grad()
    return gap.reduce(args, world), skipped


def prepare(
    learner: Learner,
    mini_batches: Sequence[Sequence[Batch]],
    forwards: Sequence[int],
    args: Args,
    world: World,
    metrics: Metrics,
) -> Any:
    """Fill ref_logprobs and old_logprobs and put the KL in the reward, before any weight changes. All ranks.

    Returns the gap of the old logprobs, an empty one if they are not needed.
    """
    from scripts.parts import guards

    gap = guards.Gap()
    for batches, n in zip(mini_batches, forwards, strict=True):
        if learner.ref_policy is not None:
            with metrics.timer("ref_logprobs"):
                fill_logprobs(learner.ref_policy, batches, "ref_logprobs", n, args)
        if needs_old_logprobs(args, len(mini_batches)):
            with metrics.timer("old_logprobs"):
                fill_logprobs(learner.policy, batches, "old_logprobs", n, args)
            for batch in batches:
                gap.add(batch)
        if args.kl_in_reward:
            put_kl_in_reward(batches, args, world, metrics)
    if learner.ref_policy is not None:
        utils.shard_again(learner.ref_policy)  # its gathered copy is not needed any more
    return gap


def accumulate_gradient(
    policy: Policy, batches: Sequence[Batch], forwards: int, args: Args, world: World, metrics: Metrics
) -> None:
    """Forward and backward of each micro-batch, then of idle batches up to `forwards`. Sets new_logprobs. All ranks."""
    totals = count_totals(batches, args, world)
    for i in range(forwards):
        utils.gradient_sync(policy, args, last=i == forwards - 1)
        if i < len(batches):
            batch = batches[i]
            new_logprobs, entropy = policy(batch, args.temperature)
            batch.new_logprobs = new_logprobs.detach()
            inputs = batch.loss_inputs(new_logprobs, entropy)
            loss = grpo_loss(inputs, totals, args, metrics)
        else:
            new_logprobs, _ = policy(idle_batch(), args.temperature)
            loss = 0.0 * new_logprobs.sum()  # FSDP must reduce the same tensors on every rank
        (loss * world.size).backward()  # FSDP averages over ranks; our denominators are global already


def count_totals(batches: Sequence[Batch], args: Args, world: World) -> Totals:
    """The counts of a mini-batch over all ranks."""
    tokens = sum(len(batch.places) for batch in batches)
    responses = sum(batch.responses for batch in batches)
    tokens, responses = utils.all_reduce([tokens, responses], world)
    copies = args.sequence_parallel_size  # the ranks of a sequence-parallel group have the same batches
    return Totals(tokens / copies, responses / copies)


def take_step(learner: Learner, args: Args, world: World, metrics: Metrics) -> bool:
    """Take an optimizer step with the clipped gradient. If that is not finite nothing changes, and False is returned
    unless the range of float16 is the reason. All ranks."""
    policy = learner.policy
    norm = clip_gradient(policy, args, world, metrics)

    # grpo_loss has added the values of these sums; all ranks together count one step
    share = args.sequence_parallel_size / world.size
    for name in ("loss/policy_avg", "loss/kl_avg", "loss/entropy_avg"):
        metrics.add(name, 0.0, share)

    if math.isfinite(norm):
        learner.optimizer.step()
    # float16: a scale above 1 has fallen now, and may have been the reason
    scale = float(getattr(policy, "loss_scale", 1.0))
    return math.isfinite(norm) or scale > 1


def clip_gradient(policy: torch.nn.Module, args: Any, world: World, metrics: Metrics) -> float:
    """Scale the gradient down to the norm --max_grad_norm, 0 for none. Returns the norm that it had over all ranks,
    which may not be finite. In float16 the gradient is first freed of the loss's scale, which then adapts."""
    scaled = args.model_dtype == "float16"
    if scaled:
        from scripts.parts import loss_scale

        loss_scale.unscale(policy)
    free_for_moments(world.device)
    # on a CPU foreach would take 1 s of a start: it plans the DTensors of all parameters in one call
    options = {} if world.device.type == "cuda" else {"foreach": False}
    bound = args.max_grad_norm or math.inf
    norm: Any = torch.nn.utils.clip_grad_norm_(policy.parameters(), bound, **options)
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    norm = float(norm)
    metrics.add("optim/grad_norm", norm)
    if scaled:
        from scripts.parts import loss_scale

        loss_scale.adapt(policy, norm, args.sequence_parallel_size / world.size, metrics)
    return norm


@functools.cache
def free_for_moments(device: torch.device) -> None:
    """Once, before the first optimizer step: give a GPU what the backward has freed. Adam's moments would be made in
    it, and keep it from an engine that wakes up."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
    train_prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    run_dir: Path
    learner: Learner
    state: dict[str, Any]  # see start_state
    checkpoints: utils.Checkpoints
    packing: str  # see choose_packing
    eval_world: World  # the ranks that sample and score for evaluation
    # set_up leaves these to the scripts
    engine: Sampler | None = None  # None on ranks that have none
    servers: Any = None  # see start_reward_models
    guards: Any = None  # what ends a run that is not sound: scripts/parts/guards.py
    echo: Any = None  # whether weights reach the engines: scripts/parts/guards.py
    done: dict[str, Any] = field(default_factory=dict)  # the state after the last step that is done, see plain_state
    logger: utils.Logger = field(init=False)  # see start_log


@dataclass
class Step:
    """What one step of a run works on, on this rank."""

    number: int
    groups: list[Group] = field(default_factory=list)  # to train on
    sampled: list[Group] = field(default_factory=list)  # these and all others
    packs: list[list[Pack]] = field(default_factory=list)  # of each mini-batch
    batches: list[list[Batch]] = field(default_factory=list)  # the same as tensors
    gap: Any = None  # the guards.Gap of its rollouts
    metrics: Metrics = field(default_factory=Metrics)
    timer: Timer = field(default_factory=Timer)
    seconds: dict[str, float] = field(default_factory=dict)  # of other threads
    start_time: float = field(default_factory=time.perf_counter)


def start_state() -> dict[str, Any]:
    """What a run keeps beside weights and optimizer, as it is before the first step: plain data for checkpoints."""
    return {
        "step": 0,  # the last one that is done
        "cursor": 0,  # prompts consumed
        "episode": 0,
        "nonfinite_in_a_row": 0,
        "tokens": 0.0,  # of all steps
        "seconds": 0.0,  # of all steps
        # what decides who is asked next, see next_sampler; excluded: indices of prompts that are not sampled again
        "sampler": {"excluded": set()},
    }


def set_up(args: Args, world: World) -> Run:
    """A run before its engines start: prompts, directory and learner. With --resume the newest checkpoint is loaded.
    All learners. Raises UserError for what cannot work."""
    from scripts.parts import plan, run_files

    start_time = time.perf_counter()
    torch.manual_seed(args.seed)
    utils.make_deterministic(args)
    utils.STOP.because = ""
    utils.say("start    data and model load")

    tokenizer = utils.load_tokenizer(args)
    environment = None
    if args.has_turns:
        from scripts.parts import turns

        environment = turns.load_environment(args, tokenizer)
    if args.load_batches:
        from scripts.parts import dumps

        train_prompts = dumps.prompts_of(args, num_training_steps(args))
    else:
        train_prompts = utils.load_prompts("dataset_mixer_list", args, tokenizer, environment, world)
    eval_prompts = utils.load_prompts("dataset_mixer_eval_list", args, tokenizer, environment, world)

    plan.check_models(args, train_prompts)
    data_hash = utils.data_hash(train_prompts, eval_prompts)
    hashes = utils.all_gather(data_hash, world)
    problem = f"--dataset_mixer_list: the files differ from node to node: the hashes of the ranks' data are {hashes}"
    utils.need(len(set(hashes)) == 1, problem)
    run_dir = utils.prepare_run_dir(args, data_hash, world)
    newest = None
    if args.resume:
        newest = utils.newest_checkpoint(run_dir, world)  # None: the run begins
        is_damaged = newest is None and run_files.has_checkpoint(run_dir)
        utils.need(not is_damaged, f"--resume: {run_dir} has no whole checkpoint; see --overwrite")

    learner = load_learner(args, world)
    state = start_state()
    checkpoints = utils.Checkpoints(run_dir, args.keep_last_n_checkpoints, world)
    if newest is not None:
        state |= checkpoints.resume(newest, learner, args)
    packing = choose_common_packing(learner, train_prompts[0], args, world)
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
        packing=packing,
        eval_world=world,
    )


def train(run: Run, step: Step, probe: Sequence[Group], args: Args) -> None:
    """The step's updates. Where no group has a gradient, the logprob gap is measured on `probe`. All ranks."""
    learner = run.learner
    world = run.world
    for packs in step.packs:
        step.batches.append(micro_batches(packs, run.packing, args, world.device))
    step.gap, skipped = update(learner, step.batches, args, world, step.metrics)
    if not step.gap.metrics:
        rollouts = all_rollouts(probe)[: args.per_device_train_batch_size]
        step.gap = measure_gap(learner.policy, [rollouts], args, world)

    step.metrics.count("optim/nonfinite_updates", skipped / world.size)  # every rank counts the same updates
    run.guards.judge_gradients(run, step, skipped)

    is_due = due(args.ref_policy_update_freq or 0, step.number)
    if is_due and learner.ref_policy is not None:
        refresh_reference(learner.ref_policy, learner.policy, args.alpha)


def start_reward_models(args: Args, run_dir: Path, world: World) -> Any:
    """Connect this rank to the judge and the solver. Without --solver_base_url the first rank starts the solver's
    servers, and gets them as a scripts.parts.serve.Servers; all other results are None. All ranks that score. Raises
    UserError."""
    servers = None
    if args.solver_model_name_or_path and not args.solver_base_url:
        from scripts.parts import serve

        servers, args = serve.start_solver(args, run_dir, world)
    rewards.configure(args, connect=True)
    return servers


def main(args: Args) -> Path | None:
    """Train; returns the run's directory (None after --dry_run)."""
    from scripts.parts import run_files

    args = check_start(args)
    if args.dry_run:
        return None
    world = utils.init_distributed()
    run_files.share_commits(args, world)
    args = choose_dtype(args, world)
    run = set_up(args, world)
    run.servers = start_reward_models(args, run.run_dir, world)
    engine = None if args.load_batches else start_engine(run)
    gap = None if engine is None else send_first_weights(run, engine)
    start_log(run, gap, world.size)

    state = run.state
    policy = run.learner.policy
    first_step = state["step"] + 1
    last_step = num_training_steps(args)
    for number in utils.profiled(utils.STOP.steps(range(first_step, last_step + 1)), args, world):
        step = Step(number)
        if args.load_states and number > 1:
            from scripts.parts import checkpoints

            checkpoints.take_state(args, number - 1, policy, run.learner.optimizer, engine, world)
        if engine is None:
            from scripts.parts import dumps

            groups = dumps.read_groups(number, args)
            state["cursor"] += len(groups)
            offset = stream_offset(args, world)
            step.groups = groups[offset :: world.size]
            step.sampled = step.groups
        else:
            step.groups, step.sampled = sample_groups(run, step.timer)
            engine.sleep()

        with step.timer("training"):
            groups = share_groups(step.groups, args)
            for rollouts in split_groups(groups, args):
                (packs,) = pack_rollouts(rollouts, run.packing, args.pack_length, pair_cost=policy.pair_cost)
                step.packs.append(packs)
            train(run, step, step.sampled, args)
            run.guards.judge_gap(step.gap, f"in step {number}")

        with step.timer("weight_sync"):
            if engine is not None:
                load_engine(run, engine, number)

        # everything below reports or saves
        out = step_metrics(run, step)
        advance(run, step, out)
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
    configure_rewards(args)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        args = utils.after_restart(args)
    if utils.is_first_rank():
        from scripts.parts import plan

        plan.print_plan(args, fast=False, learners=ranks, shared_gpu=True, logprob_chunk=LOGPROB_CHUNK)
    return args


def configure_rewards(args: Args) -> None:
    """Make the flags those of all verifiers. Rank 0 of a run asks the servers of judge and solver, so that an absent
    one is refused now, not after minutes of loading."""
    rewards.configure(args, connect=utils.is_first_rank() and not args.dry_run)


def choose_dtype(args: Args, world: World) -> Args:
    """The flags with the dtype that --model_dtype auto means on the first rank's machine. All ranks."""
    from scripts.parts import plan

    choices = utils.all_gather(plan.choose_dtype(args), world)
    dtype, reason = choices[0]
    utils.say(f"dtype    {dtype}: {reason}")
    return replace(args, model_dtype=dtype)


def start_engine(run: Run) -> utils.Engine:
    """This rank's engine, with room for its share of a step's rollouts and of an evaluation's. All ranks."""
    utils.say("start    the engine loads; vLLM also compiles, minutes on a CPU, unless --vllm_enforce_eager is given")
    args = run.args
    ranks = run.world.size
    trained = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout // ranks
    eval_prompts = math.ceil(len(run.eval_prompts) / ranks)
    evaluated = eval_prompts * args.eval_pass_at_k
    engine = utils.make_engine(args, run.tokenizer, run.world, max(trained, evaluated))
    run.engine = engine
    return engine


def load_engine(run: Run, engine: utils.Engine, version: int) -> None:
    """Give this rank's engine the policy's weights, and ask it whether they arrived. All ranks."""
    from scripts.parts import guards

    watched = run.echo.watch(utils.engine_weights(run.learner.policy, run.args), version)
    engine.load_weights(watched, version=version)
    requests = guards.echo_requests(engine)
    answers = engine.generate(requests)
    run.echo.judge(run.world.rank, version, answers)


def send_first_weights(run: Run, engine: utils.Engine) -> Any:
    """Load this rank's engine with the policy's weights; returns the logprob gap of probes. An engine that sleeps gives
    them back for the check, and gets them again. All ranks."""
    from scripts.parts import guards

    utils.say("start    engines, once loaded, get the first weights and show that they have the learner's logprobs")
    run.echo = guards.Echo(run.args)
    world = run.world
    policy = run.learner.policy
    step = run.state["step"]
    load_engine(run, engine, step)
    probe = sample_probes(engine, run, world.rank, guards.GAP_PROMPTS, world.size)
    engine.sleep()
    gap = measure_gap(policy, probe, run.args, world)
    utils.shard_again(policy)  # an engine that slept wakes next, beside the memory that the gap leaves in use
    if engine.asleep:
        load_engine(run, engine, step)
    return gap


def measure_gap(policy: Policy, groups: Sequence[Group], args: Args, world: World) -> Any:
    """The logprob gap, a guards.Gap, on fresh rollouts that are not trained on. All ranks, with equally many
    rollouts."""
    from scripts.parts import guards

    members = utils.share(all_rollouts(groups), args)  # the ranks that work on the same packs
    packs = [[[r]] for rollouts in members for r in rollouts]
    batches = micro_batches(packs, "rows", args, world.device)
    fill_logprobs(policy, batches, "old_logprobs", len(batches), args)
    gap = guards.Gap()
    for batch in batches:
        gap.add(batch)
    return gap.reduce(args, world)


@torch.no_grad()
def choose_packing(policy: Policy, prompt: Prompt, args: Args, world: World) -> str:
    """The first packing, of shared, plain and rows, with which this model gives the same logprobs as with one response
    a row. All ranks, with the same prompt. Raises UserError for a model that --sequence_parallel_size cannot split."""
    from scripts.parts import packing

    candidates = packing.candidates(policy, args, world)
    if not candidates:
        return "rows"
    batches: dict[str, list[Batch]] = {"shared": [], "plain": [], "rows": []}
    for rollouts in packing.probe_rollouts(prompt):
        batches["shared"].append(make_batch([make_pieces(rollouts, 2**62)], world.device))
        batches["plain"].append(make_batch([make_pieces(rollouts, 0)], world.device))
        batches["rows"].append(make_batch([[[r]] for r in rollouts], world.device))
    return packing.first_that_agrees(candidates, policy, batches, args)


def choose_common_packing(learner: Learner, prompt: Prompt, args: Args, world: World) -> str:
    """The packing that the policy and a teacher of another architecture can both compute. All ranks."""
    from scripts.parts import packing

    packings = [choose_packing(learner.policy, prompt, args, world)]
    if learner.ref_policy is not None and args.ref_model_name_or_path:
        packings.append(choose_packing(learner.ref_policy, prompt, args.of_reference(), world))
    return packing.slower(packings)


# --- Turns: an environment answers the policy between its turns -------------------------------------------------------
#
# r.turns has a dict for each turn of the policy, {role: assistant, content, tokens, cached, finish_reason}, and for
# each answer, {role, content, tokens, status, seconds, reward, done, metrics, state}. Their tokens add up to
# r.token_ids.


def add_turn(r: Rollout, generation: utils.Generation, engine: Sampler) -> None:
    """Note a turn of the policy, whose tokens r has already."""
    r.turns.append(
        {
            "role": "assistant",
            "content": text_of(generation.token_ids, engine),
            "tokens": len(generation.token_ids),
            "cached": generation.cached,
            "finish_reason": generation.finish_reason,
        }
    )


def next_request(r: Rollout, engine: Sampler, args: Args) -> utils.Request | Future:
    """The request for the next turn of r, or its future where the environment has to speak before."""
    environment = r.prompt.environment
    waits = environment is not None and environment.resets
    if r.turns:
        waits = r.turns[-1]["role"] == "assistant"
    if waits:
        return ask(r, engine, args)
    return make_request(r, args)


def ask(r: Rollout, engine: Sampler, args: Args) -> Future[utils.Request | None]:
    """Start a thread in which the environment answers the last turn of r, or resets. Returns the future of
    take_answer."""
    return rewards.ENV_THREADS.submit(lambda: take_answer(r, engine, args))


def take_answer(r: Rollout, engine: Sampler, args: Args) -> utils.Request | None:
    """Wait for the environment's answer to the last turn of r and add it. If it ends r, start the verifiers and return
    None; otherwise return the request for the next turn."""
    from scripts.parts import environments

    environment = r.prompt.environment
    assert environment is not None
    episode = environment.episode_of(r, args.max_steps)
    answer = environments.ask(environment.path, r.state, episode, args.env_timeout)

    texts = answer.pop("texts")
    ended = False
    tokens_left = remaining_tokens(r, args)
    if r.turns:
        ended = r.token_ids[-1] in engine.eos_ids
        token_ids, text = environment.answer(texts, ended, tokens_left, engine.tokenizer)
    else:
        token_ids, text = environment.first_words(texts, tokens_left, engine.tokenizer)
    with utils.LOCK:
        r.over = answer["done"] or (ended and not environment.role)
        if not r.over and len(token_ids) >= tokens_left:
            r.over = True
            r.finish_reason = "length"
        if r.over:
            token_ids = []
        r.append_answer(token_ids)
        says_something = text or answer["reward"] or answer["metrics"]
        if says_something or not r.over or environments.is_live(answer["state"]):
            role = environment.role or "tool"
            turn = {"role": role, "content": text, "tokens": len(token_ids)}
            r.turns.append(turn | answer)

    if r.over:
        start_scoring(r, engine, args)
        return None
    return make_request(r, args)


# --- Evaluation -------------------------------------------------------------------------------------------------------


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased pass@k from n samples: 1 - C(n - correct, k) / C(n, k) (Codex, arXiv:2107.03374, eq. 1)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def note_pass_at_k(group: Group, metrics: Metrics) -> None:
    """Metrics of a prompt's samples: pass@k for k = 1, 2, 4 and so on, over the samples that have a verdict."""
    verdicts = [r.verifiable for r in group if not math.isnan(r.verifiable)]
    full_score = len(group[0].prompt.verifiers) or 1  # of an environment alone
    correct = sum(verdict >= full_score - 1e-8 for verdict in verdicts)
    k = 1
    while k <= len(verdicts):
        name = "pass_at_1" if k == 1 else f"pass_at_{k}_unbiased"
        metrics.add(name, pass_at_k(len(verdicts), correct, k))
        k *= 2


def evaluation_args(args: Args) -> Args:
    """The flags as an evaluation samples and scores with them: its own length and temperature."""
    temperature = args.eval_temperature or args.temperature
    if not args.eval_temperature and args.eval_pass_at_k == 1:
        temperature = 0.0  # with several responses to a prompt greedy ones would be equal
    length = args.eval_response_length or args.response_length
    return replace(args, temperature=temperature, response_length=length)


def keep_samples(run: Run, rollouts: Sequence[Rollout]) -> None:
    """Append the first EVALUATION_ROLLOUTS of an evaluation to samples.jsonl."""
    step = run.state["step"]
    rows = [utils.sample_row(r, step) for r in rollouts[:EVALUATION_ROLLOUTS]]
    run.logger.append("samples", {"training_step": step, "evaluation": True, "rollouts": rows})


def evaluate(run: Run) -> dict[str, float]:
    """Metrics `eval/...` over all evaluation prompts. All ranks of eval_world."""
    start = time.perf_counter()
    world = run.eval_world
    args = evaluation_args(run.args)
    assert run.engine is not None  # the ranks of eval_world have one
    prompts = run.eval_prompts[world.rank :: world.size]
    groups = [new_group(prompt, prompt.index, args.eval_pass_at_k, evaluation=True) for prompt in prompts]
    sample_rollouts(run.engine, groups, args)
    rollouts = all_rollouts(groups)
    score_rollouts(rollouts, args)
    if world.is_main:
        keep_samples(run, rollouts)

    metrics = Metrics()
    utils.note_rollouts(rollouts, args, metrics)
    for group in groups:
        note_pass_at_k(group, metrics)
    out = {"eval/num_prompts": len(run.eval_prompts)}
    for name, value in metrics.reduce(world).items():
        short_name = name.removeprefix("val/").replace("objective/scores", "scores")
        out[f"eval/{short_name}"] = value
    out["time/eval"] = time.perf_counter() - start
    return out


# --- Metrics and the log ----------------------------------------------------------------------------------------------


def start_log(run: Run, gap: Any, engines: int, roles: str = "") -> None:
    """Judge the start, open the log, print what starts, with --eval_on_step_0 evaluate. All learners, while no engine
    samples. Raises UserError where learner and engines differ."""
    from scripts.parts import guards, packing, plan

    args = run.args
    state = run.state
    done = state["step"]
    run.guards = guards.Guards(args, engines)
    run.done = plain_state(run)
    utils.STOP.save = functools.partial(save_before_end, run)
    gap = gap or guards.Gap()  # of --load_batches
    run.guards.judge_gap(gap, guards.BEFORE)
    utils.agree(False, run.world)
    because = utils.STOP.because
    utils.need(not because, because)
    state |= plan.device_speed(run.world.device, utils.DTYPES[args.model_dtype])
    state["clock"] = time.perf_counter()  # see step_metrics
    logger = utils.Logger(args, run.run_dir, num_training_steps(args), done, run.world)
    run.logger = logger

    if done:
        logger.say(f"resumed after step {done}")
    mean_gap = gap.metrics.get("debug/vllm_vs_local_logprob_diff_mean", math.nan)
    ready = time.perf_counter() - run.start_time
    way = packing.told(run.packing, run.learner, args)
    logger.say(f"data     {len(run.train_prompts)} prompts, {len(run.eval_prompts)} for evaluation")
    logger.say(f"packing  {roles}{way}")
    logger.say(f"start    ready after {ready:.0f} s; logprob gap before the first rollout mean {mean_gap:.1e}")
    plan.go_by_clock(run)

    if args.eval_on_step_0 and done == 0 and run.engine is not None:
        row: dict[str, Any] = {"training_step": 0, "episode": 0}
        row |= gap.metrics
        row |= evaluate(run)
        logger.log(row)


def step_metrics(run: Run, step: Step) -> dict[str, float]:
    """The step's metrics over all ranks. All ranks."""
    args = run.args
    world = run.world
    state = run.state
    seconds = step.timer.seconds | step.seconds
    seconds["time/total"] = time.perf_counter() - step.start_time
    utils.note_step(step.groups, step.sampled, args, step.metrics)
    if utils.leads(args, world):
        note_update(run.learner, step, args)
    reduced = step.metrics.reduce(world)
    run.guards.judge_rewards(reduced, step.number)
    metrics = utils.finish_metrics(reduced, args) | step.gap.metrics | seconds

    # sums over all ranks that only enter ratios
    trained = metrics.pop("trained")
    sampled = metrics.pop("sampled")
    response_tokens = metrics.pop("response_tokens")
    learner_flops = metrics.pop("learner_flops")

    metrics["training_step"] = step.number
    rollouts = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    metrics["episode"] = state["episode"] + rollouts
    metrics["epoch"] = state["cursor"] / len(run.train_prompts)
    metrics["other/real_batch_size_ratio"] = trained / sampled
    metrics["optim/skipped_steps"] = float(trained == 0)
    metrics["val/num_total_tokens"] = state["tokens"]  # before this step
    metrics["val/num_learner_tokens"] = metrics["val/learner_tokens"] * world.size
    metrics["val/num_excluded_prompts"] = float(len(state["sampler"]["excluded"]))
    now = time.perf_counter()
    metrics["time/from_scratch"] = now - run.start_time

    tokens = metrics["val/num_step_tokens"]
    generation = seconds.get("time/generation", seconds["time/total"])
    longest_generation = seconds.get("time/group_generation_max") or generation
    possible_flops = seconds["time/training"] * world.size * state["flops_per_second"]
    metrics["learner_mfu"] = learner_flops / possible_flops
    metrics["learner_tokens_per_second_step"] = tokens / seconds["time/total"]
    seconds_of_run = state["seconds"] + now - state["clock"]
    metrics["learner_tokens_per_second_overall"] = state["tokens"] / seconds_of_run
    metrics["val/actor_tokens_per_second"] = tokens / longest_generation
    metrics["val/response_tokens_per_second"] = response_tokens / generation
    return metrics


def advance(run: Run, step: Step, metrics: dict[str, float]) -> None:
    """Add a step with these metrics to the run's state. state["seconds"] counts from one call to the next, and from
    start_log to the first call. It includes evaluation and saving."""
    state = run.state
    now = time.perf_counter()
    state["step"] = step.number
    state["episode"] = metrics["episode"]
    state["tokens"] += metrics["val/num_step_tokens"]
    state["seconds"] += now - state["clock"]
    state["clock"] = now
    run.done = plain_state(run)


def note_update(learner: Learner, step: Step, args: Args) -> None:
    """Metrics of what this rank trained on."""
    metrics = step.metrics
    packs = [pack for mini_batch in step.packs for pack in mini_batch]
    pieces = [piece for pack in packs for piece in pack]
    rollouts = all_rollouts(pieces)
    tokens = sum(map(piece_length, pieces))
    pairs = sum(map(attended_pairs, pieces))
    response_tokens = sum(len(r.token_ids) for r in rollouts)

    # A backward costs as much as two forwards: the gradients of inputs and of weights. Frozen weights need no gradient.
    passes = 2 if args.lora_rank else 3
    forwards = passes * args.num_epochs
    forwards += needs_old_logprobs(args, len(step.packs))
    flops = forwards * learner.policy.flops(tokens, pairs, response_tokens)
    if learner.ref_policy is not None:
        flops += learner.ref_policy.flops(tokens, pairs, response_tokens)
    metrics.count("trained", len(rollouts))
    metrics.count("learner_flops", flops)
    metrics.add_all("val/learner_tokens", [tokens / args.sequence_parallel_size])
    metrics.add("other/packed_ratio", len(packs), len(rollouts))
    metrics.add_all("val/advantages", [np.mean(r.advantage) for r in rollouts])


def due(every: int, step: int, last: int = 0) -> bool:
    """Whether something that happens every `every` steps, and after step `last`, happens after `step`. It never does if
    `every` is 0 or less."""
    return every > 0 and (step % every == 0 or step == last)


def end_step(run: Run, step: Step, out: dict[str, float]) -> None:
    """Save and evaluate where it is due; log the metrics `out`; record rollouts. All ranks."""
    args = run.args
    policy = run.learner.policy
    if run.servers is not None:
        utils.STOP.ask(run.servers.problem())

    if due(args.save_freq, step.number):
        path = run.run_dir / f"step_{step.number}"
        with step.timer("saving"):
            utils.save_model(policy, run.tokenizer, path, args, run.world)
        out["time/saving"] = step.timer.seconds["time/saving"]
    evaluates = due(args.local_eval_every, step.number, num_training_steps(args))
    if evaluates and run.eval_prompts and run.engine is not None:
        with utils.STOP.on_error(alone=run.eval_world.size == 1):
            out |= evaluate(run)

    run.logger.log(out)
    if step.number % SHOW_ROLLOUTS_EVERY == 1:
        run.logger.show(step.number, step.sampled)
    if args.save_traces or args.dump_steps:
        from scripts.parts import dumps

        dumps.record_step(step, run.packing, policy, args, run.world)


# --- Checkpoints, and the end -----------------------------------------------------------------------------------------


def save_state(run: Run, more_state: Callable[[], dict[str, Any]] = dict) -> str:
    """Start to write a resumable checkpoint, with what `more_state` returns, where one is due or the run has to stop.
    Returns what stops it, see utils.agree, or "". All ranks."""
    step = run.state["step"]
    is_due = due(run.args.checkpoint_state_freq, step) or run.checkpoints.is_time()
    stopping, is_due = utils.agree(is_due, run.world)
    if step and (stopping or is_due):
        learner = run.learner
        state = plain_state(run) | more_state()
        modules = learner.modules(run.args)
        run.checkpoints.save(step, modules, learner.optimizer, state)
    if stopping:
        run.logger.say(f"{stopping}: stopped after step {step}; --resume goes on")
    return stopping


def plain_state(run: Run) -> dict[str, Any]:
    """What a checkpoint keeps beside weights and optimizer."""
    state = {name: run.state[name] for name in start_state()}
    return state | {"scheduler": run.learner.scheduler.state_dict()}


def save_before_end(run: Run) -> None:
    """After an error of a single learner: write a checkpoint of the last step that is done, unless an update has begun
    since. Several learners have their last checkpoint: the others are in the middle of a collective."""
    learner = run.learner
    step = run.done["step"]
    is_whole = learner.scheduler.last_epoch == run.done["scheduler"]["last_epoch"]
    if run.world.size == 1 and step and is_whole:
        modules = learner.modules(run.args)
        run.checkpoints.save(step, modules, learner.optimizer, run.done)
        run.checkpoints.wait()
        run.logger.say(f"an error: stopped after step {step}; --resume goes on")


def finish(run: Run) -> Path:
    """Save the model if all steps are done, and end what the run has started. Returns its directory. All ranks. Raises
    UserError, on the first rank, for the guard that ended the run."""
    args = run.args
    run_dir = run.run_dir
    run.checkpoints.wait()
    last_step = run.state["step"]
    finished = last_step == num_training_steps(args)
    made = f"no model yet, checkpoints in {run_dir / 'checkpoints'}"
    if finished:
        model_dir = utils.save_model(run.learner.policy, run.tokenizer, run_dir / "model", args, run.world)
        more = ["--dtype", "float32"] if args.model_dtype == "float32" else []  # vLLM would take bfloat16
        made = f"model {model_dir} (to ask it: {shlex.join(['vllm', 'serve', str(model_dir), *more])})"
    run.logger.close()
    if run.engine is not None:
        run.engine.stop(last_step)
    if run.world.is_main:
        print(f"{made}, {utils.draw_report(run_dir)}")

    rewards.close()
    if run.servers is not None:
        run.servers.stop()
    dist.barrier()  # no rank leaves while another still writes
    if run.engine is not None:
        run.engine.close()
    if dist.is_initialized():  # an engine that shares the process group closes it
        dist.destroy_process_group()
    if run.world.is_main:
        utils.STOP.give_cause(run_dir)
    if args.push_to_hub and run.world.is_main and finished:  # the other ranks do not wait for the upload
        from scripts.parts import run_files

        run_files.push_in_process(run_dir)
    return run_dir


if __name__ == "__main__":
    utils.run_script(main, Args)
