"""Adam's moments in host memory (--offload optimizer). In an optimizer step they visit the GPU, a weight at a time.

Updates are those of torch's AdamW, bit for bit. A step moves 8 bytes of a trained weight to the GPU and as many back,
of each rank's shards alone: with 32 billion weights on 8 GPUs 33 GB each way.
"""

from typing import Any

import torch
from torch import Tensor

import utils

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
