"""Writing completions and chats in OpenAI's shapes: whole answers, and the events of a stream.

A stream's ordinary event is prebuilt bytes around one JSON string, the new text: nothing else is encoded per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import orjson
from typing_extensions import override

from deploy.api.generation.choice import Choice, Piece, draft_counts
from deploy.api.generation.generate import Format, data_event
from deploy.api.job.job import Job
from deploy.parsing.events import Arguments, CallBegin, CallBroken, CallEnd, Content, Event, Reasoning
from deploy.text.tokenizer import Tokenizer
from workers.protocol.plan import TopLogprobs

LOWEST_LOGPROB = -9999.0
"""Log-probability in place of minus infinity, which JSON lacks."""
DONE = b"data: [DONE]\n\n"
MARK = "\x00text\x00"
"""Mark in place of the text, in an event that is built before there is any."""
REASONING: Final = "reasoning_content"
"""The field that others, too, answer reasoning in."""


def usage(job: Job, choices: Sequence[Choice]) -> dict[str, Any]:
    """Token counts: every prompt once, every choice in full."""
    prompt = sum(len(prompt.ids) for prompt in job.prompts)
    cached, generated, reasoning = [0] * len(job.prompts), 0, 0
    for choice in choices:
        cached[choice.prompt] = max(cached[choice.prompt], choice.cached_tokens)
        generated += choice.generated
        reasoning += choice.reasoning_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(cached)},
        "completion_tokens_details": {"reasoning_tokens": reasoning, **draft_counts(job, choices)},
    }


def finite(logprob: float) -> float:
    """The log-probability as JSON can have it."""
    # The comparison is false for NaN too.
    return logprob if logprob >= LOWEST_LOGPROB else LOWEST_LOGPROB


def token_as_id(token: int) -> str:
    """A token written by its id, as vLLM does."""
    return f"token_id:{token}"


def most_probable(logprob: TopLogprobs, count: int, named: Sequence[int]) -> list[tuple[int, float]]:
    """The `count` most probable tokens with their log-probabilities, then those of `named` that are not among them."""
    ranked = list(zip(logprob.ids[:count], logprob.logprobs[:count], strict=True))
    if not logprob.named:
        return ranked
    listed = {token for token, _ in ranked}
    return ranked + [entry for entry in zip(named, logprob.named, strict=True) if entry[0] not in listed]


class AnswerFormat(Format):
    """Base of the formats of completions and chats. `request_id` becomes the answer's id, `fingerprint` its own."""

    chunk_object = ""
    answer_object = ""
    prefix = ""

    def __init__(self, job: Job, tokenizer: Tokenizer | None, request_id: str, fingerprint: str) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._begun: list[Choice] = []
        """Choices of a stream that have begun."""
        self._head = {
            "id": f"{self.prefix}-{request_id}",
            "object": "",
            "created": int(job.draws.created),
            "model": job.model,
            "system_fingerprint": fingerprint,
        }

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        body = {**self._head, "object": self.chunk_object, "choices": choices, **more}
        if self._job.include_usage:
            body.setdefault("usage", usage(self._job, self._begun) if self._job.counts_in_events else None)
        return data_event(orjson.dumps(body))

    def _split(self, choice: dict[str, Any]) -> tuple[bytes, bytes]:
        head, tail = self._event([choice]).split(orjson.dumps(MARK))
        return head, tail

    @override
    def writer(self, index: int) -> Callable[[Piece], bytes]:
        raise NotImplementedError("only the text of chats is told apart")

    @override
    def closing(self, choices: Sequence[Choice]) -> bytes:
        """The counts, where they are asked for, and the word that no more comes."""
        counts = self._event([], usage=usage(self._job, choices)) if self._job.include_usage else b""
        return counts + DONE

    def _answer(self, choices: list[dict[str, Any]], counts: dict[str, Any]) -> bytes:
        return orjson.dumps({**self._head, "object": self.answer_object, "choices": choices, "usage": counts})

    def _details(self, choice: Choice) -> dict[str, Any]:
        """Extension fields of a choice; takes its pending ids."""
        details: dict[str, Any] = {}
        if choice.finish is not None:
            details["stop_reason"] = choice.stop_reason
        if self._job.token_ids:
            details["token_ids"] = choice.token_ids
        if self._job.accepted_drafts:
            details["accepted_drafts"] = choice.accepted_drafts
        choice.token_ids, choice.logprobs, choice.accepted_drafts = [], [], []
        return details

    def _token(self, token: int) -> tuple[str, bytes]:
        if self._tokenizer is None:
            return token_as_id(token), b""
        raw = self._tokenizer.token_bytes(token)
        return raw.decode("utf-8", "replace"), raw

    def _listed_as(self, token: int) -> str:
        """Return the spelling of a token in lists of log-probabilities."""
        return token_as_id(token) if self._job.tokens_as_ids else self._token(token)[0]


class ChatFormat(AnswerFormat):
    """/v1/chat/completions."""

    chunk_object = "chat.completion.chunk"
    answer_object = "chat.completion"
    prefix = "chatcmpl"

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    @override
    def opening(self, choice: Choice) -> bytes | None:
        """The role."""
        self._begun.append(choice)
        return self._event([self._delta(choice.index, {"role": "assistant", "content": ""})])

    @override
    def template(self, index: int) -> tuple[bytes, bytes]:
        return self._split(self._delta(index, {"content": MARK}))

    @override
    def writer(self, index: int) -> Callable[[Piece], bytes]:
        content, reasoning = (self._split(self._delta(index, {name: MARK})) for name in ("content", REASONING))

        def write(piece: Piece) -> bytes:
            if isinstance(piece, list) and len(piece) == 1:  # the common cases, made short
                event = piece[0]
                if isinstance(event, Content):
                    return content[0] + orjson.dumps(event.text) + content[1]
                if isinstance(event, Reasoning):
                    return reasoning[0] + orjson.dumps(event.text) + reasoning[1]
            return self._event([self._delta(index, _delta(piece))])

        return write

    def _choice(self, choice: Choice, text: dict[str, Any]) -> dict[str, Any]:
        logprobs = {"content": self._logprobs(choice), "refusal": None} if self._job.logprobs >= 0 else None
        return {
            "index": choice.index,
            **text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        } | self._details(choice)

    @override
    def chunk(self, choice: Choice, text: Piece) -> bytes:
        return self._event([self._choice(choice, {"delta": _delta(text)})])

    @override
    def answer(self, choices: Sequence[Choice], texts: Sequence[Piece]) -> bytes:
        counts = usage(self._job, choices)
        bodies = [
            self._choice(choice, {"message": message_of([Content(text)] if isinstance(text, str) else text)})
            for choice, text in zip(choices, texts, strict=True)
        ]
        return self._answer(bodies, counts)

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        _, raw = self._token(token)
        return {"token": self._listed_as(token), "logprob": finite(logprob), "bytes": list(raw)}

    def _logprobs(self, choice: Choice) -> list[dict[str, Any]]:
        top = self._job.logprobs
        return [
            {
                **self._entry(token, logprob.chosen),
                "top_logprobs": [self._entry(other, p) for other, p in most_probable(logprob, top, self._job.named)],
            }
            for token, logprob in zip(choice.token_ids, choice.logprobs, strict=False)
        ]


def _delta(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, str):
        return {"content": piece} if piece else {}
    return delta_of(piece)


def delta_of(events: Iterable[Event]) -> dict[str, Any]:
    """The `delta` of an event of a stream. Where a call turns out to be none, the client has begun to hear of it; its
    text comes as content, too."""
    texts: dict[str, str] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, Content):
            texts["content"] = texts.get("content", "") + event.text
        elif isinstance(event, Reasoning):
            texts[REASONING] = texts.get(REASONING, "") + event.text
        elif isinstance(event, CallBegin):
            calls[event.index] = _call(event)
        elif isinstance(event, Arguments):
            call = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += event.text
    return {**texts, "tool_calls": list(calls.values())} if calls else dict(texts)


def message_of(events: Iterable[Event]) -> dict[str, Any]:
    """The `message` of a whole answer. Calls that are not complete are none."""
    texts: dict[str, list[str]] = {"content": [], REASONING: []}
    calls: dict[int, dict[str, Any]] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, Content):
            texts["content"].append(event.text)
        elif isinstance(event, Reasoning):
            texts[REASONING].append(event.text)
        elif isinstance(event, CallBegin):
            calls[event.index], arguments[event.index] = _call(event), []
        elif isinstance(event, Arguments):
            arguments[event.index].append(event.text)
        elif isinstance(event, CallEnd):
            calls[event.index]["function"]["arguments"] = "".join(arguments[event.index])
        elif isinstance(event, CallBroken):
            del calls[event.index]
    content = "".join(texts["content"])
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if texts[REASONING]:
        message[REASONING] = "".join(texts[REASONING])
    if calls:
        message["tool_calls"] = [
            {name: value for name, value in call.items() if name != "index"} for call in calls.values()
        ]
    return message


def _call(event: CallBegin) -> dict[str, Any]:
    function = {"name": event.name, "arguments": ""}
    return {"index": event.index, "id": event.id, "type": "function", "function": function}
