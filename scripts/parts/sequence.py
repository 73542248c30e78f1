"""Ulysses sequence parallelism: neighbouring ranks share the tokens of their packs (--sequence_parallel_size).

Each rank of a group has a part of a pack's columns (tokens). For attention, all-to-alls give each rank all tokens of a
part of the heads. Afterwards they give the result back (arXiv:2309.14509). Only such runs import this.
"""

import functools
import math
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

import utils

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
