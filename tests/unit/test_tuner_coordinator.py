"""Coordinators with several gangs, with gangs that are lost, and with others beside them. No process is started."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from replay import Replay, read_recording

from tunedcomm import kernels
from tunedcomm.db.records import Trial
from tunedcomm.dispatch.communicator import limits_for
from tunedcomm.spec import Candidate, Limits, Problem
from tunedcomm.tuner.gang.protocol import Command, Settings, TrialResult
from tunedcomm.tuner.search.claims import Claim, Claims
from tunedcomm.tuner.search.coordinator import Coordinator
from tunedcomm.tuner.search.study import search_space

RECORDING = Path(__file__).parents[1] / "data" / "trials_h200_x4.jsonl.gz"
SETTINGS = Settings(backend="cuda", world_size=4, trials=200)
PROBLEMS = tuple(Problem("all_reduce", (1 << exponent,), "bfloat16", 4) for exponent in (9, 11, 13))
LIBRARY = Candidate.of("all_reduce", "library", {})


@functools.cache
def replay() -> Replay:
    kernels.discover()
    return Replay(read_recording(RECORDING))


@functools.cache
def limits() -> Limits:
    return limits_for(replay().environment, 4)


class Store:
    """Stands in for the tuned database: rows of all supervisors, and who has seen how many of them."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, Trial]] = []
        self.seen: Counter[tuple[int, Problem]] = Counter()

    def news(self, supervisor: int, problem: Problem) -> list[Trial]:
        begin, self.seen[supervisor, problem] = self.seen[supervisor, problem], len(self.rows)
        return [trial for owner, trial in self.rows[begin:] if owner != supervisor and trial.problem == problem]


class Table:
    """Stands in for the claims of all supervisors."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[int, Claim]] = {}


class TableClaims(Claims):
    """One supervisor's claims in a `Table`."""

    def __init__(self, table: Table, supervisor: int, store: Store) -> None:
        self.table, self.supervisor = table, supervisor
        self.store = store

    def acquire(self, problem: Problem, candidate: Candidate, *, final: bool) -> Claim | None:
        claim = Claim(problem=problem, candidate=candidate, final=final, key=str((problem, candidate, final)))
        holder, _ = self.table.held.setdefault(claim.key, (self.supervisor, claim))
        return claim if holder == self.supervisor else None

    def holds(self, claim: Claim) -> bool:
        return self.table.held.get(claim.key, (-1, None))[0] == self.supervisor

    def news(self, problem: Problem) -> list[Trial]:
        return self.store.news(self.supervisor, problem)

    def record(self, trials: Sequence[Trial], claims: Iterable[Claim]) -> None:
        self.store.rows += [(self.supervisor, trial) for trial in trials]
        self.release(claims)

    def release(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            if self.holds(claim):
                del self.table.held[claim.key]

    def in_flight(self, problem: Problem, *, final: bool, max_age_s: float = 0.0) -> frozenset[Candidate]:
        return frozenset(
            claim.candidate
            for owner, claim in self.table.held.values()
            if owner != self.supervisor and (claim.problem, claim.final) == (problem, final)
        )

    def close(self) -> None:
        self.table.held = {key: held for key, held in self.table.held.items() if held[0] != self.supervisor}


class Site:
    """One supervisor with gangs that answer when they are told to."""

    def __init__(
        self, number: int, store: Store, table: Table | None = None, *, gangs: int = 2, **changes: Any
    ) -> None:
        self.number, self.store = number, store
        self.asked: list[tuple[Problem | None, Candidate | None, bool]] = []
        known = [trial for _, trial in store.rows]
        for problem in PROBLEMS:
            store.news(number, problem)
        self.coordinator = Coordinator(
            PROBLEMS,
            replace(SETTINGS, gangs=gangs, **changes),
            source_hash=replay().source_hash,
            stored=known,
            claims=None if table is None else TableClaims(table, number, store),
        )
        self.commands: dict[int, Command] = {}
        for gang in range(gangs):
            self.coordinator.gang_ready(gang, replay().environment, limits())

    def step(self, gang: int) -> str:
        """Have a gang end what it runs, and ask for the next; `end` or `wait` if there is nothing."""
        running = self.commands.pop(gang, None)
        if running is not None:
            self.coordinator.learn(gang, replay().answer(running, SETTINGS))
            self.flush()
        command = self.coordinator.next(gang)
        if command.kind == "trial":
            self.commands[gang] = command
            self.asked.append((command.problem, command.candidate, command.final))
        return command.kind

    def flush(self) -> None:
        unstored = self.coordinator.unstored
        trials = [trial for trial, _ in unstored]
        if self.coordinator.claims is None:
            self.store.rows += [(self.number, trial) for trial in trials]
        else:
            self.coordinator.claims.record(trials, [claim for _, claim in unstored if claim is not None])
        unstored.clear()


def run(sites: Iterable[Site], seed: int) -> None:
    """Have all gangs of all sites answer in a random order until none has anything to do."""
    order = random.Random(seed)
    ended: set[tuple[int, int]] = set()
    gangs = [(site, gang) for site in sites for gang in range(2)]
    for _ in range(20000):
        left = [(site, gang) for site, gang in gangs if (site.number, gang) not in ended]
        if not left:
            return
        site, gang = order.choice(left)
        if site.step(gang) == "end":
            ended.add((site.number, gang))
    raise AssertionError("somebody waits for ever")


@functools.cache
def everything() -> set[tuple[Problem, Candidate]]:
    replay()
    return {(problem, candidate) for problem in PROBLEMS for candidate in search_space(problem, limits(), SETTINGS)}


@pytest.mark.parametrize("seed", range(2))
def test_gangs_in_any_order_do_everything_once(seed: int) -> None:
    site = Site(0, Store())
    run([site], seed)
    assert len(site.asked) == len(set(site.asked))
    assert {asked[:2] for asked in site.asked if not asked[2]} == everything()
    # Searches are over before the finals of their family begin.
    finals = [final for _, _, final in site.asked]
    assert finals == sorted(finals)
    assert set(PROBLEMS) == {problem for problem, _, final in site.asked if final}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("changes", [{}, {"trials": 20}], ids=["exhaustive", "sampled"])
def test_supervisors_that_share_claims_do_everything_once(seed: int, changes: dict[str, Any]) -> None:
    store, table = Store(), Table()
    sites = [Site(number, store, table, **changes) for number in range(3)]
    run(sites, seed)
    asked = [entry for site in sites for entry in site.asked]
    assert len(asked) == len(set(asked))
    assert all(site.asked for site in sites)
    assert not table.held
    searched = Counter(problem for problem, _, final in asked if not final)
    if changes:
        assert set(searched.values()) == {20}  # what others try counts
    else:
        assert {entry[:2] for entry in asked if not entry[2]} == everything()
    measured = [(trial.problem, trial.candidate, trial.final) for _, trial in store.rows if trial.status == "ok"]
    assert len(measured) == len(set(measured))


def test_what_a_dead_supervisor_had_claimed_is_taken_over() -> None:
    store, table = Store(), Table()
    dead, live = (Site(number, store, table) for number in range(2))
    for _ in range(5):
        dead.step(0)
        dead.step(1)
    assert len(dead.commands) == 2
    for gang in itertools.islice(itertools.cycle(range(2)), 600):
        if live.step(gang) != "trial" and not live.commands:
            break
    assert live.step(0) == "wait"  # for what the other one still holds
    TableClaims(table, dead.number, store).close()
    run([live], seed=0)
    done = {(trial.problem, trial.candidate) for _, trial in store.rows if not trial.final}
    assert everything() <= done
    assert {(c.problem, c.candidate) for c in dead.commands.values()} <= {entry[:2] for entry in live.asked}


def begun(site: Site, gang: int) -> Candidate:
    candidate = site.commands[gang].candidate
    assert candidate is not None
    return candidate


def lose(site: Site, gang: int, begun: Candidate | None, *, killed: bool = False) -> Trial | None:
    row = site.coordinator.lost(gang, "crashed", "planted", begun=begun, killed=killed)
    site.flush()
    site.commands.pop(gang)
    site.coordinator.gang_ready(gang, replay().environment, limits())
    return row


def test_crash_is_charged_only_in_a_fresh_gang() -> None:
    site = Site(0, Store(), gangs=2)
    for _ in range(4):
        site.step(0)
    suspect = begun(site, 0)
    assert site.coordinator.lost(0, "crashed", "planted", begun=suspect) is None
    site.commands.pop(0)
    assert site.step(1) == "trial"
    assert begun(site, 1) != suspect, "the other gang is not fresh"
    site.coordinator.gang_ready(0, replay().environment, limits())
    site.step(0)
    assert begun(site, 0) == suspect
    row = lose(site, 0, suspect)
    assert row is not None
    assert (row.candidate, row.status) == (suspect, "crashed")


def test_gangs_wait_for_what_a_fresh_one_tries_again_and_take_it_over_if_none_comes() -> None:
    site = Site(0, Store(), gangs=2, variants=("torch_one_shot",), finals=False)
    site.step(0)
    site.step(0)
    suspect = site.commands.pop(0)
    assert suspect.candidate is not None
    assert site.coordinator.lost(0, "crashed", "planted", begun=suspect.candidate) is None
    while (kind := site.step(1)) == "trial":
        assert begun(site, 1) != suspect.candidate or site.commands[1].problem != suspect.problem
    assert kind == "wait"
    site.coordinator.abandon(0)
    site.step(1)
    assert site.commands[1].trial == suspect.trial


def test_library_that_takes_a_fresh_gang_along_is_blamed_and_not_bound_again() -> None:
    site = Site(0, Store(), gangs=1)
    for _ in range(4):
        site.step(0)
    expected = begun(site, 0)
    assert lose(site, 0, LIBRARY) is None
    site.step(0)
    assert (begun(site, 0), site.commands[0].baseline) == (expected, LIBRARY)
    row = lose(site, 0, LIBRARY)
    assert row is not None
    assert row.candidate == LIBRARY
    site.step(0)
    assert begun(site, 0) == expected
    assert site.commands[0].baseline is None


def test_outcomes_are_stored_under_what_was_asked() -> None:
    site = Site(0, Store(), gangs=1)
    site.step(0)
    command = site.commands[0]
    row = site.coordinator.learn(0, TrialResult(status="incorrect", reason="planted", error=0.5))
    assert (row.problem, row.candidate, row.final) == (command.problem, command.candidate, False)
    assert (row.status, row.reason, row.error) == ("incorrect", "planted", 0.5)
    assert row.variant == "library"


def test_what_took_a_gang_along_is_left_alone_at_other_sizes() -> None:
    site = Site(0, Store(), gangs=1)
    elsewhere = {candidate for problem, candidate in everything() if problem == PROBLEMS[1]} - {LIBRARY}
    victim: Candidate | None = None
    while site.coordinator.next(0).kind == "trial":
        running = site.coordinator.activity(0)
        assert running is not None
        if victim is None and running.problem == PROBLEMS[0] and running.candidate in elsewhere:
            victim = running.candidate
            site.coordinator.lost(0, "hung", "planted", begun=victim)
            site.coordinator.gang_ready(0, replay().environment, limits())
        else:
            site.asked.append((running.problem, running.candidate, running.final))
            site.coordinator.learn(0, replay().answer(running, SETTINGS))
    assert victim is not None
    assert victim not in {candidate for _, candidate, _ in site.asked}
    assert {asked[:2] for asked in site.asked if not asked[2]} == {e for e in everything() if e[1] != victim}


@pytest.mark.parametrize("seed", range(1))
def test_finals_wait_for_the_searches_of_others(seed: int) -> None:
    """One that is through with its own searches stays: nobody else may be going to run the finals."""
    store, table = Store(), Table()
    sites = [Site(0, store, table, trials=10), Site(1, store, table, trials=60, finals=False)]
    run(sites, seed)
    assert {problem for problem, _, final in sites[0].asked if final} == set(PROBLEMS)
    assert not any(final for _, _, final in sites[1].asked)
