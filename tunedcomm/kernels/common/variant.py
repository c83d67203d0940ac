"""Base classes of variants, with defaults for what most of them share.

`KernelVariant` is one Triton kernel (or one of several, chosen by the problem) over the symmetric workspace. A variant
is described by a subclass of it, or of its op's own subclass (`AllReduceVariant`, …):

    class Lamport(AllReduceVariant, registered=True):
        name = "lamport"
        summary = "one-shot push without flags"
        kernels = (lamport_kernel,)
        space = Space({"num_blocks": Choice(1, 2, 4), "num_warps": PowerOfTwo(1, 16)})
        trailing_arguments = ("arena", "stage_bytes")  # of the workspace; the kernel's last arguments

        def refuse_config(self, problem, config, limits): ...  # a sentence, or None
        def preferred_config(self, problem, limits): ...  # the config to try first; the nearest feasible one is taken

`Lamport.variant` is the registered `Variant`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tunedcomm.kernels.common.feasibility import (
    Launch,
    blocks_and_threads,
    closest,
    grid_rounds,
    packets_a_block,
    refuse_kernels,
    refuse_launch_pdl,
    refuse_result,
    refuse_stage,
    refuse_staging,
)
from tunedcomm.kernels.common.launch import AddressLaunch, Argument, CompileRequest, bind_kernel, input_and_output
from tunedcomm.kernels.common.packets import PACKET_BYTES, alignment_of, packets_of
from tunedcomm.kernels.common.reference import SUM_DTYPES
from tunedcomm.space import Axis, Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import DTYPES, ITEMSIZE, Limits, Numerics, Problem, Variant, register_variant
from tunedcomm.symm.layout import MAX_WORLD_SIZE, LaneLayout, Room

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace as Workspace  # noqa: PLC0414 - the files of variants import it from here
else:
    Workspace = Any  # readers of databases import kernels and shall not wait for torch


def lane_arguments(problem: Problem, workspace: Workspace) -> tuple[Argument, ...]:
    """Arguments `local, peers, rank, timeout_ns, status` of a kernel."""
    lane = workspace.lanes[problem.mode]
    status = workspace.status_argument(problem)
    return (lane.local, lane.peers, workspace.rank, workspace.timeout_ns, status)


_REGISTERS_OF_BLOCK = 65536
HOST_GRID: Mapping[str, float] = {"num_blocks": 2, "num_warps": 16}
# Axes of kernels that push chunks, that read what peers have, and that the switch serves.
PUSH_GRID: Mapping[str, Axis] = {"num_blocks": Choice(1, 2, 8, 32, 64, 132, 264), "num_warps": PowerOfTwo(4, 16)}
PULL_GRID: Mapping[str, Axis] = {"num_blocks": Choice(1, 2, 4, 8, 16, 32, 64, 132), "num_warps": PowerOfTwo(2, 16)}
MULTIMEM_GRID: Mapping[str, Axis] = {**PULL_GRID, "num_warps": PowerOfTwo(4, 16)}


class VariantBase:
    """The fields of a `Variant` as class attributes and methods, with defaults; `register` makes and registers it.

    Attributes:
        variant: of classes that are declared with `registered=True`, the variant.
    """

    variant: ClassVar[Variant]

    op: str
    name: str
    summary: str
    numerics: Numerics = "ordered"
    space: Space = Space()
    kernels: tuple[Any, ...] = ()
    version: int = 1
    waits_time_out: bool = True
    same_in_both_modes: bool = False

    def __init_subclass__(cls, *, registered: bool = False) -> None:
        super().__init_subclass__()
        # Set for tunedcomm's own classes only: a plug-in may depend on the mode.
        cls.same_in_both_modes = cls.__module__.startswith("tunedcomm.kernels.")
        if registered:
            cls.variant = cls().register()

    def register(self) -> Variant:
        """Register the variant that this object describes."""
        return register_variant(Variant(**{field.name: getattr(self, field.name) for field in fields(Variant)}))

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        """A sentence saying why `problem` cannot run with `config`, or None."""
        raise NotImplementedError

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        """Compile and return the launch; never called while a graph is captured."""
        raise NotImplementedError

    def num_blocks(self, problem: Problem, config: Config) -> int:
        """Thread blocks that a config occupies: 0 for copy engines, -1 where that is not known."""
        return -1

    def preferred_config(self, problem: Problem, limits: Limits) -> Mapping[str, float]:
        """The config to try first; `default` takes the nearest feasible one."""
        raise NotImplementedError

    def default(self, problem: Problem, limits: Limits) -> dict[str, Value]:
        return closest(self.preferred_config(problem, limits), self.space, problem, limits, self.infeasible)

    def default_beats_library(self, problem: Problem, limits: Limits) -> bool:
        """True where dispatch runs the default config until something is measured."""
        return False

    def num_rounds(self, problem: Problem, config: Config) -> int:
        """Rounds of the grid that do all the work; 0 where that is not known."""
        return 0

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        """The parts of a lane that a call uses, which alone need memory. By default all of it."""
        return layout.room

    def compile_requests(self, problem: Problem, config: Config) -> Iterable[CompileRequest]:
        return ()


class Collective(NamedTuple):
    """One of this library's own collectives as a part of a call of another op.

    Its problem is the collective's, but for its op, which is the call's: a lost peer is reported with that.
    """

    variant: Variant
    problem: Problem
    config: Config

    @classmethod
    def of(cls, variant: Variant, problem: Problem, outer: Config) -> Collective:
        """Take the variant's axes from the call's config; those that it lacks have fixed values."""
        known = {"items": 1, "launch_pdl": False, "direction": "push", "num_streams": 1, **outer}
        return cls(variant, problem, {name: known[name] for name in variant.space.names})

    def refuse(self, limits: Limits) -> str | None:
        """Return why the collective cannot run, or None."""
        return self.variant.infeasible(self.problem, self.config, limits)

    def compile_requests(self) -> Iterable[CompileRequest]:
        requests: Iterable[CompileRequest] = self.variant.compile_requests(self.problem, self.config)
        return requests

    def lane_room(self, layout: LaneLayout) -> Room:
        room: Room = (
            self.variant.lane_room(self.problem, self.config, layout) if self.variant.lane_room else layout.room
        )
        return room

    def bind(self, workspace: Workspace) -> AddressLaunch:
        launch = self.variant.bind(self.problem, self.config, workspace)
        assert isinstance(launch, AddressLaunch), "plain inputs are launched by their addresses"
        return launch


class ComposedVariant(VariantBase):
    """Collectives of this library, with something before or after them."""

    def collectives(self, problem: Problem, config: Config) -> tuple[Collective, ...]:
        """The collectives of a call."""
        raise NotImplementedError

    def refuse(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        """Return why the call cannot be made of such collectives, or None."""
        raise NotImplementedError

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := self.refuse(problem, config, limits):
            return reason
        reasons = (collective.refuse(limits) for collective in self.collectives(problem, config))
        return next((reason for reason in reasons if reason), None)

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        rooms = [collective.lane_room(layout) for collective in self.collectives(problem, config)]
        return functools.reduce(Room.__or__, rooms, Room())

    def num_rounds(self, problem: Problem, config: Config) -> int:
        """Rounds of the first collective's grid."""
        first = self.collectives(problem, config)[0]
        return first.variant.num_rounds(first.problem, first.config)

    def compile_requests(self, problem: Problem, config: Config) -> Iterable[CompileRequest]:
        return [request for part in self.collectives(problem, config) for request in part.compile_requests()]


class LibraryVariant(VariantBase):
    """The variant `library`, which every op has: fall-back and baseline, never infeasible, with nothing to tune."""

    # Payloads that NCCL and gloo both know; ops that move others pass them as bytes.
    named_dtypes = ("bfloat16", "float16", "float32", "float64", "int8", "uint8", "int32", "int64")
    name = "library"
    numerics: Numerics = "library"
    summary = "NCCL on GPUs, gloo on CPUs"

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return None

    def default(self, problem: Problem, limits: Limits) -> dict[str, Value]:
        return {}

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        return Room()


class KernelVariant(VariantBase):
    """A variant that launches one kernel; the grid is the axis `num_blocks`.

    The kernel's arguments: `first_arguments` (tensors and sizes), `local, peers, rank, timeout_ns, status`, the peers'
    addresses of the input, `input_peers`, if it has the constant SYMMETRIC (zeros where that is false), `arguments`,
    constants.

    Attributes:
        trailing_arguments: names of the kernel's `arguments`: fields of the workspace's layout (offsets and sizes),
            axes of the space, and `multicast`, the lane's multicast address; 0 stands for the interpreter's emulation.
        max_rounds: rounds of the grid, at most, for each of the `num_chunks` chunks of a config.
        host_preferred: what takes the place of `preferred_config` on the host backend.
        most_registers: that a thread may take. 0: as many as ptxas likes, which often are fewer than it needs, so that
            it spills.
    """

    trailing_arguments: tuple[str, ...] = ()
    most_registers = 0
    max_rounds = 1 << 16
    host_preferred: Mapping[str, float] = {}

    def kernel(self, problem: Problem) -> Any:
        """The kernel that serves `problem`: the first of `kernels` where there is no choice."""
        return self.kernels[0]

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        """Return why no kernel of the op can run `problem`, whatever the config; None if one might."""
        raise NotImplementedError

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        """Return why `config` cannot serve `problem`, whatever its grid; None if it might."""
        return None

    def refuse_grid(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        """Return why the grid does not suit, or None."""
        max_rounds = self.max_rounds * int(config.get("num_chunks", 1))
        return blocks_and_threads(config, limits, self.work_packets(problem), max_rounds=max_rounds)

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return (
            self.refuse(problem, limits)
            or self.refuse_config(problem, config, limits)
            or refuse_launch_pdl(config, limits)
            or self.refuse_grid(problem, config, limits)
        )

    def default(self, problem: Problem, limits: Limits) -> dict[str, Value]:
        preferred = {"items": 1, "launch_pdl": limits.launch_pdl, **self.preferred_config(problem, limits)}
        on_host = self.host_preferred if limits.backend == "host" else {}
        refused = self.refuse(problem, limits) is not None  # whatever the config: no need to look for one
        infeasible = (lambda *_: None) if refused else self.infeasible
        return closest({**preferred, **on_host}, self.space, problem, limits, infeasible)

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        """Constexpr arguments of the kernel; PDL is added for spaces with the axis `launch_pdl`."""
        raise NotImplementedError

    def first_arguments(self, problem: Problem) -> tuple[Argument | None, ...]:
        """First arguments of the kernel; None for each address that every call brings: `(x, out, numel)`."""
        return (None, None, problem.numel)

    def arguments(self, problem: Problem, config: Config, workspace: Workspace) -> tuple[int, ...]:
        """Last runtime arguments of the kernel."""
        known = {**config, "multicast": workspace.lanes[problem.mode].multicast}
        return tuple(
            int(known[name] if name in known else getattr(workspace.layout, name)) for name in self.trailing_arguments
        )

    def addresses(self, problem: Problem, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[int, ...]:
        """The addresses that `first_arguments` leaves open."""
        return input_and_output(inputs, outputs)

    def work_packets(self, problem: Problem) -> int:
        """Packets that the grid shares out among its threads."""
        return packets_of(problem.nbytes)

    def num_blocks(self, problem: Problem, config: Config) -> int:
        return int(config.get("num_blocks", 0))

    def num_rounds(self, problem: Problem, config: Config) -> int:
        return grid_rounds(self.work_packets(problem), config) if "num_blocks" in config else 0

    def request(self, problem: Problem, config: Config) -> CompileRequest:
        """The binary that `bind` needs."""
        constants, launch_pdl = self.constants(problem, config), bool(config.get("launch_pdl", False))
        if "launch_pdl" in config:
            constants["PDL"] = launch_pdl
        warps = int(config["num_warps"])
        request = CompileRequest.of(self.kernel(problem), constants, num_warps=warps, launch_pdl=launch_pdl)
        most = self.most_registers
        return replace(request, max_registers=min(most, _REGISTERS_OF_BLOCK // (32 * warps))) if most else request

    def compile_requests(self, problem: Problem, config: Config) -> Iterable[CompileRequest]:
        return (self.request(problem, config),)

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        request = self.request(problem, config)
        symmetric = dict(request.constants).get("SYMMETRIC")
        sources: tuple[Any, ...] = () if symmetric is None else (None,) if symmetric else ((0,) * (MAX_WORLD_SIZE - 1),)
        own, extra = self.first_arguments(problem), self.arguments(problem, config, workspace)
        arguments = (*own, *lane_arguments(problem, workspace), *sources, *extra)
        launch = bind_kernel(request, int(config["num_blocks"]), workspace.device).fix(arguments)
        if not symmetric:
            return AddressLaunch(launch, functools.partial(self.addresses, problem))
        peers_of = workspace.peers_of

        def run_symmetric(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            x = inputs[0]
            launch(stream, x.data_ptr(), outputs[0].data_ptr(), peers_of(x))

        return run_symmetric


class MoveVariant(KernelVariant):
    """A variant that moves chunks of `Problem.nbytes` and reduces nothing: its kernel takes bytes instead of elements.

    So one binary serves every dtype. The kernel's `ALIGN` tells how chunks are aligned, see `packets`.
    """

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        return refuse_kernels(problem, limits, DTYPES, ("",))

    def first_arguments(self, problem: Problem) -> tuple[Argument | None, ...]:
        return (None, None, problem.nbytes)

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {
            "WORLD_SIZE": problem.world_size,
            "ALIGN": alignment_of(problem.nbytes),
            "BLOCK": packets_a_block(config),
        }


class ReductionVariant(KernelVariant):
    """A variant that sums over the ranks, or takes the mean.

    Attributes:
        wide: results are fp32, and payloads 16-bit floats.
    """

    wide = False

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        dtypes = SUM_DTYPES[:2] if self.wide else SUM_DTYPES
        return refuse_result(problem, wide=self.wide) or refuse_kernels(problem, limits, dtypes, ("sum", "avg"))

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {
            "WORLD_SIZE": problem.world_size,
            "DTYPE": problem.dtype,
            "WIDTH": ITEMSIZE[problem.dtype],
            "AVG": problem.reduction == "avg",
            "BLOCK": packets_a_block(config),
        }


class LamportVariant(KernelVariant):
    """A push without flags: each thread pushes its packets into every peer's stage and polls its own stage.

    Attributes:
        packet_bytes: bytes of a stage that a packet takes: its own, and 4 for a mask where escapes need one.
    """

    space = Space(
        {
            "num_blocks": Choice(1, 2, 4, 8, 16, 32, 64, 128, 256),
            "num_warps": PowerOfTwo(1, 16),
            "launch_pdl": Choice(False, True),
        }
    )
    trailing_arguments = ("arena", "stage_bytes")
    max_rounds = 4
    host_preferred = HOST_GRID
    packet_bytes = PACKET_BYTES

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return refuse_stage(problem, limits, self.work_packets(problem) * self.packet_bytes)

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        return Room(stage=self.work_packets(problem) * self.packet_bytes * problem.world_size)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        packets = self.work_packets(problem)
        warps = 2 if packets <= 4096 else 4 if packets <= 16384 else 8
        return {"num_blocks": min(packets / (32 * warps), 128), "num_warps": warps}


class RingVariant(KernelVariant):
    """A kernel that cuts its rounds into `num_chunks` chunks, of which the staging holds `ring` at once.

    So messages of any size fit if they are cut often enough.

    Attributes:
        ring: chunks.
        packet_bytes: bytes of the staging that a packet takes: its own, and the words beside it.
    """

    ring: int
    packet_bytes = PACKET_BYTES
    max_rounds = 64
    host_preferred: Mapping[str, float] = {**HOST_GRID, "num_chunks": 2}

    def num_teams(self, config: Config) -> int:
        """Blocks that share a chunk: all of them, or where blocks are of several kinds, the blocks of one kind."""
        return int(config["num_blocks"])

    def slots(self, problem: Problem) -> int:
        """Ranks whose packets the staging holds."""
        return problem.world_size

    def num_rounds(self, problem: Problem, config: Config) -> int:
        """Rounds of a team."""
        return self._chunks(problem, config)[0]

    def _chunks(self, problem: Problem, config: Config) -> tuple[int, int, int]:
        """Rounds of a team, its chunks, and the bytes of a slot that a chunk takes."""
        teams, per_block, chunks = self.num_teams(config), packets_a_block(config), int(config["num_chunks"])
        rounds = -(-self.work_packets(problem) // (max(teams, 1) * per_block))
        return rounds, chunks, -(-rounds // chunks) * teams * per_block * self.packet_bytes

    def refuse_ring(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        """Return why the staging does not hold the chunks of a config, or None."""
        rounds, chunks, chunk_bytes = self._chunks(problem, config)
        if rounds < chunks and chunks > 1:
            return f"{rounds} rounds cannot be split into {chunks} chunks"
        slots = self.slots(problem)
        return refuse_staging(problem, limits, chunk_bytes=chunk_bytes, num_chunks=chunks, slots=slots, ring=self.ring)

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        _, chunks, chunk_bytes = self._chunks(problem, config)
        nbytes = self.slots(problem) * min(chunks, self.ring) * chunk_bytes
        return Room(**{area: nbytes for area in ("scatter", "gather") if area in self.trailing_arguments})


class PushRingVariant(RingVariant):
    """A ring to which every rank pushes its packets, in the gather area; it holds the peers' packets alone."""

    space = Space({**PUSH_GRID, "items": Choice(1, 2, 4), "num_chunks": PowerOfTwo(1, 64)})
    trailing_arguments: tuple[str, ...] = ("gather", "num_chunks")

    def slots(self, problem: Problem) -> int:
        return problem.world_size - 1

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if packets_a_block(config) > 1024:
            return "more than 1024 packets a block at once spill registers"
        return self.refuse_ring(problem, config, limits)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        packets = self.work_packets(problem)
        chunks = 1 if packets < 1 << 15 else 4 if packets < 1 << 20 else 16
        return {"num_blocks": min(packets / 512, 132), "num_warps": 16, "num_chunks": chunks}


class PullVariant(KernelVariant):
    """Every rank reads its peers' inputs, or the copies in their one-shot areas where inputs are plain.

    Attributes:
        max_blocks: blocks to try first, at most.
    """

    def num_staged(self, problem: Problem) -> int:
        """Messages of a plain input in a one-shot area."""
        return 1

    trailing_arguments = ("one_shot", "one_shot_bytes")
    host_preferred: Mapping[str, float] = {**HOST_GRID, "items": 2}
    max_blocks = 132

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        packets = self.work_packets(problem)
        warps = 4 if packets <= 2048 else 16
        return {"num_blocks": min(packets / (32 * warps), self.max_blocks), "num_warps": warps}

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {**super().constants(problem, config), "SYMMETRIC": self.reads_inputs(problem)}

    def reads_inputs(self, problem: Problem) -> bool:
        """True if peers read inputs where they lie."""
        return problem.input_kind == "symmetric" and not problem.in_place

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        nbytes = self.num_staged(problem) * packets_of(problem.nbytes) * PACKET_BYTES
        return Room() if self.reads_inputs(problem) else Room(one_shot=nbytes)


def all_gather_single() -> Any:
    """The function that gathers every rank's tensor into one."""
    import torch.distributed as dist

    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def together(group: Any, device: Any) -> Any:
    """A block whose calls NCCL makes as one; gloo makes them one by one."""
    import contextlib

    from torch.distributed import distributed_c10d

    manager: Any = distributed_c10d._coalescing_manager
    return manager(group, device) if device.type == "cuda" else contextlib.nullcontext()


def reduce_scatter_single() -> Any:
    """The function that reduces one tensor and leaves each rank its share."""
    import torch.distributed as dist

    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
