"""/v1/completions: its prompts, and how its answers are written. Log-probabilities of prompts come in OpenAI's form, as
`echo` with `logprobs` asks for, or in vLLM's, as `prompt_logprobs` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from typing_extensions import override

from deploy.api.generation.choice import Choice, Piece
from deploy.api.http.body import Incoming
from deploy.api.http.errors import invalid
from deploy.api.job.bodies import CompletionBody
from deploy.api.job.constraint import UNCONSTRAINED, requested_grammar
from deploy.api.job.job import Job, Prompt, build_job, check_limits, with_defaults
from deploy.api.job.model import ServedModel
from deploy.api.limits.admission import Admission
from deploy.api.openai.format import MARK, AnswerFormat, finite, most_probable, usage
from deploy.text.tokenizer import Tokenizer
from workers.protocol.plan import TopLogprobs
from workers.protocol.scores import Scores


async def completion_job(body: CompletionBody, incoming: Incoming, model: ServedModel, admission: Admission) -> Job:
    """Make the job of a completion. 400 for impossible requests, 429 where there is no room."""
    info, tokenizer, config = model.info(), model.tokenizer, model.config
    prompts = await _prompts(body, incoming, model, admission)
    body = with_defaults(body, model.sampling_defaults, info.vocab_size)
    constraint = await requested_grammar(body, tokenizer, info) if body.constrained else UNCONSTRAINED
    most = model.sampling_defaults.get("max_tokens")
    known = (info, tokenizer, config, constraint.grammar, most, incoming.draws)
    return await incoming.work(build_job, body, prompts, *known)


async def _prompts(body: CompletionBody, incoming: Incoming, model: ServedModel, admission: Admission) -> list[Prompt]:
    def check_count(prompts: int) -> None:
        check_limits(body, model.tokenizer, model.config)
        admission.check_size(prompts, body.n)

    values = await incoming.work(parse_prompts, body.prompt, check_count)
    admission.check_capacity(1)  # before the work of tokenizing; counted exactly when the job starts
    texts = [value for value in values if isinstance(value, str)]
    if not texts:
        return [Prompt(tuple(value), None) for value in values if not isinstance(value, str)]
    model.needs_tokenizer("prompt", "; give token ids")
    prompts = await model.encode(texts, body.add_special_tokens, "prompt")
    return [Prompt(ids, text) for ids, text in zip(prompts, texts, strict=True)]


def parse_prompts(value: Any, check_count: Callable[[int], None]) -> list[str] | list[list[int]]:
    """The field `prompt`: a string, a list of strings, a list of ids, or a list of lists of ids. 400 otherwise.

    `check_count` raises for more prompts than there may be, before they are looked at one by one.
    """
    wrong = "prompt: a string, a list of strings, a list of token ids or a list of lists of token ids is expected"
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise invalid(wrong, "prompt", "invalid_type")
    if not value:
        raise invalid("prompt: must not be empty", "prompt", "empty_prompt")
    kinds = set(map(type, value))
    if kinds == {int}:
        check_count(1)
        return [value]
    if kinds not in ({list}, {str}):
        raise invalid(wrong, "prompt", "invalid_type")
    check_count(len(value))
    if kinds == {list} and not all(set(map(type, ids)) <= {int} for ids in value):
        raise invalid(wrong, "prompt", "invalid_type")
    if not all(value):
        raise invalid("prompt: must not be empty", "prompt", "empty_prompt")
    return value


class CompletionFormat(AnswerFormat):
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

    @override
    def opening(self, choice: Choice) -> bytes | None:
        """The prompt, when it is to be echoed."""
        self._begun.append(choice)
        if not self._job.echo:
            return None
        logprobs = self._listed(choice, self._echoed(choice)) if self._job.logprobs >= 0 else None
        return self._event(
            [{"index": choice.index, "text": self._prompt_text(choice), **self._open_end, "logprobs": logprobs}]
        )

    _open_end = {"logprobs": None, "finish_reason": None}  # noqa: RUF012

    @override
    def template(self, index: int) -> tuple[bytes, bytes]:
        return self._split({"index": index, "text": MARK, **self._open_end})

    def _choice(self, choice: Choice, text: Piece, whole: bool = False) -> dict[str, Any]:
        """`whole`: an answer that has the prompt, too."""
        logprobs = None
        if self._job.logprobs >= 0:
            generated = zip(choice.token_ids, choice.logprobs, strict=False)
            logprobs = self._listed(choice, chain(self._echoed(choice) if whole else (), generated))
        head = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        return head | self._of_prompt(choice) | self._details(choice)

    @override
    def chunk(self, choice: Choice, text: Piece) -> bytes:
        return self._event([self._choice(choice, text)])

    @override
    def answer(self, choices: Sequence[Choice], texts: Sequence[Piece]) -> bytes:
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
        return {"prompt_logprobs": as_vllm(ids, choice.prompt_scores, top, lambda i: self._token(i)[0], finite)}

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
            tokens.append(self._listed_as(token))
            offsets.append(self._offset[choice.index])
            # A special token that the text leaves out takes no place in it.
            self._offset[choice.index] += 0 if token in hidden else len(text)
            if logprob is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(finite(logprob.chosen))
            ranked = _ranked(token, logprob, self._job.logprobs, self._job.named)
            # Tokens may share a text (parts of characters do): the most probable one keeps it.
            top = {self._listed_as(other): finite(p) for other, p in reversed(ranked)}
            tops.append(top if self._job.logprobs > 0 or logprob.named else None)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _ranked(token: int, logprob: TopLogprobs, count: int, named: Sequence[int]) -> list[tuple[int, float]]:
    """The `count` most probable tokens, those of `named`, and the chosen one if it is not among them."""
    ranked = most_probable(logprob, count, named)
    return ranked if any(other == token for other, _ in ranked) else [*ranked, (token, logprob.chosen)]


def echoed(ids: Sequence[int], scores: Scores, top: int) -> Iterator[tuple[int, TopLogprobs | None]]:
    """The tokens of a prompt with their log-probabilities and those of the `top` most probable ones; the first token
    has none."""
    yield ids[0], None
    for token, (chosen, _, best, values) in zip(ids[1:], scores.entries(), strict=True):
        yield token, TopLogprobs(chosen, best[:top], values[:top])


def as_vllm(
    ids: Sequence[int], scores: Scores, top: int, text: Callable[[int], str], finite: Callable[[float], float]
) -> list[dict[str, dict[str, Any]] | None]:
    """Write prompt log-probabilities in vLLM's shape. Every token of a prompt but the first has an entry for each of
    the most probable ids and for itself: log-probability, rank and text."""
    places: list[dict[str, dict[str, Any]] | None] = [None]
    for token, (chosen, rank, best, values) in zip(ids[1:], scores.entries(), strict=True):
        entries = {token: (chosen, rank)}
        entries |= {
            other: (value, place) for place, (other, value) in enumerate(zip(best[:top], values, strict=False), 1)
        }
        places.append(
            {
                str(other): {"logprob": finite(value), "rank": place, "decoded_token": text(other)}
                for other, (value, place) in entries.items()
            }
        )
    return places
