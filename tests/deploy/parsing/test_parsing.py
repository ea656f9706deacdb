"""Tool calls and reasoning in text that arrives in pieces: as written, cut anywhere, and broken in every way."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from written_calls import CONTROL, MARKERS, TOOLS, WRITERS, Calls, Found, events_of, found, glm, parser

from deploy.parsing import tagged_calls
from deploy.parsing.answer import MOST_BLANK, AnswerParser, ReasoningParser
from deploy.parsing.events import Arguments, CallBegin, CallBroken, CallEnd, Content, Reasoning
from deploy.parsing.json_object import JsonObject, State
from deploy.parsing.registry import MARKERS as TOOL_MARKERS
from deploy.parsing.registry import REASONING_PARSERS, TOOL_PARSERS, named_for, reasoning_parser_of, tool_parser_of
from deploy.parsing.schema_types import as_json

FORMATS = sorted(WRITERS)
# No tag of any format: without escapes, none of the tagged formats can write its own end in a value.
words = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<`"), max_size=12)
plain = words | st.sampled_from(["Paris", 'a "quoted" \\ word', "{}", "[1]", "5", "null", "東京\n", ""])
numbers = st.floats(allow_nan=False, allow_infinity=False)
values = st.fixed_dictionaries(
    {},
    optional={
        "city": plain,
        "days": st.integers(-(10**20), 10**20),
        "unit": st.sampled_from(["C", "F"]),
        "exact": st.sampled_from([True, False, None]),
        "places": st.lists(st.dictionaries(words, st.none() | numbers | words)),
        "free": st.lists(st.integers()) | st.integers(),
        "note": st.sampled_from(["a note", None]),
    },
)
calls = st.lists(st.tuples(st.just("get_weather"), values) | st.just(("now", {})), min_size=1, max_size=3)
said = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<"), max_size=20).map(str.strip)


def cut(text: str, random: random.Random) -> list[str]:
    """Pieces of `text`: single characters, a few of any length, and empty ones."""
    if random.random() < 0.3:
        return list(text)
    places = sorted(random.randrange(len(text) + 1) for _ in range(random.randrange(1, 12)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(FORMATS), said, calls, st.randoms(use_true_random=False))
def test_calls_come_as_they_were_written(name: str, before: str, written: Calls, random: random.Random) -> None:
    if name == "hermes":
        before = before.rstrip("`")  # else it may be an example of a call
    text = before + WRITERS[name](written)
    events = events_of(parser(name), [text])
    assert found(events) == Found(before, "", written, found(events).ids)
    assert len(set(found(events).ids)) == len(written)
    assert events_of(parser(name), cut(text, random)) == events


def mutated(name: str, text: str, random: random.Random) -> str:
    """`text` with pieces lost, doubled, moved and thrown in."""
    for _ in range(random.randrange(1, 5)):
        begin = random.randrange(len(text) + 1)
        end = min(len(text), begin + random.choice([1, 2, 5, 20, 60]))
        piece = random.choice(
            [*MARKERS[name], "{", "}", '"', "\\", "\n", " ", "x", "<", ":", ",", "</think>", "0", "-"]
        )
        text = random.choice(
            [
                text[:begin] + text[end:],
                text[:begin] + piece + text[begin:],
                text[:begin] + piece + text[end:],
                text[:end] + text[begin:],
                text[:begin],
                text[begin:] + text[:begin],
            ]
        )
    return text


def check_broken(name: str, seed: int) -> None:
    """A mutated answer: no exception, the same events at every cut, complete calls or none."""
    draw = random.Random(seed)
    written: Calls = [
        ("get_weather", {"city": draw.choice(["Paris", 'a "b" \\n', "5"]), "days": 3, "free": [1.5, {"a": None}]}),
        ("now", {}),
    ]
    text = mutated(name, draw.choice(["", "Let me see. "]) + WRITERS[name](written[: draw.randrange(1, 3)]), draw)
    reasoning = draw.choice([None, *REASONING_PARSERS])
    where: Any = draw.choice(["inside", "outside", "undecided"])
    whole = events_of(parser(name, reasoning, where), [text])
    assert events_of(parser(name, reasoning, where), cut(text, draw)) == whole
    found(whole)


@pytest.mark.parametrize("name", FORMATS)
def test_broken_calls_are_never_a_failure(name: str) -> None:
    for seed in range(1000):
        check_broken(name, seed)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(1000, 4000), marks=pytest.mark.long),
        pytest.param(range(4000, 21_000), marks=pytest.mark.soak),
    ],
    ids=["3,000", "17,000 more"],
)
def test_very_many_broken_calls(name: str, seeds: range) -> None:
    for seed in seeds:
        check_broken(name, seed)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(FORMATS), st.data(), st.randoms(use_true_random=False))
def test_any_mix_of_markers_cut_anywhere(name: str, data: st.DataObject, random: random.Random) -> None:
    pieces = st.sampled_from([*MARKERS[name], "now", "{}", '{"a":', '"b"', "}", " ", "\n", "city", "5", "<", "</"])
    text = "".join(data.draw(st.lists(pieces, max_size=20)))
    events = events_of(parser(name), [text])
    found(events)
    assert events_of(parser(name), cut(text, random)) == events
    assert events_of(parser(name), list(text)) == events


@settings(deadline=None)
@given(st.sampled_from(FORMATS), st.text(st.characters(exclude_categories=("Cs",))))
def test_text_without_markers_is_content(name: str, text: str) -> None:
    assume(not any(marker in text for marker in MARKERS[name] if marker[0] == "<"))
    assert found(events_of(parser(name), list(text))) == Found(text)


BROKEN = [
    ("deepseek_v31", "<｜tool▁calls▁begin｜>"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>now"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>two words<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": x y}<｜tool▁call▁end｜>'),
    ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": "b<｜tool▁call▁end｜>'),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>[1]<｜tool▁call▁end｜>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a kind<｜tool▁sep｜>now\n```json\n{}\n```"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\nnothing\n```"),
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n'),
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">x</｜DSML｜invoke>'),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>a b<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>now:0<|tool_call_argument_begin|>{"),
    ("glm", "<tool_call>now"),
    ("glm", "<tool_call>now<arg_key>a</arg_key>b</tool_call>"),
    ("glm", '<tool_call>{"name": "two words", "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>now"),
    ("hermes", '<tool_call>{"name": "two words", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "no JSON"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1'),
    ("mistral", "[TOOL_CALLS]now"),
    ("mistral", "[TOOL_CALLS]two words[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]now[ARGS][1]"),
    ("mistral", '[TOOL_CALLS]now[ARGS]{"a": x y}'),
    ("mistral", "[TOOL_CALLS][CALL_ID]now"),
]


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_what_is_no_call_is_content_without_its_markers(name: str, text: str) -> None:
    answer = found(events_of(parser(name), list(text)))
    assert (answer.content.strip(), answer.calls) == (CONTROL[name].sub("", text).strip(), [])


ODD: list[tuple[str, str, Found]] = [
    # The arguments first, as a string, under another name or missing; other members; a call without its end.
    (
        "hermes",
        'I look.\n<tool_call>{"arguments": {"a": "</tool_call>"}, "name": "now"}</tool_call>\n<tool_call>'
        '{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call><tool_call>{"name": "now", "parameters": {"b": 2}, '
        '"id": 7}</tool_call><tool_call>{"name": "now"}\n So.',
        Found(
            "I look.\nSo.",
            calls=[("now", {"a": "</tool_call>"}), ("now", {"a": 1}), ("now", {"b": 2}), ("now", {})],
            ids=["call_0", "call_1", "call_2", "call_3"],
        ),
    ),
    # The brace of the object around the arguments is forgotten; a fence.
    (
        "hermes",
        '<tool_call>\n{"name": "now", "arguments": {}\n</tool_call>\n<tool_call>```json\n{"name": "now", '
        '"arguments": {"a": 1}}\n```</tool_call>',
        Found(calls=[("now", {}), ("now", {"a": 1})], ids=["call_0", "call_1"]),
    ),
    # Ids, one of them twice and one that is none; a call without the marker of its arguments.
    (
        "mistral",
        "Well.[TOOL_CALLS]now[CALL_ID]aB3dE6gH9[ARGS]{}[TOOL_CALLS]now[CALL_ID]aB3dE6gH9[ARGS]{}[TOOL_CALLS] now "
        '[CALL_ID]short[ARGS] {"a": "[TOOL_CALLS]"} [TOOL_CALLS]now{"b": 1}',
        Found(
            "Well.",
            calls=[("now", {}), ("now", {}), ("now", {"a": "[TOOL_CALLS]"}), ("now", {"b": 1})],
            ids=["aB3dE6gH9", "call_0", "call_1", "call_2"],
        ),
    ),
    # All calls in one array, as older templates have it.
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "now", "arguments": {"a": 1}}, {"arguments": {}, "name": "now", "id": 7}]</s>',
        Found("</s>", calls=[("now", {"a": 1}), ("now", {})], ids=["call_0", "call_1"]),
    ),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"na',
        Found(' {"na', calls=[("now", {})], ids=["call_0"]),
    ),
    # Markers in the arguments of a JSON format are text: agents write code about them.
    (
        "kimi_k2",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.now:7<|tool_call_argument_begin|> {"a":'
        ' "<|tool_call_end|>"} <|tool_call_end|><|tool_calls_section_end|>',
        Found(calls=[("now", {"a": "<|tool_call_end|>"})], ids=["functions.now:7"]),
    ),
    # Spaces around the id, a name with dots, no prefix, a second section, words between the calls.
    (
        "kimi_k2",
        "I'll look.<|tool_calls_section_begin|>\n<|tool_call_begin|> a.b:0 <|tool_call_argument_begin|>"
        "<|tool_call_end|><|tool_calls_section_end|> and <|tool_calls_section_begin|><|tool_call_begin|>"
        "functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>\n<|tool_calls_section_end|>\n",
        Found("I'll look. and ", calls=[("a.b", {}), ("now", {})], ids=["a.b:0", "functions.now:1"]),
    ),
    # Line breaks inside of strings, which JSON forbids; no fence.
    (
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n{"a": "b\nc"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        Found(calls=[("now", {"a": "b\nc"})], ids=["call_0"]),
    ),
    # A call without its section, and one whose end is missing.
    (
        "deepseek_v31",
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁calls▁end｜>",
        Found(calls=[("now", {}), ("now", {})], ids=["call_0", "call_1"]),
    ),
    # One good call, then a broken one: the good one stands.
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now",
        Found("now", calls=[("now", {})], ids=["call_0"]),
    ),
    # The older templates' line breaks; a tool, and an argument, that nobody described; a value that is no JSON.
    (
        "glm",
        "\n<tool_call>other\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n<arg_key>b</arg_key>\n<arg_value>x\n"
        "</arg_value>\n</tool_call>\n",
        Found(calls=[("other", {"a": 5, "b": "x\n"})], ids=["call_0"]),
    ),
    # What the schema says decides: "5" is a string for a string, NaN is no JSON, null may be one.
    (
        "glm",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>5</arg_value><arg_key>days</arg_key>"
        "<arg_value>NaN</arg_value><arg_key>note</arg_key><arg_value>null</arg_value><arg_key>exact</arg_key>"
        "<arg_value>7</arg_value></tool_call>",
        Found(calls=[("get_weather", {"city": "5", "days": "NaN", "note": None, "exact": "7"})], ids=["call_0"]),
    ),
    # V3.2 says itself what a string is; its successors name the section otherwise.
    (
        "deepseek_v32",
        'Fine.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n<｜DSML｜parameter name="a" string="false">'
        '{"b": [1]}</｜DSML｜parameter>\n<｜DSML｜parameter name="c" string="true">1</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        Found("Fine.\n\n", calls=[("now", {"a": {"b": [1]}, "c": "1"})], ids=["call_0"]),
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), ODD)
def test_odd_cases(name: str, text: str, expected: Found) -> None:
    assert found(events_of(parser(name), [text])) == expected
    assert found(events_of(parser(name), list(text))) == expected


def test_the_older_line_breaks_of_glm() -> None:
    written: Calls = [("get_weather", {"city": "Paris", "days": 3}), ("now", {})]
    assert found(events_of(parser("glm"), list(glm(written, "\n")))).calls == written


@pytest.mark.parametrize("name", FORMATS)
def test_strings_are_passed_on_as_they_come(name: str) -> None:
    """A file that an agent writes does not wait for its end."""
    text = WRITERS[name]([("get_weather", {"city": "x" * 1000})])
    middle = text.index("x" * 1000) + 500
    events = parser(name).push(text[:middle])
    assert isinstance(events[0], CallBegin)
    assert "".join(event.text for event in events if isinstance(event, Arguments)).count("x") == 500


def test_a_call_that_breaks_after_it_began_is_taken_back() -> None:
    text = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": 1 c}'
    events = events_of(parser("deepseek_v31"), [text])
    assert events == [
        CallBegin(0, "call_0", "now"),
        Arguments(0, '{"a": 1 '),
        CallBroken(0),
        Content('now{"a": 1 c}'),
    ]


def test_a_long_answer_costs_linear_time() -> None:
    """A million characters that keep something held back."""
    for name in FORMATS:
        one = parser(name)
        for piece in ("  ", "\n" * 4, "<" * 2, "a") * 10_000:
            one.push(piece)
    one = parser(None, "deepseek_r1", "inside")
    for _ in range(100_000):
        one.push("\n\n\n\n")


@pytest.mark.parametrize("name", ["glm", "hy_v4", "deepseek_v32"])
@pytest.mark.parametrize("key", ["city", "days"])
def test_text_behind_a_call_whose_value_lacks_a_tag_is_taken_as_it_comes(name: str, key: str) -> None:
    """Else every piece has all of it searched anew."""
    written = WRITERS[name]([("get_weather", {key: 5})])
    for tag in ("", "<arg_value>", "</arg_value>", "</｜DSML｜parameter>"):
        text = written.replace(tag, "") + "lorem ipsum " * 500
        # Without the tag that begins the value no tag ends it either, as for a model that forgets both.
        if tag == "<arg_value>":
            text = text.replace("</arg_value>", "")
        one = TOOL_PARSERS[name](TOOLS, str)
        for place in range(0, len(text), 4):
            one.push(text[place : place + 4])
            assert len(one._rest) < 100, tag


UNENDED = {
    "glm": ("<tool_call>get_weather", "<arg_key>days</arg_key><arg_value>1", "</arg_value></tool_call>"),
    "deepseek_v32": (
        '<｜DSML｜function_calls><｜DSML｜invoke name="get_weather">',
        '<｜DSML｜parameter name="days" string="false">1',
        "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
    ),
}


@pytest.mark.parametrize("name", UNENDED)
def test_values_without_their_ends_are_read_again_a_few_times_at_most(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, argument, end = UNENDED[name]
    tried = 0

    def counted(text: str, *rest: Any) -> str:
        nonlocal tried
        tried += len(text)
        return as_json(text, *rest)

    monkeypatch.setattr(tagged_calls, "as_json", counted)
    for count in (20, 4000):
        tried = 0
        text = begin + argument * count + end
        answer = events_of(parser(name), [text])
        assert [type(event) for event in answer] == [CallBegin, Arguments, CallEnd]
        assert tried < 12 * len(text) + 2 * 64 * 1024
    few = events_of(parser(name), [begin + argument * 20 + end])
    assert [event.text for event in few if isinstance(event, Arguments)] == ["{" + ", ".join(['"days": 1'] * 20) + "}"]


def test_what_is_read_again_is_content_once_where_the_call_breaks() -> None:
    """What was taken back is not counted twice."""
    text = "<tool_call>get_weather<arg_key>days</arg_key><arg_value>1<arg_key>a</arg_value>b<tool_call>"
    for pieces in ([text], [*text]):
        assert found(events_of(parser("glm"), pieces)).content == "get_weatherdays1ab"


REASONED: list[tuple[str, Any, str, str, str]] = [
    ("deepseek_r1", "inside", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("deepseek_r1", "inside", "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
    ("deepseek_r1", "inside", "Hm, cut", "Hm, cut", ""),
    ("deepseek_v3", "outside", "Yes. </think> no", "", "Yes. </think> no"),
    ("deepseek_v3", "undecided", "Yes.", "", "Yes."),
    ("deepseek_v3", "undecided", " <thin", "", " <thin"),
    ("glm", "undecided", "\n<think></think>\nYes.", "", "Yes."),
    ("glm", "undecided", "\n<think>a <b> </c></think>\nYes.\n", "a <b> </c>", "Yes.\n"),
    ("kimi_k2", "inside", "</think>", "", ""),
    ("kimi_k2", "inside", "a\n\nb </think> c", "a\n\nb", "c"),
    ("kimi_k2", "inside", "a" + " " * (MOST_BLANK + 2) + "</think>b", "a  ", "b"),
    ("kimi_k2", "undecided", "  \n", "", "  \n"),
    ("glm", "undecided", "<think>\n<think>\nHm.</think>\n</think>\n\nYes. </think>", "Hm.", "Yes. </think>"),
    ("deepseek_r1", "inside", "<think><think>Hm.</think></think>", "Hm.", ""),
    ("deepseek_r1", "inside", "Hm.</think> </thi", "Hm.", "</thi"),
    ("deepseek_r1", "inside", "<think><thi", "<thi", ""),
]


@pytest.mark.parametrize(("name", "where", "text", "reasoning", "content"), REASONED)
def test_reasoning(name: str, where: Any, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        assert found(events_of(parser(None, name, where), pieces)) == Found(content, reasoning)


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(sorted(REASONING_PARSERS)),
    st.sampled_from(["inside", "outside", "undecided"]),
    st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "a", "<", "</", "th", " " * MOST_BLANK]), max_size=12),
    st.randoms(use_true_random=False),
)
@example("glm", "undecided", [" " * MOST_BLANK, " ", "<think>", "a"], random.Random(0))
def test_reasoning_cut_anywhere(name: str, where: Any, pieces: list[str], random: random.Random) -> None:
    text = "".join(pieces)
    events = events_of(parser("kimi_k2", name, where), [text])
    assert events_of(parser("kimi_k2", name, where), cut(text, random)) == events
    assert events_of(parser("kimi_k2", name, where), list(text)) == events


def test_a_call_in_the_reasoning_counts_and_ends_it() -> None:
    call = glm([("now", {})])
    answer = found(events_of(parser("glm", "glm", "inside"), list(f"I call {call}\n</think>\nNow.{call}")))
    assert answer == Found("Now.", "I call", [("now", {})] * 2, ["call_0", "call_1"])


def test_reasoning_that_speaks_of_calls_goes_on() -> None:
    text = "A <tool_call> begins one, <tool_call>so on and <tool_call>two words<arg_key>."
    answer = found(events_of(parser("glm", "glm", "inside"), list(f"{text}</think>Yes.")))
    assert answer == Found("Yes.", text)
    assert found(events_of(parser("glm", "glm", "inside"), list(text))) == Found("", text)


def test_calls_in_the_reasoning_do_not_count_where_they_would_not_be_bound() -> None:
    one = AnswerParser(ReasoningParser(REASONING_PARSERS["glm"], "inside"), TOOL_PARSERS["glm"]({}, str), False)
    call = glm([("now", {})])
    answer = found(events_of(one, list(f"I could {call}.</think>{call}")))
    assert (answer.reasoning, answer.content, answer.calls) == (f"I could {call}.", "", [("now", {})])


def test_kimi_may_call_without_ending_its_reasoning() -> None:
    text = "Look." + WRITERS["kimi_k2"]([("now", {})])
    answer = found(events_of(parser("kimi_k2", "kimi_k2", "inside"), list(text)))
    assert answer == Found("", "Look.", [("now", {})], ["functions.now:0"])


def test_what_comes_now_is_reasoning_or_not() -> None:
    one = parser(None, "kimi_k2", "undecided")
    states = []
    for piece in ("<think>", "a", "</think>", "b"):
        before = one.reasoning
        events = one.push(piece)
        states.append((before, one.reasoning, events))
    assert states == [
        (False, True, []),
        (True, True, [Reasoning("a")]),
        (True, False, []),
        (False, False, [Content("b")]),
    ]


def test_where_a_prompt_leaves_the_model() -> None:
    r1, v3 = REASONING_PARSERS["deepseek_r1"], REASONING_PARSERS["deepseek_v3"]
    assert [r1.begins(prompt) for prompt in ("<think>\n", "x", "<think></think>")] == ["inside", "inside", "outside"]
    assert [v3.begins(prompt) for prompt in ("<think>\n", "x", "</think>")] == ["inside", "undecided", "outside"]
    assert v3.continues("<think>well") == "inside"
    assert v3.continues("<think>well</think>so") == "outside"


leaves = st.none() | st.booleans() | st.integers() | numbers | words


@settings(deadline=None)
@given(st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(words, inner), max_leaves=6), st.booleans())
def test_json_objects_end_where_they_end(value: Any, indent: bool) -> None:
    text = json.dumps({"a": value}, indent=2 if indent else None)
    one = JsonObject()
    assert one.feed(text + "} more") == (len(text), text)
    assert one.state is State.DONE


@given(st.text(st.sampled_from('{}[]",:\\u0e-+.1 tnrfalseul\n'), max_size=30), st.randoms(use_true_random=False))
@example('{"a": 1-2}', random.Random(1))
def test_json_is_followed_as_python_reads_it(text: str, random: random.Random) -> None:
    text = '{"' + text
    one, out, left = JsonObject(), "", text
    for piece in cut(text, random):
        used, given = one.feed(piece)
        out, left = out + given, left[used:]
        if one.state is not State.OPEN:
            break
    if one.state is State.DONE:
        assert isinstance(json.loads(out), dict)
    try:
        _, end = json.JSONDecoder(strict=False, parse_constant=lambda _: 1 / 0).raw_decode(text)
    except (ValueError, ZeroDivisionError):
        pass  # read as what was meant, above, or not at all
    else:
        assert (one.state, left) == (State.DONE, text[end:])
        assert json.loads(out) == json.loads(text[:end], strict=False)


@given(st.text(st.sampled_from("{}[]\"'“”,:=\\u0ex-+.1 tNfalse/*\n_"), max_size=30), st.randoms(use_true_random=False))
@example("{'a': 1 // x\n", random.Random(1))
def test_whatever_is_taken_for_an_object_is_one(text: str, random: random.Random) -> None:
    text = "{" + text
    read = []
    for pieces in ([text], list(text), cut(text, random)):
        one, out, left = JsonObject(), "", ""
        for piece in pieces:
            used, given = one.feed(left + piece)
            out, left = out + given, (left + piece)[used:]
        read.append((one.state, out, left, one.closing()))
    assert read[1:] == read[:2]
    state, out, _, closing = read[0]
    if state is State.DONE or closing is not None:
        assert isinstance(json.loads(out + (closing or "")), dict)


TEMPLATES = {
    "{{ '<｜tool▁calls▁begin｜>' }}```json<｜Assistant｜><think>": ("deepseek_v3", "deepseek_r1"),
    "{% if thinking %}<｜Assistant｜><think>{% endif %}<｜tool▁calls▁begin｜>": ("deepseek_v31", "deepseek_v3"),
    "<｜DSML｜function_calls>{{ thinking }}<｜Assistant｜></think>": ("deepseek_v32", "deepseek_v3"),
    "<|im_assistant|><|tool_calls_section_begin|>": ("kimi_k2", None),
    "<|im_assistant|><think></think><|tool_calls_section_begin|>": ("kimi_k2", "kimi_k2"),
    "[gMASK]<|assistant|></think><tool_call><arg_key>": ("glm", "glm"),
    "<think></think><tool_calls><tool_call>{{ name }}<arg_key>": ("hy_v4", "hy_v4"),
    "{% set S = ':open' %}{{ '<think' ~ S }}{{ '<tool_calls' ~ S ~ '>' }}{{ '<arg_key' ~ S }}": ("hy_v4", "hy_v4"),
    "<think></think><tool_calls><tool_call>{{ name }}<tool_sep><arg_key>": ("glm", "deepseek_v3"),
    "{% if enable_thinking %}<think>{% endif %}<tool_call>{{ call }}</tool_call>": ("hermes", "deepseek_v3"),
    "[INST][/INST][THINK]{{ t }}[/THINK][TOOL_CALLS]{{ name }}[ARGS]": ("mistral", "mistral"),
    "[INST][/INST][TOOL_CALLS][{{ call }}]": ("mistral", None),
    "{% for m in messages %}{{ m.content }}{% endfor %}": (None, None),
}


def test_a_vocabulary_says_what_ends_the_tags_of_hy4() -> None:
    tokens = ["a", "<s>", "<tool_call:6124c78e>", "</think:6124c78e>", "<think:6124c78e>"]
    assert named_for("hy_v4", tokens) == "hy_v4:6124c78e"
    assert named_for("hy_v4", ["<tool_call>", "<think>", "<b:c>"]) == "hy_v4"
    assert named_for("glm", tokens) == "glm"
    assert named_for(None, tokens) is None
    assert "<arg_value:6124c78e>" in TOOL_MARKERS["hy_v4:6124c78e"]
    form = REASONING_PARSERS["hy_v4:6124c78e"]
    assert (form.begins("Hi<think:6124c78e>\n"), form.begins("<think:6124c78e></think:6124c78e>")) == (
        "inside",
        "outside",
    )
    with pytest.raises(KeyError):
        _ = TOOL_PARSERS["hy_v5:a"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_names_its_parsers(template: str) -> None:
    assert (tool_parser_of(template), reasoning_parser_of(template)) == TEMPLATES[template]
    assert set(WRITERS) == set(TOOL_PARSERS)
