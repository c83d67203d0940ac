"""Write the generated parts of the pages and the README's plot: `python docs/generate.py`. A test keeps them current.

A part stands between `<!-- begin generated NAME -->` and `<!-- end generated NAME -->`; NAME is a key of PARTS.
References come from the code, tables of measurements from bench/results. mkdocs loads this file for its hooks.
"""

from __future__ import annotations

import csv
import functools
import inspect
import json
import re
import typing
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.models import ArgumentInfo

import tunedcomm
from tunedcomm import errors, kernels
from tunedcomm.cli.main import app
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.schema import Base, WorkingBase
from tunedcomm.db.store import Database
from tunedcomm.dispatch.dispatcher import decide
from tunedcomm.settings import SETTINGS
from tunedcomm.spec import DTYPES, OpSpec, ops, variants
from tunedcomm.symm.layout import limits_for

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PLOT = ROOT / "docs" / "all_reduce_h200.png"
Row = dict[str, str]
Run = dict[str, Row]


def table(heads: dict[str, str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; `heads` maps each heading to the alignment of its column, l or r."""
    rule = "".join("---:|" if side == "r" else "---|" for side in heads.values())
    text = [f"| {' | '.join(heads)} |", f"|{rule}"]
    return "\n".join([*text, *(f"| {' | '.join(line)} |" for line in lines)])


def cell(text: str) -> str:
    """Text in one line, with the pipes that would end a table's cell escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def code(values: Iterable[str]) -> str:
    """Values as code, separated by commas; the empty one as in Python."""
    return ", ".join(f"`{value}`" if value else '`""`' for value in values)


# The command line.


def _verbs(command: Any, name: str) -> Iterator[tuple[str, Callable[..., None]]]:
    context = typer.Context(command, info_name=name)
    for verb in command.list_commands(context):
        found = command.get_command(context, verb)
        is_group = hasattr(found, "list_commands")
        yield from _verbs(found, f"{name} {verb}") if is_group else [(f"{name} {verb}", found.callback)]


_KINDS = {bool: "", str: "text", int: "whole number", float: "number", Path: "path"}


def _option(name: str, annotation: Any, default: object) -> tuple[str, ...]:
    kind, info = typing.get_args(annotation)[:2]
    kinds = [kind, *typing.get_args(kind)]
    several = [typing.get_args(one)[0] for one in kinds if typing.get_origin(one) is list]
    base = next(one for one in (*several, *kinds) if one in _KINDS or typing.get_origin(one) is typing.Literal)
    if isinstance(info, ArgumentInfo):
        names = [info.metavar or name.upper()]
    else:
        # In an annotation the first name stands where a default would.
        given = [info.default] if isinstance(info.default, str) else []
        names = "/".join([*given, *(info.param_decls or ())] or [f"--{name.replace('_', '-')}"]).split("/")
    value = _KINDS[base] if base in _KINDS else code(typing.get_args(base))
    required = "required" if default is inspect.Parameter.empty else ""
    shown = required or ("" if default in (None, False, "") else f"`{default}`")
    return code(names), value + (", several" if several else ""), shown, cell(info.help or "")


def _of_verbs(row: tuple[str, ...], found: dict[str, list[tuple[str, ...]]], often: Counter[str]) -> tuple[str, ...]:
    """A common option; with its verbs, where an option of that name means something else for others."""
    if often[row[0]] == 1:
        return row
    verbs = code(name.removeprefix("tunedcomm ") for name, rows in found.items() if row in rows)
    return (*row[:-1], f"{row[-1]} ({verbs})")


def commands() -> str:
    """Every verb with its options; those that verbs have in common stand in a table of their own."""
    verbs, found = dict(_verbs(typer.main.get_command(app), "tunedcomm")), {}
    for name, verb in verbs.items():
        hints = typing.get_type_hints(verb, include_extras=True)
        held = [one for one in inspect.signature(verb).parameters.values() if one.name not in ("as_json", "context")]
        found[name] = [_option(one.name, hints[one.name], one.default) for one in held]
    held = Counter(row for rows in found.values() for row in rows)
    common = [row for row, times in held.items() if times > 1]
    often = Counter(name for name, *_ in common)
    heads = dict.fromkeys(("option", "value", "default", ""), "l")
    lines = ["## Common options", "", table(heads, [_of_verbs(row, found, often) for row in sorted(common)])]
    for name, rows in found.items():
        text, *examples = inspect.cleandoc(verbs[name].__doc__ or "").split("Example:")
        lines += ["", f"## {name}", ""]
        lines += [line for part in text.strip().split("\n\n") for line in (" ".join(part.split()), "")]
        lines += ["```bash", *(" ".join(part.split()) for part in examples), "```"]
        if own := [row for row in rows if row not in common]:
            lines += ["", table(heads, own)]
        if shared := [row[0] for row in rows if row in common]:
            lines += ["", f"[Common options](#common-options): {', '.join(shared)}."]
    return "\n".join(lines)


# Settings, errors and the schema.


def settings() -> str:
    """Every environment variable."""
    lines = [[f"`{one.name}`", cell(one.meaning), cell(one.allowed), cell(one.default_text)] for one in SETTINGS]
    return table(dict.fromkeys(("variable", "meaning", "allowed", "default"), "l"), lines)


def every_error() -> str:
    """Every error, what to do about it, and the built-in types by which it can be caught."""
    lines = []
    for error in vars(errors).values():
        if inspect.isclass(error) and issubclass(error, errors.TunedCommError) and error is not errors.TunedCommError:
            what, do = inspect.cleandoc(error.__doc__ or "").split("\n\n", 1)
            bases = [base.__name__ for base in error.__mro__[1:] if base not in (object, BaseException, Exception)]
            caught = ", ".join(f"`{base}`" for base in bases if base != "TunedCommError")
            lines.append([f"`{error.__name__}`", cell(what), cell(do), caught])
    return table(dict.fromkeys(("error", "meaning", "what to do", "also a"), "l"), lines)


def schema() -> str:
    """Every table of a database."""
    lines = []
    for base in (Base, WorkingBase):
        by_name = {mapper.class_.__tablename__: mapper.class_ for mapper in base.registry.mappers}
        for name, held in base.metadata.tables.items():
            if name in by_name:
                lines.append([f"`{name}`", cell(by_name[name].__doc__ or ""), code(held.columns.keys())])
    return table(dict.fromkeys(("table", "a row is", "columns"), "l"), lines)


# Ops and variants.


class Docstring(NamedTuple):
    """A public function's docstring; `sections` has `Args` and `Raises`, `notes` what follows the last section."""

    text: list[str]
    sections: dict[str, dict[str, str]]
    returns: str
    notes: list[str]


def _entries(lines: list[str]) -> dict[str, str]:
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if match := re.fullmatch(r" {4}(\w+(?:, \w+)*): (.*)", line):
            found.append((match[1], [match[2]]))
        elif line.strip():
            found[-1][1].append(line.strip())
    told = {}
    for names, parts in found:
        first, *others = names.split(", ")
        told[first] = " ".join(parts)
        told |= {name: told[first] if told[first].startswith("as in") else f"see `{first}`" for name in others}
    return told


def docstring(function: Callable[..., Any]) -> Docstring:
    """The function's docstring, taken apart; "as in `op`." stands for the text of that op's docstring."""
    text: list[str] = []
    notes: list[str] = []
    sections: dict[str, dict[str, str]] = {}
    returns = ""
    for part in inspect.cleandoc(function.__doc__ or "").split("\n\n"):
        head, *lines = part.splitlines()
        if head == "Returns:":
            returns = " ".join(line.strip() for line in lines)
        elif head in ("Args:", "Raises:"):
            sections[head.removesuffix(":")] = _entries(lines)
        else:
            shown = f"```text\n{inspect.cleandoc(part)}\n```" if part.startswith("    ") else " ".join(part.split())
            (notes if sections else text).append(shown)
    for section in sections.values():
        for name, description in section.items():
            if match := re.match(r"as in `(\w+)`\.(.*)", description):
                other = docstring(getattr(tunedcomm, match[1]))
                (found,) = (held[name] for held in other.sections.values() if name in held)
                section[name] = (found.split(" Ordered:")[0] if "Ordered:" in match[2] else found) + match[2]
    return Docstring(text, sections, returns, notes)


def _described() -> Counter[tuple[str, str]]:
    """How many ops describe a parameter or an error in the same words."""
    told = [docstring(getattr(tunedcomm, name)) for name in ops()]
    return Counter(each for one in told for section in one.sections.values() for each in section.items())


def ops_overview() -> str:
    """All ops, and the parameters and errors that they have in common."""
    rows = [[f"[`{spec.name}`](#{spec.name})", spec.summary] for spec in ops().values()]
    shared = [(f"`{name}`", cell(text)) for (name, text), held in _described().items() if held >= 3]
    lines = [table({"op": "l", "result": "l"}, rows), "", "Parameters that several ops share:", ""]
    lines += [table({"parameter": "l", "": "l"}, [list(row) for row in shared if "Error" not in row[0]])]
    lines += ["", "Every op may raise", "", *(f"- {name}: {text}" for name, text in shared if "Error" in name)]
    return "\n".join(lines)


def tolerances() -> str:
    """The largest relative errors, by op and dtype or scaling."""
    names = list(
        dict.fromkeys(name for spec in ops().values() if any(spec.tolerance.values()) for name in spec.tolerance)
    )
    lines = []
    for spec in ops().values():
        limits = [spec.tolerance.get(name) for name in names]
        lines.append([f"`{spec.name}`", *("" if one is None else f"{one:g}" if one else "exact" for one in limits)])
    return table({"op": "l", **{f"`{name}`": "r" for name in names}}, lines)


def op_problems() -> str:
    """Every op's problems: shape, dtypes that kernels take, reductions, and the parts of layouts and scalings."""
    lines = []
    for spec in ops().values():
        parts = [dict.fromkeys(part for text in held for part in text.split("+") if part) for held in _texts(spec)]
        dtypes = "any" if set(spec.dtypes) == set(DTYPES) else ", ".join(spec.dtypes)
        lines.append([f"`{spec.name}`", cell(spec.shape_help), dtypes, *map(code, (spec.reductions, *parts))])
    heads = ("op", "shape", "dtypes of kernels", "reductions", "parts of layouts", "parts of scalings")
    return table(dict.fromkeys(heads, "l"), [["" if one == '`""`' else one for one in line] for line in lines])


def _texts(spec: OpSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return spec.layouts, spec.scalings


def op_sections() -> str:
    """Every op: its function and its variants."""
    times, lines = _described(), []
    for spec in ops().values():
        told, signature = (
            docstring(getattr(tunedcomm, spec.name)),
            str(inspect.signature(getattr(tunedcomm, spec.name))),
        )
        shown = re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)
        lines += [f"## {spec.name}", "", f"`tunedcomm.{spec.name}{re.sub(r'(torch|dist)[.](?=[A-Z])', '', shown)}`", ""]
        lines += [line for part in told.text for line in (part, "")]
        rows = [[f"`{name}`", cell(text)] for name, text in told.sections["Args"].items() if times[name, text] < 3]
        lines += [table({"parameter": "l", "": "l"}, rows), "", f"Returns {' '.join((told.returns, *told.notes))}", ""]
        own = [each for each in told.sections["Raises"].items() if times[each] < 3]
        lines += [*(f"- `{name}`: {text}" for name, text in own), ""] if own else []
        rows = []
        for variant in variants(spec.name).values():
            forced = "" if variant.bounded or "forced only" in variant.summary else "; forced only"
            count = sum(1 for _ in variant.space.enumerate())
            rows.append([f"`{variant.name}`", variant.numerics, variant.summary + forced, str(count)])
        lines += [table({"variant": "l", "numerics": "l", "algorithm": "l", "configs": "r"}, rows), ""]
    return "\n".join(lines[:-1])


# Measurements.


@functools.cache
def rows_of(name: str) -> tuple[Row, ...]:
    """All rows of a file of bench/results."""
    with (RESULTS / name).open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


@functools.cache
def runs(name: str, op: str, world_size: int, mode: str = "graph", dtype: str = "bfloat16") -> dict[str, list[Run]]:
    """Shape to the runs that measured it on plain inputs, out of place, newest first."""
    found: dict[str, dict[str, Run]] = defaultdict(lambda: defaultdict(dict))
    for row in rows_of(name):
        kind = (row["op"], row["world_size"], row["mode"], row["dtype"], row["input_kind"] or "plain")
        is_ours_in_place = row["in_place"] == "True" and row["contender"] == "tuned"
        if kind == (op, str(world_size), mode, dtype, "plain") and not is_ours_in_place:
            found[row["shape"]][row["run_id"]][row["contender"]] = row
    return {
        shape: sorted(by_run.values(), key=lambda run: max(row["date"] for row in run.values()), reverse=True)
        for shape, by_run in sorted(found.items(), key=lambda item: int(item[0]) if item[0].isdigit() else 0)
    }


def newest(name: str, op: str, world_size: int, mode: str, *needs: str) -> dict[str, Run]:
    """Shape to the newest run that has dispatch's choice and these contenders."""
    found = {}
    for shape, held in runs(name, op, world_size, mode).items():
        complete = [run for run in held if {"tuned", *needs} <= set(run)]
        if complete:
            found[shape] = complete[0]
    return found


def p50(run: Run, contender: str) -> float:
    """Median of a contender in µs."""
    return float(run[contender]["latency_p50_us"])


def us(run: Run, contender: str) -> str:
    """Median of a contender in µs; a dash if it did not run."""
    return f"{p50(run, contender):.2f}" if contender in run else "–"


def size_text(size: int) -> str:
    """Bytes in KiB or MiB."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def size_of(run: Run) -> str:
    """The message of a collective in bytes, the shape of anything else."""
    row = run["tuned"]
    return size_text(int(row["message_bytes"])) if row["shape"].isdigit() else row["shape"]


ALL_REDUCE, COLLECTIVES, GEMMS = "all_reduce_h200.csv", "collectives_h200.csv", "gemm_h200.csv"
TORCH = ("torch_one_shot_symmetric", "torch_two_shot_symmetric")
_PEERS = {TORCH[1]: "PyTorch two-shot", TORCH[0]: "PyTorch one-shot", "kraken": "Kraken", "library": "NCCL"}
_NORM_PEERS = {"library": "NCCL, eager norm", "nccl_compiled_norm": "NCCL, compiled norm"}
_GEMM_PEERS = {"cublas": "cuBLAS alone", "torch_fused": "PyTorch fused", "library": "cuBLAS + NCCL"}


def measured(name: str, op: str, ranks: int, peers: dict[str, str], mode: str = "graph", step: int = 2) -> str:
    """Medians in µs of the newest run of every `step`-th size; the ratio is that of the last peer's time to ours.

    A peer that the newest run lacks is taken from the newest run that has it. `op` may be several, separated by spaces.
    """
    lines, against, several = [], list(peers)[-1], op.split()
    for each in several:
        held = runs(name, each, ranks, mode)
        known = [peer for peer in peers if any(peer in one for every in held.values() for one in every)]
        for shape, run in list(newest(name, each, ranks, mode, known[0], against).items())[::step]:
            cells = [us(next((one for one in (run, *held[shape]) if peer in one), {}), peer) for peer in peers]
            ratio, variant = p50(run, against) / p50(run, "tuned"), run["tuned"]["config"].partition("(")[0]
            lines.append([f"`{each}`", size_of(run), *cells, us(run, "tuned"), f"{ratio:.2f}", f"`{variant}`"])
    heads = dict.fromkeys((*peers.values(), "tunedcomm", f"{peers[against]} / tunedcomm"), "r")
    if len(several) > 1:
        return table({"op": "l", "size": "l", **heads, "variant": "l"}, lines)
    return table({"size": "l", **heads, "variant": "l"}, [line[1:] for line in lines])


def all_reduce_host() -> str:
    """µs of all_reduce on CPU tensors beside gloo, and the ratio, by size and number of ranks."""
    name, heads, lines = "all_reduce_host.csv", {"message": "r"}, defaultdict[str, list[str]](list)
    for ranks in sorted({int(row["world_size"]) for row in rows_of(name)}):
        heads |= dict.fromkeys((f"gloo, {ranks} ranks", f"tunedcomm, {ranks} ranks", f"ratio, {ranks} ranks"), "r")
        for run, *_ in runs(name, "all_reduce", ranks, "eager", "float32").values():
            gloo, ours = p50(run, "library"), p50(run, "tuned")
            lines[size_of(run)] += [
                f"{gloo:,.0f}",
                f"{ours:,.3g}" if ours < 100 else f"{ours:,.0f}",
                f"{gloo / ours:.1f}",
            ]
    return table(heads, [[size, *cells] for size, cells in lines.items()])


def llama() -> str:
    """µs a layer of the newest run, and the gain of tunedcomm's best configuration over PyTorch's best."""
    found: dict[str, dict[str, Run]] = defaultdict(lambda: defaultdict(dict))
    for row in rows_of("model/llama_tp_x2_h200.csv"):
        found[row["workload"]][row["run_id"]][row["configuration"]] = row
    names = ("library_eager", "library_compiled", "async_tp_compiled")
    names += ("intercept_eager", "intercept_compiled", "fusion_compiled")
    lines = []
    for workload, by_run in found.items():
        run = max(by_run.values(), key=lambda run: max(row["date"] for row in run.values()))
        times = {name: float(run[name]["us_per_layer"]) for name in names if run.get(name, {}).get("status") == "ok"}
        best = [min(times[name] for name in some if name in times) for some in (names[:3], names[3:])]
        cells = [f"{times[name]:.1f}" if name in times else "–" for name in names]
        lines.append([f"`{workload}`", *cells, f"{best[0] / best[1]:.3f}"])
    return table({"workload": "l", **{f"`{name}`": "r" for name in names}, "gain": "r"}, lines)


def columns(name: str, heads: dict[str, str]) -> str:
    """Columns of a file as they stand; `heads` maps them to headings."""
    return table(dict.fromkeys(heads.values(), "r"), [[row[column] for column in heads] for row in rows_of(name)])


def regret() -> str:
    """Mean and worst regret of every rule, by number of GPUs."""
    heads, lines = {"rule": "l"}, defaultdict[str, list[str]](list)
    for row in rows_of("replay/regret_rules_h200.csv"):
        heads |= {f"{kind}, {row['world_size']} GPUs": "r" for kind in ("mean", "worst")}
        lines[row["rule"]] += [row["regret_mean"], row["regret_worst"]]
    return table(heads, [[rule, *cells] for rule, cells in lines.items()])


_SCALE = {"workers": "workers", "killed": "killed", "trials": "trials", "trials_per_s": "trials/s"}
_SCALE |= {"ideal_per_s": "ideal", "claim_ms_p50": "claim p50, ms", "record_ms_p50": "record p50, ms"}
_SCALE |= {"server_cpu_ms": "server CPU, ms/trial", "lost": "lost", "doubled": "doubled"}


def shipped() -> str:
    """The shipped databases, from their manifests."""
    lines = []
    for path in sorted((ROOT / "tuning_db").glob("*.manifest.json"), reverse=True):
        manifest = json.loads(path.read_text(encoding="utf-8"))
        name = path.name.removesuffix(".manifest.json")
        held = (", ".join(map(str, manifest["world_sizes"])), ", ".join(f"`{op}`" for op in manifest["ops"]))
        lines.append([f"`{name}`", *held, f"{manifest['rows']['trials']:,}", f"`{manifest['sha256'][:16]}`"])
    return table({"file": "l", "ranks": "r", "ops": "l", "trials": "r", "SHA-256 begins": "l"}, lines)


def same_bits() -> str:
    """The cost of numerics="ordered" at the shipped problems of ops that sum or multiply, by op and number of GPUs."""
    same, other, unknown = Counter[Any](), defaultdict[Any, list[float]](list), Counter[Any]()
    for path in sorted((ROOT / "tuning_db").glob("*.db")):
        manifest = json.loads(path.with_name(f"{path.name}.manifest.json").read_text(encoding="utf-8"))
        with Database.open(path, immutable=True) as database:
            environment = database.environments()[0]
        for ranks in manifest["world_sizes"]:
            snapshot = load_snapshot(environment, ranks, layers=[Layer("packaged", str(path))], strict=True)
            for problem in {row.problem: None for row in snapshot.rows}:
                if problem.op in ("all_gather", "all_to_all"):
                    continue
                limits, place = limits_for(environment, ranks), (problem.op, ranks)
                default, ordered = (decide(problem, snapshot, limits, policy=one) for one in ("default", "ordered"))
                if ordered.candidate == default.candidate:
                    same[place] += 1
                elif ordered.latency_us and default.latency_us:
                    other[place].append(ordered.latency_us / default.latency_us)
                else:
                    unknown[place] += 1
    places = {*same, *other, *unknown}
    counts = sorted({ranks for _, ranks in places})

    def shown(place: tuple[str, int]) -> str:
        ratios = other.get(place, [])
        parts = [f"{same[place]} the same"] if same[place] else []
        parts += (
            [f"{len(ratios)} at {' to '.join(dict.fromkeys(f'{f(ratios):.2f}' for f in (min, max)))}"] if ratios else []
        )
        return ", ".join([*parts, *([f"{unknown[place]} not measured"] if unknown[place] else [])])

    lines = [[f"`{op}`", *(shown((op, ranks)) for ranks in counts)] for op in sorted({op for op, _ in places})]
    return table({"op": "l", **{f"{ranks} GPUs": "l" for ranks in counts}}, lines)


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "settings": settings,
    "errors": every_error,
    "schema": schema,
    "ops": ops_overview,
    "tolerances": tolerances,
    "op problems": op_problems,
    "op sections": op_sections,
    "all_reduce, CPU": all_reduce_host,
    "all_reduce, 4 GPUs": lambda: measured(ALL_REDUCE, "all_reduce", 4, _PEERS),
    "all_reduce, 2 GPUs": lambda: measured(ALL_REDUCE, "all_reduce", 2, _PEERS),
    "all_reduce, eager": lambda: measured(ALL_REDUCE, "all_reduce", 4, _PEERS, "eager", step=1),
    "collectives": lambda: measured(COLLECTIVES, "all_gather reduce_scatter all_to_all", 4, {"library": "NCCL"}),
    "all_reduce_rms_norm": lambda: measured(COLLECTIVES, "all_reduce_rms_norm", 4, _NORM_PEERS),
    "fused GEMMs": lambda: measured(GEMMS, "gemm_rs ag_gemm gemm_ar", 4, _GEMM_PEERS),
    "same bits": same_bits,
    "llama": llama,
    "regret": regret,
    "scale": lambda: columns("replay/scale_replay.csv", _SCALE),
    "shipped": shipped,
}
_BARE = r"^\| message \| gloo.+\n(?:\|.+\n)+"  # the README's table has no such lines: its head tells
_PART = re.compile(rf"(?m)(<!-- begin generated (.+?) -->\n)(?s:.*?)(<!-- end generated \2 -->)|{_BARE}")


def pages() -> list[Path]:
    """Every page with a generated part."""
    every = [ROOT / "README.md", ROOT / "tuning_db" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in every if _PART.search(page.read_text(encoding="utf-8"))]


def written(page: str) -> str:
    """The text of a page with its generated parts made anew."""
    kernels.discover()
    return _PART.sub(lambda match: f"{match[1] or ''}{PARTS[match[2] or 'all_reduce, CPU']()}\n{match[3] or ''}", page)


# The README's plot.


_COLOURS = {"NCCL": "#8a94a6", "PyTorch's operators, the best": "#2f86d6", "Kraken": "#00a37a", "tunedcomm": "#e05a2b"}
_CURVES = dict(zip(_COLOURS, (("library",), TORCH, ("kraken",), ("tuned",)), strict=True))


def points() -> dict[str, list[list[float]]]:
    """Curve to [bytes, µs, NCCL's µs over them in the same run]."""
    found: dict[str, list[list[float]]] = {curve: [] for curve in _CURVES}
    held = runs(ALL_REDUCE, "all_reduce", 4)
    for shape, run in newest(ALL_REDUCE, "all_reduce", 4, "graph", TORCH[1]).items():
        kraken = next((one for one in held[shape] if {"kraken", "library"} <= set(one)), {})
        for curve, names in _CURVES.items():
            one = kraken if curve == "Kraken" else run
            if times := [p50(one, name) for name in names if name in one]:
                size = int(run["tuned"]["message_bytes"])
                found[curve].append([size, min(times), round(p50(one, "library") / min(times), 3)])
    return found


def draw(path: Path) -> None:
    """Write the plot; the image holds its points as text, which a test compares with the results."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 4.2), dpi=110, layout="constrained")
    curves, axes = points(), figure.subplots(1, 2)
    titles = ("all_reduce on 4 × H200, bf16, CUDA graphs: latency, µs", "times as fast as NCCL in the same run")
    ticks = [1 << power for power in range(10, 29, 3)]
    for column, (panel, title) in enumerate(zip(axes, titles, strict=True), 1):
        for curve, held in curves.items():
            panel.plot([p[0] for p in held], [p[column] for p in held], "o-", color=_COLOURS[curve], label=curve)
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [size_text(tick) for tick in ticks])
        panel.set_title(title, fontsize=11, loc="left")
        panel.grid(True, color="#e3e7ed", linewidth=0.8)
    axes[0].set_yscale("log")
    axes[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes[1].set_ylim(bottom=0)
    axes[0].legend(fontsize=9.5, frameon=False)
    figure.savefig(path, metadata={"Software": None, "Points": json.dumps(curves)})


# Hooks of mkdocs: the README is the first page, and links to files that are no pages become their names.


def on_files(files: Any, config: Any) -> Any:
    """Add the README as the first page."""
    from mkdocs.structure.files import File

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links out of the site into names."""
    folder = ROOT if page.file.src_uri == "index.md" else ROOT / "docs"

    def shown(match: re.Match[str]) -> str:
        text, target = match.groups()
        if "://" in target or target.startswith("#") or files.get_file_from_path(target.partition("#")[0]):
            return match.group()
        place = (folder / target).resolve()
        if not place.exists():
            return match.group()
        name = str(place.relative_to(ROOT.resolve()))
        return f"`{name}`" if text.strip("`") in (name, place.name) else f"{text} (`{name}`)"

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", shown, markdown)


if __name__ == "__main__":
    for path in pages():
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
    draw(PLOT)
