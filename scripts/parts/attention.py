"""Attention over packs that not every run has: tokens that several ranks share, and sliding windows.

Ulysses (--sequence_parallel_size, arXiv:2309.14509): each rank of a group of neighbours has a part of a pack's columns
(tokens). For attention, all-to-alls give each rank all tokens of a part of the heads, and give the result back.

Windows (Olmo 3, Gemma 3, Mistral): a token attends to itself and to the `window` - 1 tokens before it in its own
sequence. Positions count, not places in the pack: a response follows its prompt, whose one copy may be far away.
"""

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

import utils

# --- Ulysses

T = TypeVar("T")


def group_of_neighbours(size: int) -> dist.ProcessGroup:
    """The group of `size` neighbouring ranks that this rank belongs to. Policy and reference share it. All ranks."""
    return _groups(dist.group.WORLD, size)


@functools.cache
def _groups(_ranks: object, size: int) -> dist.ProcessGroup:
    own_group, _ = dist.new_subgroups(size)
    return own_group


def share(thing: T, group: dist.ProcessGroup) -> list[T]:
    """The object of each rank of the group; this rank's own object is not copied. All ranks of the group."""
    everyone = [thing] * group.size()
    dist.all_gather_object(everyone, thing, group)
    everyone[group.rank()] = thing
    return everyone


def columns(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's columns of (B, T). Every rank gets the same number: x is padded with zeros."""
    ranks = group.size()
    length = x.shape[1]
    n = math.ceil(length / ranks)
    padded = pad(x, (0, n * ranks - length))
    return padded.split(n, 1)[group.rank()]


def all_columns(own: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
    """(B, T) from the columns of all ranks. Every rank computes the same loss from it: so each rank takes the gradient
    of its own columns only, and gradients are not added up."""
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own.detach(), group)
    parts[group.rank()] = own
    joined = torch.cat(parts, 1)
    return joined[:, :length].clone()  # FSDP's forward must not return a view


def exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all: cut dimension 1 into a part for each rank of the group, and concatenate the parts that arrive along
    dimension 2. So (1, heads, own tokens, D) becomes (1, own heads, all tokens, D), and (1, all tokens, own heads, D)
    becomes (1, own tokens, heads, D). Its gradient goes the other way."""
    from torch.distributed._functional_collectives import all_to_all_single

    outgoing = torch.stack(x.chunk(group.size(), 1))
    incoming = all_to_all_single(outgoing, None, None, group)
    return torch.cat(incoming.unbind(), 2)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    layout: utils.Layout | None,
    flex: bool | None,
    group: dist.ProcessGroup,
    sliding_window: int | None,
) -> Tensor:
    """utils.pack_attention of (1, heads, T, D) queries of this rank's T tokens. Returns (1, T, heads, D). Key-value
    heads are repeated where the group has more ranks."""
    from transformers.integrations.sdpa_attention import repeat_kv

    ranks = group.size()
    repeats = ranks // math.gcd(key.shape[1], ranks)
    key = repeat_kv(key, repeats)
    value = repeat_kv(value, repeats)
    query = exchange(query, group)
    key = exchange(key, group)
    value = exchange(value, group)

    length = query.shape[2]
    tokens = length if layout is None else layout.length
    padding = length - tokens  # at the end
    query = query[:, :, :tokens]
    key = key[:, :, :tokens]
    value = value[:, :, :tokens]
    own_heads: Any = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1])
    options: dict[str, Any] = {"scaling": scaling, "layout": layout, "flex": flex, "sliding_window": sliding_window}
    mixed, _ = utils.pack_attention(own_heads, query, key, value, None, **options)
    padded = pad(mixed, (0, 0, 0, 0, 0, padding))
    return exchange(padded, group)


# --- Windows


class WindowLayout(utils.Layout):
    """The layout of a pack for the layers with one window."""

    def __init__(self, layout: utils.Layout, window: int):
        super().__init__(layout.pieces, layout.device)
        self.window = window

    @functools.cached_property
    def masks(self) -> dict[tuple[int, ...], Tensor]:
        """As in the base class; those of single sequences too, where they are longer than the window."""
        masks = {}
        for (shared, segments), chunks in zip(self.pieces, self.chunks, strict=True):
            if len(chunks) == 1 and len(segments) > 1:
                masks[shared, *segments] = self.mask_of_piece(shared, segments)
                continue
            if chunks[0] > self.window:
                masks[0, chunks[0]] = self.band(0, chunks[0])
            for n in chunks[1:]:
                masks[shared, n] = self.band(shared, n)
        return masks

    def band(self, shared: int, n: int) -> Tensor:
        """The mask (n, shared + n) of n tokens after `shared` ones of the same sequence."""
        first = shared - self.window + 1  # the position that the first of the n tokens sees first
        return torch.ones(n, shared + n, dtype=torch.bool).tril(shared).triu(first)

    def mask_of_piece(self, shared: int, segments: list[int]) -> Tensor:
        """The mask of all tokens of a piece."""
        ids = torch.tensor(utils.segment_ids(shared, segments))
        places = torch.tensor(positions(shared, segments))
        visible = (ids == 0) | (ids == ids[:, None])
        near = places[:, None] - places < self.window
        return (visible & near).tril()

    def attends(self) -> Callable:
        """As in the base class, and near enough."""
        in_sequence = super().attends()
        places: list[int] = []
        for shared, segments in self.pieces:
            places += positions(shared, segments)
        position = utils.send(torch.tensor(places), self.device)
        first = position - self.window + 1  # a tensor: a number would be compiled into the kernels, which need one more

        def attends(batch, head, q, k):
            return in_sequence(batch, head, q, k) & (position[k] >= first[q])

        return attends


def positions(shared: int, segments: list[int]) -> list[int]:
    """The position of each token of a piece in its own sequence: each segment continues the shared tokens."""
    places = [*range(shared)]
    for n in segments:
        places += range(shared, shared + n)
    return places


def narrow(layout: utils.Layout | None, window: int, query: Tensor) -> utils.Layout | None:
    """The layout of (B, heads, T, D) queries for a layer with this window; the same where no sequence is longer.
    Without a layout each of the B rows is one sequence, padded at its end."""
    if layout is None:
        length = query.shape[2]
        return None if length <= window else row(length, window, query.device)
    longest = max(shared + max(segments) for shared, segments in layout.pieces)
    if longest <= window:
        return layout
    if window not in layout.windows:
        layout.windows[window] = WindowLayout(layout, window)
    return layout.windows[window]


@functools.lru_cache(maxsize=8)  # the layers of a model ask for the same one
def row(length: int, window: int, device: torch.device) -> WindowLayout:
    """The layout of a row with one sequence."""
    return WindowLayout(utils.Layout([(0, [length])], device), window)
