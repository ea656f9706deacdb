"""From a body that has come in to what is to be generated: parsed, checked against the tables, templated, tokenized."""

from __future__ import annotations

from typing import TypeVar

from deploy.api.http.body import parse_object, validate
from deploy.api.http.errors import invalid, unsupported
from deploy.api.job.bodies import ChatTemplateFields, CompletionBody, GenerationBody, TokenizeChatBody, TokenizeTextBody
from deploy.api.job.job import Prompt, check_limits, encode, parse_prompts
from deploy.api.job.tools import shown
from deploy.api.job.unsupported import reject_unsupported
from deploy.api.limits.front import Front
from deploy.text.chat import template_message
from deploy.text.errors import ChatTemplateError, ToolsUnknown
from deploy.text.lane import Worker
from deploy.text.tokenizer import Tokenizer

Asked = TypeVar("Asked", bound=GenerationBody)


def needs_tokenizer(front: Front, param: str, instead: str = "") -> Tokenizer:
    """The model's tokenizer; 400 naming `param` where there is none, and what works `instead`."""
    if front.tokenizer is None:
        raise invalid(f"{param}: this model has no tokenizer{instead}", param, "no_tokenizer")
    return front.tokenizer


def render_messages(front: Front, body: ChatTemplateFields) -> str:
    """The prompt text of a chat; 400 when the messages do not fit the template."""
    tokenizer = needs_tokenizer(front, "messages", "; only /v1/completions with token ids works")

    if body.add_generation_prompt and body.continue_final_message:
        raise invalid(
            "continue_final_message: set add_generation_prompt to false with it, they exclude each other",
            "continue_final_message",
        )
    try:
        return tokenizer.render_chat(
            [template_message(message.role, message.content, message.model_dump()) for message in body.messages],
            tools=shown(body.tools) if body.tool_choice != "none" else (),
            template=front.config.chat_template,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            extra=body.chat_template_kwargs,
            control_tokens_in_text=front.config.control_tokens_in_text,
        )
    except ToolsUnknown as error:
        raise unsupported(str(error), "tools" if body.tools else "messages") from None
    except ChatTemplateError as error:
        raise invalid(str(error), "messages") from None


def parse_generation(raw: bytes, kind: type[Asked]) -> Asked:
    """The body of a generating endpoint; 400 for what is wrong with it."""
    value = parse_object(raw)
    body = validate(kind, value)
    reject_unsupported(value)
    return body


def parse_tokenize(raw: bytes) -> TokenizeTextBody | TokenizeChatBody:
    """The body of /tokenize, which comes in two kinds."""
    value = parse_object(raw)
    reject_unsupported(value)
    return validate(TokenizeChatBody, value) if "messages" in value else validate(TokenizeTextBody, value)


async def completion_prompts(front: Front, body: CompletionBody, work: Worker) -> list[Prompt]:
    """The prompts of a completion request; 400 for what cannot be one."""

    def check_count(prompts: int) -> None:
        check_limits(body, front.tokenizer, front.config)
        front.check_size(prompts, body.n)

    values = await work(parse_prompts, body.prompt, check_count)
    front.check_room(1)  # before the work of tokenizing; counted exactly when the job starts
    texts = [value for value in values if isinstance(value, str)]
    if not texts:
        return [Prompt(tuple(value), None) for value in values if not isinstance(value, str)]
    tokenizer = needs_tokenizer(front, "prompt", "; give token ids")
    prompts = await encode(texts, body.add_special_tokens, tokenizer, front.info(), "prompt")
    return [Prompt(ids, text) for ids, text in zip(prompts, texts, strict=True)]
