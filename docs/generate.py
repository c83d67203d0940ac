"""Write the generated parts of the pages and the README's plot: `python docs/generate.py`. A test keeps them current.

A part stands between `<!-- begin generated NAME -->` and `<!-- end generated NAME -->`; NAME is a key of PARTS.
References come from the code, tables of measurements from bench/results. mkdocs loads this file for its hooks.
"""

from __future__ import annotations

import csv
import inspect
import json
import math
import re
import typing
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer

import tunedcomm
from tunedcomm import errors, kernels
from tunedcomm.cli.main import app
from tunedcomm.db.layers import Layer, load_snapshot, packaged_databases
from tunedcomm.db.schema import Base, WorkingBase
from tunedcomm.db.store import Database
from tunedcomm.dispatch.decide import decide
from tunedcomm.metrics import format_bytes, format_us
from tunedcomm.settings import SETTINGS
from tunedcomm.spec import DTYPES, ops, variants
from tunedcomm.symm.layout import limits_for

ROOT = Path(__file__).parents[1]
PLOT = ROOT / "docs" / "all_reduce_h200.png"
Run = dict[str, dict[str, str]]


def table(heads: dict[str, str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; `heads` maps each heading to the alignment of its column, l or r."""
    rule = "".join("---:|" if side == "r" else "---|" for side in heads.values())
    text = [f"| {' | '.join(heads)} |", f"|{rule}"]
    return "\n".join([*text, *(f"| {' | '.join(line)} |" for line in lines)])


def cell(text: str) -> str:
    """Text in one line, with the pipes that would end a table's cell escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def code(values: Iterable[str]) -> str:
    """Values as code, separated by commas."""
    return ", ".join(f"`{value}`" for value in values)


# The command line, settings, errors and the schema.


def _verbs(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    context = typer.Context(command, info_name=name)
    for verb in command.list_commands(context):
        found = command.get_command(context, verb)
        full = f"{name} {verb}".strip()
        yield from _verbs(found, full) if hasattr(found, "list_commands") else [(full, found)]


_KINDS = {bool: "", str: "text", int: "whole number", float: "number", Path: "path"}


def _value(kind: Any) -> str:
    if kind in _KINDS:
        return _KINDS[kind]
    if typing.get_origin(kind) is typing.Literal:
        return code(typing.get_args(kind))
    first = _value(typing.get_args(kind)[0])
    return f"{first}, several" if typing.get_origin(kind) is list else first


def _options(verb: Any) -> list[tuple[str, ...]]:
    hints, rows = typing.get_type_hints(verb.callback), []
    for option in verb.params:
        if option.name != "as_json":
            is_argument = option.param_type_name == "argument"
            names = [option.metavar or option.name.upper()] if is_argument else [*option.opts, *option.secondary_opts]
            given = "" if option.default in (None, False, "") else f"`{option.default}`"
            default = "required" if option.required else given
            rows.append((code(names), _value(hints[option.name]), default, cell(option.help or "")))
    return rows


def commands() -> str:
    """Every verb with its options; those that verbs have in common stand in a table of their own."""
    verbs = dict(_verbs(typer.main.get_command(app), ""))
    found = {name: _options(verb) for name, verb in verbs.items()}
    times = Counter(row for rows in found.values() for row in rows)
    common = sorted(row for row in times if times[row] > 1)
    meanings = Counter(name for name, *_ in common)
    heads = dict.fromkeys(("option", "value", "default", ""), "l")
    shown = []
    for *row, text in common:
        users = code(name for name, rows in found.items() if (*row, text) in rows)
        shown.append([*row, f"{text} ({users})" if meanings[row[0]] > 1 else text])
    lines = ["## Common options", "", table(heads, shown)]
    for name, rows in found.items():
        text, *examples = inspect.cleandoc(verbs[name].callback.__doc__ or "").split("Example:")
        lines += ["", f"## tunedcomm {name}", ""]
        lines += [line for part in text.strip().split("\n\n") for line in (" ".join(part.split()), "")]
        lines += ["```bash", *(" ".join(part.split()) for part in examples), "```"]
        if own := [row for row in rows if row not in common]:
            lines += ["", table(heads, own)]
        if shared := [row[0] for row in rows if row in common]:
            lines += ["", f"[Common options](#common-options): {', '.join(shared)}."]
    return "\n".join(lines)


def settings() -> str:
    """Every environment variable."""
    lines = [[f"`{one.name}`", cell(one.meaning), cell(one.allowed), cell(one.default_text)] for one in SETTINGS]
    return table(dict.fromkeys(("variable", "meaning", "allowed", "default"), "l"), lines)


def every_error() -> str:
    """Every error, what to do about it, and the built-in types by which it can be caught."""
    roots, lines = (errors.TunedCommError, Exception, BaseException, object), []
    for error in vars(errors).values():
        if inspect.isclass(error) and issubclass(error, errors.TunedCommError) and error not in roots:
            what, do = inspect.cleandoc(error.__doc__ or "").split("\n\n", 1)
            caught = code(base.__name__ for base in error.__mro__[1:] if base not in roots)
            lines.append([f"`{error.__name__}`", cell(what), cell(do), caught])
    return table(dict.fromkeys(("error", "meaning", "what to do", "also a"), "l"), lines)


def schema() -> str:
    """Every table of a database."""
    kinds = [kind for base in (Base, WorkingBase) for kind in base.__subclasses__() if kind is not WorkingBase]
    lines = [[f"`{one.__tablename__}`", cell(one.__doc__ or ""), code(one.__table__.columns.keys())] for one in kinds]
    return table(dict.fromkeys(("table", "a row is", "columns"), "l"), lines)


# Ops and variants.


class Docstring(NamedTuple):
    """A public name's docstring; `returns` also has the text behind the last section of `_SECTIONS`."""

    text: list[str]
    sections: dict[str, dict[str, str]]
    returns: list[str]


_SECTIONS = ("Args", "Attributes", "Raises")


def _entries(section: str) -> dict[str, str]:
    told = {}
    for names, text in re.findall(r"(?m)^ {4}(\w+(?:, \w+)*): (.*(?:\n {5,}.*)*)", section):
        first, *others = names.split(", ")
        told[first] = " ".join(text.split())
        told |= {name: told[first] if told[first].startswith("as in") else f"see `{first}`" for name in others}
    return told


def docstring(function: Callable[..., Any]) -> Docstring:
    """The docstring of a function or class, taken apart; "as in `op`." stands for the text of that op's docstring."""
    found = Docstring([], {}, [])
    for part in inspect.cleandoc(function.__doc__ or "").split("\n\n"):
        head, _, rest = part.partition(":\n")
        if head in _SECTIONS:
            found.sections[head] = _entries(rest)
        elif head in ("Returns", "Yields"):
            found.returns.append(" ".join(rest.split()))
        else:
            shown = f"```text\n{inspect.cleandoc(part)}\n```" if part.startswith("    ") else " ".join(part.split())
            (found.returns or found.text).append(shown)
    for section in found.sections.values():
        for name, description in section.items():
            if match := re.match(r"as in `(\w+)`\.(.*)", description):
                other = docstring(getattr(tunedcomm, match[1]))
                (text,) = (held[name] for held in other.sections.values() if name in held)
                section[name] = (text.split(" Ordered:")[0] if "Ordered:" in match[2] else text) + match[2]
    return found


def _described() -> Counter[tuple[str, str]]:
    """How many ops describe a parameter or an error in the same words."""
    sections = [section for name in ops() for section in docstring(getattr(tunedcomm, name)).sections.values()]
    return Counter(each for section in sections for each in section.items())


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
    names = dict.fromkeys(name for spec in ops().values() if any(spec.tolerance.values()) for name in spec.tolerance)
    lines = []
    for spec in ops().values():
        limits = [spec.tolerance.get(name) for name in names]
        lines.append([f"`{spec.name}`", *("" if one is None else f"{one:g}" if one else "exact" for one in limits)])
    return table({"op": "l", **{f"`{name}`": "r" for name in names}}, lines)


def op_problems() -> str:
    """Every op's problems: shape, dtypes that kernels take, reductions, and the parts of layouts and scalings."""
    lines = []
    for spec in ops().values():
        dtypes = "any" if set(spec.dtypes) == set(DTYPES) else ", ".join(spec.dtypes)
        held = (spec.reductions, spec.layouts, spec.scalings)
        parts = [code(dict.fromkeys(part for part in "+".join(texts).split("+") if part)) for texts in held]
        lines.append([f"`{spec.name}`", cell(spec.shape_help), dtypes, *parts])
    heads = ("op", "shape", "dtypes of kernels", "reductions", "parts of layouts", "parts of scalings")
    return table(dict.fromkeys(heads, "l"), lines)


def _signature(name: str) -> str:
    shown = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(getattr(tunedcomm, name))))
    return f"`tunedcomm.{name}{re.sub(r'(torch|dist)[.](?=[A-Z])', '', shown)}`"


_MEMBERS_INSIDE = ("Communicator", "ExpertBuffers", "FusionPass")  # their methods serve the package alone


def _methods(kind: type) -> list[list[str]]:
    """The public methods and properties of a class, with the first lines of their docstrings."""
    rows = []
    for name, one in vars(kind).items():
        is_method = inspect.isfunction(one)
        if not name.startswith("_") and (is_method or isinstance(one, property)):
            shown = f"{name}({', '.join([*inspect.signature(one).parameters][1:])})" if is_method else name
            rows.append([f"`{shown}`", cell((inspect.getdoc(one) or "").split("\n\n")[0])])
    return rows


def api() -> str:
    """Every public name that is neither an op nor an error."""
    lines = []
    for name in sorted({*tunedcomm.__all__} - {*ops(), *errors.__all__}, key=str.lower):
        thing = getattr(tunedcomm, name)
        told, is_class = docstring(thing), inspect.isclass(thing)
        lines += [f"## {name}", ""]
        if is_class and thing.__name__ != name:
            lines += [f"Another name of [`{thing.__name__}`](#{thing.__name__.lower()}).", ""]
            continue
        lines += [] if is_class and "Args" not in told.sections else [_signature(name), ""]
        lines += [line for part in told.text for line in (part, "")]
        for section, entries in told.sections.items() if name != "Communicator" else ():
            head = {"Args": "parameter", "Attributes": "attribute", "Raises": "raises"}[section]
            rows = [[f"`{entry}`", cell(text)] for entry, text in entries.items()]
            lines += [table({head: "l", "": "l"}, rows), ""]
        if is_class and name not in _MEMBERS_INSIDE and (rows := _methods(thing)):
            lines += [table({"method": "l", "": "l"}, rows), ""]
        verb = "Yields" if "Yields:" in (thing.__doc__ or "") else "Returns"
        lines += [f"{verb}: {told.returns[0]}", ""] if told.returns else []
        lines += [line for part in told.returns[1:] for line in (part, "")]
    return "\n".join(lines[:-1])


def op_sections() -> str:
    """Every op: its function and its variants."""
    times, lines = _described(), []
    for spec in ops().values():
        told = docstring(getattr(tunedcomm, spec.name))
        lines += [f"## {spec.name}", "", _signature(spec.name), ""]
        lines += [line for part in told.text for line in (part, "")]
        rows = [[f"`{name}`", cell(text)] for name, text in told.sections["Args"].items() if times[name, text] < 3]
        lines += [table({"parameter": "l", "": "l"}, rows), "", f"Returns {' '.join(told.returns)}", ""]
        own = [each for each in told.sections["Raises"].items() if times[each] < 3]
        lines += [*(f"- `{name}`: {text}" for name, text in own), ""] if own else []
        rows = []
        for variant in variants(spec.name).values():
            forced = "" if variant.waits_time_out or "forced only" in variant.summary else "; forced only"
            count = sum(1 for _ in variant.space.enumerate())
            rows.append([f"`{variant.name}`", variant.numerics, variant.summary + forced, str(count)])
        lines += [table({"variant": "l", "numerics": "l", "algorithm": "l", "configs": "r"}, rows), ""]
    return "\n".join(lines[:-1])


# Measurements.


def rows_of(name: str) -> list[dict[str, str]]:
    """All rows of a file of bench/results."""
    text = (ROOT / "bench" / "results" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def runs_of(rows: Iterable[dict[str, str]], column: str, member: str) -> dict[str, list[Run]]:
    """Value of a column to its runs, last first; a run maps the value of the column `member` to the row."""
    found: dict[str, dict[str, Run]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        found[row[column]][row["run_id"]][row[member]] = row
    return {value: list(by_run.values())[::-1] for value, by_run in found.items()}


def runs(
    name: str, op: str, world_size: int, mode: str = "graph", dtype: str = "bfloat16", **more: str
) -> dict[str, list[Run]]:
    """Shape to the runs that measured it on plain inputs, out of place, newest first."""
    wanted = {"op": op, "world_size": str(world_size), "mode": mode, "dtype": dtype, **more}
    rows = [row for row in rows_of(name) if wanted.items() <= row.items() and row["input_kind"] in ("", "plain")]
    rows = [row for row in rows if row["in_place"] != "True" or row["contender"] != "tuned"]
    rows.sort(key=lambda row: int(row["shape"]) if row["shape"].isdigit() else 0)
    return runs_of(rows, "shape", "contender")


def newest(held: dict[str, list[Run]], *needs: str) -> dict[str, Run]:
    """Shape to the newest run that has dispatch's choice and these contenders."""
    complete = {shape: [run for run in some if {"tuned", *needs} <= set(run)] for shape, some in held.items()}
    return {shape: some[0] for shape, some in complete.items() if some}


def p50(run: Run, contender: str) -> float:
    """Median of a contender in µs."""
    return float(run[contender]["latency_p50_us"])


def size_of(run: Run) -> str:
    """The message of a collective in bytes, the shape of anything else."""
    row = run["tuned"]
    return format_bytes(int(row["message_bytes"])) if row["shape"].isdigit() else row["shape"]


ALL_REDUCE, COLLECTIVES, GEMMS = "all_reduce_h200.csv", "collectives_h200.csv", "gemm_h200.csv"
EXPERTS = "experts_h200.csv"
TORCH = ("torch_one_shot_symmetric", "torch_two_shot_symmetric")
_PEERS = {TORCH[1]: "PyTorch two-shot", TORCH[0]: "PyTorch one-shot", "kraken": "Kraken", "library": "NCCL"}
_NORM_PEERS = {"library": "NCCL, eager norm", "nccl_compiled_norm": "NCCL, compiled norm"}
_GEMM_PEERS = {"cublas": "cuBLAS alone", "torch_fused": "PyTorch fused", "library": "cuBLAS + NCCL"}


def measured(name: str, op: str, ranks: int, peers: dict[str, str], mode: str = "graph", step: int = 2) -> str:
    """Medians in µs of the newest run of every `step`-th size; the ratio is the last peer's time over ours.

    A peer that the newest run lacks is taken from the newest run that has it. `op` may be several, separated by spaces.
    """
    lines, against, several = [], list(peers)[-1], op.split()
    for each in several:
        held = runs(name, each, ranks, mode)
        known = [peer for peer in peers if any(peer in one for every in held.values() for one in every)]
        for shape, run in list(newest(held, known[0], against).items())[::step]:
            shown = {
                peer: next((one for one in (run, *held[shape]) if peer in one), None) for peer in (*peers, "tuned")
            }
            cells = [f"{p50(one, peer):.2f}" if one else "–" for peer, one in shown.items()]
            ratio, variant = p50(run, against) / p50(run, "tuned"), run["tuned"]["config"].partition("(")[0]
            lines.append([f"`{each}`", size_of(run), *cells, f"{ratio:.2f}", f"`{variant}`"])
    heads = dict.fromkeys((*peers.values(), "tunedcomm", f"{peers[against]} / tunedcomm"), "r")
    if len(several) > 1:
        return table({"op": "l", "size": "l", **heads, "variant": "l"}, lines)
    return table({"size": "l", **heads, "variant": "l"}, [line[1:] for line in lines])


def best_others(name: str, ranks: int) -> str:
    """Medians in µs of NCCL, of the fastest contender that is not ours, and of tunedcomm, in one run each."""
    lines = []
    for op, scaling in dict.fromkeys((row["op"], row["scaling"]) for row in rows_of(name)):
        own = {"tuned", *variants(op)} - {"library"}
        for run, *_ in runs(name, op, ranks, scaling=scaling).values():
            best = min((peer for peer in run if peer not in own), key=lambda peer: p50(run, peer))
            times = [p50(run, contender) for contender in ("library", best, "tuned")]
            cells = [f"{time:.2f}" for time in times]
            named = "NCCL" if best == "library" else f"`{best}`"
            called = f"`{op}`, {scaling}" if scaling else f"`{op}`"
            lines.append([called, size_of(run), *cells, f"{times[1] / times[2]:.2f}", named])
    heads = dict.fromkeys(("NCCL", "best other", "tunedcomm", "best other / tunedcomm"), "r")
    return table({"op": "l", "size": "l", **heads, "it is": "l"}, lines)


def experts_and_flashinfer(ranks: int) -> str:
    """Medians in µs of dispatch and combine together, by tokens of a rank, beside FlashInfer's in the same run."""
    held: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows_of(f"experts_x{ranks}_h200.csv"):
        if row["contender"].endswith((" both", " FlashInfer")):
            held[row["shape"].partition("x")[0]][row["contender"]] = float(row["latency_p50_us"])
    lines = []
    for tokens, times in held.items():
        several = [times[f"{kind} both"] for kind in ("buffers", "plain", "contiguous")]
        theirs = times["buffers FlashInfer"]
        lines.append([tokens, *(f"{time:.1f}" for time in (*several, theirs)), f"{theirs / several[0]:.2f}"])
    kinds = ("`tokens`, in buffers", "`tokens`", "`contiguous`, by rank", "FlashInfer", "FlashInfer / in buffers")
    return table(dict.fromkeys(("tokens of a rank", *kinds), "r"), lines)


def by_counts() -> str:
    """Medians in µs of the ops of unequal rows beside NCCL, by most rows and skew."""
    held: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for row in rows_of("by_counts_h200.csv"):
        key = row["op"], row["shape"].partition("x")[0], row["config"].removeprefix("skew ")
        held[key][row["contender"]] = float(row["latency_p50_us"])
    lines = [
        [f"`{op}`", most, skew, *(f"{time:.2f}" for time in (theirs, ours, theirs / ours))]
        for (op, most, skew), times in sorted(held.items(), key=lambda item: item[0][0])
        if op.endswith("_v")
        for theirs, ours in [(times["library"], times["tuned"])]
    ]
    heads = dict.fromkeys(("most rows", "skew", "NCCL", "tunedcomm", "NCCL / tunedcomm"), "r")
    return table({"op": "l", **heads}, lines)


def all_reduce_host() -> str:
    """µs of all_reduce on CPU tensors beside gloo, and the ratio, by size and number of ranks."""
    name, heads, lines = "all_reduce_host.csv", {"message": "r"}, defaultdict[str, list[str]](list)
    for ranks in sorted({int(row["world_size"]) for row in rows_of(name)}):
        heads |= dict.fromkeys((f"gloo, {ranks} ranks", f"tunedcomm, {ranks} ranks", f"ratio, {ranks} ranks"), "r")
        for run, *_ in runs(name, "all_reduce", ranks, "eager", "float32").values():
            gloo, ours = p50(run, "library"), p50(run, "tuned")
            lines[size_of(run)] += [format_us(gloo), format_us(ours), f"{gloo / ours:.1f}"]
    return table(heads, [[size, *cells] for size, cells in lines.items()])


def all_reduce_in_short() -> str:
    """µs of all_reduce on 4 GPUs beside NCCL and the better one of PyTorch's operators, at five sizes."""
    held = {curve: {size: us for size, us, _ in found} for curve, found in points().items()}
    lines = []
    for size in (1 << power for power in (12, 16, 20, 24, 28)):
        nccl, torch, ours = (held[curve][size] for curve in ("NCCL", "PyTorch's operators, the best", "tunedcomm"))
        cells = (*map(format_us, (nccl, torch, ours)), f"{nccl / ours:.1f}x", f"{torch / ours:.1f}x")
        lines.append([format_bytes(size), *cells])
    heads = ("message", "NCCL", "PyTorch", "tunedcomm", "NCCL / tunedcomm", "PyTorch / tunedcomm")
    return table(dict.fromkeys(heads, "r"), lines)


def all_reduce_host_in_short() -> str:
    """Median and spread in µs of all_reduce on CPU tensors, 2 ranks, and how many times as fast as gloo."""
    held = runs("all_reduce_host.csv", "all_reduce", 2, "eager", "float32")
    lines = []
    for run, *_ in list(held.values())[::2]:
        cells = []
        for one in (run["library"], run["tuned"]):
            low, middle, high = (format_us(float(one[f"latency_p{share}_us"])) for share in (10, 50, 90))
            cells.append(f"{middle} ({low} to {high})")
        ratio = float(f"{p50(run, 'library') / p50(run, 'tuned'):.2g}")
        lines.append([size_of(run), *cells, f"~{ratio:g}x"])
    return table(dict.fromkeys(("message", "gloo", "tunedcomm", "gloo / tunedcomm"), "r"), lines)


def llama() -> str:
    """µs a layer of the newest run, and the gain of tunedcomm's best configuration over PyTorch's best."""
    found = runs_of(rows_of("model/llama_tp_x2_h200.csv"), "workload", "configuration")
    names = ("library_eager", "library_compiled", "async_tp_compiled")
    names += ("intercept_eager", "intercept_compiled", "fusion_compiled")
    lines = []
    for workload, (run, *_) in found.items():
        times = {name: float(run[name]["us_per_layer"]) for name in names if run.get(name, {}).get("status") == "ok"}
        best = [min(times[name] for name in some if name in times) for some in (names[:3], names[3:])]
        cells = [f"{times[name]:.1f}" if name in times else "–" for name in names]
        lines.append([f"`{workload}`", *cells, f"{best[0] / best[1]:.3f}"])
    return table({"workload": "l", **{f"`{name}`": "r" for name in names}, "gain": "r"}, lines)


def regret() -> str:
    """Mean and worst regret of every rule, by number of GPUs."""
    heads, lines = {"rule": "l"}, defaultdict[str, list[str]](list)
    for row in rows_of("replay/regret_rules_h200.csv"):
        heads |= {f"{kind}, {row['world_size']} GPUs": "r" for kind in ("mean", "worst")}
        lines[row["rule"]] += [row["regret_mean"], row["regret_worst"]]
    return table(heads, [[rule, *cells] for rule, cells in lines.items()])


def scale() -> str:
    """The load of one PostgreSQL server, by number of workers."""
    heads = {"workers": "workers", "killed": "killed", "trials": "trials", "trials_per_s": "trials/s"}
    heads |= {"ideal_per_s": "ideal", "claim_ms_p50": "claim p50, ms", "record_ms_p50": "record p50, ms"}
    heads |= {"server_cpu_ms": "server CPU, ms/trial", "lost": "lost", "doubled": "doubled"}
    rows = rows_of("replay/scale_replay.csv")
    return table(dict.fromkeys(heads.values(), "r"), [[row[column] for column in heads] for row in rows])


def shipped() -> str:
    """The shipped databases, from their manifests."""
    lines = []
    for path in sorted((ROOT / "tuning_db").glob("*.manifest.json"), reverse=True):
        manifest = json.loads(path.read_text(encoding="utf-8"))
        name = path.name.removesuffix(".manifest.json")
        held = (", ".join(map(str, manifest["world_sizes"])), code(manifest["ops"]))
        lines.append([f"`{name}`", *held, f"{manifest['rows']['trials']:,}", f"`{manifest['sha256'][:16]}`"])
    return table({"file": "l", "ranks": "r", "ops": "l", "trials": "r", "SHA-256 begins": "l"}, lines)


def same_bits() -> str:
    """The cost of numerics="ordered" at the shipped problems of ops that sum or multiply, by op and number of GPUs."""
    ratios = defaultdict[tuple[str, int], list[float]](list)  # 0 where the same candidate runs, NaN if not measured
    for path in packaged_databases():
        with Database.open(path, immutable=True) as database:
            environment, problems = database.environments()[0], database.problems()
        for ranks in {problem.world_size for problem in problems}:
            snapshot = load_snapshot(environment, ranks, layers=[Layer("packaged", str(path))], strict=True)
            limits = limits_for(environment, ranks)
            moving = ("all_gather", "all_to_all", "ep_dispatch")
            for problem in {row.problem: None for row in snapshot.rows if row.problem.op not in moving}:
                default, ordered = (decide(problem, snapshot, limits, policy=one) for one in ("default", "ordered"))
                ratio = (ordered.latency_us or math.nan) / (default.latency_us or math.nan)
                ratios[problem.op, ranks].append(0 if ordered.candidate == default.candidate else ratio)
    counts = sorted({ranks for _, ranks in ratios})

    def shown(found: list[float]) -> str:
        other = [f"{ratio:.2f}" for ratio in sorted(found) if ratio > 0]
        parts = {"the same": found.count(0), f"at {' to '.join(dict.fromkeys(other[:1] + other[-1:]))}": len(other)}
        parts["not measured"] = sum(map(math.isnan, found))
        return ", ".join(f"{count} {text}" for text, count in parts.items() if count)

    lines = [[f"`{op}`", *(shown(ratios[op, ranks]) for ranks in counts)] for op in sorted({op for op, _ in ratios})]
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
    "api": api,
    "all_reduce in short": all_reduce_in_short,
    "all_reduce on CPUs in short": all_reduce_host_in_short,
    "all_reduce, CPU": all_reduce_host,
    "all_reduce, 4 GPUs": lambda: measured(ALL_REDUCE, "all_reduce", 4, _PEERS),
    "all_reduce, 2 GPUs": lambda: measured(ALL_REDUCE, "all_reduce", 2, _PEERS, step=4),
    "all_reduce, eager": lambda: measured(ALL_REDUCE, "all_reduce", 4, _PEERS, "eager"),
    "collectives": lambda: measured(
        COLLECTIVES, "all_gather reduce_scatter all_to_all", 4, {"library": "NCCL"}, step=3
    ),
    "all_reduce_rms_norm": lambda: measured(COLLECTIVES, "all_reduce_rms_norm", 4, _NORM_PEERS),
    "best others": lambda: best_others("collectives_h100.csv", 2),
    "best others and FlashInfer": lambda: best_others("best_others_h200.csv", 2),
    "best others, 4 GPUs": lambda: best_others("best_others_h200.csv", 4),
    "serving": lambda: best_others("serving_h200.csv", 2),
    "unequal rows": by_counts,
    "experts and FlashInfer": lambda: experts_and_flashinfer(2),
    "experts and FlashInfer, 4 GPUs": lambda: experts_and_flashinfer(4),
    "experts": lambda: measured(EXPERTS, "ep_dispatch ep_combine", 4, {"library": "NCCL and PyTorch"}),
    "fused GEMMs": lambda: measured(GEMMS, "gemm_rs ag_gemm gemm_ar", 4, _GEMM_PEERS, step=4),
    "same bits": same_bits,
    "llama": llama,
    "regret": regret,
    "scale": scale,
    "shipped": shipped,
}
_PART = re.compile(r"(<!-- begin generated (.+?) -->\n)(?s:.*?)(<!-- end generated \2 -->)")


def pages() -> list[Path]:
    """Every page with a generated part."""
    every = [ROOT / "README.md", ROOT / "tuning_db" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in every if _PART.search(page.read_text(encoding="utf-8"))]


def written(page: str) -> str:
    """The text of a page with its generated parts made anew."""
    kernels.discover()
    return _PART.sub(lambda match: f"{match[1]}{PARTS[match[2]]()}\n{match[3]}", page)


# The README's plot.


_COLOURS = {"NCCL": "#8a94a6", "PyTorch's operators, the best": "#2f86d6", "Kraken": "#00a37a", "tunedcomm": "#e05a2b"}
_CURVES = dict(zip(_COLOURS, (("library",), TORCH, ("kraken",), ("tuned",)), strict=True))


def points() -> dict[str, list[list[float]]]:
    """Curve to [bytes, µs, NCCL's µs over them in the same run]."""
    found: dict[str, list[list[float]]] = {curve: [] for curve in _CURVES}
    held = runs(ALL_REDUCE, "all_reduce", 4)
    for shape, run in newest(held, TORCH[1]).items():
        for curve, names in _CURVES.items():
            one = next((one for one in (run, *held[shape]) if {"library", names[-1]} <= set(one)), {})
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
        panel.set_xticks(ticks, [format_bytes(tick) for tick in ticks])
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

    def shown(match: re.Match[str]) -> str:
        text, name = match[1], match[2].removeprefix("../")
        if files.get_file_from_path(name) or not (ROOT / name).exists():  # a page, an anchor or an address
            return match.group()
        return f"`{name}`" if text.strip("`") in (name, Path(name).name) else f"{text} (`{name}`)"

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", shown, markdown)


if __name__ == "__main__":
    for path in pages():
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
    draw(PLOT)
