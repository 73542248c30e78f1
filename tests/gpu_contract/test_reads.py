"""What the host asks of the GPU: each read waits for all that was queued before it."""

import collections
import dataclasses
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
import utils
from scripts.parts import attention

# Operators whose result the host needs before it can go on: a number, or how long the result is
READS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "is_nonzero",
)


class Reads(TorchDispatchMode):
    """Counts what would wait for a GPU, whatever the device is; lists and copies to the host are `Lists`'s to count."""

    def __init__(self):
        super().__init__()
        self.found = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        indices = [i for x in args if isinstance(x, (list, tuple)) for i in x if isinstance(i, torch.Tensor)]
        with_mask = name.startswith("index") and any(i.dtype == torch.bool for i in indices)
        if name in READS or with_mask:
            self.found[f"{name} with a mask" if with_mask else name] += 1
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


def reads_of(work):
    reads = Reads()
    with Lists(reads.found), reads:
        work()
    return +reads.found


FLAGS = {
    "default": "",
    "entropy, sequence mean": "--entropy_coef 0.01 --loss_denominator sequence",
    "gspo, reference": "--loss_fn gspo --beta 0.1 --rho_mask_sequence_level --rho_mask_upper_bound 2",
    "two epochs": "--num_epochs 2 --beta 0.1",
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_an_update_reads_little(tiny_models, world, monkeypatch, flags):
    """None for a micro-batch; the norm for an optimizer step, the gap (of all tokens, and of each prompt) and the
    metrics for all of them."""
    line = f"--model_name_or_path {tiny_models()} --model_dtype float32 --max_logprob_gap 0 --total_episodes 64 {flags}"
    args = utils.parse_args(grpo.Args, line.split())
    learner = grpo.load_learner(args, world)
    monkeypatch.setattr(utils, "all_reduce", lambda values, world, op=None: [float(x) for x in values])  # on the host
    prompt = utils.Prompt(0, (5, 6, 7), "", (), ())

    def rollout(i):
        ids = [11 + i, 12, 13]
        return utils.Rollout(prompt, i // 2, i % 2, ids, [-2.0] * 3, [True] * 3, [0] * 3, "stop", advantage=1.0 - i % 2)

    def update(count):
        batches = [grpo.make_batch([[[rollout(2 * i), rollout(2 * i + 1)]]], world.device) for i in range(count)]
        metrics = utils.Metrics()

        def work():
            grpo.update(learner, [batches], args, world, metrics)
            metrics.reduce(world)

        return reads_of(work)

    update(1)  # Adam's state comes into being
    want = {"_local_scalar_dense": args.num_epochs, "tolist": 3}
    assert update(1) == want and update(5) == want


def test_the_counter_sees_each_kind_of_read():
    x, mask = torch.arange(4.0), torch.tensor([True, False, True, True])

    def work():
        float(x.sum()), int(mask.sum()), bool(mask.any()), x[mask], x.tolist(), mask.nonzero(), torch.unique(x)
        x[torch.tensor([0, 2])], x.masked_fill(mask, 0.0), torch.where(mask, x, 0.0)  # and no others

    found = reads_of(work)
    assert found.total() == 7 and found["index with a mask"] == 1 and found["_local_scalar_dense"] == 3, found


class Copies(TorchFunctionMode):
    """Pretends that cuda:0 is there, in the memory of the host, and counts the copies to it for which the host waits:
    all but those that are non_blocking and come from pinned memory."""

    GPU = torch.device("cuda", 0)

    def __init__(self):
        super().__init__()
        self.found, self.pinned = collections.Counter(), set()

    def __torch_function__(self, func, types, args: Any = (), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name == "pin_memory":
            self.pinned.add(args[0].data_ptr())
            return args[0]
        if name == "create_block_mask":
            return args
        asked = kwargs.get("device") or next((x for x in args if isinstance(x, torch.device)), None)
        if asked is not None and torch.device(asked).type == "cuda":
            waits = name == "to" and not (kwargs.get("non_blocking") and args[0].data_ptr() in self.pinned)
            self.found[name] += waits or name in ("tensor", "as_tensor", "cuda")
            args = [torch.device("cpu") if x is asked else x for x in args]
            if "device" in kwargs:
                kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


@pytest.mark.parametrize("flags", ["--num_epochs 2 --beta 0.1", "--kl_in_reward --beta 0.1"])
def test_no_copy_to_the_gpu_waits(tiny_models, world, monkeypatch, flags):
    """Nor do the masks of a pack, which a CPU does not make."""
    line = f"--model_name_or_path {tiny_models()} --model_dtype float32 --max_logprob_gap 0 --total_episodes 64 {flags}"
    args = utils.parse_args(grpo.Args, line.split())
    learner = grpo.load_learner(args, world)
    monkeypatch.setattr("torch.nn.attention.flex_attention.create_block_mask", lambda attends, *_: attends(0, 0, 1, 1))
    prompt = utils.Prompt(0, (5, 6, 7), "", (), ())
    group = []
    for i in (0, 1):
        group.append(utils.Rollout(prompt, 0, i, [11 + i, 12], [-2.0] * 2, [True] * 2, [0] * 2, advantage=1.0 - i))
    gpu = dataclasses.replace(world, device=Copies.GPU)
    with Copies() as copies:
        batches = [grpo.make_batch([[group]], gpu.device) for _ in range(3)]
        assert copies.pinned
        assert bool(batches[0].layout.block_mask)
        grpo.update(learner, [batches], args, gpu, utils.Metrics())
        assert bool(attention.narrow(batches[0].layout, 3, torch.empty(0)).block_mask)  # of a layer with a window
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        grpo.idle_batch()
    assert not +copies.found


def test_the_pretended_gpu_sees_each_kind_of_copy():
    x = torch.arange(3)
    with Copies() as copies:
        torch.tensor([1], device=Copies.GPU), x.to(Copies.GPU), x.to(device=Copies.GPU, non_blocking=True)
        x.pin_memory().to(Copies.GPU), torch.zeros(3, device=Copies.GPU)
        x.pin_memory().to(Copies.GPU, non_blocking=True)  # these two do not
    assert +copies.found == {"tensor": 1, "to": 3}
