"""The patterns of the fusion pass, each with the check that the graph allows it and the nodes that take its place."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from tunedcomm.fp8 import Wire
from tunedcomm.integrations.fusion.match import (
    LeftError,
    Node,
    Norm,
    Quantisation,
    behind,
    call,
    check_sizes,
    erase_unused,
    flat_source,
    flat_users,
    hoist,
    is_call,
    norm_behind,
    product_operands,
    quantisation_behind,
    reshaped,
    val,
)
from tunedcomm.integrations.fusion.policy import Payoff, Policy

_ops: Any = torch.ops.tunedcomm
_aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_REORDERING = (_aten.split.Tensor, _aten.split_with_sizes.default, _aten.permute.default)


def _waited(collective: Node) -> Node:
    """The node that waits for it."""
    users = list(collective.users)
    if len(users) != 1 or not is_call(users[0], _WAIT):
        raise LeftError("its result is not waited for once")
    return users[0]


@dataclass(frozen=True, slots=True)
class Gather:
    """all_gather → wait → products: `ag_gemm`, of a list where there are several.

    Attributes:
        products: (node, b, bias or None), in the graph's order.
        flat: nodes that have what was gathered, the waiting one first.
        kept: somebody else uses what was gathered, too.
    """

    collective: Node
    wait: Node
    products: tuple[tuple[Node, Node, Node | None], ...]
    flat: tuple[Node, ...]
    kept: bool
    op = "ag_gemm"

    def judge(self, policy: Policy) -> Payoff:
        """By the widest b, which is the one that is fused."""
        several = len(self.products) > 1
        b = max((b for _, b, _ in self.products), key=lambda b: val(b).shape[1])
        operator = "ag_gemm_gathered" if several or self.kept else "ag_gemm"
        rank_sizes = {f"the columns of {b.name}": val(b).shape[1] for _, b, _ in self.products}
        return policy.judge(operator, (self.collective.args[0], b, None, None), (None,), rank_sizes)

    def rewrite(self, graph: fx.Graph, policy: Policy) -> None:
        """Put the fused op where the gather was waited for."""
        for _, b, _ in self.products:
            hoist(b, self.wait)
        with graph.inserting_before(self.wait):
            shard: Any = self.collective.args[0]
            a = reshaped(graph, shard, (-1, val(shard).shape[-1])) if val(shard).dim() != 2 else shard
            bs = [b for _, b, _ in self.products]
            found, gathered = self._fused(graph, policy, a, bs)
            if self.kept:
                self.wait.replace_all_uses_with(reshaped(graph, gathered, val(self.wait).shape))
        for (node, _, bias), product in zip(self.products, found, strict=True):
            with graph.inserting_before(node):
                sum_ = product if bias is None else call(graph, _aten.add.Tensor, (product, bias))
                node.replace_all_uses_with(sum_)
        erase_unused(graph, [self.collective, *self.flat, *(node for node, _, _ in self.products)])

    def _fused(self, graph: fx.Graph, policy: Policy, a: Node, bs: list[Node]) -> tuple[list[Node], Any]:
        """The products, and what was gathered where that is wanted."""
        if len(bs) > 1:
            made = call(graph, _ops.ag_gemm_list.default, (a, bs, None, [], None, *policy.settings))
            parts = [call(graph, operator.getitem, (made, index)) for index in range(len(bs) + self.kept)]
            return parts[: len(bs)], parts[-1]
        if self.kept:
            made = call(graph, _ops.ag_gemm_gathered.default, (a, bs[0], None, None, None, *policy.settings))
            return [call(graph, operator.getitem, (made, 0))], call(graph, operator.getitem, (made, 1))
        return [call(graph, _ops.ag_gemm.default, (a, bs[0], None, None, None, *policy.settings))], None


def gathered_by(collective: Node) -> Gather:
    """The pattern that begins at an all_gather."""
    wait = _waited(collective)
    shard: Any = collective.args[0]
    if val(shard).dim() < 2:
        raise LeftError("what is gathered has no rows")
    check_sizes(val(wait).shape)
    flat = sorted(flat_users(wait))
    width = val(shard).shape[-1]
    products, seen, reason = [], set(flat), ""
    for node in flat:
        for user in list(node.users) if isinstance(node.meta.get("val"), torch.Tensor) else ():
            if user in seen or not is_call(user, _aten.mm.default, _aten.addmm.default):
                continue
            try:
                a, b, bias = product_operands(user)
                if a is not node or b in seen or val(a).shape[-1] != width:
                    continue
                behind(b, wait)
            except LeftError as left:
                reason = str(left)
                continue
            products.append((user, b, bias))
    if not products:
        users = {user for node in flat for user in node.users} - seen
        if not reason and any(is_call(user, *_REORDERING) for user in users):
            reason = "its rows are put in another order before any product, as rows of several sequences are"
        raise LeftError(reason or "no product of the gathered rows follows")
    products.sort()
    if len({val(b).dtype for _, b, _ in products}) > 1:
        raise LeftError("the matrices behind it have several dtypes")
    gone = {node for node, _, _ in products}
    for node in reversed(flat):
        if all(user in gone for user in node.users):
            gone.add(node)
    return Gather(collective, wait, tuple(products), tuple(flat), kept=wait not in gone)


@dataclass(frozen=True, slots=True)
class Reduce:
    """A product → reduce_scatter or all_reduce → wait: `gemm_rs` or `gemm_ar`."""

    collective: Node
    wait: Node
    product: Node
    between: tuple[Node, ...]
    scatters: bool
    reduction: str

    @property
    def op(self) -> str:
        return "gemm_rs" if self.scatters else "gemm_ar"

    def judge(self, policy: Policy) -> Payoff:
        a, b, bias = product_operands(self.product)
        rank_sizes = {f"the rows of {b.name}": val(b).shape[0]}
        if self.scatters:
            payoff = policy.judge("gemm_rs", (a, b, None, None), (None, self.reduction), rank_sizes)
        else:
            payoff = policy.judge("gemm_ar", (a, b, bias, None, None), (None,), rank_sizes)
        return payoff if bias is None else policy.with_bias(payoff, bias, self.reduction)

    def rewrite(self, graph: fx.Graph, policy: Policy) -> None:
        """Put the fused op where the collective was; ranks may have different biases, so those are summed, too."""
        a, b, bias = product_operands(self.product)
        with graph.inserting_before(self.collective):
            if bias is not None:
                bias = call(graph, _ops.all_reduce.default, (bias, self.reduction, *policy.settings))
            if self.scatters:
                found = call(graph, _ops.gemm_rs.default, (a, b, None, None, None, self.reduction, *policy.settings))
                found = found if bias is None else call(graph, _aten.add.Tensor, (found, bias))
            else:
                found = call(graph, _ops.gemm_ar.default, (a, b, bias, None, None, None, *policy.settings))
            self.wait.replace_all_uses_with(reshaped(graph, found, val(self.wait).shape))
        erase_unused(graph, [self.product, *self.between, self.collective, self.wait])


def reduced_by(collective: Node) -> Reduce:
    """The pattern that ends at an all_reduce or a reduce_scatter."""
    wait = _waited(collective)
    scatters = is_call(collective, torch.ops._c10d_functional.reduce_scatter_tensor.default)
    reduction = str(collective.args[1]).lower()
    if reduction not in (("sum", "avg") if scatters else ("sum",)):
        raise LeftError(f"it reduces by {reduction}")
    given: Any = collective.args[0]
    product, between = flat_source(given)
    if is_call(product, _aten.cat.default):
        raise LeftError("its rows are put in another order behind any product, as rows of several sequences are")
    _, _, bias = product_operands(product)
    if bias is not None and val(bias).dim() != 1:
        raise LeftError(f"what {product.name} adds is not a row")
    check_sizes(val(wait).shape)
    if val(given).dim() < 2 or val(given).shape[-1] != val(product).shape[-1]:
        raise LeftError("the product and the reduced tensor differ in columns")
    inside = {collective, *between}
    for node in (product, *between):
        if any(user not in inside for user in node.users):
            raise LeftError(f"{node.name} is used elsewhere, too")
    return Reduce(collective, wait, product, tuple(between), scatters, reduction)


@dataclass(frozen=True, slots=True)
class NormOfSum:
    """all_reduce → wait → (bias, residual added) → RMS norm → (fp8): `all_reduce_rms_norm`."""

    collective: Node
    norm: Norm
    quantised: Quantisation | None = None
    op = "all_reduce_rms_norm"

    @property
    def given(self) -> tuple[Node | None, ...]:
        """The operator's tensors behind x."""
        norm, quantised = self.norm, self.quantised
        scale = quantised.scale if quantised is not None and quantised.kind == "tensor" else None
        return norm.weight, norm.bias, norm.residual, scale

    @property
    def call(self) -> tuple[str, tuple[Any, ...]]:
        """The operator's name and options."""
        norm, quantised = self.norm, self.quantised
        kind = quantised.kind if quantised is not None else ""
        keeps = quantised is not None and quantised.keeps_norm
        full = norm.bias is not None and val(norm.bias).dim() > 1
        if kind in ("", "tensor") and not (keeps or norm.offset or full):
            return self.op, (norm.eps, torch.float8_e4m3fn if kind else None)
        pow2 = quantised is not None and quantised.pow2
        return f"{self.op}_quantized", (norm.eps, kind, "row", pow2, keeps, norm.offset)

    def judge(self, policy: Policy) -> Payoff:
        x = val(self.collective.args[0])  # type: ignore[arg-type]
        shape = val(self.norm.h).shape
        x = x.new_empty(shape) if x.shape != shape else x
        operator, options = self.call
        return policy.judge(operator, (x, *self.given), options)

    def rewrite(self, graph: fx.Graph, policy: Policy) -> None:
        """Put the fused op where the sum is complete."""
        norm, quantised = self.norm, self.quantised
        anchor = norm.added[-1] if norm.added else norm.wait
        for node in self.given:
            if node is not None:
                hoist(node, anchor)
        with graph.inserting_before(anchor):
            x = reshaped(graph, self.collective.args[0], val(norm.h).shape)  # type: ignore[arg-type]
            name, options = self.call
            made = call(graph, getattr(_ops, name).default, (x, *self.given, *options, *policy.settings))
            y, h = call(graph, operator.getitem, (made, 0)), call(graph, operator.getitem, (made, 1))
            replaced = {quantised.out if quantised is not None else norm.y: y}
            if quantised is not None and quantised.kind != "tensor":
                replaced[quantised.scale] = call(graph, operator.getitem, (made, 2))
            if quantised is not None and quantised.keeps_norm:
                replaced[norm.y] = call(graph, operator.getitem, (made, 3))
            if val(norm.h).dtype != val(h).dtype:
                h = call(graph, torch.ops.prims.convert_element_type.default, (h, val(norm.h).dtype))
            replaced[norm.h if norm.added else norm.wait] = h
            made_of = {node: reshaped(graph, made, val(node).shape) for node, made in replaced.items()}
        for node, new in made_of.items():
            node.replace_all_uses_with(new)
        erase_unused(graph, [self.collective, *sorted({*norm.added, *flat_users(norm.wait)})])


@dataclass(frozen=True, slots=True)
class OnWire:
    """all_reduce → wait: the same on a quantised wire."""

    collective: Node
    wait: Node
    reduction: str
    wire: Wire
    op = "all_reduce"

    def judge(self, policy: Policy) -> Payoff:
        if policy.communicator.policy(policy.numerics) == "ordered":
            raise LeftError("ordered sums travel as they are")
        return policy.judge("all_reduce_wire", (self.collective.args[0],), (self.reduction, self.wire))

    def rewrite(self, graph: fx.Graph, policy: Policy) -> None:
        """Put the call on the wire where the sum began."""
        with graph.inserting_before(self.collective):
            given = (self.collective.args[0], self.reduction, self.wire)
            self.wait.replace_all_uses_with(call(graph, _ops.all_reduce_wire.default, (*given, *policy.settings)))
        erase_unused(graph, [self.collective, self.wait])


def on_wire(collective: Node, wire: Wire) -> OnWire:
    """The pattern of any all_reduce that sums or averages."""
    wait, reduction = _waited(collective), str(collective.args[1]).lower()
    if reduction not in ("sum", "avg"):
        raise LeftError(f"it reduces by {reduction}")
    return OnWire(collective, wait, reduction, wire)


Pattern: TypeAlias = Gather | Reduce | NormOfSum | OnWire


def norm_of_sum(collective: Node) -> NormOfSum | None:
    """The pattern that begins at an all_reduce; None where no norm follows."""
    norm = norm_behind(collective)
    if norm is None:
        return None
    wait = _waited(collective)
    if str(collective.args[1]).lower() != "sum":
        raise LeftError(f"it reduces by {collective.args[1]}")
    check_sizes(val(norm.h).shape)
    for needed in (norm.weight, norm.bias, norm.residual):
        if needed is not None:
            behind(needed, norm.added[-1] if norm.added else wait)
    between = [node for node in (*flat_users(wait), *norm.added[:-1]) if node is not norm.h]
    if norm.added and any(len(node.users) != 1 for node in between):
        raise LeftError("the sum without what is added to it is used elsewhere, too")
    return NormOfSum(collective, norm)


def quantised_norm_of_sum(collective: Node) -> NormOfSum | None:
    """`norm_of_sum` with what makes fp8 of it; None where nothing does."""
    found = norm_of_sum(collective)
    quantised = None if found is None else quantisation_behind(found.norm)
    if found is None or quantised is None:
        return None
    check_sizes(val(quantised.scale).shape)
    if quantised.kind == "tensor":
        behind(quantised.scale, found.norm.added[-1] if found.norm.added else found.norm.wait)
    return NormOfSum(collective, found.norm, quantised)
