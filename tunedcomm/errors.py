"""Every exception tunedcomm raises on purpose.

The hierarchy::

    TunedCommError
    ├── NotInitializedError (RuntimeError)      torch.distributed is not up
    ├── GroupError (ValueError)                 the caller is no member of the group, or its backend does not fit
    ├── UnsupportedInputError (ValueError)      a tensor or option that the op does not take
    ├── ConfigError (ValueError)                a config outside its variant's space
    ├── SettingError (ValueError)               an environment variable holds a value that it does not take
    ├── UnknownNameError (ValueError)           no such op, variant, environment or problem; nearest names in the text
    ├── InfeasibleError (RuntimeError)          a forced candidate cannot run this problem here
    ├── AgreementError (RuntimeError)           the ranks of a group disagree
    ├── NanInputError (ValueError)              TUNEDCOMM_NAN_CHECK found NaN in an input
    ├── PeerTimeoutError (TimeoutError)         a peer did not arrive in time; the group is unusable from here on
    ├── WorkspaceError (RuntimeError)           symmetric memory could not be allocated or mapped
    ├── TuningError (RuntimeError)              a sweep could not be started or carried on
    └── DatabaseError (RuntimeError)
        ├── DatabaseAccessError                 missing, a directory, unreadable or read-only
        ├── DatabaseCorruptError                not a SQLite database, or damaged
        ├── DatabaseVersionError                written by a newer tunedcomm, or in need of `tunedcomm db upgrade`
        ├── DatabaseBusyError                   locked by another writer for longer than the busy timeout
        ├── DatabaseAwayError                   the server does not answer, restarts or takes no more connections
        └── DatabaseFullError                   no space left where the database lies

Every message says what was wrong, the value, what is allowed and what to do next.
"""

from __future__ import annotations

__all__ = [
    "AgreementError",
    "ConfigError",
    "DatabaseAccessError",
    "DatabaseAwayError",
    "DatabaseBusyError",
    "DatabaseCorruptError",
    "DatabaseError",
    "DatabaseFullError",
    "DatabaseVersionError",
    "GroupError",
    "InfeasibleError",
    "NanInputError",
    "NotInitializedError",
    "PeerTimeoutError",
    "SettingError",
    "TunedCommError",
    "TuningError",
    "UnknownNameError",
    "UnsupportedInputError",
    "WorkspaceError",
]


class TunedCommError(Exception):
    """Base of every error that tunedcomm raises on purpose."""


class NotInitializedError(TunedCommError, RuntimeError):
    """`torch.distributed` has no default process group yet."""


class GroupError(TunedCommError, ValueError):
    """The process group cannot serve the call: not a member, or its backend does not fit the tensor."""


class UnsupportedInputError(TunedCommError, ValueError):
    """A tensor or an option that the op does not take."""


class ConfigError(TunedCommError, ValueError):
    """A config that is not a point of its variant's space."""


class SettingError(TunedCommError, ValueError):
    """An environment variable of tunedcomm holds a value that it does not take."""


class UnknownNameError(TunedCommError, ValueError):
    """A name that nothing is registered or stored under."""


class InfeasibleError(TunedCommError, RuntimeError):
    """A candidate that was asked for by name cannot run this problem on this machine."""


class AgreementError(TunedCommError, RuntimeError):
    """The ranks of a group do not hold the same snapshot or settings."""


class NanInputError(TunedCommError, ValueError):
    """An input holds NaN, and `TUNEDCOMM_NAN_CHECK` is on."""


class PeerTimeoutError(TunedCommError, TimeoutError):
    """A peer did not arrive within `TUNEDCOMM_PEER_TIMEOUT_S`; the group refuses further calls."""


class WorkspaceError(TunedCommError, RuntimeError):
    """Symmetric memory could not be allocated, mapped or exchanged."""


class TuningError(TunedCommError, RuntimeError):
    """A sweep could not be started or carried on."""


class DatabaseError(TunedCommError, RuntimeError):
    """Base of everything that can be wrong with a tuning database."""


class DatabaseAccessError(DatabaseError):
    """The database path is missing, a directory, unreadable or not writable."""


class DatabaseCorruptError(DatabaseError):
    """The file is not a SQLite database or is damaged."""


class DatabaseVersionError(DatabaseError):
    """The schema is newer than this tunedcomm, or older and not yet upgraded."""


class DatabaseBusyError(DatabaseError):
    """Another process held the database's write lock for longer than the busy timeout."""


class DatabaseAwayError(DatabaseError):
    """The database server does not answer, restarts or takes no more connections: it may come back."""


class DatabaseFullError(DatabaseError):
    """There is no space left where the database lies; what was recorded before is whole."""
