"""Master weights at random places of their rounding intervals (--dither_master_weights)."""

import contextlib
import math
import os
from collections.abc import Generator

import numpy as np
import torch

import utils

SLICE = 2**18  # weights at a time: what they need stays in a core's cache


@torch.no_grad()
def dither(weight: torch.Tensor, seed: int) -> None:
    """Move each float32 weight that is a bfloat16 number to a random place among those that round to it, in place.

    A weight in the middle of its rounding interval takes hundreds of updates of the learning rate's size to reach an
    end of it. Until then nothing that computes in bfloat16 changes. Dithered, the share of weights that round to
    another number grows with the drift, from the first update on. The policy stays the same bit for bit: rounded to
    nearest, weight + offset is the same number for offsets of -32767 to 32767 units of the 16 bits that rounding drops.
    Zeros stay, and so do weights between two bfloat16 numbers (those of float32 checkpoints).
    """
    generator = np.random.PCG64(seed)
    with all_cores():
        for bits in weight.view(torch.int32).view(-1).split(SLICE):
            random_words = generator.random_raw(math.ceil(bits.numel() / 4))
            raw_offsets = random_words.view(np.int16)[: bits.numel()]
            offsets = torch.from_numpy(raw_offsets).int().clamp_(min=-32767)  # -32768 is the tie between two numbers
            is_bfloat16 = bits & 0xFFFF == 0
            is_nonzero = bits << 1 != 0
            bits += offsets * (is_bfloat16 & is_nonzero)


@contextlib.contextmanager
def all_cores() -> Generator[None]:
    """Beside a GPU, let torch use this rank's share of the cores. torchrun gives every rank one thread, with which the
    weights of 7B would take minutes. On a CPU OMP_NUM_THREADS was chosen."""
    before = torch.get_num_threads()
    share = before
    if torch.cuda.is_available():
        share = len(utils.ALL_CORES) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(max(before, share))
    try:
        yield
    finally:
        torch.set_num_threads(before)
