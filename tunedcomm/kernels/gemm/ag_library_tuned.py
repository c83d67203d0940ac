"""library_tuned: the shards gathered by one of this library's own all_gathers, then the library's GEMM (cuBLAS).

What is gathered goes where the caller wants it, or to the panels, as memory of this rank alone: no peer writes there
before this rank's next call that begins with an exchange of flags. Scales of A's rows follow in a gather of their own.

Numerics: library. Graph-safe. Lane rules: those of the all_gather kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.all_gather.copy_engine import COPY_ENGINE, flags_kernel
from tunedcomm.kernels.all_gather.lamport import LAMPORT, lamport_kernel
from tunedcomm.kernels.all_gather.push import PUSH, ring_kernel
from tunedcomm.kernels.common.feasibility import Launch, closest
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.kernels.common.packets import packets_of
from tunedcomm.kernels.gemm.ag_common import gathered_in, panel_bytes, refuse, rows_of, scales_in
from tunedcomm.kernels.gemm.problem import operands_of, product, wanted_of
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["LIBRARY_TUNED"]

_GATHERS = {"lamport": LAMPORT, "push": PUSH, "copy_engine": COPY_ENGINE}
_SMALL = 512 * 1024  # bytes of all shards up to which Lamport packets are tried first
_SCALE_WARPS, _SCALE_ROUNDS = 16, 4

_SPACE = Space(
    {
        "algorithm": Choice("lamport", "push", "copy_engine"),
        "num_blocks": Choice(1, 2, 8, 16, 32, 64, 132),
        "num_warps": PowerOfTwo(4, 16),
        "num_chunks": PowerOfTwo(1, 32),
        "launch_pdl": Choice(False, True),
    }
)


def _gather_of(problem: Problem, numel: int, dtype: str) -> Problem:
    """A gather of `numel` elements from each rank; it keeps the op's name, by which a lost peer is reported."""
    return Problem(problem.op, (numel,), dtype, problem.world_size, reduction="", mode=problem.mode)


def _gathering(problem: Problem, config: Config) -> list[tuple[Variant, Problem, dict[str, Value]]]:
    """The gathers that are asked for: variant, problem, config."""
    algorithm, blocks = str(config["algorithm"]), {name: config[name] for name in ("num_blocks", "num_warps")}
    inner: dict[str, dict[str, Value]] = {
        "lamport": {**blocks, "launch_pdl": config["launch_pdl"]},
        "push": {**blocks, "items": 1, "num_chunks": config["num_chunks"]},
        "copy_engine": {"direction": "push", "num_streams": 1, "num_chunks": config["num_chunks"]},
    }
    rows = rows_of(problem)
    shard = _gather_of(problem, rows * problem.shape[2], problem.dtype)
    found = [(_GATHERS[algorithm], shard, inner[algorithm])]
    if problem.scaling == "rowwise":
        scales = _gather_of(problem, rows, "float32")
        count = -(-packets_of(scales.nbytes) // (_SCALE_ROUNDS * 32 * _SCALE_WARPS))
        found.append((LAMPORT, scales, {"num_blocks": count, "num_warps": _SCALE_WARPS, "launch_pdl": False}))
    return found


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if reason := refuse(problem, limits, descriptors=False):
        return reason
    if problem.scaling and limits.backend == "cuda" and (problem.shape[1] % 16 or problem.shape[2] % 16):
        return f"the library multiplies fp8 matrices by whole 16 rows and columns, not {problem.shape[1:]}"
    algorithm = config["algorithm"]
    if algorithm == "lamport" and config["num_chunks"] != 1:
        return "lamport has no chunks: only num_chunks=1"
    if algorithm != "lamport" and config["launch_pdl"]:
        return f"{algorithm} is launched in the ordinary way: only launch_pdl=False"
    if algorithm == "copy_engine" and (config["num_blocks"] != 1 or config["num_warps"] != 4):
        return "copy engines take no blocks: only num_blocks=1 and num_warps=4"
    for variant, asked, inner in _gathering(problem, config):
        if reason := variant.infeasible(asked, inner, limits):
            return reason
    return None


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    asked = _gather_of(problem, rows_of(problem) * problem.shape[2], problem.dtype)
    name = "lamport" if asked.nbytes * problem.world_size <= _SMALL else "push"
    wish = {"num_chunks": 1, "launch_pdl": False, **_GATHERS[name].default(asked, limits), "algorithm": name}
    return closest(wish, _SPACE, problem, limits, _infeasible)  # type: ignore[arg-type]


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return [
        request
        for variant, asked, inner in _gathering(problem, config)
        for request in variant.compile_requests(asked, inner)
    ]


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    gathers: list[Callable[..., None]] = []
    for variant, asked, inner in _gathering(problem, config):
        launch = variant.bind(asked, inner, workspace)
        assert isinstance(launch, AddressLaunch), "plain inputs are launched by their addresses"
        gathers.append(launch.by_address)
    panels = workspace.panels(problem.mode, panel_bytes(problem))
    room = None if wanted_of(problem).gathered else gathered_in(panels, problem)
    scales = scales_in(panels, problem) if problem.scaling == "rowwise" else None

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        operands = operands_of(problem, inputs)
        whole = outputs[1] if room is None else room
        gathers[0](stream, operands.a.data_ptr(), whole.data_ptr())
        if scales is not None:
            gathers[1](stream, operands.scale_a.data_ptr(), scales.data_ptr())
            operands = operands._replace(scale_a=scales)
        product(problem, operands, outputs[0], whole)

    return run


LIBRARY_TUNED = register_variant(
    Variant(
        op="ag_gemm",
        name="library_tuned",
        numerics="library",
        summary="tunedcomm's own all_gather, then cuBLAS",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=lambda problem, config: -1,
        kernels=(lamport_kernel, ring_kernel, flags_kernel),
        compile_requests=_requests,
    )
)
