"""The file for NCCL's example tuner plugin, read by the rules of that plugin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from db_samples import H200, candidate, problem, trial
from transfer_samples import store

from tunedcomm.db.store import Database
from tunedcomm.db.transfer import export_database

COLLECTIVES = {"broadcast", "reduce", "allgather", "reducescatter", "allreduce"}
ALGORITHMS = {"tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat"}
PROTOCOLS = {"ll", "ll128", "simple"}


@dataclass(frozen=True)
class Row:
    collective: str
    low: int
    high: int
    algorithm: str
    protocol: str
    channels: int
    nodes: int
    ranks: int
    pipe_ops: int
    registered: int

    def matches(self, collective: str, num_bytes: int, ranks: int) -> bool:
        return (
            self.collective == collective
            and self.low <= num_bytes <= self.high
            and self.nodes in (-1, 1)
            and self.ranks in (-1, ranks)
        )


def read_as_nccl_does(data: bytes) -> list[Row]:
    """Lines come in pieces of 255 bytes; comments and empty lines are skipped; 8 to 10 fields, blanks trimmed.

    The plugin takes a name that it does not know for a default; here that is an error.
    """
    rows = []
    for whole in data.splitlines(keepends=True):
        for start in range(0, len(whole), 255):
            piece = whole[start : start + 255]
            if piece[:1] in (b"#", b"\n"):
                continue
            fields = [field.strip(b" \t").decode("ascii") for field in piece.rstrip(b"\n").split(b",") if field]
            assert 8 <= len(fields) <= 10, piece
            numbers = [int(field) for field in fields[5:]] + [-1] * (10 - len(fields))
            assert fields[0] in COLLECTIVES, piece
            assert fields[3] in ALGORITHMS, piece
            assert fields[4] in PROTOCOLS, piece
            rows.append(Row(fields[0], int(fields[1]), int(fields[2]), fields[3], fields[4], *numbers))
    return rows


def chosen(rows: list[Row], num_bytes: int, ranks: int = 4) -> tuple[str, str, int] | None:
    """What the plugin takes: the first row that matches; here no other may."""
    found = [row for row in rows if row.matches("allreduce", num_bytes, ranks)]
    assert len(found) <= 1
    return (found[0].algorithm, found[0].protocol, found[0].channels) if found else None


def exported(path: Path, out: Path, **options: Any) -> list[Row]:
    export_database([path], out, form="nccl-csv", force=True, **options)
    return read_as_nccl_does(out.read_bytes())


def winners(**sizes: str) -> list[Any]:
    """Finals by which the named variant wins at a size, given as `b1024="lamport"`."""
    found = []
    for name, variant in sizes.items():
        asked = problem(int(name[1:]))
        found.append(trial("library", 10.0, problem=asked, final=True))
        latency = 12.0 if variant == "library" else 5.0
        winner = "one_shot" if variant == "library" else variant
        blocks = {"config": {"num_blocks": int(name[1:]) // 1024}}
        found.append(trial(winner, latency, problem=asked, final=True, baseline_p50_us=10.0, **blocks))
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    sizes = winners(
        b1024="lamport",
        b4096="one_shot",
        b16384="two_shot_lamport",
        b65536="two_shot",
        b262144="library",
        b524288="new",
    )
    return store(tmp_path / "source.db", sizes)


def test_names_what_works_most_like_the_winner(source: Path, tmp_path: Path) -> None:
    rows = exported(source, tmp_path / "nccl.csv")
    told = {size: chosen(rows, size) for size in (1024, 4096, 16384, 65536, 262144, 524288)}
    assert told == {
        1024: ("tree", "ll", 1),
        4096: ("tree", "ll", 4),
        16384: ("ring", "ll128", 16),
        65536: ("ring", "simple", 64),
        262144: None,  # NCCL's own choice
        524288: None,  # nothing in NCCL is like it
    }
    text = (tmp_path / "nccl.csv").read_text()
    assert "NCCL's own choice is best" in text
    assert "NCCL has nothing like new" in text
    assert "Not measured" in text


def test_pins_count(source: Path, tmp_path: Path) -> None:
    with Database.open(source) as database:
        database.pin(problem(1024), candidate("two_shot"), environment=H200, reason="known good")
    assert chosen(exported(source, tmp_path / "nccl.csv"), 1024) == ("ring", "simple", 4)
