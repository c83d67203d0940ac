"""Tables of families: a choice from those that earlier choices left equals one from tables of its own."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from db_samples import NUMERICS, SampleCatalog, problem, row, snapshot
from quick import sample
from test_shipped import SHIPPED, snapshot_of

from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.dispatch.decide import decide
from tunedcomm.errors import InfeasibleError
from tunedcomm.kernels.common import launch
from tunedcomm.kernels.common.variant import LibraryVariant
from tunedcomm.selection.families import Rows, Sizes
from tunedcomm.selection.select import Decision, choose
from tunedcomm.selection.snapshot import Failure, Pinned, Snapshot
from tunedcomm.spec import NumericsPolicy, Problem, find_variant, get_op
from tunedcomm.symm.layout import limits_for

H200 = next(path for path in SHIPPED if path.name == "h200-nvswitch18-x2.db")
H100 = next(path for path in SHIPPED if path.name == "h100-nvswitch18-x2.db")
MOST_FORMS = 4
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


def test_a_choice_without_its_reasons_is_the_same() -> None:
    """In both modes, one after the other, as calls ask: the second goes by what the first found to be feasible."""
    raised = 0
    product = Problem("gemm_rs", (168, 8192, 14336), "bfloat16", 2, "sum", layout="nk")
    for kept in stored_tables():
        draw, limits = random.Random(2), limits_for(kept.environment, 2)
        questions = [
            (asked(kept, draw), draw.choice(POLICIES), draw.choice((None, None, 16))) for _ in sample(range(60))
        ]
        for wanted, policy, max_sms in [*questions, (product, "ordered", 16)]:  # nothing serves the last one
            both = [replace(wanted, mode="eager"), replace(wanted, mode="graph")]
            told = [answer(kept, like, policy, max_sms) for like in both for _ in range(2)][1::2]
            for like, expected in zip(both, told, strict=True):
                try:
                    found = decide(like, kept, limits, policy=policy, max_sms=max_sms, with_reasons=False)
                except InfeasibleError as error:
                    raised += 1
                    assert str(error) == expected
                else:
                    assert isinstance(expected, Decision)
                    assert replace(found, why="", passed_over=()) == replace(expected, why="", passed_over=())
    assert raised >= 2


def test_nearest_sizes_come_first() -> None:
    sizes = Sizes({size: Rows() for size in (8, 1, 4, 2)})
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


@pytest.mark.parametrize("path", [H200, H100], ids=lambda path: path.name)
def test_what_can_run_in_graphs_can_run_in_eager_calls(path: Path) -> None:
    """So a size is checked once for both; a variant of somebody else's is asked for each."""
    stored, draw, seen = snapshot_of(path, 2), random.Random(3), set()
    for one in draw.sample(stored.rows, 150):
        variant, limits = find_variant(one.problem.op, one.candidate.variant), limits_for(stored.environment, 2)
        if variant is None or variant.is_library:
            continue
        wanted = replace(asked(stored, draw), op=one.problem.op, shape=one.problem.shape)
        for like in (wanted, one.problem):
            eager, graph = (replace(like, mode=mode) for mode in ("eager", "graph"))
            reasons = [variant.infeasible_reason(each, one.candidate.config_dict, limits) for each in (eager, graph)]
            assert reasons[0] == reasons[1]
            seen.add(reasons[0] is None)
        assert variant.same_in_both_modes
    assert seen == {True, False}

    class Plugin(LibraryVariant):
        op = "all_reduce"

    assert not Plugin.same_in_both_modes


def test_a_config_has_few_forms_and_a_known_one_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever sizes come: alignment and tail are all that binaries differ in."""
    compiled: list[object] = []
    monkeypatch.setattr("triton.compiler.ASTSource", lambda **source: source)
    monkeypatch.setattr("triton.compile", lambda source, **options: compiled.append(source) or source)
    monkeypatch.setattr(launch, "_settle_key", lambda function: None)
    stored, draw = snapshot_of(H100, 2), random.Random(4)
    limits, most = limits_for(stored.environment, 2), 0
    of_candidate = {one.candidate: one.problem for one in stored.rows if not one.is_library}
    launch.compile_request.cache_clear()
    for candidate, measured in draw.sample(list(of_candidate.items()), 60):
        if (variant := find_variant(candidate.op, candidate.variant)) is None:
            continue
        spec, sizes, forms = get_op(measured.op), [], Counter[object]()
        for dtype in [measured.dtype] if len(measured.shape) > 1 else ["uint8", measured.dtype]:
            for _ in range(20):
                extent = max(1, int(measured.shape[0] * 2 ** draw.uniform(-2, 2)))
                like = replace(measured, dtype=dtype, shape=(extent, *measured.shape[1:]))
                with suppress(ValueError):
                    spec.check(like)
                    sizes += [like] * (variant.infeasible_reason(like, candidate.config_dict, limits) is None)
        for again in (False, True):
            compiled.clear()
            for like in sizes:
                for request in variant.compile_requests(like, candidate.config_dict):
                    before = len(compiled)
                    launch.compile_request(request, f"{candidate} {like.dtype}")
                    forms[request.function, like.dtype] += len(compiled) - before
            assert not (again and compiled)
        most = max([most, *forms.values()])
        assert max(forms.values(), default=0) <= MOST_FORMS, (candidate, forms)
    assert most > 1
    launch.compile_request.cache_clear()


def test_another_source_makes_other_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = snapshot([row("one_shot", 4.0), row("library", 10.0)])
    assert choose(stored, problem(), SampleCatalog()).candidate.variant == "one_shot"
    monkeypatch.setattr(SampleCatalog, "source_hash", lambda self, op, variant: f"new {variant in NUMERICS}")
    assert choose(stored, problem(), SampleCatalog()).candidate.variant == "library"
    monkeypatch.undo()
    assert choose(stored, problem(), SampleCatalog()).candidate.variant == "one_shot"
