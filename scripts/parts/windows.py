"""Sliding windows inside packs: layers that attend to the last tokens of a sequence only (Olmo 3, Gemma 3, Mistral).

A token attends to itself and to the `window` - 1 tokens before it in its own sequence, as in transformers: its position
minus that of the key is below the window. Positions count, not places in the pack: a response follows its prompt, whose
one copy may be many tokens away. transformers names the window of each layer when it calls the attention. Only models
with such layers import this.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

import utils


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
