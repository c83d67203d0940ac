"""docs/ops.md: every parameter is described, dtypes and reductions are those of the code, links lead somewhere."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest

from tunedcomm import kernels
from tunedcomm.spec import get_op, ops, variants

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import generate_ops  # noqa: E402

kernels.discover()
OPS = list(ops())
PAGE = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8 e4m3": "float8_e4m3fn"}


def section(name: str) -> str:
    return re.split(r"^## ", PAGE.split(f"\n## {name}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("name", OPS)
def test_docstrings_describe_every_parameter_and_no_other(name: str) -> None:
    told = generate_ops.docstring(generate_ops.public(name))
    assert list(told.sections["Args"]) == list(inspect.signature(generate_ops.public(name)).parameters)
    assert told.returns
    assert {"UnsupportedInputError", "PeerTimeoutError"} <= set(told.sections["Raises"])


@pytest.mark.parametrize("name", OPS)
def test_docstrings_name_the_dtypes_and_reductions_of_the_op(name: str) -> None:
    spec, (first, *_), described = get_op(name), *described_by(name)
    if (match := re.search(r"Kernels take (.+?)[;.]", first)) is not None:
        assert tuple(SHORT[dtype] for dtype in re.split(r", | and ", match[1])) == spec.dtypes
    else:
        assert len(spec.dtypes) > len(SHORT), "what is only moved may be of any dtype"
    named = re.match(r"(`\w+`(?:, | or )?)+", described.get("op", ""))
    assert tuple(re.findall(r"`(\w+)`", named[0] if named else "")) == (
        spec.reductions if len(spec.reductions) > 1 else ()
    )


def described_by(name: str) -> tuple[list[str], dict[str, str]]:
    described = generate_ops.docstring(generate_ops.public(name)).sections["Args"]
    return list(described.values()), described


def test_reductions_are_those_that_kernels_do() -> None:
    found = {name: re.findall(r"^- (Reductions?: .*)$", section(name), re.MULTILINE) for name in OPS}
    every = ["Reductions: sum, avg; max, min by the variant `library` alone."]
    assert found == {
        **{name: [] for name in ("ag_gemm", "all_gather", "all_to_all", "all_to_all_v")},
        **{name: ["Reduction: sum."] for name in ("all_reduce_bias", "all_reduce_rms_norm", "gemm_ar")},
        **dict.fromkeys(("all_reduce", "reduce_scatter"), every),
        "gemm_rs": ["Reductions: sum, avg."],
    }


def test_the_library_is_always_named() -> None:
    """As a variant or a class in code, else by the name of what it is."""
    assert re.findall(r"\b(?:the|this|our) (?:own )?librar\w+", PAGE) == []


@pytest.mark.parametrize("name", [name for name in OPS if any(get_op(name).tolerance.values())])
def test_the_variant_library_is_of_the_class_library_where_something_is_computed(name: str) -> None:
    assert variants(name)["library"].numerics == "library"


def test_a_layout_without_a_meaning_is_noticed() -> None:
    with pytest.raises(ValueError, match="tn"):
        generate_ops.meanings(["nk", "tn"], generate_ops.LAYOUTS)


def test_links_lead_to_sections() -> None:
    links = re.findall(r"\]\(([^)#]*)#?([^)]*)\)", PAGE)
    assert ("all_gather.md", "") in links
    assert ("pytorch.md", "gradients") in links
    for target, anchor in links:
        page = ROOT / "docs" / (target or "ops.md")
        assert page.exists(), target
        headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, (target, anchor)
