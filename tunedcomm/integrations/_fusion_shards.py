"""Which sizes of local tensors are the same on every rank, as far as that can be known where a graph is compiled.

A graph has local tensors. Ranks must agree on the rows of what is gathered or reduced, but not on a product's inner
dimension in front of a sum, nor on its columns behind a gather: 127 features over two ranks are 64 and 63, and nothing
in a rank's own graph tells 64 of 127 from 64 of 128. Yet a fused op needs the same problem on every rank.

What all ranks have in common are the global shapes and placements of the parameters that are DTensors. The tracing
context holds them while the forward graph is compiled, for which Inductor asks the pass, if only for its identity; they
are kept for the backward graph, which has the same context. A size is known where some dimension of them is split over
the group into equal parts of that size, and none can be split into parts of that size that are not equal.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tunedcomm.integrations._fusion_graph import LeftError

__all__ = ["Shards"]


@dataclass(frozen=True, slots=True)
class Shards:
    """Sizes of the parts into which a group splits what is compiled now; the same on every rank.

    Attributes:
        even: of equal parts.
        uneven: of parts of dimensions that the group does not split into equal ones.
    """

    even: frozenset[int] = frozenset()
    uneven: frozenset[int] = frozenset()

    @classmethod
    def of(cls, group: str) -> Shards:
        """What the parameters of the model that is compiled now say of a group, by its name."""
        context: Any = torch._guards.TracingContext.try_get()
        if context is None:
            return cls()
        kept = _kept.setdefault(context, {})
        tensors = list(getattr(context, "tensor_to_context", ()))
        if tensors:
            kept[group] = cls._among(tensors, group)
        return kept.get(group, cls())

    @classmethod
    def _among(cls, tensors: list[torch.Tensor], group: str) -> Shards:
        even: set[int] = set()
        uneven: set[int] = set()
        for spec in _specs(tensors):
            names = _group_names(spec.mesh)
            if group not in names:
                continue
            own = names.index(group)
            for dim, size in enumerate(spec.shape):
                splits = [i for i, placement in enumerate(spec.placements) if _dim_of(placement) == dim]
                ways = [spec.mesh.size(i) for i in (splits if own in splits else [*splits, own])]
                sizes = _parts(size, ways)
                if size % math.prod(ways):
                    uneven |= sizes
                elif own in splits:
                    even |= sizes
        return cls(frozenset(even), frozenset(uneven))

    def check(self, what: str, size: Any) -> None:
        """Raise LeftError for a size that ranks may differ in.

        Args:
            what: it is the size of, in words.
            size: of this rank's tensor.
        """
        if isinstance(size, int) and size in self.even and size not in self.uneven:
            return
        raise LeftError(
            f"ranks may differ in {what}, {size}: it is not known from parameters that are DTensors split evenly; "
            "fusion_pass(even_shards=True) says that they do not"
        )


# Tracing context to what was known of groups while the forward graph was compiled.
_kept: weakref.WeakKeyDictionary[Any, dict[str, Shards]] = weakref.WeakKeyDictionary()


def _specs(tensors: list[torch.Tensor]) -> Iterator[Any]:
    """Of the DTensors among the parameters."""
    for tensor in tensors:
        if isinstance(tensor, DTensor) and isinstance(tensor, torch.nn.Parameter):
            yield tensor._spec


def _group_names(mesh: Any) -> list[str]:
    """Names of the groups of a mesh's dimensions; none where this rank is not in it."""
    if mesh.get_coordinate() is None:
        return []
    return [mesh.get_group(dim).group_name for dim in range(mesh.ndim)]


def _dim_of(placement: Any) -> int | None:
    """The dimension that a placement splits."""
    return None if placement.is_replicate() or placement.is_partial() else getattr(placement, "dim", None)


def _parts(size: int, ways: list[int]) -> set[int]:
    """Sizes of the parts, split by one dimension of a mesh after another as torch.chunk does."""
    sizes = {int(size)}
    for count in ways:
        longest = {part: -(-part // count) for part in sizes}
        sizes = {max(0, min(long, part - i * long)) for part, long in longest.items() for i in range(count)}
    return sizes
