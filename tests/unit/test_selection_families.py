"""Tables of families: a choice from those that earlier choices left equals one from tables of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from db_samples import NUMERICS, SampleCatalog, problem, row, snapshot
from quick import sample
from test_shipped import SHIPPED, snapshot_of

from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.dispatch.dispatcher import decide
from tunedcomm.errors import InfeasibleError
from tunedcomm.selection.families import Sizes
from tunedcomm.selection.select import Decision, choose
from tunedcomm.selection.snapshot import Failure, Pinned, Snapshot
from tunedcomm.spec import NumericsPolicy, Problem, get_op
from tunedcomm.symm.layout import limits_for

H200 = next(path for path in SHIPPED if path.name == "h200-nvswitch18-x2.db")
H100 = next(path for path in SHIPPED if path.name == "h100-nvswitch18-x2.db")
POLICIES: tuple[NumericsPolicy, ...] = ("default", "ordered", "any")


def spoilt(stored: Snapshot) -> Snapshot:
    """The same with pins, failures, other sources, layers and searches, drawn at random."""
    draw = random.Random(5)
    rows = [
        replace(one, source_hash="old") if draw.random() < 0.05 else replace(one, final=draw.random() < 0.8)
        for one in stored.rows
    ]
    failed = {(one.problem.family, one.candidate): one for one in draw.sample(rows, 200) if not one.is_library}
    pinned = {one.problem: one for one in draw.sample(rows, 30)}
    return replace(
        stored,
        rows=tuple(replace(one, layer="site", layer_rank=1) if draw.random() < 0.3 else one for one in rows),
        pins=tuple(Pinned(problem=one.problem, candidate=one.candidate, reason="") for one in pinned.values()),
        failures=tuple(
            Failure(problem=one.problem, candidate=one.candidate, source_hash=one.source_hash, status="incorrect")
            for one in failed.values()
        ),
    )


def asked(stored: Snapshot, draw: random.Random) -> Problem:
    """A problem like one of the rows', of another size, and in half of the cases of another form."""
    like = draw.choice(stored.rows).problem
    spec = get_op(like.op)
    shape = tuple(max(1, int(extent * 2 ** draw.uniform(-2, 2)) // 8 * 8) for extent in like.shape[:1])
    like = replace(like, shape=(*shape, *like.shape[1:]))
    if draw.random() < 0.5:
        return like
    return replace(
        like,
        dtype=draw.choice(spec.dtypes),
        reduction=draw.choice(spec.reductions or ("",)),
        input_kind=draw.choice(("plain", "symmetric")),
        mode=draw.choice(("graph", "eager")),
        layout=draw.choice(spec.layouts),
        in_place=spec.in_place and draw.random() < 0.5,
    )


def answer(stored: Snapshot, wanted: Problem, policy: NumericsPolicy, max_sms: int | None) -> Decision | str:
    try:
        return decide(wanted, stored, limits_for(stored.environment, 2), policy=policy, max_sms=max_sms)
    except InfeasibleError as error:
        return str(error)


def stored_tables() -> Iterator[Snapshot]:
    yield snapshot_of(H200, 2)
    yield spoilt(snapshot_of(H200, 2))
    layers = [Layer("packaged", str(path)) for path in (H100, H200)]
    yield load_snapshot(snapshot_of(H100, 2).environment, 2, layers=layers, strict=True, borrow=["H200"])


def test_a_choice_does_not_depend_on_the_choices_before() -> None:
    for kept in stored_tables():
        draw, alone = random.Random(1), replace(kept)
        found = set()
        for _ in sample(range(300)):
            wanted, policy, max_sms = asked(kept, draw), draw.choice(POLICIES), draw.choice((None, None, 16))
            alone.arranged.clear()
            expected = answer(alone, wanted, policy, max_sms)
            assert answer(kept, wanted, policy, max_sms) == expected
            found.add(expected.source if isinstance(expected, Decision) else "none")
        assert {"interpolated", "library"} <= found
        assert len(kept.arranged) > 1, "tables are kept"


def test_nearest_sizes_come_first() -> None:
    sizes = Sizes({size: [] for size in (8, 1, 4, 2)})
    assert (list(sizes.below(4)), list(sizes.above(4))) == ([2, 1], [8])
    assert (list(sizes.below(3)), list(sizes.above(3))) == ([2, 1], [4, 8])
    assert (list(sizes.below(1)), list(sizes.above(9))) == ([], [])


def test_only_rows_nearby_are_checked() -> None:
    """Of 16 measured sizes, each with a candidate of its own, a new one asks of those beside it."""
    rows = [row("one_shot", 4.0, 1 << size, num_blocks=size) for size in range(10, 26)]
    seen: set[object] = set()

    def feasible(candidate: object) -> None:
        seen.add(candidate)

    stored = snapshot(rows)
    assert choose(stored, problem((1 << 17) + 2), SampleCatalog(feasible=feasible)).source == "interpolated"
    assert {dict(candidate.config)["num_blocks"] for candidate in seen} == {17, 18, 19}  # type: ignore[attr-defined]


def test_another_source_makes_other_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = snapshot([row("one_shot", 4.0), row("library", 10.0)])
    assert choose(stored, problem(), SampleCatalog()).candidate.variant == "one_shot"
    monkeypatch.setattr(SampleCatalog, "source_hash", lambda self, op, variant: f"new {variant in NUMERICS}")
    assert choose(stored, problem(), SampleCatalog()).candidate.variant == "library"
    monkeypatch.undo()
    assert choose(stored, problem(), SampleCatalog()).candidate.variant == "one_shot"
