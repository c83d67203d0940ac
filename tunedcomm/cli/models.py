"""Open models and the shapes that tensor parallelism makes of them.

models.json beside this file holds the sizes, each with its source. A projection that is split by columns needs the
input of every rank (`ag_gemm`). A projection that is split by rows leaves every rank a partial sum of the whole output,
which is reduced (`all_reduce`, `gemm_rs`, `gemm_ar`). Between the two, sequence parallelism leaves every rank the
hidden states of its share of the tokens (`all_gather`, `reduce_scatter`). Routed experts are dealt out to the same
ranks, and each rank sends them its share of the tokens (`ep_dispatch`, `ep_combine`). `OpSpec.model_shapes` makes an
op's shapes of a `Shard`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from tunedcomm.errors import UnknownNameError, UnsupportedInputError
from tunedcomm.spec import OpSpec, did_you_mean, ops

DEFAULT_TOKENS: tuple[int, ...] = tuple(1 << power for power in range(15))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model's numbers come from.

    Attributes:
        published: repository and file in which the model's publisher states them.
        read: public files, each as `repository: file`, in which they were read and compared.
        note: where these differ, or say less than all.
    """

    published: str
    read: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of experts in a model's sparse layers.

    Attributes:
        intermediate_size: of one expert.
        num_experts: routed experts a layer.
        num_experts_per_token: routed experts that one token goes through.
        num_shared_experts: experts that every token goes through besides.
    """

    intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Ranks and head sizes of multi-head latent attention."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder's sizes.

    Attributes:
        name: the name that `--model` takes.
        aliases: further names, of models with the same sizes.
        intermediate_size: of the dense layers; None where every layer has experts.
        num_layers, num_dense_layers: all layers, and the layers without experts.
        num_heads, num_kv_heads: attention heads, and heads that keys and values have.
        head_dim: of a query's head.
        dtype: of the activations, which is what ranks send.
        scaling: of activations before weights that are published in fp8, as `all_reduce_rms_norm` names it; "" where
            weights are published in the activations' dtype.
        experts: None for a dense model.
        latent: None where keys and values are projected from the hidden state directly.
        source: where the numbers come from.
    """

    name: str
    hidden_size: int
    intermediate_size: int | None
    num_layers: int
    num_dense_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: str
    source: Source
    aliases: tuple[str, ...] = ()
    scaling: str = ""
    experts: Experts | None = None
    latent: LatentAttention | None = None


@dataclass(frozen=True, slots=True)
class Projection:
    """One rank's share of a layer's matrix: `[tokens, k] @ [k, n]`."""

    name: str
    n: int
    k: int


def _model(name: str, entry: Mapping[str, Any]) -> Model:
    values = {**entry, "name": name, "aliases": tuple(entry.get("aliases", ()))}
    values["source"] = Source(**{**entry["source"], "read": tuple(entry["source"]["read"])})
    for field, kind in (("experts", Experts), ("latent", LatentAttention)):
        if field in entry:
            values[field] = kind(**entry[field])
    return Model(**values)


@functools.cache
def catalog() -> dict[str, Model]:
    """The models that ship with tunedcomm, by name, in the order of models.json."""
    text = files("tunedcomm.cli").joinpath("models.json").read_text(encoding="utf-8")
    return {name: _model(name, entry) for name, entry in json.loads(text)["models"].items()}


def find_model(name: str) -> Model:
    """The model of that name or alias, in any case.

    Raises:
        UnknownNameError: with the nearest names.
    """
    known = {known: model for model in catalog().values() for known in (model.name, *model.aliases)}
    wanted = name.strip().lower().replace("_", "-")
    if wanted in known:
        return known[wanted]
    raise UnknownNameError(
        f"unknown model {name!r}{did_you_mean(wanted, known)} The models are {', '.join(catalog())}. For any other "
        "model pass its shapes with --shape"
    )


def _check_split(model: Model, tp: int) -> None:
    """Refuse a degree of tensor parallelism at which ranks would not have equal shares.

    Fewer heads of keys and values than ranks are fine: each is then held by several ranks, the same number for each.
    """
    if tp < 1:
        raise UnsupportedInputError(f"the degree of tensor parallelism must be at least 1, got {tp}")
    parts = {"attention heads": model.num_heads}
    if model.intermediate_size is not None:
        parts["columns of the dense layers"] = model.intermediate_size
    if model.experts is not None:
        parts["columns of an expert"] = model.experts.intermediate_size
    for what, count in parts.items():
        if count % tp:
            raise UnsupportedInputError(
                f"{model.name} has {count} {what}, which {tp} ranks cannot share equally; pass a --tp that divides it"
            )
    if model.latent is None and model.num_kv_heads % tp and tp % model.num_kv_heads:
        raise UnsupportedInputError(
            f"{model.name} has {model.num_kv_heads} heads of keys and values, which {tp} ranks can neither split nor "
            f"repeat evenly; pass a --tp that divides {model.num_kv_heads} or is a multiple of it"
        )


def _mlps(model: Model) -> list[tuple[str, int]]:
    """Name and columns of the MLPs that every token goes through."""
    found = [] if model.intermediate_size is None else [("", model.intermediate_size)]
    if model.experts is not None and model.experts.num_shared_experts:
        found.append(("shared_", model.experts.num_shared_experts * model.experts.intermediate_size))
    return found


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of a model.

    Attributes:
        model: the model.
        tp: degree of tensor parallelism, which splits the model evenly.
        tokens: tokens of one forward pass, of all sequences together.
    """

    model: Model
    tp: int
    tokens: int

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of each rank under sequence parallelism, padded so that all ranks have equally many."""
        return -(-self.tokens // self.tp)

    @property
    def padded_tokens(self) -> int:
        """Tokens of all ranks, padding included."""
        return self.tokens_per_rank * self.tp

    @property
    def column_parallel(self) -> tuple[Projection, ...]:
        """The rank's share of every projection whose input all ranks need.

        Gate and up are one matrix; so are queries, keys and values. Latent attention compresses on every rank alike and
        is split where it expands again.
        """
        model = self.model
        heads, hidden = model.num_heads // self.tp, model.hidden_size
        found: list[Projection] = []
        if model.latent is None:
            kv_heads = max(1, model.num_kv_heads // self.tp)
            found.append(Projection("qkv", (heads + 2 * kv_heads) * model.head_dim, hidden))
        else:
            latent = model.latent
            found.append(Projection("q_b", heads * model.head_dim, latent.q_lora_rank))
            found.append(Projection("kv_b", heads * (latent.qk_nope_head_dim + latent.v_head_dim), latent.kv_lora_rank))
        found += [Projection(f"{name}gate_up", 2 * size // self.tp, hidden) for name, size in _mlps(model)]
        return tuple(found)

    @property
    def row_parallel(self) -> tuple[Projection, ...]:
        """The rank's share of every projection whose output is summed over the ranks."""
        model = self.model
        head_dim = model.head_dim if model.latent is None else model.latent.v_head_dim
        found = [Projection("o", model.hidden_size, model.num_heads // self.tp * head_dim)]
        found += [Projection(f"{name}down", model.hidden_size, size // self.tp) for name, size in _mlps(model)]
        return tuple(found)


def shapes_for(models: Sequence[Model], tp: int, tokens: Sequence[int], op: OpSpec) -> tuple[tuple[int, ...], ...]:
    """Canonical shapes of `op` in these models, each once, smallest first.

    Args:
        models: the models.
        tp: degree of tensor parallelism, which is the world size.
        tokens: tokens of one forward pass, of all sequences together.
        op: the op.

    Raises:
        UnsupportedInputError: the op has no shapes of models, or no shape of these models; `tp` does not split a model
            evenly; or a count of tokens is below 1.
    """
    if op.model_shapes is None:
        known = ", ".join(name for name, spec in ops().items() if spec.model_shapes is not None)
        raise UnsupportedInputError(
            f"shapes of {op.name} do not follow from a model; shapes of {known} do. Pass shapes with --shape"
        )
    if wrong := [count for count in tokens if count < 1]:
        raise UnsupportedInputError(f"a forward pass has at least 1 token, got {wrong[0]}; correct --tokens")
    for model in models:
        _check_split(model, tp)
    found = {shape for model in models for count in tokens for shape in op.model_shapes(Shard(model, tp, count))}
    if not found:
        raise UnsupportedInputError(f"{', '.join(model.name for model in models)}: dense models have no {op.name}")
    return tuple(sorted(found))
