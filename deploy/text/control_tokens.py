"""Control tokens, as those that name roles, belong to the chat template alone. Where a message, or anything else that a
client gave, spells one out, it is encoded as the ordinary text that it is.

Before a chat is rendered a break is put into every control token that the client's texts spell. A template handles the
break as any other letters; when the prompt is encoded, it is taken out and the text on its two sides is encoded apart.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Final

BREAK: Final = secrets.token_hex(8)
"""Drawn anew for each process and never shown, so no text of a client holds it. Letters and digits alone: filters of
templates leave them as they are."""
_CONTROL: Final = re.compile(r"[<\[(|｜].*[>\])|｜]", re.DOTALL)
_THINKING: Final = ("<think>", "</think>")
"""Tags by which templates find the reasoning in earlier answers, to leave it out."""
_OF_ANSWERS: Final = ("content", "reasoning_content")


class ControlTokens:
    """Control tokens of one tokenizer."""

    def __init__(self, backend: Any) -> None:
        """Collect the tokens that a `tokenizers.Tokenizer` adds to its vocabulary: special ones and those in
        brackets."""
        added = backend.get_added_tokens_decoder().values()
        texts = [(token.content, token.special) for token in added]
        tokens = [token for token, special in texts if len(token) > 1 and (special or _CONTROL.fullmatch(token))]
        self._all = beginnings(tokens)
        self._in_answers = beginnings([token for token in tokens if token not in _THINKING])

    def broken(self, value: Any) -> Any:
        """A value of JSON, every control token in its strings broken; names of fields, too."""
        return _broken(value, self._all)

    def messages(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages, broken. Earlier answers keep the tags of their reasoning."""
        made = []
        for message in messages:
            pattern = self._in_answers if message["role"] == "assistant" else self._all
            made.append(
                {name: _broken(value, pattern if name in _OF_ANSWERS else self._all) for name, value in message.items()}
            )
        return made


def beginnings(tokens: list[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds the first character of each of `tokens`, others' beginnings inside of them, too; None
    for no tokens."""
    if not tokens:
        return None
    after: dict[str, list[str]] = {}
    for token in tokens:
        after.setdefault(token[0], []).append(token[1:])
    # A set of characters comes first: that is what a search skips text by.
    behind = "|".join(f"(?<={re.escape(first)})(?={_tree(rest)})" for first, rest in sorted(after.items()))
    return re.compile(f"[{re.escape(''.join(sorted(after)))}](?:{behind})")


def _tree(texts: list[str]) -> str:
    """A regular expression for any of `texts` that looks at each character once: tokens can be hundreds."""
    if "" in texts:
        return ""
    after: dict[str, list[str]] = {}
    for text in texts:
        after.setdefault(text[0], []).append(text[1:])
    options = [re.escape(first) + _tree(rest) for first, rest in sorted(after.items())]
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"


def _broken(value: Any, pattern: re.Pattern[str] | None) -> Any:
    if pattern is None:
        return value
    if isinstance(value, str):
        return pattern.sub(_with_break, value)
    if isinstance(value, Mapping):
        return {_broken(name, pattern): _broken(item, pattern) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_broken(item, pattern) for item in value]
    return value


def _with_break(match: re.Match[str]) -> str:
    return match.group() + BREAK
