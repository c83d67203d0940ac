"""Bad input gives the right result or a named error that says what to do: never a crash, never a hang."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import Ranks, logged, replaced, settings

import tunedcomm
from tunedcomm.db.store import Database
from tunedcomm.db.targets import _warned as warned
from tunedcomm.dispatch import communicator as communicator_module
from tunedcomm.dispatch.groups import get_communicator

RANKS = Ranks()


def refused(text: str) -> Any:
    return pytest.raises(tunedcomm.UnsupportedInputError, match=text)


def still_works(rank: int) -> None:
    """The refusals left the group as it was."""
    assert torch.equal(tunedcomm.all_reduce(torch.full((9,), rank + 1.0)), torch.full((9,), 3.0))


def test_integer_dtypes(rank: int) -> None:
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.int64):
        x = torch.arange(5, dtype=dtype) + rank
        for op, wanted in (("sum", 2 * torch.arange(5) + 1), ("max", torch.arange(5) + 1), ("min", torch.arange(5))):
            out = tunedcomm.all_reduce(x, op=op)
            assert out.dtype == dtype
            assert torch.equal(out, wanted.to(dtype)), (dtype, op)
        with refused("would round"):
            tunedcomm.all_reduce(x, op="avg")
    for dtype in (torch.bool, torch.int16, torch.float8_e5m2):
        with refused(f"does not take {dtype}"):
            tunedcomm.all_reduce(torch.zeros(4, dtype=dtype))
    with refused(r"pass x\.to\(torch\.uint8\)"):
        tunedcomm.all_reduce(torch.zeros(4, dtype=torch.bool))


def test_one_byte_formats_are_moved(rank: int) -> None:
    """Also those without an arithmetic of their own, and pairs of 4-bit numbers."""
    names = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")
    for dtype in (getattr(torch, name) for name in names):
        x = torch.arange(64, dtype=torch.uint8).view(4, 16) + 64 * rank
        expected = torch.cat([torch.arange(64, dtype=torch.uint8).view(4, 16)[2 * rank :][:2] + 64 * r for r in (0, 1)])
        for found in (tunedcomm.all_to_all(x.view(dtype)), tunedcomm.all_to_all_v(x.view(dtype), [2, 2], [2, 2])):
            assert found.dtype == dtype
            assert torch.equal(found.view(torch.uint8), expected), dtype
        bounded = tunedcomm.all_to_all_v(x.view(dtype), [2, 2], [2, 2], max_count=2)
        assert torch.equal(bounded.view(torch.uint8), expected), dtype


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors(rank: int, layout: torch.layout) -> None:
    x = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    calls: list[Callable[[], object]] = [
        lambda: tunedcomm.all_reduce(x),
        lambda: tunedcomm.all_reduce(torch.ones(5), out=x),
        lambda: tunedcomm.all_gather(x),
        lambda: tunedcomm.all_to_all_v(x, [1, 1], [1, 1]),
        lambda: tunedcomm.all_reduce_rms_norm(x, torch.ones(5)),
    ]
    for call in calls:
        with refused("nested"):
            call()
    with tunedcomm.intercept() as seen, contextlib.suppress(RuntimeError, ValueError):
        dist.all_reduce(x)  # gloo's own error
    assert seen.num_served == 0
    still_works(rank)


def test_groups_that_are_none(rank: int) -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    a, b = torch.ones(4, 8), torch.ones(8, 4)
    calls: list[Callable[[Any], object]] = [
        lambda group: tunedcomm.all_reduce(a, group=group),
        lambda group: tunedcomm.all_gather(a, group=group),
        lambda group: tunedcomm.all_to_all_v(a, [2, 2], [2, 2], group=group),
        lambda group: tunedcomm.all_reduce_rms_norm(a, torch.ones(8), group=group),
        lambda group: tunedcomm.gemm_ar(a, b, group=group),
        lambda group: tunedcomm.ag_gemm(a, b, group=group),
        get_communicator,
        tunedcomm.install,
    ]
    for group, advice in (([0, 1], "new_group"), ((0, 1), "new_group"), (mesh, "get_group"), ("tp", "get_group")):
        for call in calls:
            with pytest.raises(tunedcomm.GroupError, match=advice):
                call(group)
    assert torch.equal(tunedcomm.all_reduce(a, group=mesh.get_group("tp")), torch.full((4, 8), 2.0))


def fake_body(folder: str) -> None:
    """In a process of its own: a dry run of rank 0 of 4."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    x = torch.ones(8)
    for call in (lambda: tunedcomm.all_reduce(x), tunedcomm.get_communicator):
        with pytest.raises(tunedcomm.GroupError, match="'fake'"):
            call()
    with tunedcomm.intercept() as seen:
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
    assert seen.calls() == {}
    Path(folder, "passed").touch()


def test_dry_runs_are_left_to_torch(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=fake_body, args=(str(tmp_path),))
    process.start()
    process.join(60)
    process.kill()
    assert (tmp_path / "passed").exists()


def test_complex_numbers(rank: int) -> None:
    x = torch.full((3,), 1 + 2j) * (rank + 1)
    with refused("view_as_real"):
        tunedcomm.all_reduce(x)
    tunedcomm.all_reduce_(torch.view_as_real(x))
    assert torch.equal(x, torch.full((3,), 3 + 6j))


def test_lazy_negation(rank: int) -> None:
    x = torch.full((3,), 1 + 2j).conj().imag * 1
    y = torch._neg_view(torch.full((3,), rank + 1.0))
    assert y.is_neg()
    assert torch.equal(tunedcomm.all_reduce(y, op="max"), torch.full((3,), -1.0))
    assert torch.equal(tunedcomm.all_reduce(x), torch.full((3,), -4.0))
    with tunedcomm.force("all_reduce", "lamport"):
        assert torch.equal(tunedcomm.all_reduce(y), torch.full((3,), -3.0))


def test_sparse(rank: int) -> None:
    dense = torch.eye(4)
    tunedcomm.all_reduce(dense)  # a plan for this number of elements exists
    tunedcomm.symmetric_empty(4)  # and the group asks where tensors lie
    for x in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_mkldnn()):
        with refused("to_dense"):
            tunedcomm.all_reduce(x)
        with refused("out is a tensor of layout"):
            tunedcomm.all_reduce(dense, out=x)
        assert torch.equal(tunedcomm.all_reduce(x.to_dense()), 2 * dense)


def test_requires_grad(rank: int) -> None:
    x = torch.full((6,), rank + 1.0, requires_grad=True)
    with refused("in place is not differentiable"):
        tunedcomm.all_reduce_(x)
    with refused("not differentiable"):
        tunedcomm.all_reduce(x.detach(), out=torch.zeros(6, requires_grad=True))
    with torch.no_grad():
        assert tunedcomm.all_reduce_(x) is x
    assert x.requires_grad
    assert torch.equal(x.detach(), torch.full((6,), 3.0))


def test_other_device(rank: int) -> None:
    with refused("serves cuda and cpu tensors, not meta"):
        tunedcomm.all_reduce(torch.ones(4, device="meta"))
    with refused("out has shape .* meta"):
        tunedcomm.all_reduce(torch.ones(4), out=torch.ones(4, device="meta"))
    with pytest.raises(tunedcomm.GroupError, match="has nothing for meta tensors"):
        tunedcomm.symmetric_empty(4, device="meta")


def test_non_dense_strides(rank: int) -> None:
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
    with refused("out is an expanded tensor"):
        tunedcomm.all_reduce_(base[0, :1].expand(5))


def test_zero_elements(rank: int) -> None:
    empty, none, row = torch.empty, [0, 0], torch.ones(128)
    for shape in ((0,), (3, 0, 2)):
        x = empty(shape, dtype=torch.bfloat16)
        out = tunedcomm.all_reduce(x)
        assert out.shape == shape
        assert out is not x
        assert tunedcomm.all_reduce_(x) is x
        with refused("does not take"):
            tunedcomm.all_reduce(empty(shape, dtype=torch.bool))
    given = empty(3, 0, 4)
    assert tunedcomm.all_gather(empty(3, 0, 2), dim=2, out=given) is given
    quantised = tunedcomm.all_reduce_rms_norm(empty(0, 128), row, quantize="group128", with_norm=True)
    results = {
        (0, 6): tunedcomm.all_gather(empty(0, 3), dim=1),
        (6, 0): tunedcomm.all_gather(empty(3, 0)),
        (2, 0): tunedcomm.reduce_scatter(empty(4, 0)),
        (4, 0, 2): tunedcomm.all_to_all(empty(4, 0, 2)),
        (0, 3): tunedcomm.all_to_all_v(empty(0, 3), none, none),
        (0, 4): tunedcomm.all_to_all_v(empty(0, 4), none, none, max_count=0),
        (3, 0): tunedcomm.all_to_all_v(empty(3, 0), *[[1, 2] if rank == 0 else [2, 1]] * 2),
        (0, 128): tunedcomm.all_reduce_bias(empty(0, 128), row),
        (0, 1): quantised[2],
    }
    assert all(found.shape == shape for shape, found in results.items())
    assert [found.shape for found in tunedcomm.all_reduce_rms_norm(empty(0, 128), row)] == [(0, 128)] * 2
    assert tunedcomm.symmetric_empty((4, 0)).shape == (4, 0)


def test_a_group_of_one(rank: int) -> None:
    """It asks nobody, and gives no result that is its input."""
    alone = [dist.new_group([member]) for member in range(2)][rank]
    x, w, b, c = torch.randn(256, 4).t() + rank, torch.randn(256), torch.randn(256, 16), torch.randn(16)
    near = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    for op in ("sum", "avg", "max", "min"):
        assert torch.equal(tunedcomm.all_reduce(x, op=op, group=alone), x)
    for got, wanted in (
        (tunedcomm.all_reduce(x, group=alone), x),
        (tunedcomm.all_gather(x, dim=1, group=alone), x),
        (tunedcomm.reduce_scatter(x, group=alone), x),
        (tunedcomm.all_to_all(x, group=alone), x),
        (tunedcomm.all_to_all_v(x, [4], [4], group=alone), x),
        (tunedcomm.all_reduce_bias(x, w, group=alone), x + w),
        (tunedcomm.gemm_rs(x, b, op="avg", group=alone), x @ b),
        (tunedcomm.gemm_ar(x, b.t().contiguous().t(), bias=c, group=alone), x @ b + c),
        (tunedcomm.ag_gemm(x, [b, b[:, ::2]], group=alone)[1], x @ b[:, ::2]),
    ):
        near(got, wanted)
        assert got.is_contiguous()
        assert got.data_ptr() != x.data_ptr()
    held, given = x.clone(), torch.zeros(4, 512)[:, ::2]
    assert tunedcomm.all_reduce_(held, group=alone) is held
    assert tunedcomm.all_reduce(x, group=alone, out=given) is given
    assert torch.equal(given, x)
    assert tunedcomm.all_reduce_bias(held, w, out=held, group=alone) is held
    near(held, x + w)
    eight, other = x.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    scales = {"scale_a": torch.rand(4, 1), "scale_b": torch.rand(1, 16)}
    got = tunedcomm.gemm_ar(eight, other, group=alone, **scales)
    wanted = (eight.float() * scales["scale_a"]) @ (other.float() * scales["scale_b"])
    assert (got.float() - wanted).norm() < 0.02 * wanted.norm()
    asked = {"residual": x, "bias": w, "group": alone}
    y, h = tunedcomm.all_reduce_rms_norm(x, w, **asked)
    near(h, x + x + w)
    near(y, torch.nn.functional.rms_norm(h, (256,), w, 1e-6))
    form = {"quantize": "group128", "scales_layout": "column", "with_norm": True, "weight_offset": 1.0}
    q, again, scale, norm = tunedcomm.all_reduce_rms_norm(x, w - 1.0, **asked, **form)
    near((again, norm), (h, y))
    back = (q.float().unflatten(-1, (2, 128)) * scale.unsqueeze(-1)).flatten(-2)
    assert (back - y).norm() < 0.05 * y.norm()
    assert scale.stride() == (1, 4)
    with refused("does not take"):
        tunedcomm.all_reduce(x.bool(), group=alone)
    with pytest.raises(tunedcomm.WorkspaceError, match="use an ordinary tensor"):
        tunedcomm.symmetric_empty(4, group=alone)


def test_device_without_backend(rank: int) -> None:
    only_cuda = dist.new_group(backend="cuda:gloo")
    for _ in range(2):
        with pytest.raises(tunedcomm.GroupError, match="has nothing for cpu tensors"):
            tunedcomm.all_reduce(torch.ones(4), group=only_cuda)


def test_group_of_others(rank: int) -> None:
    others = [dist.new_group([member]) for member in range(2)][1 - rank]
    with pytest.raises(tunedcomm.GroupError, match=rf"rank {rank} is not a member of the group .*new_group"):
        tunedcomm.all_reduce(torch.ones(4), group=others)
    gone = dist.new_group()
    dist.destroy_process_group(gone)
    for group in (gone, "world"):
        with pytest.raises(tunedcomm.GroupError, match=r"or the group was destroyed|group is a str"):
            tunedcomm.all_reduce(torch.ones(4), group=group)


def test_unknown_options(rank: int) -> None:
    x = torch.ones(4)
    for shape in ((4,), (0,)):
        with refused("op='mean' is not a reduction"):
            tunedcomm.all_reduce(torch.ones(shape), op="mean")
        with refused("wire='fp8' of all_reduce is unknown"):
            tunedcomm.all_reduce(torch.ones(shape), wire="fp8")
        with refused("numerics='exact' is not a policy"):
            tunedcomm.all_reduce(torch.ones(shape), numerics="exact")
        for wrong in (-1, True, 2.0, "4", {}):
            with refused(f"max_sms={wrong!r} is not a number"):
                tunedcomm.all_reduce(torch.ones(shape), max_sms=wrong)
    problem = tunedcomm.Problem("all_reduce", (4,), "float32", 2)
    with refused("numerics='exact' is not a policy"):
        tunedcomm.explain(get_communicator(), problem, policy="exact")
    with refused("explain takes .* not str and Problem"):
        tunedcomm.explain("all_reduce", problem)  # type: ignore[call-overload]
    with refused("explain takes .* not str and int"):
        tunedcomm.explain("all_reduce", 3)  # type: ignore[call-overload]
    with refused("explain takes .* not Communicator and Tensor"):
        tunedcomm.explain(get_communicator(), x)  # type: ignore[call-overload]
    with refused("calls of all_to_all_v need more than tensors"):
        tunedcomm.explain("all_to_all_v", x)
    with refused("all_to_all has no reduction 'max', only ''"):
        tunedcomm.explain(get_communicator(), tunedcomm.Problem("all_to_all", (4,), "float32", 2, "max"))
    moved = tunedcomm.Problem("all_to_all", (4,), "float32", 2)  # with a reduction by default, which it has none of
    told = [tunedcomm.explain(get_communicator(), one) for one in (moved, dataclasses.replace(moved, reduction=""))]
    assert told[0] == told[1]
    with refused("the problem is one of 4 ranks, the communicator has 2"):
        tunedcomm.explain(get_communicator(), tunedcomm.Problem("all_reduce", (4,), "float32", 4))
    with refused("out is a list; it must be a dense tensor"):
        tunedcomm.all_reduce(x, out=[0.0] * 4)


def test_out_that_does_not_fit(rank: int) -> None:
    x = torch.arange(8.0)
    tunedcomm.all_reduce(x)
    for out in (torch.ones(9), torch.ones(8, 1), torch.ones(8, dtype=torch.float64)):
        with refused("it must match x"):
            tunedcomm.all_reduce(x, out=out)
    with refused(r"torch\.empty_like\(x\)"):
        tunedcomm.all_reduce(x, out=torch.ones(1).expand(8))
    whole = torch.arange(12.0)
    for out in (whole[1:9], whole[4:], whole[:8].flip(0)[:0]):
        with refused("out overlaps x without being x|it must match x"):
            tunedcomm.all_reduce(whole[:8], out=out)
    square = torch.arange(9.0).view(3, 3)
    with refused("out overlaps x without being x"):
        tunedcomm.all_reduce(square, out=square.t())


def test_arrays_of_numpy(rank: int) -> None:
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


def test_work_objects(rank: int) -> None:
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


def test_the_group_works_after_all_that(rank: int) -> None:
    still_works(rank)


def test_not_initialised() -> None:
    with pytest.raises(tunedcomm.NotInitializedError, match=r"call torch\.distributed\.init_process_group\(\) first"):
        tunedcomm.all_reduce(torch.ones(4))
    with pytest.raises(tunedcomm.NotInitializedError, match="init_process_group"):
        tunedcomm.symmetric_empty(4)
    with pytest.raises(RuntimeError, match="init_process_group"):
        tunedcomm.get_communicator()


# Databases: only rank 0 reads any, so it gets the bad one; the others have paths of their own.


@contextlib.contextmanager
def ordinary_user(folder: Path, here: bool) -> Iterator[None]:
    """Without the super-user's right to read everything, on the ranks for which `here` holds."""
    is_root = here and os.geteuid() == 0
    if is_root:
        folder.chmod(0o755)
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@contextlib.contextmanager
def folder_for_all(rank: int) -> Iterator[Path]:
    """Not one of pytest's, which an ordinary user may not enter."""
    with tempfile.TemporaryDirectory() as name:
        names: list[Any] = [name]
        dist.broadcast_object_list(names)
        Path(names[0]).chmod(0o755)
        yield Path(names[0])
        dist.barrier()


def test_unreadable_site_directory(rank: int) -> None:
    """Not a fault of a database but of reading their list: every rank hears of it or none does; nobody waits."""
    with folder_for_all(rank) as folder:
        shut = folder / "locked"
        if rank == 0:
            (shut / "site").mkdir(parents=True)
            shut.chmod(0)
        with settings({"TUNEDCOMM_DB_PATH": str(shut / "site") if rank == 0 else None}):

            def read(what: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
                with ordinary_user(folder, rank == 0):  # who may read the group's store no more
                    return what(*arguments, **options)

            with (
                replaced(communicator_module, "kept_snapshot", partial(read, communicator_module.kept_snapshot)),
                replaced(
                    communicator_module, "layer_fingerprints", partial(read, communicator_module.layer_fingerprints)
                ),
            ):
                try:
                    still_works(rank)
                    answer = "served"
                except (tunedcomm.AgreementError, OSError) as error:
                    answer = "refused"
                    assert "Permission denied" in str(error)
        answers: list[Any] = [None] * 2
        dist.all_gather_object(answers, answer)
        assert answers[0] == answers[1]


# What no database can be read from, in many ways; `{}` is a folder of the test.
BROKEN = [
    "postgresql+psycopg://user@host:$PGPORT/name", "postgresql://host:1:2/name", "postgresql://[::1/name", "a://b://c",
    "postgresql+psycopg://a..b/name", "postgresql+psycopg://\udcff/name", "postgresql+psycopg://127.0.0.1:1/\udcfe",
    "postgresql+psycopg://127.0.0.1:1/name", "postgresql+psycopg://127.0.0.1:1/name?nosuch=1",
    "postgresql+psycopg://127.0.0.1:1/name?connect_timeout=x", "postgresql://127.0.0.1:1/name?plugin=nosuch",
    "postgresql+psycopg:///name?host=/nosuch", "postgresql+psycopg://127.0.0.1:99999999/name", "://", "http://x/y.db",
    "nosuch://host/name", "mysql://host/name", "sqlite://", "sqlite:////x.db?mode=ro",
    "sqlite:///{}/garbage.db", "{}/garbage.db", "{}/\udcff\udcfe.db", "{}/empty.db", "{}/folder.db", "{}/loop.db",
    "{}/pipe.db", "{}/short.db", "/dev/zero", "~nosuchuser/x.db", "/" + "x" * 5000,
    "{}/a\nb.db", "{}/\x1b[31m.db",
]  # fmt: skip


def break_files(folder: Path) -> None:
    """The files that `BROKEN` names."""
    for name in ("garbage.db", "\udcff\udcfe.db", "a\nb.db", "\x1b[31m.db"):
        (folder / name).write_bytes(b"no database at all " * 100)
    (folder / "short.db").write_bytes(b"SQLite format 3\0")
    (folder / "empty.db").touch()
    (folder / "folder.db").mkdir()
    (folder / "loop.db").symlink_to("loop.db")
    os.mkfifo(folder / "pipe.db")


@pytest.mark.parametrize("name", ["TUNEDCOMM_DB", "TUNEDCOMM_DB_PATH"])
def test_a_broken_database_is_left_out_with_one_warning(rank: int, name: str) -> None:
    with folder_for_all(rank) as folder:
        if rank == 0:
            break_files(folder)
        dist.barrier()
        for value in (text.replace("{}", str(folder)) for text in BROKEN):
            if name == "TUNEDCOMM_DB_PATH" and value.endswith("folder.db"):  # a folder without databases
                continue
            warned.clear()
            separator = ";" if name == "TUNEDCOMM_DB_PATH" else ""
            given = {name: value + separator, "TUNEDCOMM_MISS_LOG": None, "XDG_DATA_HOME": str(folder)}
            with settings(given), logged() as texts:
                still_works(rank)
            assert len(texts) == (rank == 0), (value, texts)
            assert rank or "left out" in texts[0], (value, texts)
            assert all(text.replace("\n", "").isprintable() for text in texts), value


def test_a_path_that_is_no_text_is_a_path(rank: int) -> None:
    with folder_for_all(rank) as folder:
        target = folder / "\udcff" / "\udcfe.db"
        if rank == 0:
            Database.open(target, create=True).close()
        dist.barrier()
        for name in ("TUNEDCOMM_DB", "TUNEDCOMM_DB_PATH"):
            with settings({name: str(target)}), logged() as texts:
                still_works(rank)
            assert texts == []
