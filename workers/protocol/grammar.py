"""What a request's text must look like, as it travels from the front to rank 0. The scheduler never looks inside."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

COMPILED_AT_ONCE: Final = 4
"""Grammars that rank 0 compiles side by side, so that one that takes long holds up nobody else's. In the order of their
tickets."""

Kind = Literal["json_schema", "json", "regex", "choice", "ebnf", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A constraint on generated text."""

    kind: Kind
    text: str = ""
    """A JSON schema, a regular expression that the whole text matches, a JSON list of strings, a grammar in EBNF whose
    root rule is `root`, or a structural tag as JSON; empty for `json`, which is any JSON object."""
    strict: bool = True
    """Of a JSON schema: objects have no properties but those that it names, unless it says otherwise."""
    begin_after: tuple[int, ...] = ()
    """Generated token ids behind which the constraint begins, such as those that end a model's reasoning; empty: it
    begins at once."""


class CompileGrammar(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To rank 0: make this grammar ready. Admissions name it by its ticket."""

    ticket: int
    """Counts from 1."""
    grammar: Grammar


class ForgetGrammar(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To rank 0: no live request has this grammar, and none will be admitted with this ticket."""

    ticket: int


class GrammarReady(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From rank 0: a grammar can be admitted, or cannot be used."""

    ticket: int
    error: str = ""
    """Why it cannot be used; for whoever sent it."""
