"""Regular expressions written anew match what Python's `re` says that they match, and xgrammar follows them at little
cost."""

from __future__ import annotations

import itertools
import json
import random
import re

import jsonschema
import pytest
import xgrammar as xgr
from grammar_walk import takes, write
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.grammar import quick as quick_module
from workers.grammar.automaton import Branching, automaton_of, same_texts, same_texts_beside
from workers.grammar.build import GrammarError, build
from workers.grammar.quick import MOST_STATES, for_automaton
from workers.grammar.regex import RegexError, json_without, of_string, of_text, rules, unrolled
from workers.protocol.grammar import Grammar

TEXTS = ["".join(text) for length in range(6) for text in itertools.product("ab", repeat=length)]


def compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    groups = st.sampled_from(["({})", "(?:{})", "(?P<name{}>{})"])
    grouped = st.builds(lambda how, part, n: how.format(*[n, part][-how.count("{}") :]), groups, inner, st.uuids())
    grouped = grouped.map(lambda text: text.replace("-", ""))
    counts = st.builds(lambda a, b: f"{{{min(a, b)},{max(a, b)}}}", st.integers(0, 3), st.integers(0, 3))
    some = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,}", "{0}", "{2,}?"])
    return st.one_of(
        grouped,
        st.builds("({}){}".format, inner, st.one_of(some, counts)),
        st.lists(inner, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: f"({'|'.join(options)})"),
    )


expressions = st.recursive(st.sampled_from(["a", "b", "[ab]", "[^a]", "", r"\w", "a*", "b?"]), compound, max_leaves=8)


VOCABULARY = xgr.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b""], vocab_size=257, stop_token_ids=[256])


def compiled(grammar: xgr.Grammar) -> xgr.CompiledGrammar:
    return xgr.GrammarCompiler(VOCABULARY, cache_enabled=False).compile_grammar(grammar)


def matches(grammar: xgr.CompiledGrammar, text: str) -> bool:
    matcher = xgr.GrammarMatcher(grammar)
    return bool(matcher.accept_string(text) and matcher.is_completed())


@pytest.mark.parametrize("quick", [True, False], ids=["automaton", "rules"])
@settings(max_examples=60, deadline=None)
@given(pattern=expressions)
def test_the_same_texts_match(quick: bool, pattern: str) -> None:
    grammar = compiled(build(Grammar("regex", pattern), quick))
    for text in TEXTS:
        assert matches(grammar, text) == bool(re.fullmatch(pattern, text)), text


@settings(max_examples=30, deadline=None)
@given(pattern=expressions, other=expressions)
def test_automata_match_the_same_texts(pattern: str, other: str) -> None:
    """Automata are told apart by what they match."""
    own = automaton_of(of_text(pattern), 10**9)
    assert own is not None
    for text in TEXTS:
        state = 0
        for byte in text.encode():
            state = own.next(state, byte)
        assert (state in own.ends) == bool(re.fullmatch(pattern, text)), text
    theirs = automaton_of(of_text(other), 10**9)
    assert theirs is not None
    branching = Branching(theirs.edges, [()] * len(theirs.edges), 0, sorted(theirs.ends))
    differ = any(bool(re.fullmatch(pattern, text)) != bool(re.fullmatch(other, text)) for text in TEXTS)
    if differ:
        assert not same_texts(of_text(pattern), branching, 10**9)
    if same_texts(of_text(pattern), branching, 10**9):
        assert own == theirs  # the smallest one is the only one, but for how states are numbered


@pytest.mark.parametrize("pattern", ["(ab*)?", "(a*b)?"])
def test_xgrammar_s_own_automata_match_too_much(pattern: str) -> None:
    """This is what all of the quick automata's checks are for: when this test fails, they may go."""
    own = compiled(quick_module.grammar_of(pattern))
    assert any(matches(own, text) and not re.fullmatch(pattern, text) for text in TEXTS)


def test_automata_that_match_too_much_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here and in another process alike."""
    wrong = "(a|(|a(|a)))"
    assert unrolled(of_text("a|a{0,2}")) == wrong
    assert matches(compiled(quick_module.grammar_of(wrong)), "aaa")
    for little in (quick_module.LITTLE_WORK, 0):
        monkeypatch.setattr(quick_module, "LITTLE_WORK", little)
        assert for_automaton(of_text("a|a{0,2}")) is None
        assert for_automaton(of_text("a(|a)")) == "a(()|a)"


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"an expression could not be looked at: exit status 1: (?s:.*)IndexError"):
        same_texts_beside(of_text("a"), Branching([], [], 0, []), MOST_STATES)


def test_what_fails_costs_time_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: object) -> bool:
        raise RuntimeError("no processes are left")

    monkeypatch.setattr(quick_module, "same_texts_beside", fails)
    assert "Regex" not in str(build(Grammar("regex", "[a-z]{0,100}"), quick=True))
    assert "no processes are left" in caplog.text


def test_another_form_of_grammars_costs_time_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quick_module, "VERSION", "v15")
    monkeypatch.setattr(quick_module._PRIVATE, "_told", False)
    for _ in range(2):
        assert "Regex" not in str(build(Grammar("regex", "(ab)+"), quick=True))
    [record] = caplog.records
    assert re.match(r"xgrammar 0\.2\S* has no form of grammars v15, but v16: masks .* take longer", record.message)


SAMPLES = "".join(map(chr, range(128))) + "\x85\xa0²éÉß٣\u07c0Ωϰ中文\u2003\u2028\ufeff\uffff😀\U0001d7d9\U0010ffff"
SETS = (
    *[r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "."],
    *[r"[^\d]", r"[^\W]", r"[^\sa]", r"[\w-]", r"[^\]\\^-]", "[a-fé-中]", "[^a-z😀]", "[.*+?{}()|^$[]", r"[\b\0]"],
    *[r"\n\t", r"\x41", r"\u00e9", r"\.\*\\", r"\/", r"\-", "é", "😀", "]}", r"[\x00-\x1f]", "[-a]", "[a-]"],
)


@pytest.mark.parametrize("pattern", SETS)
@pytest.mark.parametrize("quick", [True, False], ids=["automaton", "rules"])
def test_characters_match_by_every_definition(pattern: str, quick: bool) -> None:
    """Definitions are Python's with Unicode and without, which is ECMAScript's but for spaces; those that match by both
    do match, but for ends of lines that are none to Python, and for the character with number 0."""
    grammar = compiled(build(Grammar("regex", pattern), quick))
    ascii_alone = re.ASCII if "\\" in pattern else 0
    for text in (*SAMPLES, "\n\t", ".*\\", "]}"):
        both = all(re.fullmatch(pattern, text, flags) for flags in (0, ascii_alone))
        left_out = {".": "\r\u2028", r"\S": "\ufeff", r"[^\sa]": "\ufeff"}.get(pattern, "")
        if text in ("\0", *left_out):
            assert not matches(grammar, text)
        else:
            assert matches(grammar, text) == both, ascii(text)


def test_one_character_by_its_number() -> None:
    """The number is written as ECMAScript does it, which Python does not read."""
    assert takes(Grammar("regex", r"\u{1F600}[\u{41}-C]"), "😀B")


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        ("^(ab|c)$", ["ab", "c"], ["abc", ""]),
        ("^a|b$", ["a", "b"], ["ab"]),
        ("(^a|b)c$", ["ac", "bc"], ["abc"]),
        ("^", [""], ["a"]),
        ("^$", [""], ["a"]),
        ("a{3,300}", ["aaa", "a" * 300], ["aa", "a" * 301]),
        ("(a{20}b?){20}", ["a" * 400, ("a" * 20 + "b") * 20], ["a" * 401]),
        ("", [""], ["a"]),
    ],
)
def test_a_text_matches_as_a_whole(pattern: str, texts: list[str], others: list[str]) -> None:
    assert [takes(Grammar("regex", pattern), text) for text in texts] == [True] * len(texts)
    assert [takes(Grammar("regex", pattern), text) for text in others] == [False] * len(others)


WRONG = [
    ("(a", "position 1: the parenthesis is not closed"),
    ("a)", "position 2: the parenthesis closes nothing"),
    ("ab**", "position 4: a quantifier behind a quantifier"),
    ("a*+", "a quantifier behind a quantifier"),
    ("*a", "position 1: there is nothing to repeat"),
    ("a{", "position 2: a number of repetitions"),
    ("a{,3}", "a number of repetitions"),
    ("a{3,2}", "less than the first"),
    ("a{100001}", "more than 100000 repetitions"),
    ("a(?=b)", "position 2: lookahead is not supported"),
    ("(?!b)a", "lookahead is not supported"),
    ("(?<=b)a", "lookbehind is not supported"),
    ("(?i)a", "a flag is not supported"),
    ("(?>a)", "an atomic group is not supported"),
    (r"(a)\1", "position 4: a reference to a group is not supported"),
    (r"(?P<n>a)(?P=n)", "a reference to a group is not supported"),
    ("(?P<a", "a name is expected"),
    (r"\bab", "position 1: a word boundary is not supported"),
    (r"\p{L}", r"the escape \p is not supported"),
    (r"\q", r"the escape \q is not supported"),
    (r"\x4", "this is no character's number"),
    (r"\u{110000}", "this is no character's number"),
    (r"\ud83d\ude00", "half a character"),
    ("a\\", "nothing follows the backslash"),
    ("[a", "position 1: the set of characters is not closed"),
    ("[]a]", "position 1: the set of characters is empty"),
    ("[b-a]", "position 2: this is no range"),
    (r"[\w-z]", "this is no range"),
    ("a^b", "^ is supported only where the expression, or one of its options, begins"),
    ("(a$)*", "$ is supported only where"),
    ("^*", "^ cannot be repeated"),
    (r"[^\s\S]", "it matches no text"),
    ("(" * 49 + "a" + ")" * 49, "nested more than 48 levels deep"),
    (r"\W" * 9, r"position 11: there are too many sets of characters such as \W"),
    (f"[{chr(92)}W{'a' * 10}" + r"\W" * 9 + "]", "there are too many sets of characters"),
]


@pytest.mark.parametrize(("pattern", "text"), WRONG)
def test_what_is_not_supported_is_refused_with_its_place(pattern: str, text: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(text)):
        build(Grammar("regex", pattern))
    with pytest.raises(GrammarError, match="#/pattern: ") as caught:
        build(Grammar("json_schema", json.dumps({"type": "string", "pattern": pattern})))
    assert text in str(caught.value) or text == "it matches no text"
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": pattern}}
    with pytest.raises(GrammarError, match="/format/pattern: "):
        build(Grammar("structural_tag", json.dumps(tag)))


@pytest.mark.parametrize("quick", [True, False], ids=["automaton", "rules"])
@settings(max_examples=30, deadline=None)
@given(pattern=expressions, begins=st.booleans(), ends=st.booleans())
def test_a_string_of_json_has_it_in_it(quick: bool, pattern: str, begins: bool, ends: bool) -> None:
    pattern = "^" * begins + f"({pattern})" + "$" * ends
    grammar = compiled(build(Grammar("json_schema", json.dumps({"type": "string", "pattern": pattern})), quick))
    for text in TEXTS[:31]:
        for around in (text, f"é{text} "):
            taken = matches(grammar, json.dumps(around, ensure_ascii=False))
            assert taken == bool(re.search(pattern, around, re.ASCII)), around


STRINGS: list[dict[str, object]] = [
    {"pattern": r"^\S@\w{2,3}\.?$"},
    {"pattern": "[^a]b"},
    {"pattern": "^.{0,9}$"},
    {"minLength": 2, "maxLength": 5},
    {"minLength": 3},
    {"format": "date"},
    {"format": "ipv4"},
]
SLOW = (({"format": "date"}, False), ({"format": "ipv4"}, True))


@pytest.mark.parametrize(
    ("schema", "within_text"),
    [
        pytest.param(
            schema,
            within_text,
            marks=pytest.mark.long if (schema, within_text) in SLOW else (),
            id=f"{json.dumps(schema)}-{'within a tag' if within_text else 'alone'}",
        )
        for schema in STRINGS
        for within_text in (False, True)
    ],
)
def test_what_is_written_is_valid(schema: dict[str, object], within_text: bool) -> None:
    """Strings within a tag hold no control characters either, though the text around them may."""
    schema = {"type": "object", "properties": {"a": {"type": "string", **schema}}, "required": ["a"]}
    schema["additionalProperties"] = False
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    grammar = Grammar("structural_tag", json.dumps(tag)) if within_text else Grammar("json_schema", json.dumps(schema))
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    texts = [text for text in (write(grammar, random.Random(seed)) for seed in range(12)) if text is not None]
    assert len(texts) > 3
    for text in texts:
        validator.validate(json.loads(text))
    assert not takes(grammar, '{"a": "\n\n\n"}')


@pytest.mark.parametrize("pattern", ['"', r"^\\$", r"\n", "^[\x00-\x1f]+$"])
def test_strings_that_need_escapes_are_refused(pattern: str) -> None:
    with pytest.raises(RegexError, match="of characters that may stand here"):
        of_string(pattern, json_without(""))
    assert rules(of_string(f"a|{pattern}", json_without(""))) == rules(of_string("a", json_without("")))


@pytest.mark.parametrize(
    "pattern",
    [
        "[a-z ]+",
        "[a-z]+( [a-z]+)*",
        r"([A-Z]\w*[.,]? ?)+",
        r"\d{4}-\d{2}-\d{2}(T\d{2}:\d{2}(:\d{2})?Z?)?",
        r"[\w.+-]+@[\w-]+(\.[\w-]+)+",
        r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?",
        r"https?://[\w.-]+(:\d+)?(/[\w./-]*)?",
        r"(- .*\n)+",
        "a{0,200}",
    ],
)
def test_an_automaton_follows_it(pattern: str) -> None:
    """One rule and no other, whose masks xgrammar knows beforehand: `bench/masks.py` has times."""
    assert re.fullmatch(r"root ::= Regex\(.*\)\n", str(build(Grammar("regex", pattern), quick=True)))
    schema = {"type": "string", "pattern": pattern.replace(r"\n", "")}
    assert "Regex(" in str(build(Grammar("json_schema", json.dumps(schema)), quick=True))


@pytest.mark.long
def test_what_a_hostile_client_sends_is_answered_soon() -> None:
    """No schema makes the reader recurse without end, and none has more automata tried than a few."""
    with pytest.raises(GrammarError, match="nested more than 48 levels deep"):
        build(Grammar("json_schema", json.dumps({"type": "string", "pattern": "(" * 60_000})))
    properties = {f"p{n}": {"type": "string", "pattern": f"^a{{0,{200 + n}}}$"} for n in range(40)}
    schema = {"type": "object", "properties": properties | {"again": properties["p0"]}}
    written = str(build(Grammar("json_schema", json.dumps(schema)), quick=True))
    assert 3 < written.count("Regex(") < 14


def test_long_repetitions_have_rules() -> None:
    """An automaton of thousands of states would take xgrammar half a minute."""
    assert "Regex" not in str(build(Grammar("regex", "[a-z]{0,1000}"), quick=True))


@pytest.mark.parametrize("quick", [True, False], ids=["automaton", "rules"])
@pytest.mark.parametrize("wrong", [b"\xe0\x80", b"\xf0\x80", b"\xed\xa0", b"\xc0", b"\xf4\x90", b"\x80", b"\0"])
def test_what_matches_is_text(wrong: bytes, quick: bool) -> None:
    """Byte by byte: no longer form of a character than needed, no surrogate, none behind the last one."""
    matcher = xgr.GrammarMatcher(compiled(build(Grammar("regex", "[^a]*"), quick)))
    assert [matcher.accept_token(byte) for byte in wrong][-1] is False
