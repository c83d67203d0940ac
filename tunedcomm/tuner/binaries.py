"""Compiles the binaries of all stored winners into Triton's cache, on a machine that needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import get_args

from tunedcomm import kernels
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.hardware import Environment
from tunedcomm.kernels.common import binaries
from tunedcomm.kernels.common.launch import SHARE_OF_EAGER, CompileRequest, SharedGrid
from tunedcomm.selection.select import Registered, winners
from tunedcomm.spec import Candidate, Mode, NumericsPolicy, Problem, get_variant
from tunedcomm.symm.layout import limits_for
from tunedcomm.tuner.measure.compile_pool import CompilePool, num_workers

_REPORT_S = 0.5


@dataclass(frozen=True, slots=True)
class Compiled:
    """The binaries of one kind of GPU.

    Attributes:
        compute_capability: e.g. 90.
        num_winners: problems and call modes with a kernel as winner.
        num_binaries: asked for, without those with fewer registers.
        errors: of the compiler, one for each binary that failed.
    """

    compute_capability: int
    num_winners: int
    num_binaries: int
    errors: tuple[str, ...]


def compile_winners(
    layers: Sequence[Layer],
    compute_capability: int | None = None,
    on_progress: Callable[[str], None] = lambda now: None,
) -> list[Compiled]:
    """Compile for every GPU in the layers' rows, or for one compute capability alone; leaves a manifest in the cache.

    `on_progress` is called with what happens now, as `part: step`.

    Raises:
        OSError: Triton's cache directory cannot be written.
    """
    kernels.discover()
    binaries.folder().mkdir(parents=True, exist_ok=True)
    chosen: dict[int, dict[Environment, set[tuple[Problem, Candidate]]]] = {}
    for environment, found in _winners(layers, compute_capability, on_progress):
        chosen.setdefault(environment.compute_capability, {}).setdefault(environment, set()).update(found)
    made = []
    for target, by_environment in chosen.items():
        requests = dict.fromkeys(
            request
            for environment, found in by_environment.items()
            for problem, candidate in sorted(found, key=str)
            for request in requests_of(problem, candidate, environment.num_sms)
        )
        with closing(CompilePool(num_workers())) as pool:
            pool.submit(requests, target)
            while not pool.drain(_REPORT_S):
                on_progress(f"compiling for sm_{target}: {len(pool.outcomes())} of {len(requests)} binaries")
            said = pool.outcomes()
        errors = [error for error in said if error] + ["a compiling process has died"] * (len(requests) - len(said))
        binaries.write_manifest(target, kernels.source_hashes())
        made.append(Compiled(target, sum(map(len, by_environment.values())), len(requests), tuple(errors)))
    return made


def requests_of(problem: Problem, candidate: Candidate, num_sms: int) -> Iterator[CompileRequest | SharedGrid]:
    """Yield the binaries that plans bind: eager plans take half of the GPU, and no `launch_pdl` beside graphs."""
    variant, config = get_variant(candidate.op, candidate.variant), candidate.config_dict
    if problem.mode == "graph":
        yield from variant.compile_requests(problem, config)
        return
    blocks = variant.num_blocks(problem, config)
    grids = [blocks] if blocks > 0 else [num_sms, 2 * num_sms]  # fused GEMMs take one or two blocks an SM
    for each in [config, {**config, "launch_pdl": False}] if config.get("launch_pdl") else [config]:
        for request in variant.compile_requests(problem, each):
            yield from (SharedGrid(request, grid, num_sms, SHARE_OF_EAGER) for grid in grids)


def _winners(
    layers: Sequence[Layer], compute_capability: int | None, on_progress: Callable[[str], None]
) -> Iterator[tuple[Environment, set[tuple[Problem, Candidate]]]]:
    """The kernels that dispatch chooses at stored problems, in both modes and under every numerics policy."""
    environments: dict[object, Environment] = {}
    world_sizes: set[int] = set()
    for layer in layers:
        with layer.open() as database:
            environments |= {each.hard_key: each for each in database.environments() if not each.is_host}
            world_sizes |= {problem.world_size for problem in database.problems()}
    for environment in environments.values():
        if compute_capability not in (None, environment.compute_capability):
            continue
        for world_size in sorted(world_sizes):
            on_progress(f"looking for winners on {environment}: {world_size} ranks")
            snapshot = load_snapshot(environment, world_size, layers=layers)
            stored = {row.problem for row in snapshot.rows}
            both = {replace(problem, mode=mode) for problem in stored for mode in get_args(Mode)}
            catalog = Registered(limits_for(environment, world_size), kernels.source_hash_of)
            found = {
                (problem, decision.candidate)
                for policy in get_args(NumericsPolicy)
                for problem, decision in winners(snapshot, catalog, both, policy).items()
                if get_variant(problem.op, decision.candidate.variant).kernels
            }
            yield environment, found
