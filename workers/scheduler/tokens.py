"""All tokens of one request: a prompt that it may share with others, and what it generated itself."""

from __future__ import annotations

from kernels.page import PAGE_TOKENS
from workers.protocol.prompt import NO_ROOT, PAGE_BYTES, TOKEN_BYTES, Prompt, chain_keys, pack_tokens, unpack_tokens


class Tokens:
    """The prompt's tokens, then the generated ones. The prompt is never copied: the choices of a request share it.

    Plain attributes, which the scheduler keeps up to date itself: it looks at them for every row in every step.
    """

    __slots__ = ("generated", "length", "prompt", "root")

    def __init__(self, prompt: Prompt, done: bytes = b"", root: bytes = NO_ROOT) -> None:
        """`done`: what was generated before, as `pack_tokens` packs it. `root`: what the first page's key continues."""
        self.prompt, self.root = prompt, root
        self.generated = unpack_tokens(done)
        self.length = prompt.length + len(self.generated)
        """Tokens of the prompt and generated ones together."""

    def __getitem__(self, index: int) -> int:
        known = self.prompt.length
        return self.prompt[index] if index < known else self.generated[index - known]

    def span(self, begin: int, end: int) -> tuple[int, ...]:
        """Return the tokens from `begin` to `end` (exclusive)."""
        known = self.prompt.length
        if end <= known:
            return self.prompt[begin:end]
        return (*self.prompt[begin:known], *self.generated[max(begin - known, 0) : end - known])

    def packed(self) -> bytes:
        """Return all tokens as `pack_tokens` packs them."""
        return self.prompt.packed + pack_tokens(self.generated)

    def page(self, index: int) -> bytes:
        """Full page number `index`, packed as in `pack_tokens`."""
        begin = index * PAGE_TOKENS - self.prompt.length
        if begin >= 0:
            return pack_tokens(self.generated[begin : begin + PAGE_TOKENS])
        page = self.prompt.packed[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]
        return page if len(page) == PAGE_BYTES else page + pack_tokens(self.generated[: begin + PAGE_TOKENS])

    def key(self, index: int, page: bytes, parent: bytes) -> bytes:
        """Key of full page number `index`, of tokens `page`, which continues the page of key `parent`."""
        known = self.prompt.keys(self.root)
        return known[index] if index < len(known) else chain_keys(parent, page)[0]

    def keys(self) -> list[bytes]:
        """Keys of all full pages. Where nothing was generated they are the prompt's own list, which nobody may change;
        its pages are never hashed again."""
        known = self.prompt.keys(self.root)
        if self.length // PAGE_TOKENS == len(known):
            return known
        behind = self.prompt.packed[len(known) * PAGE_BYTES :] + pack_tokens(self.generated)
        assert len(behind) == (self.length - len(known) * PAGE_TOKENS) * TOKEN_BYTES
        return known + chain_keys(known[-1] if known else self.root, behind)
