"""Which candidate of a problem to try next: seeds, then everything where the space is small, else Optuna's TPE."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import queue
import random
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy import make_url

from tunedcomm.db.engine import data_directory
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.errors import ConfigError
from tunedcomm.space import Space, Value
from tunedcomm.spec import Candidate, Limits, NumericsPolicy, Problem, candidates, get_op, get_variant, variants
from tunedcomm.tuner.gang.protocol import Settings

# Candidates drawn at random before the model is trusted; seeds and stored trials count.
_STARTUP_TRIALS = 16
# Draws before a candidate is taken at random: only where a draw's variant has nothing left.
_MAX_DRAWS = 4
_MIRROR_CLOSE_S = 30.0
_log = logging.getLogger("tunedcomm")


def families(problems: Iterable[Problem]) -> list[list[Problem]]:
    """Problems by family, families in order of appearance, each from small to large messages."""
    grouped: dict[Problem, list[Problem]] = {}
    for problem in problems:
        grouped.setdefault(problem.family, []).append(problem)
    return [sorted(group, key=lambda p: (get_op(p.op).message_bytes(p), p.shape)) for group in grouped.values()]


def default_candidates(problem: Problem, limits: Limits) -> list[Candidate]:
    """The library, then every other variant's default config; not of those whose `default` raises."""
    found = []
    for variant in variants(problem.op).values():
        with contextlib.suppress(ConfigError):  # stray_defaults says it
            found.append(Candidate.of(problem.op, variant.name, variant.default_config(problem, limits)))
    return found


def stray_defaults(problem: Problem, limits: Limits, wanted: Collection[str]) -> Iterator[str]:
    """A sentence for each of these variants whose default config is no point of its space, so that it is not tried."""
    for variant in variants(problem.op).values():
        if variant.name in wanted:
            try:
                variant.space.validate(variant.default_config(problem, limits))
            except ConfigError as error:
                yield f"the default config of {variant.op}.{variant.name} is not in its space and is not tried: {error}"


def search_space(
    problem: Problem, limits: Limits, settings: Settings, dropped: Collection[str] = ()
) -> list[Candidate]:
    """Every feasible candidate that the settings leave in, without `dropped` variants.

    Where a variant of CPU tensors is known to be fast, interpreted kernels are searched only if they are named.
    """
    known = variants(problem.op)
    wanted = {*settings.variants, "library"} if settings.variants else None
    if wanted is None and limits.backend == "host" and any(v.untuned(problem, limits) for v in known.values()):
        wanted = {name for name, variant in known.items() if not variant.kernels}
    return [
        candidate
        for candidate in candidates(problem, limits, settings.policy)
        if candidate.variant not in dropped and (wanted is None or candidate.variant in wanted)
    ]


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


class _Suggests:
    """An Optuna trial as a space wants it: categorical values are only ever ints, bools and strings."""

    def __init__(self, trial: optuna.Trial) -> None:
        self._trial = trial

    def suggest_categorical(self, name: str, choices: list[Value]) -> Value:
        value = self._trial.suggest_categorical(name, choices)
        assert isinstance(value, (int, str))
        return value


class Search:
    """The search for one problem's best candidate.

    The same settings, feasible set, seeds and told latencies give the same candidates, whether a latency was told or
    was settled before: a search that is begun again goes the way that it went, and on from where it stood. Several
    candidates may be out at once; their latencies may be told in any order.

    Args:
        problem: what is tuned.
        feasible: every candidate that may be tried.
        settings: trials, patience and seed.
        seeds: tried first, in this order.
        settled: candidates that are not given out when their turn comes, with their latency if they ran.
    """

    def __init__(
        self,
        problem: Problem,
        feasible: Sequence[Candidate],
        settings: Settings,
        *,
        seeds: Sequence[Candidate] = (),
        settled: Mapping[Candidate, float | None] | None = None,
    ) -> None:
        self._settings = settings
        self._spaces = {c.variant: get_variant(problem.op, c.variant).space for c in feasible}
        self._settled = dict(settled or {})
        self._left = dict.fromkeys(feasible)
        self._budget = settings.trials
        self._queue = [c for c in dict.fromkeys(seeds) if c in self._left]
        self._asked: dict[Candidate, optuna.Trial] = {}
        self._study: optuna.Study | None = None
        self._rng = random.Random(f"{settings.seed}-{problem.digest}")  # noqa: S311
        self._best, self._stood = math.inf, 0
        self._history: list[tuple[Candidate, float | None]] = []
        if len(self._left) <= self._budget:
            self._queue += [c for c in interleave(list(self._left)) if c not in set(self._queue)]

    @property
    def planned(self) -> int:
        """Trials still to come at most."""
        return min(max(self._budget, 0), sum(candidate not in self._settled for candidate in self._left))

    def ask(self) -> Candidate | None:
        """The next candidate that is not settled, or None when the search is over."""
        while (candidate := self._next()) is not None and candidate in self._settled:
            self.tell(candidate, self._settled[candidate])
        return candidate

    def _next(self) -> Candidate | None:
        if self._budget <= 0 or not self._left:
            return None
        if not self._queue:
            patience = self._settings.patience
            if patience and self._stood >= patience:
                return None
            self._queue.append(self._sample())
        candidate = self._queue.pop(0)
        del self._left[candidate]
        self._budget -= 1
        return candidate

    def take(self, candidate: Candidate) -> bool:
        """Note that somebody runs, or ran, a candidate that `ask` did not give: it counts, and is not given out.

        Returns:
            False if that was known before, or the candidate is none of this search.
        """
        if candidate not in self._left:
            return False
        del self._left[candidate]
        self._budget -= 1
        self._queue = [queued for queued in self._queue if queued != candidate]
        return True

    def tell(self, candidate: Candidate, latency_us: float | None) -> None:
        """Report a trial that `ask` gave or `take` noted: its latency, or None if it did not get that far."""
        asked = self._asked.pop(candidate, None)
        if asked is not None and self._study is not None:
            if latency_us is None:
                self._study.tell(asked, state=optuna.trial.TrialState.PRUNED)
            else:
                self._study.tell(asked, latency_us)
            self._note(latency_us)
        else:
            self._remember(candidate, latency_us)

    def _note(self, latency_us: float | None) -> None:
        self._stood += 1
        if latency_us is not None and latency_us < self._best:
            self._best, self._stood = latency_us, 0

    def _remember(self, candidate: Candidate, latency_us: float | None) -> None:
        """Take in a result that the sampler did not draw."""
        self._note(latency_us)
        self._history.append((candidate, latency_us))
        if self._study is not None:
            self._flush(self._study)

    def _flush(self, study: optuna.Study) -> None:
        for candidate, latency_us in self._history:
            if candidate.variant in self._spaces:
                study.add_trial(_optuna_trial(candidate, self._spaces, latency_us))
        self._history.clear()

    def _sampler(self) -> optuna.Study:
        if self._study is None:
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                sampler = optuna.samplers.TPESampler(
                    multivariate=True,
                    group=True,
                    n_startup_trials=_STARTUP_TRIALS,
                    seed=self._rng.randrange(2**31),
                )
            self._study = optuna.create_study(sampler=sampler)
            self._flush(self._study)
        return self._study

    def _sample(self) -> Candidate:
        """A candidate that is feasible and new.

        A sampler of discrete values repeats itself and knows nothing of feasibility. What it draws stands for the
        nearest candidate that is left, so that a repeated optimum leads on to its neighbours.
        """
        study = self._sampler()
        for _ in range(_MAX_DRAWS):
            trial = study.ask()
            variant = str(trial.suggest_categorical("variant", sorted(self._spaces)))
            config = self._spaces[variant].suggest(_Suggests(trial), prefix=f"{variant}.")
            drawn = Candidate.of(next(iter(self._left)).op, variant, config)
            if drawn in self._left:
                self._asked[drawn] = trial
                return drawn
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            if rivals := [candidate for candidate in self._left if candidate.variant == variant]:
                distances = [_distance(self._spaces[variant], drawn, rival) for rival in rivals]
                return self._rng.choice([r for r, d in zip(rivals, distances, strict=True) if d == min(distances)])
        return self._rng.choice(list(self._left))


def _distance(space: Space, one: Candidate, other: Candidate) -> int:
    """Steps along the axes from one config to another."""
    a, b = one.config_dict, other.config_dict
    return sum(abs(axis.values().index(a[name]) - axis.values().index(b[name])) for name, axis in space.axes)


def _optuna_trial(
    candidate: Candidate, spaces: Mapping[str, Space], latency_us: float | None, **attributes: str
) -> optuna.trial.FrozenTrial:
    """A finished trial; a failed one counts as pruned, which to TPE is worse than everything that ran."""
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
        studies: dict[str, optuna.Study] = {}
        spaces: dict[str, dict[str, Space]] = {}
        storage = None
        while (trial := self._trials.get()) is not None:
            name = f"{str(trial.problem)[:400]} [{trial.environment.digest[:12]}]{' final' if trial.final else ''}"
            try:
                if storage is None:
                    optuna.logging.set_verbosity(optuna.logging.WARNING)
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    storage = JournalStorage(JournalFileBackend(str(self._path)))
                if name not in studies:
                    studies[name] = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
                op = trial.problem.op
                if op not in spaces:
                    spaces[op] = {variant.name: variant.space for variant in variants(op).values()}
                ran = trial.latency_p50_us if trial.status == "ok" else None
                studies[name].add_trial(
                    _optuna_trial(trial.candidate, spaces[op], ran, status=trial.status, reason=trial.reason)
                )
            except Exception as error:  # noqa: BLE001 - whatever Optuna raises: a sweep needs no journal
                _log.warning("Optuna's dashboard sees no more trials: %s cannot be written (%s)", self._path, error)
                return
