"""Keeps rows whose kernels' sources were edited where the compiler is still told the same.

    git worktree add ../before COMMIT
    python bench/same_code.py --before ../before tuned.db

A row serves while the sources of its kernels are those that were measured, so an edit retires it, even one that changes
nothing for its dtype. For every row that was current in the tree before and is not in this one, Triton's IR of all
binaries that its config asks for is made from both trees, as kernels/common/launch.py asks for them and for the
row's GPU, each tree in a process of its own. Where all are equal, the row gets today's hash of its variant; the others
are listed and stay as they are, and the exit status is 1.

Needs no GPU. The IR is made by the Triton that is imported: best the one that the rows were measured with. What the
host does beside, such as grids and buffers, is not compared; the hash does not cover it either.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import delete, select, update

from tunedcomm import kernels
from tunedcomm.db.intern import variant_ids
from tunedcomm.db.records import TrialRecord
from tunedcomm.db.schema import TrialRow, VariantRow
from tunedcomm.db.store import Database
from tunedcomm.dispatch.dispatcher import source_hash_of
from tunedcomm.spec import Problem, get_variant, variants

HERE = Path(__file__).resolve()


def ir_of(source: Any, target: Any = None, options: Mapping[str, Any] | None = None) -> str:
    """What `triton.compile` begins with, in place of it: options, and the IR that knows no GPU yet, as text."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    backend = make_backend(target)
    parsed = backend.parse_options(dict(options or {}))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context
    )
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, source.language)
    text = stages["ttir"](module, {}).str_nodebug()
    return f"{target} {sorted((options or {}).items())}\n{text}"


@functools.cache
def binary_of(request: Any, capability: int) -> tuple[str, str, str]:
    """The request's function, and what is compiled for it in 16 hex digits."""
    from triton.backends.compiler import GPUTarget

    from tunedcomm.kernels.common.launch import compile_request

    text = compile_request(request, GPUTarget("cuda", capability, 32))
    return request.module, request.function, hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def described_variant(op: str, name: str) -> dict[str, Any]:
    """Source hashes of a variant and of each of its kernels."""
    variant = get_variant(op, name)
    alone = {}
    for kernel in variant.kernels:
        name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
        alone[name] = kernels.source_hash(dataclasses.replace(variant, kernels=(kernel,)))
    return {"source": kernels.source_hash(variant), "version": variant.version, "kernels": alone}


def described(asked: Mapping[str, Any]) -> dict[str, Any]:
    """One tree's answer about one row: its variant's hashes, and the binaries in the order of the requests."""
    if asked["variant"] not in variants(asked["op"]):
        return {"failed": "there is no such variant"}
    found = dict(described_variant(asked["op"], asked["variant"]))
    try:
        variant = get_variant(asked["op"], asked["variant"])
        requests = variant.compile_requests(
            Problem.from_dict(asked["problem"]), variant.space.validate(asked["config"])
        )
        found["binaries"] = [binary_of(request, asked["capability"]) for request in requests]
    except Exception as error:  # noqa: BLE001 - whatever the compiler raises is why a row is refused
        found["failed"] = f"{type(error).__name__}: {error}"
    return found


def answer() -> None:
    """What a process of one tree does: a line of JSON on stdout for each on stdin."""
    import triton

    here = Path(kernels.__file__).parents[2]
    assert here.samefile("."), f"tunedcomm was imported from {here} instead of {Path.cwd()}"
    triton.compile = ir_of
    kernels.discover()
    for line in sys.stdin:
        print(json.dumps(described(json.loads(line))), flush=True)


def ask(tree: Path, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each row's answer by the sources of one tree."""
    paths = [str(tree), *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "0"}
    code = f"import sys; sys.path.append({str(HERE.parent)!r}); import same_code; same_code.answer()"
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, input=lines, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def difference(stored: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Why a row with the source hash `stored` may not have the new one, or None."""
    for name, tree in (("before", before), ("today", after)):
        if "failed" in tree:
            return f"{name}: {tree['failed']}"
    if before["source"] != stored:
        return f"it was measured with sources {stored}, those of the tree before are {before['source']}"
    if before["version"] != after["version"]:
        return f"the variant's version was {before['version']} and is {after['version']}"
    if before["kernels"].keys() != after["kernels"].keys():
        return f"the variant's kernels were {sorted(before['kernels'])} and are {sorted(after['kernels'])}"
    if [old[:2] for old in before["binaries"]] != [new[:2] for new in after["binaries"]]:
        return "its config asks for other binaries"
    for old, new in zip(before["binaries"], after["binaries"], strict=True):
        if old != new:
            return f"{old[1]} is other code"
    compared = {f"{module}.{function}" for module, function, _ in before["binaries"]}
    for name, source in before["kernels"].items():
        if name not in compared and source != after["kernels"][name]:
            return f"{name} has other sources, and no binary to compare"
    return None


def asked_of(trial: TrialRecord) -> dict[str, Any]:
    """What a tree is asked about a row."""
    return {
        "op": trial.problem.op,
        "variant": trial.variant,
        "problem": trial.problem.to_dict(),
        "config": trial.config,
        "capability": trial.environment.compute_capability,
    }


def keep(database: Database, trials: Sequence[TrialRecord]) -> None:
    """Give rows today's source hashes; where none of a variant is left with the old one, its entry goes."""

    def change(connection: Any) -> None:
        renewed = [dataclasses.replace(t, source_hash=source_hash_of(t.problem.op, t.variant) or "") for t in trials]
        ids, left = variant_ids(connection, renewed), set(variant_ids(connection, trials).values())
        for trial in renewed:
            variant = ids[trial.source_hash, trial.problem.op, trial.variant, trial.numerics]
            connection.execute(update(TrialRow).where(TrialRow.id == trial.id).values(variant_id=variant))
        unused = VariantRow.id.not_in(select(TrialRow.variant_id))
        connection.execute(delete(VariantRow).where(VariantRow.id.in_(left), unused))

    database.change(change)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout in which the rows are current")
    parser.add_argument("databases", type=Path, nargs="+", help="databases to change")
    args = parser.parse_args()
    kernels.discover()
    num_refused = 0
    for path in args.databases:
        with Database.open(path) as database:
            retired = [t for t in database.trials() if t.source_hash != source_hash_of(t.problem.op, t.variant)]
            answers = [ask(tree.resolve(), list(map(asked_of, retired))) for tree in (args.before, HERE.parents[1])]
            why = [difference(t.source_hash, *both) for t, *both in zip(retired, *answers, strict=True)]
            told = list(zip(retired, why, strict=True))
            keep(database, [trial for trial, found in told if found is None])
        refused = collections.Counter((f"{t.problem.op}.{t.variant}", found) for t, found in told if found)
        kept = collections.Counter(f"{t.problem.op}.{t.variant}" for t, found in told if not found)
        print(f"{path}: {len(told)} rows were retired; kept, as they compile to the same: {kept.total()} {dict(kept)}")
        for (name, found), count in refused.items():
            print(f"  {name}: {count} rows are left: {found}")
            num_refused += count
    return 1 if num_refused else 0


if __name__ == "__main__":
    sys.exit(main())
