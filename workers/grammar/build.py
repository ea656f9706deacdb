"""From a request's constraint to a grammar of xgrammar's, or to an error that says what is wrong with it.

It takes no tokenizer, so the front does the same to refuse a request at once that rank 0 could not serve.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from workers.grammar.automaton import work
from workers.grammar.library import xgr
from workers.grammar.quick import for_automaton, grammar_of
from workers.grammar.regex import Node, RegexError, of_text, rules
from workers.grammar.schema import SchemaError, check_schema, with_own_patterns
from workers.grammar.surrogates import without_surrogates
from workers.protocol.grammar import Grammar, Kind

MOST_BYTES: Final = 1 << 17
"""Most bytes of a constraint's text: the longest take half a second to parse."""
MOST_TAG_BYTES: Final = 1 << 19
"""Most bytes of a structural tag, which is more verbose: that of 60 tools with a dozen arguments each has 330,000
bytes, and is parsed in half a second."""
MOST_CHOICES: Final = 4096
MOST_WHITESPACE: Final = 1
"""Characters of white space in a row between two tokens of JSON, as it has them on one line. Without a limit a model
may write nothing else; and of a larger one xgrammar makes as many rules, which its masks go through wherever white
space may come. With 32 the masks of a step took 1.90 ms in place of 0.76 (`python bench/masks.py --kinds lists`)."""
MOST_NESTED: Final = 48
"""Levels of a schema, of brackets in a grammar. xgrammar takes much longer with each."""

MOST_LOOKED_AT: Final = 1 << 13
"""`work` of the strings of one grammar for which automata are tried: a second or two, each 1,024."""
Follower = Callable[[Node], str | None]

_WHERE = re.compile(r"^\s*\[[^\]]*\]\s*\S+:\d+:\s*")
"""Beginning of xgrammar's errors: its time, file and line."""


_NUL = re.compile(r"\x00|\\(?:u0000|U00000000|x00|0)")
_MORE_DIGITS = re.compile(r"\\x[0-9a-f]{2}[0-9a-fA-F]")

CONTROLS: Final = frozenset(range(0x20))


def vocabulary_for(kind: Kind, table: Sequence[bytes]) -> list[bytes]:
    """Return the bytes that each token of a vocabulary writes under a grammar; empty for tokens that must not be used.
    None holds a surrogate. JSON is written without control characters: some of xgrammar's strings, those of a given
    length or pattern, would hold them as they are, which JSON forbids. So white space between its tokens is spaces
    alone."""
    table = without_surrogates(table)
    if kind not in ("json", "json_schema"):
        return table
    return [b"" if CONTROLS.intersection(raw) else raw for raw in table]


class GrammarError(ValueError):
    """A constraint that cannot be used; the message is for whoever sent it, and says where it is wrong."""


def build(grammar: Grammar, quick: bool = False) -> xgr.Grammar:
    """GrammarError for what is no such constraint, and for what xgrammar does not enforce. `quick`: one of the same
    texts whose masks take less time, for whoever is going to fill some; it takes longer to find."""
    most = MOST_TAG_BYTES if grammar.kind == "structural_tag" else MOST_BYTES
    if len(grammar.text.encode("utf-8", "surrogatepass")) > most:
        raise GrammarError(f"it is longer than {most} bytes")
    try:
        match grammar.kind:
            case "json":
                return _json_schema({"type": "object"}, strict=False)
            case "json_schema":
                schema = _parsed(grammar.text)
                check_schema(schema, MOST_NESTED)
                return _json_schema(with_own_patterns(schema, quick=_follower(quick)), grammar.strict)
            case "regex":
                return _regex(grammar.text, quick)
            case "choice":
                return xgr.Grammar.from_ebnf(_alternatives(_parsed(grammar.text)))
            case "ebnf":
                _check_brackets(grammar.text)
                if "Regex(" in grammar.text:
                    raise GrammarError("Regex(...) is not supported; write it as rules, or give guided_regex")
                return xgr.Grammar.from_ebnf(grammar.text)
            case "structural_tag":
                return _structural_tag(_parsed(grammar.text), _follower(quick))
            case "free":
                raise GrammarError("any text is no grammar")
    except (SchemaError, RegexError) as error:
        raise GrammarError(str(error)) from None
    except (RuntimeError, UnicodeError) as error:
        raise GrammarError(_said(error)) from None


def same_if_written(text: str, grammar: xgr.Grammar) -> bool:
    """Whether `grammar`, which was built of `text`, is still the same once xgrammar has written it down and read it
    again, as its compiler's cache does. It writes a character from U+0080 to U+00FF as `x` and two digits behind a
    backslash, but reads as many digits as follow, so that ß and e become one other character. And it writes nothing
    behind a NUL."""
    if "\\" not in text and text.isascii():
        return True
    return _NUL.search(text) is None and _MORE_DIGITS.search(str(grammar)) is None


def _json_schema(schema: Any, strict: bool) -> xgr.Grammar:
    text = json.dumps(schema, ensure_ascii=False)
    return xgr.Grammar.from_json_schema(text, strict_mode=strict, max_whitespace_cnt=MOST_WHITESPACE)


def _follower(quick: bool) -> Follower:
    """Finds automata for the strings of a grammar: for equal ones once, and not for more than so many."""
    left, found = MOST_LOOKED_AT if quick else 0, dict[Node, str | None]()

    def follow(node: Node) -> str | None:
        nonlocal left
        if node not in found:
            left -= work(node)
            found[node] = for_automaton(node, in_json=True) if left >= 0 else None
        return found[node]

    return follow


def _regex(pattern: str, quick: bool) -> xgr.Grammar:
    node = of_text(pattern)
    if quick and (expression := for_automaton(node)) is not None:
        return grammar_of(expression)
    return xgr.Grammar.from_regex(rules(node))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise GrammarError(f"it is no JSON: {error}") from None
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None


def _alternatives(choices: Any) -> str:
    """A grammar in EBNF of some strings."""
    if not (isinstance(choices, list) and choices and all(isinstance(choice, str) and choice for choice in choices)):
        raise GrammarError("a list of strings, none of them empty, is expected")
    if len(choices) > MOST_CHOICES:
        raise GrammarError(f"at most {MOST_CHOICES} choices are supported, not {len(choices)}")
    # What JSON escapes, EBNF does in the same way.
    return "root ::= " + " | ".join(_literal(choice) for choice in dict.fromkeys(choices))


def _literal(text: str) -> str:
    """A string literal of xgrammar's EBNF: everything but plain characters by its code point."""
    return '"' + "".join(char if _plain(char) else f"\\U{ord(char):08x}" for char in text) + '"'


def _plain(char: str) -> bool:
    return char.isascii() and char.isprintable() and char not in '"\\'


def _structural_tag(tag: Any, follow: Follower) -> xgr.Grammar:
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag" or "format" not in tag:
        raise GrammarError('an object with "type": "structural_tag" and a "format" is expected')
    written = _written(tag, "", 0, follow)
    return xgr.Grammar.from_structural_tag(json.dumps(written, ensure_ascii=False))


def _written(value: Any, place: str, depth: int, follow: Follower) -> Any:
    """A structural tag whose schemas and expressions, which are held to the same rules as those by themselves, are as
    xgrammar reads them."""
    if depth > MOST_NESTED:
        raise GrammarError(f"it is nested more than {MOST_NESTED} levels deep")
    if isinstance(value, list):
        return [_written(item, f"{place}/{index}", depth + 1, follow) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "regex" and isinstance(value.get("pattern"), str):
        try:
            return {**value, "pattern": rules(of_text(value["pattern"]))}
        except RegexError as error:
            raise GrammarError(f"{place}/pattern: {error}") from None
    written = {}
    for name, item in value.items():
        if name == "json_schema":
            try:
                check_schema(item, MOST_NESTED, within_text=True)
            except SchemaError as error:
                raise GrammarError(f"{place}/{name}: {error}") from None
            never = "".join(end[:1] for end in value.get("excludes", ()))
            written[name] = with_own_patterns(item, within_text=True, never=never, quick=follow)
        else:
            if isinstance(item, str):
                _check_brackets(item)
            written[name] = _written(item, f"{place}/{name}", depth + 1, follow)
    return written


def _check_brackets(text: str) -> None:
    deep = deepest = 0
    for char in text:
        if char in "([{":
            deep += 1
            deepest = max(deepest, deep)
        elif char in ")]}":
            deep = max(deep - 1, 0)
    if deepest > MOST_NESTED:
        raise GrammarError(f"brackets are nested more than {MOST_NESTED} levels deep")


def _said(error: Exception) -> str:
    """xgrammar's own words, without where it stood in its sources."""
    text = _WHERE.sub("", str(error)).strip()
    text = text.removeprefix("Check failed: ").strip()
    return text[:1000] or "it cannot be used"
