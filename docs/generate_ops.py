"""Write docs/ops.md from the registries and the docstrings: `python docs/generate_ops.py`.

A test fails where the page is out of date. Parameters, results and errors are those of the public functions'
docstrings; layouts, tolerances and reductions those of the op specs and variants.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import tunedcomm
from tunedcomm import kernels
from tunedcomm.kernels.all_to_all.op import layout_of
from tunedcomm.spec import Limits, Numerics, NumericsPolicy, OpSpec, Problem, Variant, admits, get_op, ops, variants

PAGE = Path(__file__).with_name("ops.md")
ROOT = PAGE.parents[1]

HEAD = """# Ops and their variants

Each op is one public function. What runs for a call is one of the op's variants with one config, which dispatch takes
from the tuning database. The variant `library` is always among them: NCCL on GPUs (gloo on CPUs), with cuBLAS or
PyTorch's operators beside it where the op computes more than a collective. `tunedcomm.explain(...)` says what would run
and why, `tunedcomm.force(op, variant)` decides it.

This page is written by `python docs/generate_ops.py`.
"""

EXPLAIN = """## What runs, and why

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
| `latency_us`, `library_us` | expected latency of it and of the variant `library`; None where that is not known |
| `runner_up`, `runner_up_us` | the fastest other candidate and its latency; None if there is none |
| `trial_id`, `layer`, `environment` | the stored trial that decided, its database, and where it was measured |
| `passed_over` | pairs of text: every other candidate that was looked at, and why it does not run |

`decision.to_dict()` gives plain JSON values. `tunedcomm explain --json` prints them.
"""

CLASSES: dict[str, str] = {
    "ordered": "The bits are fixed by a rule, so all ordered variants of an op give the same on every rank, "
    "whatever was tuned: sums are made in fp32 in rank order and rounded once at the end, and what is moved "
    "keeps its bits.",
    "library": "Every rank gets the same bits, but another variant, config or version of NCCL may give others; the "
    "class is named after the variant `library`, which is of it wherever an op sums or multiplies.",
    "unordered": "The order of a sum may differ from rank to rank or from call to call, and the last bits with it.",
}

CHECKED = """## How a candidate is checked

`tunedcomm tune` checks every candidate before it is timed, and dispatch chooses none that did not pass. Outputs are
filled with NaN, every rank is delayed by a time of its own, and several launches follow each other with other inputs.

- Ordered variants must give the op's exact bits. Of {without}
  no such bits are known beforehand: their ordered variants are checked like all others.
- Other variants must give small whole numbers without any error where the dtype holds the result.
- Of random inputs their results must be finite and near the reference, which is computed in float64: the relative
  error ‖out − ref‖ / ‖ref‖ must be at most what the table says for the inputs' dtype, or for the scaling if there is
  one.
"""

PARTS = """## Layouts and scalings

A problem's `layout` and `scaling` (`--layout` and `--scaling` on the command line) say what the op is given besides,
how that lies and how it is scaled. Parts of a layout are joined by `+`, such as `nk+bias+float32`.
"""

# What the parts of `Problem.layout` say, which are joined by "+".
_RESULT = "the result's dtype, where it is not the operands' (with fp8 operands bf16)"
_ROWS = "the call's rows are whole multiples of so many bytes only, though `max_count` of them are one of more"
LAYOUTS: dict[str, str] = {
    "": "none of these",
    "nk": "`b` is stored as [N, K], as linear layers store weights, and passed as `weight.t()`",
    "kn": "`b` is stored as [K, N]",
    "bias": "a bias is added",
    "residual": "a residual is added",
    "gathered": "the gathered A is returned, too (`return_gathered=True`)",
    **dict.fromkeys(("bfloat16", "float16", "float32", "float64"), _RESULT),
    **dict.fromkeys(("rows4", "rows2", "rows1"), _ROWS),
}
SCALINGS: dict[str, str] = {
    "": "operands and results are not scaled",
    "rowwise": "fp8 operands with a scale for every row of `a` and every column of `b`",
    "tensorwise": "fp8 operands with one scale each",
    "fp8": "the result is divided by `scale` and stored in fp8 e4m3",
}

# Sections elsewhere that an op is linked to if they name it.
ELSEWHERE = (
    ("pytorch.md", "Operators", "torch.compile and torch.export"),
    ("pytorch.md", "Gradients", "gradients"),
    ("pytorch.md", "Models as they are", "models that call torch.distributed"),
    ("fusion.md", "What becomes what", "fusion under torch.compile"),
)

# Where every kernel that a GPU may have runs at some size.
PROBE = Limits(
    backend="cuda",
    num_sms=132,
    multicast=True,
    max_blocks=256,
    staging_bytes=1 << 28,
    one_shot_bytes=1 << 24,
    stage_bytes=1 << 24,
    panel_bytes=1 << 32,
)


class Docstring(NamedTuple):
    """A public function's docstring, taken apart.

    Attributes:
        text: the paragraphs before the first section.
        sections: `Args` and `Raises` as name to text.
        returns: what comes back.
        notes: the paragraphs behind the last section.
    """

    text: list[str]
    sections: dict[str, dict[str, str]]
    returns: str
    notes: list[str]


def entries(lines: list[str]) -> dict[str, str]:
    """`name: text` entries, indented by 4 and what goes on by 8; `a, b: text` is of both, and told at the first."""
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if match := re.fullmatch(r" {4}(\w+(?:, \w+)*): (.*)", line):
            found.append((match[1], [match[2]]))
        elif line.strip():
            found[-1][1].append(line.strip())
    told: dict[str, str] = {}
    for names, parts in found:
        first, *others = names.split(", ")
        text = " ".join(parts)
        told |= {first: text, **dict.fromkeys(others, text if text.startswith("as in") else f"see `{first}`")}
    return told


def docstring(function: Callable[..., Any]) -> Docstring:
    """The function's docstring, taken apart."""
    text: list[str] = []
    notes: list[str] = []
    sections: dict[str, dict[str, str]] = {}
    returns = ""
    for part in inspect.cleandoc(function.__doc__ or "").split("\n\n"):
        head, *lines = part.splitlines()
        if head == "Returns:":
            returns = " ".join(line.strip() for line in lines)
        elif head in ("Args:", "Raises:"):
            sections[head.removesuffix(":")] = entries(lines)
        else:
            (notes if sections else text).append(paragraph(part))
    for section in sections.values():
        for name, description in section.items():
            if match := re.match(r"as in `(\w+)`\.(.*)", description):
                section[name] = referred(name, docstring(public(match[1])), match[2])
    return Docstring(text, sections, returns, notes)


def referred(name: str, told: Docstring, addition: str) -> str:
    """The description of `name` elsewhere, and what is added to it; an order of its own replaces that of the other."""
    (found,) = (section[name] for section in told.sections.values() if name in section)
    return (found.split(" Ordered:")[0] if "Ordered:" in addition else found) + addition


def paragraph(text: str) -> str:
    """A paragraph in one line; a block of indented lines as a block of code."""
    if not text.startswith("    "):
        return " ".join(text.split())
    return f"<!-- not run: a formula -->\n```\n{inspect.cleandoc(text)}\n```"


def public(name: str) -> Callable[..., Any]:
    """The op's public function."""
    function: Callable[..., Any] = getattr(tunedcomm, name)
    return function


def default_of(parameter: inspect.Parameter) -> str:
    """A parameter's default as it is written; empty if it must be given."""
    return "" if parameter.default is parameter.empty else repr(parameter.default).replace("'", '"')


def signature(name: str) -> str:
    """The public function's parameters without their annotations."""
    found, star = [], False
    for parameter in inspect.signature(public(name)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            found.append("*")
            star = True
        default = default_of(parameter)
        found.append(parameter.name + (f"={default}" if default else ""))
    return f"tunedcomm.{name}({', '.join(found)})"


def type_of(parameter: inspect.Parameter) -> str:
    """A parameter's type, without pipes, which would end a table's cell."""
    if parameter.annotation == "NumericsPolicy":
        return " or ".join(f'`"{policy}"`' for policy in get_args(NumericsPolicy))
    plain = re.sub(r"\b(?:torch|dist)\.(?=[A-Z])", "", parameter.annotation)
    return " or ".join(f"`{part}`" for part in plain.split(" | "))


def parameter_table(name: str, described: dict[str, str]) -> list[str]:
    """The parameters of an op's function, in their order.

    Raises:
        KeyError: the docstring does not describe one.
    """
    lines = ["| parameter | type | default | what it is |", "|---|---|---|---|"]
    for parameter in inspect.signature(public(name)).parameters.values():
        default = f"`{default_of(parameter)}`" if default_of(parameter) else "required"
        lines.append(f"| `{parameter.name}` | {type_of(parameter)} | {default} | {described[parameter.name]} |")
    return lines


def runs(spec: OpSpec, variant: Variant, reduction: str) -> bool:
    """True if the variant does this reduction at one of the op's usual shapes."""
    dtype = spec.dtypes[0]
    layout, scaling = spec.layouts[0], spec.scalings_of(dtype)[0]
    for shape in spec.default_shapes("cuda", 2):
        problem = Problem(spec.name, shape, dtype, 4, reduction, layout=layout, scaling=scaling)
        if variant.infeasible(problem, variant.default(problem, PROBE), PROBE) is None:
            return True
    return False


def reductions(spec: OpSpec) -> str:
    """Which reductions there are, and which of them kernels do; empty for ops that reduce nothing."""
    named = [reduction for reduction in spec.reductions if reduction]
    others = [variant for variant in variants(spec.name).values() if not variant.is_library]
    by_kernels = [one for one in named if any(runs(spec, variant, one) for variant in others)]
    left = [one for one in named if one not in by_kernels]
    if len(named) < 2:
        return f"- Reduction: {named[0]}." if named else ""
    alone = f"; {', '.join(left)} by the variant `library` alone" if left else ""
    return f"- Reductions: {', '.join(by_kernels)}{alone}."


def layouts(spec: OpSpec) -> list[str]:
    """What `Problem.layout` may be, what is tuned by default first."""
    if spec.name != "all_to_all_v":
        return list(spec.layouts)
    found = {layout_of(row_bytes, count) for row_bytes in (16, 4, 2, 1) for count in range(1, 17)}
    return sorted(found, key=list(LAYOUTS).index)


def values(found: list[str] | tuple[str, ...]) -> str:
    """Values in code, the empty one as it is written in Python."""
    return ", ".join(f"`{value}`" if value else '`""`' for value in found)


def see_also(name: str) -> list[str]:
    """Links to what else there is about an op."""
    found = [f"[{name}.md]({name}.md)"] if PAGE.with_name(f"{name}.md").exists() else []
    for page, heading, label in ELSEWHERE:
        text = PAGE.with_name(page).read_text(encoding="utf-8")
        (part,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        if re.search(rf"\b{name}(?:_tensor)?\b", part):
            found.append(f"[{label}]({page}#{heading.lower().replace(' ', '-')})")
    if re.search(rf"\b{name}\b", PAGE.with_name("performance.md").read_text(encoding="utf-8")):
        found.append("[latencies](performance.md)")
    for example in sorted((ROOT / "examples").glob("*.py")):
        if example.stem.endswith(f"_{name}"):
            found.append(f"[examples/{example.name}](../examples/{example.name})")
    return found


def facts(spec: OpSpec) -> list[str]:
    """What a problem of the op may be."""
    lines = [f"- Shape of a problem: {spec.shape_help}.", f"- Dtypes of kernels: {', '.join(spec.dtypes)}."]
    lines += [line] if (line := reductions(spec)) else []
    if layouts(spec) != [""]:
        lines.append(f"- Layouts: {values(layouts(spec))}.")
    if spec.scalings != ("",):
        lines.append(f"- Scalings: {values(spec.scalings)}.")
    if spec.in_place:
        lines.append("- In place: `out` may be the input; such calls are problems of their own.")
    lines += [f"- See also: {', '.join(links)}."] if (links := see_also(spec.name)) else []
    return lines


def common_errors() -> dict[str, str]:
    """Errors that all functions describe in the same words."""
    every = [docstring(public(name)).sections["Raises"] for name in ops()]
    return {name: text for name, text in every[0].items() if all(one.get(name) == text for one in every)}


def error_line(name: str, text: str) -> str:
    """One error with a link to what to do about it."""
    return f"- [`{name}`](errors.md#{name.lower()}): {text}"


def section(spec: OpSpec) -> str:
    """One op."""
    told, common = docstring(public(spec.name)), common_errors()
    lines = [f"## {spec.name}", "", f"`{signature(spec.name)}`", ""]
    lines += [line for part in told.text for line in (part, "")]
    lines += [*parameter_table(spec.name, told.sections["Args"]), "", f"Returns {told.returns}", ""]
    own = [error_line(*each) for each in told.sections["Raises"].items() if each[0] not in common]
    lines += [*own, ""] if own else []
    lines += [*(line for part in told.notes for line in (part, "")), *facts(spec)]
    lines += ["", "| variant | numerics | what it does | configs |", "|---|---|---|---:|"]
    for variant in variants(spec.name).values():
        count = sum(1 for _ in variant.space.enumerate())
        forced = "" if variant.bounded or "forced only" in variant.summary else "; forced only"
        lines.append(f"| `{variant.name}` | {variant.numerics} | {variant.summary}{forced} | {count} |")
    return "\n".join(lines) + "\n"


def overview() -> str:
    """All ops in a table, and what is common to them."""
    lines = ["| op | what it does |", "|---|---|"]
    lines += [f"| [`{spec.name}`](#{spec.name}) | {spec.summary} |" for spec in ops().values()]
    lines += ["", "Every op may raise", ""]
    lines += [error_line(name, text) for name, text in common_errors().items()]
    lines += [
        "",
        "and those that its section names. [errors.md](errors.md) has the rest: rare ones, of set-up and settings.",
    ]
    return "\n".join(lines) + "\n"


def classes() -> str:
    """The numerics classes, and who admits them."""
    lines = ["## Numerics classes", "", "| class | what it means | `numerics=` that admits it |", "|---|---|---|"]
    for name in get_args(Numerics):
        by = ", ".join(f'`"{policy}"`' for policy in get_args(NumericsPolicy) if admits(policy, name))
        lines.append(f"| `{name}` | {CLASSES[name]} | {by} |")
    return "\n".join(lines) + "\n"


def limit(value: float | None) -> str:
    """A tolerance as a cell."""
    return "" if value is None else "exact" if value == 0 else f"{value:g}"


def tolerances() -> str:
    """The largest relative errors, by op."""
    checked = [spec for spec in ops().values() if any(spec.tolerance.values())]
    names = list(dict.fromkeys(name for spec in checked for name in spec.tolerance))
    without = ", ".join(f"`{spec.name}`" for spec in ops().values() if spec.ordered_reference is None)
    lines = [CHECKED.format(without=without)]
    lines += [f"| op | {' | '.join(f'`{name}`' for name in names)} |", "|---|" + "---:|" * len(names)]
    for spec in ops().values():
        cells = [limit(spec.tolerance.get(name)) for name in names]
        lines.append(f"| `{spec.name}` | {' | '.join(cells)} |")
    moved = ", ".join(f"`{spec.name}`" for spec in ops().values() if not any(spec.tolerance.values()))
    return "\n".join([*lines, "", f"{moved} are exact in their other dtypes, too: they compute nothing."]) + "\n"


def meanings(found: list[str], text: dict[str, str]) -> list[str]:
    """Rows of a table, in the order of `text`; values of one meaning share a row.

    Raises:
        ValueError: one has no meaning in `text`.
    """
    by_text: dict[str, list[str]] = {}
    for value in sorted(found, key=list(text).index):
        by_text.setdefault(text[value], []).append(value)
    return [f"| {values(alike)} | {said} |" for said, alike in by_text.items()]


def parts() -> str:
    """What layouts and scalings mean."""
    found = {part for spec in ops().values() for layout in layouts(spec) for part in layout.split("+")}
    scalings = {scaling for spec in ops().values() for scaling in spec.scalings}
    lines = [PARTS, "| layout | what it says |", "|---|---|", *meanings(list(found), LAYOUTS)]
    lines += ["", "| scaling | what it says |", "|---|---|", *meanings(list(scalings), SCALINGS)]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    kernels.discover()
    head = [HEAD, overview(), classes(), EXPLAIN, parts(), tolerances()]
    return "\n".join([*head, *(section(get_op(name)) for name in ops())])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
