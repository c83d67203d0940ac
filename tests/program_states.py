"""Every op under every state that a program may set, on any device: what each call gives, for comparison.

A rank makes the same calls in a state and outside of it, in a group of its own whose first call falls into the state:
what the group keeps must not depend on it.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import tunedcomm
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.spec import ops, variants

__all__ = ["CLEAN", "ON_GPUS", "STATES", "Results", "cases", "differences", "results_of"]

FP8 = torch.float8_e4m3fn
CLEAN = "clean"
OUTSIDE = "after it"


class Bits(NamedTuple):
    """A tensor as bytes; not all dtypes can be pickled, or compared."""

    words: torch.Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Bits:
        held = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return cls(held.view(-1).view(torch.uint8), tensor.dtype, tuple(tensor.shape))

    def values(self) -> torch.Tensor:
        return self.words.view(self.dtype).double()


# Case, and where its call was made, to the tensors that it gave.
Results = dict[tuple[str, str], list[Bits]]


@contextlib.contextmanager
def _set(get: Callable[[], Any], set_to: Callable[[Any], object], value: Any) -> Iterator[None]:
    before = get()
    set_to(value)
    try:
        yield
    finally:
        set_to(before)


@contextlib.contextmanager
def _raising_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _default_dtype(dtype: torch.dtype) -> Any:
    return lambda device: _set(torch.get_default_dtype, torch.set_default_dtype, dtype)


def _compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(call, backend="aot_eager")  # type: ignore[no-any-return]


# State to the block in which it holds, on tensors of that device.
STATES: dict[str, Callable[[str], contextlib.AbstractContextManager[Any]]] = {
    CLEAN: lambda device: contextlib.nullcontext(),
    "default bf16": _default_dtype(torch.bfloat16),
    "default fp16": _default_dtype(torch.float16),
    "default fp64": _default_dtype(torch.float64),
    "default device meta": lambda device: _set(lambda: None, torch.set_default_device, "meta"),
    "inference mode": lambda device: torch.inference_mode(),
    "numpy raises": lambda device: np.errstate(all="raise"),
    "warnings raise": lambda device: _raising_warnings(),
    "medium precision": lambda device: _set(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "autocast": lambda device: torch.autocast(torch.device(device).type, dtype=torch.bfloat16),
    "deterministic": lambda device: _set(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "fake tensors": lambda device: FakeTensorMode(),
    "compiled": lambda device: contextlib.nullcontext(),
}
# States of programs on GPUs: on a machine with one GPU this one changes nothing.
ON_GPUS: dict[str, Callable[[str], contextlib.AbstractContextManager[Any]]] = {
    "another GPU is current": lambda device: torch.cuda.device(
        ((torch.device(device).index or 0) + 1) % torch.cuda.device_count()
    ),
}


@dataclass(frozen=True)
class Case:
    """A call of an op.

    Attributes:
        op: its name.
        inputs: of this rank.
        call: `(group, *inputs)` to what the op gives.
        operator: it can be traced, and takes fake tensors.
        product: its bits are the library's choice where the precision of products is lowered.
        kernels: it runs kernels alone.
    """

    op: str
    inputs: tuple[torch.Tensor, ...]
    call: Callable[..., Any]
    operator: bool = True
    product: bool = False
    kernels: bool = False


def cases(rank: int, world_size: int, device: str) -> dict[str, Case]:
    """Calls of every op, named."""

    def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = rank) -> torch.Tensor:
        generator = torch.Generator().manual_seed(31 * seed + len(shape))
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype).to(device)

    t, bf16, fp16 = tunedcomm, torch.bfloat16, torch.float16
    huge = torch.tensor([3e38, -3e38, float("inf"), 256.0 if rank == 0 else 1.0], dtype=torch.float32, device=device)
    huge = torch.cat([huge, torch.full((1,), float("inf" if rank else "-inf"), dtype=torch.float32, device=device)])
    x, rows = drawn(4 * world_size, 256), drawn(3, 256, dtype=bf16)
    weight, residual = drawn(256, dtype=bf16, seed=91), drawn(3, 256, dtype=bf16, seed=92)
    scale = torch.full((1,), 0.03, dtype=torch.float32, device=device)
    a, b = drawn(4 * world_size, 64, dtype=bf16), drawn(64, 32, dtype=bf16, seed=93)
    bias = drawn(32, dtype=bf16, seed=94)
    a8, b8 = drawn(4 * world_size, 64).to(FP8), drawn(32, 64, seed=93).to(FP8).t()
    by_row, by_column = drawn(4 * world_size, 1).abs() + 0.5, drawn(1, 32, seed=95).abs() + 0.5
    one_a, one_b = scale + 0.5, scale + 0.25
    tokens, num_experts = drawn(6, 128, dtype=bf16), 2 * world_size
    ids = torch.stack([torch.arange(6, dtype=torch.int64) + rank, torch.arange(6, dtype=torch.int64) * 3 + 1], 1)
    ids = (ids % num_experts).to(device)
    weights = drawn(6, 2).softmax(-1)
    heads, lse = drawn(2 * world_size, 2 * world_size, 16), drawn(2 * world_size, 2 * world_size)

    def dispatch(group: Any, tokens: torch.Tensor, ids: torch.Tensor, **options: Any) -> list[torch.Tensor]:
        sent = t.ep_dispatch(tokens, ids, num_experts=num_experts, group=group, **options)
        # What lies behind an expert's tokens is unspecified.
        slots, begins = torch.arange(sent.tokens.numel() // 128, device=device, dtype=torch.int64), sent.offsets[:-1]
        used = ((slots[:, None] >= begins) & (slots[:, None] < begins + sent.counts)).any(1)
        flat = sent.tokens.reshape(-1, 128)
        found = [torch.where(used[:, None], flat.float(), torch.zeros_like(flat, dtype=torch.float32))]
        if sent.scales is not None:
            scales = sent.scales.reshape(len(slots), -1)
            found.append(torch.where(used[:, None], scales, torch.zeros_like(scales)))
        return [*found, sent.counts, sent.offsets, sent.rows]

    def combine(group: Any, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        sent = t.ep_dispatch(tokens, ids, num_experts=num_experts, group=group)
        return t.ep_combine(sent.tokens * 2, sent, weights)

    def intercepted(group: Any, x: torch.Tensor) -> torch.Tensor:
        found = x.clone()
        with t.intercept():
            dist.all_reduce(found, group=group)
        return found

    def symmetric(group: Any, x: torch.Tensor) -> torch.Tensor:
        held = t.symmetric_empty(x.shape, dtype=x.dtype, device=x.device, group=group)
        held.copy_(x)
        return t.all_reduce(held, group=group)

    def all_to_all_v(group: Any, x: torch.Tensor) -> torch.Tensor:
        counts = [len(x) // world_size] * world_size
        return t.all_to_all_v(x, counts, counts, max_count=counts[0], group=group)

    def gathered(group: Any, x: torch.Tensor) -> torch.Tensor:
        out = t.symmetric_empty((world_size * len(x), x.shape[1]), dtype=x.dtype, device=x.device, group=group)
        return t.all_gather_with_progress(x, out=out, group=group).finish()

    def reduced(**options: Any) -> Callable[..., Any]:
        return lambda group, x: t.all_reduce(x, group=group, **options)

    def norm(**options: Any) -> Callable[..., Any]:
        return lambda group, x, weight, residual: t.all_reduce_rms_norm(
            x, weight, residual=residual, group=group, **options
        )

    def scaled(op: Callable[..., Any]) -> Callable[..., Any]:
        return lambda group, a, b, scale_a, scale_b: op(a, b, scale_a=scale_a, scale_b=scale_b, group=group)

    def small_scaled(group: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> Any:
        return t.all_reduce_rms_norm(x, weight, scale=scale, quantize="tensor", group=group)

    return {
        "all_reduce bf16": Case("all_reduce", (huge.to(bf16),), reduced()),
        "all_reduce fp16 avg": Case("all_reduce", (drawn(300, dtype=fp16),), reduced(op="avg")),
        "all_reduce fp32": Case("all_reduce", (huge,), reduced()),
        "all_reduce fp32 avg": Case("all_reduce", (huge,), reduced(op="avg")),
        "all_reduce max": Case("all_reduce", (drawn(300),), reduced(op="max")),
        "all_reduce int32": Case("all_reduce", (drawn(300).to(torch.int32),), reduced()),
        "all_reduce large bf16": Case("all_reduce", (drawn(40_000, dtype=bf16),), reduced()),
        "all_reduce large fp32": Case("all_reduce", (drawn(40_000) * 2e38,), reduced()),
        "all_reduce_": Case("all_reduce", (x,), lambda group, x: t.all_reduce_(x.clone(), group=group)),
        "intercept": Case("all_reduce", (x,), intercepted, operator=False),
        "symmetric": Case("all_reduce", (x,), symmetric, operator=False),
        "all_gather": Case("all_gather", (x,), lambda group, x: t.all_gather(x, group=group)),
        "all_gather with progress": Case("all_gather", (x,), gathered, operator=False, kernels=True),
        "reduce_scatter": Case("reduce_scatter", (x,), lambda group, x: t.reduce_scatter(x, group=group)),
        "reduce_scatter bf16": Case("reduce_scatter", (x.to(bf16),), lambda group, x: t.reduce_scatter(x, group=group)),
        "reduce_scatter to fp32": Case(
            "reduce_scatter",
            (x.to(bf16),),
            lambda group, x: t.reduce_scatter(x, out_dtype=torch.float32, group=group),
        ),
        "all_to_all": Case("all_to_all", (x,), lambda group, x: t.all_to_all(x, group=group)),
        "all_to_all_v": Case("all_to_all_v", (x,), all_to_all_v, operator=False),
        "broadcast": Case("broadcast", (x,), lambda group, x: t.broadcast(x, 1, group=group)),
        "all_gather_list": Case(
            "all_gather_list",
            (x, rows, weight[:7]),
            lambda group, *xs: t.all_gather(xs, group=group),
            operator=False,
        ),
        "all_gather_v": Case(
            "all_gather_v",
            (x[: 1 + rank],),
            lambda group, x: t.all_gather_v(x, list(range(1, world_size + 1)), max_count=4, group=group),
        ),
        "reduce_scatter_v": Case(
            "reduce_scatter_v",
            (x,),
            lambda group, x: t.reduce_scatter_v(x, [4] * world_size, max_count=4, group=group),
        ),
        "dcp_combine": Case("dcp_combine", (heads, lse), lambda group, x, lse: t.dcp_combine(x, lse, group=group)),
        "ulysses_scatter": Case("ulysses_scatter", (heads[None],), lambda group, x: t.ulysses_scatter(x, group=group)),
        "ulysses_gather": Case("ulysses_gather", (heads[None],), lambda group, x: t.ulysses_gather(x, group=group)),
        "all_reduce_bias": Case(
            "all_reduce_bias", (rows, weight), lambda group, x, bias: t.all_reduce_bias(x, bias, group=group)
        ),
        "rms_norm": Case("all_reduce_rms_norm", (rows, weight, residual), norm()),
        "rms_norm by token": Case("all_reduce_rms_norm", (rows, weight, residual), norm(quantize="token")),
        "rms_norm by group": Case("all_reduce_rms_norm", (rows, weight, residual), norm(quantize="group128")),
        "rms_norm by scale": Case("all_reduce_rms_norm", (rows, weight, scale), small_scaled),
        "ag_gemm": Case("ag_gemm", (a, b), lambda group, a, b: t.ag_gemm(a, b, group=group), product=True),
        "ag_gemm by row": Case("ag_gemm", (a8, b8, by_row, by_column), scaled(t.ag_gemm), product=True),
        "ag_gemm by tensor": Case("ag_gemm", (a8, b8, one_a, one_b), scaled(t.ag_gemm), product=True),
        "gemm_rs": Case("gemm_rs", (a, b), lambda group, a, b: t.gemm_rs(a, b, group=group), product=True),
        "gemm_rs by row": Case("gemm_rs", (a8, b8, by_row, by_column), scaled(t.gemm_rs), product=True),
        "gemm_ar": Case(
            "gemm_ar", (a, b, bias), lambda group, a, b, bias: t.gemm_ar(a, b, bias=bias, group=group), product=True
        ),
        "gemm_ar fp16 to fp32": Case(
            "gemm_ar",
            (a.to(fp16), b.to(fp16)),
            lambda group, a, b: t.gemm_ar(a, b, out_dtype=torch.float32, group=group),
            product=True,
        ),
        "ep_dispatch": Case("ep_dispatch", (tokens, ids), dispatch),
        "ep_dispatch by token": Case("ep_dispatch", (tokens, ids), functools.partial(dispatch, quantize="token")),
        "ep_dispatch contiguous": Case(
            "ep_dispatch", (tokens, ids), functools.partial(dispatch, quantize="group128", layout="contiguous")
        ),
        "ep_combine": Case("ep_combine", (tokens, ids, weights), combine),
    }


def _all_kernels(case: Case) -> list[str]:
    """Variants to force that dispatch would not take by itself."""
    every = [v for v in variants(case.op).values() if v.waits_time_out and not v.is_library]
    known = [v for v in every if v.numerics != "unordered"]
    # Where ranks share a GPU, copies beside a GEMM that waits for them may not come to run.
    return [v.name for v in known if not (case.product and v.name == "copy_engine")]


def _as_list(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else [each for each in found if each is not None]


def results_of(
    state: str,
    ranks: Sequence[int],
    rank: int,
    world_size: int,
    device: str,
    kernels: Mapping[str, Sequence[str]] | None = None,
) -> Results:
    """What this rank's calls give in a new group, made twice in the state and then once outside of it.

    Each case runs what dispatch chooses, then the library, then kernels; what is compiled, the first alone.

    Args:
        state: of `STATES` or `ON_GPUS`; holds on `ranks` alone, the others make the same calls without it.
        kernels: case to the variants that are forced besides; None for all that can run.
    """
    group, every = dist.new_group(), cases(rank, world_size, device)
    found: dict[tuple[str, str], list[torch.Tensor]] = {}
    here = {**STATES, **ON_GPUS}[state if rank in ranks else CLEAN]
    is_fake, is_traced = state == "fake tensors", state == "compiled" and rank in ranks
    assert {case.op for case in every.values()} >= set(ops()), "an op has no case"
    with here(device):  # the group's set-up
        get_communicator(group, every["all_gather"].inputs[0].device)
    for name, case in every.items():
        chosen = ["", "library", *(_all_kernels(case) if kernels is None else kernels.get(name, ()))]
        if case.kernels:
            chosen = [""] if kernels is None else []
        for variant in chosen[:1] if state == "compiled" else chosen:  # tracing does not depend on the variant
            title, call = f"{name} {variant}".strip(), functools.partial(case.call, group)
            with tunedcomm.force(case.op, variant) if variant else contextlib.nullcontext():
                try:
                    with here(device) as mode:
                        made = _compiled(call) if is_traced and case.operator else call
                        for turn in ("first", "second"):
                            if not is_fake:
                                found[title, turn] = _as_list(made(*case.inputs))
                            elif case.operator and rank in ranks:
                                made(*(mode.from_tensor(tensor) for tensor in case.inputs))
                    found[title, OUTSIDE] = _as_list(call(*case.inputs))
                except tunedcomm.InfeasibleError:
                    assert variant, "dispatch finds a variant"
    results = {place: [Bits.of(tensor) for tensor in tensors] for place, tensors in found.items()}
    tunedcomm.release_communicators()
    dist.destroy_process_group(group)
    return results


def differences(state: str, found: Results, wanted: Results) -> list[str]:
    """The calls that gave other bits than a fresh process without any state."""
    wrong = []
    loose = {name for name, case in cases(0, 2, "cpu").items() if case.product} if state == "medium precision" else ()
    for place, tensors in found.items():
        due = wanted[place[0], OUTSIDE]
        by_library = place[1] != OUTSIDE and any(f"{place[0]} ".startswith(f"{name} ") for name in loose)
        same = _near if by_library else _same
        if len(tensors) != len(due) or not all(map(same, tensors, due)):
            got, right = ([bits.values().tolist()[:8] for bits in each] for each in (tensors, due))
            wrong.append(f"{state}: {place[0]}, {place[1]} call: {got} instead of {right}")
    return wrong


def _same(one: Bits, other: Bits) -> bool:
    return one[1:] == other[1:] and torch.equal(one.words, other.words)


def _near(one: Bits, other: Bits) -> bool:
    error = (one.values() - other.values()).norm()
    return one[1:] == other[1:] and bool(error <= 2e-2 * other.values().norm())
