"""Chats with DeepSeek V4, which comes without a chat template: as the program writes them that DeepSeek publishes
beside the weights, `encoding/encoding_dsv4.py`, with examples of what it writes.

The sentences that describe tools and effort are part of the format: the models were trained on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from deploy.text.chat import ChatTemplateError, tool_results_in_order
from deploy.text.deepseek_chat import ASSISTANT, BEGIN, CLOSE, END, OPEN, USER, Messages, Tools, as_json, dsml_call

REMINDER: Final = "<｜latest_reminder｜>"
EFFORTS: Final = (None, "high", "max")
"""Values of `reasoning_effort`; with the last alone another prompt is written."""

_MOST: Final = """\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, \
and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""

_TOOLS: Final = """\
## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{tools}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


def encode_v4(
    messages: Messages,
    tools: Tools = (),
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt of a chat with DeepSeek V4. The arguments of calls are objects.

    The variable `thinking`, or `enable_thinking`, has the model think, and `reasoning_effort` "max" think at length.
    What it thought is written behind the last question alone, or, where there are tools or `drop_thinking` is false,
    everywhere. What users say and what tools return is one turn as long as no answer comes between. A `developer` turn
    that is answered, or is to be answered, is the turn of a user that holds the tools, as for V3.2; any other is a
    system message. Two things differ from the published program: an answer is opened behind a system message, too, and
    an empty line stands before a system message that follows a question.

    ChatTemplateError for an effort or a role that it does not know.
    """
    return _V4(messages, tools, variables or {}, add_generation_prompt, continue_final_message).written()


class _Turn:
    """Messages that are written as one: a user's and tools' that follow each other, or any other one."""

    def __init__(self, role: str, first: Mapping[str, Any]) -> None:
        self.role = role
        self.messages = [first]

    @property
    def asks(self) -> bool:
        """Whether an answer belongs behind it."""
        return self.role in ("user", "developer")


class _V4:
    """Chat with DeepSeek V4, as text."""

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
        self._effort = variables.get("reasoning_effort")
        if self._effort not in EFFORTS:
            raise ChatTemplateError(f"DeepSeek V4 knows the efforts high and max, not {self._effort!r}")
        self._turns = list(_turns(messages))
        self._thinks = bool(variables.get("thinking", variables.get("enable_thinking", False)))
        self._opens = add_generation_prompt and not continue_final_message
        self._goes_on = continue_final_message
        self._keeps = bool(tools) or variables.get("drop_thinking") is False
        """Whether all that it thought is written, or what it thought behind the last question alone."""
        self._asked = max((index for index, turn in enumerate(self._turns) if turn.asks), default=-1)
        self._tools = _TOOLS.format(tools="\n".join(as_json(tool["function"]) for tool in tools)) if tools else ""
        roles = [turn.role for turn in self._turns]
        self._holder = roles.index("developer") if "developer" in roles else 0 if roles[0] == "system" else -1

    def written(self) -> str:
        """The prompt."""
        pieces = [BEGIN]
        if self._thinks and self._effort == EFFORTS[-1]:
            pieces.append(_MOST)
        if self._tools and self._holder < 0:
            pieces.append("\n\n" + self._tools)
        due = ""
        """What opens the answer to what was said last, as long as it is not written."""
        for index, turn in enumerate(self._turns):
            message = turn.messages[0]
            if turn.role == "assistant" and index and self._turns[index - 1].role == "system":
                due = due or self._opening(index)  # an answer is opened whatever came before
            if turn.role in ("assistant", "latest_reminder"):
                pieces.append(due)
            due = due if turn.role == "system" else self._opening(index + 1) if turn.asks else ""
            tools = f"\n\n{self._tools}" if self._tools and index == self._holder else ""
            if turn.role == "assistant":
                pieces.append(self._answer(index, message))
            elif turn.role == "user":
                pieces.append(USER + "\n\n".join(self._parts(index)))
            else:
                begin = {"system": "\n\n" if due else "", "developer": USER, "latest_reminder": REMINDER}[turn.role]
                pieces.append(begin + message["content"] + tools)
        if self._opens and self._turns[-1].role != "assistant":
            pieces.append(due or self._opening(len(self._turns)))
        return "".join(pieces)

    def _opening(self, index: int) -> str:
        """Return the text that opens an answer which is turn `index`."""
        return ASSISTANT + (OPEN if self._thinks and self._is_thought(index) else CLOSE)

    def _is_thought(self, index: int) -> bool:
        """Whether what the model thought in turn `index` is written, if it thinks at all."""
        return self._keeps or index > self._asked

    def _answer(self, index: int, message: Mapping[str, Any]) -> str:
        thought = ""
        if self._thinks and self._is_thought(index):
            thought = (message.get("reasoning_content") or "") + CLOSE
        calls = [dsml_call(call["function"]) for call in message.get("tool_calls") or ()]
        section = "\n\n<｜DSML｜tool_calls>\n" + "\n".join(calls) + "\n</｜DSML｜tool_calls>" if calls else ""
        last = index + 1 == len(self._turns)
        return f"{thought}{message['content']}{section}{'' if last and self._goes_on else END}"

    def _parts(self, index: int) -> Iterator[str]:
        """What a user said and tools returned, the latter in the order of the calls before them."""
        messages = self._turns[index].messages
        before = (turn.messages[0].get("tool_calls") for turn in reversed(self._turns[:index]))
        results = [message for message in messages if message["role"] == "tool"]
        in_order = iter(tool_results_in_order(next((calls for calls in before if calls), ()), results))
        for message in messages:
            if message["role"] == "tool":
                yield f"<tool_result>{next(in_order)['content']}</tool_result>"
            else:
                yield message["content"]


def _turns(messages: Messages) -> Iterator[_Turn]:
    turn: _Turn | None = None
    for index, message in enumerate(messages):
        role: str = message["role"]
        if role == "developer" and index + 1 < len(messages) and messages[index + 1]["role"] != "assistant":
            role = "system"
        if role in ("user", "tool"):
            if turn is not None and turn.role == "user":
                turn.messages.append(message)
                continue
            role = "user"
        if role not in ("system", "developer", "user", "assistant", "latest_reminder"):
            raise ChatTemplateError(f"DeepSeek V4 knows no messages of the role {role}")
        if turn is not None:
            yield turn
        turn = _Turn(role, message)
    if turn is not None:
        yield turn
