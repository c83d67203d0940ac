"""Compiles the corners of every variant's space for GPUs that are not there, and says what came out.

    python compile_corners.py list            versions and variants with kernels, with their source hashes
    python compile_corners.py compile I N     of the I-th of N parts of the variants the corners: one JSON line a binary
    python compile_corners.py sample I N      the same, of a sample of them: every value of a field, not every pair
    python compile_corners.py few I N         the same, of one binary a kernel, for one generation
    python compile_corners.py sums            of each way to multiply, how products are added up for sm_90

A program of its own, because kernels that were decorated for the interpreter cannot be compiled, and because the same
program runs under several versions of Triton. The corners are a covering set: every pair of values that two fields of
a binary's name (constants, warps, target, …) may take together is compiled at least once, and for every kernel the
binary that asks for the most registers.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunedcomm.space import Config
from tunedcomm.spec import ITEMSIZE, InputKind, Limits, Problem, Variant, get_op, get_variant, ops, variants

if TYPE_CHECKING:  # `discover` must choose between compiler and interpreter before anything of kernels is imported
    from tunedcomm.kernels.common.launch import CompileRequest

CAPABILITIES = (90, 100)
REDUCTIONS = ("sum", "avg")
INPUTS: tuple[tuple[InputKind, bool], ...] = (("plain", False), ("symmetric", False), ("symmetric", True))
WORLD_SIZES = (2, 3, 4, 8)
ROW_BYTES = (256, 2048, 8192, 10240, 16384, 32768)
LIMITS = Limits("cuda", 132, True, 512, 64 << 20, 4 << 20, 32 << 20, panel_bytes=1 << 30)
# Fused GEMMs have too many binaries for corners: the configs to try first, of few problems and for few extras.
GEMM_PLACES = (((16, 8192, 2048), 90), ((4096, 8192, 3584), 90), ((4096, 8192, 3584), 100))
GEMM_EXTRAS = (("bfloat16", "nk", ""), ("float16", "kn", ""), ("float8_e4m3fn", "nk", "rowwise"))
GEMM_WORLD_SIZE = 4
# One variant for each function of kernels/gemm/tiles.py that multiplies.
SUMS: tuple[tuple[str, str, dict[str, bool]], ...] = (
    ("gemm_rs", "push_reduce", {}),
    ("gemm_ar", "lamport", {"pointers": False}),
    ("gemm_ar", "lamport", {"pointers": True}),
)
# Of groups that span nodes, for variants that serve no others.
SPANNING = tuple(replace(LIMITS, symmetric=False, ranks_per_node=ranks) for ranks in (2, 4))


@dataclass(frozen=True)
class Corner:
    """One binary to compile."""

    op: str
    variant: str
    request: CompileRequest
    capability: int

    @property
    def fields(self) -> dict[str, Any]:
        """What the binary is named by."""
        named = {name: getattr(self.request, name) for name in ("num_warps", "launch_pdl", "function")}
        return {**dict(self.request.constants), **named, "capability": self.capability}


def variants_with_kernels() -> list[Variant]:
    from tunedcomm.kernels import discover

    discover()
    return [variant for op in ops() for variant in variants(op).values() if variant.kernels]


def end_points(variant: Variant) -> Iterator[Config]:
    """Configs of the smallest and the largest value of each axis; every value of axes that are not numbers."""
    ends = []
    for _, axis in variant.space.axes:
        values = axis.values()
        numbers = all(type(value) is int for value in values)
        ends.append(sorted({min(values), max(values)}) if numbers else values)
    for point in itertools.product(*ends):
        yield dict(zip(variant.space.names, point, strict=True))


def problems_like(like: Problem, *, tail: bool) -> list[Problem]:
    """Problems like `like` of many sizes."""
    width = ITEMSIZE[like.dtype]
    if get_op(like.op).rank_of_shape == 1:
        shapes: list[tuple[int, ...]] = [((1 << e) // width + (1 if tail else 0),) for e in range(4, 30)]
    elif get_op(like.op).rank_of_shape == 3:  # default shapes, with other numbers of rows
        usual = get_op(like.op).default_shapes("host" if tail else "cuda", width)
        shapes = [(1 << e, *shape[1:]) for shape in usual for e in range(14)]
    elif get_op(like.op).rank_of_shape == 4:  # of mixtures of experts: tokens, hidden, top-k, experts
        rest = (128, 1, 24) if tail else (7168, 8, 240)
        shapes = [(count, *rest) for count in (1, 16, 64, 256, 4096)]
    else:  # of matrices the longest rows, or the shortest ones
        rows = ROW_BYTES if tail else tuple(reversed(ROW_BYTES))
        shapes = [(count, size // width) for size in rows for count in (1, 16, 256, 4096)]
    return [replace(like, shape=shape) for shape in shapes]


def feasible_problem(variant: Variant, config: Config, problems: Iterable[Problem]) -> Problem | None:
    """The first that the config may run: what can never run need not compile."""
    for problem in problems:
        for limits in (LIMITS, *SPANNING):
            if limits.ranks_per_node < problem.world_size and variant.infeasible(problem, config, limits) is None:
                return problem
    return None


def gemm_corners(variant: Variant) -> list[Corner]:
    """Binaries of a fused GEMM's default configs, in a fixed order."""
    found: dict[Corner, None] = {}
    spec = get_op(variant.op)
    for (dtype, layout, scaling), (shape, capability) in itertools.product(GEMM_EXTRAS, GEMM_PLACES):
        like = Problem(variant.op, shape, dtype, GEMM_WORLD_SIZE, reduction=spec.reductions[0])
        problem = replace(like, layout=layout, scaling=scaling)
        config = variant.default(problem, LIMITS)
        if variant.infeasible(problem, config, LIMITS) is None:
            for request in variant.compile_requests(problem, config):
                found[Corner(variant.op, variant.name, request, capability)] = None
    return list(found)


# Constant of a kernel's form to the arguments that this form alone takes.
FORMS = {"WEIGHTED": ("weights", "weights_out"), "NUMBERED": ("number", "limits", "arena", "stage_bytes")}


def with_forms(requests: Iterable[CompileRequest]) -> Iterator[CompileRequest]:
    """The requests, and those of calls with weights, and with `num_tokens` too, which the first such call binds."""
    for request in requests:
        yield request
        constants = dict(request.constants)
        for form, names in FORMS.items():
            if form in constants:
                constants = {name: value for name, value in constants.items() if name not in names} | {form: True}
                if "FEW" in constants:  # the most packets a thread that the first tokens may take
                    each = 1 if int(constants["BLOCK"]) > 512 else constants["ITEMS"]
                    constants |= {"FEW": 128, "PARTS": 2, "EACH": each}
                yield replace(request, constants=tuple(sorted(constants.items())))


def every_corner(variant: Variant) -> list[Corner]:
    """All distinct binaries of the corners, in a fixed order."""
    found: dict[Corner, None] = {}
    spec = get_op(variant.op)
    if spec.is_gemm:
        return gemm_corners(variant)
    reductions = [name for name in REDUCTIONS if name in spec.reductions] or [""]
    inputs = [(kind, in_place) for kind, in_place in INPUTS if spec.in_place or not in_place]
    extras = [*((layout, "") for layout in spec.layouts), *((spec.layouts[0], s) for s in spec.scalings if s)]
    configs = list(end_points(variant))
    for dtype, reduction, (kind, in_place), (layout, scaling), world_size, tail in itertools.product(
        spec.dtypes, reductions, inputs, extras, WORLD_SIZES, (False, True)
    ):
        like = Problem(
            variant.op, (1,), dtype, world_size,
            reduction=reduction, input_kind=kind, in_place=in_place, layout=layout, scaling=scaling,
        )  # fmt: skip
        problems = problems_like(like, tail=tail)
        for config in configs:
            problem = feasible_problem(variant, config, problems)
            for request in with_forms(variant.compile_requests(problem, config)) if problem is not None else ():
                for capability in CAPABILITIES:
                    found[Corner(variant.op, variant.name, request, capability)] = None
    return list(found)


def beside_variants() -> list[Corner]:
    """Kernels that no variant has."""
    from tunedcomm.kernels.all_gather.progress import compile_requests

    return [
        Corner("all_gather", "with_progress", request, capability)
        for world_size in WORLD_SIZES
        for request in compile_requests(world_size)
        for capability in CAPABILITIES
    ]


def weight(corner: Corner) -> tuple[Any, ...]:
    """Orders binaries by the registers that they ask for."""
    fields = corner.fields
    return tuple(fields.get(name, 0) for name in ("WORLD_SIZE", "TAIL", "AVG", "BLOCK", "num_warps", "capability"))


def pairs(corner: Corner) -> frozenset[Any]:
    """Every two fields of the corner with their values."""
    return frozenset(itertools.combinations(sorted(corner.fields.items()), 2))


def covering(corners: Iterable[Corner], facts: Callable[[Corner], frozenset[Any]] = pairs) -> list[Corner]:
    """Few corners that hold every fact (pair of values) that any of them holds; the heaviest of each kernel first."""
    left = {corner: facts(corner) for corner in corners}
    chosen = list({corner.request.function: corner for corner in sorted(left, key=weight)}.values())
    missing = frozenset().union(*left.values()).difference(*(left[corner] for corner in chosen))
    while missing:
        best = max(left, key=lambda corner: len(left[corner] & missing))
        chosen.append(best)
        missing -= left[best]
    return chosen


def chosen_of(variant: Variant) -> list[Corner]:
    """What is compiled of a variant."""
    corners = every_corner(variant)
    return corners if get_op(variant.op).is_gemm else covering(corners)


def sample_of(variant: Variant) -> list[Corner]:
    """Few of them: every value of every field once, so every variant for each generation."""
    return covering(every_corner(variant), lambda corner: frozenset(corner.fields.items()))


def few_of(variant: Variant) -> list[Corner]:
    """Of each kernel of a variant the binary that asks for the fewest registers, for one generation."""
    corners = [corner for corner in every_corner(variant) if corner.capability == CAPABILITIES[0]]
    return list({c.request.function: c for c in sorted(corners, key=weight, reverse=True)}.values())


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread and bytes of stack, shared and local memory, as cuobjdump reads them from the binary."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name.lower(): int(number) for name, number in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    if set(found) != {"reg", "stack", "shared", "local"}:
        raise RuntimeError(f"cuobjdump says nothing about registers: {text!r}")
    return found


def instructions(ptx: str) -> dict[str, int]:
    """How often each opcode occurs."""
    counts: dict[str, int] = {}
    for opcode in re.findall(r"^\s*(?:@!?\S+\s+)?([a-z][\w.:]*)\s", ptx.replace("{", "\n").replace(";", "\n"), re.M):
        counts[opcode] = counts.get(opcode, 0) + 1
    return counts


def compiled(corner: Corner) -> dict[str, Any]:
    """Compile one corner and describe the binary, or the error."""
    from triton.backends.compiler import GPUTarget

    from tunedcomm.kernels.common.launch import compile_request

    described = {"op": corner.op, "variant": corner.variant, **corner.fields}
    try:
        kernel = compile_request(corner.request, GPUTarget("cuda", corner.capability, 32))
    except Exception as error:  # noqa: BLE001 - whatever the compiler raises is what the test reports
        return {**described, "failed": f"{type(error).__name__}: {error}"}
    ptx = kernel.asm["ptx"]
    polled = re.findall(r'"[^"]*st\.relaxed\.sys[^"]*".*-> tensor<([\dx]+)xi32', kernel.asm["ttgir"])
    return {
        **described,
        "elements_a_thread": max(map(int, re.findall(r"sizePerThread = \[(\d+)\]", kernel.asm["ttgir"])), default=1),
        "elements_polled": min((math.prod(map(int, shape.split("x"))) for shape in polled), default=0),
        **resources(kernel.asm["cubin"]),
        "target": next(iter(re.findall(r"^\.target (\w+)", ptx, re.M)), ""),
        "instructions": instructions(ptx),
    }


def sums_of(op: str, variant: str, dtype: str, scaling: str, **changes: bool) -> dict[str, Any]:
    """What stands in the loop over the depth of a tile of 64x64, of 256 bytes of depth by 128 threads."""
    from triton.backends.compiler import GPUTarget

    from tunedcomm.kernels.common.launch import compile_request

    problem = Problem(op, (64, 8192, 2048), dtype, 4, "sum", layout="nk", scaling=scaling)
    found = get_variant(op, variant)
    tile = {"block_m": 64, "block_n": 64, "block_k": 256 // ITEMSIZE[dtype], "num_warps": 4, "num_stages": 4}
    config = {**found.default(problem, LIMITS), **tile, **changes}
    (request,) = (r for r in found.compile_requests(problem, config) if "BLOCK_M" in dict(r.constants))
    ptx = compile_request(request, GPUTarget("cuda", 90, 32)).asm["ptx"]
    loop = instructions(re.split(r"\bbra", ptx[ptx.index("wgmma.mma_async") :])[0])
    return {
        "variant": variant,
        "dtype": dtype,
        "products": sum(count for opcode, count in loop.items() if opcode.startswith("wgmma.mma_async")),
        "sums": sum(count for opcode, count in loop.items() if re.match(r"add\..*f32", opcode)),
    }


def main(arguments: list[str]) -> None:
    """Run the command line."""
    import triton

    from tunedcomm.kernels import source_hash

    variants = variants_with_kernels()
    if arguments[0] == "list":
        hashes = {f"{variant.op}.{variant.name}": source_hash(variant) for variant in variants}
        print(json.dumps({"triton": triton.__version__, "file": str(Path(triton.__file__)), "variants": hashes}))
        return
    if arguments[0] == "sums":
        for dtype, scaling in (("bfloat16", ""), ("float8_e4m3fn", "rowwise")):
            for op, variant, changes in SUMS:
                print(json.dumps(sums_of(op, variant, dtype, scaling, **changes)), flush=True)
        return
    part, num_parts = int(arguments[1]), int(arguments[2])
    choose = {"compile": chosen_of, "sample": sample_of, "few": few_of}[arguments[0]]
    corners = [corner for variant in variants[part::num_parts] for corner in choose(variant)]
    corners += beside_variants()[part::num_parts]
    # A kernel that several variants run is compiled for one of them.
    chosen = list({(corner.request, corner.capability): corner for corner in corners}.values())
    for corner in chosen:
        print(json.dumps(compiled(corner)), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "0")
    main(sys.argv[1:])
