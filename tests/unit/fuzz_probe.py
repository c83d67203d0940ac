"""Reads a spoilt database in every way in which tunedcomm reads one, and says what is not as promised.

python tests/unit/fuzz_probe.py --cases 10000 --out bench/results/db/db_fuzz.csv

Promised is: a snapshot is always had; whatever else fails does so with an error of `tunedcomm.errors`; a decision is
the library, or a candidate that passes the check; the command line ends with 0, 1 or 2 and without a traceback; nothing
takes long; reading changes no file. A case is known by its number: `--first N --cases 1` runs case N again.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import io
import json
import logging
import multiprocessing
import os
import pickle
import queue
import random
import shlex
import shutil
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fuzz_base import HERE, WORLD_SIZE, Base, bases, problems, record
from fuzz_files import spoil

from tunedcomm import kernels
from tunedcomm.cli import main as command_line
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.store import Database
from tunedcomm.dispatch.dispatcher import decide, source_hash_of
from tunedcomm.errors import DatabaseError
from tunedcomm.selection.select import Decision
from tunedcomm.selection.snapshot import Snapshot
from tunedcomm.spec import Candidate, Problem, check_candidate
from tunedcomm.symm.layout import limits_for

__all__ = ["Case", "Result", "cases", "probe", "run_case"]

COLUMNS = {
    "kind": "what was spoilt; see tests/unit/fuzz_files.py",
    "cases": "databases",
    "read": "of these, opened and read to the end",
    "refused": "left out with a named error",
    "answered": "of those read, with at least one decision that rests on a row of theirs",
    "errors": "the named errors, with how often each was met",
    "broken": "cases in which a promise was broken",
    "crashed": "cases that ended their process",
    "slowest_s": "the slowest case, all readings together",
    "seconds": "of all cases together",
    "first": "number of the first case of the run",
    "last": "of the last one",
    "python": "version, as the next two",
    "sqlite": "",
    "sqlalchemy": "",
    "command": "",
    "date": "UTC",
}
LIMITS = limits_for(HERE, WORLD_SIZE)
MOST_SECONDS = 60.0  # of some thirty readings, on a machine with other things to do
DIGEST = HERE.digest[:10]


@dataclass
class Case:
    """One spoilt database and what was found."""

    path: Path
    errors: list[str]
    broken: list[str]
    answered: bool = False

    @contextlib.contextmanager
    def promised(self, what: str, *allowed: type[BaseException]) -> Iterator[None]:
        """Note the name of an allowed error, and everything about another one."""
        try:
            yield
        except allowed as error:
            self.errors.append(type(error).__name__)
            text = str(error)
            if len(text) > 5000 or not text.isprintable():
                self.broken.append(f"{what}: {type(error).__name__} says {text[:200]!r} in {len(text)} characters")
        except BaseException:  # noqa: BLE001 - that is what is looked for
            self.broken.append(f"{what}: {traceback.format_exc()[-3000:]}")


@dataclass(frozen=True)
class Result:
    """What became of one case."""

    number: int
    kind: str
    errors: tuple[str, ...]
    broken: tuple[str, ...]
    answered: bool
    seconds: float


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
        load_snapshot(HERE, WORLD_SIZE, layers=layers, strict=True)
    with case.promised("load_snapshot"):
        snapshot = load_snapshot(HERE, WORLD_SIZE, layers=layers)
        _decide(case, load_snapshot(HERE, WORLD_SIZE, layers=layers, borrow=["H*", "library"]), asked()[0])
        for problem in asked():
            _decide(case, snapshot, problem)
            narrow = load_snapshot(HERE, WORLD_SIZE, layers=layers, like=problem)
            if decide(problem, narrow, LIMITS) != decide(problem, snapshot, LIMITS) and _is_sound(case.path):
                case.broken.append(f"another choice for {problem} where only what is like it was read")
        if pickle.loads(pickle.dumps(snapshot)).digest != snapshot.digest:
            case.broken.append("a snapshot has another digest after its journey")


def _read(case: Case) -> None:
    with case.promised("open", DatabaseError), Database.open(case.path, readonly=True) as database:
        readings: list[Callable[[], Any]] = [
            database.trials,
            database.stats,
            database.environments,
            database.problems,
            database.pins,
            database.runs,
            lambda: database.trials(problem=problems()[0], final=True),
            lambda: database.environments(op="all_reduce", world_size=WORLD_SIZE),
        ]
        for reading in readings:
            with case.promised("read", DatabaseError):
                reading()


def _command(case: Case, *arguments: str) -> None:
    """Run a verb of the command line, to see how it ends and what it says."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    with case.promised(" ".join(arguments)), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command_line.code_of(list(arguments))
        out.flush()
        err.flush()
        said = out.buffer.getvalue() + err.buffer.getvalue()  # type: ignore[attr-defined]
        if code not in (0, 1, 2) or b"Traceback" in said:
            case.broken.append(f"{arguments} ended with {code} and said {said[-300:]!r}")
        if b"\x1b" in said or b"\x00" in said:
            case.broken.append(f"{arguments} sent control characters to the terminal")


def _commands(case: Case) -> None:
    db = ("--db", str(case.path))
    one = ("--op", "all_reduce", "--shape", "2048", "--world-size", "4", *db)
    _command(case, "lookup", *one, "--hardware", DIGEST)
    _command(case, "explain", *one, "--hardware", DIGEST, "--json")
    _command(case, "db", "show", *one)
    _command(case, "db", "list", *db)


def _keep(case: Case) -> None:
    """What keeps databases in order, ships them and takes them in; of what is changed, a copy."""
    if not case.path.is_file() or case.path.stat().st_size > 1 << 24:
        return
    folder = case.path.parent / "kept"
    folder.mkdir()
    path, copy = str(case.path), shutil.copy(case.path, folder)
    _command(case, "db", "stats", "--db", path)
    _command(case, "db", "check", "--db", path)
    _command(case, "db", "export", "--db", path, str(folder / "out.db"), "--json")
    _command(case, "db", "export", "--db", path, "--format", "jsonl", str(folder / "out.jsonl"), "--json")
    _command(case, "db", "export", "--db", path, "--format", "nccl-csv", str(folder / "out.csv"), "--json")
    _command(case, "db", "diff", path, copy)
    _command(case, "db", "merge", path, "--into", str(folder / "all.db"))
    _command(case, "db", "import", path, "--db", str(folder / "mine.db"))
    _command(case, "db", "prune", "--invalid", "--superseded", "--yes", "--db", copy)
    _command(case, "db", "upgrade", "--db", copy)


def _write(case: Case) -> None:
    """On a copy with all that lies beside it."""
    if not case.path.is_file() or case.path.stat().st_size > 1 << 24:
        return
    folder = case.path.parent / "copy"
    folder.mkdir()
    for file in case.path.parent.glob(f"{case.path.name}*"):
        if file.is_file():
            shutil.copy(file, folder)
    with case.promised("write", DatabaseError), Database.open(folder / case.path.name, busy_timeout_s=1.0) as database:
        added = record(problems()[0], "lamport")
        with case.promised("write a run and a pin", DatabaseError):
            database.finish_run(database.start_run(command="fuzz", seed=0, budget="", host="fuzz"))
            database.pin(added.problem, added.candidate, environment=HERE, reason="")
            database.unpin(added.problem, environment=HERE)
        (key,) = database.record([added])
        if [trial.id for trial in database.trials(after_id=key - 1)] != [key] and _is_sound(folder / case.path.name):
            case.broken.append("a trial was recorded and cannot be read")


def _fingerprint(path: Path) -> str:
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 1 << 24 or len(list(path.parent.iterdir())) > 1:
        return ""  # with a log or a journal beside it SQLite has something to put in order
    return hashlib.sha256(path.read_bytes()).hexdigest()


def probe(path: Path, *, writing: bool = True, commands: bool = True) -> Case:
    """Read the database at `path` in every way."""
    case = Case(path, [], [])
    before = _fingerprint(path)
    _dispatch(case)
    _read(case)
    if commands:
        _commands(case)
    if before and before != hashlib.sha256(path.read_bytes()).hexdigest():
        case.broken.append("reading changed the file")
    if writing:
        _keep(case)
        _write(case)
    return case


def run_case(number: int, sound: list[Base]) -> Result:
    """Spoil a database in way `number` and probe it."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        path = Path(folder) / "tuned.db"
        kind = spoil(number, path, sound)
        case = probe(path, writing=random.Random(number).random() < 0.25)
    seconds = time.perf_counter() - begin
    if seconds > MOST_SECONDS:
        case.broken.append(f"took {seconds:.1f} s")
    return Result(number, kind, tuple(sorted(set(case.errors))), tuple(case.broken), case.answered, seconds)


def _work(share: int, args: argparse.Namespace, results: Any) -> None:
    logging.disable(logging.CRITICAL)
    kernels.discover()
    with tempfile.TemporaryDirectory() as folder:
        sound = bases(Path(folder))
        for number in range(args.first + share, args.first + args.cases, args.jobs):
            results.put(("begin", share, number))
            results.put(("end", share, run_case(number, sound)))
    results.put(("done", share, None))


def cases(args: argparse.Namespace) -> Iterator[Result]:
    """Run them all in processes that may die; who dies has crashed, and another one goes on behind it."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    running: dict[int, Any] = {}
    at: dict[int, int] = {}

    def start(share: int, first: int) -> None:
        left = argparse.Namespace(first=first - share, cases=args.first + args.cases - first + share, jobs=args.jobs)
        running[share] = spawn.Process(target=_work, args=(share, left, results), daemon=True)
        running[share].start()

    for share in range(args.jobs):
        start(share, args.first + share)
    while running:
        try:
            what, share, value = results.get(timeout=2.0)
        except queue.Empty:
            for share, process in list(running.items()):
                if not process.is_alive():
                    number = at.get(share, args.first + share)
                    yield Result(number, "crash", (), (f"the process ended with {process.exitcode}",), False, 0.0)
                    start(share, number + args.jobs)
            continue
        if what == "begin":
            at[share] = value
        elif what == "end":
            yield value
        else:
            running.pop(share).join()


def summary(found: list[Result], args: argparse.Namespace) -> list[dict[str, object]]:
    """One row a kind, and one for all."""
    by_kind: dict[str, list[Result]] = defaultdict(list)
    for result in found:
        by_kind[result.kind].append(result)
    rows = []
    for kind, group in [*sorted(by_kind.items()), ("all", found)]:
        errors = Counter(name for result in group for name in result.errors)
        rows.append(
            {
                "kind": kind,
                "cases": len(group),
                "read": sum(not result.errors for result in group),
                "refused": sum(bool(result.errors) for result in group),
                "answered": sum(result.answered for result in group),
                "errors": "; ".join(f"{name} {number}" for name, number in errors.most_common()),
                "broken": sum(bool(result.broken) for result in group),
                "crashed": sum(result.kind == "crash" for result in group),
                "slowest_s": f"{max(result.seconds for result in group):.1f}",
                "seconds": f"{sum(result.seconds for result in group):.0f}",
                "first": args.first,
                "last": args.first + args.cases - 1,
                "python": ".".join(map(str, sys.version_info[:3])),
                "sqlite": sqlite3.sqlite_version,
                "sqlalchemy": version("sqlalchemy"),
                "command": shlex.join(["python", "tests/unit/fuzz_probe.py", *sys.argv[1:]]),
                "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, help="CSV to write")
    args = parser.parse_args()
    found = []
    for result in cases(args):
        found.append(result)
        if len(found) % 500 == 0:
            sys.stderr.write(f"{len(found)} of {args.cases} cases\n")
        for text in result.broken:
            sys.stderr.write(f"case {result.number} ({result.kind}): {text}\n")
    rows = summary(found, args)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    sys.stdout.write(json.dumps(rows[-1], indent=2) + "\n")
    if rows[-1]["broken"] or rows[-1]["cases"] != args.cases:
        sys.exit("a promise was broken")


if __name__ == "__main__":
    main()
