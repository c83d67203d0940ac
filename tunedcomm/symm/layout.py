"""Layout of one lane of a group's workspace, as host code and kernels read it, and the limits that follow from it.

A lane, from its base address on:

    flags      MAX_BLOCKS × MAX_WORLD_SIZE int64   flag [b, r] is written by rank r's block b, read by this rank's
    state      MAX_BLOCKS int64                    calls of the Lamport kernels so far, a copy for each block
    epochs     MAX_BLOCKS int64                    last epoch signalled by the flag kernels, a copy for each block
    arena      2 stages × stage_bytes              Lamport packets, filled with the sentinel
    one-shot   2 × one_shot_bytes                  inputs that peers read
    scatter    staging_bytes                       first half of the two-shots
    gather     staging_bytes                       second half of the two-shots

Kernels of all ops share the lane. Every kernel keeps these rules and relies on earlier kernels having kept them:

- Flags. Every flag kernel waits for every peer at least once and adds the same number to its epoch on every rank.
- Arena. A call uses stage (calls mod 2), sends every peer at least one packet, waits for at least one packet of every
  peer, and puts the sentinel back wherever it polled.
- One-shot areas. A rank writes its own area (epoch mod 2) before its first flag, and peers read it after that flag. The
  call adds an odd number to the epoch, so the rank writes this area again only after another flag kernel. The peers'
  flags in that kernel say that they have read the area.
- Scatter. Peers may write this area from the start of a call. So a call ends only after every peer has raised a flag
  that follows the peer's last read of its own scatter area.
- Gather. Peers may write this area once they have seen this rank's first flag of the same call.

A group may also have *panels*, memory for the matrices of fused GEMMs, allocated when a plan first needs them:

    flags      MAX_WORLD_SIZE × PANEL_CHUNKS int64  rank r raises flag [r, c] when its chunk c has arrived
    counters   PANEL_COUNTERS int64                 blocks that have finished a part of the work; 0 between calls
    number     int64                                calls so far; a flag holds the count of the call that raised it
    data       from PANEL_DATA on

- Panels. A call ends, in stream order, only when no rank reads this rank's panels any more, so the next call may write
  its own panels from the start. Every call begins with `begin_panels_kernel`, which exchanges the lane's flags and
  counts the call; from then on peers may write this rank's data. A kernel may skip `begin_panels_kernel` if it writes
  a peer's panels only after the lane's flags have shown that the peer's kernel has begun.

Each counter has one copy a block, so that no block waits for another block of its own grid. In a grid of G blocks,
block b reads entry b; at its end it writes the new value to the entries b, b + G, b + 2G, …
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tunedcomm import settings
from tunedcomm.hardware import Environment, Fabric
from tunedcomm.spec import Limits, Mode

LANES: tuple[Mode, ...] = ("eager", "graph")
MAX_BLOCKS = 512
MAX_WORLD_SIZE = 8
_WORD = 8
STATE_OFFSET = MAX_BLOCKS * MAX_WORLD_SIZE * _WORD
EPOCH_OFFSET = STATE_OFFSET + MAX_BLOCKS * _WORD
DATA_OFFSET = EPOCH_OFFSET + MAX_BLOCKS * _WORD
# The status block: see `kernels.common.sync`. Also its alignment, and more than the highest call number.
STATUS_BYTES = 256
PANEL_CHUNKS = 256
PANEL_COUNTERS = 512
PANEL_COUNTERS_OFFSET = MAX_WORLD_SIZE * PANEL_CHUNKS * _WORD
PANEL_NUMBER_OFFSET = PANEL_COUNTERS_OFFSET + PANEL_COUNTERS * _WORD
PANEL_DATA = 32 * 1024
# The ring of CPU tensors: see `symm.ring`.
RING_SLOTS = 4
RING_SLOT_BYTES = 1 << 20

_MIB = 1 << 20
_PANELS_OF_STAGING = 16  # matrices of fused GEMMs may be this many times as large as the staging
_LAMPORT_SHARE = 4  # a Lamport stage holds a quarter of the staging; larger messages are faster by flags
_ONE_SHOT_MAX = 4 * _MIB  # a one-shot reads world_size × the message over the links; never best above this


class Room(NamedTuple):
    """Bytes that a call uses of a lane's areas, from each one's start: flags and counters are always there."""

    stage: int = 0
    one_shot: int = 0
    scatter: int = 0
    gather: int = 0

    def __or__(self, other: tuple[Any, ...]) -> Room:
        """The union of both."""
        return Room(*map(max, self, other))


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """Sizes and offsets of one lane, in bytes; the same on every rank."""

    staging_bytes: int
    one_shot_bytes: int
    stage_bytes: int

    @classmethod
    def for_messages(cls, largest_bytes: int) -> LaneLayout:
        """Room for two-shot messages up to `largest_bytes` (rounded up to whole KiB)."""
        staging = max(-(-largest_bytes // 1024) * 1024, 64 * 1024)
        # Slices are rounded up to whole packets, hence the slack of one packet a slot.
        slack = 2 * MAX_WORLD_SIZE * 16
        stage = max(2 * (staging // _LAMPORT_SHARE) + slack, 64 * 1024)
        return cls(
            staging_bytes=staging + slack,
            one_shot_bytes=min(staging, _ONE_SHOT_MAX),
            stage_bytes=-(-stage // 1024) * 1024,
        )

    @property
    def arena(self) -> int:
        return DATA_OFFSET

    @property
    def one_shot(self) -> int:
        return self.arena + 2 * self.stage_bytes

    @property
    def scatter(self) -> int:
        return self.one_shot + 2 * self.one_shot_bytes

    @property
    def gather(self) -> int:
        return self.scatter + self.staging_bytes

    @property
    def panel_bytes(self) -> int:
        """Upper limit on a lane's panels, flags and counters included."""
        return _PANELS_OF_STAGING * self.staging_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of a lane, a multiple of 4 KiB."""
        return -(-(self.gather + self.staging_bytes) // 4096) * 4096

    @property
    def room(self) -> Room:
        """All areas."""
        return Room(self.stage_bytes, self.one_shot_bytes, self.staging_bytes, self.staging_bytes)

    def rounded(self, room: Room) -> Room:
        """Powers of two, so that a lane grows a few times at most; no more than there is."""
        return Room(*(n and min(1 << (n - 1).bit_length(), most) for n, most in zip(room, self.room, strict=True)))

    def ranges(self, room: Room) -> list[tuple[int, int]]:
        """Offsets (start, stop) of what a room covers of a lane."""
        starts = (
            (self.arena, room.stage),
            (self.arena + self.stage_bytes, room.stage),
            (self.one_shot, room.one_shot),
            (self.one_shot + self.one_shot_bytes, room.one_shot),
            (self.scatter, room.scatter),
            (self.gather, room.gather),
        )
        return [(0, DATA_OFFSET), *((start, start + nbytes) for start, nbytes in starts if nbytes)]


def rotate(addresses: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The other ranks' addresses from `rank` + 1 on, padded with 0 to `MAX_WORLD_SIZE - 1`."""
    count = len(addresses)
    others = [addresses[(rank + turn) % count] for turn in range(1, count)]
    return tuple(others + [0] * (MAX_WORLD_SIZE - 1 - len(others)))


def limits_for(environment: Environment, world_size: int, *, layout: LaneLayout | None = None) -> Limits:
    """Limits of a machine and a workspace layout, by default the configured one; stored environments work, too."""
    layout = layout or LaneLayout.for_messages(settings.workspace_bytes())
    fabric = Fabric.parse(environment.fabric)
    apart, left_over = divmod(world_size, environment.nodes)
    spans = environment.nodes > 1 and left_over == 0 and 2 <= apart <= MAX_WORLD_SIZE and fabric.can_share_memory
    return Limits(
        backend="host" if environment.is_host else "cuda",
        num_sms=environment.num_sms,
        multicast=environment.multicast,
        max_blocks=MAX_BLOCKS,
        staging_bytes=layout.staging_bytes,
        one_shot_bytes=layout.one_shot_bytes,
        stage_bytes=layout.stage_bytes,
        panel_bytes=layout.panel_bytes,
        symmetric=environment.nodes == 1 and 2 <= world_size <= MAX_WORLD_SIZE and fabric.can_share_memory,
        ranks_per_node=apart if spans else 0,
        launch_pdl=environment.compute_capability >= 90,
        host_cores=environment.num_cores if environment.is_host and environment.nodes == 1 and world_size >= 2 else 0,
    )
