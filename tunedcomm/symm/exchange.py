"""The ranks of a group exchange Python objects through the group's store.

Set-up talks here and not through collectives on the group: those belong to the program, may be intercepted, and leave
the other ranks waiting where one rank raises. Rank 0 gathers the values and publishes the list of them.

A set-up and all exchanges for its results have one *epoch*, which is part of their keys in the store, and exchanges of
an epoch are counted. So messages of two set-ups, or of two exchanges, cannot mix. A rank that leaves an epoch by an
exception says so in the store; then every rank that waits in the epoch, or comes to it later, raises. Each rank counts
its own set-ups of the group, as it does collectives: the failed set-ups of one rank fail on the others, too. Keys are
deleted when the last rank has read them.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store, default_pg_timeout

from tunedcomm.errors import AgreementError, GroupAbortedError, GroupError, PeerTimeoutError
from tunedcomm.hardware import kernel_identity, process_start, this_process

T = TypeVar("T")
_PIECE_BYTES = 4 << 20  # TCPStore takes 8 MiB a key
_FIRST_SLEEP_S, _SLEEP_GROWTH, _MAX_SLEEP_S = 0.00005, 1.3, 0.01
_SLEEP_PER_RANK_S = 0.0001  # one server answers all that wait
_LOOK_EVERY_S = 0.1
_MAX_SAID = 1000
AFTERWARDS = (
    "The group refuses further calls; to go on with it, call tunedcomm.release_communicator(group) on every rank"
)


def left_by(what: str, error: BaseException) -> str:
    """Say how an exception ended a call or a set-up, and what to do."""
    said = (f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)[:_MAX_SAID]
    return f"left {what} midway by {said}" + ("" if AFTERWARDS in said else f". {AFTERWARDS}")


class _Epoch:
    """One rank's end of the exchanges of a group since its last set-up began.

    Attributes:
        index: set-ups of the group before this one.
        is_open: a set-up or an exchange is under way.
        left: the reason why nothing can be exchanged any more, or "".
        processes: of the ranks, where they are known.
    """

    def __init__(self, group: dist.ProcessGroup, before: _Epoch | None) -> None:
        self.index: int = before.index + 1 if before else 0
        # What may be left in the store of the epoch before.
        self._stale = before._leftovers() if before else []
        self.is_open, self.left = True, ""
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._timeout_s = timeout_s_of(group)
        self._names: Sequence[int] = range(self.world_size)
        self.processes = _known_processes(group)
        self._count, self._part = 0, ""
        self._store = PrefixStore("tunedcomm/exchange", _get_process_group_store(group))

    def begin(self) -> None:
        """Learn which processes the ranks are; collective."""
        if self.world_size == 1:
            return
        try:
            self._store.check(["any"])
        except (RuntimeError, NotImplementedError) as error:
            raise GroupError(f"the process group has no store through which its ranks can set up: {error}") from error
        self.processes = self.exchange(this_process())
        if self.rank == 0:  # every rank is past the epochs that were left
            self._delete(*self._stale)

    def among(self, members: Sequence[int], name: str) -> _Epoch:
        """The exchanges of a subgroup of the group's ranks `members`, which end with the group's."""
        made = copy.copy(self)
        made.rank, made.world_size = members.index(self.rank), len(members)
        made._names = [self._names[member] for member in members]
        made.processes = [self.processes[member] for member in members]
        made._count, made._part = 0, f"{name}/"
        return made

    def exchange(self, value: object) -> list[Any]:
        if self.world_size == 1:
            return [value]
        if self.left:
            raise GroupAbortedError(self.left)
        self._count += 1
        key, others = self._key(), self.world_size - 1
        payload = pickle.dumps(value)
        if self.rank == 0:
            everyone = [payload, *(self._take(f"{key}/{rank}", rank, readers=1) for rank in range(1, self.world_size))]
            self._put(key, pickle.dumps(everyone))
        else:
            self._put(f"{key}/{self.rank}", payload)
            everyone = pickle.loads(self._take(key, 0, readers=others))  # noqa: S301 - the ranks trust each other
        return [pickle.loads(each) for each in everyone]  # noqa: S301

    def leave(self, error: BaseException) -> None:
        """Tell the ranks that wait, or will, that this rank raised."""
        if self.world_size == 1:
            return
        with contextlib.suppress(Exception):  # the store may be what failed
            if not self.left:
                self.left = f"rank {self._names[self.rank]} {left_by('the set-up', error)}"
                if not self._store.check([f"{self.index}/left"]):  # the first reason is the cause
                    self._store.set(f"{self.index}/left", self.left)

    def _leftovers(self) -> list[str]:
        """List the keys of an exchange that ended midway. They stay until all ranks are past it, for `_take`."""
        keys = [self._key(), f"{self.index}/{self._part}{self._count + 1}"]  # peers may be one exchange ahead
        of_ranks = [f"{key}/{rank}" for key in keys for rank in range(1, self.world_size)]
        return [f"{self.index}/left", keys[0], f"{keys[0]}/read", *of_ranks]

    def _key(self) -> str:
        return f"{self.index}/{self._part}{self._count}"

    def _put(self, key: str, payload: bytes) -> None:
        pieces = [payload[at : at + _PIECE_BYTES] for at in range(0, len(payload), _PIECE_BYTES)]
        for index, piece in enumerate(pieces[1:], 1):
            self._store.set(f"{key}+{index}", piece)  # type: ignore[arg-type]  # it takes bytes, too
        # Last: a reader that finds it finds all.
        self._store.set(key, b"%d:" % len(pieces) + pieces[0])  # type: ignore[arg-type]

    def _take(self, key: str, rank: int, *, readers: int) -> bytes:
        self._await(key, rank)
        count, _, first = self._store.get(key).partition(b":")
        more = [f"{key}+{index}" for index in range(1, int(count))]
        payload: bytes = b"".join([first, *(self._store.get(each) for each in more)])
        if readers == 1 or self._store.add(f"{key}/read", 1) == readers:
            self._delete(key, *more, *([f"{key}/read"] if readers > 1 else []))
        return payload

    def _await(self, key: str, rank: int) -> None:
        """Wait until a key is there: not in the store's own wait, which lets no signal in and sees no other key."""
        begin = looked = time.monotonic()
        sleep_s, longest_s = _FIRST_SLEEP_S, max(_MAX_SLEEP_S, self.world_size * _SLEEP_PER_RANK_S)
        while not self._store.check([key]):
            now = time.monotonic()
            if self._store.check([f"{self.index}/left"]) and not self._store.check([key]):
                self.left = self._store.get(f"{self.index}/left").decode(errors="replace")
                raise GroupAbortedError(self.left)
            if now - looked > _LOOK_EVERY_S:
                looked = now
                if self._has_ended(rank) and not self._store.check([key]):
                    raise PeerTimeoutError(f"{self._say(rank)} has ended (process {self.processes[rank][1]})")
            if now - begin > self._timeout_s:
                raise PeerTimeoutError(
                    f"{self._say(rank)} did not come within {self._timeout_s:g} s, the group's time-out. Every rank of "
                    "a group must take part in its first call, and make the same calls in the same order"
                )
            time.sleep(sleep_s)
            sleep_s = min(sleep_s * _SLEEP_GROWTH, longest_s)

    def _has_ended(self, rank: int) -> bool:
        if not self.processes:
            return False
        kernel, pid, start = self.processes[rank]
        return kernel == kernel_identity() and process_start(pid) != start

    def _say(self, rank: int) -> str:
        return f"rank {self._names[rank]} of the group"

    def _delete(self, *keys: str) -> None:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # some stores cannot
            for key in keys:
                self._store.delete_key(key)


def timeout_s_of(group: dist.ProcessGroup) -> float:
    """The time-out that the program gave the group."""
    found = [group._get_backend(device).options._timeout for device in group._device_types]
    return float(min(found, default=default_pg_timeout).total_seconds())


_epochs: weakref.WeakKeyDictionary[dist.ProcessGroup, _Epoch] = weakref.WeakKeyDictionary()


def _known_processes(group: dist.ProcessGroup) -> list[tuple[str, int, int | None]]:
    """The ranks' processes, by rank, from an earlier set-up of the group or the default group; [] where none was."""
    if (known := _epochs.get(group)) is not None:
        return known.processes
    world = dist.group.WORLD
    everyone = _epochs[world].processes if world is not None and world in _epochs else []
    ranks = range(dist.get_world_size(group)) if everyone else ()
    return [everyone[dist.get_global_rank(group, rank)] for rank in ranks]


def _next(group: dist.ProcessGroup) -> _Epoch:
    made = _epochs[group] = _Epoch(group, _epochs.get(group))
    return made


@contextlib.contextmanager
def set_up(group: dist.ProcessGroup, *, anew: bool = True) -> Iterator[None]:
    """A block in which the ranks of a group set something up; collective.

    An exception that leaves the block ends it on every rank: the other ranks raise GroupAbortedError where they wait.

    Args:
        group: process group.
        anew: begin a new epoch, as the first set-up of a group always does. Exchanges for what was set up before then
            belong to the new epoch, too.
    """
    epoch = _epochs.get(group)
    was_open = epoch is not None and epoch.is_open
    try:
        if epoch is not None and not anew:
            epoch.is_open = True
        else:
            epoch = _next(group)
            epoch.begin()
        yield
    except BaseException as error:
        leave(group, error)
        raise
    finally:
        if epoch is not None:
            epoch.is_open = was_open and not anew


def leave(group: dist.ProcessGroup, error: BaseException, *, anew: bool = True) -> None:
    """Raise GroupAbortedError on the other ranks of the group's set-up or exchange, which `error` ended on this one.

    Where none is under way on this rank, the next set-up ends at once on the other ranks if `anew`, else the exchanges
    for what was set up. The same error counts once.
    """
    with contextlib.suppress(Exception):  # `error` is the one to raise
        if not getattr(error, "_has_left", False):
            error._has_left = True  # type: ignore[attr-defined]
            epoch = _epochs.get(group)
            is_meant = epoch is not None and (epoch.is_open or not anew)
            epoch = epoch if epoch is not None and is_meant else _next(group)
            epoch.is_open = False
            epoch.leave(error)


def exchange(group: dist.ProcessGroup, value: object) -> list[Any]:
    """Every rank's `value`, by rank; collective.

    Raises:
        GroupAbortedError: a rank left the group's set-up, or an exchange since, by an exception.
        PeerTimeoutError: a rank did not come within the group's time-out, or its process has ended.
    """
    with set_up(group, anew=False):
        return _epochs[group].exchange(value)


def on_every_rank(group: dist.ProcessGroup, what: str, make: Callable[[], T]) -> list[T]:
    """`make()` of every rank, by rank.

    Raises:
        Exception: what the caller's own `make` raised, once the other ranks know: they would wait for it.
        AgreementError: another rank's `make` raised.
    """
    made, failure = None, None
    try:
        made = make()
    except Exception as error:  # noqa: BLE001 - raised below
        failure = error
    everyone = exchange(group, (made, failure and f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        with contextlib.suppress(AttributeError):
            failure.ends_group = False  # type: ignore[attr-defined]  # every rank raises
        try:
            raise failure
        finally:
            # A frame that holds its own exception is a cycle: it would keep the group alive to the very end of the
            # interpreter, which gloo's threads then abort.
            failure = None
    for rank, (_, text) in enumerate(everyone):
        if text:
            raise AgreementError(f"rank {rank} of the group could not {what}: {text}")
    return [value for value, _ in everyone]


def agree(group: dist.ProcessGroup, what: str, make: Callable[[], T], fields_of: Callable[[T], Mapping[str, Any]]) -> T:
    """`make()`, whose fields must be equal on every rank.

    Raises:
        Exception: what the caller's own `make` raised.
        AgreementError: another rank's `make` raised, or a field differs; the text names the first that does.
    """
    made: list[T] = []

    def make_fields() -> Mapping[str, Any]:
        made.append(make())
        return fields_of(made[0])

    everyone = on_every_rank(group, f"find out its {what}", make_fields)
    if difference := first_difference(everyone):
        raise AgreementError(
            f"the ranks of the group differ in {what}: {difference}; set the same TUNEDCOMM_* variables and install "
            "the same version and packages on every rank"
        )
    return made[0]


def first_difference(everyone: Sequence[Mapping[str, Any]]) -> str:
    """The first value in which a rank differs from rank 0, in words; "" if none does."""
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for name in sorted({*other, *first}):
            if name not in first or name not in other or first[name] != other[name]:
                one, two = (repr(values[name]) if name in values else "not there" for values in (first, other))
                return f"{name} is {one} on rank 0 and {two} on rank {rank}"
    return ""


def register_subgroup(group: dist.ProcessGroup, parent: dist.ProcessGroup, members: Sequence[int], name: str) -> None:
    """Let the ranks of a subgroup exchange objects; these exchanges end with the parent's.

    Args:
        group: the subgroup.
        parent: a group that has been set up.
        members: ranks in `parent`, by rank in `group`.
        name: different from other subgroups that `parent` ever has.
    """
    _epochs[group] = _epochs[parent].among(members, name)
