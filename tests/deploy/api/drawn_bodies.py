"""Bodies of requests, drawn from the description of the API and from bodies that are rich in structure, then broken."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

ODD: list[Any] = [
    None, True, False, 0, 1, 2, -1, 3.5, 2**63, 2**70, -(2**64), 1e308, "", " ", "a", "tiny", "5", "auto", "text",
    "<think>", "</think>", "<|user|>", "<tool_call>", "\x00", "\u2028", "\ud800", "👩‍🚀", "x" * 3000, [], [[]], {},
    [{}], {"type": "text"}, {"type": {}}, {"": None}, {"a": {"b": [{}]}}, ["a", 5], [None], {"type": "object"},
    {"$ref": "#"}, {"type": "function"}, {"type": "text", "text": "a"}, float("nan"), float("-inf"),
]  # fmt: skip
"""Values that stand where something else is expected. Not all of it is JSON that every reader takes."""
WORDS = [
    "text", "function", "tool_use", "tool_result", "thinking", "redacted_thinking", "image", "image_url", "message",
    "function_call", "function_call_output", "reasoning", "input_text", "output_text", "item_reference", "json_schema",
    "json_object", "structural_tag", "object", "array", "string", "user", "assistant", "system", "developer", "tool",
    "auto", "none", "any", "required", "f", "a", "{}", "[1", "completed", "document", "search_result", "tool_reference",
    "server_tool_use", "web_search_tool_result", "compaction", "enabled", "disabled", "adaptive", "low", "max",
]  # fmt: skip
NAMES = [
    "type", "id", "name", "role", "content", "text", "input", "output", "arguments", "call_id", "tool_use_id",
    "function", "parameters", "input_schema", "schema", "strict", "properties", "required", "enum", "format",
    "json_schema", "tool_calls", "tool_call_id", "thinking", "signature", "summary", "is_error", "cache_control",
    "structures", "triggers", "begin", "end", "effort", "enabled", "budget_tokens", "source", "data", "title",
]  # fmt: skip

TOOL_NAMES: list[Any] = ["f", "g", "n", "n__f", "n__g", "n__p", "m__p", None, 5, "", [], "x" * 70]
"""Names of tools, some of them the same once they are qualified."""

_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "a"}'}}
_BASIC = {"model": "tiny"}
_FUNCTION = {"type": "function", "name": "f", "parameters": _SCHEMA}
_SPACE = {"type": "namespace", "name": "n", "tools": [{**_FUNCTION, "name": "g"}, {"type": "custom", "name": "p"}]}
RICH: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {**_BASIC, "prompt": ["a", "b c"], "n": 2, "logprobs": 2, "echo": True, "stop": ["x"], "logit_bias": {"5": 1}},
        {**_BASIC, "prompt": [[5, 6], [7]], "max_tokens": 0, "prompt_logprobs": 1},
        {**_BASIC, "prompt": "a", "stream": True, "stream_options": {"include_usage": True}, "guided_json": _SCHEMA},
        {**_BASIC, "prompt": [5, 6], "response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}}},
    ],
    "/v1/chat/completions": [
        {
            **_BASIC,
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "a"}]},
                {"role": "user", "content": "b", "name": "n"},
                {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning_content": "c"},
                {"role": "tool", "tool_call_id": "c", "content": "d"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "description": "e", "parameters": _SCHEMA}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "chat_template_kwargs": {"enable_thinking": False},
        },
        {
            **_BASIC,
            "messages": [{"role": "user", "content": "b"}],
            "logprobs": True,
            "top_logprobs": 2,
            "stream": True,
            "max_reasoning_tokens": 5,
        },
        {
            **_BASIC,
            "messages": [{"role": "user", "content": "b"}],
            "reasoning_effort": "low",
            "reasoning": {"effort": "high", "enabled": True, "max_tokens": 9},
            "thinking": {"type": "enabled", "budget_tokens": 9},
            "enable_thinking": True,
            "thinking_budget": 9,
            "stop": ["x"],
        },
    ],
    "/v1/messages": [
        {
            **_BASIC,
            "max_tokens": 5,
            "system": [{"type": "text", "text": "a"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "b"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "c", "signature": ""},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {"city": "a"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "d"}]},
                    ],
                },
            ],
            "tools": [{"name": "f", "description": "e", "input_schema": _SCHEMA}],
            "tool_choice": {"type": "tool", "name": "f"},
            "thinking": {"type": "disabled"},
            "stop_sequences": ["x"],
        },
        {**_BASIC, "max_tokens": 5, "messages": [{"role": "user", "content": "b"}], "stream": True},
        {
            **_BASIC,
            "max_tokens": 5,
            "messages": [
                {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                        {"type": "text", "text": "a"},
                    ],
                },
                {"role": "system", "content": "b"},
                {"role": "system", "content": "f", "clear_at": "next_user_message", "output_config": {"effort": "low"}},
                {
                    "role": "system",
                    "content": [
                        {
                            "type": "tool_addition",
                            "tool": {"type": "tool_definition", "definition": {"name": "g", "input_schema": _SCHEMA}},
                        },
                        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "document", "title": "t", "source": {"type": "text", "data": "c"}},
                        {"type": "search_result", "title": "t", "content": [{"type": "text", "text": "d"}]},
                        {"type": "tool_reference", "tool_name": "f"},
                    ],
                },
            ],
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        },
    ],
    "/v1/responses": [
        {
            **_BASIC,
            "instructions": "a",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "c"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"city": "a"}'},
                {"type": "function_call_output", "call_id": "c", "output": "d"},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "e"}]},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA, "strict": True}],
            "tool_choice": {"type": "function", "name": "f"},
            "max_output_tokens": 5,
            "metadata": {"a": "b"},
        },
        {
            **_BASIC,
            "input": "b",
            "stream": True,
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "json_schema", "name": "s", "schema": _SCHEMA}},
            "previous_response_id": None,
            "store": False,
            "include": [],
        },
        {
            **_BASIC,
            "input": [
                {"role": "user", "content": "b"},
                {"type": "reasoning", "summary": [], "encrypted_content": "x"},
                {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "a"},
                {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
                {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["a"]}},
                {"type": "local_shell_call_output", "call_id": "c", "output": "a"},
                {"type": "web_search_call", "action": {"query": "a"}},
                {"type": "tool_search_output", "tools": [{"name": "f"}]},
                {"type": "item_reference", "id": "a"},
                {
                    "type": "additional_tools",
                    "role": "developer",
                    "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "exec"}]}],
                },
                {"type": "agent_message", "author": "a", "content": [{"type": "input_text", "text": "b"}]},
                {"type": "configuration_update", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}},
            ],
            "tools": [
                {"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "lark", "definition": "a"}},
                {"type": "custom", "name": "q", "format": {"type": "grammar", "syntax": "regex", "definition": "a|b"}},
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}]},
                {"type": "web_search"},
            ],
            "text": {"verbosity": "low"},
            "stop": ["x"],
            "min_p": 0.5,
        },
        # Tools that meet: of one name in several places, or of names that are one once they are qualified.
        {
            **_BASIC,
            "input": [
                {"role": "user", "content": "b"},
                {
                    "type": "additional_tools",
                    "tools": [_SPACE, {**_SPACE, "tools": [_FUNCTION, {"type": "custom", "name": "q"}]}],
                },
                {"type": "tool_search_output", "tools": [{"type": "custom", "name": "g"}, _SPACE, 5]},
            ],
            "tools": [_FUNCTION, {**_FUNCTION, "name": "n__h"}, {**_SPACE, "name": "m"}],
        },
        {
            **_BASIC,
            "input": [
                {"role": "user", "content": "b"},
                {"type": "tool_search_output", "tools": [{"type": "custom", "name": "f"}]},
                {"type": "additional_tools", "tools": [_SPACE]},
            ],
            "tools": [_FUNCTION, _SPACE],
            "stream": True,
        },
    ],
    "/tokenize": [{"prompt": "a b", "return_token_strs": True}, {"messages": [{"role": "user", "content": "b"}]}],
    "/detokenize": [{"tokens": [5, 6]}],
}
RICH["/v1/messages/count_tokens"] = RICH["/v1/messages"]


class Drawing:
    """Draws from `rng` what a description allows."""

    def __init__(self, described: dict[str, Any], rng: random.Random) -> None:
        self.described, self.rng = described, rng
        self.schemas: dict[str, Any] = described["components"]["schemas"]

    def body(self, path: str) -> Any:
        """One of an operation, perhaps broken at some places."""
        rng = self.rng
        if rng.random() < 0.7:
            body = deepcopy(rng.choice(RICH[path]))
        else:
            content = self.described["paths"][path]["post"]["requestBody"]["content"]
            body = self.value(content["application/json"]["schema"])
        for _ in range(rng.choice([0, 1, 1, 1, 2, 4])):
            body = self.broken(body)
        if isinstance(body, dict) and isinstance(body.get("model"), str) and rng.random() < 0.95:
            body["model"] = "tiny"
        return body

    def value(self, schema: dict[str, Any], depth: int = 0) -> Any:
        """Draw a value of a schema."""
        rng = self.rng
        if "$ref" in schema:
            return self.value(self.schemas[schema["$ref"].rsplit("/", 1)[1]], depth)
        if "const" in schema or "enum" in schema:
            return rng.choice(schema.get("enum", [schema.get("const")]))
        if "properties" not in schema and (options := schema.get("anyOf") or schema.get("oneOf")):
            return self.value(rng.choice(options), depth)
        kind = schema.get("type")
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                least = schema.get("minItems", 0)
                return [self.value(schema.get("items", {}), depth + 1) for _ in range(rng.randint(least, least + 2))]
            case "string":
                return rng.choice(WORDS) * max(1, schema.get("minLength", 0))
            case "integer":
                least = int(schema.get("minimum", -3))
                return rng.randint(least, min(int(schema.get("maximum", least + 9)), least + 9))
            case "number":
                return rng.uniform(schema.get("minimum", -3), schema.get("maximum", 9))
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
        return self.anything(depth)

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        rng, known = self.rng, schema.get("properties", {})
        if not known:
            return {rng.choice(NAMES): self.anything(depth + 1) for _ in range(rng.randint(0, 4))}
        needed = schema.get("required", ())
        return {
            name: self.value(part, depth + 1)
            for name, part in known.items()
            if name in needed or rng.random() < (0.25 if depth else 0.1)
        }

    def anything(self, depth: int) -> Any:
        """Draw a value from the words and names that some field somewhere has."""
        rng = self.rng
        kind = rng.random() if depth < 5 else 0.0
        if kind < 0.5:
            return rng.choice(WORDS)
        if kind < 0.6:
            return deepcopy(rng.choice(ODD))
        if kind < 0.75:
            return [self.anything(depth + 1) for _ in range(rng.randint(0, 3))]
        return {rng.choice(NAMES): self.anything(depth + 1) for _ in range(rng.randint(0, 4))}

    def broken(self, body: Any) -> Any:
        """The same, another at one place."""
        rng = self.rng
        places = list(_places(body))
        holder, key = rng.choice(places) if places else (None, None)
        if holder is None or rng.random() < 0.02:
            return deepcopy(rng.choice(ODD))
        match rng.randrange(10):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.append(deepcopy(holder[key]))
            case 1 | 2:
                if isinstance(holder, dict):
                    holder[rng.choice(NAMES)] = self.anything(3)
            case 3:
                other, place = rng.choice(places)
                holder[key] = deepcopy(other[place])
            case 4 | 5 if key == "name":
                holder[key] = deepcopy(rng.choice(TOOL_NAMES))
            case 4:
                holder[key] = self.anything(2)
            case 5:
                holder[key] = [holder[key]] if rng.random() < 0.5 else {"type": holder[key]}
            case _:
                holder[key] = deepcopy(rng.choice(ODD))
        return body

    def raw(self, body: Any) -> bytes:
        """Write a body as it is sent; now and then it is no JSON at all."""
        rng = self.rng
        data = json.dumps(body, ensure_ascii=rng.random() < 0.8).encode("utf-8", "surrogatepass")
        if rng.random() < 0.04:
            at = rng.randrange(len(data))
            data = rng.choice([data[:at], data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :], data + data[:at]])
        return data


def _places(value: Any) -> Any:
    """(holder, key) of everything in it."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from _places(item)
