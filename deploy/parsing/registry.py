"""Parsers by name, and which one a model's chat template asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from deploy.parsing.call_grammar import AllowedTool, Tag
from deploy.parsing.deepseek_v3 import DeepSeekV3Calls
from deploy.parsing.deepseek_v31 import DeepSeekV31Calls
from deploy.parsing.deepseek_v32 import DeepSeekV32Calls
from deploy.parsing.glm import GlmCalls
from deploy.parsing.hermes import HermesCalls
from deploy.parsing.kimi_k2 import SECTION_BEGIN, KimiK2Calls
from deploy.parsing.mistral import CLOSE as MISTRAL_CLOSE
from deploy.parsing.mistral import MistralCalls
from deploy.parsing.parser import CallParser, MakeId, Schemas
from deploy.parsing.reasoning import CLOSE, OPEN, ReasoningFormat

TOOL_PARSERS: Final[dict[str, Callable[[Schemas, MakeId], CallParser]]] = {
    "deepseek_v3": DeepSeekV3Calls,
    "deepseek_v31": DeepSeekV31Calls,
    "deepseek_v32": DeepSeekV32Calls,
    "kimi_k2": KimiK2Calls,
    "glm": GlmCalls,
    "hermes": HermesCalls,
    "mistral": MistralCalls,
}
MARKERS: Final[dict[str, tuple[str, ...]]] = {
    "deepseek_v3": DeepSeekV3Calls.markers,
    "deepseek_v31": DeepSeekV31Calls.markers,
    "deepseek_v32": DeepSeekV32Calls.markers,
    "kimi_k2": KimiK2Calls.markers,
    "glm": GlmCalls.markers,
    "hermes": HermesCalls.markers,
    "mistral": MistralCalls.markers,
}
"""All that calls are written with besides text. Where these are special tokens, they must not be left out."""
GrammarFor = Callable[[Sequence[AllowedTool], bool, bool], Tag]
"""See `JsonCalls.grammar_for`."""
CALL_GRAMMARS: Final[dict[str, GrammarFor]] = {
    "deepseek_v3": DeepSeekV3Calls.grammar_for,
    "deepseek_v31": DeepSeekV31Calls.grammar_for,
    "deepseek_v32": DeepSeekV32Calls.grammar_for,
    "kimi_k2": KimiK2Calls.grammar_for,
    "glm": GlmCalls.grammar_for,
    "hermes": HermesCalls.grammar_for,
    "mistral": MistralCalls.grammar_for,
}
"""Grammars for a model that has to call tools, or to call them with valid arguments."""
REASONING_PARSERS: Final[dict[str, ReasoningFormat]] = {
    "deepseek_r1": ReasoningFormat(always=True),
    "deepseek_v3": ReasoningFormat(),
    "kimi_k2": ReasoningFormat(also_closed_by=SECTION_BEGIN),
    "glm": ReasoningFormat(),
    "mistral": ReasoningFormat(open="[THINK]", close=MISTRAL_CLOSE),
}


def tool_parser_of(template: str) -> str | None:
    """The name of the parser for calls as a chat template writes them; None where it knows none of the formats."""
    if "｜DSML｜" in template:
        return "deepseek_v32"
    if SECTION_BEGIN in template:
        return "kimi_k2"
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
