"""Problems, ops and variants, and the registries that hold them.

A leaf: no torch, no database. Kernel files register their `OpSpec` and `Variant` objects here when they are imported
(`tunedcomm.kernels.discover()` imports them all); tuner, dispatcher, command line and docs read the registries.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import logging
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from tunedcomm.errors import ConfigError, UnknownNameError
from tunedcomm.space import Config, Space, Value

Mode: TypeAlias = Literal["graph", "eager"]
InputKind: TypeAlias = Literal["plain", "symmetric"]
Numerics: TypeAlias = Literal["ordered", "library", "unordered", "quantized"]
NumericsPolicy: TypeAlias = Literal["default", "ordered", "any"]

ITEMSIZE: Mapping[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}
DTYPES: tuple[str, ...] = tuple(ITEMSIZE)

_ADMITTED: Mapping[str, frozenset[str]] = {
    "default": frozenset({"ordered", "library", "quantized"}),
    "ordered": frozenset({"ordered"}),
    "any": frozenset({"ordered", "library", "unordered", "quantized"}),
}


logger = logging.getLogger("tunedcomm")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """End of a sentence about an unknown name: `; did you mean 'x' or 'y'?`, or a full stop if none is near."""
    close = difflib.get_close_matches(name.strip().lower(), list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(other) for other in close)}?" if close else "."


def parse_shape(text: str) -> tuple[int, ...]:
    """Read `4096x8192x3584` or `98304`.

    Raises:
        ValueError: anything else.
    """
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        raise ValueError(f"shape {text!r} is not of the form N or MxNxK, e.g. 98304 or 4096x8192x3584") from None
    if any(extent < 0 for extent in shape):
        raise ValueError(f"shape {text!r} has a negative extent")
    return shape


def format_shape(shape: Sequence[int]) -> str:
    """Write a shape as `parse_shape` reads it."""
    return "x".join(str(extent) for extent in shape)


def admits(policy: NumericsPolicy, numerics: Numerics) -> bool:
    """True if a caller's numerics policy allows a variant of this numerics class."""
    return numerics in _ADMITTED[policy]


def widest(policies: Iterable[NumericsPolicy]) -> NumericsPolicy:
    """The policy that admits the most classes."""
    return max(policies, key=lambda policy: len(_ADMITTED[policy]))


class _Counted:
    """Numbers of a problem that checks ask for again and again."""

    __slots__ = ("nbytes", "numel")
    nbytes: int
    numel: int


@dataclass(frozen=True, slots=True, order=True)
class Problem(_Counted):
    """An op at one canonical shape, with everything that changes which kernels may run.

    Attributes:
        op: name of a registered op.
        shape: canonical shape: (numel,) for elementwise collectives, (M, N, K) for fused GEMMs.
        dtype: name of the payload's dtype, one of `DTYPES`.
        world_size: number of ranks of the group.
        reduction: `sum`, `avg`, `max`, `min`, or "" where the op reduces nothing.
        input_kind: `symmetric` if peers can address the input, else `plain`.
        in_place: the result overwrites the input.
        layout: op-specific memory layout, e.g. `nk` for a transposed GEMM operand.
        scaling: op-specific scaling, e.g. `rowwise`.
        mode: `graph` inside CUDA graphs, `eager` outside.
        numel: product of the canonical shape.
        nbytes: `numel` times the dtype's size: the message size of elementwise collectives.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str
    world_size: int
    reduction: str = "sum"
    input_kind: InputKind = "plain"
    in_place: bool = False
    layout: str = ""
    scaling: str = ""
    mode: Mode = "graph"

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            hint = did_you_mean(str(self.dtype), DTYPES)
            raise UnknownNameError(f"unknown dtype {self.dtype!r}{hint} The dtypes are {', '.join(DTYPES)}")
        if not isinstance(self.shape, tuple):
            raise ValueError(f"shape must be a tuple, e.g. (4096,), got {self.shape!r}")
        if self.world_size < 1:
            raise ValueError(f"world_size must be >= 1, got {self.world_size}")
        if self.input_kind not in ("plain", "symmetric"):
            raise ValueError(f"input_kind must be 'plain' or 'symmetric', got {self.input_kind!r}")
        if self.mode not in ("graph", "eager"):
            raise ValueError(f"mode must be 'graph' or 'eager', got {self.mode!r}")
        numel = math.prod(self.shape)
        object.__setattr__(self, "numel", numel)
        object.__setattr__(self, "nbytes", numel * ITEMSIZE[self.dtype])

    def __reduce__(self) -> tuple[type[Problem], tuple[Any, ...]]:
        return Problem, tuple(getattr(self, f.name) for f in fields(self))

    @property
    def family(self) -> Problem:
        """This problem without its shape: problems of one family are neighbours of each other."""
        return Problem(
            self.op, (), self.dtype, self.world_size, self.reduction, self.input_kind, self.in_place, self.layout,
            self.scaling, self.mode,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, shape as a list."""
        return {f.name: list(self.shape) if f.name == "shape" else getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Problem:
        """Inverse of `to_dict`.

        Raises:
            ValueError: a field is missing, unknown or of the wrong type.
        """
        known = {f.name: f for f in fields(cls)}
        if unknown := sorted(set(data) - set(known)):
            raise ValueError(f"unknown problem field {unknown[0]!r}; the fields are {sorted(known)}")
        try:
            values = {**data, "shape": tuple(int(extent) for extent in data["shape"])}
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a problem: {dict(data)!r} ({error})") from None

    @property
    def digest(self) -> str:
        """SHA-256 over the canonical JSON, first 32 hex digits."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def __str__(self) -> str:
        extras = [self.reduction] if self.reduction not in ("", "sum") else []
        extras += ["symmetric"] if self.input_kind == "symmetric" else []
        extras += ["in place"] if self.in_place else []
        extras += [text for text in (self.layout, self.scaling) if text]
        tail = f" ({', '.join(extras)})" if extras else ""
        return f"{self.op} {format_shape(self.shape)} {self.dtype} world_size={self.world_size} {self.mode}{tail}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that a machine and a group's workspace set; the same on every rank of a group.

    Attributes:
        backend: `cuda`, or `host` for CPU tensors with interpreted kernels.
        num_sms: streaming multiprocessors of the GPU (1 on the host backend).
        multicast: the fabric reports NVLink multicast and it is not switched off.
        symmetric: all peers can address each other's memory; where not, only variants that do without can run.
        ranks_per_node: ranks of each node of a group that spans several, if all have as many and can address each
            other's memory; else 0.
        emulated_multicast: multimem kernels may run through their emulation (host backend, tests only).
        max_blocks: rows of the signal area: no grid may be larger.
        staging_bytes: largest message that two-shot staging holds.
        one_shot_bytes: largest message that one-shot staging holds.
        stage_bytes: bytes of one of the two stages of the Lamport arena.
        panel_bytes: largest panels (matrices of fused GEMMs) that may be allocated.
        launch_pdl: programmatic dependent launch may be used.
        host_cores: cores of the host whose shared memory serves the group's CPU tensors without kernels; else 0.
        ordered: the policy admits `ordered` alone. Configs of such variants whose bits may differ cannot run then, and
            variants that stand in for the library can.
    """

    backend: Literal["cuda", "host"]
    num_sms: int
    multicast: bool
    max_blocks: int
    staging_bytes: int
    one_shot_bytes: int
    stage_bytes: int
    symmetric: bool = True
    ranks_per_node: int = 0
    emulated_multicast: bool = False
    panel_bytes: int = 0
    launch_pdl: bool = True
    host_cores: int = 0
    ordered: bool = False


_Class = TypeVar("_Class", bound=type)


def _renamed(**names: str) -> Callable[[_Class], _Class]:
    """Let a class of plug-ins take its former keywords, too."""

    def decorate(cls: _Class) -> _Class:
        changed: Any = cls
        begin = changed.__init__

        @functools.wraps(begin)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            begin(self, *args, **{names.get(word, word): value for word, value in kwargs.items()})

        changed.__init__ = init
        return cls

    return decorate


@_renamed(cold="time_cold", cleared="mask_unspecified")
@dataclass(frozen=True, slots=True)
class OpSpec:
    """An op: its computation and the check of its results. Tensors are torch's, typed loosely to keep this a leaf.

    Attributes:
        name: the op's name.
        summary: one line for docs and the command line.
        reductions: reductions that `Problem.reduction` may name.
        dtypes: dtypes that at least one variant besides the library takes.
        shape_help: what the canonical shape means, for error texts.
        rank_of_shape: length of the canonical shape.
        make_inputs: `(problem, rank, seed, kind, device)` to that rank's inputs, the same wherever they are made;
            `kind` is `random` or `integers` (small whole numbers whose every partial sum is exact in the dtype).
        make_outputs: `(problem, device)` to freshly allocated output tensors.
        reference: `(problem, inputs of every rank, rank)` to the expected outputs in float64.
        tolerance: dtype, or the scaling's first part, to the largest ‖out − ref‖ / ‖ref‖ of a right variant on random
            inputs.
        message_bytes: bytes by which sizes of the op are compared (columns of bench/results say how it is counted).
        busbw_factor: world size to bytes that cross a rank's link per byte of payload, by nccl-tests' definition; None
            where the op has no such factor.
        default_shapes: backend to the shapes that `tunedcomm tune` sweeps with no shape given, dtype size as argument.
        ordered_reference: like `reference`, but the exact bits of every `ordered` variant, in the payload's dtype.
        quantized_references: where `scaling` names a wire, likewise the results that `quantized` variants may give.
        in_place: the result may overwrite the input.
        layouts, scalings: what a `Problem` may have there; what is swept by default comes first.
        related_forms: the other (layouts, scalings) of the same shape whose measurements may answer for a problem,
            because they move the same bytes between the ranks; each list begins with the nearest.
        time_cold: launches are timed with inputs that come from memory, not from the cache, as weights do.
        check: raises ValueError for a problem whose shape the ranks cannot share.
        mask_unspecified: `(problem, inputs, outputs)` to the same with zeros where the op specifies nothing; one of
            the two may be empty.
        is_per_rank: `message_bytes` counts one rank's part; the payload has as many parts as there are ranks.
        is_gemm: a GEMM of shape (M, N, K) fused with a collective. `message_bytes` is what leaves a rank, and the GEMM
            alone is a lower bound of the op's time.
        model_shapes: `tunedcomm.cli.models.Shard` to the op's canonical shapes in that model; None where no model says
            what shapes the op has.
        skewed_inputs: the `kind` of inputs that load the ranks unevenly; empty if the op has none.
        symmetric_outputs: where `Problem.input_kind` is symmetric, peers address the outputs, too.
        shape_reach: of an op whose kernels run unmeasured, after a check at their first call: the factor, for each
            extent of the shape, within which the winner of a measured shape serves; else empty.
    """

    name: str
    summary: str
    reductions: tuple[str, ...]
    dtypes: tuple[str, ...]
    shape_help: str
    rank_of_shape: int
    make_inputs: Callable[[Problem, int, int, str, Any], tuple[Any, ...]]
    make_outputs: Callable[[Problem, Any], tuple[Any, ...]]
    reference: Callable[[Problem, Sequence[tuple[Any, ...]], int], tuple[Any, ...]]
    tolerance: Mapping[str, float]
    message_bytes: Callable[[Problem], int]
    busbw_factor: Callable[[int], float] | None
    default_shapes: Callable[[str, int], list[tuple[int, ...]]]
    ordered_reference: Callable[[Problem, Sequence[tuple[Any, ...]], int], tuple[Any, ...]] | None = None
    quantized_references: Callable[[Problem, Sequence[tuple[Any, ...]], int], Sequence[tuple[Any, ...]]] | None = None
    in_place: bool = False
    layouts: tuple[str, ...] = ("",)
    scalings: tuple[str, ...] = ("",)
    related_forms: Callable[[Problem], tuple[Iterable[str], Iterable[str]]] = field(default=lambda problem: ((), ()))
    time_cold: bool = False
    check: Callable[[Problem], object] = field(default=lambda problem: None)
    mask_unspecified: Callable[[Problem, tuple[Any, ...], tuple[Any, ...]], tuple[tuple[Any, ...], tuple[Any, ...]]] = (
        field(default=lambda problem, inputs, outputs: (inputs, outputs))
    )
    is_per_rank: bool = False
    is_gemm: bool = False
    model_shapes: Callable[[Any], Iterable[tuple[int, ...]]] | None = None
    skewed_inputs: str = ""
    symmetric_outputs: bool = False
    shape_reach: tuple[int, ...] = ()

    def library_copies(self, problem: Problem) -> bool:
        """True if the library first copies the input, which it works on in place."""
        return self.in_place and not problem.in_place

    def payload_bytes(self, message_bytes: int, world_size: int) -> int:
        """Bytes that algbw counts, as nccl-tests does, of a message of this op."""
        return message_bytes * world_size if self.is_per_rank else message_bytes

    def tolerance_of(self, problem: Problem) -> float:
        """The tolerance for a problem, of the results' dtype where the layout names one; 0 where nothing may differ."""
        if problem.layout in self.tolerance:  # sums of 16-bit floats that are never rounded
            return self.tolerance[problem.layout]
        named = (problem.scaling.partition("+")[0] or problem.dtype, *problem.layout.split("+")[1:])
        return max(self.tolerance.get(name, 0.0) for name in named)

    def scalings_of(self, dtype: str) -> tuple[str, ...]:
        """Values of `Problem.scaling` for payloads of `dtype`, the usual one first: fp8 operands have scales."""
        if "rowwise" not in self.scalings:
            return self.scalings
        return ("rowwise", "tensorwise") if dtype.startswith("float8") else ("",)


@_renamed(bounded="waits_time_out", untuned="default_beats_library")
@dataclass(frozen=True)
class Variant:
    """One algorithm for one op: its kernel or library call, its space, and its limits.

    Any package may bring variants, and a call may ask all variants of its op. So callers use `infeasible_reason` and
    `default_config`, in which a variant that raises is passed over and the others still run.

    Attributes:
        op: name of the op.
        name: name of the variant, unique within the op.
        numerics: numerics class of its results.
        summary: one line for docs and `explain`.
        space: the configs it may have.
        infeasible: `(problem, config, limits)` to a sentence that says why it cannot run, or None.
        default: `(problem, limits)` to the config to try first.
        bind: `(problem, config, workspace)` to a launch `(inputs, outputs, stream) -> None`. The stream is a raw
            handle (0 on the host). Compiles; never called while a graph is captured.
        num_blocks: `(problem, config)` to the number of thread blocks (SMs at most) it occupies; 0 for copy engines
            and -1 where it is not known (library calls).
        num_rounds: `(problem, config)` to how often its grid goes round to do all the work; 0 where that is not known.
            Dispatch between the measured sizes goes by whether once is enough.
        kernels: the Triton functions whose source, with all they call, makes the variant's source hash.
        compile_requests: `(problem, config)` to the binaries that `bind` will need; see `kernels.common.launch`.
        version: raise it to retire stored rows when something outside `kernels` changes what is measured.
        waits_time_out: its waits for peers end. Other variants run only when forced: a lost peer would leave them
            spinning.
        default_beats_library: `(problem, limits)` to True where its default config is known to beat the library without
            a measurement; dispatch runs that config until something is measured.
        same_in_both_modes: `infeasible` and `num_blocks` give the same answer in graphs and in eager calls.
        lane_room: `(problem, config, layout)` to the `symm.layout.Room` that it uses of a lane of the workspace, for
            which alone there may be memory; None for all of it.
    """

    op: str
    name: str
    numerics: Numerics
    summary: str
    space: Space
    infeasible: Callable[[Problem, Config, Limits], str | None]
    default: Callable[[Problem, Limits], dict[str, Value]]
    bind: Callable[[Problem, Config, Any], Callable[[tuple[Any, ...], tuple[Any, ...], int], None]]
    num_blocks: Callable[[Problem, Config], int]
    kernels: tuple[Any, ...] = ()
    compile_requests: Callable[[Problem, Config], Iterable[Any]] = field(default=lambda problem, config: ())
    num_rounds: Callable[[Problem, Config], int] = field(default=lambda problem, config: 0)
    version: int = 1
    waits_time_out: bool = True
    default_beats_library: Callable[[Problem, Limits], bool] = field(default=lambda problem, limits: False)
    same_in_both_modes: bool = False
    lane_room: Callable[[Problem, Config, Any], Any] | None = None

    @property
    def is_library(self) -> bool:
        """True for the fall-back that every op has."""
        return self.name == "library"

    def infeasible_reason(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        """Why the variant cannot run `problem` with `config`, or None; an `infeasible` that raises is a reason."""
        try:
            reason: str | None = self._ask(
                "infeasible", (str, type(None)), "None or a sentence", problem, config, limits
            )
        except ConfigError as error:
            return str(error)
        return reason

    def default_config(self, problem: Problem, limits: Limits) -> dict[str, Value]:
        """The config to try first.

        Raises:
            ConfigError: `default` raises, or returns no dict.
        """
        try:
            config: dict[str, Value] = self._ask("default", (dict,), "a dict of axis to value", problem, limits)
        except ConfigError as error:
            raise ConfigError(f"{self.op}.{self.name}: {error}") from error
        return config

    def _ask(self, function: str, types: tuple[type, ...], wanted: str, *arguments: object) -> Any:
        """Call one of the functions; a ConfigError, logged once, if it raises or returns another type."""
        try:
            found: object = getattr(self, function)(*arguments)
            if isinstance(found, types):
                return found
            why = f"its {function}() must return {wanted}, and returned {found!r:.80}"
        except Exception as error:  # noqa: BLE001 - of whatever package
            frame = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error}"
            why = f"its {function}() raised {text:.200} at {frame.filename}:{frame.lineno}"
        key = (self.op, self.name, function)
        if key not in _warned:
            _warned.add(key)
            logger.warning("variant %s of %s is passed over: %s", self.name, self.op, why)
        raise ConfigError(why)


_warned: set[tuple[str, str, str]] = set()


@dataclass(frozen=True)
class Candidate:
    """A variant's name with one of its configs."""

    # Hash, name and valid config are kept, since a choice asks for them often. As fields `asdict` would show them.
    __slots__ = ("_hash", "_name", "_valid", "config", "op", "variant")
    _hash: ClassVar[int]
    _name: ClassVar[str]
    _valid: ClassVar[tuple[Variant, dict[str, Value]] | None]

    op: str
    variant: str
    config: tuple[tuple[str, Value], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.op, self.variant, self.config)))
        object.__setattr__(self, "_name", "")
        object.__setattr__(self, "_valid", None)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Candidate], tuple[Any, ...]]:
        """Pickle the contents alone: hashes of strings differ from process to process."""
        return Candidate, (self.op, self.variant, self.config)

    @classmethod
    def of(cls, op: str, variant: str, config: Config) -> Candidate:
        """Build from a mapping; the axes are sorted so that equal configs are equal candidates."""
        return cls(op, variant, tuple(sorted(config.items())))

    @property
    def config_dict(self) -> dict[str, Value]:
        return dict(self.config)

    def validate(self, variant: Variant) -> dict[str, Value]:
        """The config as a point of the variant's space; looked at once.

        Raises:
            ConfigError: it is not in the space.
        """
        if self._valid is None or self._valid[0] is not variant:
            object.__setattr__(self, "_valid", (variant, variant.space.validate(self.config_dict)))
            assert self._valid is not None
        return dict(self._valid[1])

    def __str__(self) -> str:
        if not self._name:
            inner = ", ".join(f"{name}={value}" for name, value in self.config)
            object.__setattr__(self, "_name", f"{self.variant}({inner})")
        return self._name


_ops: dict[str, OpSpec] = {}
_variants: dict[tuple[str, str], Variant] = {}


def register_op(spec: OpSpec) -> OpSpec:
    """Add an op; a second registration of the same name replaces the first (a module that is reloaded)."""
    _ops[spec.name] = spec
    return spec


def register_variant(variant: Variant) -> Variant:
    """Add a variant; a second registration of the same op and name replaces the first."""
    if variant.numerics not in _ADMITTED["any"]:
        raise ValueError(f"numerics must be one of {sorted(_ADMITTED['any'])}, got {variant.numerics!r}")
    _variants[variant.op, variant.name] = variant
    return variant


def ops() -> dict[str, OpSpec]:
    """Registered ops by name, sorted."""
    return dict(sorted(_ops.items()))


def variants(op: str) -> dict[str, Variant]:
    """Registered variants of `op` by name, the library first, then sorted."""
    found = [variant for (of, _), variant in _variants.items() if of == op]
    return {v.name: v for v in sorted(found, key=lambda v: (not v.is_library, v.name))}


def usual_variants(op: str, *, on_gpu: bool) -> set[str]:
    """Variants that are measured unless others are named: on CPUs all but interpreted kernels."""
    return {name for name, variant in variants(op).items() if on_gpu or not variant.kernels}


def find_op(name: str) -> OpSpec | None:
    """The op of that name, or None."""
    return _ops.get(name)


def get_op(name: str) -> OpSpec:
    """The op of that name.

    Raises:
        UnknownNameError: with the nearest names.
    """
    if name not in _ops:
        raise UnknownNameError(f"unknown op {name!r}{did_you_mean(name, _ops)} The ops are {', '.join(sorted(_ops))}.")
    return _ops[name]


def find_variant(op: str, name: str) -> Variant | None:
    """The variant of that op and name, or None."""
    return _variants.get((op, name))


def get_variant(op: str, name: str) -> Variant:
    """The variant of that op and name.

    Raises:
        UnknownNameError: with the nearest names.
    """
    if (op, name) not in _variants:
        known = list(variants(op))
        raise UnknownNameError(
            f"op {op!r} has no variant {name!r}{did_you_mean(name, known)} Its variants are {', '.join(known)}."
        )
    return _variants[op, name]


def candidates(problem: Problem, limits: Limits, policy: NumericsPolicy = "default") -> list[Candidate]:
    """Every feasible candidate of `problem`, variant by variant in registry order."""
    return [
        Candidate.of(problem.op, variant.name, config)
        for variant in variants(problem.op).values()
        if admits(policy, variant.numerics)
        for config in variant.space.enumerate()
        if variant.infeasible_reason(problem, config, limits) is None
    ]


def admits_library(policy: NumericsPolicy, op: str) -> bool:
    """True if the policy admits the class of the op's library, which is ordered where the op moves bytes."""
    return admits(policy, get_variant(op, "library").numerics)


def check_candidate(problem: Problem, candidate: Candidate, limits: Limits, *, by_name: bool = True) -> str | None:
    """Why `candidate` cannot run `problem`, or None; see `checker`."""
    return checker(candidate, limits, by_name=by_name)(problem)


def checker(candidate: Candidate, limits: Limits, *, by_name: bool = True) -> Callable[[Problem], str | None]:
    """A function that says why `candidate` cannot run a problem, or None; valid as long as the variant is registered.

    Without `by_name` variants whose waits have no bound are refused, too: dispatch does not choose them by itself.
    """
    try:
        variant = get_variant(candidate.op, candidate.variant)
        config = candidate.validate(variant)
    except (UnknownNameError, ConfigError) as error:
        reason = str(error)
        return lambda problem: reason
    if not (variant.waits_time_out or by_name):
        refusal = f"{variant.name} would wait for a lost peer for ever; it only runs when it is forced"
        return lambda problem: refusal
    infeasible = variant.infeasible

    def check(problem: Problem) -> str | None:
        try:
            reason = infeasible(problem, config.copy(), limits)
            if reason is None or isinstance(reason, str):
                return reason
        except Exception:  # noqa: BLE001, S110 - asked again, for a sentence about it
            pass
        return variant.infeasible_reason(problem, config, limits)

    return check


# Of a space with more configs only the default is asked: defaults look for the nearest feasible config.
_FEW_CONFIGS = 4096


def why_no_kernel(problem: Problem, limits: Limits, policy: NumericsPolicy) -> str | None:
    """Why no variant but the library that `policy` admits can run `problem` in any config; None if one can."""
    reasons: dict[str, list[str]] = {}
    for variant in variants(problem.op).values():
        if variant.is_library or not variant.waits_time_out or not admits(policy, variant.numerics):
            continue
        try:
            reason = variant.infeasible_reason(problem, variant.default_config(problem, limits), limits)
        except ConfigError as error:
            reason = str(error)
        if reason is None or (
            variant.space.size <= _FEW_CONFIGS
            and any(variant.infeasible_reason(problem, config, limits) is None for config in variant.space.enumerate())
        ):
            return None
        reasons.setdefault(reason, []).append(variant.name)
    found = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
    return found or f"{problem.op} has no such variant"
