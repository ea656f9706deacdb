"""The one page type of the latent cache, shared by the scheduler (hands pages out) and the kernels (read them).

Ranks may share out the pages of one cache: then each page lies on one of them, its owner, and has two ids. Plans, page
tables and the prefix cache have the global one, which means the same on every rank. A rank's tensors are indexed by the
local one. With one shard, which is the whole cache, the two are equal.
"""

from dataclasses import dataclass
from typing import Final, NewType

PAGE_TOKENS: Final = 64
"""Tokens a page of the latent cache holds."""

PIECE_PAGES: Final = 8
"""Pages of the longest pieces that invariant mode attends to (`kernels.strands`). A row's pages, counted from its
first, make stretches of so many, each of which is one piece or some. Where ranks share out the cache, a stretch lies on
one rank."""

NULL_PAGE: Final = 0
"""Page owned by nobody: the target of all padding and of every suppressed write. It is never read for a result. Every
rank has one, and its global and its local id are this."""

GlobalPage = NewType("GlobalPage", int)
"""Id of a page in plans and page tables."""
LocalPage = NewType("LocalPage", int)
"""Index of a page in the cache tensors of its owner."""


def pages_for(tokens: int) -> int:
    """Pages that `tokens` tokens of cache occupy."""
    return -(-tokens // PAGE_TOKENS)


@dataclass(frozen=True)
class Shards:
    """`count` ranks that share out the pages of one cache in turns, of which this one is number `index`."""

    count: int = 1
    index: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"there is no shard {self.index} of {self.count}")

    def owner(self, page: int) -> int:
        """Number of the shard on which a page lies, by its global id. The null page has no owner: do not ask."""
        return (page - 1) % self.count

    def owns(self, page: int) -> bool:
        """Whether a page, by its global id, lies on this shard. The null page does not."""
        return page != NULL_PAGE and self.owner(page) == self.index

    def local(self, page: int) -> LocalPage:
        """Index of a page, by its global id, in the cache tensors of its owner."""
        return LocalPage((page + self.count - 1) // self.count)

    def page(self, local: LocalPage) -> GlobalPage:
        """Global id of a page of this shard."""
        return GlobalPage(NULL_PAGE if local == NULL_PAGE else (local - 1) * self.count + self.index + 1)

    def in_turns(self, first: int, column: int, count: int) -> list[int]:
        """How many of `count` pages of a row, the first of which is its page number `column`, each shard has where the
        row's pieces go round the shards without exceptions, as in invariant mode. `first`: the shard of the row's first
        piece."""
        round_pages, shares = PIECE_PAGES * self.count, []
        for shard in range(self.count):
            offset = (shard - first) % self.count * PIECE_PAGES

            def before(end: int, offset: int = offset) -> int:
                """Pages of the shard before page number `end`."""
                return end // round_pages * PIECE_PAGES + min(max(end % round_pages - offset, 0), PIECE_PAGES)

            shares.append(before(column + count) - before(column))
        return shares

    def most_of_a_row(self, pages: int) -> int:
        """Pages that one row may have of a cache of `pages`, the null page not counted, where its pieces go round."""
        rounds, rest = divmod(pages // self.count, PIECE_PAGES)
        return rounds * PIECE_PAGES * self.count + rest

    def room_of_a_row(self, pages: int) -> int:
        """Pages that a cache must have, the null page not counted, for one row of `pages` whose pieces go round."""
        return self.count * max(self.in_turns(0, 0, pages))

    def pages(self, local_pages: int) -> int:
        """Pages of the whole cache where every rank has `local_pages`, the null page included in both."""
        return self.count * (local_pages - 1) + 1


WHOLE: Final = Shards()
"""The whole cache on every rank."""
