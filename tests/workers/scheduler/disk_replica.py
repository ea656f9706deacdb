"""A replica with host memory for two prompts and a disk behind it, for the tests of the disk."""

from __future__ import annotations

from replica import Replica
from workload import config, tokens

from kernels.page import PAGE_TOKENS
from workers.scheduler.disk_tier import DiskTier
from workers.scheduler.sequence import Phase

LONG = 9 * PAGE_TOKENS
"""Of a prompt of 600 tokens: nine pages are full."""


def tiered(**changes: object) -> Replica:
    """A device with room for one long prompt, host memory for two, and a disk for all."""
    settings: dict[str, object] = {
        "pages": 11,
        "max_context": 640,
        "host_pages": 20,
        "disk_pages": 100,
        "load_least": 1,
        "disk_least": 1,
        "disk_page_s": 0.0,
        "slots": 3,
    }
    return Replica(config(**(settings | changes)))


def served(replica: Replica, name: str, prompt: list[int], salt: bytes = b"") -> int:
    """Run a request to its end; prompt tokens that it found cached."""
    assert replica.add(name, prompt, max_tokens=2, salt=salt) is None
    replica.run()
    replica.check_tokens()
    replica.check_pages()
    replica.check_rest()
    return replica.outputs[name][0].cached_tokens


def disk_of(replica: Replica) -> DiskTier:
    assert replica.scheduler._rows.disk is not None
    return replica.scheduler._rows.disk


def filled(replica: Replica, prompts: int = 4) -> list[list[int]]:
    """So many prompts served, of which host memory holds the last two."""
    asked = [tokens(600, seed=seed) for seed in range(prompts)]
    assert [served(replica, f"first {number}", prompt) for number, prompt in enumerate(asked)] == [0] * prompts
    return asked


def row_of(replica: Replica, prompt: list[int]):  # type: ignore[no-untyped-def]
    """A request as it waits."""
    assert replica.add("looked at", prompt, max_tokens=1) is None
    row = replica.scheduler._live["looked at"]
    replica.cancel("looked at")
    del replica.requests["looked at"], replica.finish["looked at"]
    return row


def waiting(replica: Replica, name: str = "c") -> list[int]:
    """A prompt that is being read from disk for a request."""
    first = filled(replica)[0]
    assert replica.add(name, first, max_tokens=2) is None
    while replica.plan() is not None:
        pass
    assert replica.scheduler._live[name].phase is Phase.LOADING
    assert replica.scheduler.stats().waiting == 1
    replica.check_books()
    return first


def of_speed(replica: Replica, page_s: float) -> Replica:
    """The replica after another start, with so slow a disk. Computing a page takes it a millisecond."""
    again = replica.start_again()
    again.page_s = page_s
    again.scheduler.save_pages()
    disk_of(again)._pace._token_s = lambda: 1e-3 / PAGE_TOKENS
    return again


def sessions(replica: Replica, count: int, common: int) -> list[list[int]]:
    """So many prompts of 20 pages served, which begin with the same `common` pages; and a further token."""
    first = tokens(common * PAGE_TOKENS, seed=99)
    asked = [[*first, *tokens((20 - common) * PAGE_TOKENS, seed=seed)] for seed in range(count)]
    for number, prompt in enumerate(asked):
        served(replica, f"first {number}", prompt)
        served(replica, f"second {number}", [*prompt, 4])
    return [[*prompt, 1, 2, 3] for prompt in asked]


def asked_together(replica: Replica, prompts: list[list[int]]) -> list[int]:
    """Pages that these found cached when they came at one time."""
    for number, prompt in enumerate(prompts):
        assert replica.add(f"together {number}", prompt, max_tokens=2) is None
    for _ in range(20_000):
        if not replica.step():
            break
        replica.check_pages()
        replica.check_books()
    replica.check_tokens()
    replica.check_rest()
    return [replica.outputs[f"together {number}"][0].cached_tokens // PAGE_TOKENS for number in range(len(prompts))]
