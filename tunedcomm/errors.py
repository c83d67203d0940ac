"""Every exception tunedcomm raises on purpose.

Each is a `TunedCommError` and the built-in error that its class names; errors of databases are `DatabaseError`s.
Every message says what was wrong, the value, what is allowed and what to do next.
"""

from __future__ import annotations


class TunedCommError(Exception):
    """Base of every error that tunedcomm raises on purpose.

    Attributes:
        ends_group: an error of this class that leaves a call ends the call's group: see `GroupAbortedError`. False
            where the error rests on what all ranks pass alike or have voted on: then no rank made the call, or every
            rank did, and the group can be used on.
    """

    ends_group = False


class NotInitializedError(TunedCommError, RuntimeError):
    """There is no process group yet, or a group's first call was captured in a CUDA graph.

    Call `torch.distributed.init_process_group` before the first call, and start the program with `torchrun`. Before a
    capture make the same calls once outside of it, as a warm-up.
    """


class GroupError(TunedCommError, ValueError):
    """The process group cannot serve the call: not a member, or its backend does not fit the tensor.

    Call only on ranks that belong to the group; tensors on GPUs need a group with NCCL, tensors on CPUs one with gloo.
    """


class UnsupportedInputError(TunedCommError, ValueError):
    """A tensor or an option that the op does not take.

    The message names the value and what is allowed; docs/ops.md lists what each op takes.
    """


class ConfigError(TunedCommError, ValueError):
    """A config that is not a point of its variant's space.

    Take the config from `tunedcomm db show`, or leave it out for the variant's default; the message lists the axes and
    their values.
    """


class SettingError(TunedCommError, ValueError):
    """An environment variable of tunedcomm holds a value that it does not take.

    Set it to what the message allows or unset it; docs/environment.md has all of them.
    """


class UnknownNameError(TunedCommError, ValueError):
    """A name that nothing is registered or stored under.

    The message lists the nearest names: of ops and variants as docs/ops.md has them, of environments and problems as
    `tunedcomm db list` prints them.
    """


class InfeasibleError(TunedCommError, RuntimeError):
    """A candidate that was asked for by name cannot run this problem on this machine.

    The message gives the reason. Ask for another variant, or take away what forces this one: `tunedcomm.force`, a pin
    (`tunedcomm db unpin`) or `TUNEDCOMM_FORCE_<OP>`.
    """


class AgreementError(TunedCommError, RuntimeError):
    """The ranks of a group do not hold the same snapshot or settings, or make different calls.

    Give every rank the same databases, environment variables and version of tunedcomm, and make the same calls; the
    message says which ranks differ in what. `tunedcomm.check_agreement()` asks for it at any time.
    """


class NanInputError(TunedCommError, ValueError):
    """An input holds NaN, and `TUNEDCOMM_NAN_CHECK` is on.

    Look for the NaN where the tensor was made, on the rank that the message names; without the check it would have
    reached every rank. The group ends, for this rank did not make the call.
    """

    ends_group = True


class CapacityError(TunedCommError, RuntimeError):
    """`ep_dispatch` had less room than an expert was sent tokens.

    The message names the expert. Pass a larger `capacity`, or let the router drop tokens; the group can be used on.
    """


class WrongResultError(TunedCommError, RuntimeError):
    """A kernel's result differs from the library's, and `TUNEDCOMM_CHECK` is on.

    The message names the variant, which the group does not use any more. Measure it again with
    `tunedcomm db verify`, and report it; graphs that were captured with it have to be captured anew.
    """


class PeerTimeoutError(TunedCommError, TimeoutError):
    """A peer did not arrive in time, or is gone; the group refuses further calls on every rank.

    The time is the process group's own time-out, or `TUNEDCOMM_PEER_TIMEOUT_S` where that is set. Look at the ranks
    that the message names: they have died, raised an error, or made other calls in another order. Then start again, or
    call `tunedcomm.release_communicator(group)` on every rank. Where ranks are apart for longer by design, set the
    variable higher.
    """

    ends_group = True


class GroupAbortedError(PeerTimeoutError):
    """An exception ended a call of the group midway on some rank; the group refuses further calls on every rank.

    The message names the rank and the exception, such as KeyboardInterrupt of a signal handler between the entry of an
    op and its return, or an error of PyTorch's. Every exception does that but those with `ends_group = False`. To go on
    with the group, call `tunedcomm.release_communicator(group)` on every rank: the next call sets it up anew.
    """


class WorkspaceError(TunedCommError, RuntimeError):
    """Symmetric memory could not be allocated, mapped or exchanged.

    `tunedcomm doctor` says what the machine lacks: free GPU memory, peer access, or room in `/dev/shm`. A smaller
    `TUNEDCOMM_WORKSPACE_MIB` needs less.
    """


class TuningError(TunedCommError, RuntimeError):
    """A sweep could not be started or carried on.

    The message says what ended it. What was measured is stored: the same command goes on from there.
    """


class MissingPackageError(TunedCommError, ImportError):
    """An optional package that the command needs is not installed.

    Install the extra that the message names, such as `pip install 'tunedcomm[report]'`.
    """


class UnsupportedVersionError(TunedCommError, RuntimeError):
    """A feature needs parts of torch that are missing or different in the installed version.

    Install one of the versions that the message names, or do without the feature: the ops themselves do not need it.
    """


class DatabaseError(TunedCommError, RuntimeError):
    """Base of everything that can be wrong with a tuning database.

    `tunedcomm db check --db FILE` says what is wrong. A call of an op never raises one of these: a database that cannot
    be read is left out with a warning, and the library serves.
    """


class DatabaseAccessError(DatabaseError):
    """The database path is missing, a directory, unreadable or not writable.

    Check the path and its permissions, or name another one with `--db` or `TUNEDCOMM_DB`.
    """


class DatabaseCorruptError(DatabaseError):
    """The file is not a SQLite database or is damaged.

    Restore it from a copy, or move it away: `tunedcomm db check` lists what can still be read, and
    `tunedcomm db export` saves it.
    """


class DatabaseVersionError(DatabaseError):
    """The schema is newer than this tunedcomm, or older and not yet upgraded.

    Run `tunedcomm db upgrade` for an older one, update tunedcomm for a newer one.
    """


class DatabaseBusyError(DatabaseError):
    """Another process held the database's write lock for longer than the busy timeout.

    Wait for it and try again. For many writers at once use PostgreSQL, or a file a host and `tunedcomm db merge`.
    """


class DatabaseAwayError(DatabaseError):
    """The database server does not answer, restarts or takes no more connections: it may come back.

    `tunedcomm tune` waits for `TUNEDCOMM_DB_PATIENCE_S`. Check that the server runs and takes enough connections.
    """


class DatabaseFullError(DatabaseError):
    """There is no space left where the database lies; what was recorded before is whole.

    Make room, or move the database with `TUNEDCOMM_DB`; then run the same command again.
    """


def printable(text: str) -> str:
    """`text` with characters escaped that a terminal would obey instead of showing, such as names in a file have."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


__all__ = [name for name in sorted(globals()) if name.endswith("Error")]
