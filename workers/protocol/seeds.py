"""Seeds of a request's sequences, derived from the request's seed.

The noise of sampling is a function of a sequence's seed, of the position and of the token id. If sequences of different
prompts had the same seed, they would draw with the same noise at the same position, and whoever evaluates a thousand
prompts with one seed would measure one draw. So a sequence's seed is a hash of the request's seed and of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from workers.protocol.prompt import Prompt

LEAST_SEED: Final = -(2**63)
MOST_SEED: Final = 2**63 - 1
NO_SEED: Final = -1
"""Clients of other engines send it where they want none."""


def sequence_seeds(seed: int, prompt: Sequence[int], choices: int = 1) -> list[int]:
    """The seeds of sequences that continue a prompt, one for each choice of a request.

    Args:
        seed: of the request, LEAST_SEED ... MOST_SEED; different ones give different seeds.
        prompt: its token ids.

    Returns:
        Values in 0 ... 2^63 - 1, a function of seed, prompt and the choice's place alone.

    Raises:
        OverflowError: an id of the prompt is outside 0 ... 2^32 - 1.
    """
    common = blake2b(seed.to_bytes(8, "little", signed=True) + Prompt.of(prompt).packed, digest_size=8)
    found = []
    for choice in range(choices):
        own = common.copy()
        own.update(choice.to_bytes(8, "little"))
        found.append(int.from_bytes(own.digest(), "little") & MOST_SEED)
    return found
