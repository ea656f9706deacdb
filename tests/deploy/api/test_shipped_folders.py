"""Model folders as their makers ship them, at toy size: the fields of their config.json, generation_config.json and
tokenizer_config.json, and chat templates that write what the published ones do, as far as these are known. Each chats
with tools, and thinks, through the openai and the anthropic client; what reaches the engine is what the makers' own way
gives."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jinja2
import openai
import pytest
from fake_engine import INFO, FakeEngine, say, serving
from published_configs import AXK1, AXK2, GLM, GLM52, HY4, K2, K25, SMALL4, V3, V32
from published_configs import YOUTU as YOUTU_CONFIG
from test_deepseek_chat import V31_SECTION
from test_tiktoken import CODE, TOKENS
from tiny_tokenizer import backend
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tool_templates import AX, DEEPSEEK_R1_CALLS, DEEPSEEK_V31_WITHOUT_TOOLS, KIMI, KIMI_K25, MISTRAL_STRICT, YOUTU
from tool_templates import GLM as GLM_TEMPLATE
from tool_templates import HY4 as HY4_TEMPLATE
from transformers import PreTrainedTokenizerFast

from deploy.api.app import create_app
from deploy.api.job.defaults import read_defaults
from deploy.config.api import ApiConfig
from deploy.text.tokenizer import Tokenizer
from workers.families.registry import load_config
from workers.protocol.messages import Request

Messages = Sequence[Mapping[str, Any]]
SCHEMA: Any = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA},
}
SYSTEM, QUESTION, THOUGHT, SAID, RESULT, ANSWER = (
    "Be brief.",
    "Is it wet?",
    "I look it up.",
    "A moment.",
    "Rain",
    "Yes.",
)
ARGUMENTS = '{"city": "Köln"}'
BEGIN, END, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
OF_DEEPSEEK = (
    BEGIN, END, USER, ASSISTANT, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip
OF_KIMI = (
    "[BOS]", "[EOS]", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
OF_GLM = (
    "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
)  # fmt: skip
OF_MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]", "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[THINK]", "[/THINK]",
)  # fmt: skip
OF_YOUTU = ("<|begin_of_text|>", "<|end_of_text|>", "<|User|>", "<|Assistant|>")
OF_CHATML = ("<|im_start|>", "<|im_end|>")
OF_HY4 = ("<|end|>", "<system>", "<user>", "<assistant>")
TAGS = ("<think>", "</think>")
OF_V3 = {"temperature": 0.6, "top_p": 0.95}
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>"
)
DECLARED = """\
# Tools

## functions
namespace functions {
// The weather.
type weather = (_: {
  city: string
}) => any;
}
"""
"""Declaration of the tool as the published tool_declaration_ts.py writes it."""


def by_name(value: Any) -> Any:
    return json.loads(json.dumps(value, sort_keys=True))


def as_objects(messages: Messages) -> list[dict[str, Any]]:
    """Messages whose calls have their arguments as objects, for templates that want them so."""
    return [
        {**m, "tool_calls": [{**c, "function": {"name": "weather", "arguments": json.loads(ARGUMENTS)}} for c in calls]}
        if (calls := m.get("tool_calls"))
        else {**m}
        for m in messages
    ]


def of_v31(messages: Messages) -> list[dict[str, Any]]:
    """Return the messages with the tool in the system message, as the model card of V3.1 has it."""
    head, tail = V31_SECTION.split("### f\n")[0], V31_SECTION[V31_SECTION.index("\n\nIMPORTANT") :]
    tool = f"### weather\nDescription: The weather.\n\nParameters: {json.dumps(SCHEMA)}"
    return [{**messages[0], "content": f"{SYSTEM}{head}{tool}{tail}"}, *map(dict, messages[1:])]


def of_r1(messages: Messages) -> list[dict[str, Any]]:
    """The same with R1's calls; a message with calls says nothing besides."""
    [system, *rest] = of_v31(messages)
    form = "function<｜tool▁sep｜>tool_call_name\n```json\ntool_call_arguments\n```"
    system["content"] = system["content"].replace("tool_call_name<｜tool▁sep｜>tool_call_arguments", form)
    made = [system]
    for message in rest:
        if calls := message.pop("tool_calls", None):
            made += [message, {**message, "content": None, "tool_calls": calls}]
        else:
            made.append(message)
    return made


@dataclass(frozen=True)
class Shipped:
    """One of the folders."""

    config: dict[str, Any]
    special: tuple[str, ...]
    ends: tuple[str, ...]
    """The tokens that end an answer, by config.json and generation_config.json together."""
    template: str | None
    call: str
    opens: bool
    """Whether the prompt opens the model's reasoning."""
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    inline: bool = False
    """The template stands in tokenizer_config.json."""
    tiktoken: bool = False
    ends_in_config: int = 1
    """Number of `ends` that config.json has; generation_config.json has the others."""
    thinks: dict[str, Any] = field(default_factory=dict)
    """The variables with which the makers have it think."""
    prepared: Callable[[Messages], list[dict[str, Any]]] = lambda messages: [*map(dict, messages)]
    """Changes that the makers' code makes to messages before the template gets them."""
    tools: tuple[Any, ...] = (TOOL,)
    more: dict[str, Any] = field(default_factory=dict)
    """Further variables of the makers' code."""
    adds_bos: bool = False
    begin: str = BEGIN
    """The token that begins a text."""
    writes: str = ""
    """Where the prompt does not open the model's reasoning: how the model writes that by itself."""
    by_transformers: bool = False
    """Whether the makers' own way is `apply_chat_template` of the folder's tokenizer."""

    off: dict[str, Any] = field(default_factory=dict)
    """The variables with which they have it not think, where that was tried."""

    @property
    def begins(self) -> bool:
        """Whether chats begin with `begin`."""
        return self.adds_bos or "bos_token" in (self.template or "")

    @property
    def reasons(self) -> bool:
        """Whether the model thinks."""
        return self.opens or bool(self.writes)

    def write(self, folder: Path) -> Path:
        names = [*self.special, *TAGS]
        declared: dict[str, Any] = {**self.tokenizer_config}
        if self.tiktoken:
            lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(TOKENS)]
            (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
            (folder / "tokenization_kimi.py").write_text(CODE)
            declared["added_tokens_decoder"] = {
                str(len(TOKENS) + at): {"content": name, "special": name not in TAGS} for at, name in enumerate(names)
            }
        else:
            copy = Backend.from_str(backend().to_str())
            copy.post_processor = None
            copy.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in self.special])
            copy.add_tokens([AddedToken(name, special=False, normalized=False) for name in TAGS])
            (folder / "tokenizer.json").write_text(copy.to_str())
        if self.template is not None and self.inline:
            declared["chat_template"] = self.template
        elif self.template is not None:
            (folder / "chat_template.jinja").write_text(self.template)
        (folder / "tokenizer_config.json").write_text(json.dumps(declared))
        tokenizer = Tokenizer.load(folder)
        assert tokenizer is not None
        ids = [tokenizer.encode(name, add_special_tokens=False)[0] for name in self.ends]
        first, rest = ids[: self.ends_in_config], ids[self.ends_in_config :]
        config = deepcopy(self.config)
        text = config.get("text_config", config)
        text["eos_token_id"], text["vocab_size"] = first if len(first) > 1 else first[0], tokenizer.size
        (folder / "config.json").write_text(json.dumps(config))
        generation = {**self.generation_config, **({"eos_token_id": rest} if rest else {})}
        (folder / "generation_config.json").write_text(json.dumps(generation))
        return folder


DEEPSEEK_V31 = DEEPSEEK_V31_WITHOUT_TOOLS.replace("{{ ns.system }}", "{{ bos_token }}{{ ns.system }}")
KIMI_K2 = KIMI.replace("{{ '<think></think>' if thinking is false else '<think>' }}", "").replace(
    "{%- if message['reasoning_content'] -%}<think>{{ message['reasoning_content'] }}</think>{%- endif -%}", ""
)
"""Template of a Kimi model that does not think."""
DEEPSEEK_TOKENIZER = {
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": {"__type": "AddedToken", "content": BEGIN, "lstrip": False, "normalized": True, "special": True},
    "eos_token": {"__type": "AddedToken", "content": END, "lstrip": False, "normalized": True, "special": True},
    "model_max_length": 131072,
    "tokenizer_class": "LlamaTokenizerFast",
}
KIMI_TOKENIZER = {
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "tokenizer_class": "TikTokenTokenizer",
}
GLM_TOKENIZER = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizer"}
DEEPSEEK = Shipped(
    V3, OF_DEEPSEEK, (END,), None, "", True, DEEPSEEK_TOKENIZER,
    {"do_sample": True, **OF_V3}, adds_bos=True,
)  # fmt: skip
OF_K2 = Shipped(
    K2, OF_KIMI, ("[EOS]", "<|im_end|>"), KIMI, KIMI_CALL, True, KIMI_TOKENIZER, {"max_length": 128000},
    tiktoken=True, tools=(by_name(TOOL),), thinks={"thinking": True},
)  # fmt: skip
OF_GLM_5 = Shipped(
    GLM52, OF_GLM, ("<|endoftext|>", "<|user|>", "<|observation|>"), GLM_TEMPLATE,
    "<tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call>", True, GLM_TOKENIZER,
    {"do_sample": True, "temperature": 1.0, "top_p": 0.95}, ends_in_config=3, prepared=as_objects,
    thinks={"enable_thinking": True},
)  # fmt: skip
HERMES_CALL = f'\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
OF_AX = Shipped(
    AXK1, OF_CHATML, ("<|im_end|>",), AX, HERMES_CALL, True, {"eos_token": "<|im_end|>"}, thinks={"thinking": True},
    off={"thinking": False}, prepared=as_objects, by_transformers=True,
)  # fmt: skip
FOLDERS = {
    "R1": replace(
        DEEPSEEK, template=DEEPSEEK_R1_CALLS, inline=True, prepared=of_r1,
        call="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "V3.1": replace(
        DEEPSEEK, template=DEEPSEEK_V31, inline=True, prepared=of_v31, thinks={"thinking": True},
        call=f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
    ),
    "V3.2": replace(
        DEEPSEEK, config=V32, special=(*OF_DEEPSEEK[:4], "｜DSML｜"),
        call='\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
    ),
    "K2": replace(OF_K2, template=KIMI_K2, opens=False, thinks={}, generation_config={"max_length": 131072}),
    "K2-Thinking": OF_K2,
    "K2.5": replace(OF_K2, config=K25, template=KIMI_K25, more={"tools_ts_str": DECLARED}),
    "GLM-4.7-Flash": replace(OF_GLM_5, config=GLM, generation_config={"temperature": 1.0}),
    "GLM-5": OF_GLM_5,
    "Mistral Small 4": Shipped(
        SMALL4, OF_MISTRAL, ("</s>",), MISTRAL_STRICT,
        f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", False,
        {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}, adds_bos=True, begin="<s>",
        writes="[THINK]{}[/THINK]", thinks={"reasoning_effort": "high"}, off={"reasoning_effort": "none"},
        by_transformers=True,
    ),
    "Youtu-LLM": Shipped(
        YOUTU_CONFIG, OF_YOUTU, ("<|end_of_text|>",), YOUTU, HERMES_CALL, False,
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}, by_transformers=True,
        writes="<think>\n{}\n</think>\n\n", thinks={"enable_thinking": True}, off={"enable_thinking": False},
        begin="<|begin_of_text|>",
        prepared=as_objects,
    ),
    "A.X K1": OF_AX,
    "A.X K2": replace(OF_AX, config=AXK2),
    "Hy4": Shipped(
        HY4, OF_HY4, ("<|end|>",), HY4_TEMPLATE,
        "<tool_calls><tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call></tool_calls>",
        True, {"eos_token": "<|end|>"}, thinks={"reasoning_effort": "high"}, off={"reasoning_effort": "no_think"},
        prepared=as_objects, by_transformers=True,
    ),
}  # fmt: skip
V32_PUBLISHED = (Path(__file__).parent.parent / "text" / "published" / "deepseek_v32_example.txt").read_text()


class Served:
    """A folder behind the server: its model calls the tool, and answers once the prompt has the result."""

    def __init__(self, shipped: Shipped, folder: Path) -> None:
        self.shipped, self.folder = shipped, shipped.write(folder)
        tokenizer = Tokenizer.load(self.folder)
        assert tokenizer is not None
        self.tokenizer = tokenizer
        self.config = load_config(self.folder)
        info = replace(INFO, name="toy", max_context=1 << 15, vocab_size=tokenizer.size, eos_ids=self.config.eos_ids)
        self.engine = FakeEngine(self.script, info)
        self.app = create_app(self.engine, tokenizer, ApiConfig(), sampling_defaults=read_defaults(self.folder))

    def script(self, request: Request) -> Iterator[Any]:
        prompt = self.tokenizer.decode(list(request.prompt), skip_special_tokens=False)
        text = ANSWER if RESULT in prompt else f"{SAID}{self.shipped.call}"
        thinks = prompt.rstrip().endswith("<think>")  # V3.1 does not behind a result
        thought = f"{THOUGHT}</think>" * thinks + self.shipped.writes.format(THOUGHT)
        ids = self.tokenizer.encode(thought + text, add_special_tokens=False)
        return iter(say(ids, eos=self.config.eos_ids[-1])(request))

    def expected(self, messages: Messages, *, thinks: bool = True, tools: bool = True) -> list[int]:
        """The ids of a prompt by the makers' own way."""
        if self.shipped.template is None:
            return self.tokenizer.encode(v32_prompt(messages), add_special_tokens=False)
        if self.shipped.by_transformers:
            hf = PreTrainedTokenizerFast.from_pretrained(self.folder)
            given = {"tools": [*self.shipped.tools] if tools else None, "add_generation_prompt": True}
            given |= self.shipped.thinks if thinks else self.shipped.off
            ids = hf.apply_chat_template(self.shipped.prepared(messages), return_dict=False, **given)
            return [int(index) for index in ids]
        text = environment().from_string(self.shipped.template)
        prompt = text.render(
            messages=self.shipped.prepared(messages),
            tools=None if self.shipped.prepared in (of_r1, of_v31) else [*self.shipped.tools],
            add_generation_prompt=True,
            bos_token=BEGIN,
            eos_token=END,
            **self.shipped.thinks,
            **self.shipped.more,
        )
        return self.tokenizer.encode(prompt, add_special_tokens=False)


def environment() -> jinja2.Environment:
    """Make the environment for which chat templates are written."""
    made = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    made.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    return made


def v32_prompt(messages: Messages) -> str:
    """Write the prompt as the published example has it: system message, tools, question, thinking, calls and
    results."""
    begin, end = V32_PUBLISHED.index("\n\n## Tools\n"), V32_PUBLISHED.index("<functions>\n") + len("<functions>\n")
    tools = f"{V32_PUBLISHED[begin:end]}{json.dumps(TOOL['function'], ensure_ascii=False)}\n</functions>\n"
    text = f"{BEGIN}{SYSTEM}{tools}{USER}{QUESTION}{ASSISTANT}<think>"
    if len(messages) > 2:
        call = FOLDERS["V3.2"].call
        text += f"{THOUGHT}</think>{SAID}{call}{END}\n\n<function_results>\n<result>{RESULT}</result>\n"
        text += "</function_results>\n\n<think>"
    return text


@pytest.fixture(scope="module", params=FOLDERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(FOLDERS[request.param], tmp_path_factory.mktemp("shipped"))


def turns(served: Served, call_id: str) -> list[dict[str, Any]]:
    """The conversation as the templates get it."""
    call = {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    assistant: dict[str, Any] = {"role": "assistant", "content": SAID, "tool_calls": [call]}
    if served.shipped.reasons:
        assistant["reasoning_content"] = THOUGHT
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
        assistant,
        {"role": "tool", "tool_call_id": call_id, "content": RESULT},
    ]


def check(served: Served, call_id: str) -> None:
    """Check both prompts, and how the answers to them were sampled and ended."""
    first, second = served.engine.requests[-2:]
    messages = turns(served, call_id)
    for request, given in ((first, messages[:2]), (second, messages)):
        assert list(request.prompt) == served.expected(given), served.tokenizer.decode(
            list(request.prompt), skip_special_tokens=False
        )
        text = served.tokenizer.decode(list(request.prompt), skip_special_tokens=False)
        assert text.count(served.shipped.begin) == served.shipped.begins
        sampling = {name: getattr(request.sampling, name) for name in OF_V3}
        assert sampling == {"temperature": 1.0, "top_p": 1.0, **read_defaults(served.folder)}
        assert {*served.config.eos_ids} <= {*request.sampling.stop_ids}


@pytest.mark.parametrize("stream", [False, True])
def test_it_chats_with_tools_through_the_openai_client(served: Served, stream: bool) -> None:
    with (
        serving(served.app) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
    ):
        messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
        asked: dict[str, Any] = {"model": "toy", "tools": [TOOL]}
        if served.shipped.reasons:
            asked["reasoning_effort"] = "high"
        first = said_by(client, {**asked, "messages": messages}, stream)
        assert (first["content"] or "").strip() == SAID
        [call] = first["tool_calls"]
        assert (call["function"]["name"], call["function"]["arguments"]) == ("weather", ARGUMENTS)
        assert first.get("reasoning_content") == (THOUGHT if served.shipped.reasons else None)
        result = {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
        second = said_by(client, {**asked, "messages": [*messages, {**first, "content": SAID}, result]}, stream)
        assert second["content"] == ANSWER
    check(served, call["id"])


def said_by(client: openai.OpenAI, body: dict[str, Any], stream: bool) -> dict[str, Any]:
    """The message of an answer, as the next request has it."""
    if not stream:
        message: dict[str, Any] = client.chat.completions.create(**body).choices[0].message.model_dump()
        return {name: value for name, value in message.items() if value is not None or name == "content"}
    with client.chat.completions.stream(**body) as events:
        for _ in events:
            pass
        message = events.get_final_completion().choices[0].message.model_dump(exclude_none=True)
    for call in message.get("tool_calls", ()):
        call["function"].pop("parsed_arguments", None)
    return {"content": None, **message}


def test_it_chats_with_tools_through_the_anthropic_client(served: Served) -> None:
    with (
        serving(served.app) as port,
        anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0) as client,
    ):
        asked: dict[str, Any] = {
            "model": "toy",
            "max_tokens": 4096,
            "system": SYSTEM,
            "tools": [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}],
        }
        if served.shipped.reasons:
            asked["thinking"] = {"type": "enabled", "budget_tokens": 2048}
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        with client.messages.stream(**asked, messages=messages) as stream:
            first = stream.get_final_message()
        assert [part.type for part in first.content] == ["thinking"] * served.shipped.reasons + ["text", "tool_use"]
        call: Any = first.content[-1]
        assert (first.stop_reason, call.name, call.input) == ("tool_use", "weather", json.loads(ARGUMENTS))
        content: list[Any] = [part.model_dump(exclude_none=True) for part in first.content]
        for part in content:
            if part["type"] == "text":
                part["text"] = part["text"].strip()
        result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        second = client.messages.create(**asked, messages=messages)
        assert [part.text for part in second.content if part.type == "text"] == [ANSWER]
    check(served, call.id)


@pytest.mark.parametrize("served", [name for name, shipped in FOLDERS.items() if shipped.off], indirect=True)
@pytest.mark.parametrize("tools", [False, True])
def test_it_can_be_told_not_to_think(served: Served, tools: bool) -> None:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    with serving(served.app) as port:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            asked: dict[str, Any] = {"model": "toy", "messages": messages, "reasoning_effort": "none"}
            client.chat.completions.create(**asked, **({"tools": [TOOL]} if tools else {}))
        with anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0) as other:
            asked = {"model": "toy", "max_tokens": 64, "system": SYSTEM, "messages": messages[1:]}
            asked["thinking"] = {"type": "disabled"}
            of_anthropic = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
            other.messages.create(**asked, **({"tools": [of_anthropic]} if tools else {}))
    want = served.expected(messages, thinks=False, tools=tools)
    assert want != served.expected(messages, tools=tools)
    assert [list(request.prompt) for request in served.engine.requests[-2:]] == [want, want]


def test_texts_begin_as_the_makers_tokenizer_has_them_begin(served: Served) -> None:
    plain = served.tokenizer.encode("the fox", add_special_tokens=False)
    expected = served.tokenizer.encode(served.shipped.begin, False) * served.shipped.adds_bos + plain
    with serving(served.app) as port:
        url = f"http://127.0.0.1:{port}"
        httpx.post(f"{url}/v1/completions", json={"model": "toy", "prompt": "the fox", "max_tokens": 1})
        assert list(served.engine.requests[-1].prompt) == expected
        assert httpx.post(f"{url}/tokenize", json={"model": "toy", "prompt": "the fox"}).json()["tokens"] == expected
        [card] = httpx.get(f"{url}/v1/models").json()["data"]
    assert card["sampling_defaults"] == read_defaults(served.folder)
    ends = {served.tokenizer.encode(name, False)[0] for name in served.shipped.ends}
    assert {*served.config.eos_ids} == ends
