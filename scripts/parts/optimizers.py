"""Optimizers that not every run has: moments in host memory, and float16.

Adam's moments in host memory (--offload optimizer) visit the GPU a weight at a time. Updates are those of torch's
AdamW, bit for bit. A step moves 8 bytes of a trained weight each way, of each rank's shards alone.

A dynamic scale S of the loss keeps gradients in the range of float16 (--model_dtype float16), which holds nothing
nearer to 0 than 6e-8 (arXiv:2510.26788). The backward starts from S times the gradient of each logprob and entropy, and
what the ranks have added up in float32 is divided by S again (arXiv:1710.03740, section 3.2). S is a power of 2: both
are exact. A gradient that is not finite skips its optimizer step and halves S; STEPS_TO_DOUBLE steps in a row without
one double it. S is a buffer of the policy, so that checkpoints have it.
"""

import math
from typing import Any

import torch
from torch import Tensor

import utils

# --- Moments in host memory

MOMENTS = ("exp_avg", "exp_avg_sq")


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose moments are in host memory (pinned if there is a GPU), but for those of the weight it updates."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        groups = self.param_groups
        try:
            for group in groups:
                for weight in group["params"]:
                    if weight.grad is not None:
                        self.param_groups = [group | {"params": [weight]}]
                        self._step_of(weight)
        finally:
            self.param_groups = groups
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a checkpoint reads host memory next

    def _step_of(self, weight: Tensor) -> None:
        """The update of the one weight that param_groups have."""
        device = utils.shard_of(weight).device
        moments = self._moments(weight)
        hosts = [moment.data for moment in moments]
        for moment, host in zip(moments, hosts, strict=True):
            moment.data = host.to(device, non_blocking=True, copy=True)
        super().step()
        moments = self._moments(weight)  # which the first step makes
        hosts = hosts or [host_memory(moment) for moment in moments]
        for moment, host in zip(moments, hosts, strict=True):
            host.copy_(moment.data, non_blocking=True)
            moment.data = host

    def _moments(self, weight: Tensor) -> list[Tensor]:
        """This rank's shards of a weight's moments; none before the first step."""
        state = self.state[weight]
        return [utils.shard_of(state[name]) for name in MOMENTS if name in state]

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any) -> None:
        """As AdamW's, which puts the moments beside the weights."""
        super().load_state_dict(state_dict)
        for weight in list(self.state):
            for moment in self._moments(weight):
                host = host_memory(moment)
                host.copy_(moment.data)
                moment.data = host


def host_memory(like: Tensor) -> Tensor:
    """Room for a tensor in host memory."""
    return torch.empty_like(like, device="cpu", pin_memory=torch.cuda.is_available())


# --- float16

START = 2.0**16
LARGEST = 2.0**24
STEPS_TO_DOUBLE = 1000
BUFFERS = ("loss_scale", "good_steps")  # S, and the steps since it changed


def add(policy: torch.nn.Module) -> None:
    """Scale all gradients of a policy whose forward gives (logprobs, entropy). Call it before FSDP has the policy."""
    policy.register_buffer("loss_scale", torch.tensor(START))
    policy.register_buffer("good_steps", torch.tensor(0.0))
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
