"""Reads grammars in Lark's syntax (https://lark-parser.readthedocs.io/en/stable/grammar.html).

What is taken: rules and terminals in any order, with recursion; strings and regular expressions with the flags `i` and
`s`; ranges; groups, alternatives and all quantifiers; aliases, priorities and the marks of rules, which say nothing of
what is matched; `%import` of the terminals of `common`, and `%ignore`. Lark's terminals are matched as long as they
get, and the more important one first; here whatever any of them matches is a text of the grammar, as of one that Lark
reads with `lexer="dynamic_complete"`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from workers.grammar.regex import Chars, Either, Node, Ranges, Repeat, Run, of_text

__all__ = ["START", "Alt", "Leaf", "Part", "Ref", "Rep", "Seq", "TextGrammarError", "read_lark"]

_MOST_NESTED: Final = 24
_MOST_REPEATED: Final = 1000
START: Final = "start"


class TextGrammarError(ValueError):
    """A grammar that is none, or that cannot be expressed; the message says why."""


@dataclass(frozen=True)
class Ref:
    """Whatever another definition matches."""

    name: str


@dataclass(frozen=True)
class Seq:
    """Parts that follow one another."""

    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Alt:
    """Alternative of several parts."""

    options: tuple[Part, ...]


@dataclass(frozen=True)
class Rep:
    """Repetition of a part, without an upper bound if `most` is None."""

    part: Part
    least: int
    most: int | None


@dataclass(frozen=True)
class Leaf:
    """A text that stands in a definition, as an expression."""

    node: Node


Part = Ref | Seq | Alt | Rep | Leaf

_COMMON: Final[Mapping[str, str]] = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": "[0-9]+\\.[0-9]*|\\.[0-9]+",
    "FLOAT": "[0-9]+[eE][+-]?[0-9]+|([0-9]+\\.[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_FLOAT": "[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\\.[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "NUMBER": "[0-9]+([eE][+-]?[0-9]+)?|([0-9]+\\.[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": "[+-]?([0-9]+([eE][+-]?[0-9]+)?|([0-9]+\\.[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "ESCAPED_STRING": '"([^"\\\\\\n]|\\\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z_0-9]*",
    "WS_INLINE": "[ \\t]+",
    "WS": "[ \\t\\f\\r\\n]+",
    "CR": "\\r",
    "LF": "\\n",
    "NEWLINE": "(\\r?\\n)+",
    "SH_COMMENT": "#[^\\n]*",
    "CPP_COMMENT": "//[^\\n]*",
    "SQL_COMMENT": "--[^\\n]*",
    "C_COMMENT": "/\\*([^*]|\\*+[^*/])*\\*+/",
}
"""The terminals of Lark's own grammar `common`."""

# Reading

_TOKEN: Final = re.compile(
    r"""(?P<space>[ \t\f\r]+)|(?P<line>\n)|(?P<comment>//[^\n]*|\#[^\n]*)"""
    r"""|(?P<string>"(?:\\.|[^"\\\n])*"i?)|(?P<regexp>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)"""
    r"""|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<number>-?[0-9]+)|(?P<statement>%[a-z]+)"""
    r"""|(?P<sign>->|\.\.|[:|()\[\]?*+~.,{}!])"""
)
_QUANTIFIERS: Final[Mapping[str, tuple[int, int | None]]] = {"?": (0, 1), "*": (0, None), "+": (1, None)}
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "a": "\a", "0": "\0"}
_ESCAPE: Final = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    first: bool
    """Whether it is the first on its line."""


def _tokens(text: str) -> Iterator[_Token]:
    at, first = 0, True
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise TextGrammarError(
                f"line {text.count(chr(10), 0, at) + 1}: this is not understood: {text[at : at + 16]!r}"
            )
        at, kind = found.end(), str(found.lastgroup)
        if kind == "line":
            first = True
        elif kind not in ("space", "comment"):
            yield _Token(kind, found.group(), first)
            first = False


def read_lark(text: str) -> tuple[dict[str, Part], list[Part]]:
    """The definitions of a grammar by name, and what is ignored. TextGrammarError, RegexError."""
    reader = _Reader(text)
    reader.read()
    return reader.definitions, reader.ignored


class _Reader:
    def __init__(self, text: str) -> None:
        self._tokens = [*_tokens(text), _Token("end", "", True)]
        self._at = self._depth = 0
        self.definitions: dict[str, Part] = {}
        self.ignored: list[Part] = []

    def read(self) -> None:
        """Read all definitions."""
        while self._now.kind != "end":
            if self._now.kind == "statement":
                self._statement()
                continue
            while self._now.text in ("?", "!"):
                self._at += 1
            name = self._name()
            if self._next("."):
                self._at += 1  # a priority
            if not self._next(":"):
                raise TextGrammarError(f"{name[:64]}: a colon is expected behind a name, not {self._now.text[:16]!r}")
            if name in self.definitions:
                raise TextGrammarError(f"{name[:64]} is defined twice")
            self.definitions[name] = self._options()
            if not self._ended:
                raise TextGrammarError(f"{name[:64]}: {self._now.text[:16]!r} is not expected here")

    @property
    def _now(self) -> _Token:
        return self._tokens[self._at]

    def _next(self, sign: str) -> bool:
        """Whether this comes next; if so, it is passed."""
        if self._now.kind == "sign" and self._now.text == sign:
            self._at += 1
            return True
        return False

    def _name(self) -> str:
        if self._now.kind != "name":
            raise TextGrammarError(f"a name is expected, not {self._now.text[:16]!r}")
        self._at += 1
        return self._tokens[self._at - 1].text

    @property
    def _ended(self) -> bool:
        """Whether another definition, or nothing, comes next."""
        if self._now.kind in ("end", "statement"):
            return True
        at = self._at
        if not self._tokens[at].first:
            return False
        while self._tokens[at].text in ("?", "!"):
            at += 1
        if self._tokens[at].kind != "name":
            return False
        at += 3 if self._tokens[at + 1].text == "." else 1
        return at < len(self._tokens) and self._tokens[at].text == ":"

    def _statement(self) -> None:
        word = self._now.text
        self._at += 1
        if word == "%ignore":
            self.ignored.append(self._options())
            return
        if word != "%import":
            raise TextGrammarError(f"{word} is not supported")
        self._next(".")
        if (library := self._name()) != "common" or not (self._next(".") or self._now.text == "("):
            raise TextGrammarError(f"%import of {library[:64]}: only the terminals of common can be imported")
        names = [self._name()] if not self._next("(") else [*self._names()]
        alias = self._name() if self._next("->") else None
        for name in names:
            if name not in _COMMON:
                raise TextGrammarError(f"%import: common has no terminal {name[:64]}")
            self.definitions[alias or name] = Leaf(of_text(_COMMON[name]))

    def _names(self) -> Iterator[str]:
        while not self._next(")"):
            yield self._name()
            self._next(",")

    def _options(self) -> Part:
        self._depth += 1
        if self._depth > _MOST_NESTED:
            raise TextGrammarError(f"groups are nested more than {_MOST_NESTED} levels deep")
        self._next("|")
        options = [self._sequence()]
        while self._next("|"):
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _sequence(self) -> Part:
        parts: list[Part] = []
        while not self._ended and self._now.text not in ("|", ")", "]"):
            if self._next("->"):
                self._name()
                continue
            parts.append(self._quantified(self._atom()))
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def _quantified(self, part: Part) -> Part:
        for _ in range(_MOST_NESTED):
            if self._ended:
                return part
            if self._now.kind == "sign" and self._now.text in _QUANTIFIERS:
                least, most = _QUANTIFIERS[self._now.text]
                self._at += 1
            elif self._next("~"):
                least = most = self._number()
                if self._next(".."):
                    most = self._number()
            elif self._next("{"):
                least = 0 if self._now.text == "," else self._number()
                most = least
                if self._next(","):
                    most = None if self._now.text == "}" else self._number()
                if not self._next("}"):
                    raise TextGrammarError("a number of repetitions is not closed with }")
            else:
                return part
            if most is not None and most < least:
                raise TextGrammarError("the second number of repetitions is less than the first")
            part = Rep(part, least, most)
        raise TextGrammarError(f"more than {_MOST_NESTED} quantifiers follow each other")

    def _number(self) -> int:
        if self._now.kind != "number" or not 0 <= int(self._now.text[:9]) <= _MOST_REPEATED:
            raise TextGrammarError(
                f"a number of repetitions up to {_MOST_REPEATED} is expected, not {self._now.text[:16]!r}"
            )
        self._at += 1
        return int(self._tokens[self._at - 1].text)

    def _atom(self) -> Part:
        token = self._now
        self._at += 1
        match token.kind, token.text:
            case "name", name:
                return Ref(name)
            case "string", text:
                if self._next(".."):
                    last = self._now
                    self._at += 1
                    return _range(text, last.text if last.kind == "string" else "")
                return Leaf(_literal(text))
            case "regexp", text:
                return Leaf(_expression(text))
            case "sign", "(" | "[":
                part = self._options()
                if not self._next(")" if token.text == "(" else "]"):
                    raise TextGrammarError(f"a group is not closed where {self._now.text[:16]!r} stands")
                return part if token.text == "(" else Rep(part, 0, 1)
        raise TextGrammarError(f"{token.text[:16]!r} is not expected here")


def _text_of(string: str) -> str:
    def char(found: re.Match[str]) -> str:
        code = found[1]
        return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPES.get(code, code)

    try:
        return _ESCAPE.sub(char, string[1:-1])
    except (ValueError, OverflowError):
        raise TextGrammarError(f"{string[:32]} holds no character's number") from None


def _literal(string: str) -> Node:
    blind = string.endswith("i")
    text = _text_of(string[:-1] if blind else string)
    if any(0xD800 <= ord(char) < 0xE000 or char == "\0" for char in text):
        raise TextGrammarError(f"{string[:32]} holds what no text does")
    node = Run(tuple(Chars(((ord(char), ord(char)),)) for char in text))
    return _in_any_case(node) if blind else node


def _range(first: str, last: str) -> Part:
    if not (first and last) or first.endswith("i") or last.endswith("i"):
        raise TextGrammarError("a range is two strings of one character")
    low, high = _text_of(first), _text_of(last)
    if len(low) != 1 or len(high) != 1 or low > high:
        raise TextGrammarError(f"{first[:16]}..{last[:16]} is no range of characters")
    return Leaf(of_text(f"[\\u{{{ord(low):x}}}-\\u{{{ord(high):x}}}]"))


def _expression(text: str) -> Node:
    body, _, flags = text.rpartition("/")
    if not {*flags} <= {*"ismu"}:
        raise TextGrammarError(f"the flags {flags[:16]} of an expression are not supported")
    node = of_text(body[1:], dot_is_any="s" in flags)
    return _in_any_case(node) if "i" in flags else node


def _in_any_case(node: Node) -> Node:
    """Allow letters of ASCII in both cases; TextGrammarError for others, which have their own ideas of case."""
    match node:
        case Run(parts):
            return Run(tuple(map(_in_any_case, parts)))
        case Either(options):
            return Either(tuple(map(_in_any_case, options)))
        case Repeat(part, least, most):
            return Repeat(_in_any_case(part), least, most)
        case Chars(ranges):
            return Chars(_both_cases(ranges))
    raise AssertionError(f"{node} was to be gone")


def _both_cases(ranges: Ranges) -> Ranges:
    shifted = [
        (max(low, begin) + shift, min(high, end) + shift)
        for low, high in ranges
        for begin, end, shift in ((65, 90, 32), (97, 122, -32))
        if max(low, begin) <= min(high, end)
    ]
    if all(high < 128 for _, high in ranges) or any(low < 128 < high for low, high in ranges):
        return _joined([*ranges, *shifted])
    raise TextGrammarError("letters beyond ASCII in any case are not supported")


def _joined(ranges: Sequence[tuple[int, int]]) -> Ranges:
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], high)
        else:
            joined.append((low, high))
    return tuple(joined)
