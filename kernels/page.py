"""The one page type of the latent cache, shared by the scheduler (hands pages out) and the kernels (read them)."""

from typing import Final

PAGE_TOKENS: Final = 64
"""Tokens a page of the latent cache holds."""

NULL_PAGE: Final = 0
"""Page owned by nobody: the target of all padding and of every suppressed write. It is never read for a result."""


def pages_for(tokens: int) -> int:
    """Pages that `tokens` tokens of cache occupy."""
    return -(-tokens // PAGE_TOKENS)
