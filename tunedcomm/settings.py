"""Every environment variable of tunedcomm: one table of typed settings, each called to read its variable.

A leaf. `settings.mode()` reads TUNEDCOMM_MODE at the call and stores nothing, so that a test or a launcher may set it
at any time before the group is made. `docs/environment.md` is this table in words.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, get_args

from tunedcomm.errors import SettingError
from tunedcomm.fp8 import WIRES
from tunedcomm.spec import NumericsPolicy

T = TypeVar("T")

PREFIX = "TUNEDCOMM_"
FORCE_PREFIX = "TUNEDCOMM_FORCE_"
MODES = ("cached", "off", "force")
LOG_LEVELS = ("debug", "info", "warning", "error")
NETWORK_MODES = ("auto", "no")
POLICIES: tuple[NumericsPolicy, ...] = get_args(NumericsPolicy)
# Stands for the hardware whose rows serve without being named, among the names of TUNEDCOMM_BORROW.
SIBLINGS = "siblings"
# Kernels count nanoseconds in 64 bits, from a clock that may have begun in 1970.
_MOST_PEER_TIMEOUT_S = 1e9
_OFF = ("0", "off", "no", "false")
_ON = ("1", "on", "yes", "true")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Generic[T]):
    """One environment variable; calling it reads the variable.

    Attributes:
        name: the variable; `<OP>` in it stands for an op's name in capitals.
        default: the value where the variable is unset or empty.
        allowed: the values it takes, in words; part of the error text.
        meaning: its effect, in one sentence or two.
        parse: text without surrounding blanks to value; raises ValueError for what is not allowed.
        default_in_words: the default, where its value does not say it.
    """

    name: str
    default: T
    allowed: str
    meaning: str
    parse: Callable[[str], T]
    default_in_words: str = ""

    @property
    def default_text(self) -> str:
        return self.default_in_words or (
            f"{self.default:g}" if isinstance(self.default, float) else str(self.default or "none")
        )

    def __call__(self) -> T:
        """The value now.

        Raises:
            SettingError: the variable holds a value that it does not take.
        """
        text = _text_of(self.name)
        if text is None:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise SettingError(
                f"environment variable {self.name}={text!r} is not usable: allowed is {self.allowed}; "
                f"unset it for the default ({self.default_text})"
            ) from None


def _text_of(name: str) -> str | None:
    """The variable's text without surrounding blanks; None where it is unset or empty."""
    return os.environ.get(name, "").strip() or None


def _one_of(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        return values[values.index(text.lower())]

    return parse


def _count_and_way(text: str) -> tuple[int, bool]:
    count, _, way = text.partition(",")
    return _whole(count.strip()), _one_of("raise", "fallback")(way.strip() or "raise") == "fallback"


def _seconds(*, is_zero_allowed: bool, most: float = sys.float_info.max) -> Callable[[str], float]:
    def parse(text: str) -> float:
        seconds = float(text)
        if not 0 <= seconds <= most or (seconds == 0 and not is_zero_allowed):
            raise ValueError(text)
        return seconds

    return parse


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)


def _whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(_whole(part.strip()) for part in text.split(","))


def _mebibytes(text: str) -> int:
    if not 1 <= _whole(text) <= 65536:
        raise ValueError(text)
    return int(text) << 20


def _wire(text: str) -> tuple[str, int] | None:
    if text.lower() in _OFF:
        return None
    wire, _, least = text.partition(":")
    if wire not in WIRES or (least and not least.endswith("MiB")):
        raise ValueError(text)
    return wire, _whole(least.removesuffix("MiB") or "0") << 20


def _parts(text: str, separator: str = ",") -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(separator) if part.strip())


def _lenders(text: str) -> tuple[str, ...]:
    return () if text.lower() in _OFF else tuple(dict.fromkeys((SIBLINGS, *_parts(text))))


def _paths(text: str) -> tuple[str, ...]:
    # A URL holds colons of its own (scheme, port), so a list with a URL in it needs another separator.
    return _parts(text, ";" if ";" in text or "://" in text else os.pathsep)


def _file_or_switch(text: str) -> str | bool:
    return True if text.lower() in _ON else text.lower() not in _OFF and text


def _switch(name: str, *, default: bool, meaning: str) -> Setting[bool]:
    """A variable that is 1 for yes or 0 for no."""
    return Setting(
        name=name,
        default=default,
        default_in_words=str(int(default)),
        parse=lambda text: bool(("0", "1").index(text)),
        allowed="`1` for yes, `0` for no",
        meaning=meaning,
    )


# Seconds; 0 for never, "check" for a look at what is stored.
autotune: Setting[float | str] = Setting(
    name="TUNEDCOMM_AUTOTUNE",
    default=0.0,
    parse=lambda text: text.lower() if text.lower() == "check" else _seconds(is_zero_allowed=True)(text),
    allowed="a number of seconds >= 0, or `check`",
    meaning="Tunes for so many seconds what a group called untuned, once, when a warm-up is over: at the first end of "
    "`ServingAllReduce.capture()` or of an `intercept()` block. `check` times the stored winners of what was called "
    "again, for at most a second, and warns where they do not hold here. All ranks of a group must agree on it.",
)
borrow: Setting[tuple[str, ...]] = Setting(
    name="TUNEDCOMM_BORROW",
    default=(SIBLINGS,),
    default_in_words="siblings alone",
    parse=_lenders,
    allowed="`no`, or parts of GPU names, patterns such as `*H100*`, or the first digits of environment digests, "
    "separated by `,`",
    meaning="Hardware whose measurements may serve where nothing was measured on this, besides siblings: GPUs that "
    "differ from this one in the model's name alone. It must have the same compute capability, kind of fabric, "
    "multicast and number of hosts. Its times rank kernels and predict nothing, and each kernel is "
    "checked on this machine before its first call. `no` borrows nothing, from siblings neither. All ranks of a group "
    "must agree on it.",
)
check = Setting(
    name="TUNEDCOMM_CHECK",
    default=(0, False),
    default_in_words="0",
    parse=_count_and_way,
    allowed="`0` for no check, a whole number, or one with `,raise` or `,fallback` behind it, e.g. `100,fallback`",
    meaning="Compares every so many-th eager call of each plan that runs a kernel with the library, on fresh memory. A "
    "variant whose result differs is not used by the group any more, and the library serves in its place. The call "
    "raises `WrongResultError` on every rank, or returns the library's result with `fallback`. The calls between run "
    "as they do without. All ranks of a group must agree on it.",
)
db_url: Setting[str | None] = Setting(
    name="TUNEDCOMM_DB",
    default=None,
    default_in_words="`tunedcomm/tuned.db` in the user's data directory",
    parse=str,
    allowed="a file path or a SQLAlchemy URL such as `postgresql+psycopg://host/name`",
    meaning="The user database: what `tunedcomm tune` writes and dispatch reads first.",
)
db_network = Setting(
    name="TUNEDCOMM_DB_NETWORK",
    default="auto",
    parse=_one_of(*NETWORK_MODES),
    allowed="`auto` or `no`; what was `per-host` is now a local file on each host, shared as a site database",
    meaning="`auto` finds out whether a SQLite file lies on a network file system, where locks of several hosts do "
    "not hold, and refuses to write it there; `no` trusts the locks.",
)
db_path: Setting[tuple[str, ...]] = Setting(
    name="TUNEDCOMM_DB_PATH",
    default=(),
    parse=_paths,
    allowed="files or directories separated by `:`, or these and SQLAlchemy URLs separated by `;`",
    meaning="Site databases, nearest first: read after the user database and before the packaged ones. A directory "
    "stands for its `*.db` files.",
)
db_patience_s = Setting(
    name="TUNEDCOMM_DB_PATIENCE_S",
    default=600.0,
    parse=_seconds(is_zero_allowed=True),
    allowed="a number of seconds >= 0",
    meaning="How long `tunedcomm tune` waits for a database that is away or locked before it gives up.",
)
debug = _switch(
    "TUNEDCOMM_DEBUG",
    default=False,
    meaning="Compares what the ranks of a group ask for before each eager call: op, sizes, dtype, options, what is "
    "forced and which tensors are given. Where they differ, `AgreementError` says in what on every rank and nothing is "
    "launched. For finding errors: every call waits for all ranks. All ranks of a group must agree on it.",
)
engines = _switch(
    "TUNEDCOMM_ENGINES",
    default=True,
    meaning="Serves the collectives of vLLM and SGLang, which load tunedcomm by its entry points. `0` leaves every "
    "engine alone. Set it to the same value on all ranks.",
)
_force: Setting[str | None] = Setting(
    name="TUNEDCOMM_FORCE_<OP>",
    default=None,
    parse=str,
    allowed="the name of a variant of the op",
    meaning="Runs this variant for every problem of the op, whatever the databases say; the group raises an error "
    "where it cannot run. Example: `TUNEDCOMM_FORCE_ALL_REDUCE=lamport`.",
)
log_level: Setting[str | None] = Setting(
    name="TUNEDCOMM_LOG",
    default=None,
    default_in_words="warning",
    parse=_one_of(*LOG_LEVELS),
    allowed=", ".join(f"`{level}`" for level in LOG_LEVELS),
    meaning="Least severe message that the logger `tunedcomm` prints.",
)
# The file; True for the default one, False for none.
miss_log: Setting[str | bool] = Setting(
    name="TUNEDCOMM_MISS_LOG",
    default=True,
    default_in_words="`misses.jsonl` beside the user database, in the user's data directory where that is on a server",
    parse=_file_or_switch,
    allowed="a file path; `0` for none, `1` for the default",
    meaning="Where a group's first rank notes the problems that it called without their having been tuned, for "
    "`tunedcomm tune --from-misses`. Ranks may differ in it.",
)
mode = Setting(
    name="TUNEDCOMM_MODE",
    default="cached",
    parse=_one_of(*MODES),
    allowed=", ".join(f"`{mode}`" for mode in MODES),
    meaning="`cached` dispatches from the databases. `off` always runs the library. `force` is `cached`, but a "
    "problem for which no database has an answer is an error instead of a call of the library.",
)
nan_check = _switch(
    "TUNEDCOMM_NAN_CHECK",
    default=False,
    meaning="Looks for NaN in the inputs of every op before it is launched, and raises `NanInputError` with op, "
    "rank and count. An eager call waits for its stream, raises at once and is not made: the other ranks miss this "
    "one and raise `PeerTimeoutError`. What a captured graph finds is raised by the group's next call on that "
    "rank. For finding errors: calls take longer. All ranks of a group must agree on it.",
)
node_of_rank: Setting[tuple[int, ...]] = Setting(
    name="TUNEDCOMM_NODE_OF_RANK",
    default=(),
    default_in_words="ranks with the same host name share a node",
    parse=_whole_numbers,
    allowed="whole numbers from 0 on separated by `,`, one for each rank of the default group, e.g. `0,0,1,1`",
    meaning="Which ranks share a node and so each other's memory, where host names do not say it, and for tests on "
    "one host. All ranks of a group must agree on it.",
)
numerics = Setting(
    name="TUNEDCOMM_NUMERICS",
    default="default",
    parse=_one_of(*POLICIES),
    allowed=", ".join(f"`{policy}`" for policy in POLICIES),
    meaning="The numerics policy of calls that name none, outside of `tunedcomm.numerics(…)`: the classes of variants "
    "that may run. With `ordered` results do not depend on tuning, and an op that cannot be so is an error. All ranks "
    "of a group must agree on it.",
)
nvtx = _switch(
    "TUNEDCOMM_NVTX",
    default=False,
    meaning="Puts an NVTX range that names problem and candidate around every launch, for Nsight Systems and other "
    "profilers. It marks the launch on the host; replays of a graph have none. Without a torch built with CUDA it "
    "does nothing. Ranks may differ in it.",
)
peer_timeout_s: Setting[float | None] = Setting(
    name="TUNEDCOMM_PEER_TIMEOUT_S",
    default=None,
    default_in_words="the process group's own time-out",
    parse=_seconds(is_zero_allowed=False, most=_MOST_PEER_TIMEOUT_S),
    allowed="a number of seconds > 0, at most 1000000000",
    meaning="How long a call waits for a peer before the group raises `PeerTimeoutError`. A peer whose process has "
    "ended is found within two seconds, whatever the time-out.",
)
wire: Setting[tuple[str, int] | None] = Setting(
    name="TUNEDCOMM_WIRE",
    default=None,
    default_in_words="`no`",
    parse=_wire,
    allowed="`fp8_group128` or `int8_group128`, with `:` and a whole number of MiB, e.g. `fp8_group128:8MiB`; `no`",
    meaning="All-reduces of serving engines and `ServingAllReduce` travel quantised from that size on, where a kernel "
    "is tuned for that; see [quantised wires](ops.md#quantised-wires). Ignored under `ordered` and in engines' "
    "deterministic modes. All ranks of a group must agree on it.",
)
workspace_bytes = Setting(
    name="TUNEDCOMM_WORKSPACE_MIB",
    default=64 << 20,
    default_in_words="64",
    parse=_mebibytes,
    allowed="a whole number of MiB from 1 to 65536",
    meaning="Largest message that two-shot staging holds. A group's symmetric memory grows with it; larger "
    "messages run through variants that need no staging. Fused GEMMs may take up to 16 times as much for their "
    "matrices, when they first need it. All ranks of a group must agree on it.",
)

SETTINGS: tuple[Setting[object], ...] = tuple(value for value in globals().values() if isinstance(value, Setting))


def forced(op: str) -> str | None:
    """TUNEDCOMM_FORCE_<OP>: name of the variant to run for every problem of `op`, or None."""
    return _text_of(FORCE_PREFIX + op.upper())


def forced_all() -> dict[str, str]:
    """Every TUNEDCOMM_FORCE_<OP> that is set: op to variant."""
    names = sorted(name for name in os.environ if name.startswith(FORCE_PREFIX))
    return {name[len(FORCE_PREFIX) :].lower(): value for name in names if (value := _text_of(name))}


def unknown_variables(known_ops: tuple[str, ...]) -> dict[str, str]:
    """Variables in the environment that begin with `TUNEDCOMM_` and mean nothing, each to the nearest known name or "".

    Args:
        known_ops: names for which `TUNEDCOMM_FORCE_<OP>` has a meaning.
    """
    known = {setting.name for setting in SETTINGS} | {FORCE_PREFIX + op.upper() for op in known_ops}
    short = [name.removeprefix(PREFIX) for name in known]
    found: dict[str, str] = {}
    for name in sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known):
        near = difflib.get_close_matches(name.removeprefix(PREFIX).upper(), short, n=1)
        found[name] = PREFIX + near[0] if near else ""
    return found
