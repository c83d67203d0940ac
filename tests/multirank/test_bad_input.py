"""Bad input gives the right result or a named error that says what to do: never a crash, never a hang.

All cases of a body run in the same few processes, one after another, and each is reported as a test of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import Case, logged, report, run_cases
from harness import run_ranks

import tunedcomm
from tunedcomm.dispatch.communicator import get_communicator


def refused(text: str) -> Any:
    return pytest.raises(tunedcomm.UnsupportedInputError, match=text)


def still_works(rank: int) -> None:
    """The refusal left the group as it was."""
    assert torch.equal(tunedcomm.all_reduce(torch.full((9,), rank + 1.0)), torch.full((9,), 3.0))


def integers(rank: int) -> None:
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.int64):
        x = torch.arange(5, dtype=dtype) + rank
        for op, wanted in (("sum", 2 * torch.arange(5) + 1), ("max", torch.arange(5) + 1), ("min", torch.arange(5))):
            out = tunedcomm.all_reduce(x, op=op)
            assert out.dtype == dtype
            assert torch.equal(out, wanted.to(dtype)), (dtype, op)
        with refused("would round; use op='sum' and divide"):
            tunedcomm.all_reduce(x, op="avg")
    for dtype in (torch.bool, torch.int16, torch.float8_e5m2):
        with refused(rf"does not take {dtype}; allowed: bfloat16, .*int32"):
            tunedcomm.all_reduce(torch.zeros(4, dtype=dtype))


def complex_numbers(rank: int) -> None:
    x = torch.full((3,), 1 + 2j) * (rank + 1)
    with refused(r"does not take torch\.complex64; pass torch\.view_as_real\(x\)"):
        tunedcomm.all_reduce(x)
    tunedcomm.all_reduce_(torch.view_as_real(x))
    assert torch.equal(x, torch.full((3,), 3 + 6j))


def lazy_negation(rank: int) -> None:
    x = torch.full((3,), 1 + 2j).conj().imag * 1
    y = torch._neg_view(torch.full((3,), rank + 1.0))
    assert y.is_neg()
    assert torch.equal(tunedcomm.all_reduce(y, op="max"), torch.full((3,), -1.0))
    assert torch.equal(tunedcomm.all_reduce(x), torch.full((3,), -4.0))
    with tunedcomm.force("all_reduce", "lamport"):
        assert torch.equal(tunedcomm.all_reduce(y), torch.full((3,), -3.0))


def sparse(rank: int) -> None:
    dense = torch.eye(4)
    tunedcomm.all_reduce(dense)  # a plan for this number of elements exists
    tunedcomm.symmetric_empty(4)  # and the group asks where tensors lie
    for x in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_mkldnn()):
        with refused(r"wants a dense tensor, got layout torch\._?(sparse|mkldnn).*; call \.to_dense\(\) first"):
            tunedcomm.all_reduce(x)
        with refused(r"out is a tensor of layout torch\._?(sparse|mkldnn)"):
            tunedcomm.all_reduce(dense, out=x)
        assert torch.equal(tunedcomm.all_reduce(x.to_dense()), 2 * dense)


def requires_grad(rank: int) -> None:
    x = torch.full((6,), rank + 1.0, requires_grad=True)
    for tensor in (x, x * 2):
        with refused(r"op='max' is not differentiable; call it under torch\.no_grad\(\) or pass x\.detach\(\)"):
            tunedcomm.all_reduce(tensor, op="max")
        with refused("into a given tensor is not differentiable"):
            tunedcomm.all_reduce_(tensor)
        assert tunedcomm.all_reduce(tensor).requires_grad
    with refused("not differentiable"):
        tunedcomm.all_reduce(x.detach(), out=torch.zeros(6, requires_grad=True))
    assert torch.equal(tunedcomm.all_reduce(x.detach()), torch.full((6,), 3.0))
    with torch.no_grad():
        out = tunedcomm.all_reduce(x)
        assert not out.requires_grad
        assert torch.equal(out, torch.full((6,), 3.0))
        assert tunedcomm.all_reduce_(x) is x
    assert x.requires_grad
    assert torch.equal(x.detach(), torch.full((6,), 3.0))


def other_device(rank: int) -> None:
    with refused("serves cuda and cpu tensors, not meta"):
        tunedcomm.all_reduce(torch.ones(4, device="meta"))
    with refused(r"out has shape \(4,\), torch\.float32, meta; it must match x: .* cpu"):
        tunedcomm.all_reduce(torch.ones(4), out=torch.ones(4, device="meta"))
    with pytest.raises(tunedcomm.GroupError, match="has nothing for meta tensors"):
        tunedcomm.symmetric_empty(4, device="meta")


def non_dense_strides(rank: int) -> None:
    total = torch.arange(24.0).view(4, 6) * 3
    base = torch.arange(24.0).view(4, 6) * (rank + 1)
    for view in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:, 1:4], lambda t: t[2], lambda t: t[:, 3]):
        x = view(base)
        out = tunedcomm.all_reduce(x)
        assert out.is_contiguous()
        assert torch.equal(out, view(total))
        held = base.clone()
        assert tunedcomm.all_reduce_(view(held)).shape == x.shape
        wanted = base.clone()
        view(wanted).copy_(view(total))
        assert torch.equal(held, wanted), "in place writes the view and nothing beside it"
    assert torch.equal(tunedcomm.all_reduce(base[0, :1].expand(3, 5)), torch.zeros(3, 5))
    with refused("out is an expanded tensor: several of its elements share one place"):
        tunedcomm.all_reduce_(base[0, :1].expand(5))


def zero_elements(rank: int) -> None:
    for shape in ((0,), (3, 0, 2)):
        x = torch.empty(shape, dtype=torch.bfloat16)
        out = tunedcomm.all_reduce(x)
        assert out.shape == shape
        assert out is not x
        assert tunedcomm.all_reduce_(x) is x
        with refused("does not take"):
            tunedcomm.all_reduce(torch.empty(shape, dtype=torch.bool))
    assert tunedcomm.symmetric_empty((4, 0)).shape == (4, 0)


def single_rank(rank: int) -> None:
    alone = [dist.new_group([member]) for member in range(2)][rank]
    x = torch.arange(6.0).view(2, 3).t() + rank
    for op in ("sum", "avg", "max", "min"):
        out = tunedcomm.all_reduce(x, op=op, group=alone)
        assert out.data_ptr() != x.data_ptr()
        assert out.is_contiguous()
        assert torch.equal(out, x)
    assert tunedcomm.all_reduce_(x, group=alone) is x
    given = torch.zeros(3, 4)[:, ::2]
    assert tunedcomm.all_reduce(x, group=alone, out=given) is given
    assert torch.equal(given, x)
    with refused("does not take"):
        tunedcomm.all_reduce(x.bool(), group=alone)
    with pytest.raises(tunedcomm.WorkspaceError, match="use an ordinary tensor"):
        tunedcomm.symmetric_empty(4, group=alone)


def device_without_backend(rank: int) -> None:
    only_cuda = dist.new_group(backend="cuda:gloo")
    for _ in range(2):
        with pytest.raises(
            tunedcomm.GroupError, match="has nothing for cpu tensors; move the tensor, or make the group"
        ):
            tunedcomm.all_reduce(torch.ones(4), group=only_cuda)


def not_a_member(rank: int) -> None:
    others = [dist.new_group([member]) for member in range(2)][1 - rank]
    with pytest.raises(tunedcomm.GroupError, match=rf"rank {rank} is not a member of the group .*new_group"):
        tunedcomm.all_reduce(torch.ones(4), group=others)
    gone = dist.new_group()
    dist.destroy_process_group(gone)
    for group in (gone, "world"):
        with pytest.raises(tunedcomm.GroupError, match=r"not a member of the group .* or the group was destroyed"):
            tunedcomm.all_reduce(torch.ones(4), group=group)


def options(rank: int) -> None:
    x = torch.ones(4)
    for shape in ((4,), (0,)):
        with refused("op='mean' is no reduction; allowed: sum, avg, max, min"):
            tunedcomm.all_reduce(torch.ones(shape), op="mean")
        with refused("numerics='exact' is not a policy; allowed: default, ordered, any"):
            tunedcomm.all_reduce(torch.ones(shape), numerics="exact")
        for wrong in (-1, True, 2.0, "4", {}):
            with refused(f"max_sms={wrong!r} is no number of SMs; pass an integer from 0 on, or None"):
                tunedcomm.all_reduce(torch.ones(shape), max_sms=wrong)
    problem = tunedcomm.Problem("all_reduce", (4,), "float32", 2)
    with refused("numerics='exact' is not a policy"):
        tunedcomm.explain(get_communicator(), problem, policy="exact")
    with refused("explain takes a communicator and a Problem, not Tensor"):
        tunedcomm.explain("all_reduce", x)  # type: ignore[arg-type]
    with refused("all_to_all has no reduction 'max', only ''"):
        tunedcomm.explain(get_communicator(), tunedcomm.Problem("all_to_all", (4,), "float32", 2, "max"))
    moved = tunedcomm.Problem("all_to_all", (4,), "float32", 2)  # with a reduction by default, which it has none of
    told = [tunedcomm.explain(get_communicator(), one) for one in (moved, dataclasses.replace(moved, reduction=""))]
    assert told[0] == told[1]
    with refused("the problem is one of 4 ranks, the communicator has 2"):
        tunedcomm.explain(get_communicator(), tunedcomm.Problem("all_reduce", (4,), "float32", 4))
    with refused("out is a list; it must be a dense tensor"):
        tunedcomm.all_reduce(x, out=[0.0] * 4)


def out_that_does_not_fit(rank: int) -> None:
    x = torch.arange(8.0)
    tunedcomm.all_reduce(x)
    for out in (torch.ones(9), torch.ones(8, 1), torch.ones(8, dtype=torch.float64)):
        with refused(r"out has shape .*; it must match x: \(8,\), torch\.float32, cpu"):
            tunedcomm.all_reduce(x, out=out)
    whole = torch.arange(12.0)
    for out in (whole[1:9], whole[4:], whole[:8].flip(0)[:0]):
        with refused(r"out overlaps x without being x; pass out=x|it must match x"):
            tunedcomm.all_reduce(whole[:8], out=out)
    square = torch.arange(9.0).view(3, 3)
    with refused("out overlaps x without being x"):
        tunedcomm.all_reduce(square, out=square.t())


def arrays_of_numpy(rank: int) -> None:
    array, matrix, x, square = np.ones(8, np.float32), np.ones((8, 8), np.float32), torch.ones(8), torch.ones(8, 8)
    serving = tunedcomm.ServingAllReduce()
    calls: dict[str, list[Callable[[], Any]]] = {
        "x": [
            lambda: tunedcomm.all_reduce(array), lambda: tunedcomm.all_reduce_(array),
            lambda: tunedcomm.all_gather(array), lambda: tunedcomm.reduce_scatter(array),
            lambda: tunedcomm.all_to_all(array), lambda: tunedcomm.all_to_all_v(array, [4, 4], [4, 4]),
            lambda: tunedcomm.all_reduce_bias(array, x), lambda: tunedcomm.all_reduce_rms_norm(array, x),
            lambda: tunedcomm.register_symmetric(array), lambda: serving.should_use(array),
            lambda: serving.all_reduce(array), lambda: serving.custom_all_reduce(array),
        ],
        "bias": [lambda: tunedcomm.all_reduce_bias(x, array)],
        "weight": [lambda: tunedcomm.all_reduce_rms_norm(x, array)],
        "a": [lambda: tunedcomm.ag_gemm(matrix, square), lambda: tunedcomm.gemm_rs(matrix, square)],
        "b": [lambda: tunedcomm.gemm_ar(square, matrix)],
    }  # fmt: skip
    for name, several in calls.items():
        for call in several:
            with pytest.raises(tunedcomm.UnsupportedInputError, match=rf"torch\.from_numpy\({name}\)"):
                call()


def work_objects(rank: int) -> None:
    """Before a fast call is there, and where one would serve."""
    x = torch.ones(8)
    for _ in range(3):
        for call in (tunedcomm.all_reduce, tunedcomm.all_reduce_, tunedcomm.all_gather, tunedcomm.reduce_scatter,
                     tunedcomm.all_to_all):  # fmt: skip
            with pytest.raises(tunedcomm.UnsupportedInputError, match=r"tunedcomm\.intercept\(\)"):
                call(x, async_op=True)
            assert isinstance(call(x.clone(), async_op=False), torch.Tensor)
        with pytest.raises(tunedcomm.UnsupportedInputError, match=r"tunedcomm\.intercept\(\)"):
            tunedcomm.all_to_all_v(x, [4, 4], [4, 4], async_op=True)


INPUT_CASES: dict[str, Case] = {
    "arrays of numpy": arrays_of_numpy,
    "work objects": work_objects,
    "integer dtype": integers,
    "complex": complex_numbers,
    "lazy negation": lazy_negation,
    "sparse": sparse,
    "requires_grad": requires_grad,
    "tensor of another device": other_device,
    "non-dense strides": non_dense_strides,
    "zero elements": zero_elements,
    "world_size 1": single_rank,
    "CPU tensor with a CUDA group": device_without_backend,
    "group of others": not_a_member,
    "unknown options": options,
    "out that does not fit": out_that_does_not_fit,
    "the group works after all that": still_works,
}


def input_body(rank: int, world_size: int) -> dict[str, str]:
    return run_cases(INPUT_CASES, rank)


@pytest.fixture(scope="module")
def input_outcomes() -> list[dict[str, str]]:
    return run_ranks(2, input_body)


@pytest.mark.parametrize("name", INPUT_CASES)
def test_input(input_outcomes: list[dict[str, str]], name: str) -> None:
    report(input_outcomes, name)


def test_not_initialised() -> None:
    with pytest.raises(tunedcomm.NotInitializedError, match=r"call torch\.distributed\.init_process_group\(\) first"):
        tunedcomm.all_reduce(torch.ones(4))
    with pytest.raises(tunedcomm.NotInitializedError, match="init_process_group"):
        tunedcomm.symmetric_empty(4)
    with pytest.raises(RuntimeError, match="init_process_group"):
        tunedcomm.get_communicator()


# Databases: only rank 0 reads any, so it gets the bad one; the others have paths of their own.


@contextlib.contextmanager
def ordinary_user(folder: Path) -> Iterator[None]:
    """Without the super-user's right to read everything."""
    is_root = os.geteuid() == 0
    if is_root:
        folder.chmod(0o755)
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def call_with(rank: int, target: Path, warning: str) -> None:
    """Rank 0 has this database: one warning there, none elsewhere, and right sums through the library."""
    content = None
    if rank == 0:  # which alone knows when the file is whole
        with contextlib.suppress(OSError):
            content = target.read_bytes()
    os.environ["TUNEDCOMM_DB"] = str(target if rank == 0 else target.parent / f"own{rank}.db")
    with logged() as warnings:
        for _ in range(2):
            tunedcomm.release_communicators()
            for numel in (5, 4096):
                x = torch.full((numel,), rank + 1.0, dtype=torch.bfloat16)
                assert torch.equal(tunedcomm.all_reduce(x), torch.full_like(x, 3.0))
            problem = tunedcomm.Problem("all_reduce", (4096,), "bfloat16", 2, mode="eager")
            decision = tunedcomm.explain(get_communicator(), problem)
            assert decision.source == "library", decision
    assert len(warnings) == (2 if rank == 0 else 0), warnings
    if rank == 0:
        assert str(target) in warnings[0]
        assert warning in warnings[0], warnings[0]
        assert "ranks of a group see different tuning databases" in warnings[1]
    if content is not None:
        assert target.read_bytes() == content
    assert not (target.parent / f"own{rank}.db").exists(), "dispatch makes no database"


def a_directory(folder: Path, rank: int) -> None:
    call_with(rank, folder, "is a directory or special file")


def unreadable(folder: Path, rank: int) -> None:
    file = folder / "unreadable.db"
    if rank == 0:
        file.write_bytes(b"")
        file.chmod(0)
    dist.barrier()
    with ordinary_user(folder) if rank == 0 else contextlib.nullcontext():
        call_with(rank, file, "Permission denied; check the permissions")


def corrupt(folder: Path, rank: int) -> None:
    file = folder / "corrupt.db"
    if rank == 0:
        file.write_bytes(b"SQLite format 3\0" + b"\x55" * 9000)
    call_with(rank, file, "is damaged")


def not_a_database(folder: Path, rank: int) -> None:
    file = folder / "table.csv"
    if rank == 0:
        file.write_bytes(b"bytes,latency_us\n4096,2.9\n" * 300)
    call_with(rank, file, "is not a SQLite database")


def newer(folder: Path, rank: int) -> None:
    from tunedcomm.db.store import Database

    file = folder / "newer.db"
    if rank == 0:
        Database.open(file, create=True).close()
        with sqlite3.connect(file) as connection:
            connection.execute("UPDATE tunedcomm_version SET version_num = '0999'")
        connection.close()
    call_with(rank, file, "written by a newer tunedcomm")


def missing(folder: Path, rank: int) -> None:
    """A user database that was never made is no fault: not even a warning."""
    os.environ["TUNEDCOMM_DB"] = str(folder / "none" / f"{rank}.db")
    with logged() as warnings:
        tunedcomm.release_communicators()
        still_works(rank)
    assert warnings == []
    assert not (folder / "none").exists()


def unreadable_site_directory(folder: Path, rank: int) -> None:
    """Not a fault of a database but of reading their list: every rank hears of it or none does; nobody waits."""
    locked = folder / "locked"
    if rank == 0:
        (locked / "site").mkdir(parents=True)
        locked.chmod(0)
        os.environ["TUNEDCOMM_DB_PATH"] = str(locked / "site")
    tunedcomm.release_communicators()
    with ordinary_user(folder) if rank == 0 else contextlib.nullcontext():
        try:
            still_works(rank)
            answer = "served"
        except (tunedcomm.AgreementError, OSError) as error:
            answer = "refused"
            assert "Permission denied" in str(error)
    os.environ.pop("TUNEDCOMM_DB_PATH", None)
    answers: list[Any] = [None] * 2
    dist.all_gather_object(answers, answer)
    assert answers[0] == answers[1]


DATABASE_CASES: dict[str, Callable[[Path, int], None]] = {
    "a directory": a_directory,
    "unreadable": unreadable,
    "corrupt": corrupt,
    "not a database": not_a_database,
    "written by a newer version": newer,
    "missing": missing,
    "unreadable site directory": unreadable_site_directory,
}


def database_body(rank: int, world_size: int, folder: str) -> dict[str, str]:
    cases = {}
    for number, (name, case) in enumerate(DATABASE_CASES.items()):
        own = Path(folder, str(number))
        own.mkdir(exist_ok=True)
        cases[name] = lambda rank, case=case, own=own: case(own, rank)
    return run_cases(cases, rank)


@pytest.fixture(scope="module")
def database_outcomes() -> Iterator[list[dict[str, str]]]:
    # Not tmp_path: an ordinary user may not enter the super-user's.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield run_ranks(2, database_body, folder)


@pytest.mark.parametrize("name", DATABASE_CASES)
def test_database(database_outcomes: list[dict[str, str]], name: str) -> None:
    report(database_outcomes, name)
