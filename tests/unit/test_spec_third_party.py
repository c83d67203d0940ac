"""Variants of any package are asked by every call: what raises there ends nothing, and is said."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import pytest

from tunedcomm import kernels, spec
from tunedcomm.errors import ConfigError
from tunedcomm.hardware import detect
from tunedcomm.spec import Limits, Problem, Variant, candidates, get_variant, register_variant, why_no_kernel
from tunedcomm.symm.layout import limits_for
from tunedcomm.tuner.search.study import default_candidates, infeasible_variants, stray_defaults

PROBLEM = Problem("all_gather", (4096,), "float32", 2, reduction="", mode="eager")


def raises(*asked: Any) -> Any:
    raise KeyError("num_pieces")


@pytest.fixture
def limits() -> Limits:
    kernels.discover()
    return limits_for(detect(None), 2)


@pytest.fixture
def brought(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Variant:
    """A variant of all_gather with what the test gives."""
    kernels.discover()
    monkeypatch.setattr(spec, "_variants", dict(spec._variants))
    monkeypatch.setattr(spec, "_warned", set())
    return register_variant(replace(get_variant("all_gather", "push"), name="bad", **request.param))


@pytest.mark.parametrize(
    ("brought", "said"),
    [
        ({"infeasible": raises}, r"its infeasible\(\) raised KeyError: 'num_pieces' at .*test_spec_third_party.py:\d+"),
        ({"infeasible": lambda *asked: False}, r"must return None or a sentence, and returned False"),
    ],
    indirect=["brought"],
)
def test_what_cannot_say_whether_it_runs_does_not(
    brought: Variant, said: str, limits: Limits, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tunedcomm"):
        found = {candidate.variant for candidate in candidates(PROBLEM, limits, "any")}
        reasons = dict(infeasible_variants(PROBLEM, limits, "any"))
    assert "push" in found
    assert "bad" not in found
    (reason,) = [reason for candidate, reason in reasons.items() if candidate.variant == "bad"]
    assert re.search(said, reason)
    (told,) = (record.message for record in caplog.records)
    assert "variant bad of all_gather" in told
    assert why_no_kernel(PROBLEM, limits, "any") is None, "the others can"
    assert brought.infeasible_reason(PROBLEM, {}, limits) == reason


@pytest.mark.parametrize(
    ("brought", "said"),
    [
        ({"default": raises}, "its default\\(\\) raised KeyError"),
        ({"default": lambda *asked: None}, "its default\\(\\) must return a dict of axis to value, and returned None"),
    ],
    indirect=["brought"],
)
def test_a_default_that_raises_is_a_named_error_where_it_is_needed(brought: Variant, said: str, limits: Limits) -> None:
    with pytest.raises(ConfigError, match=f"all_gather.bad: {said}"):
        brought.default_config(PROBLEM, limits)
    assert "bad" not in {candidate.variant for candidate in default_candidates(PROBLEM, limits)}
    (note,) = stray_defaults(PROBLEM, limits, ["bad", "push"])
    assert "all_gather.bad" in note
    assert "bad" in {candidate.variant for candidate in candidates(PROBLEM, limits, "any")}, "other configs are tried"
    assert why_no_kernel(PROBLEM, limits, "any") is None
