"""Regular expressions: what is read here is held to the letter, by whatever follows it.

xgrammar's readers of expressions take some constructs for something else than they mean: `^` within a text is
ignored, and so is the backslash of an unknown escape. So expressions are parsed here, by what Python's `re` and
ECMAScript agree on. What they do not agree on, and what no automaton can do, is refused by name. `rules` then writes an
expression anew, in plain constructs, for xgrammar's `from_regex`, and `unrolled` for its automata, which are faster:
see `workers.grammar.quick`.

What an expression is taken for, it matches by both definitions. The other way round need not hold: `\\d`, `\\w` and
`\\s` are those of ASCII, and their opposites leave out what Unicode adds to them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Final

__all__ = [
    "Chars",
    "Either",
    "Node",
    "Ranges",
    "RegexError",
    "Repeat",
    "Run",
    "both",
    "json_without",
    "of_length",
    "of_string",
    "of_text",
    "rules",
    "text_without",
    "unrolled",
]

_MOST_REPEATED: Final = 100_000
_MOST_NESTED: Final = 48
_MOST_RANGES: Final = 4096
"""Ranges of characters beyond those that stand in an expression: `\\W` alone has some 700."""
_LAST: Final = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]
"""Code points from the first to the last of each, in their order, without overlaps."""


class RegexError(ValueError):
    """An expression that is none, or that is not supported; the message says what, and where."""


@dataclass(frozen=True)
class Chars:
    """Character of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Run:
    """Parts that follow one another."""

    parts: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Either:
    """Alternative of several; with none it matches nothing."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """Repetition of a part, one behind the other, without an upper bound if `most` is None."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Anchor:
    """`^` or `$`."""

    sign: str


Node = Chars | Run | Either | Repeat | Anchor
_NOTHING: Final = Either(())


def of_text(pattern: str, dot_is_any: bool = False) -> Node:
    """An expression that a text is to match as a whole: without anchors, and with sets of characters that have some.
    `dot_is_any`: `.` matches ends of lines, too. RegexError."""
    node = _reduced(_within(_parse(pattern, dot_is_any), True, True, Run()), text_without(""))
    if node == _NOTHING:
        raise RegexError("it matches no text")
    return node


def of_string(pattern: str, chars: Ranges) -> Node:
    """The same for a string of certain characters in which the expression is to be found, as JSON Schema's `pattern`
    means it. RegexError."""
    node = _reduced(_within(_parse(pattern), True, True, of_length(0, None, chars)), chars)
    if node == _NOTHING:
        raise RegexError("it matches no text of characters that may stand here")
    return node


def of_length(least: int, most: int | None, chars: Ranges) -> Node:
    """Strings of so many of certain characters, without end if `most` is None, the same."""
    return Repeat(Chars(chars), least, most)


def text_without(never: str) -> Ranges:
    """The characters of texts, but for some."""
    return _without(_set((*_NOT_IN_TEXT, *_of(never))))


def json_without(never: str) -> Ranges:
    """The characters that strings in JSON hold as they are, but for some: no quotation marks, no backslashes, and no
    control characters."""
    return _without(_set(((0, 0x1F), *_NOT_IN_TEXT, *_of('"\\' + never))))


# Sets of characters


def _set(ranges: Iterable[tuple[int, int]]) -> Ranges:
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], high)
        else:
            joined.append((low, high))
    return tuple(joined)


def _of(text: str) -> Ranges:
    return _set((ord(char), ord(char)) for char in text)


def _without(ranges: Ranges) -> Ranges:
    """Return all other characters."""
    begin, rest = 0, []
    for low, high in (*ranges, (_LAST + 1, _LAST + 1)):
        if begin < low:
            rest.append((begin, low - 1))
        begin = high + 1
    return tuple(rest)


@lru_cache(1024)
def both(one: Ranges, other: Ranges) -> Ranges:
    """The characters that are in both sets."""
    return _without(_set((*_without(one), *_without(other))))


def _by_unicode(expression: str) -> Ranges:
    """The characters that Python finds an expression in."""
    everything = "".join(map(chr, range(_LAST + 1)))
    return _set((match.start(), match.end() - 1) for match in re.finditer(f"{expression}+", everything))


_NOT_IN_TEXT: Final = ((0, 0), (0xD800, 0xDFFF))
"""Surrogates, and the character with number 0, which xgrammar takes for the end of what it reads."""
_LINE_ENDS: Final = _of("\n\r\u2028\u2029")
_DIGITS: Final = ((ord("0"), ord("9")),)
_WORDS: Final = _set((*_DIGITS, (ord("A"), ord("Z")), (ord("a"), ord("z")), *_of("_")))
_SPACES: Final = _of(" \t\n\r\f\v")


@cache
def _class_of(letter: str) -> Ranges:
    """Return the characters that `\\d`, `\\D` and so on stand for in any dialect."""
    match letter:
        case "d":
            return _DIGITS
        case "w":
            return _WORDS
        case "s":
            return _SPACES
        case "D":
            return _without(_by_unicode(r"\d"))
        case "W":
            return _without(_by_unicode(r"\w"))
    return _without(_set((*_by_unicode(r"\s"), *_of("\ufeff"))))  # ECMAScript takes the byte order mark for a space


# Reading


_SINGLE: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_HEX_DIGITS: Final = frozenset("0123456789abcdefABCDEF")
_GROUPS: Final = (
    ("?:", ""),
    ("?=", "lookahead"),
    ("?!", "lookahead"),
    ("?<=", "lookbehind"),
    ("?<!", "lookbehind"),
    ("?P<", "named"),
    ("?<", "named"),
    ("?P=", "a reference to a group"),
    ("?#", "a comment"),
    ("?(", "a condition"),
    ("?>", "an atomic group"),
    ("?", "a flag"),
)
"""Openings of groups, the longer ones first, and their kinds."""


def _parse(pattern: str, dot_is_any: bool = False) -> Node:
    parser = _Parser(pattern, dot_is_any)
    node = parser.options()
    if not parser.at_end:
        raise parser.error("the parenthesis closes nothing; write \\)")
    return node


class _Parser:
    def __init__(self, text: str, dot_is_any: bool) -> None:
        self._text, self._at = text, 0
        self._dot = _without(() if dot_is_any else _LINE_ENDS)
        self._depth, self._left = 0, len(text) + _MOST_RANGES

    @property
    def at_end(self) -> bool:
        return self._at == len(self._text)

    def error(self, what: str, at: int | None = None) -> RegexError:
        return RegexError(f"position {(self._at if at is None else at) + 1}: {what}")

    def _next(self, text: str) -> bool:
        """Whether this comes next; if so, it is passed."""
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def options(self) -> Node:
        """Parse options up to the end, or to the parenthesis that closes."""
        options = [self._run()]
        while self._next("|"):
            options.append(self._run())
        return options[0] if len(options) == 1 else Either(tuple(options))

    def _run(self) -> Node:
        parts: list[Node] = []
        while not self.at_end and self._text[self._at] not in "|)":
            part, behind = self._one(), self._at
            if (counts := self._quantifier()) is not None:
                if isinstance(part, Anchor):
                    raise self.error(f"{part.sign} cannot be repeated", behind)
                if not self.at_end and self._text[self._at] in "*+?{":
                    raise self.error("a quantifier behind a quantifier is not supported; use a group")
                part = Repeat(part, *counts)
            parts.append(part)
        return parts[0] if len(parts) == 1 else Run(tuple(parts))

    def _quantifier(self) -> tuple[int, int | None] | None:
        """The least and the most of it, None where none follows. What is lazy matches the same texts."""
        begin = self._at
        if self._next("*"):
            counts: tuple[int, int | None] = 0, None
        elif self._next("+"):
            counts = 1, None
        elif self._next("?"):
            counts = 0, 1
        elif self._next("{"):
            inside, closed, _ = self._text[self._at : self._at + 18].partition("}")
            least, comma, most = inside.partition(",")
            numbers = all(number.isascii() and number.isdigit() for number in (least, most or "0"))
            if not closed or not numbers:
                raise self.error("a number of repetitions is expected, as in {2}, {2,} or {2,5}; or write \\{", begin)
            counts = int(least), (int(most) if most else None) if comma else int(least)
            if counts[1] is not None and counts[1] < counts[0]:
                raise self.error("the second number of repetitions is less than the first", begin)
            if max(counts[0], counts[1] or 0) > _MOST_REPEATED:
                raise self.error(f"more than {_MOST_REPEATED} repetitions are not supported", begin)
            self._at += len(inside) + 1
        else:
            return None
        self._next("?")
        return counts

    def _one(self) -> Node:
        begin, char = self._at, self._text[self._at]
        if char in "*+?{":
            raise self.error(
                "there is nothing to repeat; if the character itself is meant, write a backslash before it"
            )
        self._at += 1
        match char:
            case "(":
                self._depth += 1
                if self._depth > _MOST_NESTED:
                    raise self.error(f"groups are nested more than {_MOST_NESTED} levels deep", begin)
                self._group()
                node = self.options()
                if not self._next(")"):
                    raise self.error("the parenthesis is not closed", begin)
                self._depth -= 1
                return node
            case "[":
                return Chars(self._class(begin))
            case ".":
                return Chars(self._dot)
            case "^" | "$":
                return Anchor(char)
            case "\\":
                return Chars(self._escape())
        return Chars(_of(char))

    def _group(self) -> None:
        begin = self._at - 1
        for sign, what in _GROUPS:
            if self._next(sign):
                if what == "named":
                    name, closed, _ = self._text[self._at : self._at + 256].partition(">")
                    if not closed or not name.isidentifier():
                        raise self.error("a name is expected, and > behind it")
                    self._at += len(name) + 1
                elif what:
                    raise self.error(f"{what} is not supported", begin)
                return

    def _class(self, begin: int) -> Ranges:
        negated, ranges = self._next("^"), list[tuple[int, int]]()
        if self._next("]"):
            raise self.error("the set of characters is empty; if ] itself is meant, write \\]", begin)
        while not self._next("]"):
            if self.at_end:
                raise self.error("the set of characters is not closed", begin)
            here = self._at
            low = self._unit(negated)
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                if self.at_end:
                    raise self.error("the set of characters is not closed", begin)
                high = self._unit(negated)
                if not (_is_one(low) and _is_one(high) and low[0][0] <= high[0][0]):
                    raise self.error("this is no range of characters; if - itself is meant, write \\-", here)
                ranges.append((low[0][0], high[0][0]))
            else:
                ranges.extend(low)
        return _without(_set(ranges)) if negated else _set(ranges)

    def _unit(self, negated: bool) -> Ranges:
        char = self._text[self._at]
        self._at += 1
        return self._escape(within=True, negated=negated) if char == "\\" else _of(char)

    def _escape(self, within: bool = False, negated: bool = False) -> Ranges:
        """Parse a backslash and what follows, `within` a set or not. If it is `negated`, the characters are all those
        that any dialect takes for it."""
        begin = self._at - 1
        if self.at_end:
            raise self.error("nothing follows the backslash", begin)
        char = self._text[self._at]
        self._at += 1
        if char in "dDwWsS":
            ranges = _without(_class_of(char.swapcase())) if negated else _class_of(char)
            self._left -= len(ranges)
            if self._left < 0:
                raise self.error(f"there are too many sets of characters such as \\{char}", begin)
            return ranges
        if char in _SINGLE:
            return _of(_SINGLE[char])
        if char in "xu":
            return self._code(char, begin)
        if char == "0" and not self._text[self._at : self._at + 1].isdigit():
            return _of("\0")
        if char == "b" and within:
            return _of("\b")
        if char in "bB":
            raise self.error("a word boundary is not supported", begin)
        if char.isdigit():
            raise self.error("a reference to a group is not supported", begin)
        if char.isascii() and char.isalpha():
            raise self.error(f"the escape \\{char} is not supported", begin)
        return _of(char)

    def _code(self, kind: str, begin: int) -> Ranges:
        """A character by its code point."""
        if kind == "u" and self._next("{"):
            digits, closed, _ = self._text[self._at : self._at + 8].partition("}")
            behind = self._at + len(digits) + 1
        else:
            length = 2 if kind == "x" else 4
            digits, behind = self._text[self._at : self._at + length], self._at + length
            closed = "}" if len(digits) == length else ""
        if not closed or not digits or not _HEX_DIGITS.issuperset(digits) or int(digits, 16) > _LAST:
            raise self.error("this is no character's number, as in \\x41, \\u0041 or \\u{41}", begin)
        self._at, code = behind, int(digits, 16)
        if 0xD800 <= code < 0xE000:
            raise self.error("half a character is not supported; write the character itself", begin)
        return ((code, code),)


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


# Writing


def _within(node: Node, at_begin: bool, at_end: bool, around: Node) -> Node:
    """Remove anchors. At either end `around` is put where no anchor stands."""
    if isinstance(node, Anchor):
        if not (at_begin if node.sign == "^" else at_end):
            where = "begins" if node.sign == "^" else "ends"
            raise RegexError(f"{node.sign} is supported only where the expression, or one of its options, {where}")
        before, behind = at_begin and node.sign == "$", at_end and node.sign == "^"
        return Run((around,) * (before + behind))
    if isinstance(node, Either):
        return Either(tuple(_within(option, at_begin, at_end, around) for option in node.options))
    if isinstance(node, Run) and node.parts:
        last = len(node.parts) - 1
        return Run(
            tuple(
                _within(part, at_begin and place == 0, at_end and place == last, around)
                for place, part in enumerate(node.parts)
            )
        )
    if isinstance(node, Repeat):
        node = Repeat(_within(node.part, False, False, around), node.least, node.most)
    return Run((*(around,) * at_begin, node, *(around,) * at_end))


def _reduced(node: Node, allowed: Ranges) -> Node:
    """Keep the allowed characters alone; `_NOTHING` where none are left of what must be there."""
    match node:
        case Chars(ranges):
            kept = both(ranges, allowed)
            return Chars(kept) if kept else _NOTHING
        case Run(parts):
            left: list[Node] = []
            for part in (_reduced(part, allowed) for part in parts):
                if part == _NOTHING:
                    return _NOTHING
                left += part.parts if isinstance(part, Run) else [part]
            return left[0] if len(left) == 1 else Run(tuple(left))
        case Either(options):
            some = tuple(option for option in (_reduced(each, allowed) for each in options) if option != _NOTHING)
            return some[0] if len(some) == 1 else Either(some)
        case Repeat(part, least, most):
            part = _reduced(part, allowed)
            if part == _NOTHING:
                return _NOTHING if least else Run()
            return Run() if most == 0 or part == Run() else Repeat(part, least, most)
    raise AssertionError(f"{node} was to be gone")


def rules(node: Node) -> str:
    """An expression for xgrammar's `from_regex`, which makes rules of it."""
    return _written(node, _set_of, _counted)


def unrolled(node: Node) -> str:
    """An expression for xgrammar's `Regex(...)`, which makes an automaton of it: without counts and `?`, which it gets
    wrong, and with sets of characters apart that begin with the same byte but go on with others."""
    return _written(node, _sets_of, _unrolled)


def _written(node: Node, chars: Callable[[Ranges], str], repeat: Callable[[str, int, int | None], str]) -> str:
    match node:
        case Chars(ranges):
            return chars(ranges)
        case Run(parts):
            return "".join(_written(part, chars, repeat) for part in parts) or "()"
        case Either(options):
            return f"({'|'.join(_written(option, chars, repeat) for option in options)})"
        case Repeat(part, least, most):
            text = _written(part, chars, repeat)
            return repeat(text if isinstance(part, (Chars, Either)) else f"({text})", least, most)
    raise AssertionError(f"{node} was to be gone")


_BEGIN_ALIKE: Final = (0, 0x800, 0x1000, 0xD000, 0xE000, 0x10000, 0x40000, 0x100000, _LAST + 1)
"""Ends of ranges of code points. From each to the next one, whatever the first byte of a character in UTF-8 is, all
others may follow it."""


def _sets_of(ranges: Ranges) -> str:
    pieces = (both(ranges, ((low, behind - 1),)) for low, behind in pairwise(_BEGIN_ALIKE))
    sets = [_set_of(piece) for piece in pieces if piece]
    return sets[0] if len(sets) == 1 else f"({'|'.join(sets)})"


def _set_of(ranges: Ranges) -> str:
    return _char(ranges[0][0]) if _is_one(ranges) else f"[{''.join(map(_range, ranges))}]"


def _counted(text: str, least: int, most: int | None) -> str:
    return f"{text}{{{least},{'' if most is None else most}}}"


def _unrolled(text: str, least: int, most: int | None) -> str:
    if most is None:
        return text * (least - 1) + f"{text}+" if least else f"{text}*"
    return text * least + f"(|{text}" * (most - least) + ")" * (most - least)


def _range(ends: tuple[int, int]) -> str:
    low, high = ends
    return _char(low) if low == high else f"{_char(low)}-{_char(high)}"


def _char(code: int) -> str:
    """Write a character by its number, because signs have other meanings in different places; letters and digits stay
    as they are."""
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\u{{{code:x}}}"
