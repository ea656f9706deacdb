"""How choices are written: whole answers, and the events of a stream.

A stream's ordinary event is prebuilt bytes around one JSON string, the new text: nothing else is encoded per token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

import orjson

from deploy.api.generation.choice import Choice, Piece
from deploy.api.job.job import Job
from deploy.api.openai.deltas import REASONING, delta_of, message_of
from deploy.api.openai.prompt_scores import as_vllm, echoed
from deploy.parsing.events import Content, Reasoning
from deploy.text.tokenizer import Tokenizer
from workers.protocol.plan import TopLogprobs

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""
DONE = b"data: [DONE]\n\n"
_MARK = "\x00text\x00"


def event(payload: bytes) -> bytes:
    """A server-sent event."""
    return b"data: " + payload + b"\n\n"


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


def draft_counts(job: Job, choices: Iterable[Choice]) -> dict[str, int]:
    """What became of the drafts of all choices, where the job asks for it, under the names that OpenAI has for
    predictions."""
    if not job.accepted_drafts:
        return {}
    accepted = offered = 0
    for choice in choices:
        accepted += choice.drafts_accepted
        offered += choice.drafts_offered
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": offered - accepted}


def _finite(logprob: float) -> float:
    # The comparison is false for NaN too.
    return logprob if logprob >= LOWEST_LOGPROB else LOWEST_LOGPROB


class Format(Protocol):
    """The shapes of one endpoint."""

    def opening(self, choice: Choice) -> bytes | None:
        """The event that begins a choice's stream, if there is one."""

    def template(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the JSON string of the new text in an ordinary event of choice `index`."""

    def writer(self, index: int) -> Callable[[Piece], bytes]:
        """Writes an ordinary event of choice `index` where its text is told apart."""

    def chunk(self, choice: Choice, text: Piece) -> bytes:
        """An event with everything the choice holds; takes its details and its end along."""

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """What ends a stream once all choices have ended."""

    def answer(self, choices: Sequence[Choice], texts: Sequence[Piece]) -> bytes:
        """The whole answer, not streamed."""


class _Base:
    """What both endpoints share. `request_id` becomes the answer's id, `fingerprint` its own."""

    chunk_object = ""
    answer_object = ""
    prefix = ""

    def __init__(self, job: Job, tokenizer: Tokenizer | None, request_id: str, fingerprint: str) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._head = {
            "id": f"{self.prefix}-{request_id}",
            "object": "",
            "created": int(time.time()),
            "model": job.model,
            "system_fingerprint": fingerprint,
        }

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        body = {**self._head, "object": self.chunk_object, "choices": choices, **more}
        if self._job.include_usage:
            body.setdefault("usage", None)
        return event(orjson.dumps(body))

    def _split(self, choice: dict[str, Any]) -> tuple[bytes, bytes]:
        head, tail = self._event([choice]).split(orjson.dumps(_MARK))
        return head, tail

    def writer(self, index: int) -> Callable[[Piece], bytes]:
        """See `Format`."""
        raise NotImplementedError("only the text of chats is told apart")

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """See `Format`: the counts, where they are asked for, and the word that no more comes."""
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
            return f"token_id:{token}", b""
        raw = self._tokenizer.token_bytes(token)
        return raw.decode("utf-8", "replace"), raw


class CompletionFormat(_Base):
    """/v1/completions."""

    chunk_object = answer_object = "text_completion"
    prefix = "cmpl"

    def __init__(self, job: Job, tokenizer: Tokenizer | None, request_id: str, fingerprint: str) -> None:
        super().__init__(job, tokenizer, request_id, fingerprint)
        self._offset = [0] * len(job.sequences)
        """Characters of each choice's tokens so far (`logprobs.text_offset`)."""

    def _prompt_text(self, choice: Choice) -> str:
        prompt = self._job.prompts[choice.prompt]
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.ids, self._job.skip_special_tokens) if self._tokenizer is not None else ""

    def opening(self, choice: Choice) -> bytes | None:
        """The prompt, when it is to be echoed."""
        if not self._job.echo:
            return None
        logprobs = self._listed(choice, self._echoed(choice)) if self._job.logprobs >= 0 else None
        return self._event(
            [{"index": choice.index, "text": self._prompt_text(choice), **self._open_end, "logprobs": logprobs}]
        )

    _open_end = {"logprobs": None, "finish_reason": None}  # noqa: RUF012

    def template(self, index: int) -> tuple[bytes, bytes]:
        """See `Format`."""
        return self._split({"index": index, "text": _MARK, **self._open_end})

    def _choice(self, choice: Choice, text: Piece, whole: bool = False) -> dict[str, Any]:
        """`whole`: an answer that has the prompt, too."""
        logprobs = None
        if self._job.logprobs >= 0:
            generated = zip(choice.token_ids, choice.logprobs, strict=False)
            logprobs = self._listed(choice, chain(self._echoed(choice) if whole else (), generated))
        head = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        return head | self._of_prompt(choice) | self._details(choice)

    def chunk(self, choice: Choice, text: Piece) -> bytes:
        """See `Format`."""
        return self._event([self._choice(choice, text)])

    def answer(self, choices: Sequence[Choice], texts: Sequence[Piece]) -> bytes:
        """See `Format`."""
        prompts = [self._prompt_text(choice) if self._job.echo else "" for choice in choices]
        counts = usage(self._job, choices)
        bodies = [
            self._choice(choice, prompt + str(text), whole=True)
            for choice, prompt, text in zip(choices, prompts, texts, strict=True)
        ]
        return self._answer(bodies, counts)

    def _of_prompt(self, choice: Choice) -> dict[str, Any]:
        """The field that vLLM's clients ask for, where they do."""
        if (top := self._job.own_prompt_logprobs) < 0 or choice.prompt_scores is None:
            return {}
        ids = self._job.prompts[choice.prompt].ids
        return {"prompt_logprobs": as_vllm(ids, choice.prompt_scores, top, lambda i: self._token(i)[0], _finite)}

    def _echoed(self, choice: Choice) -> Iterable[tuple[int, TopLogprobs | None]]:
        """The prompt's tokens, where it is echoed."""
        if not self._job.echo or choice.prompt_scores is None:
            return ()
        return echoed(self._job.prompts[choice.prompt].ids, choice.prompt_scores, self._job.logprobs)

    def _listed(self, choice: Choice, entries: Iterable[tuple[int, TopLogprobs | None]]) -> dict[str, Any]:
        """OpenAI's four lists; the next ones of a choice continue them."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        hidden = self._tokenizer.special_ids if self._tokenizer and self._job.skip_special_tokens else ()
        for token, logprob in entries:
            text, _ = self._token(token)
            tokens.append(text)
            offsets.append(self._offset[choice.index])
            # A special token that the text leaves out takes no place in it.
            self._offset[choice.index] += 0 if token in hidden else len(text)
            if logprob is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(_finite(logprob.chosen))
            ranked = _ranked(token, logprob, self._job.logprobs)
            # Tokens may share a text (parts of characters do): the most probable one keeps it.
            top = {self._token(other)[0]: _finite(p) for other, p in reversed(ranked)}
            tops.append(top if self._job.logprobs > 0 else None)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


class ChatFormat(_Base):
    """/v1/chat/completions."""

    chunk_object = "chat.completion.chunk"
    answer_object = "chat.completion"
    prefix = "chatcmpl"

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def opening(self, choice: Choice) -> bytes | None:
        """The role."""
        return self._event([self._delta(choice.index, {"role": "assistant", "content": ""})])

    def template(self, index: int) -> tuple[bytes, bytes]:
        """See `Format`."""
        return self._split(self._delta(index, {"content": _MARK}))

    def writer(self, index: int) -> Callable[[Piece], bytes]:
        """See `Format`."""
        content, reasoning = (self._split(self._delta(index, {name: _MARK})) for name in ("content", REASONING))

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

    def chunk(self, choice: Choice, text: Piece) -> bytes:
        """See `Format`."""
        return self._event([self._choice(choice, {"delta": _delta(text)})])

    def answer(self, choices: Sequence[Choice], texts: Sequence[Piece]) -> bytes:
        """See `Format`."""
        counts = usage(self._job, choices)
        bodies = [
            self._choice(choice, {"message": message_of([Content(text)] if isinstance(text, str) else text)})
            for choice, text in zip(choices, texts, strict=True)
        ]
        return self._answer(bodies, counts)

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self._token(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}

    def _logprobs(self, choice: Choice) -> list[dict[str, Any]]:
        top = self._job.logprobs
        return [
            {
                **self._entry(token, logprob.chosen),
                "top_logprobs": [
                    self._entry(other, p) for other, p in zip(logprob.ids[:top], logprob.logprobs[:top], strict=True)
                ],
            }
            for token, logprob in zip(choice.token_ids, choice.logprobs, strict=False)
        ]


def _delta(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, str):
        return {"content": piece} if piece else {}
    return delta_of(piece)


def _ranked(token: int, logprob: TopLogprobs, count: int) -> list[tuple[int, float]]:
    """The `count` most probable tokens, and the chosen one if it is not among them."""
    ranked = list(zip(logprob.ids, logprob.logprobs, strict=True))[:count]
    return ranked if any(other == token for other, _ in ranked) else [*ranked, (token, logprob.chosen)]
