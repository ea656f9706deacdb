"""Grammars that a text is held to, written for xgrammar, in which the text stands as it is or as a string in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from workers.grammar.lark import START, Alt, Leaf, Part, Ref, Rep, Seq, TextGrammarError, read_lark
from workers.grammar.regex import Chars, Either, Node, Ranges, RegexError, Repeat, Run, both, json_without, of_text

__all__ = ["TextGrammar", "TextGrammarError"]

MOST_BYTES: Final = 1 << 16
"""Most bytes of a definition."""
MOST_WORK: Final = 1 << 13
"""Characters of all rules, repetitions written out."""
_ROOT: Final = ""
"""No name that a definition has."""

# What a grammar means


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _with_ignored(definitions: Mapping[str, Part], ignored: Sequence[Part]) -> dict[str, Part]:
    """Allow ignored text before every terminal of a rule, and at the end of the text."""
    blank = Rep(ignored[0] if len(ignored) == 1 else Alt(tuple(ignored)), 0, None)

    def spaced(part: Part) -> Part:
        match part:
            case Leaf():
                return Seq((blank, part))
            case Ref(name):
                return Seq((blank, part)) if _is_terminal(name) else part
            case Seq(parts):
                return Seq(tuple(map(spaced, parts)))
            case Alt(options):
                return Alt(tuple(map(spaced, options)))
            case Rep(inner, least, most):
                return Rep(spaced(inner), least, most)

    made = {name: part if _is_terminal(name) else spaced(part) for name, part in definitions.items()}
    return {**made, _ROOT: Seq((Ref(START), blank))}


def _children(part: Part) -> tuple[Part, ...]:
    match part:
        case Seq(parts):
            return parts
        case Alt(options):
            return options
        case Rep(inner, _, _):
            return (inner,)
    return ()


def _reached(definitions: Mapping[str, Part]) -> list[str]:
    """The definitions that the root leads to. TextGrammarError for one that is missing."""
    found, left = [_ROOT], [definitions[_ROOT]]
    while left:
        part = left.pop()
        left += _children(part)
        if isinstance(part, Ref) and part.name not in found:
            if part.name not in definitions:
                raise TextGrammarError(f"{part.name[:64]} is not defined")
            found.append(part.name)
            left.append(definitions[part.name])
    return found


def _ends(part: Part, ending: set[str]) -> bool:
    """Whether some text is matched by it if what these names stand for matches some."""
    match part:
        case Ref(name):
            return name in ending
        case Seq(parts):
            return all(_ends(each, ending) for each in parts)
        case Alt(options):
            return any(_ends(each, ending) for each in options)
        case Rep(inner, least, _):
            return least == 0 or _ends(inner, ending)
    return True


def _check(definitions: Mapping[str, Part], names: Sequence[str]) -> None:
    """TextGrammarError where a definition matches nothing, or terminals lead in a circle, or they are too much."""
    ending: set[str] = set()
    while more := {name for name in names if name not in ending and _ends(definitions[name], ending)}:
        ending |= more
    if without_end := [name for name in names if name not in ending]:
        raise TextGrammarError(f"{without_end[-1][:64]} leads back to itself and never ends")
    if sum(_work(definitions[name]) for name in names) > MOST_WORK:
        raise TextGrammarError(f"its definitions have more than {MOST_WORK} characters, repetitions written out")


def _work(part: Part) -> int:
    match part:
        case Leaf(node):
            return _work_of(node)
        case Rep(inner, least, most):
            return _work(inner) * max(least, most or 0, 1)
    return 1 + sum(map(_work, _children(part)))


def _work_of(node: Node) -> int:
    match node:
        case Run(parts) | Either(parts):
            return 1 + sum(map(_work_of, parts))
        case Repeat(part, least, most):
            return _work_of(part) * max(least, most or 0, 1)
    return 1


# Writing

_JSON_ESCAPES: Final = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
"""Characters that a string in JSON holds behind a backslash, and what stands there for each."""
_IN_JSON: Final = json_without("")
_BACKSLASH: Final = '"\\U0000005c"'


@dataclass(frozen=True)
class TextGrammar:
    """A grammar that a text is held to."""

    syntax: str
    """`lark`, or `regex` for a regular expression that the whole text matches."""
    definition: str

    def ebnf(self, *, in_json: bool = False, never: str = "") -> str:
        """The same for xgrammar, whose rule `root` is the text. TextGrammarError for one that is none or cannot be
        expressed. `in_json`: the text as a string in JSON, without the quotation marks around it. `never`: characters
        that it must not hold; TextGrammarError where it might."""
        try:
            return _written(self._definitions(), in_json, never)
        except RegexError as error:
            raise TextGrammarError(str(error)) from None

    def _definitions(self) -> dict[str, Part]:
        if len(self.definition.encode("utf-8", "surrogatepass")) > MOST_BYTES:
            raise TextGrammarError(f"it is longer than {MOST_BYTES} bytes")
        if self.syntax == "regex":
            return {_ROOT: Leaf(of_text(self.definition))}
        if self.syntax != "lark":
            raise TextGrammarError(f"the syntax {self.syntax[:64]!r} is not known")
        definitions, ignored = read_lark(self.definition)
        definitions[_ROOT] = Ref(START)
        return _with_ignored(definitions, ignored) if ignored else definitions


def _written(definitions: Mapping[str, Part], in_json: bool, never: str) -> str:
    names = _reached(definitions)
    _check(definitions, names)

    def chars(ranges: Ranges) -> str:
        if any(low <= ord(char) <= high for char in never for low, high in ranges):
            raise TextGrammarError(f"its texts may hold {' or '.join(never)}, which cannot stand here")
        if not in_json:
            return _set(ranges)
        escaped = "".join(
            sign for code, sign in _JSON_ESCAPES.items() if any(low <= code <= high for low, high in ranges)
        )
        plain = both(ranges, _IN_JSON)
        options = [_set(plain)] if plain else []
        if escaped:
            signs = tuple((ord(sign), ord(sign)) for sign in sorted(escaped))
            options.append(f"{_BACKSLASH} {_set(signs)}")
        if not options:
            raise TextGrammarError("its texts hold control characters, which JSON has no short form for")
        return f"({' | '.join(options)})"

    def node(one: Node) -> str:
        match one:
            case Chars(ranges):
                return chars(ranges)
            case Run(parts):
                return " ".join(map(node, parts)) or '""'
            case Either(options):
                return f"({' | '.join(map(node, options))})"
            case Repeat(inner, least, most):
                return _repeated(node(inner), least, most)
        raise AssertionError(f"{one} was to be gone")

    def part(one: Part) -> str:
        match one:
            case Leaf(inner):
                return node(inner)
            case Ref(name):
                return _rule(name)
            case Seq(parts):
                return " ".join(map(part, parts)) or '""'
            case Alt(options):
                return f"({' | '.join(map(part, options))})"
            case Rep(inner, least, most):
                return _repeated(part(inner), least, most)

    return "\n".join(f"{_rule(name)} ::= {part(definitions[name])}" for name in names)


def _rule(name: str) -> str:
    return "root" if name == _ROOT else f"r_{name}"


def _repeated(text: str, least: int, most: int | None) -> str:
    if most == 0:
        return '""'
    return f"({text}){{{least},{'' if most is None else most}}}"


def _string(text: str) -> str:
    return f'"{"".join(map(_char, text))}"'


def _set(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _string(chr(ranges[0][0]))
    return f"[{''.join(map(_range_text, ranges))}]"


def _range_text(ends: tuple[int, int]) -> str:
    low, high = map(chr, ends)
    return _char(low) if low == high else f"{_char(low)}-{_char(high)}"


def _char(char: str) -> str:
    """Write a character by its number, because signs have other meanings in different places; letters and digits stay
    as they are."""
    return char if char.isascii() and char.isalnum() else f"\\U{ord(char):08x}"
