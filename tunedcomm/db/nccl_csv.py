"""The file that NCCL's example tuner plugin reads: which algorithm, protocol and channels NCCL takes at which size.

    collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff

NCCL was measured by its own choice alone. So a row names what in NCCL works most like the variant that won (see
`_NEAREST`), with as many channels as the winning config has blocks; it is a place to begin, not a measurement. Where
the library won there is no row: NCCL chooses best by itself.

The plugin knows neither dtypes nor call modes nor hardware: of the problems of one world size those are taken that were
measured at most sizes, graphs before eager calls and bfloat16 before others, of one kind of machine. Between two
measured sizes with different rows the border is their geometric mean; beyond the measured sizes there are no rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tunedcomm.db.diff import Answer, StoredCatalog
from tunedcomm.errors import UnknownNameError
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Problem

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
    # One step in which everyone gets everything.
    **dict.fromkeys(("one_shot", "torch_one_shot", "lamport"), ("tree", "ll")),
    # Two steps of packets that announce themselves, and two steps ordered by flags.
    "two_shot_lamport": ("ring", "ll128"),
    **dict.fromkeys(("two_shot", "two_shot_split", "torch_two_shot"), ("ring", "simple")),
    # Sums made by the switch.
    **dict.fromkeys(("multimem_one_shot", "multimem_two_shot"), ("nvls", "simple")),
}
# NCCL's MAXCHANNELS; a communicator may have fewer, and takes what it has.
_MAX_CHANNELS = 64
_OWN_CHOICE = -1
# The plugin reads lines of at most 255 bytes and takes the rest of a longer one for another line.
_MAX_LINE = 250


def nccl_csv(file: str | Path, *, hardware: str | None = None) -> Iterator[str]:
    """The lines of the file, comments among them.

    Args:
        file: a SQLite database.
        hardware: part of the GPU's name or the first digits of the environment's digest, where several are stored.

    Raises:
        UnknownNameError: `hardware` names none or several kinds of machines, or nothing is stored that NCCL has.
        DatabaseError: the database cannot be read.
    """
    stored = StoredCatalog(file)
    environment = _only(stored.environments, hardware)
    yield FIRST_LINE
    yield from (f"# {line}" for line in _ABOUT)
    yield _comment(f"{environment} [{environment.digest[:8]}], NCCL {environment.nccl or 'unknown'}")
    yield f"# {COLUMNS}"
    for world_size in sorted(stored.world_sizes):
        answers = stored.answers(environment, world_size)
        for op, collective in _COLLECTIVES.items():
            by_size = _main_family([p for p in answers if p.op == op and p.nbytes > 0])
            if by_size:
                problem = next(iter(by_size.values()))
                place = "in place" if problem.in_place else "out of place"
                yield _comment(f"{world_size} ranks: {op} {problem.dtype} {problem.mode} {problem.input_kind}, {place}")
                nodes_and_more = (environment.nodes, world_size, _OWN_CHOICE, _OWN_CHOICE)
                yield from _rows(collective, {size: answers[p] for size, p in by_size.items()}, nodes_and_more)


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


def _main_family(problems: Sequence[Problem]) -> dict[int, Problem]:
    """The problems by size, smallest first, of the family that was measured at most sizes."""
    families: dict[Problem, dict[int, Problem]] = {}
    for problem in sorted(problems, key=lambda p: p.nbytes):
        families.setdefault(problem.family, {})[problem.nbytes] = problem

    def preference(family: Problem) -> tuple[object, ...]:
        usual = (family.mode != "graph", family.dtype != "bfloat16", family.reduction != "sum")
        return (-len(families[family]), *usual, family.input_kind != "plain", family.in_place, family)

    return families[min(families, key=preference)] if families else {}


def _rows(collective: str, answers: Mapping[int, Answer], end: tuple[int, ...]) -> Iterator[str]:
    """A row, or a comment that says why there is none, for each range of sizes; ranges touch and do not overlap."""
    settings = {size: _setting(answer.candidate) for size, answer in answers.items()}
    ranges = [(setting, list(sizes)) for setting, sizes in itertools.groupby(answers, key=settings.__getitem__)]
    low = ranges[0][1][0]
    for (setting, sizes), following in itertools.zip_longest(ranges, ranges[1:]):
        high = sizes[-1] if following is None else math.isqrt(sizes[-1] * following[1][0])
        yield _comment(f"{low}-{high}: {_evidence([answers[size] for size in sizes], setting)}")
        if not isinstance(setting, str):
            yield ",".join(map(str, (collective, low, high, *setting, *end)))
        low = high + 1


def _setting(candidate: Candidate) -> tuple[str, str, int] | str:
    """Algorithm, protocol and channels for NCCL, or why it is told nothing."""
    if candidate.variant == "library":
        return "no row, NCCL's own choice is best"
    if candidate.variant not in _NEAREST:
        return f"no row, NCCL has nothing like {candidate.variant}"
    blocks = candidate.config_dict.get("num_blocks")
    channels = min(blocks, _MAX_CHANNELS) if type(blocks) is int and blocks > 0 else _OWN_CHOICE
    return (*_NEAREST[candidate.variant], channels)


def _evidence(answers: Sequence[Answer], setting: tuple[str, str, int] | str) -> str:
    names = ", ".join(dict.fromkeys(answer.candidate.variant for answer in answers))
    ours, library = (_span([getattr(a, name) for a in answers]) for name in ("latency_us", "library_us"))
    told = f"{names} {ours} us, NCCL by its own choice {library} us"
    return f"{told}; {setting}" if isinstance(setting, str) else told


def _span(latencies_us: Sequence[float | None]) -> str:
    known = [latency_us for latency_us in latencies_us if latency_us is not None]
    if not known:
        return "?"
    low, high = f"{min(known):.2f}", f"{max(known):.2f}"
    return low if low == high else f"{low} to {high}"


def _comment(text: str) -> str:
    """One line that the plugin skips, whatever a database has put into a name."""
    plain = "".join(c if c.isprintable() and c.isascii() else "?" for c in text)
    return f"# {plain}"[:_MAX_LINE]
