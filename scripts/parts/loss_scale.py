"""A dynamic scale S of the loss keeps gradients in the range of float16 (--model_dtype float16), which holds nothing
nearer to 0 than 6e-8 (arXiv:2510.26788). The backward starts from S times the gradient of each logprob and entropy, and
what the ranks have added up in float32 is divided by S again (arXiv:1710.03740, section 3.2). S is a power of 2: both
are exact. A gradient that is not finite skips its optimizer step and halves S; STEPS_TO_DOUBLE steps in a row without
one double it. S is a buffer of the policy, so that checkpoints have it.
"""

import math
from typing import Any

import torch

import utils

START = 2.0**16
LARGEST = 2.0**24
STEPS_TO_DOUBLE = 1000


def add(policy: torch.nn.Module) -> None:
    """Scale all gradients of a policy whose forward gives (logprobs, entropy). Call it before FSDP has the policy."""
    policy.register_buffer("loss_scale", torch.tensor(START))
    policy.register_buffer("good_steps", torch.tensor(0.0))  # since S has changed
    policy.register_forward_hook(scale_gradients)


def scale_gradients(policy: Any, _inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
    """A hook after the policy's forward."""
    for values in outputs:
        if values.requires_grad:
            values.register_hook(policy.loss_scale.mul)


def unscale(policy: Any) -> None:
    """Divide the gradients, float32 sums over all ranks, by the scale."""
    for p in policy.parameters():
        if p.grad is not None:
            utils.shard_of(p.grad).div_(policy.loss_scale)


def adapt(policy: Any, norm: float, share: float, metrics: utils.Metrics) -> None:
    """Halve or double the scale after an optimizer step whose gradient had this norm, the same on all ranks. `share`:
    what a rank adds to a number of steps, which the ranks that report add up."""
    scale = float(policy.loss_scale)
    is_finite = math.isfinite(norm)
    metrics.add("optim/loss_scale", scale)
    metrics.count("optim/overflowed_updates", 0.0 if is_finite else share)
    policy.good_steps += 1
    if not is_finite:
        policy.loss_scale.fill_(max(scale / 2, 1.0))
        policy.good_steps.zero_()
    elif policy.good_steps == STEPS_TO_DOUBLE:
        policy.loss_scale.fill_(min(scale * 2, LARGEST))
        policy.good_steps.zero_()
