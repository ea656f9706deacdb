"""Drives a model over a paged cache the way a step does, with page tables and chunks of the test's choice.

Shape legend: T tokens, E hidden features, P pages a row may hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.mla_decode import invariant
from kernels.page import NULL_PAGE, PAGE_TOKENS, pages_for
from workers.cache.paged import PagedCache
from workers.families import load_model
from workers.models.batch import Batch, DecodeBatch, PrefillBatch
from workers.models.model import Model
from workers.parallel.group import Group
from workers.protocol.plan import BatchLayout

ARBITRARY_PAGE = 2147480000
CPU = torch.device("cpu")
ALONE = Group()


def load_fp32(folder: Path, group: Group = ALONE, device: torch.device = CPU) -> Model:
    return load_model(folder, group=group, dtype=torch.float32, device=device, max_positions=512)


@dataclass
class Row:
    """A sequence on its way into the cache."""

    tokens: list[int]
    pages: list[int]
    written: int = 0


@dataclass(frozen=True)
class Feed:
    """Tokens of one row in one step: `start`, `start` + 1, ... of its sequence."""

    row: int
    start: int
    count: int


@dataclass(frozen=True)
class Step:
    """One forward pass: decode rows of `width` tokens, then prefill rows."""

    width: int
    decode: tuple[Feed, ...]
    prefill: tuple[Feed, ...]

    @property
    def feeds(self) -> tuple[Feed, ...]:
        return self.decode + self.prefill


class Paged:
    """A model, a cache poisoned with NaN, and rows with random disjoint pages (the null page is never one of them)."""

    def __init__(self, model: Model, sequences: Sequence[Sequence[int]], room: int = 1, seed: int = 0) -> None:
        self.model = model
        self.device = device = model.norm_E.device
        counts = [pages_for(len(tokens) + room) for tokens in sequences]
        self.shards = model.group.mesh.shards
        in_turns = model.paths.invariant and self.shards.count > 1
        own_pages = (sum(counts) if in_turns else -(-sum(counts) // self.shards.count)) + 3
        self.cache = PagedCache.allocate(model.caches, own_pages, device, self.shards)
        pages = self.shards.pages(own_pages)
        for layer in self.cache.layers:
            layer.view(torch.uint8).fill_(255)  # NaN in every form
        order = (torch.randperm(pages - 1, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
        free = [[page for page in order if self.shards.owner(page) == owner] for owner in range(self.shards.count)]
        self.rows = [
            Row(
                list(tokens),
                # In invariant mode pieces go round the shards, each row's from another one on.
                [
                    free[(row + column // invariant.PIECE_PAGES) % len(free)].pop() if in_turns else order.pop()
                    for column in range(count)
                ],
            )
            for row, (tokens, count) in enumerate(zip(sequences, counts, strict=True))
        ]
        self.table_width = max(counts) + 1

    def plan(self, decode: Sequence[int], width: int, prefill: Sequence[tuple[int, int]]) -> Step:
        """The next `width` tokens of each row of `decode`, and the next `count` of each (row, count) of `prefill`."""
        return Step(
            width,
            tuple(Feed(row, self.rows[row].written, width) for row in decode),
            tuple(Feed(row, self.rows[row].written, count) for row, count in prefill),
        )

    def forward(self, step: Step) -> dict[int, Tensor]:
        """Run the model; final-norm hidden states [count, E] by row."""
        tokens = [t for f in step.feeds for t in self.rows[f.row].tokens[f.start : f.start + f.count]]
        hidden_TE = self.model.forward(torch.tensor(tokens, device=self.device), self.batch(step, 0), self.cache)
        for feed in step.feeds:
            self.rows[feed.row].written = feed.start + feed.count
        return self._by_row(step, hidden_TE)

    def draft(self, step: Step, hidden: dict[int, Tensor]) -> dict[int, Tensor]:
        """Run the draft layer after `forward` of the same step; the token after the step's last must be known."""
        tokens = [t for f in step.feeds for t in self.rows[f.row].tokens[f.start + 1 : f.start + f.count + 1]]
        hidden_TE = torch.cat([hidden[feed.row] for feed in step.feeds])
        token_T = torch.tensor(tokens, device=self.device)
        assert self.model.drafter is not None
        return self._by_row(step, self.model.drafter.catch_up(token_T, hidden_TE, self.batch(step, 1), self.cache))

    @staticmethod
    def _by_row(step: Step, x_TE: Tensor) -> dict[int, Tensor]:
        parts = x_TE.split([feed.count for feed in step.feeds])
        return {feed.row: part for feed, part in zip(step.feeds, parts, strict=True)}

    def _own(self, page: int) -> int:
        """Return the place of a page in this rank's cache; the null page for one of another rank."""
        return self.shards.local(page) if self.shards.owns(page) else NULL_PAGE

    def batch(self, step: Step, shift: int) -> Batch:
        """Device view of a step; `shift` 1 is the draft layer's, whose entries lie one further on and begin at 1."""
        positions, slots = [], []
        tables = torch.full((len(step.feeds), self.table_width), ARBITRARY_PAGE, dtype=torch.int32)
        for index, feed in enumerate(step.feeds):
            pages = self.rows[feed.row].pages
            own = range(feed.start + shift, feed.start + shift + feed.count)
            positions += own
            slots += [self._own(pages[p // PAGE_TOKENS]) * PAGE_TOKENS + p % PAGE_TOKENS for p in own]
            used = pages_for(own.stop)
            tables[index, :used] = torch.tensor(pages[:used], dtype=torch.int32)
        tables = tables.to(self.device)
        rows = len(step.decode)
        lengths = [feed.start + shift + feed.count for feed in step.decode]
        counts = tuple(feed.count for feed in step.prefill)
        starts = tuple(feed.start + shift for feed in step.prefill)
        return Batch(
            BatchLayout(step.width, rows, counts, (True,) * len(counts)),
            torch.tensor(positions, device=self.device),
            torch.tensor(slots, device=self.device),
            DecodeBatch(torch.tensor(lengths, dtype=torch.int32, device=self.device), tables[:rows]) if rows else None,
            PrefillBatch(starts, counts, tables[rows:]) if counts else None,
            first=shift,
        )


def greedy(model: Model, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """`count` greedy tokens after every prompt, all prompts in one batch."""
    paged = Paged(model, prompts, room=count + 1)
    rows = range(len(prompts))
    step = paged.plan([], 1, [(row, len(prompts[row])) for row in rows])
    for _ in range(count):
        hidden = paged.forward(step)
        last = model.logits(torch.stack([hidden[row][-1] for row in rows])).argmax(-1).tolist()
        for row, token in zip(rows, last, strict=True):
            paged.rows[row].tokens.append(token)
        step = paged.plan(list(rows), 1, [])
    return [row.tokens[-count:] for row in paged.rows]
