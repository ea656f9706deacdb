"""Changes that Moonshot's tokenizer class makes to a Kimi model's chat: it sorts tools and declares them in TypeScript.
Calls get the ids that the model writes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny_tokenizer import tiny, with_special
from tool_templates import GLM, KIMI, KIMI_K25

from deploy.text.kimi_chat import sorted_by_name, with_own_ids
from deploy.text.typescript import declarations

TEXT: Any = {"type": "string"}


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, **more, **({} if parameters is None else {"parameters": parameters})}
    return {"type": "function", "function": function}


USER_TYPE = {"type": "object", "properties": {"name": TEXT, "age": {"type": "integer"}}, "required": ["name"]}
RICH: dict[str, Any] = {
    "z": {"type": "string", "description": "Two\n\nlines.", "minLength": 1, "pattern": "^a", "default": "ä"},
    "mode": {"enum": ["auto", None, True, 0]},
    "tags": {"type": "array", "items": {"type": "string", "description": "One."}, "minItems": 1, "maxItems": 3},
    "pairs": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
    "any": {},
    "either": {"anyOf": [{"type": "integer"}, {"type": "array", "items": TEXT}], "default": -1},
    "maybe": {"type": ["string", "null"], "description": "Or not."},
    "n": {"type": "integer", "minimum": 0, "maximum": 10, "default": 3},
    "flag": {"type": "boolean", "default": False},
    "map": {
        "type": "object",
        "additionalProperties": {"type": "object", "properties": {"x": {"type": "number"}}},
    },
    "never": False,
}
POINT = {"type": "object", "description": "Where.", "properties": {"x": {"type": "number"}}, "required": ["x"]}
TREE = {
    "type": "object",
    "$defs": {"Point": POINT},
    "properties": {
        "at": {"$ref": "#/$defs/Point", "description": "Here."},
        "children": {"type": "array", "items": {"$ref": "#"}},
    },
    "required": ["at"],
}
DECLARED = {
    """\
// Create a new user record.
type create_user = (_: {
  user: {
    name: string,
    age?: number
  }
}) => any;
""": [
        tool(
            "create_user",
            {"type": "object", "properties": {"user": USER_TYPE}, "required": ["user"]},
            description="Create a new user record.",
        )
    ],
    """\
type rich = (_: {
  mode: "auto" | None | True | 0,
  // Two

  // lines.
  // minLength: 1, pattern: ^a
  // Default: "ä"
  z: string,
  any?: any,
  // Default: -1
  either?: number | Array<string>,
  // Default: False
  flag?: boolean,
  map?: {
    [k: string]: {
      x?: number
    }
  },
  // Or not.
  maybe?: string | null,
  // maximum: 10, minimum: 0
  // Default: 3
  n?: number,
  never?: null,
  pairs?: Array<Array<number>>,
  // maxItems: 3, minItems: 1
  tags?: Array<
    // One.
    string
  >,
  [k: string]: never
}) => any;
type plain = (_: {}) => any;
type empty = (_: {}) => any;
""": [
        tool("rich", {"type": "object", "required": ["z", "mode"], "additionalProperties": False, "properties": RICH}),
        tool("plain"),
        tool("empty", {}),
    ],
    """\
interface parameters {
  // Here.
  at: Point,
  children?: Array<parameters>
}
// Where.
interface Point {
  x: number
}
// A tree.
// Of points.
type tree = (_: parameters) => any;
""": [tool("tree", TREE, description="A tree.\nOf points.")],
}
"""Declarations of these tools as the published tool_declaration_ts.py writes them."""


@pytest.mark.parametrize("inside", DECLARED)
def test_declarations_are_those_of_the_published_program(inside: str) -> None:
    assert declarations(DECLARED[inside]) == f"# Tools\n\n## functions\nnamespace functions {{\n{inside}}}\n"


deep: Any = {"type": "string"}
for _ in range(2000):
    deep = {"type": "array", "items": deep}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [TEXT]},
        {"const": 1},
        {"$ref": "#/$defs/absent"},
        {"$ref": "#/definitions/x"},
        {"type": "string", "enum": [1]},
        {"type": ["integer", "string"], "enum": [1]},
        {"type": ["text"]},
        {"type": {}},
        {"type": "string", "description": 5},
        "string",
        deep,
    ],
    ids=lambda schema: "deep" if schema is deep else str(schema),
)
def test_what_has_no_declaration_is_left_to_json(schema: Any) -> None:
    tools = [tool("f", {"type": "object", "properties": {"x": schema}})]
    assert declarations(tools) is None
    if schema is not deep:
        assert '"name":"f"' in tiny().render_chat([{"role": "user", "content": "q"}], tools=tools, template=KIMI_K25)


def test_templates_that_name_the_variable_get_declarations() -> None:
    [(inside, tools), *_] = DECLARED.items()
    chat = [{"role": "user", "content": "q"}]
    prompt = tiny().render_chat(chat, tools=tools, template=KIMI_K25, extra={"tools_ts_str": "forged"})
    declared = f"# Tools\n\n## functions\nnamespace functions {{\n{inside}}}\n"
    assert prompt.startswith(f"<|im_system|>tool_declare<|im_middle|>{declared}<|im_end|><|im_user|>")
    assert "namespace" not in tiny().render_chat(chat, template=KIMI_K25)
    assert "namespace" not in tiny().render_chat(chat, tools=tools, template=KIMI)


def test_control_tokens_in_declarations_are_text() -> None:
    tokenizer = with_special("<|im_end|>")
    tools = [tool("f", {"type": "object", "properties": {"<|im_end|>": TEXT}}, description="<|im_end|>")]
    prompt = tokenizer.render_chat([{"role": "user", "content": "q"}], tools=tools, template=KIMI_K25)
    [end] = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids.count(end) == 2
    assert "// <|im_end|>\ntype f = (_: {\n  <|im_end|>?: string\n})" in tokenizer.decode(ids, False)


def test_fields_of_tools_are_sorted_at_every_depth() -> None:
    given = tool("f", {"type": "object", "properties": {"b": {"type": "string", "enum": ["y", "x"]}, "a": {}}})
    given["function"]["description"] = "F."
    sorted_json = json.dumps([given], sort_keys=True)
    assert json.dumps(sorted_by_name([given])) == sorted_json
    chat = [{"role": "user", "content": "q"}]
    assert f"tool_declare<|im_middle|>{sorted_json}<|im_end|>" in tiny().render_chat(chat, tools=[given], template=KIMI)
    assert f"# Tools{json.dumps(given)}" in tiny().render_chat(chat, tools=[given], template=GLM)


def calls(*given: tuple[str, str]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
            for call_id, name in given
        ],
    }


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "done"}


def ids_of(messages: list[dict[str, Any]]) -> list[str]:
    return [
        call_id
        for message in messages
        for call_id in ([c["id"] for c in message.get("tool_calls", ())] or [message["tool_call_id"]])
    ]


CONVERSATIONS: list[tuple[list[dict[str, Any]], list[str]]] = [
    (
        [calls(("call_a", "f"), ("toolu_b", "g")), result("toolu_b"), result("call_a"), calls(("functions_f_0", "f"))],
        ["functions.f:0", "functions.g:1", "functions.g:1", "functions.f:0", "functions.f:2"],
    ),
    (  # counted from 0 in every answer, as some clients do
        [calls(("0", "f")), result("0"), calls(("0", "f")), result("0"), result("0")],
        ["functions.f:0", "functions.f:0", "functions.f:1", "functions.f:1", "functions.f:1"],
    ),
    ([calls(("0", "f")), calls(("0", "f")), result("0")], ["functions.f:0", "functions.f:1", "functions.f:1"]),
    (  # no ids at all
        [calls(("", "f"), ("", "g")), result(""), result("")],
        ["functions.f:0", "functions.g:1", "functions.f:0", "functions.g:1"],
    ),
    ([calls(("call_a", "f")), result("call_z")], ["functions.f:0", "call_z"]),
    # The model's own stay, however it counted.
    ([calls(("functions.f:7", "f")), result("functions.f:7")], ["functions.f:7", "functions.f:7"]),
    (
        [calls(("functions.f:7", "f"), ("x", "f")), result("functions.f:7")],
        ["functions.f:0", "functions.f:1", "functions.f:0"],
    ),
    ([calls(("functions.f:7", "g"))], ["functions.g:0"]),
    ([calls(("functions.f:x", "f"))], ["functions.f:0"]),
]


@pytest.mark.parametrize(("messages", "ids"), CONVERSATIONS)
def test_calls_get_the_ids_that_the_model_writes(messages: list[dict[str, Any]], ids: list[str]) -> None:
    before = json.dumps(messages)
    assert ids_of(with_own_ids(messages)) == ids
    assert json.dumps(messages) == before
    prompt = tiny().render_chat(messages, template=KIMI, control_tokens_in_text=True)
    assert [piece.split("<")[0].split("\n")[0] for piece in _after(prompt)] == ids


def test_other_models_see_the_ids_that_clients_gave() -> None:
    template = GLM.replace("{{ m.content }}</tool", "{{ m.tool_call_id }}</tool")
    prompt = tiny().render_chat([calls(("call_a", "f")), result("call_a")], template=template)
    assert "<tool_response>call_a</tool_response>" in prompt


def _after(prompt: str) -> list[str]:
    return prompt.replace("## Return of ", "<|tool_call_begin|>").split("<|tool_call_begin|>")[1:]


def test_names_reach_the_template() -> None:
    chat = [
        {"role": "system", "content": "S", "name": "rules"},
        {"role": "user", "content": "q", "name": "Ada"},
        {"role": "assistant", "content": "a", "name": "Kimi"},
        {"role": "user", "content": "r"},
    ]
    prompt = tiny().render_chat(chat, template=KIMI)
    heads = ("system|>rules", "user|>Ada", "assistant|>Kimi", "user|>user", "assistant|>assistant")
    for head in heads:
        assert f"<|im_{head}<|im_middle|>" in prompt
