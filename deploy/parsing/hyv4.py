"""Tool calls of Hy4, which are those of GLM within a tag around all of them:

<tool_calls><tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>...</tool_calls>

All tags of a checkpoint, those of reasoning included, may have an ending of its own: `<tool_call:opensource>`. Its
vocabulary has them, each as one token, and says which it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache

from typing_extensions import override

from deploy.parsing.answer import ReasoningFormat
from deploy.parsing.call_grammar import AllowedTool, Tag, either, sequence, several, text, together, within_text
from deploy.parsing.glm import GlmCalls
from deploy.parsing.tagged_calls import CallTail

_TAG = re.compile(r"<(?:think|tool_calls?|arg_key|arg_value)(:[^\s<>]+)?>")


def ending_of(tokens: Iterable[str]) -> str:
    """The ending of a checkpoint's tags, by the texts of its tokens, with the colon; "" where they have none."""
    found = {match[1] or "" for token in tokens if (match := _TAG.fullmatch(token)) is not None}
    return min(found - {""}, default="")


class HyV4Calls(GlmCalls):
    """Parser of the calls in one answer. Calls without the tag around them are calls, too."""

    @classmethod
    @override
    def grammar_for(cls, tools: Sequence[AllowedTool], must: bool, parallel: bool) -> Tag:
        rest = either([cls._behind_begin(tool) for tool in together(tools)])
        call = sequence(text(cls.begin), rest)
        calls = sequence(several(call, "\n") if parallel else call, text(cls.all_end))
        if not must:
            return within_text({cls.all_begin: calls, cls.begin: rest})
        return sequence(text(cls.all_begin), calls)


@cache
def calls_with(ending: str) -> type[HyV4Calls]:
    """The parser for tags with this ending."""

    def tags(name: str) -> tuple[str, str]:
        return f"<{name}{ending}>", f"</{name}{ending}>"

    (all_begin, all_end), (begin, end), (key, key_end), (value, value_end) = map(
        tags, ("tool_calls", "tool_call", "arg_key", "arg_value")
    )
    markers = (all_begin, all_end, begin, end, key, key_end, value, value_end)
    own = {
        "all_begin": all_begin,
        "all_end": all_end,
        "begin": begin,
        "end": end,
        "key": key,
        "key_end": key_end,
        "value": value,
        "value_end": value_end,
        "markers": markers,
        "ends_content": markers,
        "tags": markers,
        "begins": (all_begin, begin),
        "control": re.compile("|".join(map(re.escape, markers))),
        "call_tail": CallTail(end, all_end),
        "close": reasoning_with(ending).close,
    }
    return type("HyV4Calls", (HyV4Calls,), own)


@cache
def reasoning_with(ending: str) -> ReasoningFormat:
    """The format of reasoning whose tags have this ending."""
    return ReasoningFormat(open=f"<think{ending}>", close=f"</think{ending}>")
