"""The grammar of a request's text, as it travels from the front to rank 0. The scheduler never looks inside."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

COMPILED_AT_ONCE: Final = 4
"""Grammars that rank 0 compiles side by side, so that one that takes long holds up nobody else's. In the order of their
tickets."""

Kind = Literal["json_schema", "json", "regex", "choice", "ebnf", "structural_tag", "free"]


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A constraint on generated text."""

    kind: Kind
    text: str = ""
    """A JSON schema, a regular expression that the whole text matches, a JSON list of strings, a grammar in EBNF whose
    root rule is `root`, or a structural tag as JSON; empty for `json`, which is any JSON object, and for `free`, which
    is any text: then only what comes before it is bounded."""
    strict: bool = True
    """For a JSON schema: whether objects have no properties but those that it names, unless it says otherwise."""
    begin_after: tuple[int, ...] = ()
    """Generated token ids behind which the constraint begins, such as those that end a model's reasoning; empty: it
    begins at once."""
    begun_by: tuple[int, ...] = ()
    """Token ids of which each begins the constraint as well, and is the first of its text: calls that models write
    without ending their reasoning."""
    most_before: int = 0
    """Tokens that the text before the constraint may have, `begin_after` included, which is forced if it does not come
    by itself; 0: as many as it likes."""
    opened_by: tuple[int, ...] = ()
    """Token ids of which one must be among the first generated for there to be a text before at all, such as those that
    begin a model's reasoning; with `free` alone. Empty: there is one from the beginning."""
    spelled: tuple[int, ...] = ()
    """Special token ids that write their text under the constraint; all others are no text."""


class CompileGrammar(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Message to rank 0: make this grammar ready. Admissions name it by its grammar id."""

    grammar_id: int
    """Counts from 1."""
    grammar: Grammar


class ForgetGrammar(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Message to rank 0: no live request has this grammar, and none will be admitted with this grammar id."""

    grammar_id: int


class GrammarReady(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Message from rank 0: a grammar can be admitted, or cannot be used."""

    grammar_id: int
    error: str = ""
    """Reason why it cannot be used, for whoever sent it; empty if it can."""


class GrammarProgress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Message from rank 0, once in a while: how long a grammar that is not ready has been worked on."""

    grammar_id: int
    seconds: float
    """Processor seconds. On a machine that is busy with other things they are fewer than went by."""
