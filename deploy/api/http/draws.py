"""Everything about a request that is drawn at random or read off a clock: its id, the seeds of its sequences, the ids
of its answer, of items in it and of tool calls.

All of it follows from one secret, which is drawn when the request arrives, so that another front which knows the secret
can write the rest of an answer that this one has begun. It does not follow from the request's id, which a client may
choose, and choose again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from hashlib import blake2b
from itertools import count

from deploy.api.http.resume import SECRET_BYTES, Resume


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
