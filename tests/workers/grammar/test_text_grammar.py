"""Grammars in Lark's syntax, and regular expressions, as grammars of xgrammar's: which texts they let a model write, as
they are and as a string in JSON. Python's `re`, and `json`, are what they are compared with."""

from __future__ import annotations

import json
import random
import re

import pytest

from tests.workers.grammar.grammar_walk import takes, write
from workers.grammar.text_grammar import TextGrammar, TextGrammarError
from workers.protocol.grammar import Grammar

APPLY_PATCH = """\
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""The format of a coding agent's patches, as it sends it."""
SUM = """\
// Sums with spaces.
?start: expr
?expr: term (SP ("+" | "-") SP term)* -> add
?term: factor (SP "*" SP factor)*
factor: INT
SP: " "
%import common.INT
"""
NESTED = """\
start: value
value: "(" [value ("," value)~0..2] ")"
    | NAME
NAME.2: /[a-c]+/i
"""
QUERY = r"""
start: "select"i columns "from"i NAME ("where"i NAME "=" ESCAPED_STRING)? ";"
columns: "*" | NAME ("," NAME)*
NAME: LETTER (LETTER | DIGIT | "_")*
LETTER: "a".."z"
%import common (DIGIT, ESCAPED_STRING)
%import common.WS_INLINE -> BLANK
%ignore BLANK
"""
PATCH = """\
*** Begin Patch
*** Add File: a "b".py
+x = "\\n"

*** Update File: c.md
*** Move to: d.md
@@ def f():
-old\ttab
+new <b>é</b> 🚀
 same
*** End of File
*** Delete File: e
*** End Patch"""
TEXTS = {
    APPLY_PATCH: {
        PATCH.replace("\n\n", "\n+\n"): True,
        PATCH.replace("\n\n", "\n+\n") + "\n": True,
        PATCH: False,  # an empty line is none of a patch
        "*** Begin Patch\n*** End Patch": False,
        "*** Begin Patch\n*** Delete File: a\n*** End Patch": True,
        "*** Begin Patch\n*** Delete File: \n*** End Patch": False,
    },
    SUM: {"1 + 2 * 33": True, "7": True, "1+2": False, "": False, "1 + ": False},
    NESTED: {"a": True, "()": True, "(a,(),(B,c))": True, "((a)": False, "(a,a,a,a)": False, "d": False},
    QUERY: {
        "select*from a;": True,
        'SELECT a, b_1 FROM t WHERE a = "x\\"y" ; ': True,
        "select a b from t;": False,
        "select * from t": False,
    },
    'start: /[^"\\n]+/ "\\n" | "\\u00e9"~2': {"a\\b\n": True, 'a"\n': False, "éé": True, "é": False},
    "start: /a.b/s | /a.c/\n": {"a\nb": True, "a\nc": False, "axc": True},
    "!start: A{2,3} A?\nA: [/x/] \"y\" // not //\n# a comment": {"xyy": True, "y": False, "yyyy": True, "yyyyy": False},
    "start: start2+\nstart2: \"a\" start2 \"b\" | \"a\" \"b\"": {"aabbab": True, "aab": False},
}  # fmt: skip


def grammars(definition: str, syntax: str = "lark") -> tuple[Grammar, Grammar]:
    """Make grammars of the text as it is, and of a string in JSON."""
    grammar = TextGrammar(syntax, definition)
    return Grammar("ebnf", grammar.ebnf()), Grammar("ebnf", grammar.ebnf(in_json=True))


@pytest.mark.parametrize("definition", TEXTS)
def test_a_grammar_takes_its_texts(definition: str) -> None:
    plain, in_json = grammars(definition)
    for text, taken in TEXTS[definition].items():
        assert takes(plain, text) == taken, text
        assert takes(in_json, json.dumps(text, ensure_ascii=False)[1:-1]) == taken, text


@pytest.mark.parametrize("pattern", ["[0-9]{2}|x", "(.|\\n)*", 'a"b\\\\', "[^<]+\\t?", "^ab?$", "\\w+\\.(py|md)"])
def test_a_regular_expression_is_the_whole_text(pattern: str) -> None:
    plain, in_json = grammars(pattern, "regex")
    for text in ("12", "x", "", 'a"b\\', "a\nb", "\t", "ab", "a", "b", "a.py", "a.pyc", "é\t"):
        taken = re.fullmatch(pattern, text) is not None
        assert takes(plain, text) == taken, text
        assert takes(in_json, json.dumps(text, ensure_ascii=False)[1:-1]) == taken, text
    rng = random.Random(1)
    for _ in range(20):
        written = write(in_json, rng)
        assert written is None or re.fullmatch(pattern, json.loads(f'"{written}"')), written


NOT_TAKEN = {
    "": "start is not defined",
    "begin: x": "start is not defined",
    'start: a "b"': "a is not defined",
    "start: start": "never ends",
    'start: a\na: "x" a': "a leads back to itself and never ends",
    'start: "a': "line 1: this is not understood",
    'start: ("a"': "not closed",
    'start: "a")': "not expected",
    'start: "a"\nstart: "b"': "defined twice",
    "start: /a(?=b)/": "lookahead",
    "start: /a/x": "flags",
    "start: /é/i": "beyond ASCII",
    "start: x\nx: %json {}": "not understood|not expected|not supported",
    "start: X\n%declare X": "%declare",
    "start: X\n%import .secret.X": "only the terminals of common",
    "start: X\n%import common.X": "common has no terminal X",
    'start: "a"~2000': "repetitions",
    'start: "a"~3..2': "less than the first",
    "start: " + '("a"~1000)~1000': "characters",
    "start: " + "(" * 5000 + '"a"' + ")" * 5000: "nested more than",
    'start: "a"' + "?" * 5000: "quantifiers follow each other",
    'start: "ab".."c"': "range",
    'start: "\\ud800"': "no text",
    'start: "' + "a" * (1 << 16) + '"': "longer than",
    'start{x}: "a"': "colon",
    'start[lazy]: "a"': "colon",
}


@pytest.mark.parametrize("definition", NOT_TAKEN, ids=lambda text: text[:24])
def test_what_cannot_be_expressed_is_refused(definition: str) -> None:
    with pytest.raises(TextGrammarError, match=NOT_TAKEN[definition]):
        TextGrammar("lark", definition).ebnf()


def test_what_cannot_stand_somewhere_is_refused() -> None:
    with pytest.raises(TextGrammarError, match="may hold <"):
        TextGrammar("lark", APPLY_PATCH).ebnf(never="<")
    assert TextGrammar("lark", SUM).ebnf(never="<") == TextGrammar("lark", SUM).ebnf()
    with pytest.raises(TextGrammarError, match="control characters"):
        TextGrammar("regex", "a\\x01").ebnf(in_json=True)
    with pytest.raises(TextGrammarError, match="syntax 'peg'"):
        TextGrammar("peg", "a").ebnf()
