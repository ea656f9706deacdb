"""Whether and how hard a model is to think, as clients say it in many ways, and as chat templates are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

SWITCHES: Final = ("thinking", "enable_thinking")
"""Variables by which chat templates know whether the model thinks before it answers."""
EFFORT: Final = "reasoning_effort"
"""The variable by which some know how hard."""
KEEPERS: Final[Mapping[str, bool]] = {"clear_thinking": False, "drop_thinking": False, "preserve_thinking": True}
"""Variables by which some know whether the prompt has what the model thought before the last question, with the value
for which it does."""
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "auto", "default")
"""Values of the field `reasoning_effort` of OpenAI's clients and others."""
RANKED: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Those that say how hard, the hardest last."""
_NO_THINK: Final = "no_think"
"""What templates of Hy4 are told in place of `none`."""
_USUAL: Final = "high"
"""What a template is told that knows efforts alone and is to have its model think."""
_MILD: Final = ("auto", "default", "minimal", "low", "medium")
"""Efforts that a model without reasoning may ignore: clients send them whatever the model is."""
_KINDS: Final[Mapping[Any, bool | None]] = {
    "enabled": True,
    "disabled": False,
    "adaptive": None,
    "auto": None,
    "between_tools": None,
}
"""Values of the field `type` of `thinking`."""
_CONTEXTS: Final = ("current_turn", "all_turns")
"""Values of OpenAI's `reasoning.context` that say whether earlier reasoning stays in the prompt."""
_BUDGETS: Final = ("max_tokens", "budget_tokens", "budget")
_KEEPING: Final = ("clear_thinking", "preserve_thinking")
FIELDS: Final = (EFFORT, "reasoning", *SWITCHES, "thinking_budget", "thinking_token_budget", *_KEEPING)
"""Fields of chats that speak of it."""


@dataclass(frozen=True)
class KnownThinking:
    """What a chat template can be told of thinking."""

    switches: frozenset[str] = frozenset()
    """Those of `SWITCHES` that it reads."""
    efforts: tuple[str, ...] = ()
    """Those of `RANKED` that it takes as `EFFORT`; none where it does not read that."""
    effort_switches: bool = False
    """Whether the effort `none` is its only switch, and makes another prompt than all other efforts do."""
    off: str = "none"
    """What it calls the effort `none`."""
    off_by_default: bool = False
    """Whether without an effort it writes what it writes for `none`."""
    keepers: frozenset[str] = frozenset()
    """Those of `KEEPERS` that it reads."""

    @property
    def can_be_off(self) -> bool:
        """Whether the model can be told not to think."""
        return bool(self.switches) or self.effort_switches

    def nearest(self, effort: str) -> str | None:
        """The effort that is told in place of this one: `none` is `none` alone, and of two that are equally near the
        harder one is told. None where the template takes nothing of the kind."""
        taken = [known for known in self.efforts if (known == "none") == (effort == "none")]
        place = RANKED.index(effort)
        return min(reversed(taken), key=lambda known: abs(RANKED.index(known) - place), default=None)


def tried(render: Callable[[Mapping[str, Any]], str | None], read: frozenset[str]) -> KnownThinking:
    """What the template behind `render` can be told, which gets variables and returns None where it refuses them.
    `read`: the variables that it reads."""
    switches, keepers = read & {*SWITCHES}, read & {*KEEPERS}
    if EFFORT not in read:
        return KnownThinking(switches, keepers=keepers)
    without = render({})
    if without is None:  # it refuses the chat that is tried, whatever it is told
        return KnownThinking(switches, RANKED, keepers=keepers)
    written = {effort: render({EFFORT: effort}) for effort in (*RANKED, _NO_THINK)}
    off = _NO_THINK if _knows_no_think(written) else "none"
    written["none"] = written[off]
    taken = tuple(effort for effort in RANKED if written[effort] is not None)
    apart = len(taken) > 1 and all(written[effort] != written["none"] for effort in taken if effort != "none")
    return KnownThinking(
        switches,
        taken,
        effort_switches=not switches and "none" in taken and apart,
        off=off,
        off_by_default=without == written["none"],
        keepers=keepers,
    )


def _knows_no_think(written: Mapping[str, str | None]) -> bool:
    """Whether a template that writes this for each effort takes `no_think` for one of its own, and for no other: what
    it writes then differs by more than the word, which others write as it is."""
    plain = {effort: None if text is None else text.replace(effort, "") for effort, text in written.items()}
    return plain[_NO_THINK] is not None and all(plain[effort] != plain[_NO_THINK] for effort in RANKED)


@dataclass(frozen=True)
class Thinking:
    """Thinking settings of a request; None: not given."""

    thinks: bool | None = None
    effort: str | None = None
    budget: int | None = None
    """Tokens that it may think."""
    field: str = EFFORT
    """The field that said so."""
    keeps: bool | None = None
    """Whether the prompt has what it thought before the last question. What a template has no variable for is not
    done."""

    @property
    def mild(self) -> bool:
        """Whether a model that does not think may take it."""
        return self.thinks is not True or self.effort in _MILD

    def variables(self, known: KnownThinking) -> dict[str, Any]:
        """The variables for a chat template that can be told what is in `known`."""
        told: dict[str, Any] = {}
        if self.thinks is not None:
            told = {name: self.thinks for name in SWITCHES if name in known.switches}
        effort = self.effort
        if known.effort_switches and self.thinks is False:
            effort = "none"
        elif known.effort_switches and self.thinks and (effort == "none" or (effort is None and known.off_by_default)):
            effort = _USUAL
        if effort is not None and (nearest := known.nearest(effort)) is not None:
            told[EFFORT] = known.off if nearest == "none" else nearest
        if self.keeps is not None:
            told |= {name: KEEPERS[name] is self.keeps for name in known.keepers}
        return told


def checked(field: str, value: Any) -> Any:
    """`value` of one of `FIELDS`; ValueError for one that nobody knows."""
    thinking_of({field: value})
    return value


def thinking_of(data: Mapping[str, Any]) -> Thinking:
    """Read a chat's fields about thinking: OpenAI's `reasoning_effort`, `reasoning` with an effort, a bound or a
    switch, Anthropic's `thinking` with a type and a bound, to which Kimi's clients add `keep` and GLM's
    `clear_thinking`, and the names of templates' variables. A later one of these overrides an earlier one. ValueError
    for unknown values."""
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
        elif field in _KEEPING:
            found = _with_keeper(found, value, field)
        else:
            found = _with_budget(found, value, field)
    return found


def _with_effort(found: Thinking, value: object, field: str) -> Thinking:
    if value not in EFFORTS or not isinstance(value, str):
        raise ValueError(f"one of {', '.join(EFFORTS)} is expected, not {str(value)[:64]!r}")
    if value in ("auto", "default"):
        return replace(found, effort=None, field=field)
    return replace(found, thinks=value != "none", effort=value, field=field)


def _with_reasoning(found: Thinking, value: object) -> Thinking:
    if isinstance(value, bool):
        return replace(found, thinks=value, field="reasoning")
    if not isinstance(value, Mapping):
        raise ValueError("an object with an effort is expected")
    if (switch := value.get("enabled")) is not None:
        found = _with_switch(found, switch, "reasoning")
    if (effort := value.get("effort")) is not None:
        found = _with_effort(found, effort, "reasoning")
    if (context := value.get("context")) in _CONTEXTS:
        found = replace(found, keeps=context == _CONTEXTS[1])
    if value.get("exclude"):
        raise ValueError("exclude: reasoning is always told apart from the answer; leave it unread")
    budget = _budget_of(value)
    return found if budget is None else _with_budget(found, budget, "reasoning")


def _with_switch(found: Thinking, value: object, field: str) -> Thinking:
    if isinstance(value, Mapping):
        kind = value.get("type")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise ValueError(f"its type should be one of {', '.join(_KINDS)}, not {str(kind)[:64]!r}")
        found = replace(found, thinks=_KINDS[kind], field=field)
        if (keep := value.get("keep")) is not None:
            if keep != "all":
                raise ValueError(f'keep: "all" or null is expected, not {str(keep)[:64]!r}')
            found = replace(found, keeps=True)
        if (clears := value.get("clear_thinking")) is not None:
            found = _with_keeper(found, clears, "clear_thinking")
        budget = _budget_of(value)
        return _with_budget(found, budget, field) if budget is not None and kind == "enabled" else found
    if not isinstance(value, bool):
        raise ValueError("true, false or an object with a type is expected")
    return replace(found, thinks=value, field=field)


def _with_keeper(found: Thinking, value: object, name: str) -> Thinking:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: true or false is expected")
    return replace(found, keeps=KEEPERS[name] is value)


def _budget_of(value: Mapping[str, Any]) -> object:
    """The bound that an object about reasoning has, by the name that one API or another gives it."""
    return next((value[name] for name in _BUDGETS if value.get(name) is not None), None)


def _with_budget(found: Thinking, value: object, field: str) -> Thinking:
    if isinstance(value, float) and value.is_integer() and value < 2.0**53:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("a number of tokens, at least 1, is expected")
    return replace(found, budget=value, field=field)
