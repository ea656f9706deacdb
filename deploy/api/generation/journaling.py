"""Journals of answers, from which another front writes the rest of an answer when the one that began it has died.

A journal has what the front does not lose otherwise: the request, what it drew, and the outputs of the engine in the
order in which each choice was given them. Whoever runs fronts side by side leaves in the scope of a request a function
that opens a journal (`OPEN`); without one nothing is kept.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, Protocol
from zlib import crc32

from deploy.api.job.job import Job
from workers.protocol.front import Engine
from workers.protocol.messages import Request, RequestOutput
from workers.protocol.request import Prompt

OPEN: Final = "latentserve.journal"
"""Key in a request's scope of the function that opens its journal (`OpenJournal`)."""
CONVERSATION: Final = "latentserve.conversation"
"""Key in a request's scope of what an endpoint kept by itself and the answer goes on from, as JSON."""


class Journal(Protocol):
    """Journal of one answer."""

    age_s: float | None
    """Seconds since the request arrived at the front that began its answer; None at that front."""

    def outputs(self, choice: int) -> Sequence[RequestOutput]:
        """Return the outputs that earlier fronts gave a choice. They are given to it again, first of all."""

    def feeder(self, choice: int) -> Callable[[RequestOutput], object]:
        """Return a function that takes down an output of a choice. It is called before anything that follows from the
        output is sent."""

    @property
    def write_piece(self) -> WritePiece | None:
        """Writes a piece of a stream straight to the client; None where there is nothing that could."""

    def repeated(self, choice: int, ended: bool) -> None:
        """A choice has been given all outputs of earlier fronts, and what follows from them was sent. `ended`: no
        others follow."""


WritePiece = Callable[[bytes], bool]
"""Writes a piece in the middle of a chunked answer, and returns whether it did. Not while the client is slow, before
the answer has begun or after its end: then it must be sent."""
OpenJournal = Callable[[int, int, bool], Journal | None]
"""Opens the journal of the request: of a checksum of its prompts, the number of its choices, and whether it is a stream
of one choice that shows nothing of its tokens but their text and number. None where no journal can be kept. EngineFault
where the front that began the answer made other prompts of the request."""


def opened(opening: OpenJournal, job: Job, ordinary: bool) -> Journal | None:
    """Open the journal of an answer that is about to be made; None where none is kept. `opening`: what the request's
    scope has for it. `ordinary`: a stream of one choice that shows nothing of its tokens but their text and number."""
    checksum = 0
    for prompt in job.prompts:
        checksum = crc32(Prompt.of(prompt.ids).packed, checksum)
    return opening(checksum, len(job.sequences), ordinary)


async def continued(journal: Journal, choice: int, engine: Engine, request: Request) -> AsyncIterator[RequestOutput]:
    """Yield the outputs that earlier fronts gave a choice, then those of the engine, which is asked for the rest."""
    ended = True
    outputs: Any = None
    try:
        for output in journal.outputs(choice):
            yield output
        ended = False
        journal.repeated(choice, ended=False)
        outputs = engine.generate(request)
        async for output in outputs:
            yield output
    finally:
        if ended:  # by a stop string, say, of which the engine knows nothing
            journal.repeated(choice, ended=True)
        if outputs is not None:
            await outputs.aclose()
