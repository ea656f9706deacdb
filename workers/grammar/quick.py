"""The expressions that may be handed to xgrammar's own automata, and the form in which they are.

xgrammar follows an expression in one of two ways. `Regex(...)` is an automaton, for every state of which it knows which
tokens are allowed: a mask takes 10 us with a vocabulary of 129,000 ids. `from_regex` makes rules of groups that repeat,
and at the end of a rule tokens are tried one by one, which takes milliseconds. But the automata of version 0.2.8 are
not always right: behind `?` they match too much (`(ab*)?` matches `bb`), and now and then they merge states that
differ. So an expression is written for them without `?`, and what xgrammar makes of it is compared with an automaton of
our own, state by state. Only where both match the same texts it is used.

Comparing is Python, which other threads have to wait for, now and then for 5 ms; so what takes longer than a few of
these happens in a process of its own (`same_texts_beside`).

xgrammar's automata are read from the form in which it keeps grammars in files. How to write such files is public, what
stands in them is not: it is that of the serialization version v16, of xgrammar 0.2.8.
"""

from __future__ import annotations

import json
import logging
from functools import cache
from itertools import pairwise
from typing import Any, Final

from kernels.private_api import PrivateApi
from workers.grammar.automaton import Branching, same_texts, same_texts_beside, work
from workers.grammar.library import xgr
from workers.grammar.regex import Node, unrolled

__all__ = ["for_automaton", "grammar_of"]

logger = logging.getLogger(__name__)

MOST_STATES: Final = 2048
"""Most states of an automaton."""
LITTLE_STATES: Final = 256
"""Most states of an automaton that is compared in this process."""
MOST_WORK: Final = 1024
"""`work` of an expression of which an automaton is tried: 256 characters. xgrammar takes up to 20 ms for each when it
compiles."""
LITTLE_WORK: Final = 100
"""`work` of an expression that is compared in this process, at most, which takes 10 ms."""
VERSION: Final = "v16"
_PRIVATE: Final = PrivateApi(
    "xgrammar", ("xgrammar.Grammar.serialize_json",), "masks of regular expressions and of limited strings take longer"
)


def for_automaton(node: Node, in_json: bool = False) -> str | None:
    """An expression for `Regex(...)` that xgrammar follows to the letter; None if there is none. Other threads can run
    meanwhile. `in_json`: of a string in JSON, of which xgrammar makes an automaton in another way."""
    if (much := work(node)) > MOST_WORK:
        return None
    expression = unrolled(node)
    try:
        if (theirs := _read(expression, in_json)) is None:
            return None
        if much <= LITTLE_WORK:
            same = same_texts(node, theirs, LITTLE_STATES)
        else:
            same = same_texts_beside(node, theirs, MOST_STATES)
    except RuntimeError:  # xgrammar's, or the other process's; there are rules yet
        logger.exception("an expression cannot be followed as an automaton")
        return None
    return expression if same else None


def grammar_of(expression: str, in_json: bool = False) -> xgr.Grammar:
    """A grammar that is an automaton of xgrammar's."""
    return xgr.Grammar.from_ebnf(f"root ::= Regex({json.dumps(expression)}{', json_string=true' * in_json})")


def _read(expression: str, in_json: bool) -> Branching | None:
    """Read the automaton that xgrammar makes of an expression; None, with a logged line, where grammars are kept in
    another form."""
    if (found := xgr.get_serialization_version()) != VERSION:
        _PRIVATE.lost(f"form of grammars {VERSION}, but {found}")
        return None
    # A grammar is made ready when it is compiled, which for two tokens takes no time.
    ready = _compiler().compile_grammar(grammar_of(expression, in_json)).grammar
    [rule] = json.loads(ready.serialize_json())["per_rule_fsms"]
    (machine, first, ends, *_), *_ = rule
    flat, behind = machine["edges"]["data_"], machine["edges"]["indptr_"]
    states = [flat[begin:end] for begin, end in pairwise(behind)]
    # An edge without a byte is one from -1; others below 0 lead to other rules, which such a grammar has none of.
    assert all(low >= -1 for edges in states for low, _, _ in edges)
    edges = [[(low, high, target) for low, high, target in edges if low >= 0] for edges in states]
    free = [[target for low, _, target in edges if low < 0] for edges in states]
    return Branching(edges, free, first, ends)


@cache
def _compiler() -> Any:
    return xgr.GrammarCompiler(
        xgr.TokenizerInfo([b"a", b""], vocab_size=2, stop_token_ids=[1]), max_threads=1, cache_enabled=False
    )
