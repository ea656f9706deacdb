"""Streams that their clients can resume after their connection broke: the header that asks for it, and what the ids of
events say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from starlette.types import Scope

from deploy.api.http.errors import ApiError, invalid

SECRET_BYTES: Final = 16
"""Bytes of what a request draws everything else from (`deploy.api.http.draws`)."""
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
