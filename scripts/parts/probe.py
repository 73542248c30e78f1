"""Does this copy of the algorithm still do what its flags say? Asked before a model loads, on made-up rollouts.

Everybody edits the copy, and a wrong sign, mask or denominator ends no run. So each run asks its own functions, those
of the module that the flags come from, for facts that hold for GRPO with these flags, and prints what differs. It warns
and refuses nothing: an idea may want another fact. It draws no random number. What is asked of a function is a
consequence and not its formula: a loss, baseline or denominator that has the same consequences is not mentioned.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

import rewards
import utils

KNOWN_LOSSES = ("dapo", "cispo", "gspo")
CLIPPED_LOSSES = ("dapo", "gspo")
ONE_RANK = utils.World(0, 0, 1, torch.device("cpu"))
TWO_RANKS = utils.World(0, 0, 2, torch.device("cpu"))
CLOSE = 1e-3  # relative: float32, and the epsilons under standard deviations


def differences(args: Any) -> list[str]:
    """What this copy does otherwise, a sentence each. `args` are grpo.Args, and `module` is where they come from."""
    flags = next(kind for kind in type(args).__mro__ if kind.__name__ == "GRPOFlags")
    module = sys.modules[flags.__module__]
    plain = replace(args, sequence_parallel_size=1)
    found = []
    for name, question in QUESTIONS.items():
        try:
            found += question(module, plain)
        except Exception as error:  # an edited function may want other arguments: that is told, and ends no run
            if "does not require grad" in str(error):
                found.append("the loss without the KL has no gradient (policy_loss, aggregate)")
                break
            found.append(f"{name} cannot be asked about: {type(error).__name__}: {error}")
    return found


# --- Made-up rollouts -------------------------------------------------------------------------------------------------


def rollout(position: int, sample: int, tokens: int, answer: int = 0, advantage: float = 0.0) -> utils.Rollout:
    """A response of so many tokens of the policy, then `answer` tokens of an environment and one more of the policy."""
    prompt = utils.Prompt(position, (5, 6, 7), "", ("7",), ("gsm8k",))
    r = utils.Rollout(prompt, position, sample, advantage=advantage)
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


def advantages(module: Any, args: Any, *scores: Sequence[float]) -> list[list[float]]:
    """The advantages of groups with these scores, each that of one verifier."""
    groups = []
    for position, values in enumerate(scores):
        members = [rollout(position, sample, 2) for sample in range(len(values))]
        for r, score in zip(members, values, strict=True):
            r.results = [rewards.RewardResult(score, "ok", "", 0.0)]
            r.outcome = score
            r.score = score
        groups.append(members)
    module.set_advantages(groups, args)
    return [[float(np.mean(r.advantage)) for r in members] for members in groups]


class Toy:
    """A policy whose logprobs and entropies are parameters: their gradients are what the loss says of each token."""

    def __init__(self, batches: Sequence[Any], log_ratio: float):
        self.new = []
        self.entropy = []
        self.calls = 0
        for batch in batches:
            batch.old_logprobs = batch.vllm_logprobs.clone()
            new = batch.old_logprobs + log_ratio
            entropy = torch.ones_like(new)
            self.new.append(new.requires_grad_())
            self.entropy.append(entropy.requires_grad_())

    def __call__(self, batch: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        i = self.calls
        self.calls += 1
        return self.new[i], self.entropy[i]

    def set_requires_gradient_sync(self, value: bool) -> None:
        """As FSDP's modules have it."""

    set_requires_all_reduce = set_reshard_after_backward = set_requires_gradient_sync


def twice(values: Sequence[float], world: utils.World, op: Any = torch.distributed.ReduceOp.SUM) -> list[float]:
    """In place of utils.all_reduce: as if another rank had the same values."""
    times = 2.0 if op == torch.distributed.ReduceOp.SUM else 1.0
    return [times * value for value in values]


def gradients(
    module: Any,
    args: Any,
    rollouts: Sequence[utils.Rollout],
    log_ratio: float = 0.0,
    above_reference: float | None = None,
    world: utils.World = ONE_RANK,
) -> Toy:
    """A policy with the gradients of the step's loss, a micro-batch for each rollout. Each logprob is `log_ratio` above
    the old one, which is the engine's, and the old one `above_reference` above the reference's, if there is one."""
    batches = [module.make_batch([[[r]]], ONE_RANK.device) for r in rollouts]
    toy = Toy(batches, log_ratio)
    if above_reference is not None:
        for batch in batches:
            batch.ref_logprobs = batch.old_logprobs - above_reference
    module.accumulate_gradient(toy, batches, len(batches), args, world, utils.Metrics())
    return toy


def of_response(values: torch.Tensor, r: utils.Rollout) -> torch.Tensor:
    """The part of a row (1, T) that is about the tokens of its response."""
    return values[0, -len(r.token_ids) :]


# --- Questions: each yields a sentence for what differs ---------------------------------------------------------------


def about_advantages(module: Any, args: Any) -> Iterator[str]:
    """Groups, their order and their mean."""
    scores = [0.0, 10.0, 10.0, 0.0, 0.0]
    alone = advantages(module, args, scores, [0.0, 10.0])[0]
    beside = advantages(module, args, scores, [10.0, 9.0])[0]
    if not np.allclose(alone, beside, rtol=CLOSE):
        yield "advantages change with the scores of another prompt (set_advantages)"

    values = advantages(module, args, [0.0, 10.0, 0.0, 0.0])[0]
    if values.index(max(values)) != 1 or not values[0] == values[2] == values[3]:
        yield "the best response of a group does not get its largest advantage (set_advantages)"

    if args.advantage_normalization_type != "none":
        values = advantages(module, args, [10.0, 0.0, 0.0, 0.0])[0]
        if abs(sum(values)) > CLOSE * sum(map(abs, values)):
            yield "the advantages of a group do not add up to 0 (compute_advantages)"


def about_tokens(module: Any, args: Any) -> Iterator[str]:
    """Which tokens have a gradient, with which sign and weight, at ratio 1."""
    rollouts = [rollout(0, 0, 3, advantage=1.0), rollout(0, 1, 6, answer=2, advantage=-1.0)]
    masks = [torch.tensor([True] * 3), torch.tensor([True] * 6 + [False] * 2 + [True])]  # not r.mask: it may be wrong
    toy = gradients(module, args, rollouts)
    found = [of_response(new.grad, r) for new, r in zip(toy.new, rollouts, strict=True)]
    for gradient, mask in zip(found, masks, strict=True):
        if not torch.equal(gradient != 0, mask):
            yield "the trained tokens are not those that the policy chose (Rollout.mask, response_segment, loss_inputs)"
            return

    if found[0].max() > 0 or found[1].min() < 0:
        yield "the gradient makes good responses less likely (policy_loss)"
    if args.loss_fn in KNOWN_LOSSES:
        yield from about_weights(args.loss_denominator, found, masks)
    if args.loss_denominator in ("token", "sequence"):  # with a constant two ranks have the double sum
        with mock.patch.object(utils, "all_reduce", twice):
            of_two = gradients(module, args, rollouts, world=TWO_RANKS)
        if not torch.allclose(of_two.new[1].grad, toy.new[1].grad):
            yield "two ranks with the same rollouts do not have the gradient of one (count_totals, accumulate_gradient)"


def about_weights(kind: str, found: list[torch.Tensor], masks: list[torch.Tensor]) -> Iterator[str]:
    """Whether the gradients of two micro-batches, with advantages of 1 and -1, have this denominator."""
    tokens = sum(float(mask.sum()) for mask in masks)
    for gradient, mask in zip(found, masks, strict=True):
        own = float(mask.sum())
        weights = {"token": 1 / tokens, "sequence": 1 / (own * len(masks))}
        weight = weights[kind] if kind in weights else 1 / float(kind)
        sizes = gradient[mask].abs()
        if not np.allclose(sizes, weight, rtol=CLOSE):
            times = float(sizes.mean()) / weight
            yield (
                f"with --loss_denominator {kind} a token of a micro-batch of {own:.0f} of {tokens:.0f} tokens has "
                f"{times:.3g} times its weight (aggregate, accumulate_gradient)"
            )
            return


def about_clipping(module: Any, args: Any) -> Iterator[str]:
    """Beyond a bound the loss has no gradient if it would go further. If it comes back, the gradient is that of ratio 1
    times the ratio: engine and old policy agree, so rho is 1."""
    if args.loss_fn not in CLIPPED_LOSSES or args.clip_dual or not 0 < args.clip_lower < 1:
        return
    high = 2 * (1 + args.clip_higher)
    low = (1 - args.clip_lower) / 2
    for advantage, further, back in ((1.0, high, low), (-1.0, low, high)):
        where = f"where the advantage is {advantage:+.0f}"
        unclipped = gradient_size(module, args, advantage, 1.0)
        if gradient_size(module, args, advantage, further):
            yield f"a ratio of {further:.2g} is not clipped {where} (policy_loss)"
        elif not np.isclose(gradient_size(module, args, advantage, back), back * unclipped, rtol=CLOSE):
            yield (
                f"a ratio of {back:.2g} does not give {back:.2g} times the gradient of ratio 1 {where}: it is clipped, "
                "or rho is that of other weights than the step began with (policy_loss, importance_weights)"
            )


def gradient_size(module: Any, args: Any, advantage: float, ratio: float) -> float:
    """The mean size of a token's gradient in a response with this advantage and ratio."""
    r = rollout(0, 0, 4, advantage=advantage)
    toy = gradients(module, args, [r], math.log(ratio))
    return float(of_response(toy.new[0].grad, r).abs().mean())


def about_the_kl(module: Any, args: Any) -> Iterator[str]:
    """The KL in the loss pulls to the reference. Other estimators have a gradient that does not depend on it."""
    estimator = module.KL_ESTIMATORS[args.kl_estimator]
    if not args.beta or args.kl_in_reward or estimator not in (1, 2):
        return
    for above in (0.5, -0.5):
        gradient = gradients(module, args, [rollout(0, 0, 3)], above_reference=above).new[0].grad
        if not float(gradient.sum()) * above > 0:
            yield "the KL does not pull the policy to the reference (grpo_loss)"
            return


def about_entropy(module: Any, args: Any) -> Iterator[str]:
    """A bonus raises the entropy."""
    if args.entropy_coef:
        gradient = gradients(module, args, [rollout(0, 0, 3, advantage=1.0)]).entropy[0].grad
        if gradient is None or not float(gradient.sum()) < 0:
            yield "the entropy bonus does not raise the entropy (grpo_loss)"


QUESTIONS: dict[str, Callable[[Any, Any], Iterator[str]]] = {
    "advantages": about_advantages,
    "tokens": about_tokens,
    "clipping": about_clipping,
    "the KL": about_the_kl,
    "the entropy": about_entropy,
}
