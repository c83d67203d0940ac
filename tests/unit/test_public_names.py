"""What importing tunedcomm gives and costs: public names, errors, nothing heavy; kernels interpreted without a GPU."""

from __future__ import annotations

import inspect
import os
import re
import statistics
import subprocess
import sys

import pytest
from quick import some

import tunedcomm
from tunedcomm import errors
from tunedcomm.version import VERSION

IMPORT_BUDGET_S = 0.3
ERRORS = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.TunedCommError)
}


def test_public_names_are_listed_once_and_resolve() -> None:
    assert len(tunedcomm.__all__) == len(set(tunedcomm.__all__))
    assert {"all_reduce", *errors.__all__} <= set(tunedcomm.__all__) <= set(dir(tunedcomm))
    for name in tunedcomm.__all__:
        assert getattr(tunedcomm, name) is not None, name
    assert not hasattr(tunedcomm, "all_redoose")


def test_the_version_is_an_attribute() -> None:
    assert tunedcomm.__version__ == VERSION
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", VERSION)


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_every_error_is_documented_and_caught_as_a_builtin_one(name: str) -> None:
    assert errors.__all__ == sorted(ERRORS)
    assert ERRORS[name].__doc__
    builtin = (ImportError, ValueError, RuntimeError, TimeoutError)
    assert name == "TunedCommError" or issubclass(ERRORS[name], builtin)
    assert issubclass(ERRORS[name], errors.DatabaseError) is name.startswith("Database")


def run(code: str, **changes: str) -> tuple[list[str], str]:
    """Lines that a process without GPUs prints, and its stderr."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env.update(CUDA_VISIBLE_DEVICES="", **changes)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return done.stdout.splitlines(), done.stderr


@pytest.mark.slow
def test_import_is_cheap_beside_torch() -> None:
    code = "import time, torch; begin = time.process_time(); import tunedcomm; print(time.process_time() - begin)"
    # A busy machine can slow one start-up down: the median of some.
    assert statistics.median(float(run(code)[0][0]) for _ in range(3)) <= IMPORT_BUDGET_S


def test_import_loads_nothing_heavy_and_sets_nothing() -> None:
    heavy = {"torch", "triton", "sqlalchemy", "optuna", "alembic", "typer", "rich"}
    said, _ = run(f"import os, sys, tunedcomm; print({heavy} & {{*sys.modules}}, 'TRITON_INTERPRET' in os.environ)")
    assert said == ["set() False"]


# Interpreter or compiler

TELL = "from tunedcomm.kernels.common import sync; print(bool(sync.INTERPRET), os.environ.get('TRITON_INTERPRET'))"


@pytest.mark.parametrize("name", some(["all_reduce", "fusion_pass", "intercept"], 3))
def test_kernels_are_interpreted_without_a_gpu_whatever_is_touched_first(name: str) -> None:
    line = f"tunedcomm.{name}"
    said, warned = run("\n".join(["import os, tunedcomm, torch", line, TELL]))
    assert said == ["True 1"]
    assert "imported before" not in warned


def test_triton_before_tunedcomm_is_no_warning_and_what_the_user_set_stays() -> None:
    code = f"import os, triton, tunedcomm.kernels\n{TELL}"
    said, warned = run(code)
    assert said == ["False None"]
    assert "TRITON_INTERPRET" not in warned
    assert "TRITON_INTERPRET=1" in run(f"import logging; logging.basicConfig(level=logging.INFO)\n{code}")[1]
    assert run(f"import os, tunedcomm.kernels\n{TELL}", TRITON_INTERPRET="0")[0] == ["False 0"]
