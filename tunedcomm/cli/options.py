"""Options that several verbs share, and the values that their text becomes.

What makes no sense raises `typer.BadParameter`, an op, variant or model that does not exist `UnknownNameError`: both
end the command with exit code 2.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Literal, TypeAlias, TypeVar, get_args, get_type_hints

import typer

from tunedcomm import hardware, settings
from tunedcomm.cli.models import DEFAULT_TOKENS, Model, catalog, find_model, shapes_for
from tunedcomm.cli.output import note
from tunedcomm.errors import UnknownNameError
from tunedcomm.hardware import ranks_share_a_gpu
from tunedcomm.metrics import plural
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
    ops,
    parse_shape,
    variants,
)

if TYPE_CHECKING:
    from tunedcomm.hardware import Environment

Backend: TypeAlias = Literal["cuda", "host"]
SweptMode: TypeAlias = Literal["graph", "eager", "both"]
SweptKind: TypeAlias = Literal["plain", "symmetric", "both"]
SweptPlace: TypeAlias = Literal["no", "yes", "both"]
NO_GRAPHS = "CPUs have no CUDA graphs"


def _continuations(incomplete: str, names: Iterable[str]) -> list[str]:
    """The names that begin so; of a list with commas, its last name counts."""
    head, comma, begun = incomplete.rpartition(",")
    return [f"{head}{comma}{name}" for name in names if name.startswith(begun)]


def complete_op(incomplete: str) -> list[str]:
    """Shell completion of ops."""
    from tunedcomm import kernels

    kernels.discover()
    return _continuations(incomplete, ops())


def complete_variant(ctx: typer.Context, incomplete: str) -> list[str]:
    """Shell completion of the variants of the op that is named, else of all ops."""
    named = ctx.params.get("op")
    known = complete_op("")
    found = [variants(op) for op in known if op == named] or [variants(op) for op in known]
    return _continuations(incomplete, dict.fromkeys(name for one in found for name in one))


def complete_model(incomplete: str) -> list[str]:
    """Shell completion of models."""
    return _continuations(incomplete, catalog())


OpOption: TypeAlias = Annotated[str, typer.Option("--op", help="Op, e.g. all_reduce.", autocompletion=complete_op)]
OnlyOpOption: TypeAlias = Annotated[str | None, typer.Option("--op", help="Only this op.", autocompletion=complete_op)]
LayoutOption: TypeAlias = Annotated[str | None, typer.Option(help="Layout; by default the op's first (docs/ops.md).")]
ScalingOption: TypeAlias = Annotated[str | None, typer.Option(help="Of fp8; by default rowwise (docs/ops.md).")]
HardwareOption: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Stored hardware to answer for: part of its name, or first digits of its digest."),
]
EverywhereOption: TypeAlias = Annotated[bool, typer.Option("--all", help="Not only this machine's rows.")]
BorrowOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(help="Hardware whose rows may stand in beside siblings: part of its name, or no."),
]
DatabaseOption: TypeAlias = Annotated[str | None, typer.Option(help="File or URL to read; by default every layer.")]
WrittenOption: TypeAlias = Annotated[str | None, typer.Option(help="File or URL to write; by default the user's.")]
GangsOption: TypeAlias = Annotated[
    str, typer.Option(help="Groups side by side; auto fills the GPUs.", show_default=False)
]
LinkOption: TypeAlias = Annotated[
    float | None, typer.Option(min=1e-3, help="Link speed of a GPU, 1e9 bytes/s. Known for H200.")
]
BackendOption: TypeAlias = Annotated[Backend | None, typer.Option(help="By default cuda from 2 GPUs on, else host.")]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def bad_usage(option: str, why: str) -> typer.BadParameter:
    """The error of an option or argument that makes no sense: exit code 2."""
    return typer.BadParameter(why, param_hint=option)


def check_seed(seed: int) -> int:
    """Refuse as bad usage a seed of more than 63 bits, which databases and generators do not take."""
    if seed.bit_length() > 63:
        raise typer.BadParameter(f"{seed} has more than 63 bits; pass a smaller number")
    return seed


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemOptions:
    """The options that name one problem, as typed on the command line."""

    op: OpOption
    shape: Annotated[str, typer.Option(help="The op's shape, e.g. 98304 or 4096x8192x3584 (docs/ops.md).")]
    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks.")]
    dtype: Annotated[str | None, typer.Option(help="Dtype of the payload; by default bfloat16.")] = None
    mode: Annotated[Mode | None, typer.Option(help="By default graph, eager on CPUs.")] = None
    reduction: Annotated[str | None, typer.Option(help="Reduction; by default the op's first.")] = None
    input_kind: Annotated[InputKind, typer.Option(help="Can peers address the input?")] = "plain"
    in_place: Annotated[bool, typer.Option("--in-place", help="The result overwrites the input.")] = False
    layout: LayoutOption = None
    scaling: ScalingOption = None

    def problem(self) -> Problem:
        """The problem that the options name, in graph mode unless they say otherwise."""
        spec, dtype = known_op(self.op), self.dtype or "bfloat16"
        problem = Problem(
            op=spec.name,
            shape=check_shape(self.shape, spec, may_be_empty=True),
            dtype=check_dtype(dtype),
            world_size=self.world_size,
            reduction=check_option("reduction", self.reduction, spec),
            input_kind=self.input_kind,
            in_place=self.in_place,
            layout=check_option("layout", self.layout, spec),
            scaling=check_option("scaling", self.scaling, spec, dtype),
            mode=self.mode or "graph",
        )
        return check_problem(problem)

    def problem_in(self, environment: Environment) -> Problem:
        """The problem, in eager mode on the host backend, which has no graphs."""
        problem = self.problem()
        if problem.in_place and not get_op(problem.op).in_place:
            raise bad_usage("--in-place", f"{problem.op} cannot overwrite its input; leave it out")
        if environment.is_host and self.mode == "graph":
            note(f"{NO_GRAPHS}: --mode graph is taken as eager")
        return replace(problem, mode="eager") if environment.is_host else problem


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions(ProblemOptions):
    """The options that name one problem, how a caller asks for it, and where: of `lookup` and of `explain`."""

    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the payload; by default the stored one, bfloat16 if there are several.")
    ] = None
    numerics: Annotated[NumericsPolicy, typer.Option(help="Numerics classes that may run.")] = "default"
    max_sms: Annotated[int | None, typer.Option(min=0, help="Upper limit on the kernel's SMs.")] = None
    hardware: HardwareOption = None
    borrow: BorrowOption = None
    db: DatabaseOption = None
    as_json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """The options that name the problems of a sweep, as typed: of `tune` and of `bench`."""

    op: Annotated[str | None, typer.Option(help="Op, e.g. all_reduce.", autocompletion=complete_op)] = None
    shape: Annotated[list[str] | None, typer.Option(help="By default the op's own (docs/ops.md).")] = None
    model: Annotated[
        list[str] | None, typer.Option(help="Models whose shapes to take.", autocompletion=complete_model)
    ] = None
    tp: Annotated[int | None, typer.Option(min=2, help="Tensor parallelism of --model.")] = None
    tokens: Annotated[
        list[str] | None,
        typer.Option(help=f"Of --model; by default 1, 2, 4 to {DEFAULT_TOKENS[-1]}."),
    ] = None
    dtype: Annotated[list[str] | None, typer.Option(help="By default the models', else bfloat16.")] = None
    world_size: Annotated[int | None, typer.Option(min=2, help="Ranks; by default all GPUs.")] = None
    mode: Annotated[SweptMode | None, typer.Option(help="By default graph, eager on CPUs.")] = None
    input_kind: Annotated[SweptKind, typer.Option(help="Can peers address inputs?")] = "plain"

    def models(self) -> list[Model]:
        """The models of `--model`."""
        models = [find_model(name) for name in split(self.model)]
        if models and split(self.shape):
            raise bad_usage(
                "--model",
                "a model's shapes and shapes of your own are two sweeps: pass --model or --shape, then the other",
            )
        for option, value in (("--tp", self.tp), ("--tokens", self.tokens)):
            if not models and value is not None:
                raise bad_usage(option, "it needs a model: pass --model as well")
        return models

    def ranks(self, backend: Backend | None = None) -> int:
        """The number of ranks, which is the degree of tensor parallelism where that is given; see `local_ranks`."""
        self.models()
        if self.tp is not None and self.world_size is not None and self.tp != self.world_size:
            raise bad_usage(
                "--tp",
                f"--tp {self.tp} and --world-size {self.world_size} are the same number for a model; pass one of them",
            )
        return local_ranks(self.tp or self.world_size, backend)

    def dtypes(self, spec: OpSpec) -> tuple[str, ...]:
        """The dtypes that are named, else the models', each once, else bfloat16."""
        named = split(self.dtype) or list(dict.fromkeys(model.dtype for model in self.models())) or ["bfloat16"]
        return tuple(check_option("dtype", name, spec) for name in named)

    def shapes(self, spec: OpSpec, world_size: int) -> tuple[tuple[int, ...], ...]:
        """The shapes that are named, or the op's in all of the models; none for the op's default shapes."""
        tokens = split(self.tokens)
        for text in tokens:
            if not text.isdecimal() or int(text) < 1:
                raise bad_usage("--tokens", f"{text!r} is not a number of tokens, 1 or more")
        if models := self.models():
            return shapes_for(models, world_size, tuple(map(int, tokens)) or DEFAULT_TOKENS, spec)
        return tuple(check_shape(text, spec) for text in split(self.shape))

    def scalings(self, spec: OpSpec) -> tuple[str, ...]:
        """The scalings of the models besides the op's usual one; none where no model ships in fp8."""
        known = dict.fromkeys(model.scaling for model in self.models() if model.scaling in spec.scalings)
        return (spec.scalings[0], *known) if any(known) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredOptions:
    """The options that say which rows of databases to show: of `db list` and of `db stats`."""

    op: OnlyOpOption = None
    hardware: HardwareOption = None
    everything: EverywhereOption = False
    db: DatabaseOption = None
    as_json: JsonOption = False


Options = TypeVar("Options", bound="ProblemOptions | SweepOptions | StoredOptions")


def takes(options: type[Options]) -> Callable[[Callable[Concatenate[Options, ...], None]], Callable[..., None]]:
    """Decorator of a verb whose first argument is `options`: typer sees the fields as options of the verb."""
    hints = get_type_hints(options, include_extras=True)
    shared = [one.replace(annotation=hints[one.name]) for one in inspect.signature(options).parameters.values()]

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
    """The op of that name, after every kernel file has been imported."""
    from tunedcomm import kernels

    kernels.discover()
    return get_op(name)


def known_variant(op: str, name: str) -> str:
    """The name of a variant of the op, which `known_op` has looked up."""
    try:
        return get_variant(op, name).name
    except UnknownNameError as error:
        raise UnknownNameError(
            f"{error} If a package should bring it, `tunedcomm doctor` lists the ops of packages."
        ) from None


def borrowed(values: list[str] | None) -> tuple[str, ...]:
    """Hardware whose rows serve, by `--borrow`, else by TUNEDCOMM_BORROW."""
    return settings.borrow.parse(",".join(split(values))) if values else settings.borrow()


def split(values: list[str] | None) -> list[str]:
    """Values of an option that may be repeated or take several, separated by commas."""
    return [part.strip() for value in values or [] for part in value.split(",") if part.strip()]


def modes_of(mode: SweptMode) -> tuple[Mode, ...]:
    """The modes that `--mode` of a sweep means."""
    return get_args(Mode) if mode == "both" else (mode,)


def kinds_of(kind: SweptKind) -> tuple[InputKind, ...]:
    """The input kinds that `--input-kind` of a sweep means."""
    return get_args(InputKind) if kind == "both" else (kind,)


def check_option(
    name: Literal["dtype", "layout", "reduction", "scaling"], value: str | None, spec: OpSpec, dtype: str = ""
) -> str:
    """The value of an option where the op has it; `none` for the one without a name; by default the op's first."""
    allowed = spec.scalings_of(dtype) if name == "scaling" else tuple(getattr(spec, f"{name}s")) or ("",)
    if value is None:
        return allowed[0]
    meant = "" if value == "none" else value
    if meant not in allowed:
        named = [name or "none" for name in allowed]
        whose = f"{spec.name} of {dtype}" if dtype else spec.name
        raise bad_usage(
            f"--{name}", f"{value!r} is not a {name} of {whose}{did_you_mean(value, named)} Allowed: {', '.join(named)}"
        )
    return meant


def check_dtype(dtype: str) -> str:
    """Refuse as bad usage a dtype that does not exist."""
    if dtype not in DTYPES:
        raise bad_usage(
            "--dtype", f"{dtype!r} is not a dtype{did_you_mean(dtype, DTYPES)} Allowed: {', '.join(DTYPES)}"
        )
    return dtype


def changed_options(problem: Problem, other: Problem) -> list[str]:
    """The options to add to a command that names one problem so that it names another of its op and shape."""
    names = ("dtype", "world_size", "mode", "reduction", "input_kind", "layout", "scaling")
    changed = [name for name in names if getattr(problem, name) != getattr(other, name)]
    words = [word for name in changed for word in (f"--{name.replace('_', '-')}", str(getattr(other, name) or "none"))]
    return words + (["--in-place"] if other.in_place and not problem.in_place else [])


_OTHER_SEPARATOR = re.compile(r"\d+(?:\s*[*×/;:]\s*\d+)+")
_MAX_ELEMENTS = 1 << 48


def check_shape(text: str, spec: OpSpec, *, may_be_empty: bool = False) -> tuple[int, ...]:
    """Read a shape of the op's form; one without elements may be asked about, but not measured."""
    try:
        shape = parse_shape(text)
    except ValueError as error:
        meant = "x".join(re.findall(r"\d+", text)) if _OTHER_SEPARATOR.fullmatch(text.strip()) else ""
        raise bad_usage("--shape", f"{error}; did you mean {meant!r}?" if meant else str(error)) from None
    if len(shape) != spec.rank_of_shape:
        found = plural(len(shape), "dimension")
        why = f"{text!r} has {found}, a shape of {spec.name} has {spec.rank_of_shape}: {spec.shape_help}"
        raise bad_usage("--shape", why)
    elements = math.prod(shape)
    if elements == 0 and not may_be_empty:
        raise bad_usage("--shape", f"{text!r} has no elements: there is nothing to measure")
    if elements > _MAX_ELEMENTS:
        raise bad_usage(
            "--shape", f"{text!r} has more elements than any memory holds; at most {_MAX_ELEMENTS}: {spec.shape_help}"
        )
    return shape


def check_problem(problem: Problem) -> Problem:
    """Refuse as bad usage a shape that the ranks cannot share."""
    try:
        get_op(problem.op).check(problem)
    except ValueError as error:
        raise bad_usage("--shape", str(error)) from None
    return problem


_BUDGET = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")


def parse_budget(text: str) -> float:
    """Read `90`, `90s`, `10m`, `1h30m` as seconds."""
    match = _BUDGET.fullmatch(text.strip().lower())
    hours, minutes, seconds = (float(part or 0) for part in match.groups()) if match else (0.0, 0.0, 0.0)
    total = 3600 * hours + 60 * minutes + seconds
    if total <= 0:
        raise bad_usage("--budget", f"{text!r} is not a time such as 90s, 10m or 1h30m")
    return total


def parse_gangs(text: str) -> int | None:
    """Read a number of gangs; None for `auto`."""
    if text.strip().lower() == "auto":
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        raise bad_usage("--gangs", f"{text!r} is neither auto nor a whole number above 0")
    return int(text)


_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*(%?)")


def parse_share(text: str) -> float:
    """Read `10%` or `0.1` as a tenth."""
    match = _SHARE.fullmatch(text.strip())
    share = -1.0 if match is None else float(match[1]) / (100 if match[2] else 1)
    if not 0 <= share <= 1:
        raise bad_usage("--tolerance", f"{text!r} is not a share such as 10% or 0.1, at most 100%")
    return share


def backend_or_default(backend: Backend | None = None) -> Backend:
    """The backend that was asked for, else `cuda` where there are two GPUs or more, else `host`."""
    return backend or ("cuda" if hardware.num_gpu_ranks() >= 2 else "host")


def local_ranks(world_size: int | None, backend: Backend | None = None) -> int:
    """Ranks to start: `world_size`, else one a GPU, else 2 on the host backend or on one GPU that they share."""
    from tunedcomm.symm.layout import MAX_WORLD_SIZE

    available = 0 if backend == "host" else hardware.num_gpu_ranks()
    if backend == "cuda" and available < 2:
        raise bad_usage(
            "--backend",
            f"it needs at least 2 GPUs, this machine has {available}; leave it out or pass --backend host to tune CPU "
            "ranks, whose timings say nothing about GPUs",
        )
    if available < 2 or ranks_share_a_gpu():
        if world_size is not None and world_size > MAX_WORLD_SIZE:
            raise bad_usage(
                "--world-size",
                f"{world_size} ranks are more than the {MAX_WORLD_SIZE} that kernels serve on one host; pass a "
                "smaller --world-size",
            )
        return world_size or 2
    if world_size is not None and available < world_size:
        raise bad_usage(
            "--world-size",
            f"{world_size} ranks need {world_size} GPUs, this machine has {available}; "
            'hide them with CUDA_VISIBLE_DEVICES="" to use the host backend',
        )
    return world_size or available
