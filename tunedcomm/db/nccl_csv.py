"""The file that NCCL's example tuner plugin reads: which algorithm, protocol and channels NCCL takes at which size.

    collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff

Such a row speaks of NCCL, and a tuning database of variants that NCCL does not have: NCCL was measured too, but only by
its own choice. What can be handed on is where latency counts, where bandwidth, and how many blocks were worth it. So a
row names what in NCCL works most like the variant that won:

- one step in which everyone gets everything (`one_shot`, `lamport`): tree, ll
- two steps of packets that announce themselves (`two_shot_lamport`): ring, ll128
- two steps ordered by flags (`two_shot`, `two_shot_split`): ring, simple
- sums made by the switch (`multimem_one_shot`, `multimem_two_shot`): nvls, simple

Channels are the blocks of the winning config, at most as many as NCCL has. Where the library won there is no row: NCCL
chooses best by itself. A row is a place to begin, not a measurement; the file says so.

The plugin knows neither dtypes nor call modes nor hardware: of the problems of one world size those are taken that were
measured at most sizes, graphs before eager calls and bfloat16 before others, of one kind of machine. Between two
measured sizes with different rows the border is their geometric mean; beyond the measured sizes there are no rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunedcomm.db.diff import Answers, answers, measured
from tunedcomm.errors import UnknownNameError
from tunedcomm.hardware import Environment
from tunedcomm.selection.select import Decision
from tunedcomm.spec import Problem

FIRST_LINE = "# tunedcomm nccl-csv 1"
COLUMNS = "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff"
_ABOUT = (
    "For NCCL's example tuner plugin, by way of NCCL_TUNER_CONFIG_FILE. Not measured: NCCL was timed by its own choice "
    "only.",
    "A row names what in NCCL works most like the kernel that won there, with a channel for each of its blocks.",
    "Time it against NCCL's own choice before you use it. Where that is best already there is no row.",
)
_COLLECTIVES: Mapping[str, str] = {"all_reduce": "allreduce"}
_NEAREST: Mapping[str, tuple[str, str]] = {
    "one_shot": ("tree", "ll"),
    "torch_one_shot": ("tree", "ll"),
    "lamport": ("tree", "ll"),
    "two_shot_lamport": ("ring", "ll128"),
    "two_shot": ("ring", "simple"),
    "two_shot_split": ("ring", "simple"),
    "torch_two_shot": ("ring", "simple"),
    "multimem_one_shot": ("nvls", "simple"),
    "multimem_two_shot": ("nvls", "simple"),
}
# NCCL's MAXCHANNELS; a communicator may have fewer, and takes what it has.
_MAX_CHANNELS = 64
_OWN_CHOICE = -1
# The plugin reads lines of at most 255 bytes and takes the rest of a longer one for another line.
_MAX_LINE = 250


@dataclass(frozen=True, slots=True)
class _Setting:
    """What NCCL is told, or why it is told nothing."""

    algorithm: str = ""
    protocol: str = ""
    channels: int = 0
    reason: str = ""


@dataclass(slots=True)
class _Range:
    """Sizes in a row that are told the same."""

    setting: _Setting
    sizes: list[int]
    decisions: list[Decision]


def nccl_csv(file: str | Path, *, hardware: str | None = None) -> Iterator[str]:
    """The lines of the file, comments among them.

    Args:
        file: a SQLite database.
        hardware: part of the GPU's name or the first digits of the environment's digest, where several are stored.

    Raises:
        UnknownNameError: `hardware` names none or several kinds of machines, or nothing is stored that NCCL has.
        DatabaseError: the database cannot be read.
    """
    environments = measured(file)
    environment = _only(list(environments), hardware)
    yield FIRST_LINE
    yield from (f"# {line}" for line in _ABOUT)
    yield _comment(f"{environment} [{environment.digest[:8]}], NCCL {environment.nccl or 'unknown'}")
    yield f"# {COLUMNS}"
    for world_size in sorted(environments[environment]):
        yield from _of_world(answers(file, environment, world_size), environment, world_size)


def _only(environments: Sequence[Environment], hardware: str | None) -> Environment:
    """The one measured last, of the only kind of machine that is meant."""
    wanted = (hardware or "").strip().lower()
    found = [e for e in environments if wanted in e.gpu.lower() or e.digest.startswith(wanted)]
    if len({e.hard_key for e in found}) == 1:
        return found[0]
    listed = "; ".join(f"{e.digest[:8]} = {e}" for e in found or environments) or "none"
    if not found:
        raise UnknownNameError(f"no stored environment matches --hardware {hardware!r}; stored are: {listed}")
    raise UnknownNameError(
        f"NCCL's plugin cannot tell kinds of machines apart, and several are stored; name one with --hardware: {listed}"
    )


def _of_world(found: Answers, environment: Environment, world_size: int) -> Iterator[str]:
    for op, collective in _COLLECTIVES.items():
        by_size = _main_family([p for p in found.decisions if p.op == op and p.nbytes > 0])
        if not by_size:
            continue
        problem = next(iter(by_size.values()))
        place = "in place" if problem.in_place else "out of place"
        yield _comment(f"{world_size} ranks: {op} {problem.dtype} {problem.mode} {problem.input_kind}, {place}")
        ranges = _ranges({size: found.decisions[problem] for size, problem in by_size.items()})
        for low, high, one in _with_borders(ranges):
            yield _comment(f"{low}-{high}: {_evidence(one)}")
            told = one.setting
            if not told.reason:
                words = (collective, low, high, told.algorithm, told.protocol, told.channels)
                yield ",".join(map(str, (*words, environment.nodes, world_size, _OWN_CHOICE, _OWN_CHOICE)))


def _main_family(problems: Sequence[Problem]) -> dict[int, Problem]:
    """The problems by size, smallest first, of the family that was measured at most sizes."""
    families: dict[Problem, dict[int, Problem]] = {}
    for problem in sorted(problems, key=lambda p: p.nbytes):
        families.setdefault(problem.family, {})[problem.nbytes] = problem

    def preference(family: Problem) -> tuple[object, ...]:
        usual = (family.mode != "graph", family.dtype != "bfloat16", family.reduction != "sum")
        return (-len(families[family]), *usual, family.input_kind != "plain", family.in_place, family)

    return families[min(families, key=preference)] if families else {}


def _setting(decision: Decision) -> _Setting:
    variant = decision.candidate.variant
    if variant == "library":
        return _Setting(reason="no row, NCCL's own choice is best")
    if variant not in _NEAREST:
        return _Setting(reason=f"no row, NCCL has nothing like {variant}")
    blocks = decision.candidate.config_dict.get("num_blocks")
    channels = min(blocks, _MAX_CHANNELS) if type(blocks) is int and blocks > 0 else _OWN_CHOICE
    return _Setting(*_NEAREST[variant], channels)


def _ranges(decisions: Mapping[int, Decision]) -> list[_Range]:
    found: list[_Range] = []
    for size, decision in decisions.items():
        setting = _setting(decision)
        if not found or found[-1].setting != setting:
            found.append(_Range(setting, [], []))
        found[-1].sizes.append(size)
        found[-1].decisions.append(decision)
    return found


def _with_borders(ranges: Sequence[_Range]) -> Iterator[tuple[int, int, _Range]]:
    """Each range with its first and last byte: they touch, and do not overlap."""
    low = ranges[0].sizes[0]
    for one, following in zip(ranges, [*ranges[1:], None], strict=True):
        high = one.sizes[-1] if following is None else math.isqrt(one.sizes[-1] * following.sizes[0])
        yield low, high, one
        low = high + 1


def _evidence(one: _Range) -> str:
    names = ", ".join(dict.fromkeys(decision.candidate.variant for decision in one.decisions))
    ours = [d.latency_us for d in one.decisions if d.latency_us is not None]
    library = [d.library_us for d in one.decisions if d.library_us is not None]
    told = f"{names} {_span(ours)} us, NCCL by its own choice {_span(library)} us"
    return f"{told}; {one.setting.reason}" if one.setting.reason else told


def _span(latencies_us: Sequence[float]) -> str:
    if not latencies_us:
        return "?"
    low, high = f"{min(latencies_us):.2f}", f"{max(latencies_us):.2f}"
    return low if low == high else f"{low} to {high}"


def _comment(text: str) -> str:
    """One line that the plugin skips, whatever a database has put into a name."""
    plain = "".join(c if c.isprintable() and c.isascii() else "?" for c in text)
    return f"# {plain}"[:_MAX_LINE]
