"""Coordinators with several gangs, with gangs that are lost, and with others beside them. No process is started."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from replay import Replay, recorded, recorded_limits

from tunedcomm.db.records import Trial
from tunedcomm.spec import Candidate, Problem
from tunedcomm.tuner.gang.protocol import Command, Settings
from tunedcomm.tuner.search.claims import Claim, Claims
from tunedcomm.tuner.search.coordinator import Coordinator
from tunedcomm.tuner.search.study import search_space

SETTINGS = Settings(backend="cuda", world_size=4, trials=200)
PROBLEMS = tuple(Problem("all_reduce", (1 << exponent,), "bfloat16", 4) for exponent in (9, 11, 13))
LIBRARY = Candidate.of("all_reduce", "library", {})


@functools.cache
def replay() -> Replay:
    return Replay(recorded())


@functools.cache
def everything() -> set[tuple[Problem, Candidate]]:
    replay()
    limits = recorded_limits()
    return {(problem, candidate) for problem in PROBLEMS for candidate in search_space(problem, limits, SETTINGS)}


class Table:
    """Stands in for the tuned database: rows of all supervisors, how many each has seen, and their claims."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, Trial]] = []
        self.seen: Counter[tuple[int, Problem]] = Counter()
        self.held: dict[str, tuple[int, Claim]] = {}


class TableClaims(Claims):
    """One supervisor's claims in a `Table`."""

    def __init__(self, table: Table, supervisor: int) -> None:
        self.table, self.supervisor = table, supervisor

    def acquire(self, problem: Problem, candidate: Candidate, *, final: bool) -> Claim | None:
        claim = Claim(problem=problem, candidate=candidate, final=final, key=str((problem, candidate, final)))
        holder, _ = self.table.held.setdefault(claim.key, (self.supervisor, claim))
        return claim if holder == self.supervisor else None

    def holds(self, claim: Claim) -> bool:
        return self.table.held.get(claim.key, (-1, None))[0] == self.supervisor

    def news(self, problem: Problem) -> list[Trial]:
        seen, rows = self.table.seen, self.table.rows
        begin, seen[self.supervisor, problem] = seen[self.supervisor, problem], len(rows)
        return [trial for owner, trial in rows[begin:] if owner != self.supervisor and trial.problem == problem]

    def record(self, trials: Sequence[Trial], claims: Iterable[Claim]) -> None:
        self.table.rows += [(self.supervisor, trial) for trial in trials]
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
        self.release([claim for _, claim in self.table.held.values()])


class Site:
    """One supervisor with gangs that answer when they are told to."""

    def __init__(self, number: int = 0, table: Table | None = None, *, gangs: int = 2, **changes: Any) -> None:
        self.number = number
        self.asked: list[tuple[Problem | None, Candidate | None, bool]] = []
        self.commands: dict[int, Command] = {}
        self.claims = TableClaims(table or Table(), number)
        known = [trial for _, trial in self.claims.table.rows]
        for problem in PROBLEMS:
            self.claims.news(problem)
        settings = replace(SETTINGS, gangs=gangs, **changes)
        self.coordinator = Coordinator(
            PROBLEMS, settings, source_hash=replay().source_hash, stored=known, claims=self.claims
        )
        for gang in range(gangs):
            self.ready(gang)

    def ready(self, gang: int) -> None:
        self.coordinator.gang_ready(gang, replay().environment, recorded_limits())

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

    def lose(self, gang: int, begun: Candidate | None, status: Any = "crashed") -> Trial | None:
        row = self.coordinator.lost(gang, status, "planted", begun=begun)
        self.flush()
        self.commands.pop(gang)
        return row

    def flush(self) -> None:
        unstored = self.coordinator.unstored
        self.claims.record([trial for trial, _ in unstored], [claim for _, claim in unstored if claim is not None])
        unstored.clear()


def run(sites: Iterable[Site], seed: int = 0) -> None:
    """Have all gangs of all sites answer in a random order until none has anything to do."""
    order = random.Random(seed)
    left = [(site, gang) for site in sites for gang in range(2)]
    for _ in range(20000):
        if not left:
            return
        site, gang = order.choice(left)
        if site.step(gang) == "end":
            left.remove((site, gang))
    raise AssertionError("somebody waits for ever")


def searched(*sites: Site) -> set[tuple[Problem | None, Candidate | None]]:
    return {asked[:2] for site in sites for asked in site.asked if not asked[2]}


@pytest.mark.parametrize("seed", range(2))
def test_gangs_in_any_order_do_everything_once(seed: int) -> None:
    site = Site()
    run([site], seed)
    assert len(site.asked) == len(set(site.asked))
    assert searched(site) == everything()
    # Searches are over before the finals of their family begin.
    finals = [final for _, _, final in site.asked]
    assert finals == sorted(finals)
    assert set(PROBLEMS) == {problem for problem, _, final in site.asked if final}


@pytest.mark.parametrize(("seed", "changes"), [(0, {}), (1, {}), (0, {"trials": 20})])
def test_supervisors_that_share_claims_do_everything_once(seed: int, changes: dict[str, Any]) -> None:
    table = Table()
    sites = [Site(number, table, **changes) for number in range(3)]
    run(sites, seed)
    asked = [entry for site in sites for entry in site.asked]
    assert len(asked) == len(set(asked))
    assert all(site.asked for site in sites)
    assert not table.held
    if changes:  # what others try counts
        assert set(Counter(problem for problem, _, final in asked if not final).values()) == {20}
    else:
        assert searched(*sites) == everything()
    measured = [(trial.problem, trial.candidate, trial.final) for _, trial in table.rows if trial.status == "ok"]
    assert len(measured) == len(set(measured))


def test_what_a_dead_supervisor_had_claimed_is_taken_over() -> None:
    table = Table()
    dead, live = (Site(number, table) for number in range(2))
    for _ in range(5):
        dead.step(0)
        dead.step(1)
    assert len(dead.commands) == 2
    for gang in itertools.islice(itertools.cycle(range(2)), 600):
        if live.step(gang) != "trial" and not live.commands:
            break
    assert live.step(0) == "wait"  # for what the other one still holds
    dead.claims.close()
    run([live])
    assert everything() <= {(trial.problem, trial.candidate) for _, trial in table.rows if not trial.final}
    assert {(c.problem, c.candidate) for c in dead.commands.values()} <= {entry[:2] for entry in live.asked}


def test_crash_is_charged_only_in_a_fresh_gang() -> None:
    site = Site()
    for _ in range(4):
        site.step(0)
    suspect = site.commands[0].candidate
    assert site.lose(0, suspect) is None
    assert site.step(1) == "trial"
    assert site.commands[1].candidate != suspect, "the other gang is not fresh"
    site.ready(0)
    site.step(0)
    assert site.commands[0].candidate == suspect
    row = site.lose(0, suspect)
    assert (row.candidate, row.status) == (suspect, "crashed")


def test_gangs_wait_for_what_a_fresh_one_tries_again_and_take_it_over_if_none_comes() -> None:
    site = Site(variants=("lamport",), trials=3, finals=False)
    site.step(0)
    site.step(0)
    suspect = site.commands[0]
    assert site.lose(0, suspect.candidate) is None
    while (kind := site.step(1)) == "trial":
        assert site.commands[1].trial != suspect.trial
    assert kind == "wait"
    site.coordinator.abandon(0)
    site.step(1)
    assert site.commands[1].trial == suspect.trial


def test_library_that_takes_a_fresh_gang_along_is_blamed_and_not_bound_again() -> None:
    site = Site(gangs=1)
    for _ in range(4):
        site.step(0)
    expected = site.commands[0].candidate
    for blamed in (False, True):
        row = site.lose(0, LIBRARY)
        assert (row is not None and row.candidate == LIBRARY) == blamed
        site.ready(0)
        site.step(0)
        assert (site.commands[0].candidate, site.commands[0].baseline) == (expected, None if blamed else LIBRARY)


def test_what_took_a_gang_along_is_left_alone_at_other_sizes() -> None:
    site = Site(gangs=1)
    elsewhere = {candidate for problem, candidate in everything() if problem == PROBLEMS[1]} - {LIBRARY}
    victims: list[Candidate | None] = []
    while site.step(0) == "trial":
        running = site.commands[0]
        if not victims and running.problem == PROBLEMS[0] and running.candidate in elsewhere:
            victims.append(running.candidate)
            site.asked.pop()
            site.lose(0, running.candidate, "hung")
            site.ready(0)
    assert searched(site) == {entry for entry in everything() if entry[1] not in victims}
    assert victims[0] not in {candidate for _, candidate, _ in site.asked}


def test_finals_wait_for_the_searches_of_others() -> None:
    """One that is through with its own searches stays: nobody else may be going to run the finals."""
    table = Table()
    sites = [Site(0, table, trials=10), Site(1, table, trials=60, finals=False)]
    run(sites)
    assert {problem for problem, _, final in sites[0].asked if final} == set(PROBLEMS)
    assert not any(final for _, _, final in sites[1].asked)
