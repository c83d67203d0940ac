"""Options that several verbs share: their text becomes a problem, numbers of ranks, or bad usage."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Literal, TypeAlias, TypeVar, get_args, get_type_hints

import typer

from tunedcomm import settings
from tunedcomm.errors import UnknownNameError
from tunedcomm.spec import (
    DTYPES,
    InputKind,
    Mode,
    NumericsPolicy,
    OpSpec,
    Problem,
    did_you_mean,
    get_op,
    get_variant,
    parse_shape,
)

if TYPE_CHECKING:
    from tunedcomm.hardware import Environment

Backend: TypeAlias = Literal["cuda", "host"]
SweptMode: TypeAlias = Literal["graph", "eager", "both"]
SweptKind: TypeAlias = Literal["plain", "symmetric", "both"]
SweptPlace: TypeAlias = Literal["no", "yes", "both"]

OpOption: TypeAlias = Annotated[str, typer.Option("--op", help="Op, e.g. all_reduce.")]
OnlyOpOption: TypeAlias = Annotated[str | None, typer.Option("--op", help="Only this op.")]
LayoutOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--layout",
        help="What the op is given besides, or how it lies, as docs/ops.md lists it; by default the op's first layout.",
    ),
]
ScalingOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--scaling",
        help="How fp8 operands are scaled: rowwise (the default) or tensorwise. docs/ops.md has each op's.",
    ),
]
HardwareOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        help="Answer for a stored environment instead of this machine: part of the GPU's name, or the first digits of "
        "the environment's digest.",
    ),
]
BorrowOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--borrow",
        help="Other hardware whose measurements may serve where there are none: part of the GPU's name, a pattern, or "
        "the first digits of the environment's digest. By default what TUNEDCOMM_BORROW names.",
    ),
]
DatabaseOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--db", help="Database to read, a path or a SQLAlchemy URL; by default every layer is read."),
]
WrittenOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--db", help="Database to write, a path or a SQLAlchemy URL; by default the user database."),
]
LinkOption: TypeAlias = Annotated[
    float | None,
    typer.Option(min=1e-3, help="What one GPU sends to its peers at most, in 1e9 bytes/s. Known for H200."),
]
BackendOption: TypeAlias = Annotated[
    Backend | None, typer.Option(help="By default cuda where there are two GPUs or more, else host.")
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemOptions:
    """The options that name one problem, as typed on the command line."""

    op: OpOption
    shape: Annotated[
        str, typer.Option("--shape", help="Canonical shape: the element count of a collective, MxNxK of a fused GEMM.")
    ]
    world_size: Annotated[int, typer.Option("--world-size", min=1, help="Number of ranks.")]
    dtype: Annotated[str, typer.Option("--dtype", help="Dtype of the payload.")] = "bfloat16"
    mode: Annotated[
        Mode | None, typer.Option(help="Inside CUDA graphs or not; by default graph, eager on the host backend.")
    ] = None
    reduction: Annotated[str | None, typer.Option(help="Reduction; by default the op's first.")] = None
    input_kind: Annotated[InputKind, typer.Option(help="Whether peers can address the input.")] = "plain"
    in_place: Annotated[bool, typer.Option("--in-place", help="The result overwrites the input.")] = False
    layout: LayoutOption = None
    scaling: ScalingOption = None

    def problem(self) -> Problem:
        """The problem that the options name, in graph mode unless they say otherwise.

        Raises:
            UnknownNameError: no such op.
            BadParameter: the shape, dtype or reduction does not fit the op.
        """
        spec = known_op(self.op)
        problem = Problem(
            op=spec.name,
            shape=check_shape(self.shape, spec, may_be_empty=True),
            dtype=check_dtype(self.dtype),
            world_size=self.world_size,
            reduction=check_reduction(self.reduction, spec),
            input_kind=self.input_kind,
            in_place=self.in_place,
            layout=check_layout(self.layout, spec),
            scaling=check_scaling(self.scaling, spec, self.dtype),
            mode=self.mode or "graph",
        )
        return check_problem(problem)

    def problem_in(self, environment: Environment) -> Problem:
        """The problem, by default in eager mode on the host backend, which has no graphs.

        Raises:
            BadParameter: as of `problem`, or it is in place of an op that cannot be.
        """
        problem = self.problem()
        if problem.in_place and not get_op(problem.op).in_place:
            raise typer.BadParameter(f"{problem.op} cannot overwrite its input; leave it out", param_hint="--in-place")
        return replace(problem, mode="eager") if self.mode is None and environment.is_host else problem


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions(ProblemOptions):
    """The options that name one problem and how a caller asks for it."""

    numerics: Annotated[NumericsPolicy, typer.Option(help="Numerics classes that may run.")] = "default"
    max_sms: Annotated[
        int | None, typer.Option(min=0, help="SMs at most that the kernel may take.", show_default=False)
    ] = None


Options = TypeVar("Options", bound=ProblemOptions)


def takes(options: type[Options]) -> Callable[[Callable[Concatenate[Options, ...], None]], Callable[..., None]]:
    """Decorator of a verb whose first argument is `options`: typer sees the fields as options of the verb."""
    hints = get_type_hints(options, include_extras=True)
    shared = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.signature(options).parameters[field.name].default,
            annotation=hints[field.name],
        )
        for field in fields(options)
    ]

    def decorate(verb: Callable[Concatenate[Options, ...], None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def run(**values: Any) -> None:
            verb(options(**{one.name: values.pop(one.name) for one in shared}), **values)

        _, *own = inspect.signature(verb, eval_str=True).parameters.values()
        signature = inspect.Signature([*shared, *own])
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
        return run

    return decorate


def known_op(name: str) -> OpSpec:
    """The op of that name, after every kernel file has been imported.

    Raises:
        UnknownNameError: with the nearest names.
    """
    from tunedcomm import kernels

    kernels.discover()
    return get_op(name)


def known_variant(op: str, name: str) -> str:
    """The name of a variant of the op, which `known_op` has looked up.

    Raises:
        UnknownNameError: with the nearest names.
    """
    try:
        return get_variant(op, name).name
    except UnknownNameError as error:
        raise UnknownNameError(
            f"{error} If a package should bring it, `tunedcomm doctor` says what it brings."
        ) from None


def borrowed(values: list[str] | None) -> tuple[str, ...]:
    """The names of `--borrow`, else of TUNEDCOMM_BORROW."""
    return tuple(split(values)) or settings.borrow()


def split(values: list[str] | None) -> list[str]:
    """Values of an option that may be repeated or take several, separated by commas."""
    return [part.strip() for value in values or [] for part in value.split(",") if part.strip()]


def modes_of(mode: SweptMode) -> tuple[Mode, ...]:
    """The modes that `--mode` of a sweep means."""
    return get_args(Mode) if mode == "both" else (mode,)


def kinds_of(kind: SweptKind) -> tuple[InputKind, ...]:
    """The input kinds that `--input-kind` of a sweep means."""
    return get_args(InputKind) if kind == "both" else (kind,)


def _one_of(value: str | None, allowed: Sequence[str], what: str, option: str) -> str:
    """The value, `none` for the one without a name, or the first where none is given."""
    if value is None:
        return allowed[0]
    meant = "" if value == "none" else value
    if meant not in allowed:
        named = [name or "none" for name in allowed]
        raise typer.BadParameter(
            f"{value!r} is not {what}{did_you_mean(value, named)} Allowed: {', '.join(named)}", param_hint=option
        )
    return meant


def check_dtype(dtype: str, spec: OpSpec | None = None) -> str:
    """Refuse as bad usage a dtype that does not exist, or that no kernel of the op takes."""
    what = "a dtype" if spec is None else f"a dtype of {spec.name}"
    return _one_of(dtype, DTYPES if spec is None else spec.dtypes, what, "--dtype")


def check_layout(layout: str | None, spec: OpSpec) -> str:
    """The layout, or the op's first where none is given."""
    return _one_of(layout, spec.layouts, f"a layout of {spec.name}", "--layout")


def check_scaling(scaling: str | None, spec: OpSpec, dtype: str) -> str:
    """The scaling, or the dtype's usual one where none is given."""
    return _one_of(scaling, spec.scalings_of(dtype), f"a scaling of {spec.name} of {dtype}", "--scaling")


def check_reduction(reduction: str | None, spec: OpSpec) -> str:
    """The reduction, or the op's first where none is given."""
    return _one_of(reduction, tuple(spec.reductions) or ("",), f"a reduction of {spec.name}", "--reduction")


_OTHER_SEPARATOR = re.compile(r"\d+(?:\s*[*×/;:]\s*\d+)+")
_MAX_ELEMENTS = 1 << 48


def check_shape(text: str, spec: OpSpec, *, may_be_empty: bool = False) -> tuple[int, ...]:
    """Read a shape and refuse as bad usage one that is not of the op's form, or that nothing can be measured at.

    Args:
        text: as typed.
        spec: the op.
        may_be_empty: take a shape without elements, which can be asked about but not measured.
    """

    def bad(why: str) -> typer.BadParameter:
        return typer.BadParameter(why, param_hint="--shape")

    try:
        shape = parse_shape(text)
    except ValueError as error:
        meant = "x".join(re.findall(r"\d+", text)) if _OTHER_SEPARATOR.fullmatch(text.strip()) else ""
        raise bad(f"{error}; did you mean {meant!r}?" if meant else str(error)) from None
    if len(shape) != spec.rank_of_shape:
        raise bad(
            f"{text!r} has {len(shape)} extents, a shape of {spec.name} has {spec.rank_of_shape}: {spec.shape_help}"
        )
    elements = math.prod(shape)
    if elements == 0 and not may_be_empty:
        raise bad(f"{text!r} has no elements: there is nothing to measure")
    if elements > _MAX_ELEMENTS:
        raise bad(f"{text!r} has more elements than any memory holds; at most {_MAX_ELEMENTS}: {spec.shape_help}")
    return shape


def check_problem(problem: Problem) -> Problem:
    """Refuse as bad usage a shape that the ranks cannot share."""
    try:
        get_op(problem.op).check(problem)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--shape") from None
    return problem


_BUDGET = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")


def parse_budget(text: str) -> float:
    """Read `90`, `90s`, `10m`, `1h30m` as seconds.

    Raises:
        BadParameter: anything else, or no time at all.
    """
    match = _BUDGET.fullmatch(text.strip().lower())
    hours, minutes, seconds = (float(part or 0) for part in match.groups()) if match else (0.0, 0.0, 0.0)
    total = 3600 * hours + 60 * minutes + seconds
    if total <= 0:
        raise typer.BadParameter(f"{text!r} is not a time such as 90s, 10m or 1h30m", param_hint="--budget")
    return total


def parse_gangs(text: str) -> int | None:
    """Read a number of gangs; None for `auto`.

    Raises:
        BadParameter: neither `auto` nor a whole number above 0.
    """
    if text.strip().lower() == "auto":
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is neither auto nor a whole number above 0", param_hint="--gangs")
    return int(text)


def num_gpus() -> int:
    """CUDA GPUs that ranks can use here; a single one that they may share counts as many."""
    import torch

    from tunedcomm.hardware import num_gpu_ranks

    return num_gpu_ranks() if torch.cuda.is_available() else 0


def backend_or_default(backend: Backend | None = None) -> Backend:
    """The backend that was asked for, else `cuda` where there are two GPUs or more, else `host`."""
    return backend or ("cuda" if num_gpus() >= 2 else "host")


def local_ranks(world_size: int | None, backend: Backend | None = None) -> int:
    """Ranks to start: those asked for, else one a GPU, else 2 on the host backend or on a single GPU that they share.

    Raises:
        BadParameter: this machine cannot start that many, or kernels do not serve so many ranks of one host.
    """
    from tunedcomm.hardware import ranks_share_a_gpu
    from tunedcomm.symm.layout import MAX_WORLD_SIZE

    available = 0 if backend == "host" else num_gpus()
    if backend == "cuda" and available < 2:
        raise typer.BadParameter(
            f"it needs at least 2 GPUs, this machine has {available}; leave it out or pass --backend host to tune CPU "
            "ranks, whose timings say nothing about GPUs",
            param_hint="--backend",
        )
    if available < 2 or ranks_share_a_gpu():
        if world_size is not None and world_size > MAX_WORLD_SIZE:
            raise typer.BadParameter(
                f"{world_size} ranks are more than the {MAX_WORLD_SIZE} that kernels serve on one host; pass a "
                "smaller --world-size",
                param_hint="--world-size",
            )
        return world_size or 2
    if world_size is not None and available < world_size:
        raise typer.BadParameter(
            f"{world_size} ranks need {world_size} GPUs, this machine has {available}; "
            'hide them with CUDA_VISIBLE_DEVICES="" to use the host backend',
            param_hint="--world-size",
        )
    return world_size or available
