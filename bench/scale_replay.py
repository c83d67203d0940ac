"""Many supervisors on one PostgreSQL, all pretending to measure: what sharing a sweep costs, and where it ends.

python bench/scale_replay.py --workers 64 --trials 20000
python bench/scale_replay.py --workers 16 --trials 4000 --kill 4 --heartbeat-s 2 --grace-s 8

Every worker is a process that passes for a host with one gang. It claims a candidate of a recorded sweep, sleeps for as
long as a trial takes, and stores the row as it ends the claim; every claim looks for the rows of others.
Workers spread over the problems and join each other where none is left alone. The server is an embedded PostgreSQL,
durable as PostgreSQL comes. At the end every candidate must have exactly one row. One line a run is appended to
bench/results/replay/scale_replay.csv.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rows import RESULTS, ROOT, arguments, finish, of_host, read_trials

from tunedcomm import kernels
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.db.values import utc_now
from tunedcomm.spec import Candidate, Problem
from tunedcomm.tuner.search.claims import Claims, owner_id

sys.path.insert(0, str(ROOT / "tests"))
from replay import Replay

RECORDS = ROOT / "tests" / "data" / "trials_h200_x4.jsonl.gz"


def plan_records(trials: int) -> list[Trial]:
    """So many distinct trials: the recorded ones, and copies of them at sizes that nobody recorded."""
    replay = Replay(read_trials(RECORDS))
    recorded = {(r.problem, r.candidate): r for p in replay.problems() for r in replay.records(p) if not r.final}

    def copy_of(record: Trial, number: int) -> Trial:
        shape = (record.problem.shape[0] + 8 * number, *record.problem.shape[1:])
        return replace(record, problem=replace(record.problem, shape=shape), run_id=None, id=None)

    copies = (copy_of(record, number) for number in itertools.count() for record in recorded.values())
    return list(itertools.islice(copies, trials))


class Worker:
    """One supervisor with one gang."""

    def __init__(self, args: argparse.Namespace, url: str, records: Sequence[Trial], index: int) -> None:
        self.args, self.url, self.index, self.environment = args, url, index, records[0].environment.digest
        self.times: dict[str, list[float]] = {"claim": [], "record": []}
        self.refused = self.claimed = 0
        self.by_problem: dict[Problem, dict[Candidate, Trial]] = {}
        for record in records:
            self.by_problem.setdefault(record.problem, {})[record.candidate] = record
        self.known: dict[Problem, set[Candidate]] = {problem: set() for problem in self.by_problem}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.times[name].append(time.perf_counter() - begin)

    def run(self, folder: Path) -> None:
        """Search until every candidate has its row, and leave the times in a folder."""
        host = f"host{self.index}"
        with Database.open(self.url, patience_s=600) as database:
            run_id = database.start_run(command="scale_replay", seed=self.index, budget="", host=host)
            claims = Claims(
                database,
                self.environment,
                lambda op: "replayed",
                run_id=run_id,
                owner=owner_id(host=host, kernel=host),
                heartbeat_s=self.args.heartbeat_s,
                grace_s=self.args.grace_s,
            )
            problems = list(self.by_problem)
            offset = self.index * len(problems) // self.args.workers
            left = [*problems[offset:], *problems[:offset]]
            while left:
                # A round over the problems; the candidates that others hold are looked at again in the next one.
                before = self.claimed
                left = [problem for problem in left if not self.search(problem, claims, run_id)]
                if left and self.claimed == before:
                    time.sleep(1.0)
            database.finish_run(run_id)
            claims.close()
        result = {"times": self.times, "refused": self.refused}
        (folder / f"{self.index}.json").write_text(json.dumps(result))

    def read_news(self, problem: Problem, claims: Claims) -> None:
        self.known[problem] |= {record.candidate for record in claims.news(problem)}

    def look(self, problem: Problem, claims: Claims) -> frozenset[Candidate]:
        """Candidates that others run now; what they have stored is known then."""
        busy = claims.in_flight(problem, final=False)
        self.read_news(problem, claims)
        return busy

    def search(self, problem: Problem, claims: Claims, run_id: int) -> bool:
        """Run what nobody else runs; True when every candidate has its row."""
        records = self.by_problem[problem]
        order = list(records)
        random.Random(self.index).shuffle(order)
        known = self.known[problem]
        busy = self.look(problem, claims)
        for candidate in order:
            if candidate in known or candidate in busy:
                continue
            with self.timed("claim"):
                claim = claims.acquire(problem, candidate, final=False)
                self.read_news(problem, claims)
            if claim is None:
                self.refused += 1
                busy = self.look(problem, claims)
            elif candidate in known:
                claims.release([claim])
            else:
                self.claimed += 1
                time.sleep(self.args.replay_trial_s)
                row = replace(records[candidate], run_id=run_id, created_at=utc_now())
                if claims.holds(claim):
                    with self.timed("record"):
                        claims.record([row], [claim])
                    known.add(candidate)
                else:
                    claims.release([claim])
        self.look(problem, claims)
        return len(known) == len(records)


def run_workers(workers: Sequence[Worker], folder: Path, kill: int, count: Callable[[], tuple[int, int]]) -> int:
    """Run them all; returns the most sessions at once."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=worker.run, args=(folder,)) for worker in workers]
    for process in processes:
        process.start()
    victims, trials = processes[:kill], workers[0].args.trials
    most = 0
    while any(process.is_alive() for process in processes):
        time.sleep(1.0)
        sessions, stored = count()
        most = max(most, sessions)
        if victims and stored > trials * (kill - len(victims) + 1) // (kill + 2):
            os.kill(victims.pop().pid or 0, signal.SIGKILL)
    failed = [process.exitcode for process in processes[kill:] if process.exitcode]
    if failed:
        sys.exit(f"{len(failed)} workers failed: {failed}")
    return most


def cpu_of_tree(pid: int) -> float:
    """Processor seconds of a process, its children, and those that it has outlived."""
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if stat.parent.name == str(pid):
            total += sum(map(int, fields[11:15]))
        elif fields[1] == str(pid):
            total += sum(map(int, fields[11:13]))
    return total / os.sysconf("SC_CLK_TCK")


def measure(args: argparse.Namespace) -> dict[str, object]:
    from postgres import PostgresServer

    kernels.discover()
    records = plan_records(args.trials)
    with PostgresServer({"max_connections": "500"}) as server, tempfile.TemporaryDirectory() as folder:
        name = server.new_database()
        url = server.url(name)
        Database.open(url, create=True).close()
        workers = [Worker(args, url, records, index) for index in range(args.workers)]

        def count() -> tuple[int, int]:
            sessions = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{name}' AND pid <> pg_backend_pid()"
            ((found, stored),) = server.execute(f"SELECT ({sessions}), (SELECT count(*) FROM trial)", database=name)
            return int(found), int(stored)

        before = cpu_of_tree(server.pid)
        most = run_workers(workers, Path(folder), args.kill, count)
        server_cpu = cpu_of_tree(server.pid) - before
        results = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
        span = "SELECT extract(epoch FROM max(created_at) - min(created_at))::float + %s FROM trial"
        ((seconds,),) = server.execute(span % args.replay_trial_s, database=name)
        ((server_version,),) = server.execute("SHOW server_version")
        with Database.open(url, readonly=True) as database:
            stored = Counter((row.problem, row.candidate) for row in database.trials())
    wanted = {(record.problem, record.candidate) for record in records}
    p50 = {name: statistics.median(t for one in results for t in one["times"][name]) for name in ("claim", "record")}
    return {
        "workers": args.workers,
        "trials": args.trials,
        "problems": len(workers[0].by_problem),
        "replay_trial_s": args.replay_trial_s,
        "killed": args.kill,
        "seconds": f"{seconds:.1f}",
        "trials_per_s": f"{args.trials / seconds:.1f}",
        # If sharing cost nothing.
        "ideal_per_s": f"{args.workers / args.replay_trial_s:.0f}" if args.replay_trial_s else "",
        **{f"{name}_ms_p50": f"{1000 * seconds:.2f}" for name, seconds in p50.items()},
        "refused": sum(result["refused"] for result in results),  # claims that another worker held
        "lost": len(wanted - set(stored)),
        "doubled": sum(stored.values()) - len(stored),
        "server_cpu_ms": f"{1000 * server_cpu / args.trials:.2f}",
        "max_connections": most,  # seen every second
        **of_host("sqlalchemy", "psycopg", postgresql=server_version),
    }


def main() -> None:
    times = {"replay_trial_s": 0.15, "heartbeat_s": 20, "grace_s": 90}
    out = RESULTS / "replay" / "scale_replay.csv"
    args = arguments(__doc__, workers=64, trials=20_000, kill=0, out=out, **times)
    finish(args.out, measure(args), "lost", "doubled")


if __name__ == "__main__":
    main()
