"""Tools of the Responses API that are no plain functions, and the request that a coding agent sends: the openai client
against a real server."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseCustomToolCall, ResponseFunctionToolCall
from test_responses import TOKENIZER, TOOL, Served, ask, streamed
from tool_templates import GLM, KIMI

from deploy.api.job.model import render_messages
from deploy.api.responses.bodies import chat_of, messages_of, parse_response, tools_of
from deploy.config.api import ApiConfig
from deploy.routing.request_features import FeatureReader
from deploy.text.chat import MOST_TOOLS
from deploy.text.response_tools import ADDING, InputStream, with_added
from tests.workers.grammar.grammar_walk import takes
from tests.workers.grammar.test_text_grammar import APPLY_PATCH as PATCHES
from workers.protocol.request import NO_ROOT, pack_keys, page_keys, unpack_keys

PATCH = '*** Begin Patch\n*** Add File: a "b".py\n+x = 1\n*** End Patch'
APPLY_PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCHES},
}
SHELL = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command in a PTY.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string"}, "yield_time_ms": {"type": "number"}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
NAMESPACE = {"type": "namespace", "name": "mail", "description": "Letters.", "tools": [{**TOOL, "name": "send"}]}
CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You are a coding agent running in a terminal.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Write a file."}]},
    ],
    "tools": [SHELL, APPLY_PATCH, {"type": "web_search", "external_web_access": True}, {"type": "local_shell"}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199e2a1-7b1c-7000-8000-000000000000",
    "text": {"verbosity": "low"},
}
"""Body as the agent Codex sends it, but for the words."""


def written(name: str, arguments: Any) -> str:
    """A call as Kimi writes it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{text}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )


def test_a_custom_tool_is_called_with_a_text() -> None:
    for width in (1, 5, 1000):
        with Served(f"</think>I write.{written('apply_patch', {'input': PATCH})}", width=width).client() as client:
            for answer in (ask(client, tools=[APPLY_PATCH]), streamed(client, tools=[APPLY_PATCH])[0]):
                call = answer.output[-1]
                assert isinstance(call, ResponseCustomToolCall)
                assert (call.name, call.input, call.call_id) == ("apply_patch", PATCH, "functions.apply_patch:0")
            events = list(client.responses.create(model="tiny", input="Hi", tools=[APPLY_PATCH], stream=True))
            [added, done] = [e for e in events if e.type.startswith("response.output_item") and e.output_index == 1]
            assert (added.item.type, added.item.input) == ("custom_tool_call", "")
            assert done.item.input == PATCH
            deltas = [e for e in events if e.type == "response.custom_tool_call_input.delta"]
            [whole] = [e for e in events if e.type == "response.custom_tool_call_input.done"]
            assert "".join(e.delta for e in deltas) == whole.input == PATCH
            assert len(deltas) > 1 or width == 1000
            assert {e.item_id for e in (*deltas, whole)} == {done.item.id}
            assert not [e for e in events if "function_call_arguments" in e.type]


@settings(max_examples=200, deadline=None)
@given(st.text(), st.booleans(), st.integers(1, 9))
def test_pieces_of_an_input_are_the_input(text: str, ascii_only: bool, width: int) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    stream = InputStream()
    pieces = [stream.push(arguments[at : at + width]) for at in range(0, len(arguments), width)]
    assert "".join(pieces) == text


@pytest.mark.parametrize("arguments", ['{"text": "a"}', '{"input": 5}'])
def test_arguments_that_are_no_input_come_as_they_are(arguments: str) -> None:
    with Served(f"</think>{written('apply_patch', arguments)}").client() as client:
        assert ask(client, tools=[APPLY_PATCH]).output[-1].input == arguments


def test_a_tool_within_a_namespace_is_called_by_its_name() -> None:
    served = Served(f"</think>{written('mail__send', {'city': 'a'})}")
    custom = {"type": "namespace", "name": "files", "description": "", "tools": [APPLY_PATCH]}
    with served.client() as client:
        for answer in (ask(client, tools=[NAMESPACE, custom]), streamed(client, tools=[NAMESPACE, custom])[0]):
            call = answer.output[-1]
            assert isinstance(call, ResponseFunctionToolCall)
            assert (call.name, call.namespace, json.loads(call.arguments)) == ("send", "mail", {"city": "a"})
        assert '"mail__send"' in served.prompt
        assert '"files__apply_patch"' in served.prompt
        given: Any = call.model_dump(exclude_none=True)
        ask(client, input=[{"role": "user", "content": "Hi"}, given], tools=[NAMESPACE])
        assert "functions.mail__send:0" in served.prompt
        ask(client, tools=[NAMESPACE], tool_choice={"type": "function", "name": "send", "namespace": "mail"})
        grammar = served.engine.requests[-1].sampling.grammar
        assert grammar is not None
        assert "mail__send" in grammar.text


def test_allowed_tools_are_called_alone() -> None:
    """Functions and custom tools, within namespaces, too; tools that the model is not told of are none of them."""
    served, tools = Served(), [TOOL, SHELL, APPLY_PATCH, NAMESPACE, {"type": "web_search"}]
    patch, send = {"type": "custom", "name": "apply_patch"}, {"type": "function", "name": "send", "namespace": "mail"}
    shell, search = {"type": "function", "name": "exec_command"}, {"type": "web_search"}
    with served.client() as client:
        plain = ask(client, tools=tools)
        prompt = served.prompt

        def calls_of(mode: str, *chosen: Any) -> tuple[bool, set[str]]:
            choice = {"type": "allowed_tools", "mode": mode, "tools": [*chosen]}
            answer = ask(client, tools=tools, tool_choice=choice, reasoning={"effort": "none"})
            assert answer.tool_choice.model_dump(exclude_none=True) == choice
            grammar = served.engine.requests[-1].sampling.grammar
            assert grammar is not None
            told = {"apply_patch": {"input": PATCH}, "exec_command": {"cmd": "ls"}, "mail__send": {"city": "a"}}
            told[TOOL["name"]] = {"city": "a"}
            taken = {name for name, arguments in told.items() if takes(grammar, written(name, arguments))}
            return takes(grammar, "Just text."), taken

        assert plain.tool_choice == "auto"
        assert calls_of("auto", patch, shell, search) == (True, {"apply_patch", "exec_command"})
        assert served.prompt.replace("<think></think>", "<think>") == prompt
        assert calls_of("required", send) == (False, {"mail__send"})
        assert calls_of("auto", {"type": "function", "name": TOOL["name"]}) == (True, {TOOL["name"]})
        ask(client, tools=tools, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [search]})
        assert "exec_command" not in served.prompt
        for wrong in ({"mode": "required", "tools": [search]}, {"mode": "odd", "tools": [shell]}, {"mode": "auto"}):
            with pytest.raises(openai.BadRequestError) as found:
                ask(client, tools=tools, tool_choice={"type": "allowed_tools", **wrong})
            assert found.value.param == "tool_choice"


def test_other_tools_are_left_out_and_named_in_a_header() -> None:
    kinds = [
        "web_search", "web_search_preview", "local_shell", "shell", "image_generation", "file_search", "computer",
        "code_interpreter", "computer_use_preview", "mcp", "tool_search", "apply_patch", "of_tomorrow",
    ]  # fmt: skip
    served = Served()
    with served.client() as client:
        tools: Any = [TOOL, *({"type": kind} for kind in kinds)]
        raw = client.responses.with_raw_response.create(model="tiny", input="Hi", tools=tools)
        assert raw.headers["x-latentserve-ignored-tools"] == ", ".join(kinds)
        assert not [kind for kind in kinds if kind in served.prompt]
        raw = client.responses.with_raw_response.create(model="tiny", input="Hi", tools=[TOOL])
        assert "x-latentserve-ignored-tools" not in raw.headers
        raw = client.responses.with_raw_response.create(model="tiny", input="Hi", tools=[{"type": "a\r\nb: c"}])  # type: ignore[list-item]
        assert raw.headers["x-latentserve-ignored-tools"] == "a__b__c"
        mixed: Any = {**NAMESPACE, "tools": [*NAMESPACE["tools"], {"type": "web_search"}, {"type": "mcp"}]}
        raw = client.responses.with_raw_response.create(model="tiny", input="Hi", tools=[mixed])
        assert raw.headers["x-latentserve-ignored-tools"] == "mail.web_search, mail.mcp"
        assert "mail__send" in served.prompt
        for kind in kinds:
            with pytest.raises(openai.BadRequestError, match=kind) as found:
                ask(client, tools=tools, tool_choice={"type": kind})
            assert (found.value.param, found.value.code) == ("tool_choice", "unsupported_parameter")
        ask(client, tools=[APPLY_PATCH], tool_choice={"type": "custom", "name": "apply_patch"})
        grammar = served.engine.requests[-1].sampling.grammar
        assert grammar is not None
        assert "apply_patch" in grammar.text


def test_a_regular_expression_binds_the_input_of_a_custom_tool() -> None:
    def tool(definition: str) -> Any:
        form = {"type": "grammar", "syntax": "regex", "definition": definition}
        return {"type": "custom", "name": "dial", "format": form}

    served = Served()
    with served.client() as client:
        for definition, held in [("[0-9]{2}|x", True), ("(?=1)[0-9]+", False), ("(", False), ("a)|(b", False)]:
            raw = client.responses.with_raw_response.create(model="tiny", input="Hi", tools=[tool(definition)])
            grammar = served.engine.requests[-1].sampling.grammar
            assert (grammar is not None) == held
            assert raw.headers.get("x-latentserve-ignored-tools") == (None if held else "dial.format")
        ask(client, tools=[tool("[0-9]{2}|x")])
    grammar = served.engine.requests[-1].sampling.grammar
    assert grammar is not None
    for text, allowed in (("12", True), ("x", True), ("1", False), ("123", False), ("12x", False)):
        assert takes(grammar, written("dial", {"input": text})) == allowed, text


LARK = 'start: NUMBER ("+" NUMBER)*\n%import common.NUMBER'


def custom_tool(definition: str) -> Any:
    return {
        "type": "custom", "name": "dial", "format": {"type": "grammar", "syntax": "lark", "definition": definition},
    }  # fmt: skip


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "custom", "name": "apply_patch"}])
def test_a_grammar_binds_the_input_of_a_custom_tool(choice: Any) -> None:
    served = Served()
    with served.client() as client:
        raw = client.responses.with_raw_response.create(
            model="tiny", input="Hi", tools=[APPLY_PATCH, TOOL], tool_choice=choice
        )
        assert "x-latentserve-ignored-tools" not in raw.headers
    grammar = served.engine.requests[-1].sampling.grammar
    assert grammar is not None
    for text, allowed in ((PATCH, True), (PATCH + "\n", True), ("rm -r /", False), (PATCH[:-1], False)):
        assert takes(grammar, written("apply_patch", {"input": text})) == allowed, text
    assert not takes(grammar, written("apply_patch", {"patch": PATCH}))


def test_a_grammar_that_cannot_be_expressed_is_named_in_a_header() -> None:
    served = Served()
    with served.client() as client:
        for definition, held in [(LARK, True), ("start: /(?=a)a/", False), ("start: a", False), ("", False)]:
            raw = client.responses.with_raw_response.create(model="tiny", input="Hi", tools=[custom_tool(definition)])
            assert raw.headers.get("x-latentserve-ignored-tools") == (None if held else "dial.format")
            assert (served.engine.requests[-1].sampling.grammar is not None) == held
            assert json.dumps(definition)[1:-1] in served.prompt


def test_values_between_tags_are_held_to_grammars_without_the_sign_of_a_tag() -> None:
    served = Served(template=GLM)
    with served.client() as client:
        for tool, left_out in ((custom_tool(LARK), None), (APPLY_PATCH, "apply_patch.input format")):
            raw = client.responses.with_raw_response.create(model="tiny", input="Hi", tools=[tool])
            assert raw.headers.get("x-latentserve-not-enforced") == left_out
            grammar = served.engine.requests[-1].sampling.grammar
            assert grammar is not None
            for text, allowed in (("1+2", True), ("1+", left_out is not None)):
                arguments = f"<arg_key>input</arg_key><arg_value>{text}</arg_value>"
                assert takes(grammar, f"<tool_call>{tool['name']}{arguments}</tool_call>") == allowed, text


def test_a_name_says_which_tool_is_meant() -> None:
    custom: Any = {"type": "custom", "name": "mail__send"}
    with Served().client() as client:
        for tools in (
            [custom, NAMESPACE],
            [NAMESPACE, {**TOOL, "name": "mail__send"}],
            [{**TOOL, "name": "a"}, custom, custom],
        ):
            with pytest.raises(openai.BadRequestError, match="two tools have the name 'mail__send'") as found:
                ask(client, tools=tools)
            assert found.value.param == "tools"


@pytest.mark.parametrize("name", [{"a": "b"}, ["a"], 5, None])
def test_a_name_that_is_none_is_refused(name: object) -> None:
    within = {**NAMESPACE, "tools": [{**TOOL, "name": name}]}
    with Served().client() as client:
        for tool in ({**TOOL, "name": name}, {"type": "custom", "name": name}, within, {**NAMESPACE, "name": name}):
            with pytest.raises(openai.BadRequestError) as found:
                ask(client, tools=[tool])
            assert "name" in found.value.message, tool


def test_a_coding_agent_s_request() -> None:
    served = Served(f"Hm.</think>I write.{written('apply_patch', {'input': PATCH})}")
    with served.client() as client:
        raw = client.responses.with_raw_response.create(**CODEX)
        assert raw.headers["x-latentserve-ignored-tools"] == "web_search, local_shell"
        events = list(raw.parse())
        assert "You are a coding agent running in a terminal.\n\n<permissions>" in served.prompt
        assert json.dumps(PATCHES)[1:-1] in served.prompt
        assert [event.type for event in events][-1] == "response.completed"
        response = events[-1].response
        assert [item.type for item in response.output] == ["reasoning", "message", "custom_tool_call"]
        assert [tool.type for tool in response.tools] == ["function", "custom", "web_search", "local_shell"]
        history = [item.model_dump(exclude_none=True) for item in response.output]
        result = {"type": "custom_tool_call_output", "call_id": history[-1]["call_id"], "output": "Done."}
        again = list(client.responses.create(**{**CODEX, "input": [*CODEX["input"], *history, result]}))
        assert again[-1].type == "response.completed"
        assert written("apply_patch", {"input": PATCH}) in served.prompt
        assert "## Return of functions.apply_patch:0\nDone.<|im_end|>" in served.prompt


EXEC = {"type": "custom", "name": "exec", "description": "Runs JavaScript."}
WAIT = {"type": "function", "name": "wait", "parameters": {"type": "object", "properties": {}}}
ADDED = {
    "type": "additional_tools",
    "id": "at_1",
    "role": "developer",
    "tools": [
        {"type": "namespace", "name": "functions", "description": "", "tools": [EXEC, WAIT]},
        NAMESPACE,
        {"type": "web_search"},
    ],
}


def test_tools_that_stand_in_the_input() -> None:
    """Codex from 0.144 on has all its tools in an item of the input, most of them in the namespace `functions`."""
    served = Served(f"Hm.</think>{written('functions__exec', {'input': 'ls()'})}")
    body = {name: CODEX[name] for name in CODEX if name not in ("tools", "instructions")}
    body["input"] = [ADDED, *CODEX["input"]]
    with served.client() as client:
        raw = client.responses.with_raw_response.create(**body)
        assert raw.headers["x-latentserve-ignored-tools"] == "web_search"
        response = [*raw.parse()][-1].response
        assert response.status == "completed"
        call = response.output[-1]
        assert (call.type, call.name, call.namespace, call.input) == ("custom_tool_call", "exec", "functions", "ls()")
        assert all(f'"{name}"' in served.prompt for name in ("functions__exec", "functions__wait", "mail__send"))
        output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "a.py"}
        newer = {**EXEC, "description": "Runs it anew."}
        more = {**ADDED, "tools": [{**ADDED["tools"][0], "tools": [newer, {**WAIT, "name": "send_input"}]}]}
        turns = [*body["input"], *(item.model_dump(exclude_none=True) for item in response.output), output, more]
        again = [*client.responses.create(**{**body, "input": turns})][-1].response
        assert again.status == "completed"
        assert written("functions__exec", {"input": "ls()"}) in served.prompt
        assert "Runs it anew." in served.prompt
        assert "Runs JavaScript." not in served.prompt
        assert all(f'"functions__{name}"' in served.prompt for name in ("exec", "wait", "send_input"))
        choice = {"type": "custom", "name": "exec", "namespace": "functions"}
        ask(client, input=body["input"], tool_choice=choice, reasoning={"effort": "none"})
        assert served.engine.requests[-1].sampling.grammar is not None
        for wrong in ({**ADDED, "tools": "all"}, {**ADDED, "tools": [{"type": "namespace"}]}):
            with pytest.raises(openai.BadRequestError) as found:
                ask(client, input=[wrong, *CODEX["input"]])
            assert found.value.param == "input"


def test_a_tool_of_the_input_takes_the_place_of_one_in_tools() -> None:
    """Functions and custom tools share their names; a name that two tools come to have otherwise is refused."""
    custom = {"type": "custom", "name": "send", "description": "Sends a text."}
    function = {**TOOL, "name": "send", "description": "Sends a letter."}
    served = Served()
    with served.client() as client:
        for earlier, later in ((custom, function), (function, custom)):
            ask(client, tools=[earlier], input=[USER, {**ADDED, "tools": [later]}])
            assert later["description"] in served.prompt
            assert earlier["description"] not in served.prompt
        for tools, added in (
            ([{**TOOL, "name": "mail__send"}], NAMESPACE),
            ([NAMESPACE], {**EXEC, "name": "mail__send"}),
        ):
            for kind in ADDING:
                with pytest.raises(openai.BadRequestError, match="two tools have the name 'mail__send'") as found:
                    ask(client, tools=tools, input=[USER, {"type": kind, "tools": [added]}])
                assert found.value.param == "tools"


def test_many_namespaces_of_one_name_cost_linear_time() -> None:
    def work(count: int) -> int:
        """Calls of functions, those written in C among them."""
        spaces = [{**NAMESPACE, "tools": [{**TOOL, "name": f"f{number}"}]} for number in range(count)]
        calls = 0

        def count_one(*event: Any) -> None:
            nonlocal calls
            calls += event[1] in ("call", "c_call")

        sys.setprofile(count_one)
        try:
            merged = with_added((), [{**ADDED, "tools": spaces}])
        finally:
            sys.setprofile(None)
        assert [len(space["tools"]) for space in merged] == [count]
        return calls

    assert work(400) < 3 * work(200)


def test_more_tools_than_may_be() -> None:
    spaces = [{**NAMESPACE, "tools": [{**TOOL, "name": f"f{number}"}]} for number in range(MOST_TOOLS + 1)]
    with Served().client() as client, pytest.raises(openai.BadRequestError, match="at most 1024") as found:
        ask(client, input=[{**ADDED, "tools": spaces}, USER])
    assert found.value.param == "tools"


@pytest.mark.parametrize("name", [{"a": 1}, ["a"], 5, None])
def test_names_of_tools_that_are_none(name: Any) -> None:
    with Served().client() as client:
        for tools in ([{**TOOL, "name": name}], [APPLY_PATCH, {**TOOL, "name": name}], [{**APPLY_PATCH, "name": name}]):
            with pytest.raises(openai.BadRequestError):
                ask(client, tools=tools)
            with pytest.raises(openai.BadRequestError):
                ask(client, input=[{**ADDED, "tools": tools}, USER])


def test_an_image_behind_tools_in_the_input_is_new() -> None:
    question = {"role": "user", "content": [IMAGE]}
    with Served().client() as client, pytest.raises(openai.BadRequestError, match="input_image"):
        ask(client, input=[ADDED, question])


def test_what_items_say_holds_for_responses_that_go_on_from_theirs() -> None:
    """As it does where a client sends the whole conversation again."""
    served = Served("Hm.</think>true", stored_responses=9)
    form = {"type": "configuration_update", "text": {"format": {"type": "json_schema", "name": "b", "schema": BOOLEAN}}}
    said = [USER, ADDED, {"type": "tool_search_output", "tools": [{**TOOL, "name": "found"}, 5]}, form]
    calm = {"type": "configuration_update", "reasoning": {"effort": "none"}}
    replaced = {"type": "additional_tools", "tools": [{"type": "custom", "name": "found", "description": "Anew."}]}
    with served.client() as client:
        answer = ask(client, input=said)
        history = [*said, *(item.model_dump(exclude_none=True) for item in answer.output)]
        for turn in ([USER], [calm, replaced, USER], [USER]):
            history += turn
            whole = ask(client, input=history, tools=[TOOL])
            wanted, asked = served.prompt, served.engine.requests[-1].sampling.grammar
            assert asked is not None
            answer = ask(client, input=turn, tools=[TOOL], previous_response_id=answer.id)
            assert served.prompt == wanted
            assert served.engine.requests[-1].sampling.grammar == asked
            assert (answer.text, answer.reasoning) == (whole.text, whole.reasoning)
            assert '"functions__exec"' in served.prompt
            assert '"found"' in served.prompt
            history += [item.model_dump(exclude_none=True) for item in answer.output]
        twice = {**TOOL, "name": "mail__send"}
        with pytest.raises(openai.BadRequestError, match="two tools have the name 'mail__send'"):
            ask(client, input=[USER], tools=[twice], previous_response_id=answer.id)


def test_items_that_configure_what_follows() -> None:
    served = Served("</think>true")
    effort = {"type": "configuration_update", "reasoning": {"effort": "none"}}
    form = {"type": "configuration_update", "text": {"format": {"type": "json_schema", "name": "b", "schema": BOOLEAN}}}
    with served.client() as client:
        ask(client, input=[USER])
        assert served.prompt.endswith("<think>")
        answer = ask(client, input=[effort, USER], reasoning={"effort": "high"})
        assert served.prompt.endswith("</think>")
        assert answer.reasoning.effort == "none"
        ask(client, input=[effort, USER, {**effort, "reasoning": {"effort": "high"}}, form])
        assert served.prompt.endswith("<think>")
        assert served.engine.requests[-1].sampling.grammar is not None
        asked = {"format": form["text"]["format"]}
        for text in ({"verbosity": "low"}, {}, {"format": None}):
            update = {"type": "configuration_update", "text": text}
            for fields in ({"input": [USER, update], "text": asked}, {"input": [USER, form, update]}):
                answer = ask(client, **fields)
                assert answer.text.format is not None
                assert answer.text.format.type == "json_schema"
                assert served.engine.requests[-1].sampling.grammar is not None
        with pytest.raises(openai.BadRequestError, match="verbosity"):
            ask(client, input=[USER, {"type": "configuration_update", "text": {"verbosity": "loud"}}])
        ask(
            client, input=[{"type": "configuration_update", "reasoning": {"effort": "of tomorrow"}, "text": None}, USER]
        )
        with pytest.raises(openai.BadRequestError, match="compaction_trigger"):
            ask(client, input=[USER, {"type": "compaction_trigger"}])


BOOLEAN = {"type": "boolean"}
USER = {"role": "user", "content": "Hi"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,"}
ITEMS: list[tuple[list[dict[str, Any]], list[str], list[str]]] = [
    ([{"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAA"}], [], ["gAAA"]),
    ([{"type": "item_reference", "id": "msg_1"}], [], ["msg_1"]),
    ([{"type": "compaction", "encrypted_content": "gAAA"}], ["[Earlier turns were left out here.]"], ["gAAA"]),
    (
        [{"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q?"}}],
        ["[The server called its tool web_search: q?.]"],
        ["ws_1"],
    ),
    ([ADDED], ['"functions__exec"', '"mail__send"'], ["at_1"]),
    ([{"type": "configuration_update", "reasoning": {"effort": "low"}}], [], ["configuration_update"]),
    (
        [
            {
                "type": "agent_message",
                "author": "/root/a",
                "recipient": "/root",
                "content": [{"type": "input_text", "text": "Did it."}],
            }
        ],
        ["[A message of the agent /root/a:]\nDid it."],
        [],
    ),
    ([{"type": "agent_reasoning", "text": "secret"}], [], ["secret"]),
    (
        [
            {"type": "program", "id": "p", "call_id": "c", "code": "f()", "fingerprint": "x9"},
            {"type": "program_output", "id": "o", "call_id": "c", "result": "42", "status": "completed"},
        ],
        ["[The server called its tool program.]", "[The server's program gave: 42]"],
        ["x9"],
    ),
    ([{"type": "tool_search_call", "arguments": {}}], ["[The server called its tool tool_search.]"], []),
    ([{"type": "ghost_snapshot", "ghost_commit": {"id": "abc123"}}], [], ["abc123"]),
    ([{"type": "compaction_summary", "encrypted_content": "gAAA"}], ["[Earlier turns were left out here.]"], ["gAAA"]),
    (
        [
            {"type": "computer_call", "call_id": "x", "action": {"type": "click", "x": 5}, "status": "completed"},
            {
                "type": "computer_call_output",
                "call_id": "x",
                "output": {"type": "computer_screenshot", "image_url": "u9"},
            },
        ],
        ['"type": "click"', "[An image was here, which this model cannot see.]"],
        ["u9"],
    ),
    (
        [{"type": "tool_search_output", "call_id": "c", "tools": [{"type": "function", "name": "send"}, 5]}],
        ["[Tools were found: send.]", '"name": "send"'],
        [],
    ),
    (
        [
            {"type": "local_shell_call", "call_id": "x", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "call_id": "x", "output": "a.py"},
        ],
        ["local_shell", '"command": ["ls"]', "a.py"],
        [],
    ),
    (
        [
            {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "x", "output": [IMAGE, {"type": "input_text", "text": "b"}]},
        ],
        ["[An image was here, which this model cannot see.]", "b"],
        ["data:image"],
    ),
    (
        [{"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "I won't."}]}],
        ["I won't."],
        [],
    ),
]


@pytest.mark.parametrize(("items", "seen", "unseen"), ITEMS)
def test_items_that_agents_send(items: list[Any], seen: list[str], unseen: list[str]) -> None:
    served = Served()
    with served.client() as client:
        ask(client, input=[USER, *items, USER], tools=[TOOL], store=False)
    assert not [text for text in seen if text not in served.prompt]
    assert not [text for text in unseen if text in served.prompt]


@pytest.mark.parametrize("items", [items for items, _, _ in ITEMS])
async def test_routers_see_the_same_prompt(items: list[Any]) -> None:
    config = ApiConfig(chat_template=KIMI)
    raw = json.dumps({**CODEX, "tools": [*CODEX["tools"], NAMESPACE], "input": [USER, *items, USER] * 9}).encode()
    body = parse_response(raw)
    ids = TOKENIZER.encode(
        render_messages(TOKENIZER, config, chat_of(body, messages_of(body.input), tools_of(body))), False
    )
    keys = (await FeatureReader(TOKENIZER, KIMI).read(raw)).keys(NO_ROOT)
    assert len(keys) > 2
    assert keys == unpack_keys(pack_keys(page_keys(ids)))
