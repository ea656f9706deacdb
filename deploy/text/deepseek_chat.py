"""Chats as DeepSeek's own code and model cards write them, where a model's folder has no chat template for it.

V3.2 comes without any: DeepSeek publishes a program for it, `encoding/encoding_dsv32.py` beside the weights, with
examples of what it writes. The templates of V3, R1 and V3.1 write calls and their results but not the tools, which the
model card of V3.1 puts at the end of the system message.

The sentences that describe tools are part of the format: the models were trained on them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from deploy.text.chat import ChatTemplateError, tool_results_in_order

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

BEGIN: Final = "<｜begin▁of▁sentence｜>"
END: Final = "<｜end▁of▁sentence｜>"
USER: Final = "<｜User｜>"
ASSISTANT: Final = "<｜Assistant｜>"
OPEN, CLOSE = "<think>", "</think>"

_TOOLS: Final = """\
## Tools
You have access to the following tools:

{tools}

IMPORTANT: ALWAYS adhere to this exact format for tool use:
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>{{additional_tool_calls}}<｜tool▁calls▁end｜>

Where:
- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces"""

_CALL_OF_V31: Final = "tool_call_name<｜tool▁sep｜>tool_call_arguments"
_CALL_OF_V3: Final = "function<｜tool▁sep｜>tool_call_name\n```json\ntool_call_arguments\n```"

_V32_TOOLS: Final = """\
## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to \
the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects \
should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for \
other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
{tools}
</functions>
"""


def with_tools_in_system_message(
    messages: Messages, tools: Tools, fences_arguments: bool = False
) -> list[dict[str, Any]]:
    """Messages for V3.1 whose first system message ends with `tools`; one is put first where there is none.
    `fences_arguments`: for V3 and R1, of which nothing is published that describes tools: V3.1's words, with calls as
    their templates write them."""
    described = "\n\n".join(
        f"### {function['name']}\nDescription: {function.get('description', '')}\n\n"
        f"Parameters: {as_json(function.get('parameters') or {})}"
        for function in (tool["function"] for tool in tools)
    )
    text = "\n\n" + _TOOLS.format(tools=described, call=_CALL_OF_V3 if fences_arguments else _CALL_OF_V31)
    first = next((index for index, message in enumerate(messages) if message["role"] == "system"), None)
    if first is None:
        return [{"role": "system", "content": text}, *map(dict, messages)]
    return [
        {**message, "content": message["content"] + text} if index == first else dict(message)
        for index, message in enumerate(messages)
    ]


def encode_v32(
    messages: Messages,
    tools: Tools = (),
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt of a chat with DeepSeek V3.2. The arguments of calls are objects.

    The variable `thinking`, or `enable_thinking`, has the model think; what it thought is written behind the last
    question only. A `developer` turn that is answered, or is to be answered, is the turn of a user as V3.2 was trained
    on it for search agents: it holds the tools. Any other is a system message, as OpenAI's clients mean it.

    Two things differ from the published program, which would leave the model where no answer of its own begins. System
    messages behind a question or results stand before the beginning of the answer, not within it. And an answer is
    opened behind a system message, too. Behind an answer none is, as there.

    Results without calls before them are the turn of a user. ChatTemplateError for a last message to go on with that is
    none.
    """
    return _V32(messages, tools, variables or {}, add_generation_prompt, continue_final_message).written()


class _V32:
    """Chat with DeepSeek V3.2, as text."""

    def __init__(
        self,
        messages: Messages,
        tools: Tools,
        variables: Mapping[str, Any],
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> None:
        if not messages:
            raise ChatTemplateError("a chat needs a message")
        self._messages = messages
        self._roles = [self._role(index) for index in range(len(messages))]
        self._thinks = bool(variables.get("thinking", variables.get("enable_thinking", False)))
        self._opens = add_generation_prompt and not continue_final_message
        self._goes_on = continue_final_message
        self._asked = max(
            (index for index, role in enumerate(self._roles) if role in ("user", "developer")), default=-1
        )
        self._tools = _V32_TOOLS.format(tools="\n".join(as_json(tool["function"]) for tool in tools)) if tools else ""
        # Where the published examples have the tools: in the developer's turn, else in the system message, which may be
        # empty.
        first_system = 0 if self._roles[0] == "system" else -1
        self._holder = self._roles.index("developer") if "developer" in self._roles else first_system

    def _role(self, index: int) -> str:
        role: str = self._messages[index]["role"]
        if role != "developer":
            return role
        answered = index + 1 == len(self._messages) or self._messages[index + 1]["role"] == "assistant"
        return "developer" if answered else "system"

    def written(self) -> str:
        """The prompt."""
        pieces = [BEGIN]
        if self._tools and self._holder < 0:
            pieces.append("\n\n" + self._tools)
        due = ""
        """What opens the answer to what was said last, as long as it is not written."""
        for index, (role, message) in enumerate(zip(self._roles, self._messages, strict=True)):
            content: str = message["content"]
            tools = f"\n\n{self._tools}" if self._tools and index == self._holder else ""
            if role == "system":
                pieces.append(("\n\n" if due else "") + content + tools)
                if self._roles[index + 1 : index + 2] == ["assistant"]:  # an answer is opened whatever came before
                    due = due or self._opening(index, ASSISTANT)
                continue
            if role == "tool" and index and self._roles[index - 1] == "tool":
                continue
            pieces.append(due)
            due = ""
            if role == "developer":
                pieces.append(f"{USER}{tools}\n\n# The user's message is: {content}")
                due = self._opening(index, ASSISTANT)
            elif role == "user":
                pieces.append(f"{USER}{content}")
                due = self._opening(index, ASSISTANT)
            elif role == "assistant":
                pieces.append(self._answer(index, message))
            elif role == "tool":
                results, due = self._results(index)
                pieces.append(results)
            else:
                raise ChatTemplateError(f"DeepSeek V3.2 knows no messages of the role {role}")
        if self._opens and self._roles[-1] != "assistant":
            pieces.append(due or self._opening(len(self._messages), ASSISTANT))
        return "".join(pieces)

    def _opening(self, index: int, begin: str) -> str:
        """Return the text that opens the answer to message `index`."""
        return begin + (OPEN if self._thinks and index >= self._asked else CLOSE)

    def _answer(self, index: int, message: Mapping[str, Any]) -> str:
        thought = ""
        if self._thinks and index > self._asked:
            thought = (message.get("reasoning_content") or "") + CLOSE
        calls = [dsml_call(call["function"]) for call in message.get("tool_calls") or ()]
        section = ""
        if calls:
            section = "\n\n<｜DSML｜function_calls>\n" + "\n".join(calls) + "\n</｜DSML｜function_calls>"
        last = index + 1 == len(self._messages)
        return f"{thought}{message['content']}{section}{'' if last and self._goes_on else END}"

    def _results(self, index: int) -> tuple[str, str]:
        """The results that follow each other from `index` on, in the order of the calls, and what opens the answer to
        them."""
        end = index
        while end < len(self._roles) and self._roles[end] == "tool":
            end += 1
        calls = self._messages[index - 1].get("tool_calls") if index else None
        results = tool_results_in_order(calls or (), self._messages[index:end])
        written = "".join(f"\n<result>{result['content']}</result>" for result in results)
        section = f"<function_results>{written}\n</function_results>"
        if not calls:  # a client has left the calls out: what is left can be told by a user alone
            return f"{USER}{section}", self._opening(end - 1, ASSISTANT)
        return f"\n\n{section}", self._opening(end - 1, "\n\n")


def dsml_call(function: Mapping[str, Any]) -> str:
    """A call, as V3.2 and V4 write it within a section."""
    arguments = "\n".join(
        f'<｜DSML｜parameter name="{name}" string="{str(isinstance(value, str)).lower()}">'
        f"{value if isinstance(value, str) else as_json(value)}</｜DSML｜parameter>"
        for name, value in function["arguments"].items()
    )
    return f'<｜DSML｜invoke name="{function["name"]}">\n{arguments}\n</｜DSML｜invoke>'


def as_json(value: Any) -> str:
    """JSON as DeepSeek's programs write it."""
    return json.dumps(value, ensure_ascii=False)
