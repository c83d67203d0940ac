"""Read graphs for the fusion pass: flat operators, products and RMS norms; and insert nodes into graphs.

*Flat* operators keep the order of a tensor's elements, so a matrix of rows stays the same matrix of rows: reshapes,
contiguous copies, and a split that is joined again along another dimension if all dimensions before the two are 1.
DTensor moves dimension 1 of a [1, S, H] activation by such operators.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

Node: TypeAlias = fx.Node
_aten, _prims = torch.ops.aten, torch.ops.prims
_RESHAPES = (
    _aten.reshape.default,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.unsqueeze.default,
    _aten.alias.default,
)
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_SPLITS = (_aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default)
_MAX_HOISTED = 8


class LeftError(Exception):
    """The pattern is not fused; the text says why. Raised by functions that read a graph or judge a pattern.

    Attributes:
        problem: what was asked of the database, in words; "" where it was not asked.
    """

    def __init__(self, why: str, problem: str = "") -> None:
        super().__init__(why)
        self.problem = problem


def is_call(node: Any, *targets: Any) -> bool:
    """True for a call of one of these operators."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def val(node: Node) -> torch.Tensor:
    """The fake tensor that stands for the node's result."""
    found = node.meta.get("val")
    if not isinstance(found, torch.Tensor):
        raise LeftError(f"nothing is known of the tensor {node.name}")
    return found


def static(*sizes: Any) -> bool:
    """True if all sizes are numbers."""
    return all(isinstance(size, int) for size in sizes)


def _dim(node: Node, index: int, rank: int) -> int:
    """A dimension among the arguments of `split` or `cat`."""
    given = node.args[index] if len(node.args) > index else node.kwargs.get("dim", 0)
    return int(given) % rank  # type: ignore[arg-type]


def _is_flat(node: Node) -> bool:
    """True for reshapes, contiguous copies, and waiting once more."""
    if is_call(node, _WAIT):
        begun = getattr(node.args[0], "target", None)
        return begun is _WAIT or getattr(begun, "namespace", "") == "aten"
    return is_call(node, *_RESHAPES) or (is_call(node, _aten.clone.default) and val(node).is_contiguous())


def _joined(split: Node) -> Node | None:
    """The `cat` that puts the parts of `split` together again in order, keeping all elements in theirs; or None."""
    if not is_call(split, *_SPLITS) or not isinstance(split.args[0], fx.Node):
        return None
    parts = sorted(split.users, key=lambda part: part.args[1] if is_call(part, operator.getitem) else -1)  # type: ignore[arg-type, return-value]
    pieces = split.meta.get("val")
    if not parts or not isinstance(pieces, (list, tuple)) or len(pieces) != len(parts):
        return None
    if not all(is_call(part, operator.getitem) and len(part.users) == 1 for part in parts):
        return None
    cat = next(iter(parts[0].users))
    if not is_call(cat, _aten.cat.default) or cat.args[0] != parts:
        return None
    source, piece = val(split.args[0]), pieces[0]
    before = *source.shape[: _dim(split, 2, source.dim())], *piece.shape[: _dim(cat, 1, piece.dim())]
    return cat if static(*before) and set(before) <= {1} else None


def _flat_input(node: Node) -> tuple[Node | None, list[Node]]:
    """The input of a flat node, and the nodes between, itself last; (None, []) for other nodes."""
    source = node.args[0] if node.args else None
    if _is_flat(node) and isinstance(source, fx.Node):
        return source, [node]
    if is_call(node, _aten.cat.default) and isinstance(source, (list, tuple)) and is_call(source[0], operator.getitem):
        split = source[0].args[0]
        if isinstance(split, fx.Node) and _joined(split) is node:
            return split.args[0], [split, *source, node]  # type: ignore[return-value]
    return None, []


def flat_source(node: Node) -> tuple[Node, list[Node]]:
    """The first node of which `node` has the elements in order, and all nodes from behind it up to `node`."""
    between: list[Node] = []
    while True:
        source, chain = _flat_input(node)
        if source is None:
            return node, between
        node, between = source, chain + between


def flat_users(node: Node) -> list[Node]:
    """The node and all others that have its elements in order, and the nodes between them."""
    found, waiting = [node], [node]
    while waiting:
        for user in list(waiting.pop().users):
            cat = _joined(user)
            if cat is not None:
                found += [user, *user.users, cat]
                waiting.append(cat)
            elif _is_flat(user):
                found.append(user)
                waiting.append(user)
    return found


def behind(node: Node, anchor: Node) -> list[Node]:
    """The nodes to move before `anchor` so that `node`, e.g. a transposed weight, is computed by then; in order."""
    moved: list[Node] = []

    def collect(each: Node) -> None:
        if each in moved or each < anchor:
            return
        target = each.target
        movable = isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")
        if not movable or target._schema.is_mutable or each is anchor or len(moved) >= _MAX_HOISTED:  # type: ignore[union-attr]
            raise LeftError(f"{node.name} is computed after {anchor.name}")
        for needed in each.all_input_nodes:
            collect(needed)
        moved.append(each)

    collect(node)
    return moved


def hoist(node: Node, anchor: Node) -> None:
    """Move what `behind` finds."""
    for each in behind(node, anchor):
        anchor.prepend(each)


def check_sizes(shape: Sequence[Any]) -> None:
    """Raise LeftError for shapes that `reshaped` does not make."""
    if sum(not isinstance(size, int) for size in shape) > 1:
        raise LeftError(f"several sizes of {tuple(shape)} are symbolic")


def call(graph: fx.Graph, target: Any, arguments: Sequence[Any]) -> Node:
    """A call where the graph's insertion point is, with the fake result that compilers want to know."""
    node = graph.call_function(target, tuple(arguments))
    fakes = fx.node.map_arg(tuple(arguments), lambda each: each.meta["val"])
    node.meta["val"] = target(*fakes)
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "tunedcomm":
        # Inductor keeps the strides of operands that are noted here.
        node.meta["eager_input_vals"] = (fakes, {})
    return node


def reshaped(graph: fx.Graph, node: Node, shape: Sequence[Any]) -> Node:
    """The node in another shape, at most one of whose sizes is symbolic."""
    if tuple(val(node).shape) == tuple(shape):
        return node
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    return call(graph, _aten.reshape.default, (node, sizes))


def erase_unused(graph: fx.Graph, nodes: Sequence[Node]) -> None:
    """Erase those of the nodes, given in the graph's order, that have no users any more."""
    for node in reversed(nodes):
        if not node.users:
            graph.erase_node(node)


def product_operands(node: Node) -> tuple[Node, Node, Node | None]:
    """a, b and the bias of `mm` or `addmm`."""
    if is_call(node, _aten.mm.default) and not node.kwargs:
        return node.args[0], node.args[1], None  # type: ignore[return-value]
    if is_call(node, _aten.addmm.default):
        if any(value != 1 for value in node.kwargs.values()):
            raise LeftError(f"{node.name} scales its summands")
        return node.args[1], node.args[2], node.args[0]  # type: ignore[return-value]
    raise LeftError(f"{node.name} ({node.target}) is no product of two matrices")


@dataclass(frozen=True, slots=True)
class Norm:
    """y = h / sqrt(mean(h²) + eps) · weight, where h is a waited sum over ranks with what is added to it.

    Attributes:
        wait: the sum over ranks.
        h: the normalised tensor; the sum itself, maybe in another shape, where nothing is added.
        added: the nodes of the additions, `h` last.
    """

    wait: Node
    h: Node
    y: Node
    weight: Node
    eps: float
    bias: Node | None
    residual: Node | None
    added: tuple[Node, ...]


def norm_behind(collective: Node) -> Norm | None:
    """The last norm of what a collective sums."""
    roots = collective.graph.find_nodes(op="call_function", target=_aten.rsqrt.default)
    norms = [norm for root in roots if (norm := _norm_of(root)) is not None and norm.wait.args[0] is collective]
    return norms[-1] if norms else None


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """True if every number of `narrow` is one of `wide`; of floating-point numbers only."""
    if not (wide.is_floating_point and narrow.is_floating_point):
        return False
    a, b = torch.finfo(wide), torch.finfo(narrow)
    return wide == narrow or (a.eps <= b.eps and a.max >= b.max and a.tiny <= b.tiny and a.bits > b.bits)


def _is_cast(node: Any) -> bool:
    return is_call(node, _prims.convert_element_type.default, _aten._to_copy.default)


def _uncast(node: Any) -> Any:
    """The input of lossless conversions that end at a node, or the node."""
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


def _norm_of(rsqrt: Node) -> Norm | None:
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
