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

## What runs, and why

`tunedcomm.explain(communicator, problem)` binds and launches nothing. The problem has the shape that the op's section
names, the dtype's name, and `mode="graph"` for calls inside CUDA graphs, `mode="eager"` for others:

<!-- runs on 2 ranks -->
```python
communicator = tunedcomm.get_communicator()
problem = tunedcomm.Problem("all_reduce", (4096,), "float32", communicator.world_size, mode="eager")
decision = tunedcomm.explain(communicator, problem)
print(decision.candidate.variant, decision.candidate.config_dict)
print(decision.source, decision.latency_us, decision.library_us, decision.why)
for candidate, reason in decision.passed_over:
    print(candidate, reason)
```

| field | what it is |
|---|---|
| `candidate` | what runs: `op`, `variant`, `config_dict` |
| `source` | the rule that chose it: `forced`, `pin`, `exact`, `interpolated`, `borrowed`, `heuristic` or `library` |
| `why` | one sentence for a person |
| `latency_us`, `library_us` | expected latency of it and of the library; None where that is not known |
| `runner_up`, `runner_up_us` | the fastest other candidate and its latency; None if there is none |
| `trial_id`, `layer`, `environment` | the stored trial that decided, its database, and where it was measured |
| `passed_over` | pairs of text: every other candidate that was looked at, and why it does not run |

`decision.to_dict()` gives plain JSON values. `tunedcomm explain --json` prints them.
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
