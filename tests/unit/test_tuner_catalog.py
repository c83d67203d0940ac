from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest

from tunedcomm import kernels
from tunedcomm.errors import UnknownNameError, UnsupportedInputError
from tunedcomm.spec import ITEMSIZE, Problem, ops
from tunedcomm.tuner import models as module
from tunedcomm.tuner.models import (
    DEFAULT_TOKENS,
    SHAPES,
    Model,
    catalog,
    column_parallel,
    find_model,
    parse_catalog,
    row_parallel,
    shapes_for,
)


def shapes(model: Model, tp: int) -> dict[str, tuple[int, int]]:
    return {part.name: (part.n, part.k) for part in (*column_parallel(model, tp), *row_parallel(model, tp))}


def entry(**changes: Any) -> str:
    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_layers": 2,
        "num_dense_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 100,
        "dtype": "bfloat16",
        "source": {"published": "someone/tiny: config.json", "read": ["a: b", "c: d"]},
        **changes,
    }
    return json.dumps({"models": {"tiny": {name: value for name, value in values.items() if value != "gone"}}})


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


def test_the_catalogue_is_wide() -> None:
    assert len(catalog()) >= 10
    assert {"llama3-8b", "llama3-70b", "llama3-405b", "gpt-oss-120b", "deepseek-v3"} <= set(catalog())
    assert any(name.startswith("qwen3") for name in catalog())
    assert list(DEFAULT_TOKENS) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]


def test_llama3_70b_on_4_ranks() -> None:
    # 64 heads of 128 and 8 of keys and values: 16 and 2 a rank; 28672 columns of the MLP: 7168 a rank.
    assert shapes(find_model("llama3-70b"), 4) == {
        "qkv": ((16 + 2 + 2) * 128, 8192),
        "gate_up": (14336, 8192),
        "o": (8192, 2048),
        "down": (8192, 7168),
    }
    assert shapes_for([find_model("llama3-70b")], 4, [4096], "gemm_rs") == ((4096, 8192, 2048), (4096, 8192, 7168))
    assert shapes_for([find_model("llama3-70b")], 4, [4096], "ag_gemm") == ((4096, 2560, 8192), (4096, 14336, 8192))


def test_llama3_8b_on_8_ranks() -> None:
    assert shapes(find_model("llama3-8b"), 8) == {
        "qkv": (768, 4096),
        "gate_up": (3584, 4096),
        "o": (4096, 512),
        "down": (4096, 1792),
    }


def test_gpt_oss_has_no_plain_mlp_and_heads_narrower_than_its_hidden_state() -> None:
    assert shapes(find_model("gpt-oss-120b"), 2) == {"qkv": ((32 + 4 + 4) * 64, 2880), "o": (2880, 2048)}


def test_latent_attention_is_split_where_it_expands() -> None:
    assert shapes(find_model("deepseek-v3"), 4) == {
        "q_b": (32 * (128 + 64), 1536),
        "kv_b": (32 * (128 + 128), 512),
        "gate_up": (9216, 7168),
        "shared_gate_up": (1024, 7168),
        "o": (7168, 32 * 128),
        "down": (7168, 4608),
        "shared_down": (7168, 512),
    }


def test_more_ranks_than_heads_of_keys_repeat_them() -> None:
    qwen = find_model("qwen3-235b-a22b")
    assert shapes(qwen, 4)["qkv"] == ((16 + 1 + 1) * 128, 4096)
    assert shapes(qwen, 8)["qkv"] == ((8 + 1 + 1) * 128, 4096)


def test_all_reduce_moves_the_hidden_states_each_size_once() -> None:
    llama, qwen = find_model("llama3-8b"), find_model("qwen3-8b")
    assert shapes_for([llama], 4, [8, 1, 8], "all_reduce") == ((4096,), (32768,))
    assert shapes_for([llama, qwen], 4, [1], "all_reduce") == ((4096,),)
    # Two tokens of the one are one of the other.
    assert shapes_for([llama, find_model("llama3-70b")], 4, [1, 2], "all_reduce") == ((4096,), (8192,), (16384,))


def test_a_rank_gathers_its_share_of_the_tokens() -> None:
    found = shapes_for([find_model("llama3-70b")], 4, [1, 3, 4, 5, 4096], "all_gather")
    assert found == ((8192,), (2 * 8192,), (1024 * 8192,))


def test_reduce_scatter_leaves_each_rank_its_tokens() -> None:
    llama = find_model("llama3-8b")
    assert shapes_for([llama], 4, [1, 4, 6, 64], "reduce_scatter") == ((4096,), (2 * 4096,), (16 * 4096,))
    assert shapes_for([llama], 8, [64], "reduce_scatter") == ((8 * 4096,),)


def test_every_rank_sends_its_tokens_to_the_experts() -> None:
    models = [find_model("deepseek-v3"), find_model("llama3-8b")]
    for op in ("ep_dispatch", "ep_combine"):
        assert shapes_for(models, 4, [1, 256], op) == ((1, 7168, 8, 256), (64, 7168, 8, 256))
        with pytest.raises(UnsupportedInputError, match="llama3-8b"):
            shapes_for(models[1:], 4, [1], op)


def test_a_later_op_needs_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHAPES", {**SHAPES, "gather_vocab": lambda model, tp, tokens: [(tokens, tp)]})
    assert shapes_for([find_model("llama3-8b")], 2, [3], "gather_vocab") == ((3, 2),)


def test_shapes_fit_their_op() -> None:
    kernels.discover()
    for name, spec in ops().items():
        for shape in shapes_for([find_model("deepseek-v3")], 4, [1], name) if name in SHAPES else ():
            assert len(shape) == spec.rank_of_shape


@pytest.mark.parametrize("name", ["LLAMA3-70B", "llama3_70b", " llama3.3-70b "])
def test_names_are_found_in_any_writing(name: str) -> None:
    assert find_model(name).name == "llama3-70b"


def test_unknown_model_names_the_nearest_and_all() -> None:
    with pytest.raises(UnknownNameError, match=r"'lama3-70b'; did you mean 'llama3-70b'.*gpt-oss-20b.*--shape"):
        find_model("lama3-70b")
    with pytest.raises(UnknownNameError, match=r"'zzz'\. The models are llama3-8b"):
        find_model("zzz")


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
    odd = parse_catalog(entry(num_heads=48, num_kv_heads=8, intermediate_size=144))["tiny"]
    model = odd if name == "mistaken" else find_model(name)
    for op in SHAPES:
        with pytest.raises(UnsupportedInputError, match=text):
            shapes_for([model], tp, [1], op)


SPARSE = {"intermediate_size": 130, "num_experts": 4, "num_experts_per_token": 1, "num_shared_experts": 0}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"intermediate_size": 130}, "130 columns of the dense layers"),
        ({"intermediate_size": None, "num_dense_layers": 0, "experts": SPARSE}, "130 columns of an expert"),
    ],
)
def test_columns_that_do_not_split(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedInputError, match=text):
        shapes_for([parse_catalog(entry(**changes))["tiny"]], 4, [1], "gemm_rs")


def test_no_tokens_and_unknown_ops_are_refused() -> None:
    model = find_model("llama3-8b")
    with pytest.raises(UnsupportedInputError, match="at least 1 token, got 0"):
        shapes_for([model], 2, [4, 0], "all_reduce")
    with pytest.raises(UnsupportedInputError, match="shapes of all_to_all do not follow from a model"):
        shapes_for([model], 2, [4], "all_to_all")


@pytest.mark.parametrize("model", catalog().values(), ids=lambda model: model.name)
def test_sizes_of_a_model_fit_each_other(model: Model) -> None:
    assert model.dtype in ITEMSIZE
    assert model.num_heads % model.num_kv_heads == 0
    assert (model.intermediate_size is None) == (model.num_dense_layers == 0)
    assert (model.experts is None) == (model.num_dense_layers == model.num_layers)
    assert model.num_dense_layers <= model.num_layers
    assert model.source.published
    assert model.source.read
    assert all(isinstance(text, str) and text for text in model.source.read)
    if model.latent is not None:
        assert model.head_dim == model.latent.qk_nope_head_dim + model.latent.qk_rope_head_dim
    may_be_zero = {"num_dense_layers", "num_shared_experts"}
    for part in filter(None, (model, model.experts, model.latent)):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if str(field.type).startswith("int") and value is not None:
                assert type(value) is int, field.name
                assert value >= (field.name not in may_be_zero), field.name


def test_no_two_models_share_a_name() -> None:
    names = [name for model in catalog().values() for name in (model.name, *model.aliases)]
    assert len(names) == len(set(names))


def test_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="hidden"):
        parse_catalog(entry(hidden=1))


def test_the_catalogue_needs_no_torch() -> None:
    code = "import sys; from tunedcomm.tuner.models import catalog; print(len(catalog()), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == "False"


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "gemm_ar"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    "name", ["llama3-8b", "llama3-70b", "llama3-405b", "qwen3-32b", "gpt-oss-120b", "gpt-oss-20b", "deepseek-v3"]
)
def test_fused_gemms_of_every_kind_of_model(name: str, tp: int, op: str) -> None:
    """Every shape is one that the op's ranks can share, and that descriptors can read."""
    kernels.discover()
    model, spec = find_model(name), ops()[op]
    found = shapes_for([model], tp, [1, 3, 64, 4096, 16384], op)
    parts = row_parallel(model, tp) if op != "ag_gemm" else column_parallel(model, tp)
    assert {shape[1:] for shape in found} == {(part.n, part.k) for part in parts}
    for m, n, k in found:
        spec.check(Problem(op, (m, n, k), "bfloat16", tp))
        assert n % 8 == 0
        assert k % 8 == 0
    rows = {shape[0] for shape in found}
    assert rows == ({1, 3, 64, 4096, 16384} if op == "gemm_ar" else {tp, 4, 64, 4096, 16384})
