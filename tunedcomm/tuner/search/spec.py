"""Problems of a sweep, expanded from options or given, and checked before anything starts."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from tunedcomm import kernels
from tunedcomm.errors import TuningError
from tunedcomm.spec import ITEMSIZE, InputKind, Mode, Problem, get_op, get_variant
from tunedcomm.tuner.gang.protocol import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """The problems to tune, and the settings of the gangs that tune them.

    Attributes:
        op: the op.
        settings: search and gangs; `machine_settings` has the usual ones.
        shapes: canonical shapes; the op's default shapes if empty.
        dtypes: payload dtypes.
        modes: call modes; `graph` on GPUs and `eager` on the host if empty.
        reductions: the op's first if empty.
        input_kinds, in_place: further options of the problems.
        layouts: the op's first if empty.
        scalings: the usual scaling of each dtype if empty; else each dtype is tuned with those that suit it.
        problems: tune exactly these, of any op, instead of the product of the options above.
        budget_s: seconds for the whole sweep; None: no limit.
        command: command line to store with the run.
    """

    op: str
    settings: Settings
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ("bfloat16",)
    modes: tuple[Mode, ...] = ()
    reductions: tuple[str, ...] = ()
    input_kinds: tuple[InputKind, ...] = ("plain",)
    in_place: tuple[bool, ...] = (False,)
    layouts: tuple[str, ...] = ()
    scalings: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    budget_s: float | None = None
    command: str = ""


def load_variants(plugins: Iterable[str]) -> None:
    """Import the kernels, and the modules `plugins`, which register further ops and variants.

    Raises:
        TuningError: a module cannot be imported.
    """
    kernels.discover()
    for plugin in plugins:
        try:
            importlib.import_module(plugin)
        except ImportError as error:
            raise TuningError(f"plugin module {plugin!r} cannot be imported: {error}") from error


def problems_of(spec: SweepSpec) -> tuple[Problem, ...]:
    """The problems of a sweep, each once, in the order in which they are tuned.

    Raises:
        TuningError: a problem has another world size than the gangs.
        UnknownNameError: no such op or variant.
        ValueError: an option that the op does not have.
    """
    problems = tuple(dict.fromkeys(spec.problems or _expand(spec)))
    for name in spec.settings.variants:
        get_variant(spec.op, name)
    for problem in problems:
        check_problem(problem)
    ranks = spec.settings.world_size
    if others := [problem for problem in problems if problem.world_size != ranks]:
        raise TuningError(f"a sweep has one world size, {ranks}; {others[0]} has another. Tune it by itself")
    return problems


def _expand(spec: SweepSpec) -> Iterable[Problem]:
    op, backend = get_op(spec.op), spec.settings.backend
    options = product(
        spec.dtypes,
        spec.modes or (("graph",) if backend == "cuda" else ("eager",)),
        spec.reductions or op.reductions[:1] or ("",),
        spec.input_kinds,
        spec.in_place,
        spec.layouts or op.layouts[:1],
    )
    for dtype, mode, reduction, input_kind, in_place, layout in options:
        allowed = op.scalings_of(dtype)
        suitable = [scaling for scaling in spec.scalings if scaling in allowed]
        for scaling in suitable or spec.scalings[:1] or allowed[:1]:
            for shape in spec.shapes or op.default_shapes(backend, ITEMSIZE[dtype]):
                yield Problem(
                    op=op.name,
                    shape=shape,
                    dtype=dtype,
                    world_size=spec.settings.world_size,
                    reduction=reduction,
                    input_kind=input_kind,
                    in_place=in_place,
                    layout=layout,
                    scaling=scaling,
                    mode=mode,
                )


def check_problem(problem: Problem) -> None:
    """Refuse a problem that its op does not have.

    Raises:
        UnknownNameError: no such op.
        ValueError: an option or a shape that the op does not have.
    """
    op = get_op(problem.op)
    for name, value, allowed in (
        ("dtype", problem.dtype, op.dtypes),
        ("reduction", problem.reduction, op.reductions or ("",)),
        ("layout", problem.layout, op.layouts),
        ("scaling", problem.scaling, op.scalings_of(problem.dtype)),
    ):
        if value not in allowed:
            known = ", ".join(other or "none" for other in allowed)
            raise ValueError(f"{op.name} of {problem.dtype} has no {name} {value!r}; allowed: {known}")
    if len(problem.shape) != op.rank_of_shape:
        raise ValueError(f"shape {problem.shape} does not fit {op.name}: {op.shape_help}")
    if problem.in_place and not op.in_place:
        raise ValueError(f"{op.name} cannot overwrite its input; leave out in_place (--in-place)")
    op.check(problem)
