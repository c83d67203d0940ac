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

from tunedcomm.fp8 import E4M3_MAX, GROUP

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
_NEAR = 1e-6
_LEAST = 1e-3  # no quantisation but of zeros depends on a bound below this


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
    """Erase nodes, given in the graph's order, that have no users any more."""
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
    raise LeftError(f"{node.name} ({node.target}) is not a product of two matrices")


@dataclass(frozen=True, slots=True)
class Norm:
    """y = h / sqrt(mean(h²) + eps) · (weight + offset), where h is a waited sum over ranks with what is added to it.

    Attributes:
        wait: the sum over ranks.
        h: the normalised tensor; the sum itself, maybe in another shape, where nothing is added. It may be wider than
            the sum: engines that add in fp32 round the new residual, and so do the kernels of their own.
        added: the nodes of the additions, `h` last.
    """

    wait: Node
    h: Node
    y: Node
    weight: Node
    offset: float
    eps: float
    bias: Node | None
    residual: Node | None
    added: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Quantisation:
    """A norm y in fp8 e4m3: out = y / scale, saturated.

    Attributes:
        kind: as `quantize` of all_reduce_rms_norm.
        out: the result.
        scale: the given scale, or the scales that are made of y.
        pow2: they are rounded up to powers of two.
        keeps_norm: y is used elsewhere, too.
    """

    kind: str
    out: Node
    scale: Node
    pow2: bool
    keeps_norm: bool


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
    total = _total(h) or _total(h, wide=True)
    if total is None:
        return None
    wait, bias, residual, added = total
    dtype = val(wait).dtype
    for normal in (user for user in rsqrt.users if _factor(user, rsqrt) in (x, h)):
        for scaled in _with_casts(normal, dtype):
            for product in scaled.users:
                weight, offset = _weight_of(_factor(product, scaled))
                if not isinstance(weight, fx.Node) or tuple(val(weight).shape) != tuple(val(h).shape[-1:]):
                    continue
                for y in _with_casts(product, dtype):
                    if val(y).dtype == dtype and val(y).shape == val(h).shape:
                        return Norm(wait, h, y, weight, offset, eps, bias, residual, added)
    return None


def _weight_of(factor: Any) -> tuple[Any, float]:
    """The weight and the number added to it."""
    node = _uncast(factor)
    if is_call(node, _aten.add.Tensor, _aten.add.Scalar) and isinstance(node.args[1], (int, float)):
        return _uncast(node.args[0]), float(node.args[1])
    return node, 0.0


def _is_waited(node: Any) -> bool:
    return isinstance(node, fx.Node) and is_call(flat_source(node)[0], _WAIT)


def _total(h: Node, *, wide: bool = False) -> tuple[Node, Node | None, Node | None, tuple[Node, ...]] | None:
    """The waited sum in `h`, the bias and the residual added to it, and the nodes that add, first to last.

    `wide`: terms are converted to a wider dtype, in which they are added.
    """
    bias: Node | None = None
    residual: Node | None = None
    added: list[Node] = []
    num_added = 0
    node = h
    while not _is_waited(node):
        terms = [term for term in node.args if isinstance(term, fx.Node)]
        if not is_call(node, _aten.add.Tensor) or node.kwargs or len(terms) != 2 or num_added == 2:
            return None
        added.insert(0, node)
        num_added += 1
        narrow = {term: _uncast(term) if wide else term for term in terms}
        # The residual may be another such sum: what is a sum over ranks itself comes first.
        one, other = sorted(terms, key=lambda term: _is_waited(narrow[term]), reverse=True)
        if not _is_waited(narrow[one]) and (not is_call(one, _aten.add.Tensor) or len(one.users) > 1):
            one, other = other, one
        term = narrow[other]
        if val(term).shape == val(h).shape and residual is None:
            residual = term
        elif tuple(val(term).shape) in (tuple(val(h).shape[-1:]), tuple(val(h).shape)) and bias is None:
            bias = term
        else:
            return None
        if narrow[one] is not one:
            added.insert(0, one)
        node = narrow[one]
    return flat_source(node)[0], bias, residual, tuple(added)


def quantisation_behind(norm: Norm) -> Quantisation | None:
    """The fp8 form of a norm, if the graph makes one; the first where it makes several."""
    for out in norm.y.graph.find_nodes(op="call_function", target=_prims.convert_element_type.default):
        if out.args[1] is not torch.float8_e4m3fn or (divided := _divided(out)) is None:
            continue
        dividend, scale = divided
        if _unflattened(dividend) is not norm.y:
            continue
        kind, pow2 = _made_of(scale, norm.y) or ("tensor" if val(scale).numel() == 1 else "", False)
        if kind:
            made = [scale] if kind != "tensor" else []
            return Quantisation(kind, out, scale, pow2, _escapes(norm.y, out, made))
    return None


def _divided(out: Node) -> tuple[Node, Node] | None:
    """Dividend and divisor of what is cut to e4m3's range and converted."""
    node, bounds = out.args[0], set()
    while is_call(node, _aten.clamp_min.default, _aten.clamp_max.default, _aten.clamp.default):
        bounds |= set(node.args[1:])  # type: ignore[union-attr]
        node = node.args[0]  # type: ignore[union-attr]
    if bounds != {-E4M3_MAX, E4M3_MAX}:
        return None
    if is_call(node, _aten.div.Tensor):
        dividend, divisor = node.args  # type: ignore[union-attr]
        return (dividend, divisor) if isinstance(divisor, fx.Node) else None  # type: ignore[return-value]
    if is_call(node, _aten.mul.Tensor):
        for one, other in (node.args, node.args[::-1]):  # type: ignore[union-attr]
            if is_call(one, _aten.reciprocal.default) and isinstance(other, fx.Node):
                return other, one.args[0]  # type: ignore[union-attr, return-value]
    return None


def _unflattened(node: Any) -> Any:
    """The node that has the same elements, in another shape or a wider dtype."""
    while isinstance(node, fx.Node) and (_uncast(node) is not node or is_call(node, *_RESHAPES)):
        node = _uncast(node) if _uncast(node) is not node else node.args[0]
    return node


def _divides_by_most(node: Node) -> bool:
    """True for a division by 448, and for a multiplication by its reciprocal."""
    value = node.args[1] if len(node.args) > 1 else None
    if is_call(node, _aten.mul.Tensor):
        return isinstance(value, float) and abs(value * E4M3_MAX - 1) < _NEAR
    return is_call(node, _aten.div.Tensor) and bool(value == E4M3_MAX)


def _is_floor(node: Node) -> bool:
    """True for a lower bound that is too small to matter."""
    value = node.args[1] if len(node.args) > 1 else None
    return is_call(node, _aten.clamp_min.default) and isinstance(value, float) and value <= _LEAST


def _made_of(scale: Any, y: Node) -> tuple[str, bool] | None:
    """Kind of scales, and True for powers of two, if they are the largest |y| over 448; None for other nodes."""
    pow2 = divided = False
    node = scale
    while isinstance(node, fx.Node):
        by_most = _divides_by_most(node)
        if is_call(node, _aten.exp2.default) and is_call(node.args[0], _aten.ceil.default):
            pow2, node = True, node.args[0].args[0]  # type: ignore[union-attr]
            if not is_call(node, _aten.log2.default):
                return None
        elif not (_is_cast(node) or is_call(node, *_RESHAPES) or _is_floor(node) or by_most):
            break
        divided = divided or by_most
        node = node.args[0]
    if is_call(node, operator.getitem) and node.args[1] == 0 and is_call(node.args[0], _aten.max.dim):
        node = node.args[0]
    if (
        not divided
        or not is_call(node, _aten.max.dim, _aten.amax.default)
        or not is_call(node.args[0], _aten.abs.default)
    ):
        return None
    sizes, dims = node.args[0], node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    width, rank = val(sizes).shape[-1], val(sizes).dim()
    if _unflattened(sizes.args[0]) is not y or [dim % rank for dim in dims] != [rank - 1]:
        return None
    if width == val(y).shape[-1] and not pow2:
        return "token", False
    return ("group128", pow2) if width == GROUP else None


def _escapes(y: Node, out: Node, made: Sequence[Node]) -> bool:
    """True if a node that is not there for `out` and the scales alone uses y."""
    inner: set[Node] = set()
    waiting = [out, *made]
    while waiting:
        for needed in waiting.pop().all_input_nodes:
            if needed is not y and needed not in inner:
                inner.add(needed)
                waiting.append(needed)
    waiting, seen = [y], {y}
    while waiting:
        for user in waiting.pop().users:
            if user is out or user in made or user in seen:
                continue
            if user not in inner:
                return True
            seen.add(user)
            waiting.append(user)
    return False
