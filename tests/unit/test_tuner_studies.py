"""Where claims are kept: a journal that begins anew, torn lines, tables on a server, places that cannot be written."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from ledger_bodies import FIRST, SECOND, claim, flying, open_as
from postgres import PostgresServer
from sqlalchemy import make_url

from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseAccessError, DatabaseAwayError, DatabaseFullError, DatabaseVersionError
from tunedcomm.tuner.ledger import OptunaLedger
from tunedcomm.tuner.studies import journal_path

pytestmark = pytest.mark.usefixtures("pretended_op")


def test_tables_are_made_by_many_at_once_and_apart_from_ours(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    ledgers: list[OptunaLedger] = []
    threads = [threading.Thread(target=lambda i=i: ledgers.append(open_as(postgres_url, str(i)))) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ledgers) == 6
    with Database.open(postgres_url, create=True) as database:
        assert database.stats()["trials"] == 0
    found = postgres_server.execute(
        "SELECT table_schema, count(*) FROM information_schema.tables WHERE table_schema IN ('public', 'optuna') "
        "GROUP BY 1 ORDER BY 1",
        database=str(make_url(postgres_url).database),
    )
    assert [name for name, _ in found] == ["optuna", "public"]
    assert found[1][1] == 7
    for ledger in ledgers:
        ledger.close()


def test_a_user_who_may_not_make_the_schema_is_told_what_to_do(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    name = str(make_url(postgres_url).database)
    postgres_server.execute("CREATE ROLE tuner LOGIN")
    url = make_url(postgres_url).set(username="tuner").render_as_string(hide_password=False)
    try:
        with pytest.raises(DatabaseAccessError, match=r"may not create it; as the owner .* CREATE SCHEMA .* TO tuner"):
            open_as(url, "a")
        postgres_server.execute("CREATE SCHEMA optuna", database=name)
        with pytest.raises(DatabaseAccessError, match="belongs to another user"):
            open_as(url, "a")
        postgres_server.execute("GRANT ALL ON SCHEMA optuna TO tuner", database=name)
        ledger = open_as(url, "a")
        assert claim(ledger) is not None
        ledger.close()
    finally:
        postgres_server.execute("DROP OWNED BY tuner CASCADE", database=name)
        postgres_server.execute("DROP ROLE tuner")


def test_tables_of_another_optuna_are_named(postgres_server: PostgresServer, postgres_url: str) -> None:
    open_as(postgres_url, "a").close()
    name = str(make_url(postgres_url).database)
    postgres_server.execute("UPDATE optuna.alembic_version SET version_num = 'v9.9.9.z'", database=name)
    with pytest.raises(DatabaseVersionError, match=r"another version of Optuna .*DROP SCHEMA optuna CASCADE"):
        open_as(postgres_url, "a")


def test_a_journal_begins_anew_when_nobody_uses_it(tmp_path: Path) -> None:
    path = tmp_path / "tuned.db"
    one = open_as(str(path), None)
    one.tell(claim(one), 1.0)
    two = open_as(str(path), None)
    assert claim(two) is None
    one.close()
    three = open_as(str(path), None)
    assert claim(three) is None
    two.close()
    three.close()
    size = journal_path(path).stat().st_size
    four = open_as(str(path), None)
    assert journal_path(path).stat().st_size < size
    assert claim(four) is not None
    four.close()


@pytest.mark.parametrize("torn", [b'{"op_code": 4, "wor', b"x" * 10_000])
def test_a_line_that_was_cut_short_does_no_harm(tmp_path: Path, torn: bytes) -> None:
    """A writer was killed, or the disk was full, in the middle of a line."""
    path = tmp_path / "tuned.db"
    one, two = open_as(str(path), None), open_as(str(path), None)
    assert claim(one) is not None
    with journal_path(path).open("ab") as file:
        file.write(torn)
    assert flying(two) == {FIRST}
    assert claim(two, SECOND) is not None
    assert flying(one) == {SECOND}
    assert all(json.loads(line) for line in journal_path(path).read_text().splitlines())
    one.close()
    two.close()


def test_no_space_for_the_journal_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = open_as(str(tmp_path / "tuned.db"), None)
    backend = ledger._studies.storage._backend  # type: ignore[attr-defined]
    monkeypatch.setattr(backend, "_path", Path("/dev/full"))
    with pytest.raises(DatabaseFullError, match=r"no space is left .*free some space"):
        claim(ledger)
    monkeypatch.undo()
    ledger.close()


def test_a_database_in_memory_needs_no_ledger() -> None:
    with pytest.raises(ValueError, match="shared with nobody"):
        open_as("sqlite://", None)


def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatabaseAccessError, match=r"journal beside .* cannot be used"):
        open_as(str(tmp_path / "absent" / "tuned.db"), None)


def test_a_server_that_is_away_at_the_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatabaseAwayError, match="does not answer"):
        open_as(f"postgresql+psycopg://me@/tuned?host={tmp_path}", None)
