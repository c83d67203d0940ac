"""What a sweep is asked to do, and what the machine makes of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from tunedcomm.errors import TuningError
from tunedcomm.hardware import num_gpu_ranks, ranks_share_a_gpu
from tunedcomm.spec import ITEMSIZE, InputKind, Mode, NumericsPolicy, OpSpec, Problem, get_op, get_variant
from tunedcomm.tuner.job import Settings

__all__ = ["SweepSpec", "gang_devices", "resolve", "resolve_machine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """What to tune and how hard. Whatever is None or empty is filled in for the machine, see `resolve`.

    Attributes:
        op: the op.
        shapes: canonical shapes; the op's default ones if empty.
        dtypes: payload dtypes.
        modes: call modes; `graph` on GPUs, `eager` on the host if empty.
        world_size: ranks; all GPUs, or 2 on the host.
        backend: `cuda` where there are at least two GPUs, else `host`.
        reductions: of the problems; by default the op's first.
        input_kinds, in_place: further options of the problems.
        layouts: the op's first if empty.
        scalings: the usual one of each dtype if empty; of those given each dtype is tuned with what suits it.
        problems: tune exactly these instead of the product of the above.
        variants: only these variants besides the library.
        trials: most candidates a problem, stored ones counted.
        patience: end a search when its best has stood for this many trials; 0 never does.
        budget_s: seconds for the whole sweep; None is no bound.
        seed: of the search and the inputs.
        policy: numerics classes that are measured.
        retry: try again what failed in an earlier sweep.
        finals: measure the winners over the whole sweep at the end.
        start_timeout_s, compile_timeout_s, trial_timeout_s: a gang silent for longer in that step is killed.
        peer_timeout_s: bound of the kernels' own waits.
        gangs: how many run at once; None fills the machine's GPUs, and is one on the host.
        plugins: modules that register further ops and variants.
        command: what to note as the run's command line.
        replay: a recording that answers in the gangs' place, on a machine without GPUs; None measures.
        replay_trial_s: seconds that each gang then pretends to need for a trial.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ("bfloat16",)
    modes: tuple[Mode, ...] = ()
    world_size: int | None = None
    backend: Literal["cuda", "host"] | None = None
    reductions: tuple[str, ...] = ()
    input_kinds: tuple[InputKind, ...] = ("plain",)
    in_place: tuple[bool, ...] = (False,)
    layouts: tuple[str, ...] = ()
    scalings: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    variants: tuple[str, ...] = ()
    trials: int | None = None
    patience: int | None = None
    budget_s: float | None = None
    seed: int = 0
    policy: NumericsPolicy = "any"
    retry: bool = False
    finals: bool = True
    start_timeout_s: float | None = None
    compile_timeout_s: float | None = None
    trial_timeout_s: float | None = None
    peer_timeout_s: float | None = None
    gangs: int | None = None
    plugins: tuple[str, ...] = ()
    command: str = ""
    replay: str | None = None
    replay_trial_s: float = 0.0


def resolve(spec: SweepSpec) -> tuple[tuple[Problem, ...], Settings]:
    """Fill in what the machine decides.

    Raises:
        TuningError: the machine has too few GPUs for the world size, or for so many gangs of it.
        UnknownNameError: no such op or variant.
        ValueError: an option that the op does not have.
    """
    settings = resolve_machine(spec)
    problems = tuple(dict.fromkeys(spec.problems or _expand(spec, settings.backend, settings.world_size)))
    for name in spec.variants:
        get_variant(spec.op, name)
    if strangers := [problem for problem in problems if problem.world_size != settings.world_size]:
        raise TuningError(
            f"a sweep has one world size, {settings.world_size}; {strangers[0]} has another. Tune it by itself"
        )
    return problems, settings


def resolve_machine(spec: SweepSpec) -> Settings:
    """The part of `resolve` that asks for no op.

    Raises:
        TuningError: the machine has too few GPUs for the world size, or for so many gangs of it.
    """
    if spec.replay is not None:
        return _replay_settings(spec, spec.replay)
    gpus = num_gpu_ranks() if spec.backend != "host" else 0
    backend: Literal["cuda", "host"] = spec.backend or ("cuda" if gpus >= 2 else "host")
    world_size = spec.world_size or (spec.problems[0].world_size if spec.problems else 0)
    world_size = world_size or (gpus if backend == "cuda" and not ranks_share_a_gpu() else 2)
    if world_size < 2 or (backend == "cuda" and world_size > gpus):
        raise TuningError(
            f"world size {world_size} cannot be tuned here: this machine has {gpus} usable GPUs and a group needs "
            "at least 2 ranks; pass --world-size with a smaller number, or --backend host for CPU ranks"
        )
    fitting = 1 if ranks_share_a_gpu() else gpus // world_size
    gangs = _count_gangs(spec.gangs, fitting if backend == "cuda" else None, gpus, world_size)
    return replace(_settings(spec, backend, world_size), gangs=gangs)


def _replay_settings(spec: SweepSpec, recording: str) -> Settings:
    """The recording decides what this machine decides otherwise."""
    from tunedcomm.dispatch.communicator import limits_for
    from tunedcomm.tuner.recording import read_recording

    records = read_recording(Path(recording))
    environment, world_size = records[0].environment, records[0].problem.world_size
    return replace(
        _settings(spec, "cuda", world_size),
        gangs=spec.gangs or 1,
        replay=recording,
        replay_trial_s=spec.replay_trial_s,
        replay_limits=limits_for(environment, world_size),
    )


def _count_gangs(asked: int | None, fitting: int | None, gpus: int, world_size: int) -> int:
    """How many gangs run at once; `fitting` is None where nothing but patience bounds them."""
    if asked is not None and asked < 1:
        raise TuningError(f"a sweep needs at least 1 gang, got {asked}")
    if fitting is None:
        return asked or 1
    if asked is not None and asked > fitting:
        raise TuningError(
            f"{asked} gangs of {world_size} ranks need {asked * world_size} GPUs and this machine has {gpus} usable "
            f"ones: at most {fitting} fit; pass --gangs {fitting}, or auto"
        )
    return asked or fitting


def gang_devices(settings: Settings) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each gang: its share of the GPUs that this process may use, which no other gang has."""
    if settings.backend == "host" or settings.replay is not None:
        return [""] * settings.gangs
    if ranks_share_a_gpu():
        return [os.environ.get("CUDA_VISIBLE_DEVICES") or "0"]
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = visible or [str(index) for index in range(settings.gangs * settings.world_size)]
    starts = range(0, settings.gangs * settings.world_size, settings.world_size)
    return [",".join(names[start : start + settings.world_size]) for start in starts]


def _expand(spec: SweepSpec, backend: Literal["cuda", "host"], world_size: int) -> tuple[Problem, ...]:
    op = get_op(spec.op)
    modes: tuple[Mode, ...] = spec.modes or (("graph",) if backend == "cuda" else ("eager",))
    known = op.reductions or ("",)
    reductions = spec.reductions or known[:1]
    layouts = spec.layouts or op.layouts[:1]
    for name, given, allowed in (
        ("reduction", reductions, known),
        ("dtype", spec.dtypes, op.dtypes),
        ("layout", layouts, op.layouts),
    ):
        if wrong := [value for value in given if value not in allowed]:
            raise ValueError(f"{op.name} has no {name} {wrong[0]!r}; allowed: {', '.join(allowed)}")
    if wrong_shapes := [shape for shape in spec.shapes if len(shape) != op.rank_of_shape]:
        raise ValueError(f"shape {wrong_shapes[0]} does not fit {op.name}: {op.shape_help}")
    if True in spec.in_place and not op.in_place:
        raise ValueError(f"{op.name} cannot overwrite its input; leave out in_place (--in-place)")
    options = product(spec.dtypes, modes, reductions, spec.input_kinds, spec.in_place, layouts)
    problems = tuple(
        Problem(
            op=op.name,
            shape=shape,
            dtype=dtype,
            world_size=world_size,
            reduction=reduction,
            input_kind=input_kind,
            in_place=in_place,
            layout=layout,
            scaling=scaling,
            mode=mode,
        )
        for dtype, mode, reduction, input_kind, in_place, layout in options
        for scaling in _scalings(spec, op, dtype)
        for shape in spec.shapes or op.default_shapes(backend, ITEMSIZE[dtype])
    )
    for problem in problems:
        op.check(problem)
    return problems


def _scalings(spec: SweepSpec, op: OpSpec, dtype: str) -> tuple[str, ...]:
    """What problems of one dtype are tuned with.

    Raises:
        ValueError: none of those asked for suits the dtype.
    """
    allowed = op.scalings_of(dtype)
    if not spec.scalings:
        return allowed[:1]
    if not (found := tuple(scaling for scaling in spec.scalings if scaling in allowed)):
        raise ValueError(
            f"{op.name} of {dtype} has no scaling {spec.scalings[0]!r}; allowed: "
            f"{', '.join(name or 'none' for name in allowed)}"
        )
    return found


def _settings(spec: SweepSpec, backend: Literal["cuda", "host"], world_size: int) -> Settings:
    """Interpreted launches take about 0.1 s, so the host gets few trials, few samples and patient watchdogs."""
    if backend == "cuda":
        base = Settings(backend=backend, world_size=world_size, trials=160, patience=48)
    else:
        base = Settings(
            backend=backend,
            world_size=world_size,
            trials=8,
            first_rounds=2,
            more_rounds=3,
            final_rounds=3,
            trial_timeout_s=60.0,
            peer_timeout_s=20.0,
        )
    asked: dict[str, Any] = {
        "trials": spec.trials,
        "patience": spec.patience,
        "start_timeout_s": spec.start_timeout_s,
        "compile_timeout_s": spec.compile_timeout_s,
        "trial_timeout_s": spec.trial_timeout_s,
        "peer_timeout_s": spec.peer_timeout_s,
    }
    return replace(
        base,
        seed=spec.seed,
        policy=spec.policy,
        variants=spec.variants,
        retry=spec.retry,
        finals=spec.finals,
        plugins=spec.plugins,
        **{name: value for name, value in asked.items() if value is not None},
    )
