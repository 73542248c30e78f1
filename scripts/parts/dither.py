"""Master weights at random places of their rounding intervals (--dither_master_weights)."""

import math
import os
from concurrent.futures import ThreadPoolExecutor

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

    Slices take this rank's share of the cores, in Python's threads: torch's own wait for each other after every
    operation, which takes minutes where an engine starts on the same cores.
    """
    slices = weight.view(torch.int32).view(-1).numpy()
    starts = range(0, len(slices), SLICE)

    def dither_slice(start: int) -> None:
        generator = np.random.PCG64(seed).advance(start // 4)  # a random word is four offsets
        dither_bits(slices[start : start + SLICE], generator)

    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(dither_slice, starts))


def dither_bits(bits: np.ndarray, generator: np.random.PCG64) -> None:
    """Add a random offset to each of these float32 weights, given as int32, that is a bfloat16 number and not 0."""
    random_words = generator.random_raw(math.ceil(len(bits) / 4))
    raw_offsets = random_words.view(np.int16)[: len(bits)]
    offsets = np.maximum(raw_offsets, -32767).astype(np.int32)  # -32768 is the tie between two numbers
    is_bfloat16 = bits & 0xFFFF == 0
    is_nonzero = bits << 1 != 0
    bits += offsets * (is_bfloat16 & is_nonzero)


def cores() -> int:
    """This rank's share of the cores beside a GPU. On a CPU OMP_NUM_THREADS was chosen."""
    if torch.cuda.is_available():
        return max(1, len(utils.ALL_CORES) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    return torch.get_num_threads()
