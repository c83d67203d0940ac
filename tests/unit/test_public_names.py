from __future__ import annotations

import statistics
import subprocess
import sys

import pytest

import tunedcomm

IMPORT_BUDGET_S = 0.3
# A busy machine can slow one start-up down: the median of some, torch alone and with tunedcomm in turn.
REPEATS = 3


def test_public_names_are_listed_once_and_resolve() -> None:
    assert len(tunedcomm.__all__) == len(set(tunedcomm.__all__))
    assert "all_reduce" in tunedcomm.__all__
    for name in tunedcomm.__all__:
        assert getattr(tunedcomm, name) is not None, name


def test_every_error_is_public() -> None:
    from tunedcomm import errors

    assert set(errors.__all__) <= set(tunedcomm.__all__)


def test_dir_lists_the_public_names() -> None:
    assert set(tunedcomm.__all__) <= set(dir(tunedcomm))


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(tunedcomm, "all_redoose")


def _seconds(code: str) -> float:
    timed = f"import time; import torch; begin = time.process_time(); {code}; print(time.process_time() - begin)"
    done = subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.slow
def test_import_is_cheap_beside_torch() -> None:
    assert statistics.median(_seconds("import tunedcomm") for _ in range(REPEATS)) <= IMPORT_BUDGET_S


def test_import_loads_nothing_heavy() -> None:
    code = (
        "import sys, tunedcomm; "
        "print(sorted({'torch', 'triton', 'sqlalchemy', 'optuna', 'alembic', 'typer', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
