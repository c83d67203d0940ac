"""Chooses the next candidate of a problem: seeds first, then all candidates of a small space, else Optuna's TPE."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import queue
import random
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy import make_url

from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.db.targets import data_directory, warn_once
from tunedcomm.errors import ConfigError
from tunedcomm.space import Space, SuggestsCategorical, Value
from tunedcomm.spec import Candidate, Limits, NumericsPolicy, Problem, candidates, get_variant, usual_variants, variants
from tunedcomm.tuner.gang.protocol import Settings

# Candidates drawn at random before the model is used; seeds and stored trials count.
_STARTUP_TRIALS = 16
# Draws before a candidate is taken at random; a draw is repeated only if its variant has no candidate left.
_MAX_DRAWS = 4
_MIRROR_CLOSE_S = 30.0
_log = logging.getLogger("tunedcomm")


def default_candidates(problem: Problem, limits: Limits) -> list[Candidate]:
    """The library, then every other variant's default config; warns of a default that is not in its space."""
    found = []
    for variant in variants(problem.op).values():
        try:
            config = variant.space.validate(variant.default_config(problem, limits))
            found.append(Candidate.of(problem.op, variant.name, config))
        except ConfigError as error:
            warn_once(f"the default config of {variant.op}.{variant.name} is not tried: {error}")
    return found


def search_space(problem: Problem, limits: Limits, settings: Settings) -> list[Candidate]:
    """Every feasible candidate that the settings leave in; of interpreted kernels those that are named."""
    usual = usual_variants(problem.op, on_gpu=limits.backend == "cuda")
    wanted = {"library", *settings.variants} if settings.variants else usual
    return [candidate for candidate in candidates(problem, limits, settings.policy) if candidate.variant in wanted]


def infeasible_variants(problem: Problem, limits: Limits, policy: NumericsPolicy) -> Iterator[tuple[Candidate, str]]:
    """The default config of each variant that has no feasible config at all, and why it cannot run."""
    possible = {candidate.variant for candidate in candidates(problem, limits, policy)}
    for variant in variants(problem.op).values():
        if variant.name in possible:
            continue
        config: dict[str, Value] = {}
        try:
            config = variant.default_config(problem, limits)
            reason = variant.infeasible_reason(problem, config, limits)
        except ConfigError as error:
            reason = str(error)
        if reason is not None:
            yield Candidate.of(problem.op, variant.name, config), reason


def interleave(found: Sequence[Candidate]) -> list[Candidate]:
    """One of each variant in turn, so that a search cut short has seen all of them."""
    by_variant: dict[str, list[Candidate]] = {}
    for candidate in found:
        by_variant.setdefault(candidate.variant, []).append(candidate)
    rounds = itertools.zip_longest(*by_variant.values())
    return [candidate for turn in rounds for candidate in turn if candidate is not None]


class Search:
    """The order in which the candidates of one problem are tried.

    It reads results and keeps none: the same settings, feasible set, seeds and results give the same next candidate. So
    a search that is started again continues where it stopped.

    Args:
        problem: the problem.
        feasible: every candidate that may be tried.
        settings: trials, patience and seed.
        seeds: tried first, in this order.
    """

    def __init__(
        self, problem: Problem, feasible: Sequence[Candidate], settings: Settings, seeds: Sequence[Candidate] = ()
    ) -> None:
        self.feasible = dict.fromkeys(feasible)
        self._problem, self._settings = problem, settings
        self._queue = [c for c in dict.fromkeys(seeds) if c in self.feasible]
        self._spaces = {c.variant: get_variant(problem.op, c.variant).space for c in feasible}
        self._study: optuna.Study | None = None
        self._entered: set[Candidate] = set()  # into the study

    def trials_left(self, known: Mapping[Candidate, float | None], dropped: Collection[str] = ()) -> int:
        """Trials still to come at most."""
        allowed = self._allowed(dropped)
        return max(0, min(len(allowed), self._settings.trials) - sum(c in known for c in allowed))

    def _allowed(self, dropped: Collection[str]) -> list[Candidate]:
        return [candidate for candidate in self.feasible if candidate.variant not in dropped]

    def next(
        self,
        known: Mapping[Candidate, float | None],
        busy: Collection[Candidate] = (),
        dropped: Collection[str] = (),
    ) -> Candidate | None:
        """The next candidate, or None if there is none.

        Args:
            known: candidates that were tried, in that order, with their latency if they ran.
            busy: candidates that run now.
            dropped: variants that are not tried.
        """
        allowed = self._allowed(dropped)
        left = [candidate for candidate in allowed if candidate not in known and candidate not in busy]
        num_begun = len(allowed) - len(left)
        if not left or num_begun >= self._settings.trials:
            return None
        queue = [*self._queue, *self._listed(allowed)]
        free = set(left)
        found = next((candidate for candidate in queue if candidate in free), None)
        if found is None:
            tried = {candidate: us for candidate, us in known.items() if candidate in self.feasible}
            if self._settings.patience and _num_without_gain(tried.values()) >= self._settings.patience:
                return None
            found = self._draw(tried, left, num_begun)
            self._queue.append(found)  # it is the next one again if it is not run after all
        return found

    def _listed(self, allowed: Sequence[Candidate]) -> Sequence[Candidate]:
        """The candidates to try after the seeds, in this order, before any candidate is drawn."""
        return interleave(allowed) if len(allowed) <= self._settings.trials else ()

    def _draw(self, tried: Mapping[Candidate, float | None], left: Sequence[Candidate], num_begun: int) -> Candidate:
        """One of the candidates `left`, by Optuna's model of the candidates `tried`.

        A sampler of discrete values repeats itself and ignores feasibility. Its draw stands for the nearest candidate
        that is left, so that a repeated optimum leads on to its neighbours.
        """
        rng = random.Random(f"{self._settings.seed}-{self._problem.digest}-{num_begun}")  # noqa: S311
        if self._study is None:
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            self._study = optuna.create_study()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study.sampler = optuna.samplers.TPESampler(
                multivariate=True, group=True, n_startup_trials=_STARTUP_TRIALS, seed=rng.randrange(2**31)
            )
        self._study.add_trials(_optuna_trial(c, self._spaces, us) for c, us in tried.items() if c not in self._entered)
        self._entered.update(tried)
        for _ in range(_MAX_DRAWS):
            trial = self._study.ask()
            variant = str(trial.suggest_categorical("variant", sorted(self._spaces)))
            # An axis has ints, bools and strings alone, and so does a draw.
            config = self._spaces[variant].suggest(cast("SuggestsCategorical", trial), prefix=f"{variant}.")
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)  # its result is added when it is known
            drawn = Candidate.of(self._problem.op, variant, config)
            distances = {c: _distance(self._spaces[variant], drawn, c) for c in left if c.variant == variant}
            if distances:
                nearest = min(distances.values())
                return rng.choice([candidate for candidate, distance in distances.items() if distance == nearest])
        return rng.choice(left)


class LocalSearch(Search):
    """Tries the neighbours of the best after the seeds, for searches too short for a model of the space."""

    def _listed(self, allowed: Sequence[Candidate]) -> Sequence[Candidate]:
        return ()

    def _draw(self, tried: Mapping[Candidate, float | None], left: Sequence[Candidate], num_begun: int) -> Candidate:
        ran = sorted((us, str(c), c) for c, us in tried.items() if us is not None)
        for _, _, best in ran:
            distances = {c: _distance(self._spaces[c.variant], best, c) for c in left if c.variant == best.variant}
            if distances:
                return min(distances, key=lambda c: (distances[c], hashlib.sha256(str(c).encode()).digest()))
        return left[0]


def _num_without_gain(latencies: Iterable[float | None]) -> int:
    """Trials since the best one."""
    best, count = math.inf, 0
    for latency_us in latencies:
        count += 1
        if latency_us is not None and latency_us < best:
            best, count = latency_us, 0
    return count


def _distance(space: Space, one: Candidate, other: Candidate) -> int:
    """Number of axis values between one config and another, summed over the axes."""
    a, b = one.config_dict, other.config_dict
    return sum(abs(axis.values().index(a[name]) - axis.values().index(b[name])) for name, axis in space.axes)


def _optuna_trial(
    candidate: Candidate, spaces: Mapping[str, Space], latency_us: float | None, **attributes: str
) -> optuna.trial.FrozenTrial:
    """A finished trial; a failed one counts as pruned, which TPE ranks below every trial that ran."""
    params: dict[str, Any] = {"variant": candidate.variant}
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        "variant": optuna.distributions.CategoricalDistribution(sorted(spaces))
    }
    for name, axis in spaces[candidate.variant].axes:
        params[f"{candidate.variant}.{name}"] = candidate.config_dict[name]
        distributions[f"{candidate.variant}.{name}"] = optuna.distributions.CategoricalDistribution(list(axis.values()))
    state = optuna.trial.TrialState.PRUNED if latency_us is None else optuna.trial.TrialState.COMPLETE
    return optuna.trial.create_trial(
        params=params, distributions=distributions, value=latency_us, state=state, user_attrs=attributes
    )


def journal_path(database: Database) -> Path:
    """The Optuna journal of a database: beside a file, and for a server in the data directory of this host."""
    path = database.path or data_directory() / (make_url(database.target).database or "tuned")
    return path.with_name(path.name + ".studies.journal")


class StudyMirror:
    """Copies stored trials to an Optuna journal, from a thread; optuna-dashboard shows them, no sweep reads them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._trials: queue.SimpleQueue[Trial | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tunedcomm-studies", daemon=True)
        self._thread.start()

    def add(self, trials: Iterable[Trial]) -> None:
        """Copy stored trials soon."""
        for trial in trials:
            self._trials.put(trial)

    def close(self) -> None:
        """Wait for the last copy, but not for ever."""
        self._trials.put(None)
        self._thread.join(_MIRROR_CLOSE_S)

    def _run(self) -> None:
        try:
            self._copy_all()
        except Exception as error:  # noqa: BLE001 - whatever Optuna raises: a sweep needs no journal
            _log.warning("Optuna's dashboard sees no more trials: %s cannot be written (%s)", self._path, error)

    def _copy_all(self) -> None:
        storage, studies = None, dict[str, optuna.Study]()
        while (trial := self._trials.get()) is not None:
            if storage is None:
                optuna.logging.set_verbosity(optuna.logging.WARNING)
                self._path.parent.mkdir(parents=True, exist_ok=True)
                storage = JournalStorage(JournalFileBackend(str(self._path)))
            name = f"{str(trial.problem)[:400]} [{trial.environment.digest[:12]}]{' final' if trial.final else ''}"
            if name not in studies:
                studies[name] = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
            spaces = {variant.name: variant.space for variant in variants(trial.problem.op).values()}
            ran = trial.latency_p50_us if trial.status == "ok" else None
            copy = _optuna_trial(trial.candidate, spaces, ran, status=trial.status, reason=trial.reason)
            studies[name].add_trial(copy)
