"""Write docs/ops.md from the registries: `python docs/generate_ops.py`. A test fails where the page is out of date."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

from tunedcomm import kernels
from tunedcomm.spec import OpSpec, get_op, ops, variants

PAGE = Path(__file__).with_name("ops.md")

HEAD = """# Ops and their variants

Each op is one public function. What runs for a call is one of the op's variants with one config, which dispatch takes
from the tuning database; the variant `library` is always among them. `tunedcomm.explain(...)` says what would run and
why, `tunedcomm.force(op, variant)` decides it.

Numerics: `ordered` variants of an op give the same bits, whatever was tuned: they sum in fp32 in rank order and round
once, or move bits as they are. `library` variants give the same bits on every rank. `unordered` ones run only where the
caller allows it with `numerics="any"`.

This page is written by `python docs/generate_ops.py`.
"""


def signature(name: str) -> str:
    """The public function's parameters without their annotations."""
    function = getattr(importlib.import_module(f"tunedcomm.ops.{name}"), name)
    found, star = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            found.append("*")
            star = True
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        found.append(parameter.name + default.replace("'", '"'))
    return f"tunedcomm.{name}({', '.join(found)})"


def capital(text: str) -> str:
    """`text` with a capital at its start."""
    return text[0].upper() + text[1:]


def section(spec: OpSpec) -> str:
    """One op."""
    lines = [
        f"## {spec.name}",
        "",
        f"`{signature(spec.name)}`",
        "",
        f"{spec.summary[0].upper()}{spec.summary[1:]}.",
        "",
    ]
    lines += [f"- Shape of a problem: {spec.shape_help}.", f"- Dtypes of kernels: {', '.join(spec.dtypes)}."]
    if spec.reductions:
        lines.append(f"- Reductions: {', '.join(spec.reductions)}; kernels do sum and, where it is listed, avg.")
    lines += ["", "| variant | numerics | what it does | configs |", "|---|---|---|---:|"]
    for variant in variants(spec.name).values():
        count = sum(1 for _ in variant.space.enumerate())
        lines.append(f"| `{variant.name}` | {variant.numerics} | {variant.summary} | {count} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    kernels.discover()
    return "\n".join([HEAD, *(section(get_op(name)) for name in ops())])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
