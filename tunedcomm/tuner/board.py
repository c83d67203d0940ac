"""Claims as trials of an Optuna storage: written down, looked at and ended, without any judgement on their owners."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import TrialState

from tunedcomm.spec import Candidate, get_variant, variants

__all__ = ["CANDIDATE", "OWNER", "Board", "Entry", "Note", "StorageBoard", "parameters"]

# User attributes of a claim's trial: the candidate in canonical form, and its owner's mark with the claim's nonce.
CANDIDATE = "candidate"
OWNER = "owner"


@dataclass(frozen=True, slots=True)
class Note:
    """What a claim writes down.

    Attributes:
        candidate: what is claimed.
        key: its canonical form.
        nonce: another one for every claim, the same at every attempt to write it down.
        mark: of the owner.
    """

    candidate: Candidate
    key: str
    nonce: str
    mark: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """A claim as it was found.

    Attributes:
        trial_id: the storage's name for it.
        key: canonical form of the candidate.
        nonce: of the claim.
        mark: of its owner.
        is_running: False if it was told.
    """

    trial_id: int
    key: str
    nonce: str
    mark: Mapping[str, Any]
    is_running: bool


class Board(Protocol):
    """Every method is one transaction and may be repeated when its answer was lost."""

    def study(self, name: str) -> int:
        """The study of that name, made if there is none."""

    def entries(self, study: int, key: str | None, *, told: bool) -> list[Entry]:
        """Running claims, and with `told` those that were told, in their order; of all candidates without a key."""

    def claim(self, study: int, note: Note, *, told: bool) -> tuple[int | None, list[Entry]]:
        """Write a claim down.

        Returns its id and the entries that have come before it for the same candidate; where there are any, the caller
        ends one or the other. There is no id if these kept the claim from being written down.
        """

    def end(self, trial_id: int, state: TrialState, value: float | None = None) -> None:
        """End a claim; nothing happens to one that has ended."""

    def is_running(self, trial_id: int) -> bool:
        """True unless the claim has ended."""


def parameters(candidate: Candidate) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
    """A candidate as an Optuna trial's parameters, named as the tuner's search names them."""
    params: dict[str, Any] = {"variant": candidate.variant}
    distributions: dict[str, BaseDistribution] = {
        "variant": CategoricalDistribution(sorted(variants(candidate.op))),
    }
    for name, axis in get_variant(candidate.op, candidate.variant).space.axes:
        params[f"{candidate.variant}.{name}"] = candidate.config_dict[name]
        distributions[f"{candidate.variant}.{name}"] = CategoricalDistribution(list(axis.values()))
    return params, distributions


class StorageBoard:
    """Over any Optuna storage, by what every storage can do.

    Writing a trial down gives it a number in one atomic step; all with lower numbers can be seen afterwards.
    """

    def __init__(self, storage: BaseStorage) -> None:
        self._storage: Any = storage

    def study(self, name: str) -> int:
        for _ in range(2):
            with contextlib.suppress(KeyError):
                return int(self._storage.get_study_id_from_name(name))
            with contextlib.suppress(DuplicatedStudyError):
                return int(self._storage.create_new_study([StudyDirection.MINIMIZE], name))
        return int(self._storage.get_study_id_from_name(name))

    def entries(self, study: int, key: str | None, *, told: bool) -> list[Entry]:
        return [entry for entry in self._all(study, told=told) if key in (None, entry.key)]

    def claim(self, study: int, note: Note, *, told: bool) -> tuple[int, list[Entry]]:
        params, distributions = parameters(note.candidate)
        attributes = {CANDIDATE: note.key, OWNER: {**note.mark, "nonce": note.nonce}}
        trial = optuna.trial.create_trial(
            state=TrialState.RUNNING, params=params, distributions=distributions, user_attrs=attributes
        )
        try:
            self._storage.create_new_trial(study, template_trial=trial)
        except ValueError:
            # Another supervisor knows other variants or other values of an axis: Optuna takes no such parameters, but
            # the claim names its candidate without them.
            bare = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=attributes)
            self._storage.create_new_trial(study, template_trial=bare)
        found = self.entries(study, note.key, told=told)
        # When an answer was lost on the way the claim was made several times, and the first is enough.
        mine, *others = [place for place, entry in enumerate(found) if entry.nonce == note.nonce]
        for place in others:
            self.end(found[place].trial_id, TrialState.FAIL)
        return found[mine].trial_id, found[:mine]

    def end(self, trial_id: int, state: TrialState, value: float | None = None) -> None:
        values = None if value is None else [value]
        with contextlib.suppress(UpdateFinishedTrialError):
            self._storage.set_trial_state_values(trial_id, state=state, values=values)

    def is_running(self, trial_id: int) -> bool:
        return bool(self._storage.get_trial(trial_id).state == TrialState.RUNNING)

    def _all(self, study: int, *, told: bool) -> Iterator[Entry]:
        states = (TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED)
        for trial in self._storage.get_all_trials(study, deepcopy=False, states=states if told else states[:1]):
            attributes = trial.user_attrs
            if CANDIDATE in attributes and OWNER in attributes:
                mark = attributes[OWNER]
                is_running = trial.state == TrialState.RUNNING
                yield Entry(trial._trial_id, attributes[CANDIDATE], str(mark.get("nonce")), mark, is_running)
