"""Ops and variants that compute nothing, for tests of registries, searches and judges."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from tunedcomm.space import Config, Space
from tunedcomm.spec import Limits, OpSpec, Problem, Variant
from tunedcomm.tuner.gang.protocol import Settings


def toy_op(name: str = "toy", **changes: Any) -> OpSpec:
    values: dict[str, Any] = {
        "summary": "",
        "reductions": ("sum",),
        "dtypes": ("float32",),
        "shape_help": "",
        "rank_of_shape": 1,
        "make_inputs": lambda problem, rank, seed, kind, device: (),
        "make_outputs": lambda problem, device: (),
        "reference": lambda problem, inputs, rank: (),
        "tolerance": {},
        "message_bytes": lambda problem: problem.nbytes,
        "busbw_factor": None,
        "default_shapes": lambda backend, itemsize: [(256,), (4096,)],
    }
    return OpSpec(name=name, **{**values, **changes})


def spec_with(kind: Any, settings: Settings, **values: Any) -> Any:
    """A spec of a sweep or a verification; values that are settings replace those given."""
    changes = {field.name: values.pop(field.name) for field in fields(Settings) if field.name in values}
    return kind(settings=replace(settings, **changes), **values)


def may_run(problem: Problem, config: Config, limits: Limits) -> str | None:
    return None


def toy_variant(op: str, name: str, space: Space | None = None, **changes: Any) -> Variant:
    """Ordered, and feasible everywhere; its default is the first config of its space."""
    points = space or Space()
    values: dict[str, Any] = {
        "numerics": "ordered",
        "summary": "",
        "infeasible": may_run,
        "default": lambda problem, limits: next(points.enumerate()),
        "bind": lambda problem, config, workspace: lambda inputs, outputs, stream: None,
        "num_blocks": lambda problem, config: int(config.get("num_blocks", 1)),
    }
    return Variant(op=op, name=name, space=points, **{**values, **changes})
