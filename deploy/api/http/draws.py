"""Everything about a request that is drawn at random or read off a clock: its id, the seeds of its sequences, the ids
of its answer, of items in it and of tool calls.

All of it follows from one secret, which is drawn when the request arrives, so that another front which knows the secret
can write the rest of an answer that this one has begun. It does not follow from the request's id, which a client may
choose, and choose again.

A client may resume its stream after its connection broke: a header asks for that, and the ids of events say what was
drawn, and how far each choice was told.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Final

from starlette.types import Scope

from deploy.api.http.errors import ApiError, invalid

SECRET_BYTES: Final = 16
"""Bytes of what a request draws everything else from."""
ASKED: Final = b"x-latentserve-resume"
"""Header of a request whose stream is to have ids, with any value but 0."""
LAST: Final = b"last-event-id"
"""Header of a request that resumes a stream: the id of the last event that came."""
_STATE: Final = rb"\d{1,9}-\d{1,9}-\d{1,4}"
_ID: Final = re.compile(
    rb"([0-9a-f]{%d})\.(\d{1,12})\.([0-9a-f]{8})\.(%s(?:,%s)*),(\d{1,4})" % (2 * SECRET_BYTES, _STATE, _STATE)
)


@dataclass(frozen=True)
class Place:
    """How far a choice has been told."""

    before: int = 0
    """Tokens of it when the events before the newest ones came."""
    tokens: int = 0
    """Its tokens when the newest events came."""
    events: int = 0
    """Number of events that came with these tokens."""


@dataclass(frozen=True)
class Resume:
    """What a client asks that may resume its stream."""

    secret: bytes | None = None
    """Secret of the stream that is resumed; None for a stream that begins."""
    created: float | None = None
    """When it began, Unix time in seconds."""
    checksum: int = 0
    """Of that stream's request."""
    places: tuple[Place, ...] = ()
    """How far each choice was told."""
    closing: int = 0
    """Events behind the last choice's end that came."""
    error: ApiError | None = None
    """Why it cannot be resumed."""


def resume_of(scope: Scope) -> Resume | None:
    """Return what a request asks for; None where it does not ask for a stream that can be resumed."""
    asked, last = False, b""
    for name, value in scope["headers"]:
        if name == ASKED:
            asked = value.strip() not in (b"", b"0")
        elif name == LAST:
            last = value.strip()
    if not asked:
        return None
    if not last:
        return Resume()
    if (found := _ID.fullmatch(last)) is None:
        wrong = "last-event-id: this is no id of an event of this server; leave the header out to begin a new stream"
        return Resume(error=invalid(wrong, "last-event-id", "invalid_event_id"))
    secret, created, checksum, states, closing = found.groups()
    places = tuple(Place(*map(int, state.split(b"-"))) for state in states.split(b","))
    return Resume(bytes.fromhex(secret.decode()), float(created), int(checksum, 16), places, int(closing))


def event_id(secret: bytes, created: float, checksum: int, places: Sequence[Place], closing: int) -> bytes:
    """Write the id of an event behind which a stream can be resumed."""
    states = ",".join(f"{place.before}-{place.tokens}-{place.events}" for place in places)
    return f"{secret.hex()}.{int(created)}.{checksum:08x}.{states},{closing}".encode()


class Draws:
    """What one request draws."""

    __slots__ = ("arrived", "created", "resume", "secret")

    def __init__(self, secret: bytes | None = None, created: float | None = None) -> None:
        """`secret`: that of the front that began the answer, `created`: Unix time at which it did, seconds; both may be
        what a client says that resumes a stream. By default a request that arrives now."""
        self.arrived = time.time()
        """Unix time at which the request arrived at this front, whatever its client says."""
        self.secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
        self.created = self.arrived if created is None else created
        self.resume: Resume | None = None
        """What its client asks that may resume the stream; None for all others."""

    def _drawn(self, what: str, size: int) -> bytes:
        return blake2b(what.encode(), key=self.secret, digest_size=size).digest()

    def hex(self, what: str, size: int = 16) -> str:
        """Draw `size` bytes for `what`, in hexadecimal: the same ones each time, others for everything else."""
        return self._drawn(what, size).hex()

    def seed(self, sequence: int) -> int:
        """Draw the seed of a sequence whose client gives none: 63 bits."""
        return int.from_bytes(self._drawn(f"seed {sequence}", 8), "little") >> 1

    def call_ids(self, choice: int) -> Callable[[], str]:
        """Return a function that draws the ids of a choice's tool calls, one after the other."""
        numbers = count()
        return lambda: f"call_{self.hex(f'call {choice} {next(numbers)}', 12)}"
