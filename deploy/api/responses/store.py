"""Conversations that responses can be gone on from: a few, for a while, in the memory of one replica."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from deploy.api.http.errors import ApiError, invalid
from deploy.config.api import ApiConfig

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class _Kept:
    raw: bytes
    """The messages as JSON."""
    until: float


class ResponseStore:
    """By the names of responses, which nobody can guess."""

    def __init__(self, config: ApiConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells the time in seconds."""
        self._most, self._most_bytes = config.stored_responses, config.stored_response_bytes
        self._seconds, self._clock = config.stored_response_s, clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._bytes = 0

    @property
    def on(self) -> bool:
        """Whether any are kept."""
        return self._most > 0

    def keep(self, name: str, messages: Messages) -> None:
        """Keep a conversation with its last answer; the oldest ones make room for it."""
        kept = _Kept(orjson.dumps(messages), self._clock() + self._seconds)
        if not self.on or len(kept.raw) > self._most_bytes:
            return
        self._kept[name] = kept
        self._bytes += len(kept.raw)
        self._forget_expired()
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._forget(next(iter(self._kept)))

    def conversation(self, name: str) -> bytes:
        """The messages up to the end of a response, as JSON; 400 where none are kept, 404 for one that is not known."""
        if not self.on:
            raise invalid(
                "previous_response_id: this server keeps no responses; give the whole conversation as input, or have "
                "whoever runs it set api.stored_responses",
                "previous_response_id",
                "unsupported_parameter",
            )
        self._forget_expired()
        if name not in self._kept:
            raise ApiError(
                404,
                f"previous_response_id: the response {name[:64]!r} is not known, or no more, to this replica, which "
                f"keeps the last {self._most} for {self._seconds:g} s; give the whole conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return self._kept[name].raw

    def _forget_expired(self) -> None:
        now = self._clock()
        while self._kept and next(iter(self._kept.values())).until <= now:
            self._forget(next(iter(self._kept)))

    def _forget(self, name: str) -> None:
        self._bytes -= len(self._kept.pop(name).raw)
