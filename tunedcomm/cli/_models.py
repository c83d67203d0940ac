"""The catalogue of models on the command line: which shapes a model means, and what there is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, TypeAlias

import typer

from tunedcomm.cli._options import split
from tunedcomm.cli._output import emit_json, table
from tunedcomm.tuner.models import DEFAULT_TOKENS, Model, catalog, find_model, shapes_for

__all__ = ["ModelOptions", "TokensOption", "list_models"]

TokensOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--tokens",
        help="Tokens a step of --model; by default the powers of two from "
        f"{DEFAULT_TOKENS[0]} to {DEFAULT_TOKENS[-1]}.",
    ),
]

COLUMNS = (
    "model",
    "also",
    "layers",
    "hidden",
    "intermediate",
    "expert",
    "experts",
    "heads",
    "kv heads",
    "head dim",
    "vocabulary",
    "dtype",
    "published",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The options that tune a model's shapes, as typed on the command line."""

    models: tuple[Model, ...]
    tp: int | None
    tokens: tuple[int, ...]

    @classmethod
    def of(
        cls, names: list[str] | None, *, tp: int | None, tokens: list[str] | None, shape: list[str] | None
    ) -> ModelOptions:
        """Look the models up.

        Raises:
            BadParameter: options that do not go together, or a count of tokens that is none.
            UnknownNameError: no such model.
        """
        models = tuple(find_model(name) for name in split(names))
        if models and split(shape):
            raise typer.BadParameter(
                "a model's shapes and shapes of your own are two sweeps: pass --model or --shape, then the other",
                param_hint="--model",
            )
        for option, value in (("--tp", tp), ("--tokens", tokens)):
            if not models and value is not None:
                raise typer.BadParameter("it needs a model: pass --model as well", param_hint=option)
        return cls(models=models, tp=tp, tokens=tuple(_count(text) for text in split(tokens)) or DEFAULT_TOKENS)

    @property
    def dtypes(self) -> list[str]:
        """The models' dtypes, each once."""
        return list(dict.fromkeys(model.dtype for model in self.models))

    def ranks(self, world_size: int | None) -> int | None:
        """The world size, which is the degree of tensor parallelism where both are given.

        Raises:
            BadParameter: they are given and differ.
        """
        if self.tp is not None and world_size is not None and self.tp != world_size:
            raise typer.BadParameter(
                f"--tp {self.tp} and --world-size {world_size} are the same number for a model; pass one of them",
                param_hint="--tp",
            )
        return self.tp or world_size

    def shapes(self, op: str, world_size: int) -> tuple[tuple[int, ...], ...]:
        """The op's shapes in all of the models; none where no model is given.

        Raises:
            UnsupportedInputError: the models do not split over that many ranks, or the op has no shapes of models.
        """
        return shapes_for(self.models, world_size, self.tokens, op) if self.models else ()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is not a number of tokens, 1 or more", param_hint="--tokens")
    return int(text)


def list_models(*, as_json: bool) -> None:
    """Print the catalogue on stdout."""
    if as_json:
        emit_json([asdict(model) for model in catalog().values()])
        return
    table(COLUMNS, [_cells(model) for model in catalog().values()])


def _cells(model: Model) -> list[str]:
    experts = model.experts
    return [
        model.name,
        ", ".join(model.aliases) or "-",
        str(model.num_layers),
        str(model.hidden_size),
        "-" if model.intermediate_size is None else str(model.intermediate_size),
        "-" if experts is None else str(experts.intermediate_size),
        "-" if experts is None else str(experts.num_experts),
        str(model.num_heads),
        "latent" if model.latent is not None else str(model.num_kv_heads),
        str(model.head_dim),
        str(model.vocab_size),
        model.dtype,
        model.source.published,
    ]
