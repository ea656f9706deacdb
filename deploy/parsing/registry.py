"""Parsers by name, and which one a model's chat template asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from deploy.parsing.answer import ReasoningFormat
from deploy.parsing.call_grammar import AllowedTool, Tag
from deploy.parsing.deepseek_calls import DeepSeekV3Calls, DeepSeekV31Calls
from deploy.parsing.deepseek_v32 import DeepSeekV32Calls
from deploy.parsing.glm import GlmCalls
from deploy.parsing.hermes import HermesCalls
from deploy.parsing.hyv4 import calls_with, ending_of, reasoning_with
from deploy.parsing.kimi_k2 import SECTION_BEGIN, KimiK2Calls
from deploy.parsing.markers import CLOSE, OPEN
from deploy.parsing.mistral import CLOSE as MISTRAL_CLOSE
from deploy.parsing.mistral import MistralCalls
from deploy.parsing.parser import CallParser, MakeId, Schemas

T = TypeVar("T")
HYV4: Final = "hy_v4"
"""The parsers whose tags may have an ending of a checkpoint's own, which is then the end of their name."""


class _ByName(dict[str, T]):
    """Parsers, or what goes with them, by name."""

    def __init__(self, named: Mapping[str, T], of_ending: Callable[[str], T]) -> None:
        super().__init__({**named, HYV4: of_ending("")})
        self._of_ending = of_ending

    def __missing__(self, name: str) -> T:
        if not name.startswith(f"{HYV4}:"):
            raise KeyError(name)
        return self._of_ending(name.removeprefix(HYV4))


_CALLS: Final[dict[str, Any]] = {
    "deepseek_v3": DeepSeekV3Calls,
    "deepseek_v31": DeepSeekV31Calls,
    "deepseek_v32": DeepSeekV32Calls,
    "kimi_k2": KimiK2Calls,
    "glm": GlmCalls,
    "hermes": HermesCalls,
    "mistral": MistralCalls,
}
TOOL_PARSERS: Final[dict[str, Callable[[Schemas, MakeId], CallParser]]] = _ByName(_CALLS, calls_with)
MARKERS: Final[dict[str, tuple[str, ...]]] = _ByName(
    {name: calls.markers for name, calls in _CALLS.items()}, lambda ending: calls_with(ending).markers
)
"""All that calls are written with besides text. Where these are special tokens, they must not be left out."""
GrammarFor = Callable[[Sequence[AllowedTool], bool, bool], Tag]
"""Of each name, a grammar of answers with calls (`JsonCalls.grammar_for`)."""
CALL_GRAMMARS: Final[dict[str, GrammarFor]] = _ByName(
    {name: calls.grammar_for for name, calls in _CALLS.items()}, lambda ending: calls_with(ending).grammar_for
)
"""Grammars for a model that has to call tools, or to call them with valid arguments."""
REASONING_PARSERS: Final[dict[str, ReasoningFormat]] = _ByName(
    {
        "deepseek_r1": ReasoningFormat(always=True),
        "deepseek_v3": ReasoningFormat(),
        "kimi_k2": ReasoningFormat(also_closed_by=SECTION_BEGIN),
        "glm": ReasoningFormat(),
        "mistral": ReasoningFormat(open="[THINK]", close=MISTRAL_CLOSE),
    },
    reasoning_with,
)


def named_for(parser: str | None, tokens: Iterable[str]) -> str | None:
    """The name of a parser for a model whose vocabulary has these texts of special tokens."""
    return HYV4 + ending_of(tokens) if parser == HYV4 else parser


def tool_parser_of(template: str) -> str | None:
    """The name of the parser for calls as a chat template writes them; None where it knows none of the formats."""
    if "｜DSML｜" in template:
        return "deepseek_v32"
    if SECTION_BEGIN in template:
        return "kimi_k2"
    if _is_hyv4(template):
        return HYV4
    if "<arg_key>" in template:
        return "glm"
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    return None


def reasoning_parser_of(template: str) -> str | None:
    """The name of the parser for reasoning as a chat template writes or expects it; None where it has none."""
    if MISTRAL_CLOSE in template:
        return "mistral"
    if _is_hyv4(template) and "<think" in template:
        return HYV4
    if OPEN not in template and CLOSE not in template:
        return None
    if "<|im_assistant|>" in template:
        return "kimi_k2"
    if "<|assistant|>" in template:
        return "glm"
    # V3.1 and later take a switch; R1 always reasons, and its template writes the opening tag. Templates without either
    # only take reasoning out of earlier answers: what the model writes itself is looked for, as for all other models.
    if "<｜Assistant｜>" in template and OPEN in template and "thinking" not in template:
        return "deepseek_r1"
    return "deepseek_v3"


def _is_hyv4(template: str) -> bool:
    """Whether calls are written as Hy4 does, whatever ending the tags have; those of Hy3 have a separator."""
    return "<tool_calls" in template and "<arg_key" in template and "<tool_sep" not in template
