"""Hands the answers of a front that died to others, each to one that goes on with it.

Part of the process of `deploy.serve.watchdog_process`: it imports the standard library and other parts of it alone.
"""

from __future__ import annotations

import os
import select
import time
from typing import TYPE_CHECKING

from deploy.serve import asked_front
from deploy.serve.asked_front import AskedFront
from deploy.serve.held_connection import Held, owned
from deploy.serve.last_words import say
from deploy.serve.newcomers import Newcomers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

HEIR_S = 10.0
"""Seconds until all answers have a front or end: about as long as a front may be silent before its own watchdog ends
it. A stream that waits for a busy front is better than one that ends."""
RELEASED_S = 5.0
"""Seconds in which the kernel releases the locks of a front that died, at the most. It takes some milliseconds, and
longer where others need the processors."""
LOOK_MS = 20
"""Milliseconds between two looks at fronts that could not be handed an answer, and at those that say nothing."""
WAIT_MS = 100
"""The same where no front is there, and all answers wait for one that comes."""


def hand_over(
    held: Sequence[Held],
    heirs: Sequence[str],
    newcomers: Newcomers | None = None,
    finish: Callable[[list[Held]], object] | None = None,
) -> list[Held]:
    """Hand answers that have a journal to fronts of other replicas; returns those that no front goes on with, and that
    `finish` was not given: it gets those that are over while others still wait.

    Every answer is offered to one front first, and to the next one as soon as that one refuses it, dies or says nothing
    of it for `WORD_S`. Answers begin at different fronts, so that these share them. Fronts that say nothing come last,
    all at once, and are heard whenever they speak. After `HEIR_S` none of them is waited for any more: whatever a front
    may have taken without a word is its own, since who owns a journal goes on with its answer.

    An answer that no front refused waits for `newcomers`, which have as long to say something; so does one of which
    fronts that are there say nothing: they may hang. One that a front refused does not: what comes may well be like
    that one, as in an update to other weights, and the answer would end later."""
    newcomers = newcomers or Newcomers("", 0.0, None)
    deadline = time.monotonic() + HEIR_S
    fronts = [AskedFront(heir) for heir in heirs]
    left: dict[int, OfferedAnswer] = {}
    for number, one in enumerate(one for one in held if one.journal is not None):
        first = number % len(fronts) if fronts else 0
        left[number] = OfferedAnswer(number, one, [*fronts[first:], *fronts[:first]], newcomers.needed_by(one))
    known: Sequence[str] = heirs
    unguarded = [one for one in held if one.journal is None]
    try:
        while True:
            late = time.monotonic() >= deadline
            if late or not any(answer.undecided for answer in left.values()):
                if not newcomers.may_come:
                    break
                for answer in left.values() if late else ():
                    answer.pass_by_silent_fronts()
                if not any(answer.undecided or answer.waits for answer in left.values()):
                    break
            for front in map(AskedFront, newcomers.new(known)):
                fronts.append(front)
                deadline = time.monotonic() + HEIR_S
                for answer in left.values():
                    answer.unasked.append(front)
            known = ()
            for answer in left.values():
                answer.offer()
            for front in fronts:
                front.hand()
            _wait_for_a_word(fronts, left.values())
            for front in fronts:
                front.hear()
            for number in [number for number, answer in left.items() if answer.taken]:
                left.pop(number).held.close()
            if finish is not None and not any(answer.undecided for answer in left.values()):
                over = [left.pop(number) for number, answer in [*left.items()] if not answer.waits]
                for answer in over:
                    answer.over = True
                finish([*(answer.held for answer in over), *unguarded])
                unguarded = []
    finally:
        for front in fronts:
            front.close()
    if left:
        asked = ", ".join(front.heir for front in fronts) or "there was none"
        say(f"stream watchdog: answers that no front said it goes on with: {len(left)}; asked: {asked}")
    return [*(answer.held for answer in left.values()), *unguarded]


class OfferedAnswer:
    """An answer that is offered to fronts."""

    def __init__(self, number: int, held: Held, fronts: list[AskedFront], may_wait: bool = True) -> None:
        """`number`: by which fronts speak of it. `fronts`: in the order in which they are asked. `may_wait`: whether it
        needs a front that comes, see `Newcomers`."""
        self.number, self.held = number, held
        self._may_wait = may_wait
        self.unasked, self.asked = fronts, set[AskedFront]()
        """Fronts that are still to be asked, and those that were and have not said whether they take it."""
        self.taken = self.refused = False
        """Whether one of them said that it, or another one, goes on with it; and whether one said that it does not."""
        self.over = False
        """Whether it is ended, and is handed to nobody any more."""
        self._next_at = 0.0
        """When the next one is asked, even if the one before has said nothing."""
        self._locked_until: float | None = time.monotonic() + RELEASED_S

    @property
    def locked(self) -> bool:
        """Whether a front that died may still own it."""
        return self._locked_until is not None

    @property
    def undecided(self) -> bool:
        """Whether a front may still take it, or has to release it."""
        return not self.taken and bool(self.locked or self.asked or self.unasked)

    @property
    def waits(self) -> bool:
        """Whether it is one for a front that comes later."""
        return self._may_wait and not (self.taken or self.refused or self.undecided or self.held.left)

    @property
    def due(self) -> bool:
        """Whether the next front is to be asked now."""
        return bool(self.unasked) and not self.locked and time.monotonic() >= self._next_at

    def offer(self) -> None:
        """Ask the next front, once it is time."""
        now = time.monotonic()
        self.unasked = [front for front in self.unasked if not front.died]
        if self._locked_until is not None:
            # The channel of a front that died may close before its locks are released. A front that was handed the
            # answer in between would find its journal taken, and nobody would go on with it.
            assert self.held.journal is not None
            if (own := owned(self.held.journal)) is not None:
                os.close(own)
            elif now < self._locked_until:
                return
            self._locked_until = None
        if not self.due:
            return
        for front in [front for front in self.unasked if not front.silent][:1] or self.unasked[:]:
            self.unasked.remove(front)
            self.asked.add(front)
            front.take_in(self)
        self._next_at = now + asked_front.WORD_S

    def pass_by_silent_fronts(self) -> None:
        """Wait no longer for fronts that have it and say nothing. They are still heard: one that wakes up may take it,
        and only one front ever owns its journal."""
        self.asked = {front for front in self.asked if not front.silent}

    def said(self, front: AskedFront, goes_on: bool) -> None:
        """A front said whether it, or another one, goes on with it."""
        self.taken |= goes_on
        self.refused |= not goes_on
        self.died(front)

    def died(self, front: AskedFront) -> None:
        """A front that was to be handed it is not there, and the next one is asked."""
        self.asked.discard(front)
        self._next_at = 0.0

    def died_with(self, front: AskedFront) -> None:
        """A front that was handed it died. It may have owned it; so may another one that was, and has not died."""
        self.died(front)
        if not self.asked:
            self._locked_until = time.monotonic() + RELEASED_S


def _wait_for_a_word(fronts: Iterable[AskedFront], answers: Iterable[OfferedAnswer]) -> None:
    """Wait until a front has said something or there is something to do."""
    said = select.poll()
    for front in fronts:
        if front.channel is not None:
            said.register(front.channel, select.POLLIN)
    wait_ms = WAIT_MS
    for answer in answers:
        if not answer.waits:
            wait_ms = min(wait_ms, LOOK_MS)
        if answer.locked:
            wait_ms = min(wait_ms, 1)
        elif answer.due:
            wait_ms = 0
    said.poll(wait_ms)
