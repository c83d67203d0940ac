"""The RMS norm as graphs have it: from the square root back to what is normalised, and on to the result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tunedcomm.integrations._fusion_graph import Node, flat_source, is_call, val

__all__ = ["Norm", "find_norms", "norm_of"]

_aten, _prims = torch.ops.aten, torch.ops.prims
_WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True, slots=True)
class Norm:
    """y = h / sqrt(mean(h²) + eps) · weight, where h is a waited sum over ranks with what is added to it.

    Attributes:
        wait: the sum over ranks.
        h: what is normalised; the sum itself, maybe in another shape, where nothing is added.
        y: the result.
        added: the nodes of the additions, `h` last; none where nothing is added.
    """

    wait: Node
    h: Node
    y: Node
    weight: Node
    eps: float
    bias: Node | None
    residual: Node | None
    added: tuple[Node, ...]


def find_norms(graph: fx.Graph) -> dict[Node, Node]:
    """The waited sums over ranks that norms are taken of, to the norms' square roots, by which `norm_of` finds them."""
    roots = [node for node in graph.nodes if is_call(node, _aten.rsqrt.default)]
    return {norm.wait: root for root in roots if (norm := norm_of(root)) is not None}


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """True if every number of `narrow` is one of `wide`; of floating-point numbers only."""
    if not (wide.is_floating_point and narrow.is_floating_point):
        return False
    a, b = torch.finfo(wide), torch.finfo(narrow)
    return wide == narrow or (a.eps <= b.eps and a.max >= b.max and a.tiny <= b.tiny and a.bits > b.bits)


def _is_cast(node: Any) -> bool:
    return is_call(node, _prims.convert_element_type.default, _aten._to_copy.default)


def _uncast(node: Any) -> Any:
    """What a node converts to another dtype in which nothing is lost, or the node."""
    while _is_cast(node) and _holds(val(node).dtype, val(node.args[0]).dtype):
        node = node.args[0]
    return node


def _squared(rsqrt: Node) -> tuple[Node, float] | None:
    """X and eps of rsqrt(mean(x², last dimension) + eps)."""
    shifted = rsqrt.args[0]
    if not is_call(shifted, _aten.add.Scalar, _aten.add.Tensor) or not isinstance(shifted.args[1], (int, float)):  # type: ignore[union-attr]
        return None
    mean, eps = shifted.args[:2]  # type: ignore[union-attr]
    if not is_call(mean, _aten.mean.dim):
        return None
    square, dims, *keepdim = mean.args  # type: ignore[union-attr]
    if not is_call(square, _aten.pow.Tensor_Scalar, _aten.mul.Tensor):
        return None
    x, other = square.args  # type: ignore[union-attr]
    if other not in (2, 2.0) if is_call(square, _aten.pow.Tensor_Scalar) else other is not x:
        return None
    if not isinstance(x, fx.Node) or list(dims) not in ([-1], [val(x).dim() - 1]) or keepdim != [True]:  # type: ignore[arg-type]
        return None
    return x, float(eps)  # type: ignore[arg-type]


def _factor(product: Node, one: Node) -> Any:
    """The other factor of a product of two tensors; None for other nodes."""
    if not is_call(product, _aten.mul.Tensor) or one not in product.args:
        return None
    return product.args[1] if product.args[0] is one else product.args[0]


def _with_casts(node: Node, least: torch.dtype) -> Iterator[Node]:
    """The node and its conversions to dtypes that hold all numbers of `least`."""
    yield node
    yield from (user for user in node.users if _is_cast(user) and _holds(val(user).dtype, least))


def norm_of(rsqrt: Node) -> Norm | None:
    """The norm with this square root, if it is one of a sum over ranks."""
    found = _squared(rsqrt)
    if found is None:
        return None
    x, eps = found
    h = _uncast(x)
    total = _total(h)
    if total is None:
        return None
    for normal in (user for user in rsqrt.users if _factor(user, rsqrt) in (x, h)):
        for scaled in _with_casts(normal, val(h).dtype):
            for product in scaled.users:
                weight = _uncast(_factor(product, scaled))
                if not isinstance(weight, fx.Node) or tuple(val(weight).shape) != tuple(val(h).shape[-1:]):
                    continue
                for y in _with_casts(product, val(h).dtype):
                    if val(y).dtype == val(h).dtype and val(y).shape == val(h).shape:
                        wait, bias, residual, added = total
                        return Norm(wait, h, y, weight, eps, bias, residual, added)
    return None


def _is_waited(node: Any) -> bool:
    return isinstance(node, fx.Node) and is_call(flat_source(node)[0], _WAIT)


def _total(h: Node) -> tuple[Node, Node | None, Node | None, tuple[Node, ...]] | None:
    """The waited sum in `h`, the bias and the residual added to it, and the nodes that add, first to last."""
    bias: Node | None = None
    residual: Node | None = None
    added: list[Node] = []
    node = h
    while not _is_waited(node):
        terms = [term for term in node.args if isinstance(term, fx.Node)]
        if not is_call(node, _aten.add.Tensor) or node.kwargs or len(terms) != 2 or len(added) == 2:
            return None
        added.insert(0, node)
        # The residual may be another such sum: what is a sum over ranks itself comes first.
        one, other = sorted(terms, key=_is_waited, reverse=True)
        if not _is_waited(one) and (not is_call(one, _aten.add.Tensor) or len(one.users) > 1):
            one, other = other, one
        if other.meta["val"].shape == val(h).shape and residual is None:
            residual = other
        elif tuple(other.meta["val"].shape) == tuple(val(h).shape[-1:]) and bias is None:
            bias = other
        else:
            return None
        node = one
    return flat_source(node)[0], bias, residual, tuple(added)
