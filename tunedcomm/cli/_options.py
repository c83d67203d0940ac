"""Options that several verbs share, and how their text becomes a problem."""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from tunedcomm import settings
from tunedcomm.errors import UnknownNameError
from tunedcomm.spec import DTYPES, InputKind, Mode, OpSpec, Problem, did_you_mean, get_op, get_variant, parse_shape

if TYPE_CHECKING:
    from tunedcomm.spec import NumericsPolicy

__all__ = [
    "AnyModeOption",
    "BorrowOption",
    "CallMode",
    "DatabaseOption",
    "DtypeOption",
    "EitherModeOption",
    "HardwareOption",
    "InPlaceOption",
    "JsonOption",
    "Kind",
    "MaxSmsOption",
    "OpOption",
    "Policy",
    "ProblemOptions",
    "ShapeOption",
    "SweptKind",
    "SweptMode",
    "SweptPlace",
    "WorldSizeOption",
    "borrowed",
    "check_dtype",
    "check_in_place",
    "check_layout",
    "check_problem",
    "check_reduction",
    "check_scaling",
    "check_shape",
    "known_op",
    "parse_budget",
    "parse_gangs",
    "split",
]


class CallMode(str, enum.Enum):
    """Values of `--mode` where one problem is meant."""

    graph = "graph"
    eager = "eager"


class Kind(str, enum.Enum):
    """Values of `--input-kind`."""

    plain = "plain"
    symmetric = "symmetric"


class SweptMode(str, enum.Enum):
    """Values of `--mode` where several problems are meant."""

    graph = "graph"
    eager = "eager"
    both = "both"

    @property
    def values(self) -> tuple[Mode, ...]:
        """The modes that are meant."""
        if self is SweptMode.both:
            return ("graph", "eager")
        return ("graph",) if self is SweptMode.graph else ("eager",)


class SweptPlace(str, enum.Enum):
    """Values of `--in-place` where several problems are swept."""

    no = "no"
    yes = "yes"
    both = "both"

    @property
    def values(self) -> tuple[bool, ...]:
        """As problems have it."""
        return (False, True) if self is SweptPlace.both else (self is SweptPlace.yes,)


class SweptKind(str, enum.Enum):
    """Values of `--input-kind` where several problems are meant."""

    plain = "plain"
    symmetric = "symmetric"
    both = "both"

    @property
    def values(self) -> tuple[InputKind, ...]:
        """The input kinds that are meant."""
        if self is SweptKind.both:
            return ("plain", "symmetric")
        return ("plain",) if self is SweptKind.plain else ("symmetric",)


class Policy(str, enum.Enum):
    """Values of `--numerics`."""

    default = "default"
    ordered = "ordered"
    any = "any"


OpOption: TypeAlias = Annotated[str, typer.Option("--op", help="Op, e.g. all_reduce.")]
ShapeOption: TypeAlias = Annotated[
    str, typer.Option("--shape", help="Canonical shape: the element count of a collective, MxNxK of a fused GEMM.")
]
DtypeOption: TypeAlias = Annotated[str, typer.Option("--dtype", help="Dtype of the payload.")]
WorldSizeOption: TypeAlias = Annotated[int, typer.Option("--world-size", min=1, help="Number of ranks.")]
InPlaceOption: TypeAlias = Annotated[bool, typer.Option("--in-place", help="The result overwrites the input.")]
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
AnyModeOption: TypeAlias = Annotated[
    CallMode | None, typer.Option(help="Inside CUDA graphs or not; by default graph, eager on the host backend.")
]
EitherModeOption: TypeAlias = Annotated[
    CallMode | None, typer.Option(help="Inside CUDA graphs or not; by default what is stored of either.")
]
MaxSmsOption: TypeAlias = Annotated[
    int | None,
    typer.Option(min=0, help="SMs at most that the kernel may take.", show_default=False),
]
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
DatabaseOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--db", help="Database to read, a path or a SQLAlchemy URL; by default every layer is read."),
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


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
    """What `--borrow` names, else TUNEDCOMM_BORROW."""
    return tuple(split(values)) or settings.borrow()


def split(values: list[str] | None) -> list[str]:
    """Values of an option that may be repeated or take several, separated by commas."""
    return [part.strip() for value in values or [] for part in value.split(",") if part.strip()]


def check_dtype(dtype: str, spec: OpSpec | None = None) -> str:
    """Refuse as bad usage a dtype that does not exist, or that no kernel of the op takes."""
    allowed = DTYPES if spec is None else spec.dtypes
    if dtype not in allowed:
        what = "a dtype" if spec is None else f"a dtype of {spec.name}"
        raise typer.BadParameter(
            f"{dtype!r} is not {what}{did_you_mean(dtype, allowed)} Allowed: {', '.join(allowed)}", param_hint="--dtype"
        )
    return dtype


_OTHER_SEPARATOR = re.compile(r"\d+(?:\s*[*×/;:]\s*\d+)+")
_MAX_ELEMENTS = 1 << 48


def check_shape(text: str, spec: OpSpec, *, may_be_empty: bool = False) -> tuple[int, ...]:
    """Read a shape and refuse as bad usage one that is not of the op's form, or that nothing can be measured at.

    Args:
        text: as typed.
        spec: the op.
        may_be_empty: take a shape without elements, which can be asked about but not measured.
    """
    try:
        shape = parse_shape(text)
    except ValueError as error:
        meant = "x".join(re.findall(r"\d+", text)) if _OTHER_SEPARATOR.fullmatch(text.strip()) else ""
        hint = f"; did you mean {meant!r}?" if meant else ""
        raise typer.BadParameter(f"{error}{hint}", param_hint="--shape") from None
    if len(shape) != spec.rank_of_shape:
        raise typer.BadParameter(
            f"{text!r} has {len(shape)} extents, a shape of {spec.name} has {spec.rank_of_shape}: {spec.shape_help}",
            param_hint="--shape",
        )
    elements = math.prod(shape)
    if elements == 0 and not may_be_empty:
        raise typer.BadParameter(f"{text!r} has no elements: there is nothing to measure", param_hint="--shape")
    if elements > _MAX_ELEMENTS:
        raise typer.BadParameter(
            f"{text!r} has more elements than any memory holds; at most {_MAX_ELEMENTS}: {spec.shape_help}",
            param_hint="--shape",
        )
    return shape


def check_layout(layout: str | None, spec: OpSpec) -> str:
    """The layout, `none` for the one without a name, or the op's first where none is given."""
    if layout is None:
        return spec.layouts[0]
    meant = "" if layout == "none" else layout
    if meant not in spec.layouts:
        allowed = [name or "none" for name in spec.layouts]
        raise typer.BadParameter(
            f"{layout!r} is not a layout of {spec.name}{did_you_mean(layout, allowed)} Allowed: {', '.join(allowed)}",
            param_hint="--layout",
        )
    return meant


def check_scaling(scaling: str | None, spec: OpSpec, dtype: str) -> str:
    """The scaling, `none` for the one without a name, or the dtype's usual one where none is given."""
    allowed = spec.scalings_of(dtype)
    if scaling is None:
        return allowed[0]
    meant = "" if scaling == "none" else scaling
    if meant not in allowed:
        said = [name or "none" for name in allowed]
        raise typer.BadParameter(
            f"{scaling!r} is not a scaling of {spec.name} of {dtype}{did_you_mean(scaling, said)} Allowed: "
            f"{', '.join(said)}",
            param_hint="--scaling",
        )
    return meant


def check_problem(problem: Problem) -> Problem:
    """Refuse as bad usage a shape that the ranks cannot share."""
    try:
        get_op(problem.op).check(problem)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--shape") from None
    return problem


def check_in_place(problem: Problem) -> Problem:
    """Refuse as bad usage to have an op overwrite its input that cannot."""
    if problem.in_place and not get_op(problem.op).in_place:
        raise typer.BadParameter(f"{problem.op} cannot overwrite its input; leave it out", param_hint="--in-place")
    return problem


def check_reduction(reduction: str | None, spec: OpSpec) -> str:
    """The reduction, or the op's first where none is given."""
    allowed = spec.reductions or ("",)
    if reduction is None:
        return allowed[0]
    if reduction not in allowed:
        raise typer.BadParameter(
            f"{reduction!r} is not a reduction of {spec.name}{did_you_mean(reduction, allowed)} "
            f"Allowed: {', '.join(allowed) or '(none)'}",
            param_hint="--reduction",
        )
    return reduction


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemOptions:
    """The options that name one problem, as typed on the command line."""

    op: str
    shape: str
    dtype: str
    world_size: int
    mode: CallMode | None = None
    reduction: str | None = None
    input_kind: Kind = Kind.plain
    in_place: bool = False
    numerics: Policy = Policy.default
    max_sms: int | None = None
    layout: str | None = None
    scaling: str | None = None

    @property
    def policy(self) -> NumericsPolicy:
        """The numerics policy under the name that dispatch uses."""
        return self.numerics.value

    def problem(self) -> Problem:
        """The problem that the options name.

        Raises:
            UnknownNameError: no such op.
            BadParameter: the shape, dtype or reduction does not fit the op.
        """
        spec = known_op(self.op)
        mode: Mode = "eager" if self.mode is CallMode.eager else "graph"
        input_kind: InputKind = "plain" if self.input_kind is Kind.plain else "symmetric"
        problem = Problem(
            op=spec.name,
            shape=check_shape(self.shape, spec, may_be_empty=True),
            dtype=check_dtype(self.dtype),
            world_size=self.world_size,
            reduction=check_reduction(self.reduction, spec),
            input_kind=input_kind,
            in_place=self.in_place,
            layout=check_layout(self.layout, spec),
            scaling=check_scaling(self.scaling, spec, self.dtype),
            mode=mode,
        )
        return check_problem(problem)
