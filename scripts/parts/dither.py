"""Master weights at random places of their rounding intervals (--dither_master_weights)."""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

import utils

SLICE = 2**18  # weights at a time: what they need stays in a core's cache


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
    weights = weight.view(torch.int32).view(-1).numpy()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    share = math.ceil(len(utils.ALL_CORES) / ranks)
    starts = range(0, len(weights), SLICE)
    with ThreadPoolExecutor(share) as pool:
        list(pool.map(partial(dither_slice, weights, seed), starts))


def dither_slice(weights: np.ndarray, seed: int, start: int) -> None:
    """Dither SLICE weights from `start` on; `weights` has their bits, as int32."""
    bits = weights[start : start + SLICE]
    generator = np.random.PCG64(seed)
    generator.advance(start // 4)  # a random word is four offsets
    random_words = generator.random_raw(math.ceil(len(bits) / 4))
    raw_offsets = random_words.view(np.int16)[: len(bits)]
    offsets = np.maximum(raw_offsets, -32767).astype(np.int32)  # -32768 is the tie between two numbers
    is_bfloat16 = bits & 0xFFFF == 0
    is_nonzero = bits << 1 != 0
    bits += offsets * (is_bfloat16 & is_nonzero)
