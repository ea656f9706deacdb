"""Whether and how hard a model is to think, as clients say it in many ways, and as chat templates are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

SWITCHES: Final = ("thinking", "enable_thinking")
"""Variables by which chat templates know whether the model thinks before it answers."""
EFFORT: Final = "reasoning_effort"
"""The variable by which some know how hard."""
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "auto", "default")
"""Values of the field `reasoning_effort` of OpenAI's clients and others."""
_MILD: Final = ("auto", "default", "minimal", "low", "medium")
"""Those that a model may ignore that does not think: clients send them whatever the model is."""
_KINDS: Final[Mapping[Any, bool | None]] = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}
"""Values of the field `type` of `thinking`."""
FIELDS: Final = (EFFORT, "reasoning", *SWITCHES, "thinking_budget", "thinking_token_budget")
"""Fields of chats that speak of it."""


@dataclass(frozen=True)
class Thinking:
    """What a request says of thinking; None is nothing."""

    thinks: bool | None = None
    effort: str | None = None
    budget: int | None = None
    """Tokens that it may think."""
    field: str = EFFORT
    """The field that said so."""

    @property
    def mild(self) -> bool:
        """Whether a model that does not think may take it."""
        return self.thinks is not True or self.effort in _MILD

    def variables(self, known: frozenset[str]) -> dict[str, Any]:
        """The variables for a chat template that reads those in `known`."""
        told: dict[str, Any] = {} if self.thinks is None else {name: self.thinks for name in SWITCHES if name in known}
        if self.effort is not None and EFFORT in known:
            told[EFFORT] = self.effort
        return told


def checked(field: str, value: Any) -> Any:
    """`value` of one of `FIELDS`; ValueError for one that nobody knows."""
    thinking_of({field: value})
    return value


def thinking_of(data: Mapping[str, Any]) -> Thinking:
    """What the fields of a chat say: OpenAI's `reasoning_effort`, `reasoning` with an effort, a bound or a switch,
    Anthropic's `thinking` with a type and a bound, and the names of templates' switches. A later one of these counts.
    ValueError for values that nobody knows."""
    found = Thinking()
    for field in FIELDS:
        if (value := data.get(field)) is None:
            continue
        if field == EFFORT:
            found = _with_effort(found, value, field)
        elif field == "reasoning":
            found = _with_reasoning(found, value)
        elif field in SWITCHES:
            found = _with_switch(found, value, field)
        else:
            found = _with_budget(found, value, field)
    return found


def _with_effort(found: Thinking, value: object, field: str) -> Thinking:
    if value not in EFFORTS or not isinstance(value, str):
        raise ValueError(f"one of {', '.join(EFFORTS)} is expected, not {str(value)[:64]!r}")
    if value in ("auto", "default"):
        return Thinking(found.thinks, None, found.budget, field)
    return Thinking(value != "none", value, found.budget, field)


def _with_reasoning(found: Thinking, value: object) -> Thinking:
    if isinstance(value, bool):
        return Thinking(value, found.effort, found.budget, "reasoning")
    if not isinstance(value, Mapping):
        raise ValueError("an object with an effort is expected")
    if (switch := value.get("enabled")) is not None:
        found = _with_switch(found, switch, "reasoning")
    if (effort := value.get("effort")) is not None:
        found = _with_effort(found, effort, "reasoning")
    if (budget := value.get("max_tokens")) is not None:
        found = _with_budget(found, budget, "reasoning")
    return found


def _with_switch(found: Thinking, value: object, field: str) -> Thinking:
    if isinstance(value, Mapping):
        kind = value.get("type")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise ValueError(f"its type should be one of {', '.join(_KINDS)}, not {str(kind)[:64]!r}")
        found = Thinking(_KINDS[kind], found.effort, found.budget, field)
        budget = value.get("budget_tokens")
        return _with_budget(found, budget, field) if budget is not None and kind == "enabled" else found
    if not isinstance(value, bool):
        raise ValueError("true, false or an object with a type is expected")
    return Thinking(value, found.effort, found.budget, field)


def _with_budget(found: Thinking, value: object, field: str) -> Thinking:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("a number of tokens, at least 1, is expected")
    return Thinking(found.thinks, found.effort, value, field)
