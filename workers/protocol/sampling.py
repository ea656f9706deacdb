"""Sampling parameters of a request, and the table of them.

A field of `SamplingParams` that is annotated with a `Parameter` is a row of the table. From it follow the field of
request bodies with its range, the default that a model's generation_config.json gives it, the check before a request is
queued, the option of `latentserve generate`, the column that the sampling kernels read by a row's slot, and the table
in docs/api.md.

Pure Python on purpose: front and scheduler never import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, get_type_hints

import msgspec

from workers.protocol.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Parameter:
    """Meaning and allowed values of a sampling parameter that is one number.

    Bounds belong to the range. One whose second value is None has no upper end.
    """

    meaning: str
    """Help on the command line, and description of the field in a request's body."""
    asked: tuple[float, float | None]
    """Range that clients may ask for over HTTP."""
    taken: tuple[float, float]
    """Range that the engine takes from anyone. It is wide enough for any use, and no value inside can turn finite
    logits into infinite ones, which a worker must take for broken weights."""
    in_generation_config: bool = False
    """A generation_config.json may say under this name what requests get that leave it out."""
    penalty: bool = False
    """The logits depend on the tokens that came before. Workers are told of those tokens, and count them."""


@dataclass(frozen=True, slots=True)
class Row:
    """A sampling parameter with all that is stated of it."""

    name: str
    """Field of a request's body and of `SamplingParams`, and column of the device tables: of
    `kernels.sampling.SlotTables.real_SF`, which is float32, except for top_k."""
    kind: type[float] | type[int]
    default: float
    """Changes nothing (a temperature of 1: the model's own distribution)."""
    parameter: Parameter

    @property
    def option(self) -> str:
        """Name on the command line."""
        return "--" + self.name.replace("_", "-")

    def out_of_range(self, value: float) -> str:
        """Return why the engine does not take this value, "" if it does. NaN is outside of every range."""
        least, most = self.parameter.taken
        if least <= value <= most:
            return ""
        given = value if self.kind is int else f"{value:g}"
        return f"{self.name} must be between {_bound(least)} and {_bound(most)}, not {given}"


def _bound(value: float) -> str:
    return "2^31 - 1" if value == _INT31 else f"{value:g}"


_INT31: Final = 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """Sampling parameters of one request. Field meanings follow the OpenAI API and vLLM's extensions to it."""

    max_tokens: int
    temperature: Annotated[
        float,
        Parameter(
            "0 is greedy; otherwise logits are divided by it.",
            asked=(0.0, 2.0),
            taken=(0.0, 100.0),
            in_generation_config=True,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Parameter(
            "Keep the k most probable tokens; 0 keeps all, and so does -1 in a request.",
            asked=(-1, None),
            taken=(0, _INT31),
            in_generation_config=True,
        ),
    ] = 0
    top_p: Annotated[
        float,
        Parameter(
            "Keep the smallest set of most probable tokens whose probability reaches this. 0 keeps the most probable "
            "token.",
            asked=(0.0, 1.0),
            taken=(0.0, 1.0),
            in_generation_config=True,
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Parameter(
            "Keep tokens at least this share as probable as the most probable one.",
            asked=(0.0, 1.0),
            taken=(0.0, 1.0),
            in_generation_config=True,
        ),
    ] = 0.0
    seed: int = 0
    """64-bit, of this sequence: see `workers.protocol.seeds`. The front end draws one when the user gives none."""
    presence_penalty: Annotated[
        float,
        Parameter(
            "Taken off the logits of tokens that were generated before.",
            asked=(-2.0, 2.0),
            taken=(-100.0, 100.0),
            penalty=True,
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Parameter(
            "Taken off a token's logit as often as it was generated before.",
            asked=(-2.0, 2.0),
            taken=(-100.0, 100.0),
            penalty=True,
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Parameter(
            "Logits above 0 of tokens of the prompt and of generated ones are divided by it, others multiplied.",
            asked=(0.01, 10.0),
            # Positive logits are divided by it: a denormal one makes them infinite.
            taken=(0.01, 100.0),
            in_generation_config=True,
            penalty=True,
        ),
    ] = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias) pairs, added to the logits."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end the request, end-of-sequence ids included unless the request ignores them."""
    min_tokens: int = 0
    """Stop ids cannot be sampled before this many tokens were generated."""
    logprobs: int = -1
    """-1: none; 0: of the chosen token; k > 0: of the k most probable tokens too."""
    grammar: Grammar | None = None
    """Grammar of the text. With one `stop_ids` must have an id that ends every text, because a complete grammar allows
    nothing else; `min_tokens` yields to that."""
    prompt_logprobs: int = -1
    """Number of log-probabilities per prompt token but the first, as `logprobs` for generated ones."""
    logprob_token_ids: tuple[int, ...] = ()
    """Ids whose log-probabilities are told at each position, too, whatever they are, with `logprobs`."""

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on which tokens came before."""
        return any(getattr(self, name) != default for name, default in PENALTIES)


def rows_of(params: type[SamplingParams]) -> tuple[Row, ...]:
    """The fields that are annotated with a `Parameter`."""
    hints: dict[str, Any] = get_type_hints(params, include_extras=True)
    defaults = {field.name: field.default for field in msgspec.structs.fields(params)}
    return tuple(
        Row(name, hint.__origin__, defaults[name], parameter)
        for name, hint in hints.items()
        for parameter in getattr(hint, "__metadata__", ())
        if isinstance(parameter, Parameter)
    )


TABLE: Final = rows_of(SamplingParams)
"""Table of the sampling parameters that are one number each."""
PENALTIES: Final = tuple((row.name, row.default) for row in TABLE if row.parameter.penalty)
"""Name and default of those that depend on the tokens that came before."""
