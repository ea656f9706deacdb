"""Bad rows: requests for which the model gave no finite numbers, and when their replica must end.

A row that is not a number, because of its prompt or of memory that failed for a moment, harms nobody but those who read
its cache entries. So its request ends with an error of its own, what it wrote is neither found nor reused before it is
zeroed (`PrefixCache.mark_suspect`, `PagePool.mark_suspect`), and everybody else goes on.

Who read pages of others for which nobody has vouched yet may be such a victim, and computes its tokens once more,
alone: every page by itself. A page is vouched for (`Entry.sound`) once a row that reads it has sampled a token from
finite logits, for one entry that is not finite makes every token behind it NaN.

Whether the replica itself is broken, no request can say, since a client may send the same bad prompt again and again.
So where a step has non-finite rows alone, or one step after the other has some, the replica is put to the test by a
request of its own: one token, from a slot and a page of its own, that nobody else has a part in. If that is bad, the
replica ends.
"""

from __future__ import annotations

from typing import Final

from kernels.page import PAGE_TOKENS
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams
from workers.protocol.prompt import Prompt
from workers.scheduler.sequence import Phase, Sequence, Tokens

CANARY_ID: Final = "the replica's own probe"
CANARY_TOKEN: Final = 0
"""Token of the canary request. It is in every vocabulary, and begins a text in most."""
NONFINITE_STEPS: Final = 16
"""Steps in a row, each with a non-finite row, that put the replica to the test although others gain tokens."""

NONFINITE_LOGITS: Final = (
    "the model gave no finite numbers (NaN or infinite logits) for this request, which ends here; tokens that were "
    "sent before stand. Try another prompt; if many requests end so, tell whoever runs this server"
)


DEAD_END: Final = (
    "the request's grammar allows no token that this model has behind those generated so far, or takes too long to be "
    "followed; tokens that were sent before stand. Make the grammar simpler"
)


class Unsound(RuntimeError):
    """The replica gives no finite numbers for anybody; the message is for whoever runs it."""


class Soundness:
    """Judges steps by their non-finite rows."""

    def __init__(self) -> None:
        self.bad_rows = 0
        """Rows so far whose logits were not finite."""
        self._in_a_row = 0
        self._probing = False

    @property
    def doubts(self) -> bool:
        """Whether there is anything to learn from a step without non-finite rows."""
        return self._probing or self._in_a_row > 0

    def observe(self, sound: int, nonfinite: int, canary_was_nonfinite: bool) -> bool:
        """A step was applied, with so many sound and non-finite rows of live requests. Whether to make a canary request
        now.

        Raises Unsound if the canary request that was made is not finite.
        """
        self.bad_rows += nonfinite
        if canary_was_nonfinite:
            raise Unsound(
                f"the model gives no finite numbers: after {self.bad_rows} rows with NaN or infinite logits not even a "
                "single token by itself had any. Check the weights, and the dtype for overflow"
            )
        if nonfinite:
            self._in_a_row += 1
        elif sound:
            self._in_a_row = 0
        doubtful = nonfinite > 0 and (not sound or self._in_a_row >= NONFINITE_STEPS)
        if not doubtful or self._probing:
            return False
        self._probing, self._in_a_row = True, 0
        return True

    def canary_ended(self) -> None:
        """The canary request has ended, and was sound."""
        self._probing = False


def canary(arrival: int) -> Sequence:
    """The replica's own request, before all others."""
    request = Request(CANARY_ID, (CANARY_TOKEN,), SamplingParams(1, temperature=0.0), priority=-(2**62))
    return Sequence(
        request=request,
        rank=(request.priority, 0.0, arrival),
        limit=2,
        tokens=Tokens(Prompt.of(request.prompt)),
        stop_ids=frozenset(),
        min_total=1,
        logprobs=-1,
        alone=True,
    )


def may_be_a_victim(sequence: Sequence) -> bool:
    """Whether a non-finite row read what others wrote and nobody vouched for: then it is not known whose fault it
    is."""
    if sequence.alone:
        return False
    if sequence.write_from > 0 and not all(snapshot.sound for snapshot in sequence.snapshots[:1]):
        return True
    if sequence.phase is Phase.PREEMPTED:  # whose pages they were is forgotten
        return sequence.write_from > 0
    shared = sequence.pages.chain[: sequence.write_from // PAGE_TOKENS]
    return not all(entry.sound for entry in shared)
