"""What a sweep is: problems, also of open models, settings and gangs from what was asked for and the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from programs import python

from tunedcomm import kernels
from tunedcomm.errors import TuningError, UnknownNameError, UnsupportedInputError
from tunedcomm.spec import ITEMSIZE, Problem, ops
from tunedcomm.tuner.gang.process import gang_environment
from tunedcomm.tuner.gang.protocol import Settings
from tunedcomm.tuner.models import (
    SHAPES,
    Model,
    catalog,
    column_parallel,
    find_model,
    row_parallel,
    shapes_for,
)
from tunedcomm.tuner.search import sweep as plan
from tunedcomm.tuner.search.sweep import SweepSpec, gang_devices, resolve

PROBLEM = Problem(op="all_reduce", shape=(512,), dtype="bfloat16", world_size=2, mode="eager")
SETTINGS = Settings(backend="host", world_size=2, trials=8)


def test_host_defaults_are_small_and_eager() -> None:
    kernels.discover()
    problems, settings = resolve(SweepSpec(op="all_reduce", backend="host"))
    assert {(problem.mode, problem.world_size) for problem in problems} == {("eager", 2)}
    assert settings.backend == "host"
    assert len(problems) * settings.trials <= 60  # about a second each


def test_product_of_options_and_overrides() -> None:
    kernels.discover()
    product = {"shapes": ((64,), (128,)), "dtypes": ("bfloat16", "float16"), "modes": ("graph", "eager")}
    overrides = {"trials": 5, "peer_timeout_s": 3.0, "world_size": 3}
    problems, settings = resolve(SweepSpec(op="all_reduce", backend="host", **product, **overrides))
    assert len(set(problems)) == 8
    assert {name: getattr(settings, name) for name in overrides} == overrides


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"op": "all_reduec"}, UnknownNameError, "'all_reduce'"),
        ({"variants": ("lamprot",)}, UnknownNameError, "'lamport'"),
        ({"reductions": ("xor",)}, ValueError, "no reduction 'xor'; allowed: sum"),
        ({"dtypes": ("int8",)}, ValueError, "no dtype 'int8'"),
        ({"shapes": ((4, 4),)}, ValueError, "does not fit all_reduce"),
        ({"world_size": 1}, TuningError, "world size 1"),
        ({"backend": "cuda", "world_size": 64}, TuningError, "world size 64 cannot be tuned here"),
        ({"problems": (PROBLEM,), "world_size": 3}, TuningError, "one world size"),
        ({"problems": (replace(PROBLEM, reduction="xor"),)}, ValueError, "no reduction 'xor'"),
        ({"gangs": 0}, TuningError, "at least 1 gang, got 0"),
    ],
)
def test_bad_sweeps_are_refused_with_what_is_allowed(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    kernels.discover()
    with pytest.raises(error, match=text):
        resolve(SweepSpec(**{"op": "all_reduce", "backend": "host", **changes}))


def test_auto_fills_the_machine_with_gangs(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.discover()
    for gpus, world_size, asked, expected in ((4, 2, None, 2), (4, 4, None, 1), (8, 3, None, 2), (8, 2, 3, 3)):
        monkeypatch.setattr(plan, "num_gpu_ranks", lambda gpus=gpus: gpus)
        _, settings = resolve(SweepSpec(op="all_reduce", world_size=world_size, gangs=asked))
        assert (settings.backend, settings.gangs) == ("cuda", expected)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["0,1", "2,3"]),
        ("", ["0,1", "2,3"]),
        ("3, 1,7,5", ["3,1", "7,5"]),
        ("GPU-a,GPU-b,GPU-c,GPU-d,GPU-e", ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
    ],
)
def test_gangs_share_out_the_gpus_that_are_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    settings = replace(SETTINGS, backend="cuda", gangs=2)
    assert gang_devices(settings) == expected
    assert [gang_environment(settings, devices)["CUDA_VISIBLE_DEVICES"] for devices in expected] == expected
    assert gang_devices(replace(settings, backend="host")) == ["", ""]


def test_one_gang_shares_the_only_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.discover()
    monkeypatch.setattr(plan, "num_gpu_ranks", lambda: 8)
    monkeypatch.setattr(plan, "ranks_share_a_gpu", lambda: True)
    found = [resolve(SweepSpec(op="all_reduce", world_size=ranks))[1] for ranks in (None, 4)]
    assert [(each.backend, each.world_size, each.gangs) for each in found] == [("cuda", 2, 1), ("cuda", 4, 1)]
    with pytest.raises(TuningError, match="at most 1 fit"):
        resolve(SweepSpec(op="all_reduce", world_size=2, gangs=2))
    for visible, expected in (("", "0"), ("5", "5")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gang_devices(found[0]) == [expected]


# Sizes of open models


def shapes(model: Model, tp: int) -> dict[str, tuple[int, int]]:
    return {part.name: (part.n, part.k) for part in (*column_parallel(model, tp), *row_parallel(model, tp))}


@pytest.mark.parametrize("model", catalog().values(), ids=lambda model: model.name)
def test_every_entry_is_complete_and_has_its_sources(model: Model) -> None:
    assert model.source.published.endswith(": config.json")
    assert len(set(model.source.read)) >= 2
    assert all("://" not in text and ": " in text for text in (model.source.published, *model.source.read))
    assert model.dtype in ITEMSIZE
    assert model.hidden_size % 64 == 0
    for tp in (2, 4, 8):
        for op in SHAPES:
            if model.experts is not None or not op.startswith("ep_"):
                assert shapes_for([model], tp, [1, 8], op), (tp, op)


def test_matrices_on_4_ranks() -> None:
    # 64 heads of 128 and 8 of keys and values: 16 and 2 a rank; 28672 columns of the MLP: 7168 a rank.
    dense = {"qkv": ((16 + 2 + 2) * 128, 8192), "gate_up": (14336, 8192), "o": (8192, 2048), "down": (8192, 7168)}
    assert shapes(find_model("llama3-70b"), 4) == dense
    # Latent attention is split where it expands.
    assert shapes(find_model("deepseek-v3"), 4) == {
        "q_b": (32 * (128 + 64), 1536),
        "kv_b": (32 * (128 + 128), 512),
        "gate_up": (9216, 7168),
        "shared_gate_up": (1024, 7168),
        "o": (7168, 32 * 128),
        "down": (7168, 4608),
        "shared_down": (7168, 512),
    }


@pytest.mark.parametrize(
    ("models", "tp", "tokens", "op", "expected"),
    [
        ("llama3-70b", 4, [4096], "gemm_rs", [(4096, 8192, 2048), (4096, 8192, 7168)]),
        ("llama3-70b", 4, [4096], "ag_gemm", [(4096, 2560, 8192), (4096, 14336, 8192)]),
        # Hidden states, each size once: two tokens of the one are one of the other.
        ("llama3-8b", 4, [8, 1, 8], "all_reduce", [(4096,), (32768,)]),
        ("llama3-8b qwen3-8b", 4, [1], "all_reduce", [(4096,)]),
        ("llama3-8b llama3-70b", 4, [1, 2], "all_reduce", [(4096,), (8192,), (16384,)]),
        # Each rank is left its tokens.
        ("llama3-8b", 4, [1, 4, 6, 64], "reduce_scatter", [(4096,), (2 * 4096,), (16 * 4096,)]),
        ("llama3-8b", 8, [64], "reduce_scatter", [(8 * 4096,)]),
        # Every rank sends its tokens to the experts.
        ("deepseek-v3 llama3-8b", 4, [1, 256], "ep_dispatch", [(1, 7168, 8, 256), (64, 7168, 8, 256)]),
        ("deepseek-v3 llama3-8b", 4, [1, 256], "ep_combine", [(1, 7168, 8, 256), (64, 7168, 8, 256)]),
    ],
)
def test_shapes_of_an_op(models: str, tp: int, tokens: list[int], op: str, expected: list[tuple[int, ...]]) -> None:
    assert shapes_for(list(map(find_model, models.split())), tp, tokens, op) == tuple(expected)


def test_shapes_fit_their_op() -> None:
    kernels.discover()
    for name, spec in ops().items():
        for shape in shapes_for([find_model("deepseek-v3")], 4, [1], name) if name in SHAPES else ():
            assert len(shape) == spec.rank_of_shape


def test_unknown_model_names_the_nearest_and_all() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean 'llama3-70b'.*gpt-oss-20b"):
        find_model("lama3-70b")


@pytest.mark.parametrize(
    ("name", "tp", "text"),
    [
        ("llama3-70b", 3, "64 attention heads, which 3 ranks"),
        ("llama3-70b", 0, "at least 1, got 0"),
        ("mistaken", 6, "8 heads of keys and values, which 6 ranks"),
        ("gpt-oss-20b", 128, "64 attention heads, which 128 ranks"),
    ],
)
def test_a_tp_that_does_not_split_the_model(name: str, tp: int, text: str) -> None:
    odd = replace(find_model("llama3-8b"), num_heads=48, num_kv_heads=8, intermediate_size=144)
    model = odd if name == "mistaken" else find_model(name)
    for op in SHAPES:
        with pytest.raises(UnsupportedInputError, match=text):
            shapes_for([model], tp, [1], op)


@pytest.mark.parametrize(
    ("tokens", "op", "text"),
    [([4, 0], "all_reduce", "got 0"), ([4], "all_to_all", "all_to_all"), ([1], "ep_dispatch", "llama3-8b")],
)
def test_no_tokens_and_ops_that_do_not_follow_from_a_model(tokens: list[int], op: str, text: str) -> None:
    with pytest.raises(UnsupportedInputError, match=text):
        shapes_for([find_model("llama3-8b")], 2, tokens, op)


def test_the_catalogue_needs_no_torch() -> None:
    code = "import sys; from tunedcomm.tuner.models import catalog; print(len(catalog()), 'torch' in sys.modules)"
    done = python("-c", code)
    assert done.stdout.split()[1] == "False"
