"""Every environment variable of tunedcomm: one table, and one function for each entry that reads it.

A leaf. A variable is read when its function is called and never stored, so that a test or a launcher may set it at any
time before the group is made. `docs/environment.md` is this table in words; a test keeps the two equal.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from tunedcomm.errors import SettingError

__all__ = [
    "LOG_LEVELS",
    "MODES",
    "SETTINGS",
    "Setting",
    "borrow",
    "db_network",
    "db_path",
    "db_patience_s",
    "db_url",
    "forced",
    "forced_all",
    "keeps_misses",
    "log_level",
    "miss_log",
    "mode",
    "nan_check",
    "node_of_rank",
    "peer_timeout_s",
    "render_markdown",
    "unknown_variables",
    "workspace_bytes",
]

PREFIX = "TUNEDCOMM_"
FORCE_PREFIX = "TUNEDCOMM_FORCE_"
MODES = ("cached", "off", "force")
LOG_LEVELS = ("debug", "info", "warning", "error")
NETWORK_MODES = ("auto", "no", "per-host")
# Kernels count nanoseconds in 64 bits, from a clock that may have begun in 1970.
_MOST_PEER_TIMEOUT_S = 1e9
# Words that mean "no file" and "the default file" where a file may be named.
_OFF = ("0", "off", "no", "false")
_ON = ("1", "on", "yes", "true")


@dataclass(frozen=True, slots=True)
class Setting:
    """One environment variable.

    Attributes:
        name: the variable; `<OP>` in it stands for an op's name in capitals.
        default: what holds where the variable is unset or empty, in words.
        allowed: the values it takes, in words; part of the error text.
        meaning: what it does, one sentence or two.
    """

    name: str
    default: str
    allowed: str
    meaning: str


SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="TUNEDCOMM_BORROW",
        default="none",
        allowed="parts of GPU names, patterns such as `*H100*`, or the first digits of environment digests, separated "
        "by `,`",
        meaning="Other hardware whose measurements may serve where nothing was measured on this: same compute "
        "capability, kind of fabric, multicast and number of hosts. Its kernels are ranked by them, its times predict "
        "nothing. All ranks of a group must agree on it.",
    ),
    Setting(
        name="TUNEDCOMM_CHAOS_DB",
        default="none",
        allowed="database paths separated by `,`, none of them empty",
        meaning="A switch for tests: the process with number `RANK` takes the path of that number as its user "
        "database instead of TUNEDCOMM_DB; after the last comes the first again.",
    ),
    Setting(
        name="TUNEDCOMM_DB",
        default="`tunedcomm/tuned.db` in the user's data directory",
        allowed="a file path or a SQLAlchemy URL such as `postgresql+psycopg://host/name`",
        meaning="The user database: what `tunedcomm tune` writes and dispatch reads first.",
    ),
    Setting(
        name="TUNEDCOMM_DB_NETWORK",
        default="auto",
        allowed=", ".join(f"`{mode}`" for mode in NETWORK_MODES),
        meaning="`auto` finds out whether a SQLite file lies on a network file system, where locks of several hosts do "
        "not hold; each host then writes a file of its own beside it, and all of them are read. `per-host` does so "
        "anywhere, `no` nowhere.",
    ),
    Setting(
        name="TUNEDCOMM_DB_PATH",
        default="none",
        allowed="files or directories separated by `:`, or these and SQLAlchemy URLs separated by `;`",
        meaning="Site databases, nearest first: read after the user database and before the packaged ones. A directory "
        "stands for its `*.db` files.",
    ),
    Setting(
        name="TUNEDCOMM_DB_PATIENCE_S",
        default="600",
        allowed="a number of seconds >= 0",
        meaning="How long `tunedcomm tune` waits for a database that is away or locked before it gives up.",
    ),
    Setting(
        name="TUNEDCOMM_FORCE_<OP>",
        default="none",
        allowed="the name of a variant of the op",
        meaning="Runs this variant for every problem of the op, whatever the databases say; the group raises an error "
        "where it cannot run. Example: `TUNEDCOMM_FORCE_ALL_REDUCE=lamport`.",
    ),
    Setting(
        name="TUNEDCOMM_LOG",
        default="warning",
        allowed=", ".join(f"`{level}`" for level in LOG_LEVELS),
        meaning="Least severe message that the logger `tunedcomm` prints.",
    ),
    Setting(
        name="TUNEDCOMM_MISS_LOG",
        default="`misses.jsonl` beside the user database, in the user's data directory where that is on a server",
        allowed="a file path; `0` for none, `1` for the default",
        meaning="Where a group's first rank notes the problems that it called without their having been tuned, for "
        "`tunedcomm tune --from-misses`. Ranks may differ in it.",
    ),
    Setting(
        name="TUNEDCOMM_MODE",
        default="cached",
        allowed=", ".join(f"`{mode}`" for mode in MODES),
        meaning="`cached` dispatches from the databases. `off` always runs the library. `force` is `cached`, but a "
        "problem for which no database has an answer is an error instead of a call of the library.",
    ),
    Setting(
        name="TUNEDCOMM_NAN_CHECK",
        default="0",
        allowed="`1` for yes, `0` for no",
        meaning="Looks for NaN in the inputs of every op before it is launched, and raises `NanInputError` with op, "
        "rank and count. An eager call waits for its stream, raises at once and is not made: the other ranks miss this "
        "one and raise `PeerTimeoutError`. What a captured graph finds is raised by the group's next call on that "
        "rank. For finding errors: calls take longer. All ranks of a group must agree on it.",
    ),
    Setting(
        name="TUNEDCOMM_NODE_OF_RANK",
        default="ranks with the same host name share a node",
        allowed="whole numbers from 0 on separated by `,`, one for each rank of the default group, e.g. `0,0,1,1`",
        meaning="Which ranks share a node and so each other's memory, where host names do not say it, and for tests on "
        "one host. All ranks of a group must agree on it.",
    ),
    Setting(
        name="TUNEDCOMM_PEER_TIMEOUT_S",
        default="60",
        allowed="a number of seconds > 0, at most 1000000000",
        meaning="How long a kernel waits for a peer before the group raises `PeerTimeoutError`.",
    ),
    Setting(
        name="TUNEDCOMM_WORKSPACE_MIB",
        default="64",
        allowed="a whole number of MiB from 1 to 65536",
        meaning="Largest message that two-shot staging holds. A group's symmetric memory grows with it; larger "
        "messages run through variants that need no staging. Fused GEMMs may take up to 16 times as much for their "
        "matrices, when they first need it. All ranks of a group must agree on it.",
    ),
)


def _setting(name: str) -> Setting:
    return next(setting for setting in SETTINGS if setting.name == name)


def _raw(name: str) -> str | None:
    """The variable's text without surrounding blanks; None where it is unset or empty."""
    return os.environ.get(name, "").strip() or None


def _refuse(name: str, value: str) -> SettingError:
    return SettingError(
        f"environment variable {name}={value!r} is not usable: allowed is {_setting(name).allowed}; "
        f"unset it for the default ({_setting(name).default})"
    )


def _one_of(name: str, values: tuple[str, ...], default: str) -> str:
    raw = _raw(name)
    if raw is None:
        return default
    if raw.lower() not in values:
        raise _refuse(name, raw)
    return raw.lower()


def _seconds(name: str, default: float, *, is_zero_allowed: bool, most: float = sys.float_info.max) -> float:
    raw = _raw(name)
    if raw is None:
        return default
    try:
        seconds = float(raw)
    except ValueError:
        raise _refuse(name, raw) from None
    if not 0 <= seconds <= most or (seconds == 0 and not is_zero_allowed):
        raise _refuse(name, raw)
    return seconds


def borrow() -> tuple[str, ...]:
    """TUNEDCOMM_BORROW: names of the hardware whose measurements may serve here, in their order."""
    return tuple(part.strip() for part in (_raw("TUNEDCOMM_BORROW") or "").split(",") if part.strip())


def db_network() -> str:
    """TUNEDCOMM_DB_NETWORK: one of `NETWORK_MODES`.

    Raises:
        SettingError: another value.
    """
    return _one_of("TUNEDCOMM_DB_NETWORK", NETWORK_MODES, "auto")


def db_url() -> str | None:
    """TUNEDCOMM_DB: path or URL of the user database, or None for the default place.

    Raises:
        SettingError: TUNEDCOMM_CHAOS_DB, which takes its place in tests, has an empty entry.
    """
    chaos = _raw("TUNEDCOMM_CHAOS_DB")
    if chaos is None:
        return _raw("TUNEDCOMM_DB")
    paths = [part.strip() for part in chaos.split(",")]
    if not all(paths):
        raise _refuse("TUNEDCOMM_CHAOS_DB", chaos)
    rank = os.environ.get("RANK", "")
    return paths[(int(rank) if rank.isdecimal() else 0) % len(paths)]


def db_path() -> list[str]:
    """TUNEDCOMM_DB_PATH: site databases, nearest first."""
    raw = _raw("TUNEDCOMM_DB_PATH") or ""
    # A URL holds colons of its own (scheme, port), so a list with a URL in it needs another separator.
    separator = ";" if ";" in raw or "://" in raw else os.pathsep
    return [part.strip() for part in raw.split(separator) if part.strip()]


def db_patience_s() -> float:
    """TUNEDCOMM_DB_PATIENCE_S: seconds that a sweep waits for a database that is away or locked.

    Raises:
        SettingError: not a finite number >= 0.
    """
    return _seconds("TUNEDCOMM_DB_PATIENCE_S", 600.0, is_zero_allowed=True)


def forced(op: str) -> str | None:
    """TUNEDCOMM_FORCE_<OP>: name of the variant to run for every problem of `op`, or None."""
    return _raw(FORCE_PREFIX + op.upper())


def forced_all() -> dict[str, str]:
    """Every TUNEDCOMM_FORCE_<OP> that is set: op to variant."""
    names = sorted(name for name in os.environ if name.startswith(FORCE_PREFIX))
    return {name[len(FORCE_PREFIX) :].lower(): value for name in names if (value := _raw(name))}


def log_level() -> str:
    """TUNEDCOMM_LOG: one of `LOG_LEVELS`.

    Raises:
        SettingError: another value.
    """
    return _one_of("TUNEDCOMM_LOG", LOG_LEVELS, "warning")


def keeps_misses() -> bool:
    """False if TUNEDCOMM_MISS_LOG switches the noting of untuned problems off."""
    return (_raw("TUNEDCOMM_MISS_LOG") or "").lower() not in _OFF


def miss_log() -> str | None:
    """TUNEDCOMM_MISS_LOG: the file that it names, or None for the default place."""
    raw = _raw("TUNEDCOMM_MISS_LOG")
    return None if raw is None or raw.lower() in (*_OFF, *_ON) else raw


def mode() -> str:
    """TUNEDCOMM_MODE: one of `MODES`.

    Raises:
        SettingError: another value.
    """
    return _one_of("TUNEDCOMM_MODE", MODES, "cached")


def nan_check() -> bool:
    """TUNEDCOMM_NAN_CHECK: inputs are searched for NaN.

    Raises:
        SettingError: neither a yes nor a no.
    """
    return _one_of("TUNEDCOMM_NAN_CHECK", (*_ON, *_OFF), "0") in _ON


def node_of_rank() -> tuple[int, ...]:
    """TUNEDCOMM_NODE_OF_RANK: the node of every rank of the default group; empty where host names say it.

    Raises:
        SettingError: something else than whole numbers.
    """
    raw = _raw("TUNEDCOMM_NODE_OF_RANK")
    parts = [part.strip() for part in raw.split(",")] if raw else []
    if raw and not all(part.isascii() and part.isdigit() for part in parts):
        raise _refuse("TUNEDCOMM_NODE_OF_RANK", raw)
    return tuple(int(part) for part in parts)


def peer_timeout_s() -> float:
    """TUNEDCOMM_PEER_TIMEOUT_S: seconds that a kernel waits for a peer.

    Raises:
        SettingError: not a number > 0, or more than kernels can count.
    """
    return _seconds("TUNEDCOMM_PEER_TIMEOUT_S", 60.0, is_zero_allowed=False, most=_MOST_PEER_TIMEOUT_S)


def workspace_bytes() -> int:
    """TUNEDCOMM_WORKSPACE_MIB, in bytes: the largest message that two-shot staging holds.

    Raises:
        SettingError: not a whole number of MiB from 1 to 65536.
    """
    name = "TUNEDCOMM_WORKSPACE_MIB"
    raw = _raw(name)
    if raw is None:
        return 64 << 20
    if not raw.isascii() or not raw.isdigit() or not 1 <= int(raw) <= 65536:
        raise _refuse(name, raw)
    return int(raw) << 20


def unknown_variables(known_ops: tuple[str, ...]) -> list[str]:
    """Variables in the environment that begin with `TUNEDCOMM_` and mean nothing: most likely misspelt.

    Args:
        known_ops: names for which `TUNEDCOMM_FORCE_<OP>` has a meaning.
    """
    known = {setting.name for setting in SETTINGS} | {FORCE_PREFIX + op.upper() for op in known_ops}
    return sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)


def render_markdown() -> str:
    """The text of `docs/environment.md`."""
    lines = [
        "# Environment variables",
        "",
        "This page is the table in `tunedcomm/settings.py`. A variable is read when a group or database is opened, not",
        "at import. A value that a variable does not take raises `SettingError`. All ranks of a group should see the",
        "same values; `tunedcomm doctor` prints those that are set and names the ones that it does not know.",
    ]
    for setting in SETTINGS:
        lines += [
            "",
            f"## `{setting.name}`",
            "",
            setting.meaning,
            "",
            f"- Allowed: {setting.allowed}",
            f"- Default: {setting.default}",
        ]
    return "\n".join(lines) + "\n"
