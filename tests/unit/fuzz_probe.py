"""Reads a spoilt database in every way in which tunedcomm reads one, and says what is not as promised.

python tests/unit/fuzz_probe.py --cases 10000

Promised is: a snapshot is always had; whatever else fails does so with an error of `tunedcomm.errors`; a decision is
the library, or a candidate that passes the check; the command line ends with 0, 1 or 2 and without a traceback; nothing
takes long; reading changes no file. A case is known by its number: `--first N --cases 1` runs case N again.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import logging
import multiprocessing
import os
import pickle
import random
import shutil
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from cli_samples import run
from db_samples import H200
from fuzz_files import WORLD_SIZE, Base, bases, problems, record, spoil

from tunedcomm import kernels
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.store import Database
from tunedcomm.dispatch.dispatcher import decide, source_hash_of
from tunedcomm.errors import DatabaseError
from tunedcomm.selection.select import Decision
from tunedcomm.selection.snapshot import Snapshot
from tunedcomm.spec import Candidate, Problem, check_candidate
from tunedcomm.symm.layout import limits_for

LIMITS = limits_for(H200, WORLD_SIZE)
MOST_SECONDS = 60.0  # of some thirty readings, on a machine with other things to do
DIGEST = H200.digest[:10]


@dataclass
class Case:
    """One spoilt database and what was found."""

    path: Path
    errors: set[str] = field(default_factory=set)
    broken: list[str] = field(default_factory=list)
    answered: bool = False
    kind: str = ""
    seconds: float = 0.0

    @contextlib.contextmanager
    def promised(self, what: str, *allowed: type[BaseException]) -> Iterator[None]:
        """Note the name of an allowed error, and everything about another one."""
        try:
            yield
        except allowed as error:
            self.errors.add(type(error).__name__)
            text = str(error)
            if len(text) > 5000 or not text.isprintable():
                self.broken.append(f"{what}: {type(error).__name__} says {text[:200]!r} in {len(text)} characters")
        except BaseException:  # noqa: BLE001 - that is what is looked for
            self.broken.append(f"{what}: {traceback.format_exc()[-3000:]}")


def asked() -> list[Problem]:
    """Problems that the sweep measured, that lie between and outside of them, and that are like none of them."""
    first = problems()[0]
    shapes = ((1 << 11,), (3001,), (1 << 16,), (1 << 30,), (0,))
    near = [replace(first, shape=shape) for shape in shapes]
    return [*near, replace(first, dtype="float16", mode="eager"), replace(first, input_kind="symmetric", in_place=True)]


def _decide(case: Case, snapshot: Snapshot, problem: Problem) -> None:
    for max_sms in (None, 8):
        _check(case, snapshot, problem, decide(problem, snapshot, LIMITS, max_sms=max_sms))


def _check(case: Case, snapshot: Snapshot, problem: Problem, decision: Decision) -> None:
    candidate = decision.candidate
    case.answered |= decision.source in ("exact", "interpolated", "pin")
    if candidate == Candidate.of(problem.op, "library", {}):
        return
    if reason := check_candidate(problem, candidate, LIMITS, by_name=False):
        case.broken.append(f"decided for {candidate}, but {reason}")
    rows = [row for row in snapshot.rows if row.candidate == candidate]
    hashes = {row.source_hash for row in rows}
    if decision.source in ("exact", "interpolated") and source_hash_of(problem.op, candidate.variant) not in hashes:
        case.broken.append(f"decided for {candidate} of another source")


def _is_sound(path: Path) -> bool:
    """True if two queries must agree: no page is damaged, every index fits its table, and ids are unique."""
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            whole = [row[0] for row in connection.execute("PRAGMA integrity_check")] == ["ok"]
            return whole and bool(connection.execute("SELECT count(*) = count(DISTINCT id) FROM trial").fetchone()[0])
    except (sqlite3.Error, UnicodeDecodeError):
        return False


def _dispatch(case: Case) -> None:
    layers = [Layer("user", str(case.path))]
    with case.promised("load_snapshot, strict", DatabaseError):
        load_snapshot(H200, WORLD_SIZE, layers=layers, strict=True)
    with case.promised("load_snapshot"):
        snapshot = load_snapshot(H200, WORLD_SIZE, layers=layers)
        _decide(case, load_snapshot(H200, WORLD_SIZE, layers=layers, borrow=["H*", "library"]), asked()[0])
        for problem in asked():
            _decide(case, snapshot, problem)
            narrow = load_snapshot(H200, WORLD_SIZE, layers=layers, like=problem)
            if decide(problem, narrow, LIMITS) != decide(problem, snapshot, LIMITS) and _is_sound(case.path):
                case.broken.append(f"another choice for {problem} where only what is like it was read")
        if pickle.loads(pickle.dumps(snapshot)).digest != snapshot.digest:
            case.broken.append("a snapshot has another digest after its journey")


def _read(case: Case) -> None:
    with case.promised("open", DatabaseError), Database.open(case.path, readonly=True) as database:
        for name in ("trials", "stats", "environments", "problems", "pins", "runs"):
            with case.promised(name, DatabaseError):
                getattr(database, name)()
        with case.promised("filters", DatabaseError):
            database.trials(problem=problems()[0], final=True)
            database.environments(op="all_reduce", world_size=WORLD_SIZE)


def _command(case: Case, *arguments: str) -> None:
    """Run a verb of the command line, to see how it ends and what it says."""
    with case.promised(" ".join(arguments)):
        ended = run(*arguments)
        said = ended.out + ended.err
        said.encode()  # a lone surrogate, which no terminal takes, raises an error
        if ended.code not in (0, 1, 2) or "Traceback" in said:
            case.broken.append(f"{arguments} ended with {ended.code} and said {said[-300:]!r}")
        if "\x1b" in said or "\x00" in said:
            case.broken.append(f"{arguments} sent control characters to the terminal")


def _commands(case: Case) -> None:
    one = ("--op", "all_reduce", "--shape", "2048", "--world-size", "4")
    asked = ("--hardware", DIGEST)
    for verb in (("lookup", *one, *asked), ("explain", *one, *asked, "--json"), ("db", "show", *one), ("db", "list")):
        _command(case, *verb, "--db", str(case.path))


def _keep(case: Case) -> None:
    """What keeps databases in order, ships them and takes them in; of what is changed, a copy."""
    folder = case.path.parent / "kept"
    folder.mkdir()
    path, copy = str(case.path), shutil.copy(case.path, folder)
    for form in ("sqlite", "jsonl", "nccl-csv"):
        _command(case, "db", "export", "--db", path, "--format", form, str(folder / form), "--json")
    for verb in (
        f"stats --db {path}",
        f"check --db {path}",
        f"diff {path} {copy}",
        f"merge {path} --into {folder}/all.db",
        f"import {path} --db {folder}/mine.db",
        f"prune --invalid --superseded --yes --db {copy}",
        f"upgrade --db {copy}",
    ):
        _command(case, "db", *verb.split())


def _write(case: Case) -> None:
    """On a copy with all that lies beside it."""
    folder = case.path.parent / "copy"
    folder.mkdir()
    for file in case.path.parent.glob(f"{case.path.name}*"):
        if file.is_file():
            shutil.copy(file, folder)
    with case.promised("write", DatabaseError), Database.open(folder / case.path.name, busy_timeout_s=1.0) as database:
        added = record(problems()[0], "lamport")
        with case.promised("write a run and a pin", DatabaseError):
            database.finish_run(database.start_run(command="fuzz", seed=0, budget="", host="fuzz"))
            database.pin(added.problem, added.candidate, environment=H200, reason="")
            database.unpin(added.problem, environment=H200)
        (key,) = database.record([added])
        if [trial.id for trial in database.trials(after_id=key - 1)] != [key] and _is_sound(folder / case.path.name):
            case.broken.append("a trial was recorded and cannot be read")


def _fingerprint(path: Path) -> str:
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 1 << 24 or len(list(path.parent.iterdir())) > 1:
        return ""  # with a log or a journal beside it SQLite has something to put in order
    return hashlib.sha256(path.read_bytes()).hexdigest()


def probe(path: Path, *, writing: bool = True, commands: bool = True) -> Case:
    """Read the database at `path` in every way."""
    case = Case(path)
    before = _fingerprint(path)
    _dispatch(case)
    _read(case)
    if commands:
        _commands(case)
    if before and before != hashlib.sha256(path.read_bytes()).hexdigest():
        case.broken.append("reading changed the file")
    if writing and path.is_file() and path.stat().st_size <= 1 << 24:
        _keep(case)
        _write(case)
    return case


@functools.cache
def _sound() -> list[Base]:
    logging.disable(logging.CRITICAL)
    kernels.discover()
    with tempfile.TemporaryDirectory() as folder:
        return bases(Path(folder))


def run_case(number: int) -> Case:
    """Spoil a database in way `number` and probe it."""
    sound = _sound()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        path = Path(folder) / "tuned.db"
        kind = spoil(number, path, sound)
        case = probe(path, writing=random.Random(number).random() < 0.25)
    case.kind, case.seconds = kind, time.perf_counter() - begin
    if case.seconds > MOST_SECONDS:
        case.broken.append(f"took {case.seconds:.1f} s")
    return case


def summary(found: list[Case]) -> dict[str, dict[str, object]]:
    """Counts of each kind, and of all."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for result in found:
        groups[result.kind].append(result)
        groups["all"].append(result)
    return {
        kind: {
            "cases": len(group),
            "refused": sum(bool(result.errors) for result in group),
            "answered": sum(result.answered for result in group),
            "errors": Counter(name for result in group for name in result.errors),
            "broken": sum(bool(result.broken) for result in group),
            "slowest_s": round(max(result.seconds for result in group), 1),
        }
        for kind, group in sorted(groups.items())
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    args = parser.parse_args()
    found = []
    numbers = range(args.first, args.first + args.cases)
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:  # raises if a process dies
        for number, case in zip(numbers, pool.map(run_case, numbers), strict=True):
            found.append(case)
            for text in case.broken:
                sys.stderr.write(f"case {number} ({case.kind}): {text}\n")
    counts = summary(found)
    sys.stdout.write(json.dumps(counts, indent=2) + "\n")
    if counts["all"]["broken"]:
        sys.exit("a promise was broken")


if __name__ == "__main__":
    main()
