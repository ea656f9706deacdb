"""One generated sequence on its way to the client: its text, told apart where that is asked for, its end, and its
counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from typing_extensions import override

from deploy.api.http.openapi import Answer
from deploy.api.job.job import Branch, Job
from deploy.api.job.model import Reading
from deploy.parsing.events import CallEnd, Event
from deploy.text.stop import StopMatcher
from deploy.text.tokenizer import Tokenizer
from workers.protocol.front import EngineFault
from workers.protocol.messages import FinishReason, RequestOutput
from workers.protocol.plan import TopLogprobs
from workers.protocol.scores import Scores

Piece = str | list[Event]
"""New part of an answer: text, or the events that a parser found in it."""


def joined(pieces: Sequence[Piece]) -> Piece:
    """Join all pieces of an answer."""
    if not any(isinstance(piece, list) for piece in pieces):
        return "".join(piece for piece in pieces if isinstance(piece, str))
    return [event for piece in pieces if isinstance(piece, list) for event in piece]


class Choice:
    """Takes the engine's outputs, gives text. Tokens are looked at one by one, so that nothing depends on how many of
    them came in one output."""

    __slots__ = (
        "_explicit_stops",
        "_hide_stop_id",
        "_min_tokens",
        "_push",
        "_silent",
        "_stop_ids",
        "_stream",
        "accepted_drafts",
        "cached_tokens",
        "detailed",
        "drafts_accepted",
        "drafts_offered",
        "finish",
        "generated",
        "index",
        "limit",
        "logprobs",
        "prompt",
        "prompt_scores",
        "reasoning_tokens",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, job: Job, branch: Branch, tokenizer: Tokenizer | None) -> None:
        self.index = branch.index
        self.prompt = branch.prompt
        """Index of its prompt in the job."""
        self.generated = 0
        """Tokens generated, a stop id and the tokens of a stop string included."""
        self.limit = branch.sampling.max_tokens
        """Tokens at which it ends."""
        self.cached_tokens = 0
        self.reasoning_tokens = 0
        """Reasoning tokens among those that were generated."""
        self.finish: FinishReason | None = None
        self.stop_reason: str | int | None = None
        """The stop string or the stop token id of the request that ended it, else None."""
        self.prompt_scores: Scores | None = None
        """Log-probabilities and ranks of the prompt's tokens. None unless the job asks for them and the first output
        has come."""
        self.detailed = (
            job.token_ids
            or job.accepted_drafts
            or job.counts_in_events
            or job.logprobs >= 0
            or job.prompt_logprobs >= 0
        )
        """Whether the answer, or each event of it, carries more than text."""
        self.token_ids: list[int] = []
        """Ids of the tokens whose details the client has not been given yet, when `detailed`."""
        self.logprobs: list[TopLogprobs] = []
        """Parallel to `token_ids` when the job asks for them."""
        self.accepted_drafts: list[bool] = []
        """Parallel to `token_ids`: whether each was a draft that was accepted."""
        self.drafts_offered = 0
        """Drafts that were verified for it so far, when `detailed`."""
        self.drafts_accepted = 0
        """Offered drafts that were accepted and are among the generated tokens."""
        self._stream = (
            tokenizer.stream(self._watched(job), job.include_stop, job.skip_special_tokens, job.kept)
            if tokenizer is not None
            else None
        )
        unwatched = self._stream is not None and not self._stream.watched and not self.detailed
        self._push = self._stream.push_unwatched if self._stream is not None and unwatched else None
        self._stop_ids = frozenset(branch.sampling.stop_ids)
        self._explicit_stops = job.stop_token_ids
        self._hide_stop_id = not job.include_stop
        self._silent = job.silent
        self._min_tokens = branch.sampling.min_tokens

    def _watched(self, job: Job) -> tuple[str, ...]:
        """Stop strings that all of the text is watched for."""
        return job.stops

    @property
    def finish_reason(self) -> str | None:
        """`finish` as the answer has it."""
        return self.finish

    def feed(self, output: RequestOutput) -> Piece:
        """Add an output; returns the text it makes certain. `finish` is set once the sequence has ended, perhaps before
        the engine's own end: the caller then leaves the engine's stream.

        EngineFault when the engine gave the sequence up.
        """
        tokens = output.tokens
        if output.prompt is not None:
            self.prompt_scores = output.prompt
        if self._push is not None and output.finish is None and len(tokens) == 1:  # the common case, made short
            self.generated += 1
            if output.cached_tokens:
                self.cached_tokens = output.cached_tokens
            return self._push(tokens[0])
        if output.finish == "cancelled":
            raise EngineFault("the engine cancelled the request")
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        if self._silent:
            self.finish = "length"
            return ""
        stream = self._stream
        # A stop id is one of the tokens but not part of the text, unless asked for.
        stop_id = tokens[-1] if output.finish == "stop" and tokens and tokens[-1] in self._stop_ids else None
        hidden = len(tokens) if stop_id is not None and self._hide_stop_id else 0
        text, used = "", 0
        for token in tokens:
            used += 1
            self.generated += 1
            if stream is None or used == hidden:
                continue
            text += stream.push(token) if self.generated >= self._min_tokens else stream.push_unwatched(token)
            if stream.stop is not None:
                break
        if stream is not None and stream.stop is None and output.finish is not None:
            text += stream.finish()
        if stream is not None and stream.stop is not None:
            self.finish, self.stop_reason = "stop", stream.stop
        elif output.finish is not None:
            self.finish = output.finish
            self.stop_reason = stop_id if stop_id in self._explicit_stops else None
        if self.detailed:
            self.token_ids += tokens[:used]
            self.logprobs += output.logprobs[:used]
            drafts = output.drafts[:used]
            self.accepted_drafts += drafts
            self.drafts_accepted += sum(drafts)
            self.drafts_offered += output.offered
        return text


class ParsedChoice(Choice):
    """A choice whose text is told apart: its pieces are events of reasoning, content and tool calls."""

    __slots__ = ("_calls", "_one_call", "_parser", "_undecided")

    def __init__(self, job: Job, branch: Branch, tokenizer: Tokenizer | None, reading: Reading) -> None:
        super().__init__(job, branch, tokenizer)
        self._parser = reading.parser(job.draws.call_ids(branch.index))
        if job.stops and not reading.stops_in_reasoning:
            self._parser.watch(StopMatcher(job.stops, job.include_stop))
        self._one_call = reading.one_call
        self._undecided = 0
        """Tokens that may be the beginning of an opening tag: they count as reasoning once it is there."""
        self._calls = 0
        """Complete ones."""

    @override
    def _watched(self, job: Job) -> tuple[str, ...]:
        """A stop string may stand in the reasoning: its parser looks for them behind it."""
        return job.stops if job.reading is not None and job.reading.stops_in_reasoning else ()

    @override
    @property
    def finish_reason(self) -> str | None:
        return "tool_calls" if self._calls and self.finish == "stop" else self.finish

    @override
    def feed(self, output: RequestOutput) -> list[Event]:
        """Token by token: which ones are reasoning must not depend on how many came at once."""
        tokens = output.tokens
        straight = self._parser.straight
        if straight is not None and self._push is not None and output.finish is None and len(tokens) == 1:
            self.generated += 1  # the common case, made short
            if output.cached_tokens:
                self.cached_tokens = output.cached_tokens
            if output.prompt is not None:
                self.prompt_scores = output.prompt
            text = self._push(tokens[0])
            return self._counted(straight(text)) if text else []
        if len(tokens) <= 1:
            return self._feed_one(output)
        events: list[Event] = []
        for place, (token, draft) in enumerate(zip(tokens, output.drafts, strict=True)):
            last = place == len(tokens) - 1
            finish, logprobs = output.finish if last else None, output.logprobs[place : place + 1]
            one = RequestOutput(
                output.request_id,
                (token,),
                finish,
                logprobs,
                output.cached_tokens,
                accepted=(draft,),
                offered=0 if place else output.offered,
            )
            events += self._feed_one(one)
            if self.finish is not None:
                break
        return events

    def _feed_one(self, output: RequestOutput) -> list[Event]:
        parser = self._parser
        reasoning = parser.reasoning
        text = super().feed(output)
        assert isinstance(text, str)
        events = parser.push(text, self.generated >= self._min_tokens) if text else []
        if output.tokens:
            self._undecided += 1
            if reasoning or parser.reasoning:
                self.reasoning_tokens += self._undecided
            if reasoning or parser.reasoning or events:
                self._undecided = 0
        if self.finish is not None or parser.stop is not None:
            stopped = self._stream is not None and self._stream.stop is not None
            events += parser.finish(cut=stopped or self.finish != "stop")
            if parser.stop is not None:
                self.finish, self.stop_reason = "stop", parser.stop
        return self._counted(events)

    def _counted(self, events: list[Event]) -> list[Event]:
        """The events as far as they are wanted, with their complete calls counted."""
        for place, event in enumerate(events):
            if isinstance(event, CallEnd):
                self._calls += 1
                if self._one_call:
                    self.finish = "stop"
                    return events[: place + 1]
        return events


def choice_of(job: Job, branch: Branch, tokenizer: Tokenizer | None) -> Choice:
    """The sequence that a branch of a job becomes."""
    if job.reading is None:
        return Choice(job, branch, tokenizer)
    return ParsedChoice(job, branch, tokenizer, job.reading)


class DraftTokens(Answer):
    """Counts of accepted and rejected draft tokens. Both are there if `return_accepted_drafts` asks for them."""

    accepted_prediction_tokens: int = 0
    """Generated tokens that were drafts which were accepted."""
    rejected_prediction_tokens: int = 0
    """Other drafts that were verified. They are no part of what was generated."""


def draft_counts(job: Job, choices: Iterable[Choice]) -> dict[str, int]:
    """Count the accepted and rejected drafts of all choices, under the names that OpenAI has for predictions. Empty
    unless the job asks for them."""
    if not job.accepted_drafts:
        return {}
    accepted = offered = 0
    for choice in choices:
        accepted += choice.drafts_accepted
        offered += choice.drafts_offered
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": offered - accepted}
