"""A replica with host memory for many prompts and a device for one, for the tests of host memory."""

from __future__ import annotations

from replica import Replica
from workload import config, tokens

from kernels.page import PAGE_TOKENS
from workers.protocol.tiers import Pinned
from workers.scheduler.sequence import Phase

LONG = 9 * PAGE_TOKENS
"""Of a prompt of 600 tokens: nine pages are full."""


def tiered(**changes: object) -> Replica:
    """A device with room for one long prompt, and host memory for all."""
    settings: dict[str, object] = {"pages": 11, "max_context": 640, "host_pages": 100, "load_least": 1, "slots": 3}
    return Replica(config(**(settings | changes)))


def ask(replica: Replica, name: str, prompt: list[int], **sampling: object) -> None:
    assert replica.add(name, prompt, max_tokens=2, **sampling) is None


def served(replica: Replica, name: str, prompt: list[int], salt: bytes = b"") -> int:
    """Run a request to its end; prompt tokens that it found cached."""
    ask(replica, name, prompt, salt=salt)
    replica.run()
    replica.check_tokens()
    replica.check_pages()
    replica.check_rest()
    return replica.outputs[name][0].cached_tokens


def loading(replica: Replica) -> list[int]:
    """A prompt that is being loaded for request `c`."""
    first = tokens(600, seed=1)
    served(replica, "a", first)
    served(replica, "b", tokens(600, seed=2))
    ask(replica, "c", first)
    while replica.plan() is not None:
        pass
    (sequence,) = replica.scheduler._live.values()
    assert sequence.phase is Phase.LOADING
    return first


def pinned(replica: Replica, *slots: int) -> Replica:
    """The replica when each rank has pinned so many."""
    for rank, count in enumerate(slots):
        replica.scheduler.pinned(Pinned(rank, count))
    replica.worker.pinned = min(slots)
    replica.check_pages()
    return replica
