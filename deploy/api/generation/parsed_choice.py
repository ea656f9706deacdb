"""A generated sequence whose text is told apart: reasoning, content, tool calls."""

from __future__ import annotations

from deploy.api.generation.choice import Choice
from deploy.api.job.job import Branch, Job
from deploy.api.job.reading import Reading
from deploy.parsing.events import CallEnd, Event
from deploy.text.tokenizer import Tokenizer
from workers.protocol.messages import RequestOutput


class ParsedChoice(Choice):
    """Takes the engine's outputs, gives events."""

    __slots__ = ("_calls", "_one_call", "_parser")

    def __init__(self, job: Job, branch: Branch, tokenizer: Tokenizer | None, reading: Reading) -> None:
        super().__init__(job, branch, tokenizer)
        self._parser = reading.parser()
        self._one_call = reading.one_call
        self._calls = 0
        """Complete ones."""

    @property
    def finish_reason(self) -> str | None:
        """See `Choice`."""
        return "tool_calls" if self._calls and self.finish == "stop" else self.finish

    def feed(self, output: RequestOutput) -> list[Event]:
        """See `Choice`. Token by token: which ones are reasoning must not depend on how many came at once."""
        tokens = output.tokens
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
                stood=(draft,),
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
        events = parser.push(text) if text else []
        if output.tokens and (reasoning or parser.reasoning):
            self.reasoning_tokens += 1
        if self.finish is not None:
            events += parser.finish()
        for place, event in enumerate(events):
            if isinstance(event, CallEnd):
                self._calls += 1
                if self._one_call:
                    self.finish = "stop"
                    return events[: place + 1]
        return events
