"""One answer for each way in which models were seen to leave the form of a call, and what is found in it."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from written_calls import CONTROL, TOOLS, Found, events_of, found, parser

from deploy.parsing.answer import AnswerParser
from deploy.parsing.registry import TOOL_PARSERS
from deploy.parsing.schema_types import as_json, types_of, types_of_argument

KIMI = {
    "<<": "<|tool_calls_section_begin|>", ">>": "<|tool_calls_section_end|>", "[": "<|tool_call_begin|>",
    "]": "<|tool_call_end|>", "|": "<|tool_call_argument_begin|>",
}  # fmt: skip
DEEPSEEK = {
    "<<": "<｜tool▁calls▁begin｜>", ">>": "<｜tool▁calls▁end｜>", "[": "<｜tool▁call▁begin｜>",
    "]": "<｜tool▁call▁end｜>", "|": "<｜tool▁sep｜>",
}  # fmt: skip
OSLO = ("get_weather", {"city": "Oslo"})
NOW: tuple[str, dict[str, Any]] = ("now", {})


def spelled(text: str, markers: dict[str, str]) -> str:
    """`text` with its brackets as markers."""
    return re.sub(r"<<|>>|[\[\]|]", lambda bracket: markers[bracket.group()], text)


def check(name: str, text: str, content: str, calls: list[Any], reasoning: str | None = None) -> Found:
    answer = found(events_of(parser(name, reasoning, "inside"), [text]))
    assert found(events_of(parser(name, reasoning, "inside"), list(text))) == answer
    assert (answer.content.split(), answer.calls) == (content.split(), calls)
    assert CONTROL[name].search(answer.content) is None
    return answer


CITY = '{"city": "Oslo"}'
HEADS = [
    ("get_weather:0", "get_weather:0"), ("get_weather", "functions.get_weather:0"),
    ("functions.get_weather", "functions.get_weather:0"), ("functionsget_weather5", "functions.get_weather:0"),
    ("functions_get_weather_1", "functions.get_weather:0"), ("functions.get_weather.0", "functions.get_weather:0"),
    ("tools.get_weather:2", "tools.get_weather:2"), ("functions.get_weather\n:3", "functions.get_weather:3"),
    (" functions . get_weather : 0 ", "functions.get_weather:0"), ("0", "functions.get_weather:0"),
    ("call_0a1b2C", "functions.get_weather:0"), ("multi_tool_use.get_weather:1", "multi_tool_use.get_weather:1"),
]  # fmt: skip


@pytest.mark.parametrize(("head", "call_id"), HEADS)
def test_ids_of_kimi(head: str, call_id: str) -> None:
    answer = check("kimi_k2", spelled(f"Hm. <<[{head}|{CITY}]>>", KIMI), "Hm. ", [OSLO])
    assert answer.ids == [call_id]


def test_ids_of_kimi_are_different_ones() -> None:
    answer = check("kimi_k2", spelled("<<[now|{}][now|{}][now:1|{}][functions.now:0|{}]>>", KIMI), "", [NOW] * 4)
    assert len(set(answer.ids)) == 4


def test_an_id_of_kimi_that_names_no_tool() -> None:
    """The arguments say which one it is, if it can be only one."""
    check("kimi_k2", spelled('<<[0|{"a": 1}]>>', KIMI), '0{"a": 1}', [])
    check("kimi_k2", spelled("<<[0|{}]>>", KIMI), "0{}", [])
    one = TOOL_PARSERS["kimi_k2"]({"f": {}}, str)
    answer = found(events_of(AnswerParser(None, one), [spelled('<<[call_1|{"a": 1}]>>', KIMI)]))
    assert answer.calls == [("f", {"a": 1})]


IN_SECTIONS = [
    ("<<I look.[{0}|{}] And\n[{1}|{}]\n>> So.", "I look. And\n So.", 2),
    ("<<{0}|{}>>", "", 1),
    ("<<{0}|{}{1}|{}", "", 2),
    ("<<I look: {0}|{}]\n{1}|{}]>>", "I look: ", 2),
    ("<<<<[[{0}||{}]]>>>>", "", 1),
    ("<<\n [\n{0}\n|\n{}\n]\n >>\n", "", 1),
    ("[{0}|{}]", "", 1),
    ("[{0}|{}][{1}|{}", "", 2),
    ("<<[{0}|{}]>><<[{1}|{}]>>", "", 2),
    ("<<[{0}|{}>>\nMore.\n<<[{1}|{}]", "\nMore.\n", 2),
    ("Well. << >> Done.", "Well.   Done.", 0),
    ("<<\n>>", "", 0),
    ("<<No.>>", "No.", 0),
    ("Well.>> Done.]", "Well. Done.", 0),
    ("<<[{0}|```json\n{}\n```]>>", "", 1),
    ("<<[{0}|``` json {}```]>>", "", 1),
    ("<<[{0}|```\n{}\n]>>", "", 1),
    ("<<[{0}|{}\n```]>>", "", 1),
    ('<<[{0}|{"a": "b', None, 0),
    ('<<[{0}|{"a": >>[{1}|{}]', None, 1),
    ("<<[{0}|]>>", "", 1),
]


@pytest.mark.parametrize("name", ["kimi_k2", "deepseek_v3", "deepseek_v31"])
@pytest.mark.parametrize(("text", "content", "calls"), IN_SECTIONS)
def test_sections_of_calls(name: str, text: str, content: str | None, calls: int) -> None:
    """`content` None: all that is left once the markers are gone, of the first call."""
    heads = ["functions.now:0", "functions.now:1"] if name == "kimi_k2" else ["now", "now"]
    if name == "deepseek_v3":
        heads = ["function|now\n"] * 2
        text = text.replace("{0}||", "function||now\n").replace("{0}\n|\n", "{0}").replace("{0}|", "{0}")
        text = text.replace("{1}|", "{1}")
    whole = spelled(text.replace("{0}", heads[0]).replace("{1}", heads[1]), KIMI if name == "kimi_k2" else DEEPSEEK)
    if content is None:
        answer = found(events_of(parser(name), list(whole)))
        assert (len(answer.calls), answer.broken) == (calls, 1)
        assert CONTROL[name].search(answer.content) is None
        assert '{"a": ' in answer.content
    else:
        check(name, whole, content, [NOW] * calls)


def test_kimi_writes_the_section_in_the_singular() -> None:
    text = "<|tool_call_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
    check("kimi_k2", f"{text}<|tool_call_end|><|tool_call_section_end|>Done.", "Done.", [NOW])


HEADS_OF_DEEPSEEK = ["get_weather|", "get_weather", "function|get_weather\n", "function||get_weather\n```json\n",
                     "tool|get_weather\n", "function get_weather\n", "functions.get_weather|", " get_weather\n|\n",
                     "get_weather\n```json\n", "function|\nget_weather "]  # fmt: skip


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31"])
@pytest.mark.parametrize("head", HEADS_OF_DEEPSEEK)
def test_heads_of_deepseek(name: str, head: str) -> None:
    end = "\n```" if "```" in head else ""
    check(name, spelled(f"<<[{head}{CITY}{end}]>>", DEEPSEEK), "", [OSLO])


SPELLINGS = [("｜", "▁"), ("|", "▁"), ("｜", "_"), ("|", "_"), ("｜", " "), ("｜", "\\_")]


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31"])
@pytest.mark.parametrize(("bar", "blank"), SPELLINGS)
def test_markers_of_deepseek_that_are_spelled_out(name: str, bar: str, blank: str) -> None:
    def spelled_out(text: str) -> str:
        return re.sub(r"<｜[^>]*｜>", lambda mark: mark.group().replace("｜", bar).replace("▁", blank), text)

    for head in ("get_weather|", "function|get_weather\n", "function||get_weather\n```json\n"):
        end = "\n```" if "```" in head else ""
        one = spelled(f"[{head}{CITY}{end}]", DEEPSEEK)
        section = spelled("<<", DEEPSEEK), spelled(">>", DEEPSEEK)
        check(name, f"Hm. {spelled_out(section[0] + one + section[1])} So.", "Hm. So.", [OSLO])
        check(name, spelled_out(section[0] + one + one + section[1]), "", [OSLO, OSLO])
        check(name, section[0] + spelled_out(one) + section[1], "", [OSLO])
        short = spelled_out("<｜tool▁calls｜>")
        check(name, f"{short}{spelled_out(one)}{section[1]}", "", [OSLO])
        reasoning = "deepseek_r1" if name == "deepseek_v3" else "deepseek_v3"
        answer = check(name, f"I look.\n{short}{spelled_out(one)}</think>", "", [OSLO], reasoning)
        assert answer.reasoning == "I look."
    written = spelled_out("<｜tool▁call▁end｜>")
    text = CALLS[name].replace("{}", json.dumps({"city": written}, ensure_ascii=False))
    check(name, text, "", [("get_weather", {"city": written})])
    assert "tool" not in check(name, spelled_out(spelled("a << b >> [c| d ]", DEEPSEEK)), "a b c d", []).content


LOOSE: list[tuple[str, dict[str, Any]]] = [
    ('{"city": "a } b { \\" }"}', {"city": 'a } b { " }'}),
    ('{"city": "\\u6771\\u4eac \\ud83d\\ude00"}', {"city": "東京 😀"}),
    ('{"city": "Oslo",}', {"city": "Oslo"}),
    ('{"city": "Oslo", \n}', {"city": "Oslo"}),
    ('{"city": "Oslo",, "days": 3}', {"city": "Oslo", "days": 3}),
    ('{"city": "Oslo" "days": 3}', {"city": "Oslo", "days": 3}),
    ('{"places": [{"a": 1,},],}', {"places": [{"a": 1}]}),
    ('{"places": [{"a": 1} {"a": 2}]}', {"places": [{"a": 1}, {"a": 2}]}),
    ('{"city": "a\\ud83db \\uDC00 \\ud83d\\n"}', {"city": "a\ufffdb \ufffd \ufffd\n"}),
    ('{"city": "\\ud83d\\uD83D\\ude00 \\ud83d\\u12 \\ud83d"}', {"city": "\ufffd😀 \ufffd\\u12 \ufffd"}),
    ("{'city': 'Oslo'}", {"city": "Oslo"}),
    ("{'city': 'it\\'s \"x\"'}", {"city": 'it\'s "x"'}),
    ('{“city”: “Oslo”}', {"city": "Oslo"}),
    ('{city: "Oslo", days: 3}', {"city": "Oslo", "days": 3}),
    ('{"unit": C, "free": 2024-01-31}', {"unit": "C", "free": "2024-01-31"}),
    ('{"exact": True, "note": None}', {"exact": True, "note": None}),
    ('{"exact": undefined, "note": NaN}', {"exact": None, "note": None}),
    ('{"days": +3, "free": [.5, 3., 007, 1_000]}', {"days": 3, "free": [0.5, 3, "007", "1_000"]}),
    ('{"days": 1e5, "free": -0.5E-3}', {"days": 1e5, "free": -0.5e-3}),
    ('{"city": "C:\\dir \\d+ \\\' \\_ \\u12 \\x41"}', {"city": "C:\\dir \\d+ ' \\_ \\u12 \\x41"}),
    ('{"city": "Os\tlo\n2"}', {"city": "Os\tlo\n2"}),
    ('{"city": "Oslo", // here }\n "days": 3 /* and } there */}', {"city": "Oslo", "days": 3}),
    ('{"city": , "days": 3, "note": }', {"city": None, "days": 3, "note": None}),
    ('{"city"= "Oslo"}', {"city": "Oslo"}),
    ('{"city" => "Oslo", "days" => 3}', {"city": "Oslo", "days": 3}),
    ('{"city": "Oslo"; "days": 3}', {"city": "Oslo", "days": 3}),
    ('{"city": """Os\nl"o\\n""", "note": "", "days": 3}', {"city": 'Os\nl"o\n', "note": "", "days": 3}),
    ("{'city': \'\'\'it's\'\'\', 'note': '', 'days': 3}", {"city": "it's", "note": "", "days": 3}),
    ('{"city": "" , "days": 3}', {"city": "", "days": 3}),
    ('{"city": `Os "lo" ${x}`, "days": 3}', {"city": 'Os "lo" ${x}', "days": 3}),
    ('{"city": "He said "hi" there", "note": "a "b"."}', {"city": 'He said "hi" there', "note": 'a "b".'}),
    ('{"places": ["a "b c" d", "e"], "days": 3}', {"places": ['a "b c" d', "e"], "days": 3}),
    ('{"city": u"Oslo", "note": r"C:\\new", "free": [F"y"]}', {"city": "Oslo", "note": "C:\\new", "free": ["y"]}),
    ('{"free": (1, ("a", "b"), ), "days": 3}', {"free": [1, ["a", "b"]], "days": 3}),
    ('{"exact": TRUE, "note": NULL, "free": [FALSE, nil]}', {"exact": True, "note": None, "free": [False, None]}),
    ('{{"city": "Oslo"}}', {"city": "Oslo"}),
    ('{"city": "Oslo"}}', {"city": "Oslo"}),
    ('{"city": "Oslo"}\n}', {"city": "Oslo"}),
    ('{"places": [{"a": 1}}', {"places": [{"a": 1}]}),
    ('"{\\"city\\": \\"Oslo\\"}"', {"city": "Oslo"}),
    ('[{"city": "Oslo"}]', {"city": "Oslo"}),
    ('""', {}), ("null", {}), ("None", {}), ("[]", {}), ("[ ]", {}), ("{ }", {}),
]  # fmt: skip
OPEN: list[tuple[str, dict[str, Any]]] = [
    ('{"city": "Oslo"', {"city": "Oslo"}),
    ('{"city": "Oslo",', {"city": "Oslo"}),
    ('{"days": 3', {"days": 3}),
    ('{"places": [{"a": 1}', {"places": [{"a": 1}]}),
    ('{"places": [{"a": [', {"places": [{"a": []}]}),
    ("{", {}),
]
"""Arguments whose brackets are open where the call's end stands."""
CALLS = {
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{}\n```<｜tool▁call▁end｜>",
    "deepseek_v31": "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "kimi_k2": "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>',
    "mistral": "[TOOL_CALLS]get_weather[ARGS]{}",
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_that_are_not_quite_json(name: str) -> None:
    before, behind = CALLS[name].split("{}") if name != "hermes" else CALLS[name].rsplit("{}", 1)
    for text, arguments in LOOSE + (OPEN if name not in ("hermes", "mistral") else []):
        assert not check(name, before + text + behind, "", [("get_weather", arguments)]).broken
    for text, arguments in [*LOOSE, *OPEN]:
        if "[" not in text[:1] and '"' not in text[:1] and "{" in text:
            for tagged in ("<tool_call>get_weather\n{}\n</tool_call>", f"{INVOKE}{{}}{END}{SECTION_END}"):
                one = "glm" if "tool_call" in tagged else "deepseek_v32"
                check(one, tagged.replace("{}", text), "", [("get_weather", arguments)])


@pytest.mark.parametrize("text", ["get_weather\nnull", "get_weather None", "get_weather\n[]", "get_weather{}"])
def test_calls_of_glm_without_arguments(text: str) -> None:
    check("glm", f"<tool_call>{text}</tool_call>", "", [("get_weather", {})])


OBJECTS = [
    {"name": "get_weather", "arguments": {"city": "Oslo"}},
    {"arguments": {"city": "Oslo"}, "name": "get_weather"},
    {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}},
    {"function": "get_weather", "arguments": {"city": "Oslo"}},
    {"tool_name": "get_weather", "args": [{"city": "Oslo"}]},
    {"name": "get_weather", "input": "{'city': 'Oslo',}"},
    {"name": "get_weather", "city": "Oslo"},
    {"id": 1, "type": "function", "name": "get_weather", "city": "Oslo"},
    {"get_weather": {"city": "Oslo"}},
]


@pytest.mark.parametrize("call", OBJECTS)
def test_a_call_that_is_one_object(call: dict[str, Any]) -> None:
    for written in (json.dumps(call), repr(call), json.dumps(call, indent=1)[:-2]):
        check("hermes", f"<tool_call>{written}</tool_call>", "", [OSLO])
        check("glm", f"<tool_call>\n{written}\n</tool_call>", "", [OSLO])
        check("kimi_k2", f"{KIMI['<<']}{KIMI['[']}{written}{KIMI[']']}{KIMI['>>']}", "", [OSLO])
        check("deepseek_v31", f"{DEEPSEEK['<<']}{DEEPSEEK['[']}{written}{DEEPSEEK[']']}{DEEPSEEK['>>']}", "", [OSLO])
    for empty in (None, "", [], "null", {}):
        check("hermes", f"<tool_call>{json.dumps({'name': 'now', 'arguments': empty})}</tool_call>", "", [NOW])


def test_a_call_of_mistral_that_ends_with_its_name() -> None:
    for text in ("[TOOL_CALLS]now[ARGS]", "[TOOL_CALLS]now[ARGS]null", "[TOOL_CALLS]now [ARGS] "):
        check("mistral", text, "", [NOW])
    one = parser("mistral")
    assert found([*one.push("[TOOL_CALLS]now[ARGS]"), *one.finish(cut=True)]).calls == []


@pytest.mark.parametrize("name", ["kimi_k2", "deepseek_v31", "deepseek_v3"])
def test_objects_in_sections(name: str) -> None:
    markers = KIMI if name == "kimi_k2" else DEEPSEEK
    one, two = json.dumps(OBJECTS[0]), '{"name": "now", "arguments": {}}'
    begin, end = markers["<<"], markers[">>"]
    for text, calls in [
        (one, [OSLO]), (f"{one}\n{two}", [OSLO, NOW]), (f"[{one}]", [OSLO]), (f"[\n{one},\n {two}\n]", [OSLO, NOW]),
        (f"```json\n{one}\n```", [OSLO]), (f"```json\n[{one}]\n```", [OSLO]),
        (f"{markers['[']}[{one}]{markers[']']}", [OSLO]),
    ]:  # fmt: skip
        check(name, f"Hm.{begin}{text}{end}", "Hm.", calls)
    check(name, f"{begin}{{ok}} and {one[:-20]}", f"{{ok}} and {one[:-20]}", [])
    check(name, f"{begin}{chr(10) * 300}{markers['[']}{one}{markers[']']}{end}", "", [OSLO])


AS_PYTHON: list[tuple[str, list[tuple[str, dict[str, Any]]]]] = [
    ('get_weather(city="Oslo")', [OSLO]),
    ("get_weather( city = 'Oslo', )", [OSLO]),
    ('[get_weather(city="Oslo")]', [OSLO]),
    ('[get_weather(city="Oslo"), now()]', [OSLO, NOW]),
    ('[\n  now(),\n  get_weather(city="Oslo"),\n]', [NOW, OSLO]),
    ('get_weather(city="Oslo")\nnow()', [OSLO, NOW]),
    ('get_weather(city="Oslo"); get_weather(city="Oslo");', [OSLO, OSLO]),
    ('```python\nget_weather(city="Oslo")\n```', [OSLO]),
    ('get_weather("Oslo")', [OSLO]),
    ('get_weather("Oslo", 3, unit="C")', [("get_weather", {"city": "Oslo", "days": 3, "unit": "C"})]),
    ('get_weather({"city": "Oslo"})', [OSLO]),
    ('get_weather(**{"city": "Oslo"})', [OSLO]),
    ('get_weather(city: "Oslo", days: 3)', [("get_weather", {"city": "Oslo", "days": 3})]),
    ("get_weather(exact=True, note=None, days=-3)", [("get_weather", {"exact": True, "note": None, "days": -3})]),
    ("get_weather(exact=true, note=null, unit=C)", [("get_weather", {"exact": True, "note": None, "unit": "C"})]),
    ("get_weather(places=[{'a': None}, {'b': (1, 2)}])", [("get_weather", {"places": [{"a": None}, {"b": [1, 2]}]})]),
    ('get_weather(city="a ) b", note=\'c ( "d" ]\')', [("get_weather", {"city": "a ) b", "note": 'c ( "d" ]'})]),
    ('get_weather(city="""two\nlines "quoted" """, days=1)',
     [("get_weather", {"city": 'two\nlines "quoted" ', "days": 1})]),
    ('get_weather(city="C:\\\\dir \\d \\u00e9 東京", note="")',
     [("get_weather", {"city": "C:\\dir \\d é 東京", "note": ""})]),
    ('functions.get_weather(city="Oslo")', [OSLO]),
    ('get_weather(city="Oslo", places=[', [("get_weather", {"city": "Oslo", "places": []})]),
]  # fmt: skip
AROUND_PYTHON = {
    "hermes": "<tool_call>\n{}\n</tool_call>",
    "glm": "<tool_call>{}</tool_call>",
    "mistral": "[TOOL_CALLS]{}",
    "kimi_k2": f"{KIMI['<<']}{KIMI['[']}{{}}{KIMI[']']}{KIMI['>>']}",
    "deepseek_v3": f"{DEEPSEEK['<<']}{DEEPSEEK['[']}function{DEEPSEEK['|']}{{}}{DEEPSEEK[']']}{DEEPSEEK['>>']}",
    "deepseek_v31": f"{DEEPSEEK['<<']}{{}}{DEEPSEEK['>>']}",
    "deepseek_v32": "<｜DSML｜function_calls>\n{}\n</｜DSML｜function_calls>",
}


@pytest.mark.parametrize("name", AROUND_PYTHON)
def test_calls_as_python_writes_them(name: str) -> None:
    for text, calls in AS_PYTHON:
        if text.endswith("[") and name == "mistral":
            continue  # there is no marker behind it that would tell its end
        answer = check(name, "Hm. " + AROUND_PYTHON[name].replace("{}", text), "Hm.", calls)
        assert not answer.broken
        assert len(set(answer.ids)) == len(calls)
        if name != "mistral":
            check(name, AROUND_PYTHON[name].replace("{}", text) + " So.", "So.", calls)


NOT_PYTHON = [
    "unknown(city=5)", "get_weather (is what I call)", "get_weather(city=Oslo Norway)", "get_weather(f'{x}')",
    "get_weather(1, 2, 3, 4, 5, 6, 7, 8)", "get_weather(b'x')", "get_weather({1: 2})", "get_weather(1e999)",
    "get_weather(city=())[", "get_weather(" + "[" * 300, "get_weather(" + "-" * 9000 + "1)", "get_weather(city='Oslo'",
]  # fmt: skip


@pytest.mark.parametrize("name", AROUND_PYTHON)
def test_what_is_no_call_in_python_is_content(name: str) -> None:
    for text in NOT_PYTHON:
        before, behind = AROUND_PYTHON[name].split("{}")
        whole = before + text + (behind if text[-1] == ")" else "")
        answer = found(events_of(parser(name), [whole]))
        assert found(events_of(parser(name), list(whole))) == answer
        assert CONTROL[name].search(answer.content) is None
        assert answer.calls in ([], [("get_weather", {"city": []})])
        if not answer.calls:
            assert text in answer.content, (name, answer)


NAMES = ["`get_weather`", '"get_weather"', "get_weather:", "functions.get_weather", "tool:get_weather", "get_weather()"]


@pytest.mark.parametrize("written", NAMES)
def test_names_with_something_around_them(written: str) -> None:
    check(
        "hermes",
        f"<tool_call>{json.dumps({'name': f' {written} ', 'arguments': {'city': 'Oslo'}})}</tool_call>",
        "",
        [OSLO],
    )
    check("glm", f"<tool_call>{written}<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>", "", [OSLO])
    if "`" not in written:
        check("mistral", f"[TOOL_CALLS]{written}[ARGS]{CITY}", "", [OSLO])
        check("deepseek_v31", spelled(f"<<[{written}|{CITY}]>>", DEEPSEEK), "", [OSLO])
    if '"' not in written:
        check("deepseek_v32", INVOKE.replace("get_weather", written) + PARAMETER + END, "", [OSLO])
    own = TOOL_PARSERS["mistral"]({"functions.get_weather": {}}, str)
    text = f"[TOOL_CALLS]functions.get_weather[ARGS]{CITY}"
    assert found(events_of(AnswerParser(None, own), [text])).calls == [("functions.get_weather", {"city": "Oslo"})]


J, K = json.dumps({"name": "get_weather", "arguments": {"city": "Oslo"}}), '{"name": "now", "arguments": {}}'
SEVERAL = [
    ("hermes", f"<tool_call>\n{J}\n{K}\n</tool_call>", "", [OSLO, NOW]),
    ("hermes", f"<tool_call>\n[{J}, {K}]\n</tool_call>ok", "ok", [OSLO, NOW]),
    ("hermes", f"<tool_call>[{J}]", "", [OSLO]),
    ("hermes", f"<tool_call>{J}<tool_call>{K}<tool_call>", "", [OSLO, NOW]),
    ("hermes", f"<tool_call>get_weather\n{CITY}</tool_call>", "", [OSLO]),
    ("hermes", f"<tool_call>`get_weather`: {CITY}\n</tool_call>", "", [OSLO]),
    ("hermes", f"<tool_call>{J}\n{{ok}} and more", "{ok} and more", [OSLO]),
    ("hermes", "Use <tool_call> tags: `<tool_call>{...}</tool_call>`.", "Use tags: `{...}`.", []),
    ("mistral", f"[TOOL_CALLS]{J},{K}", "", [OSLO, NOW]),
    ("mistral", f"[TOOL_CALLS]```json\n[{J}, {K}]\n```", "", [OSLO, NOW]),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{CITY}now[ARGS]{{}}", "", [OSLO, NOW]),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{CITY}, now [ARGS]{{}} so", "so", [OSLO, NOW]),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{CITY} now it is", "now it is", [OSLO]),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{CITY}, so", ", so", [OSLO]),
    (
        "mistral",
        f'[TOOL_CALLS]get_weather[ARGS]{CITY}\n\n{{"name": "Al", "age": 3}} ok',
        '{"name": "Al", "age": 3} ok',
        [OSLO],
    ),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{CITY}\nno", "no", [OSLO]),
    (
        "hermes",
        f"<tool_call>{J[:-1]} // that is all }}</tool_call> " + "so " * 150 + f"<tool_call>{K}</tool_call>",
        "// that is all } " + "so " * 150,
        [OSLO, NOW],
    ),
    ("glm", '<tool_call>get_weather\n"city"</arg_key><arg_value>Oslo</arg_value></tool_call>', "", [OSLO]),
    ("mistral", "The marker [TOOL_CALLS] begins a call.", "The marker begins a call.", []),
    ("glm", "<tool_call>get_weather<arg_key>'city'</arg_key><arg_value>Oslo</arg_value></tool_call>", "", [OSLO]),
    ("glm", "<tool_call>get_weather<arg_key>city</arg_value><arg_value>Oslo</arg_value></tool_call>", "", [OSLO]),
    ("glm", "<tool_call>now</arg_key></tool_call>", "", [NOW]),
    ("glm", "<tool_call>now()</tool_call>", "", [NOW]),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), SEVERAL)
def test_calls_in_other_forms(name: str, text: str, content: str, calls: list[Any]) -> None:
    check(name, text, content, calls)


PARAMETER = '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
INVOKE, END = '<｜DSML｜invoke name="get_weather">\n', "</｜DSML｜invoke>\n"
SECTION, SECTION_END = "<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"
DSML = [
    (f"Hm. {INVOKE}{PARAMETER}{END}", "Hm. ", [OSLO]),
    (f"{INVOKE}{PARAMETER}{END}{SECTION_END}", "", [OSLO]),
    (f"{SECTION}{INVOKE}{PARAMETER}{END}", "", [OSLO]),
    (f"{SECTION}{INVOKE}{PARAMETER}", "", [OSLO]),
    (f"{SECTION}{INVOKE}{PARAMETER}{SECTION_END}", "", [OSLO]),
    (f"{SECTION}{INVOKE}{PARAMETER}{INVOKE}{PARAMETER}{SECTION_END}", "", [OSLO, OSLO]),
    (f"{SECTION}{SECTION}{INVOKE}{INVOKE}{PARAMETER}{END}{END}{SECTION_END}{SECTION_END}", "", [OSLO]),
    (f"{SECTION}Then: {INVOKE}{PARAMETER}{END}and {INVOKE}{PARAMETER}{END}{SECTION_END}", "Then: and ", [OSLO, OSLO]),
    (f"{SECTION}{SECTION_END}\n{SECTION}{INVOKE}{PARAMETER}{END}{SECTION_END}", "", [OSLO]),
    (f"{SECTION}{SECTION_END}", "", []),
    ('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now"/>\n</｜DSML｜function_calls>', "", [NOW]),
    (f'<｜DSML｜invoke name="now" />{INVOKE}{PARAMETER}{END}', "", [NOW, OSLO]),
    (f'{SECTION}<｜DSML｜invoke name="now">\n<｜DSML｜invoke name="now">\n{SECTION_END}', "", [NOW, NOW]),
    (f"{SECTION}{INVOKE}{CITY}\n{END}{SECTION_END}", "", [OSLO]),
    (f"{SECTION}{INVOKE}```json\n{CITY}\n```\n{END}{SECTION_END}", "", [OSLO]),
    (f"{INVOKE}{CITY}", "", [OSLO]),
    (INVOKE + PARAMETER.replace(' string="true"', "") + END, "", [OSLO]),
    (f"{INVOKE}{PARAMETER.replace('true', 'yes')}{END}", "", [OSLO]),
    (f'{INVOKE}<｜DSML｜parameter name="days">3</｜DSML｜parameter>{END}', "", [("get_weather", {"days": 3})]),
    (f'{INVOKE}<｜DSML｜parameter name="exact" string="false">True</｜DSML｜parameter>{END}', "",
     [("get_weather", {"exact": True})]),
    (INVOKE + PARAMETER.replace('name="city" string="true"', " string='true'  name = 'city'") + END, "", [OSLO]),
    (f"{INVOKE}{PARAMETER.replace('<｜DSML｜', '<')}{END}", "", [OSLO]),
    (f"{INVOKE}{PARAMETER.replace('｜DSML｜', '')}</invoke>", "", [OSLO]),
    (f"{SECTION}{INVOKE}{PARAMETER}{END}{SECTION_END}".replace("｜DSML｜", "｜｜DSML｜｜"), "", [OSLO]),
    (f"{SECTION}{INVOKE}{PARAMETER}{END}{SECTION_END}".replace("｜DSML｜", "|DSML|"), "", [OSLO]),
    (f"{INVOKE}{PARAMETER.replace('</｜DSML｜parameter>', '')}{END}{SECTION_END}", "", [OSLO]),
    (f"{INVOKE}{PARAMETER}And on.\n{END}", "And on.\n", [OSLO]),
    (f'{INVOKE}<｜DSML｜parameter name="city" string="true">Osl', "Osl", []),
    (f"{SECTION}{INVOKE}{PARAMETER}{END}{SECTION_END}".replace("<｜DSML｜invoke", "<invoke"), "", [OSLO]),
    (f"{SECTION}{INVOKE}{PARAMETER}{END}{INVOKE}{PARAMETER}{END}{SECTION_END}ok".replace("｜DSML｜invoke", "invoke")
     .replace("｜DSML｜param", "param"), "ok", [OSLO, OSLO]),
    (f"{SECTION}{INVOKE}{PARAMETER}{END}</｜DSML｜calls>ok", "ok", [OSLO]),
    (f"{INVOKE}{PARAMETER.replace('parameter', 'param').replace('name', 'key')}{END}", "", [OSLO]),
    (f"{INVOKE.replace('name', 'function')}{PARAMETER}{END}", "", [OSLO]),
    (f"{INVOKE}{PARAMETER.replace('city', 'days').replace('Oslo', '3')}{END}", "", [("get_weather", {"days": 3})]),
    (f"{SECTION}{{\"name\": \"get_weather\", \"arguments\": {CITY}}}\n{SECTION_END}", "", [OSLO]),
    (f"{SECTION}<invoice> is no tag", "<invoice> is no tag", []),
    ('A <｜DSML｜ tag, <｜DSML｜other> and <｜DSML｜invoke name="now', "A  tag, other> and ", []),
    (f"{END}{PARAMETER}", "Oslo\n", []),
    (f'{INVOKE}<｜DSML｜parameter name="city" string="true" value="Oslo"/>{END}', "", [OSLO]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), DSML)
def test_dsml(text: str, content: str, calls: list[Any]) -> None:
    check("deepseek_v32", text, content, calls)


KEY, VALUE = "<arg_key>city</arg_key>", "<arg_value>Oslo</arg_value>"
BEGIN, CLOSE = "<tool_call>", "</tool_call>"
GLM = [
    (f"{BEGIN}{BEGIN}get_weather{KEY}{VALUE}{CLOSE}", "", [OSLO]),
    (f"{BEGIN}\n get_weather \n{KEY}\n\n{VALUE}\n{CLOSE}\n", "", [OSLO]),
    (f"{BEGIN}get_weather{KEY}{VALUE}", "", [OSLO]),
    (f"{BEGIN}get_weather{KEY}{VALUE}{BEGIN}now{CLOSE}", "", [OSLO, NOW]),
    (f"{BEGIN}now{BEGIN}get_weather{KEY}{VALUE}{CLOSE}", "", [NOW, OSLO]),
    (f"{BEGIN}get_weathercity</arg_key>{VALUE}{CLOSE}", "", [OSLO]),
    (f"{BEGIN}get_weather city</arg_key>{VALUE}days</arg_key><arg_value>3</arg_value>{CLOSE}", "",
     [("get_weather", {"city": "Oslo", "days": 3})]),
    (f"{BEGIN}get_weather{BEGIN}city</arg_key>{VALUE}{CLOSE}", "", [OSLO]),
    (f"{BEGIN}get_weather{KEY}Oslo</arg_value>{CLOSE}", "", [OSLO]),
    (f"{BEGIN}get_weather<arg_key>city{VALUE}{CLOSE}", "", [OSLO]),
    (f"{BEGIN}get_weather<arg_key>{KEY}<arg_value>{VALUE}{CLOSE}", "", [OSLO]),
    (f"{BEGIN}get_weather{KEY}<arg_value>Oslo\n{CLOSE}", "", [OSLO]),
    (f"{BEGIN}now</arg_value>{CLOSE}", "", [NOW]),
    (f"{BEGIN}now</arg_value>", "", [NOW]),
    (f"{BEGIN}get_weather\n{CITY}\n{CLOSE}", "", [OSLO]),
    (f"{BEGIN}get_weather\n```json\n{CITY}\n```\n{CLOSE}", "", [OSLO]),
    (f"{BEGIN}get_weather{KEY}{VALUE}\nI wait.", "I wait.", [OSLO]),
    (f"{BEGIN}get_weather{KEY}{VALUE} and <arg_key>days</arg_key><arg_value>10.0</arg_value>{CLOSE}", "and ",
     [("get_weather", {"city": "Oslo", "days": 10})]),
    (f"{BEGIN}get_weather<arg_key>exact</arg_key><arg_value>True</arg_value><arg_key>note</arg_key>"
     f"<arg_value>None</arg_value><arg_key>places</arg_key><arg_value>[{{'a': None}}]</arg_value>{CLOSE}", "",
     [("get_weather", {"exact": True, "note": None, "places": [{"a": None}]})]),
    (f"{BEGIN}{CLOSE}", "", []),
    ("An </arg_value> alone.", "An  alone.", []),
    (f"{BEGIN}get_weather{KEY}<arg_value>Osl", "get_weathercityOsl", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), GLM)
def test_glm(text: str, content: str, calls: list[Any]) -> None:
    check("glm", text, content, calls)


@pytest.mark.parametrize("name", ["glm", "deepseek_v32"])
def test_a_call_without_its_end_that_is_cut_is_none(name: str) -> None:
    """More arguments may have been to come, unlike where the model itself ends its text."""
    text = f"{BEGIN}get_weather{KEY}{VALUE}" if name == "glm" else INVOKE + PARAMETER
    one = parser(name)
    events = one.push(text)
    events += one.finish(cut=True)
    assert events_of(parser(name), [text])[-1] != events[-1]
    assert found(events).calls == []


IN_REASONING = [
    ("glm", "glm", f"{BEGIN}now{CLOSE}"),
    ("deepseek_v32", "deepseek_v3", '<｜DSML｜invoke name="now"></｜DSML｜invoke>'),
    ("deepseek_v32", "deepseek_v3", f'{SECTION}<｜DSML｜invoke name="now"/>{SECTION_END}'),
    ("deepseek_v31", "deepseek_v3", spelled("<<[now|{}]>>", DEEPSEEK)),
    ("deepseek_v31", "deepseek_v3", spelled("[now|{}]", DEEPSEEK)),
    ("deepseek_v3", "deepseek_r1", spelled("<<[function|now\n```json\n{}\n```]>>", DEEPSEEK)),
    ("kimi_k2", "kimi_k2", spelled("<<[functions.now:0|{}]>>", KIMI)),
    ("kimi_k2", "kimi_k2", spelled("[functions.now:0|{}]", KIMI)),
]


@pytest.mark.parametrize(("name", "reasoning", "call"), IN_REASONING)
@pytest.mark.parametrize("behind", ["", "</think>", "\n</think>\n\n", "</think>Done.", "\n</think>\nDone."])
def test_calls_in_the_reasoning(name: str, reasoning: str, call: str, behind: str) -> None:
    content = "Done." if "Done." in behind else ""
    assert check(name, f"I call.\n{call}{behind}", content, [NOW], reasoning).reasoning == "I call."


@pytest.mark.parametrize(("name", "reasoning", "call"), IN_REASONING)
def test_what_is_no_call_leaves_the_reasoning_on(name: str, reasoning: str, call: str) -> None:
    broken = call.replace("now", "a b")
    if call.startswith("<|tool_calls_section_begin|>"):
        return  # it ends the reasoning itself
    assert check(name, f"I call {broken} or not.</think>Done.", "Done.", [], reasoning).reasoning.endswith(" or not.")


CLOSED_WITHIN = [
    ("glm", "glm", f"{BEGIN}get_weather@{KEY}{VALUE}{CLOSE}", OSLO),
    ("glm", "glm", f"{BEGIN}@get_weather{KEY}{VALUE}{CLOSE}", OSLO),
    ("glm", "glm", f"{BEGIN}get_weather{KEY}{VALUE}@{CLOSE}", OSLO),
    ("glm", "glm", f"{BEGIN}get_weather{KEY}{VALUE}@<arg_key>days</arg_key><arg_value>3</arg_value>{CLOSE}",
     ("get_weather", {"city": "Oslo", "days": 3})),
    ("glm", "glm", f"{BEGIN}now@{CLOSE}", NOW),
    ("deepseek_v32", "deepseek_v3", f"{SECTION}@{INVOKE}{PARAMETER}{END}{SECTION_END}", OSLO),
    ("deepseek_v32", "deepseek_v3", f"{SECTION}{INVOKE}@{PARAMETER}{END}{SECTION_END}", OSLO),
    ("deepseek_v32", "deepseek_v3", f"{SECTION}{INVOKE}{PARAMETER}@{END}{SECTION_END}", OSLO),
    ("deepseek_v31", "deepseek_v3", spelled(f"<<@[get_weather|{CITY}]>>", DEEPSEEK), OSLO),
    ("deepseek_v31", "deepseek_v3", spelled(f"<<[@get_weather|{CITY}]>>", DEEPSEEK), OSLO),
    ("deepseek_v31", "deepseek_v3", spelled(f"<<[get_weather@|{CITY}]>>", DEEPSEEK), OSLO),
    ("deepseek_v31", "deepseek_v3", spelled(f"<<[get_weather|@{CITY}]>>", DEEPSEEK), OSLO),
    ("deepseek_v31", "deepseek_v3", spelled(f"<<[get_weather|{CITY}@]>>", DEEPSEEK), OSLO),
    ("deepseek_v3", "deepseek_r1", spelled(f"<<[function|@get_weather\n```json\n{CITY}\n```]>>", DEEPSEEK), OSLO),
    ("deepseek_v3", "deepseek_r1", spelled(f"<<[function@|get_weather\n```json\n{CITY}\n```]>>", DEEPSEEK), OSLO),
    ("kimi_k2", "kimi_k2", spelled(f"<<@[functions.get_weather:0|{CITY}]>>", KIMI), OSLO),
    ("kimi_k2", "kimi_k2", spelled(f"<<[functions.get_weather:0@|{CITY}]>>", KIMI), OSLO),
    ("hermes", "deepseek_v3", f'{BEGIN}@{{"name": "get_weather", "arguments": {CITY}}}\n{CLOSE}', OSLO),
    ("hermes", "deepseek_v3", f'{BEGIN}{{"name": "get_weather", "arguments": {CITY}}}@{CLOSE}', OSLO),
    ("mistral", "mistral", f"[TOOL_CALLS]@get_weather[ARGS]{CITY}", OSLO),
    ("mistral", "mistral", f"[TOOL_CALLS]get_weather[ARGS]@{CITY}", OSLO),
]  # fmt: skip


@pytest.mark.parametrize(("name", "reasoning", "text", "call"), CLOSED_WITHIN)
def test_reasoning_that_ends_within_a_call(name: str, reasoning: str, text: str, call: Any) -> None:
    close = "[/THINK]" if name == "mistral" else "</think>"
    for closing in (close, f"\n{close}\n", f"{close}\n\n"):
        written = text.replace("@", closing)
        answer = check(name, f"I call.\n{written} So.", "So.", [call], reasoning)
        assert answer.reasoning == "I call."
        assert check(name, f"Hm.{close}{written}So.", "So.", [call], reasoning).reasoning == "Hm."


EXAMPLES = [
    f"Write `{BEGIN}{{one}}{CLOSE}` to call it.",
    f"Then\n`{BEGIN}\n{{one}}\n{CLOSE}`",
    f"With `get_weather` you write `{BEGIN}{{one}}{CLOSE}` and `{BEGIN}{{one}}{CLOSE}`.",
]


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_example_of_a_call_in_words_is_none(text: str) -> None:
    text = text.replace("{one}", J)
    bare = text.replace(BEGIN, "").replace(CLOSE, "")
    check("hermes", text, bare, [])
    check("hermes", f"{text}\n{BEGIN}{J}{CLOSE}", bare, [OSLO])
    answer = check("hermes", f"{text} So.</think>{BEGIN}{J}{CLOSE}", "", [OSLO], "deepseek_v3")
    assert answer.reasoning == f"{text} So."
    for around in (f"```\n{BEGIN}{J}{CLOSE}", f"```{BEGIN}{J}{CLOSE}", f"`get_weather`{BEGIN}{J}{CLOSE}"):
        assert check("hermes", around, around.partition(BEGIN)[0], [OSLO]).calls


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "whole": {"$ref": "#/$defs/count"},
        "flag": {"allOf": [{"$ref": "#/$defs/flag"}, {"description": "Yes or no."}]},
        "name": {"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]},
        "maybe": {"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]},
        "loop": {"$ref": "#/$defs/loop"},
        "lost": {"$ref": "#/$defs/none"},
        "elsewhere": {"$ref": "https://example.com/schema"},
        "null able": {"type": "integer", "nullable": True},
        "tree": {"$ref": "#"},
    },
    "allOf": [{"properties": {"more": {"type": "integer"}}}, {"$ref": "#/$defs/rest"}],
    "additionalProperties": {"$ref": "#/$defs/count"},
    "$defs": {
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}]},
        "rest": {"properties": {"word": {"const": "5"}}},
    },
}
TYPED = [
    ("whole", "10.0", 10), ("whole", "3", 3), ("whole", '"3"', 3), ("whole", "3.5", "3.5"), ("whole", "True", "True"),
    ("flag", "True", True), ("flag", "false", False), ("name", "5", "5"), ("name", "None", "None"),
    ("maybe", "None", None), ("maybe", "2.0", 2), ("loop", "5", 5), ("lost", "5", 5), ("elsewhere", "x", "x"),
    ("null able", "None", None), ("tree", "{'whole': 1}", {"whole": 1}), ("more", "1.0", 1), ("word", "5", "5"),
    ("beyond", "10.0", 10), ("beyond", "ten", "ten"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "text", "value"), TYPED)
def test_values_by_the_whole_schema(key: str, text: str, value: Any) -> None:
    written = f"<tool_call>f<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"
    ids = map(str, itertools.count())
    for pieces in ([written], list(written)):
        one = AnswerParser(None, TOOL_PARSERS["glm"]({"f": SCHEMA}, lambda: next(ids)))
        [(_, arguments)] = found(events_of(one, pieces)).calls
        assert json.dumps(arguments) == json.dumps({key: value})  # 1.0 is not 1 here


def test_schemas_that_say_nothing_allow_everything() -> None:
    everything = types_of(None)
    for schema in ({}, {"type": "text"}, {"enum": []}, {"allOf": [{"type": "string"}, {"type": "null"}]}, {"$ref": 5}):
        assert types_of(schema) == everything
    assert types_of_argument(None, "a") == types_of_argument({"properties": []}, "a") == everything
    assert types_of_argument(TOOLS["get_weather"], "note") == {"string", "null"}


@pytest.mark.parametrize(
    "text",
    ["(1, 2)", "{1, 2}", "b'x'", "1j", "...", "[" * 300, "{" * 20_000, "-" * 9000 + "1", "1e999", "[nan]", "(" * 9000],
)
def test_what_is_no_json_value_in_python_either_stays_a_string(text: str) -> None:
    assert json.loads(as_json(text, types_of({"type": ["array", "object", "integer", "null"]}))) == text


QWEN = [
    "<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>",
    "<function=get_weather><parameter=city>Oslo</parameter></function>",
    '<function name="get_weather">\n<parameter name="city">Oslo</parameter>\n</function>',
    "<function=get_weather>\n<parameter=city>\nOslo\n</function>",
    "<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n",
]


@pytest.mark.parametrize("name", ["glm", "hermes"])
@pytest.mark.parametrize("written", QWEN)
def test_calls_as_qwen_s_coders_write_them(name: str, written: str) -> None:
    call = f"<tool_call>\n{written}\n</tool_call>"
    check(name, f"Hm. {call}\n{call}", "Hm.", [OSLO, OSLO])
    check(name, f"<tool_call>{written}", "", [OSLO])


@pytest.mark.parametrize("name", ["glm", "hermes"])
def test_arguments_of_qwen_s_calls_have_their_types(name: str) -> None:
    code = "if a < b:\n    print('<parameter=x>', \"</p\")\n"
    text = (
        "<tool_call>\n<function=get_weather>\n<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n"
        f'<parameter=places>\n[{{"a": 1}}]\n<parameter=note>\n{code}\n</parameter>\n</function>\n</tool_call>'
    )
    check(name, text, "", [("get_weather", {"days": 3, "exact": True, "places": [{"a": 1}], "note": code})])
    check(name, "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [NOW])
    answer = found(events_of(parser(name), ["<tool_call><function=other><parameter=a>1</parameter></function>"]))
    assert (answer.calls, "other" in answer.content) == ([], True)


@pytest.mark.parametrize("code", ["<arg_key>", "<arg_key>days</arg_key><arg_value>c", "<arg_k", "\n<a\n<"])
def test_a_value_of_glm_may_be_about_its_tags(code: str) -> None:
    """A value ends at the tag for that, whatever stands before it: a grammar allows all of it."""
    days, note = "<arg_key>days</arg_key><arg_value>3</arg_value>", f"<arg_key>note</arg_key><arg_value>a{code}"
    text = f"<tool_call>get_weather{note}</arg_value>{days}</tool_call>"
    check("glm", text, "", [("get_weather", {"note": f"a{code}", "days": 3})])


@pytest.mark.parametrize("name", ["glm", "deepseek_v32"])
def test_a_value_without_its_end(name: str) -> None:
    """It ends where the call does if no end of a value follows, and at the next tag if it must not be a string."""
    begin, end, more = {
        "glm": (BEGIN + "get_weather", CLOSE, "\n"),
        "deepseek_v32": ('<｜DSML｜invoke name="get_weather">', "</｜DSML｜invoke>", ""),
    }[name]

    def value(key: str, text: str) -> str:
        if name == "glm":
            return f"<arg_key>{key}</arg_key><arg_value>{text}"
        return f'<｜DSML｜parameter name="{key}" string="{str(key == "city").lower()}">{text}'

    closed = "</arg_value>" if name == "glm" else "</｜DSML｜parameter>"
    both, alone = ("get_weather", {"city": "Oslo", "days": 3}), ("get_weather", {"days": 3})
    city, days = value("city", "Oslo"), value("days", "3")
    for text, content, calls in (
        (begin + city + end + "\nLet us see.", "\nLet us see.", [OSLO]),
        (begin + city + "\n" + end + more + begin + city + end, "", [OSLO, OSLO]),
        (begin + city + end + more + begin + end, "", [OSLO, ("get_weather", {})]),
        (begin + days + end + more + begin + city + closed + end, "", [alone, OSLO]),
        (begin + days + city + closed + end + " So.", " So.", [("get_weather", {"days": 3, "city": "Oslo"})]),
        (begin + city + closed + days + end + " So.", " So.", [both]),
        (begin + days + city + end, "", [("get_weather", {"days": 3, "city": "Oslo"})]),
    ):
        check(name, text, content, calls)


@pytest.mark.parametrize("mark", ["｜DSML｜", "｜｜DSML｜｜", "|DSML|", "||DSML||", "‖DSML‖"])
@pytest.mark.parametrize("space", ["", " "])
@pytest.mark.parametrize("section", ["function_calls", "tool_calls", "calls"])
def test_markers_of_dsml_as_models_spell_them(mark: str, space: str, section: str) -> None:
    def tag(name: str, end: str = "", more: str = "") -> str:
        return f"<{end}{mark}{space}{name}{more}>"

    city = tag("parameter", "", ' name="city" string="true"') + "Oslo"
    days = tag("parameter", "", ' name="days" string="false"') + "3"
    end = tag("parameter", "/")
    begun = f"Ok.\n\n{tag(section)}\n" + tag("invoke", "", ' name="get_weather"')
    closed = f"\n{tag('invoke', '/')}\n{tag(section, '/')}"
    both = ("get_weather", {"city": "Oslo", "days": 3})
    check("deepseek_v32", f"{begun}\n{city}{end}\n{days}{end}{closed}", "Ok.", [both])
    check("deepseek_v32", f"{begun}\n{days}{end}\n{city}{closed}", "Ok.", [both])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kimi_k2", spelled(f"<<[functions.Get_Weather:3|{CITY}]>>", KIMI)),
        ("kimi_k2", spelled(f"<<[functions.get_weather:0:1|{CITY}]>>", KIMI)),
        ("glm", f"{BEGIN}GET_WEATHER{KEY}{VALUE}{CLOSE}"),
        ("deepseek_v32", f'<｜DSML｜invoke name="Get_weather">{PARAMETER}{END}'),
        ("deepseek_v31", spelled(f"<<[getWeather|{CITY}]>>", DEEPSEEK).replace("getWeather", "GET_weather")),
    ],
)
def test_the_case_of_a_name_is_no_matter(name: str, text: str) -> None:
    check(name, text, "", [OSLO])


def test_python_does_not_warn_of_what_models_write(recwarn: pytest.WarningsRecorder) -> None:
    for name, text in (
        ("glm", f"{BEGIN}get_weather<arg_key>days</arg_key><arg_value>3in</arg_value>{CLOSE}"),
        ("glm", f"{BEGIN}get_weather<arg_key>places</arg_key><arg_value>['\\d']</arg_value>{CLOSE}"),
        ("mistral", '[TOOL_CALLS]get_weather(city="\\d", days=0x1for)'),
    ):
        events_of(parser(name), [text])
    assert not [str(warning.message) for warning in recwarn]


INVOKED = [
    '>\n<｜DSML｜arg name="city" string="true">Oslo</｜DSML｜arg>\n</｜DSML｜invoke>',
    '>\n<｜DSML｜argument name="city">Oslo</｜DSML｜argument>\n</｜DSML｜invoke>',
    ' city="Oslo">\n</｜DSML｜invoke>',
    ' city="Oslo"/>',
    """ arguments='{"city": "Oslo"}'>\n</｜DSML｜invoke>""",
    '>\n<｜DSML｜parameter name="arguments" string="false">{"city": "Oslo"}</｜DSML｜parameter>\n</｜DSML｜invoke>',
]


@pytest.mark.parametrize("written", INVOKED)
def test_arguments_of_deepseek_v32_that_stand_elsewhere(written: str) -> None:
    text = f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather"{written}\n</｜DSML｜function_calls>'
    check("deepseek_v32", text, "", [OSLO])


def test_attributes_of_deepseek_v32_have_their_types() -> None:
    text = '<｜DSML｜invoke name="get_weather" id="1" days="3" city="4">\n<｜DSML｜parameter name="exact">true'
    text += "</｜DSML｜parameter>\n</｜DSML｜invoke>"
    check("deepseek_v32", text, "", [("get_weather", {"days": 3, "city": "4", "exact": True})])


@pytest.mark.parametrize("value", ["3</invoke x", "3</｜DSML｜invoke>"])
def test_a_tag_within_an_attribute_is_a_part_of_it(value: str) -> None:
    end = "</｜DSML｜invoke>"
    for text in (
        f'<｜DSML｜invoke name="get_weather" days="{value}" city="Oslo">{end}',
        f'<｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="days" value="{value}"/>'
        f'<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>{end}',
    ):
        check("deepseek_v32", text, "", [("get_weather", {"days": value, "city": "Oslo"})])


WRAPPED = ['{"arguments": {"city": "Oslo"}}', '{ "parameters" :\n{"city": "Oslo"} }',
           '{"name": "get_weather", "arguments": {"city": "Oslo"}}',
           '{"arguments": "{\\"city\\": \\"Oslo\\"}"}']  # fmt: skip
BEHIND_HEADS = {
    "kimi_k2": spelled("<<[functions.get_weather:0|{}]>>", KIMI),
    "deepseek_v31": spelled("<<[get_weather|{}]>>", DEEPSEEK),
    "deepseek_v3": spelled("<<[function|get_weather\n```json\n{}\n```]>>", DEEPSEEK),
    "mistral": "[TOOL_CALLS]get_weather[ARGS]{}",
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>',
    "glm": "<tool_call>get_weather\n{}\n</tool_call>",
    "deepseek_v32": '<｜DSML｜invoke name="get_weather">\n{}\n</｜DSML｜invoke>',
}


@pytest.mark.parametrize("name", BEHIND_HEADS)
@pytest.mark.parametrize("written", WRAPPED)
def test_arguments_within_an_object_of_their_own(name: str, written: str) -> None:
    check(name, BEHIND_HEADS[name].replace("{}", written, 1), "", [OSLO])


@pytest.mark.parametrize("schema", [
    {}, {"properties": {"arguments": {}}}, {"properties": {}, "additionalProperties": True},
    {"properties": {"a": {}}, "anyOf": [{"required": ["arguments"]}]},
])  # fmt: skip
@pytest.mark.parametrize("name", BEHIND_HEADS)
def test_an_argument_that_may_be_one_of_the_tool_s_is_no_such_object(name: str, schema: dict[str, Any]) -> None:
    one = TOOL_PARSERS[name]({"get_weather": schema}, lambda: "id")
    text = BEHIND_HEADS[name].replace("{}", WRAPPED[0], 1)
    assert found(events_of(AnswerParser(None, one), [text])).calls == [("get_weather", {"arguments": OSLO[1]})]


def test_an_argument_of_such_a_name_that_holds_no_object_is_one() -> None:
    text = "<tool_call>get_weather<arg_key>input</arg_key><arg_value>Oslo</arg_value></tool_call>"
    check("glm", text, "", [("get_weather", {"input": "Oslo"})])


HALF = "\\ud83d"
WITH_HALVES = [
    ("kimi_k2", spelled('<<[get_weather:0|"{\\"city\\": \\"HALF\\"}"]>>', KIMI)),
    ("kimi_k2", spelled('<<[get_weather:0|"{\\"city\\": \\"\\HALF\\"}"]>>', KIMI)),
    ("kimi_k2", spelled('<<{"name": "get_weather", "arguments": {"city": "HALF"}}>>', KIMI)),
    ("kimi_k2", spelled('<<[get_weather(city="HALF")]>>', KIMI)),
    ("hermes", '<tool_call>{"arguments": {"city": "HALF"}, "name": "get_weather"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"HALF\\"}"}</tool_call>'),
    ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "HALF"}}]'),
    ("glm", '<tool_call>get_weather<arg_key>free</arg_key><arg_value>["HALF"]</arg_value></tool_call>'),
    ("glm", "<tool_call>get_weather<arg_key>places</arg_key><arg_value>['HALF']</arg_value></tool_call>"),
    ("glm", "<tool_call>get_weather(city='HALF')</tool_call>"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), WITH_HALVES)
def test_halves_of_surrogate_pairs_are_no_part_of_arguments(name: str, text: str) -> None:
    answer = found(events_of(parser(name, None, "inside"), [text.replace("HALF", HALF)]))
    [(_, arguments)] = answer.calls
    [value] = arguments.values()
    assert value in ("\ufffd", ["\ufffd"])
