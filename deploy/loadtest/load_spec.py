"""A load: its settings, and the requests that it consists of."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, model_validator

from deploy.loadtest.sessions import Session
from workers.config import Flag

Api = Literal["completions", "chat"]

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room"
)
MOST_RANDOM: Final = 100
"""Requests, where neither a number nor a trace is given."""


class Load(BaseModel):
    """Requests of a load and their rate, whatever the endpoint. Fields with a `Flag` are options of the commands."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    rate: Annotated[float | None, Field(gt=0), Flag(panel=None)] = None
    """Requests (or sessions) a second, Poisson arrivals."""
    concurrency: Annotated[int | None, Field(ge=1), Flag(default="1", panel=None)] = None
    """Requests (or sessions) in flight at all times."""
    requests: Annotated[int | None, Field(ge=1), Flag(default=f"{MOST_RANDOM}; all of a trace", panel=None)] = None
    """Requests to send; of a trace, sessions."""
    input: Annotated[int, Field(ge=1), Flag(panel=None)] = 256
    """Prompt tokens of every request (words, where the prompt is text)."""
    output: Annotated[int, Field(ge=1), Flag(panel=None)] = 128
    """Tokens to generate for every request."""
    trace: Annotated[Path | None, Flag(panel=None)] = None
    """Send the sessions of this file (JSON lines or ShareGPT's JSON) in place of random prompts."""
    chat: Annotated[bool, Flag(panel=None)] = False
    """Use /v1/chat/completions; prompts are words."""
    text: Annotated[bool, Flag(panel=None)] = False
    """Send words, for an endpoint that takes no token ids."""
    vocab: Annotated[int, Field(ge=2), Flag(panel=None)] = 1000
    """Token ids of prompts are drawn below this."""
    temperature: Annotated[float, Field(ge=0), Flag(panel=None)] = 0.0
    """0 is greedy."""
    stop_at_eos: Annotated[bool, Flag(panel=None)] = False
    """Let end-of-sequence tokens end a request (ignore_eos is not sent)."""
    token_ids: Annotated[bool, Flag(panel=None)] = False
    """Ask for the tokens' ids (return_token_ids), so that those without a text of their own are seen, too."""
    seed: Annotated[int, Flag(panel=None)] = 0
    """Makes prompts and arrivals repeatable."""
    warmup: Annotated[int, Field(ge=0), Flag(panel=None)] = 1
    """Requests before the clock starts."""
    timeout_s: Annotated[float, Field(ge=0.001), Flag("--timeout", panel=None)] = 600.0
    """Longest time that a request may take before it is given up."""
    slo_ttft_ms: Annotated[float | None, Field(ge=0), Flag("--slo-ttft", panel=None)] = None
    """Goodput: longest wait for a request's first token."""
    slo_gap_ms: Annotated[float | None, Field(ge=0), Flag("--slo-gap", panel=None)] = None
    """Goodput: longest gap between events of a stream."""
    sessions: SkipValidation[tuple[Session, ...]] = Field(default=(), repr=False)
    """Sessions of the trace. All of them are sent, as chats; `rate` and `concurrency` then count sessions."""

    @model_validator(mode="after")
    def _one_pace(self) -> Self:
        if self.rate is not None and self.concurrency is not None:
            raise ValueError("give --rate (open loop) or --concurrency (closed loop), not both")
        return self

    @property
    def in_flight(self) -> int:
        """Requests, or sessions, in flight in a closed loop."""
        return self.concurrency or 1

    @property
    def total(self) -> int:
        """Requests of a run in which none fails."""
        return sum(map(len, self.sessions)) if self.sessions else self.requests or MOST_RANDOM

    @property
    def api(self) -> Api:
        """The OpenAI API, of two, that requests go to."""
        return "chat" if self.chat or self.sessions else "completions"

    @property
    def path(self) -> str:
        """Path of the requests below the base URL."""
        return "/v1/chat/completions" if self.api == "chat" else "/v1/completions"

    def at(self, url: str, model: str, api_key: str | None) -> LoadSpec:
        """Return this load for an endpoint."""
        return LoadSpec.model_construct(**dict(self), url=url, model=model, api_key=api_key)


class LoadSpec(Load):
    """A load for an endpoint."""

    url: str
    model: str
    api_key: str | None = Field(default=None, repr=False)

    def body(self, index: int) -> bytes:
        """The JSON of request `index`: a function of the seed and the index."""
        rng = random.Random(f"{self.seed}-{index}")
        prompt: str | list[int]
        if self.text or self.api == "chat":
            prompt = " ".join(rng.choices(WORDS.split(), k=self.input))
        else:
            prompt = [rng.randrange(min(10, self.vocab - 1), self.vocab) for _ in range(self.input)]
        if self.api == "chat":
            return self._asking({"messages": [{"role": "user", "content": prompt}]}, self.output)
        return self._asking({"prompt": prompt}, self.output)

    def session_turn(self, messages: list[dict[str, str]], output: int | None) -> bytes:
        """The JSON of a turn of a session."""
        return self._asking({"messages": messages}, output or self.output)

    def _asking(self, what: dict[str, Any], output: int) -> bytes:
        asked: dict[str, Any] = {
            "model": self.model,
            **what,
            "max_tokens": output,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self.stop_at_eos:
            asked["ignore_eos"] = True
        if self.token_ids:
            asked["return_token_ids"] = True
        return json.dumps(asked).encode()
