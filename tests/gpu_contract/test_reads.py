"""What the host asks of the GPU: each read waits for all that was queued before it."""

import collections

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
import utils
from tests.test_learner import make_rollouts

# Operators whose result the host needs before it can go on: a number, or how long the result is
READS = "_local_scalar_dense nonzero masked_select _unique2 unique_dim unique_consecutive is_nonzero".split()


class Reads(TorchDispatchMode):
    """Counts what would wait for a GPU, whatever the device is; lists and copies to the host are `Lists`'s to count."""

    def __init__(self):
        super().__init__()
        self.found = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        indices = [i for x in args if isinstance(x, (list, tuple)) for i in x if isinstance(i, torch.Tensor)]
        with_mask = name.startswith("index") and any(i.dtype == torch.bool for i in indices)
        self.found[name] += name in READS or with_mask
        return func(*args, **(kwargs or {}))


class Lists(TorchFunctionMode):
    """Counts tensors that are read as a list or an array, which no operator is called for on a CPU."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        self.found[name] += name in ("tolist", "numpy", "cpu", "__array__")
        return func(*args, **(kwargs or {}))


FLAGS = ["--entropy_coef 0.01 --loss_denominator sequence --num_epochs 2 --beta 0.1"]
FLAGS += ["--loss_fn gspo --beta 0.1 --rho_mask_sequence_level --rho_mask_upper_bound 2"]


@pytest.mark.parametrize("flags", FLAGS)
def test_an_update_reads_little(tiny_models, world, monkeypatch, flags):
    """None for a micro-batch; the norm for an optimizer step, the gap (of all tokens, and of each prompt) and the
    metrics for all of them."""
    line = f"--model_name_or_path {tiny_models()} --model_dtype float32 --max_logprob_gap 0 --total_episodes 64 {flags}"
    args = utils.parse_args(grpo.Args, line.split())
    learner = grpo.load_learner(args, world)
    rollouts = make_rollouts(groups=5)
    monkeypatch.setattr(utils, "all_reduce", lambda values, world, op=None: [float(x) for x in values])  # on the host

    def update(count):
        batches = [grpo.make_batch([[rollouts[3 * i : 3 * i + 3]]], world.device) for i in range(count)]
        metrics, reads = utils.Metrics(), Reads()
        with Lists(reads.found), reads:
            grpo.update(learner, [batches], args, world, metrics)
            metrics.reduce(world)
        return +reads.found

    update(1)  # Adam's state comes into being
    want = {"_local_scalar_dense": args.num_epochs, "tolist": 3}
    assert update(1) == want and update(5) == want
