"""Does this copy of the algorithm still do what its flags say? Asked before a model loads, on made-up rollouts.

Everybody edits the copy, and a wrong sign, mask or denominator ends no run. So each run asks its own functions, those
of the module that the flags come from, for facts that hold for GRPO with these flags, and prints what differs. It warns
and refuses nothing: an idea may want another fact. It takes some hundredths of a second and draws no random number.

What is asked of a function here is a consequence, not its formula: another loss, baseline or denominator that has the
same consequences is not mentioned.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

import rewards
import utils

KNOWN_LOSSES = ("dapo", "cispo", "gspo")
CLIPPED_LOSSES = ("dapo", "gspo")
ONE_RANK = utils.World(0, 0, 1, torch.device("cpu"))
TWO_RANKS = utils.World(0, 0, 2, torch.device("cpu"))
ANSWERS = {  # verifier -> label, a right answer, a wrong one
    "gsm8k": ("18", "17 or 19? It is #### 18", "17, 18 or 19? It is #### 19"),
    "string_matcher": ("apple", "A pear? <answer>apple</answer>", "An apple? <answer>pear</answer>"),
    "flan": ("apple", "A pear? The answer is: apple", "An apple? The answer is: pear"),
    "re_search": ('["apple"]', "A pear? <finish>apple</finish>", "An apple? <finish>pear</finish>"),
}
CLOSE = 1e-3  # relative: float32, and the epsilons under standard deviations


class Subject(NamedTuple):
    """The algorithm that is asked, and its flags."""

    module: Any  # grpo, or the copy of it that runs
    args: Any


def differences(args: Any) -> list[str]:
    """What this copy does otherwise, a sentence each. `args` are grpo.Args."""
    flags = next(kind for kind in type(args).__mro__ if kind.__name__ == "GRPOFlags")
    module = sys.modules[flags.__module__]
    plain = replace(args, sequence_parallel_size=1, turn_credit=False)
    subject = Subject(module, plain)
    found = []
    for name, question in QUESTIONS.items():
        try:
            found += question(subject)
        except Exception as error:  # an edited function may want other arguments: that is told, and ends no run
            if "does not require grad" in str(error):
                found.append("the loss without the KL has no gradient (policy_loss, aggregate)")
                break
            found.append(f"{name} cannot be asked about: {type(error).__name__}: {error}")
    return found


# --- Made-up rollouts -------------------------------------------------------------------------------------------------


def rollout(position: int, sample: int, tokens: int, answer: int = 0) -> utils.Rollout:
    """A response of so many tokens of the policy, then `answer` tokens of an environment and one more of the policy."""
    prompt = utils.Prompt(position, (5, 6, 7), "", ("7",), ("gsm8k",))
    r = utils.Rollout(prompt, position, sample)
    first = 10 * max(1, sample)  # the first two of a group are the same response, the others differ
    r.append(generation(first, tokens))
    if answer:
        r.append_answer([9] * answer)
        r.append(generation(first, 1))
    r.over = True
    return r


def generation(first: int, tokens: int) -> utils.Generation:
    """So many tokens of the policy, `first` and those after it, each with logprob -1."""
    return utils.Generation(list(range(first, first + tokens)), [-1.0] * tokens, "stop", [0] * tokens)


def group(position: int, scores: Sequence[float], tokens: int = 2) -> list[utils.Rollout]:
    """A group with these scores, each that of one verifier."""
    members = []
    for sample, score in enumerate(scores):
        r = rollout(position, sample, tokens)
        r.results = [rewards.RewardResult(score, "ok", "", 0.0)]
        r.outcome = score
        r.score = score
        members.append(r)
    return members


def advantages(subject: Subject, *scores: Sequence[float]) -> list[list[float]]:
    """The advantages of groups with these scores."""
    groups = [group(i, values) for i, values in enumerate(scores)]
    subject.module.set_advantages(groups, subject.args)
    return [[float(np.mean(r.advantage)) for r in members] for members in groups]


def near(a: float, b: float) -> bool:
    """Whether two numbers are the same but for rounding."""
    return math.isclose(a, b, rel_tol=CLOSE, abs_tol=1e-7)


class Toy:
    """A policy whose logprobs and entropies are parameters: their gradients are what the loss says of each token."""

    top_tokens = None

    def __init__(self, batches: Sequence[Any], log_ratio: float = 0.0):
        self.new = []
        self.entropy = []
        self.calls = 0
        for batch in batches:
            batch.old_logprobs = batch.vllm_logprobs.clone()
            new = batch.old_logprobs + log_ratio
            self.new.append(new.requires_grad_())
            self.entropy.append(torch.ones_like(new).requires_grad_())

    def __call__(self, batch: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        i = self.calls
        self.calls += 1
        return self.new[i], self.entropy[i]

    def set_requires_gradient_sync(self, value: bool) -> None:
        """As FSDP's modules have it."""

    set_requires_all_reduce = set_reshard_after_backward = set_requires_gradient_sync


def batches_of(subject: Subject, rollouts: Sequence[utils.Rollout]) -> list[Any]:
    """A micro-batch for each rollout."""
    return [subject.module.make_batch([[[r]]], ONE_RANK.device) for r in rollouts]


def twice(values: Sequence[float], world: utils.World, op: Any = torch.distributed.ReduceOp.SUM) -> list[float]:
    """In place of utils.all_reduce: as if another rank had the same values."""
    times = 2.0 if op == torch.distributed.ReduceOp.SUM else 1.0
    return [times * value for value in values]


def gradients_of_two_ranks(subject: Subject, rollouts: Sequence[utils.Rollout]) -> Toy:
    """As `gradients`, on a rank beside which another one has the same rollouts."""
    before = utils.all_reduce
    utils.all_reduce = twice
    try:
        return gradients(subject, rollouts, world=TWO_RANKS)
    finally:
        utils.all_reduce = before


def gradients(
    subject: Subject,
    rollouts: Sequence[utils.Rollout],
    log_ratio: float = 0.0,
    above_reference: float | None = None,
    world: utils.World = ONE_RANK,
) -> Toy:
    """A policy with the gradients of the step's loss. Each logprob is `log_ratio` above the old one, which is the
    engine's, and the old one `above_reference` above the reference's, if there is one."""
    batches = batches_of(subject, rollouts)
    toy = Toy(batches, log_ratio)
    if above_reference is not None:
        for batch in batches:
            batch.ref_logprobs = batch.old_logprobs - above_reference
    metrics = utils.Metrics()
    subject.module.accumulate_gradient(toy, batches, len(batches), subject.args, world, metrics)
    return toy


def of_response(values: torch.Tensor, r: utils.Rollout) -> torch.Tensor:
    """The part of a row (1, T) that is about the tokens of its response."""
    return values[0, -len(r.token_ids) :]


def with_advantage(r: utils.Rollout, advantage: float) -> utils.Rollout:
    """The rollout, with this advantage."""
    r.advantage = advantage
    return r


# --- Questions: each yields a sentence for what differs ---------------------------------------------------------------


def about_advantages(subject: Subject) -> Iterator[str]:
    """Groups, their order, their mean and their scale."""
    scores = [0.0, 10.0, 10.0, 0.0, 0.0]
    alone = advantages(subject, scores, [0.0, 10.0])[0]
    beside = advantages(subject, scores, [10.0, 9.0])[0]
    if not all(map(near, alone, beside)):
        yield "advantages change with the scores of another prompt (set_advantages)"

    values = advantages(subject, [0.0, 10.0, 0.0, 0.0])[0]
    if values.index(max(values)) != 1 or not values[0] == values[2] == values[3]:
        yield "the best response of a group does not get its largest advantage (set_advantages)"

    kind = subject.args.advantage_normalization_type
    if kind == "none":
        return
    values = advantages(subject, [10.0, 0.0, 0.0, 0.0])[0]
    if abs(sum(values)) > CLOSE * sum(map(abs, values)):
        yield "the advantages of a group do not add up to 0 (compute_advantages)"
    if kind.startswith("standard"):
        small = advantages(subject, [score / 10_000 for score in scores])[0]
        for a, b in zip(small, alone, strict=True):
            if not math.isclose(a, b, rel_tol=0.01):
                yield "advantages are smaller where the scores of a group are close (compute_advantages)"
                return


def about_the_update(subject: Subject) -> Iterator[str]:
    """Which groups and responses are trained on."""
    args = subject.args
    groups = [group(i, [0.0, 10.0]) for i in range(2 * args.num_mini_batches + 1)]
    mini_batches = subject.module.split_groups(groups, args)
    trained = [id(r) for rollouts in mini_batches for r in rollouts]
    sampled = [id(r) for members in groups for r in members]
    if sorted(trained) != sorted(sampled):
        yield "a pass does not train on each response of each group once (split_groups, trainable)"
    if args.mask_truncated_completions:
        members = group(0, [0.0, 10.0, 10.0])
        members[0].finish_reason = "length"
        if len(subject.module.trainable([members], args)) != 2:
            yield "truncated responses are in the update, and in its denominators (trainable)"


def about_tokens(subject: Subject) -> Iterator[str]:
    """Which tokens have a gradient, with which sign and weight, at ratio 1."""
    rollouts = [with_advantage(rollout(0, 0, 3), 1.0), with_advantage(rollout(0, 1, 6, answer=2), -1.0)]
    toy = gradients(subject, rollouts)
    found = [of_response(new.grad, r) for new, r in zip(toy.new, rollouts, strict=True)]
    masks = [
        torch.tensor([True] * 3),
        torch.tensor([True] * 6 + [False] * 2 + [True]),
    ]  # not r.mask, which may be wrong
    if not any(gradient.any() for gradient in found):
        yield "no token has a policy gradient (policy_loss)"
        return
    problem = ""
    for gradient, mask in zip(found, masks, strict=True):
        trained = gradient != 0
        if (trained & ~mask).any():
            problem = "tokens that the policy did not choose are trained on"
        elif (mask & ~trained).any():
            problem = f"of {int(mask.sum())} tokens of a response {int((mask & trained).sum())} are trained on"
    if problem:
        yield f"{problem} (Rollout.mask, response_segment, loss_inputs)"
        return

    if found[0].max() > 0 or found[1].min() < 0:
        yield "the gradient makes good responses less likely (policy_loss)"
    if subject.args.loss_fn in KNOWN_LOSSES:
        yield from about_weights(subject, found, masks)

    if subject.args.loss_denominator not in ("token", "sequence"):
        return  # two ranks have the double sum
    of_two = gradients_of_two_ranks(subject, rollouts)
    if not torch.allclose(of_two.new[1].grad, toy.new[1].grad):
        yield "two ranks with the same rollouts do not have the gradient of one (count_totals, accumulate_gradient)"


def about_weights(subject: Subject, found: list[torch.Tensor], masks: list[torch.Tensor]) -> Iterator[str]:
    """Whether the gradients of two micro-batches, with advantages of 1 and -1, have the denominator of the flags."""
    kind = subject.args.loss_denominator
    tokens = sum(float(mask.sum()) for mask in masks)
    for gradient, mask in zip(found, masks, strict=True):
        own = float(mask.sum())
        weights = {"token": 1 / tokens, "sequence": 1 / (own * len(masks))}
        weight = weights[kind] if kind in weights else 1 / float(kind)
        sizes = gradient[mask].abs()
        if not near(float(sizes.min()), weight) or not near(float(sizes.max()), weight):
            times = float(sizes.mean()) / weight
            yield (
                f"with --loss_denominator {kind} a token of a micro-batch of {own:.0f} of {tokens:.0f} tokens has "
                f"{times:.3g} times its weight (aggregate, accumulate_gradient)"
            )
            return


def about_clipping(subject: Subject) -> Iterator[str]:
    """Beyond a bound the loss has no gradient if it would go further. If it comes back, the gradient is that of ratio 1
    times the ratio: engine and old policy agree, so rho is 1."""
    args = subject.args
    if args.loss_fn not in CLIPPED_LOSSES or args.clip_dual or not 0 < args.clip_lower < 1:
        return
    high = 2 * (1 + args.clip_higher)
    low = (1 - args.clip_lower) / 2
    for advantage, ratio in ((1.0, high), (-1.0, low)):
        if gradient_size(subject, advantage, ratio):
            yield f"a ratio of {ratio:.2g} is not clipped where the advantage is {advantage:+.0f} (policy_loss)"
            return
    for advantage, ratio in ((1.0, low), (-1.0, high)):
        size = gradient_size(subject, advantage, ratio)
        if not size:
            yield f"a ratio of {ratio:.2g} is clipped where the advantage is {advantage:+.0f} (policy_loss)"
            return
        if not near(size, ratio * gradient_size(subject, advantage, 1.0)):
            yield (
                f"at a ratio of {ratio:.2g} the gradient is not {ratio:.2g} times that of ratio 1: rho may be that of "
                "other weights than the step began with (policy_loss, importance_weights)"
            )
            return


def gradient_size(subject: Subject, advantage: float, ratio: float) -> float:
    """The mean size of a token's gradient in a response with this advantage and ratio."""
    r = with_advantage(rollout(0, 0, 4), advantage)
    toy = gradients(subject, [r], math.log(ratio))
    return float(of_response(toy.new[0].grad, r).abs().mean())


def about_the_kl(subject: Subject) -> Iterator[str]:
    """The KL pulls to the reference: in the loss, or in the reward."""
    args = subject.args
    estimator = subject.module.KL_ESTIMATORS[args.kl_estimator]
    if not args.beta:
        return
    if args.kl_in_reward:
        yield from about_kl_in_reward(subject)
    elif estimator in (1, 2):  # the gradient of the others does not depend on where the reference is
        for above in (0.5, -0.5):
            r = with_advantage(rollout(0, 0, 3), 0.0)
            gradient = gradients(subject, [r], above_reference=above).new[0].grad
            if not float(gradient.sum()) * above > 0:
                yield "the KL does not pull the policy to the reference (grpo_loss)"
                return


def about_kl_in_reward(subject: Subject) -> Iterator[str]:
    """Of two responses with the same score the one with less KL has the larger advantage."""
    members = group(0, [0.0, 10.0, 10.0])
    subject.module.set_advantages([members], subject.args)
    batches = batches_of(subject, members)
    for batch, above in zip(batches, (0.1, 0.1, 2.0), strict=True):
        batch.old_logprobs = batch.vllm_logprobs.clone()
        batch.ref_logprobs = batch.old_logprobs - above
    subject.module.put_kl_in_reward(batches, subject.args, ONE_RANK, utils.Metrics())
    if not np.mean(members[1].advantage) > np.mean(members[2].advantage):
        yield "the KL does not lower the score (put_kl_in_reward)"


def about_entropy(subject: Subject) -> Iterator[str]:
    """A bonus raises the entropy."""
    if subject.args.entropy_coef:
        r = with_advantage(rollout(0, 0, 3), 1.0)
        gradient = gradients(subject, [r]).entropy[0].grad
        if gradient is None or not float(gradient.sum()) < 0:
            yield "the entropy bonus does not raise the entropy (grpo_loss)"


def about_rho(subject: Subject) -> Iterator[str]:
    """With --rho_mask_sequence_level a response is dropped for its mean, however long it is."""
    args = subject.args
    bounds = [bound for bound in (args.rho_mask_lower_bound, args.rho_mask_upper_bound) if bound > 0]
    if not args.rho_mask_sequence_level or not bounds:
        return
    log_rho = 0.9 * math.log(bounds[-1])
    (batch,) = batches_of(subject, [with_advantage(rollout(0, 0, 8), 1.0)])
    toy = Toy([batch])
    batch.vllm_logprobs = batch.old_logprobs - log_rho
    inputs = batch.loss_inputs(toy.new[0], toy.entropy[0])
    if not subject.module.importance_weights(inputs, args).any():
        yield "--rho_mask_sequence_level drops a response whose mean rho is within the bounds (kept_by_rho)"


def about_sampling(subject: Subject) -> Iterator[str]:
    """Ranks take different prompts, and the responses to a prompt have different seeds."""
    args = subject.args
    ranks = 4
    offsets = [subject.module.stream_offset(args, replace(ONE_RANK, rank=rank, size=ranks)) for rank in range(ranks)]
    if sorted(offsets) != list(range(ranks)):
        yield "several ranks take the same prompts (stream_offset)"
    prompt = utils.Prompt(0, (5, 6, 7), "", ("7",), ("gsm8k",))
    requests = [subject.module.make_request(r, args) for r in subject.module.new_group(prompt, 0, 2)]
    if requests[0].seed == requests[1].seed:
        yield "the responses to a prompt are sampled with one seed (make_request)"


def about_scores(subject: Subject) -> Iterator[str]:
    """A missing verdict is no wrong answer, and a truncated response is one only where the flags say so."""
    args = subject.args
    if not args.apply_verifiable_reward:
        return
    if not math.isnan(rewards.combine_rewards(args, math.nan, 1.0)[0]):
        yield "a response without a verdict gets a score (combine_rewards)"
    whole = rewards.combine_rewards(args, 1.0, 1.0, stopped=True)
    cut = rewards.combine_rewards(args, 1.0, 1.0, stopped=False)
    if cut != whole and not args.non_stop_penalty:
        yield "a right answer without an end token gets another score, without --non_stop_penalty (combine_rewards)"


def about_verifiers(subject: Subject) -> Iterator[str]:
    """The verifiers of rewards.py that need no worker: a right answer is right, and one that only has the label
    somewhere in it is not."""
    for name in filter(rewards.VERIFIERS.__contains__, ANSWERS):
        label, right, wrong = ANSWERS[name]
        verify = rewards.VERIFIERS[name].verify
        if verify(rewards.RewardRecord(right, label, name)).score != 1.0:
            yield f"{name} refuses {right!r} for the label {label!r}"
        if verify(rewards.RewardRecord(wrong, label, name)).score != 0.0:
            yield f"{name} accepts {wrong!r} for the label {label!r}"


QUESTIONS: dict[str, Callable[[Subject], Iterator[str]]] = {
    "advantages": about_advantages,
    "the update": about_the_update,
    "tokens": about_tokens,
    "clipping": about_clipping,
    "the KL": about_the_kl,
    "the entropy": about_entropy,
    "rho": about_rho,
    "sampling": about_sampling,
    "scores": about_scores,
    "verifiers": about_verifiers,
}
