"""Set-up of a group: exchanges through its store, memory without a name, and a rank that fails or is killed midway."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import HOST, Ranks, logged, replaced
from harness import run_ranks
from quick import FULL, QUICK, sample
from torch.distributed.distributed_c10d import _get_process_group_store

import tunedcomm
from tunedcomm.db.layers import LayerFingerprint
from tunedcomm.dispatch import communicator as communicator_module
from tunedcomm.dispatch.groups import get_communicator, live_communicators
from tunedcomm.symm import buffer, exchange

WORLD_SIZE = 3
RANKS = Ranks(WORLD_SIZE, env=HOST, forget=False, timeout=500)
MIB = 1 << 20
# What the others may take to end; nearly all of it is the load of a machine that runs other tests, too.
END_S = 10.0


def right(rank: int, group: dist.ProcessGroup | None = None, numel: int = 700) -> None:
    world_size = dist.get_world_size(group)
    out = tunedcomm.all_reduce(torch.full((numel,), rank + 1.0), group=group)
    assert torch.equal(out, torch.full((numel,), world_size * (world_size + 1) / 2))


def everyones(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(gathered, value)
    return gathered


def mapped_bytes() -> int:
    """Bytes of the package's shared memory in this process."""
    lines = re.findall(r"^(\w+)-(\w+) .*tunedcomm", Path("/proc/self/maps").read_text(encoding="ascii"), re.MULTILINE)
    return sum(int(end, 16) - int(begin, 16) for begin, end in lines)


def left_behind(pid: int = 0) -> list[Path]:
    """Files and sockets of a process, by default this one."""
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    return [path for folder in folders for path in folder.glob(f"tunedcomm-{pid or os.getpid()}-*")]


# Exchanges.


def test_values_of_all_ranks_in_order(rank: int) -> None:
    """Of any size, and nothing stays in the store."""
    group = dist.new_group()
    store = _get_process_group_store(group)
    with exchange.set_up(group):
        dist.barrier()
        before = store.num_keys()
        dist.barrier()
        for value in (rank, None, {"text": "ü" * rank}, bytes([rank]) * (9 * MIB)):
            assert exchange.exchange(group, value)[rank] == value
        assert exchange.exchange(group, rank) == [0, 1, 2]
        assert exchange.exchange(group, bytes([rank]) * 5 * MIB) == [bytes([r]) * 5 * MIB for r in range(3)]
        dist.barrier()
        after = store.num_keys()
        dist.barrier()  # before a rank goes on and makes keys
        assert after <= before


def interrupted_exchange(group: dist.ProcessGroup, rank: int, culprit: int) -> None:
    with exchange.set_up(group):
        if rank == culprit:
            raise KeyboardInterrupt("planted")
        exchange.exchange(group, rank)


def test_a_rank_that_leaves_ends_the_others_at_once(rank: int) -> None:
    for culprit in range(WORLD_SIZE):
        group = dist.new_group()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt if rank == culprit else tunedcomm.GroupAbortedError) as caught:
            interrupted_exchange(group, rank, culprit)
        assert time.monotonic() - begin < END_S
        if rank != culprit:
            assert f"rank {culprit} " in str(caught.value)
            assert "KeyboardInterrupt: planted" in str(caught.value)
        right(rank, group)


def test_advice_is_given_once() -> None:
    said = exchange.left_by("all_reduce", ValueError("planted"))
    assert exchange.left_by("the set-up", tunedcomm.GroupAbortedError(said)).count("refuses further calls") == 1


def test_set_ups_in_which_a_rank_gave_up(rank: int) -> None:
    """They fail on ranks that come later, at once; the one after a release works."""
    group = dist.new_group()
    gave_up = (tunedcomm.PeerTimeoutError, r"rank 1 of the group did not come within 0\.2 s")
    refused = (tunedcomm.GroupAbortedError, "rank 0 left the set-up midway by PeerTimeoutError")
    for turn in (0, 1):  # rank 0 goes first
        for _ in range(2 if (rank > 0) == turn else 0):
            error, said = gave_up if rank == 0 else refused
            with pytest.raises(error, match=said), replaced(exchange, "timeout_s_of", lambda group: 0.2):
                tunedcomm.all_reduce(torch.ones(5), group=group)
            tunedcomm.release_communicator(group)
        dist.barrier()
    right(rank, group)
    tunedcomm.release_communicators()
    right(rank, group)


def test_set_up_makes_no_collective_of_the_group(rank: int) -> None:
    """They would reach the communicator that is being made where the group is intercepted."""

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a collective of the group")

    tunedcomm.release_communicators()
    with contextlib.ExitStack() as stack:
        for name in ("all_gather_object", "broadcast_object_list", "barrier", "broadcast", "all_gather", "all_reduce"):
            stack.enter_context(replaced(dist, name, refuse))
        get_communicator()
    dist.barrier()
    tunedcomm.release_communicators()


def test_a_group_without_a_store(rank: int) -> None:
    class Nothing(dist.Store):
        pass

    with replaced(exchange, "_get_process_group_store", lambda group: Nothing()):
        with pytest.raises(tunedcomm.GroupError, match="store"):
            tunedcomm.all_reduce(torch.ones(5), group=dist.new_group())


# A file that rank 0 makes between two ranks' looks.


def test_a_database_that_rank_0_has_just_made(rank: int) -> None:
    tunedcomm.release_communicators()
    real, looks = communicator_module.layer_fingerprints, []

    def look() -> tuple[LayerFingerprint, ...]:
        looks.append(1)
        made = LayerFingerprint("user", "made.db", frozenset({("made.db",)}))
        return (*real(), made) if rank == 0 or len(looks) > 1 else real()

    with replaced(communicator_module, "layer_fingerprints", look), logged() as said:
        get_communicator()
    assert said == []
    assert len(looks) == 2


# Memory.


def memory_body(rank: int, world_size: int) -> tuple[int, int]:
    right(rank)
    small = mapped_bytes()
    with tunedcomm.force("all_reduce", "one_shot"):
        right(rank)
        right(rank)
    return small, mapped_bytes() - small


@pytest.mark.parametrize("world_size", [2, 4])
def test_host_variants_take_little(world_size: int) -> None:
    """The lane comes with the first interpreted kernel, and is that for eager calls alone."""
    limits = {**HOST, "TUNEDCOMM_WORKSPACE_MIB": "64"}
    for small, more in run_ranks(world_size, memory_body, env=limits, timeout=120):
        assert small <= 24 * MIB
        assert world_size * 199 * MIB < more < world_size * 202 * MIB


def test_no_room_for_a_lane(rank: int) -> None:
    """Said once; the library serves, and host variants go on."""
    tunedcomm.release_communicators()
    right(rank)
    real, asked = buffer._share, []

    def share(group: dist.ProcessGroup, nbytes: int, stack: contextlib.ExitStack) -> int | str:
        asked.append(nbytes)
        return real(group, 1 << 60, stack)

    with replaced(buffer, "_share", share), logged() as said:
        for _ in range(3):
            for op in ("sum", "max"):
                problem = torch.full((7,), rank + 1)
                assert tunedcomm.all_reduce(problem, op=op).sum() == 7 * {"sum": 6, "max": 3}[op]
        with tunedcomm.force("all_reduce", "one_shot"):
            for numel in (700, 300):
                with pytest.raises(tunedcomm.InfeasibleError):
                    right(rank, numel=numel)
    assert said == []
    assert len(asked) == 1
    right(rank, numel=300)
    assert len(set(everyones(get_communicator().limits))) == 1
    tunedcomm.release_communicators()


def test_no_room_at_all(rank: int) -> None:
    tunedcomm.release_communicators()
    with replaced(buffer, "free_memory", lambda: 4096), logged() as said:
        right(rank)
    assert len(said) == (rank == 0)
    assert all(text.count("cannot reserve") == 1 and "free memory" in text for text in said)
    assert get_communicator().ring is None
    tunedcomm.release_communicators()
    right(rank)


@contextlib.contextmanager
def without_memfd() -> Iterator[None]:
    def missing(name: str) -> int:
        raise OSError(errno.ENOSYS, "planted")

    with replaced(os, "memfd_create", missing):
        yield


@contextlib.contextmanager
def unreachable(*, named: bool) -> Iterator[None]:
    """Rank 0 cannot reach abstract sockets, or no socket at all."""
    real = buffer._send

    def send(descriptor: int, address: str, password: bytes) -> bool:
        return address[0] != "\0" and not named and real(descriptor, address, password)

    with replaced(buffer, "_send", send):
        yield


@pytest.mark.parametrize("way", ["abstract socket", "socket in a folder", "unreachable", "no files without a name"])
def test_ways_to_share_memory(rank: int, way: str) -> None:
    tunedcomm.release_communicators()
    named = contextlib.ExitStack()
    if way == "socket in a folder":
        named.enter_context(unreachable(named=False))
    elif way == "unreachable":
        named.enter_context(unreachable(named=True))
    elif way == "no files without a name":
        named.enter_context(without_memfd())
    with named:
        right(rank)
        x = tunedcomm.symmetric_empty(40, dtype=torch.float32)
        assert not x.any()
    assert get_communicator().ring is not None
    maps = Path("/proc/self/maps").read_text(encoding="ascii")
    assert ("/dev/shm/tunedcomm" in maps) is (way in ("unreachable", "no files without a name"))
    dist.barrier()
    assert left_behind() == []
    dist.barrier()


def test_a_stranger_at_the_socket(rank: int) -> None:
    """Another program's descriptor is no memory of ours."""
    tunedcomm.release_communicators()
    real = buffer._send

    def send(descriptors: Sequence[int], address: str, said: bytes) -> bool:
        with Path("/dev/null").open("rb") as strange:
            return real([strange.fileno()], address, b"x" * len(said)) and real(descriptors, address, said)

    with replaced(buffer, "_send", send):
        right(rank)
    assert get_communicator().ring is not None


def test_memory_of_destroyed_groups(rank: int) -> None:
    tunedcomm.release_communicators()
    gc.collect()
    before = mapped_bytes()
    for _ in range(4):
        group = dist.new_group()
        right(rank, group)
        right(rank, group)
        dist.barrier()
        dist.destroy_process_group(group)
        with pytest.raises(tunedcomm.GroupError):
            tunedcomm.all_reduce(torch.ones(700), group=group)
    right(rank)
    assert len(live_communicators()) == 1
    gc.collect()
    assert mapped_bytes() - before <= 13 * MIB


# A rank that fails at any step of set-up: each call of a function of the package is a step.

_FILES = tuple(
    str(Path(tunedcomm.__file__).parent / name)
    for name in ("symm/", "dispatch/group_settings.py", "dispatch/communicator.py", "dispatch/groups.py")
)


@contextlib.contextmanager
def planted(step: int, plant: Callable[[], None]) -> Iterator[list[int]]:
    """Inside the block `plant` is called at the step of that number, from the set-up's first on; gives the steps."""
    count = [0]

    def watch(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_FILES):
            if not count[0] and frame.f_code.co_name != "_next":
                return
            count[0] += 1
            if count[0] == step:
                sys.setprofile(None)
                plant()

    try:
        sys.setprofile(watch)
        yield count
    finally:
        sys.setprofile(None)


def count_steps(group: dist.ProcessGroup) -> int:
    with planted(0, lambda: None) as count:
        get_communicator(group)
    tunedcomm.release_communicators()
    return count[0]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_rank_that_fails_at_any_step(rank: int, error: type[BaseException]) -> None:
    """Every rank ends, at once and alike, nothing is left, and the next set-up of the same group works."""
    group = dist.new_group()
    right(rank, group)
    tunedcomm.release_communicators()
    steps_of = everyones(count_steps(group))
    num_steps = max(steps_of)
    ended = 0
    every = 1 if FULL else 29 if QUICK else 7
    for step in range(1, num_steps + 1, every):
        culprit = step // every % WORLD_SIZE

        def plant() -> None:
            raise error(errno.EIO, "planted")

        outcome: BaseException | None = None
        begin = time.monotonic()
        try:
            with planted(step if rank == culprit else 0, plant):
                get_communicator(group)
        except (tunedcomm.TunedCommError, error) as found:
            outcome = found
        took = time.monotonic() - begin
        found = everyones((type(outcome).__name__, str(outcome), took))
        assert all(time_s < END_S for _, _, time_s in found), (step, found)
        if found[culprit][0] in ("OSError", "KeyboardInterrupt"):
            others = {name for peer, (name, _, _) in enumerate(found) if peer != culprit}
            # It cannot end the set-up of a rank that is done any more, but its next call.
            is_done = "NoneType" in others and others <= {"NoneType", "GroupAbortedError"}
            if is_late := is_done and step > steps_of[culprit] * 0.8:
                with pytest.raises(tunedcomm.GroupAbortedError):
                    right(rank, group)
            assert others in ({"GroupAbortedError"}, {"AgreementError"}) or is_late, (step, found)
            assert is_late or all(f"rank {culprit}" in found[peer][1] for peer in range(3) if peer != culprit), found
            ended += 1
        else:  # it was expected, such as that no file can be made: alike on all
            assert len({name for name, _, _ in found}) == 1, (step, found)
        assert left_behind() == [], step
        tunedcomm.release_communicators()
        right(rank, group)
        tunedcomm.release_communicators()
    assert ended > num_steps // every // 2


def killed_body(rank: int, world_size: int, step: int) -> tuple[str, float, list[Path]]:
    group, pid = dist.new_group(), everyones(os.getpid())[1]
    begin = time.monotonic()
    with planted(step if rank == 1 else 0, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        with pytest.raises(tunedcomm.PeerTimeoutError) as caught:
            get_communicator(group)
    return str(caught.value), time.monotonic() - begin, left_behind() + left_behind(pid)


@pytest.mark.parametrize("step", sample((60, 100, 130, 160), 2))
def test_a_rank_that_is_killed(step: int) -> None:
    outcomes = run_ranks(3, killed_body, step, env=HOST, killed=[1], timeout=60)
    for said, took, left in (outcomes[0], outcomes[2]):
        assert re.search("rank 1 .*has ended", said)
        assert took < 2 * END_S
        assert left == []


def test_other_groups_are_as_they_were(rank: int) -> None:
    first, other = dist.new_group(), dist.new_group()
    right(rank, first)
    held = get_communicator(first)
    with contextlib.suppress(tunedcomm.GroupAbortedError, KeyboardInterrupt):
        interrupted_exchange(other, rank, 1)
    assert held.ring is not None
    right(rank, first)
