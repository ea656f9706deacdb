"""Times what attention of DeepSeek V4 Flash has beside its dense products on this machine's GPU, step by step, inside a
CUDA graph, with rings and pages that come from memory.

    python bench/compressed.py                        # decode rows of 2 ranks
    python bench/compressed.py --heads 64 --rows 1    # of one rank, a single row
    python bench/compressed.py --rows 64 --width 3 --context 131072
    python bench/compressed.py --heads 64 --prompts 8192,32768    # attention of the last 8,192 tokens of prompts

Times are of one layer, in microseconds. "floor" is the bytes that a step must read and write over 4.2 TB/s, or its
products over 790 TFLOP/s where that is more. Of compressors one row in as many ends an entry as an entry has tokens, as
in a mixed lot of rows. `tests/kernels/compressed_triton/test_compressed_gpu.py` compares with float64.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import timing

from kernels import compressed, sparse
from kernels.compressed import AttendWorkspace, TokenRows
from kernels.linear import group_linear
from kernels.matrix import BlockScaled
from kernels.page import PAGE_TOKENS
from kernels.runtime.hopper import multiprocessors
from workers.models.attention.compressed_rows import attending

ENTRY, ROPE, WINDOW, INDEX_HEADS, KEY, SELECTED, RANK = 512, 64, 128, 64, 128, 512, 1024
HEADS_OF_A_GROUP = 8
BYTES_A_MICROSECOND = 4.2e6
OPERATIONS_A_MICROSECOND = 790e6
L2_BYTES = 60e6
PROMPT = 8192
"""Tokens of a prompt that attend: the last ones."""
DEVICE = "cuda"

Run = Callable[[], None]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Allocate memory."""
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers."""
    return torch.randn(shape, device=DEVICE).to(dtype)


class Layer:
    """Tensors of a layer, and its steps: their names, calls, and bytes or operations."""

    def __init__(self, rows: int, width: int, context: int, heads: int, ratio: int) -> None:
        """`ratio`: tokens of a compressed entry; 0: a layer that has none."""
        self.tokens, self.width, self.heads, self.ratio, self.context = rows * width, width, heads, ratio, context
        pages = context // PAGE_TOKENS + 1
        row = torch.arange(rows, device=DEVICE)
        # Rows are so many tokens before an entry's end as they have numbers.
        newest = context - 1 - row % max(ratio, 1)
        position = newest.unsqueeze(1) - torch.arange(width - 1, -1, -1, device=DEVICE)
        table = torch.randperm(rows * pages, device=DEVICE).view(rows, pages).to(torch.int32)
        fault = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        of_tokens = row.to(torch.int32).repeat_interleave(width)
        self.rows = TokenRows(position.flatten(), of_tokens, row.clone(), table, fault, width)
        self.q, self.kv, self.norm = normal(self.tokens, heads, ENTRY), normal(self.tokens, ENTRY), normal(ENTRY)
        self.turn = normal(self.tokens, ROPE, dtype=torch.float32)
        self.table = normal(context + 1, ROPE, dtype=torch.float32)
        self.ring, self.sink = normal(rows + 1, WINDOW + width - 1, ENTRY), normal(heads, dtype=torch.float32)
        self.entry, self.out = empty(self.tokens, ENTRY), empty(self.tokens, heads, ENTRY)
        self.paged = normal(rows * pages, max(1, PAGE_TOKENS // ratio), ENTRY) if ratio else None
        self.seen = context // ratio if ratio else 0
        self.selected = self._numbers() if ratio == 4 else None
        most = WINDOW + (SELECTED if ratio == 4 else self.seen)
        self.workspace = AttendWorkspace.allocate(
            self.tokens, heads, ENTRY, most, empty, programs=multiprocessors(self.q.device)
        )

    def _numbers(self) -> Tensor:
        """Numbers of entries in rising order, other ones for each token."""
        complete = self.seen - 1 - self.width  # of every token
        chosen = torch.rand(self.tokens, complete, device=DEVICE).topk(min(SELECTED, complete)).indices
        return chosen.sort().values.to(torch.int32)

    def store(self) -> Run:
        """Queries and entries of tokens."""
        tensors = self.q, self.kv, self.norm, self.turn, self.entry, self.ring, self.rows
        return partial(compressed.rope_store, *tensors, window=WINDOW, eps=1e-6)

    def attend(self) -> Run:
        """Attention to the window, and to compressed entries where there are any."""
        tensors = self.q, self.ring, None, self.paged, self.selected, self.sink, self.turn, self.out, self.rows
        return partial(compressed.attend, *tensors, self.workspace, window=WINDOW, ratio=self.ratio, scale=ENTRY**-0.5)

    def compress(self, features: int) -> Run:
        """A compressor that makes entries of so many features."""
        halves = 2 if self.ratio == 4 else 1
        made = halves * features
        slots, pages = len(self.rows.slot_R), self.rows.page_RP.numel()
        tensors = (
            normal(self.tokens, 2 * made, dtype=torch.float32),
            normal(self.ratio, made, dtype=torch.float32),
            normal(features),
            self.table,
            normal(slots + 1, halves * self.ratio + self.width - 1, 2 * made, dtype=torch.float32),
            empty(pages, max(1, PAGE_TOKENS // self.ratio), features),
        )
        return partial(compressed.compress, *tensors, self.rows, eps=1e-6)

    def index(self) -> tuple[Run, Run]:
        """Scores of all compressed keys, and the selection."""
        pages, scores = self.rows.page_RP.numel(), -(-self.seen // PAGE_TOKENS) * PAGE_TOKENS
        q, weight = normal(self.tokens, INDEX_HEADS, KEY), normal(self.tokens, INDEX_HEADS, dtype=torch.float32)
        keys, score = normal(pages, PAGE_TOKENS // self.ratio, KEY), normal(self.tokens, scores, dtype=torch.float32)
        bound = torch.full((self.tokens,), self.seen - 1, dtype=torch.int32, device=DEVICE)
        selected = empty(self.tokens, SELECTED, dtype=torch.int32)
        workspace = sparse.SelectWorkspace.allocate(self.tokens, scores, empty, selected=SELECTED)
        tensors = q, weight, keys, self.rows.page_RP, self.rows.row_T, bound, score, self.rows.fault_1
        scoring = partial(sparse.index_scores, *tensors, width=self.width)
        return scoring, partial(sparse.select_positions, score, bound, selected, self.rows.fault_1, workspace)

    def project(self, *, fp8: bool) -> Run:
        """The output's projection in groups."""
        groups, features = self.heads // HEADS_OF_A_GROUP, HEADS_OF_A_GROUP * ENTRY
        plain = normal(groups * RANK, features)
        scales = torch.ones(groups * RANK // 128, features // 128, device=DEVICE)
        weight = BlockScaled(plain.to(torch.float8_e4m3fn), scales) if fp8 else plain
        return partial(group_linear, self.out.view(self.tokens, groups, -1), weight, empty(self.tokens, groups, RANK))


def steps(make: Callable[[int], Layer]) -> Iterator[tuple[str, Callable[[], Run], float, float]]:
    """Every step: its name, what makes a call of it with tensors of its own, its bytes and its operations. `make`
    makes a layer of a ratio."""
    first = make(4)
    tokens, heads, rows = first.tokens, first.heads, len(first.rows.slot_R)
    vectors = 2.0 * tokens * heads * ENTRY
    yield "queries, entries", lambda: make(0).store(), 2 * vectors + 6 * tokens * ENTRY, 0.0
    for ratio, features in ((4, ENTRY), (4, KEY), (128, ENTRY)):
        reach, made = (8, 2 * features) if ratio == 4 else (128, features)
        size = 16.0 * tokens * made + 8.0 * (tokens / ratio) * reach * features
        yield f"compressor, {ratio} tokens, {features}", partial(_compressor, make, ratio, features), size, 0.0
    products = 2.0 * tokens * first.seen * INDEX_HEADS * KEY
    size = 2.0 * rows * first.seen * KEY + 4.0 * tokens * first.seen
    yield "index scores", lambda: make(4).index()[0], size, products
    yield "selection", lambda: make(4).index()[1], 4.0 * tokens * (first.seen + SELECTED), 0.0
    for ratio in (0, 4, 128):
        layer = make(ratio)
        entries = WINDOW + min(layer.seen, SELECTED if ratio == 4 else layer.seen)
        size = 2.0 * tokens * entries * ENTRY + 2 * vectors
        products = 4.0 * tokens * heads * entries * ENTRY
        yield f"attention, {entries} entries", partial(_attention, make, ratio), size, products
    for fp8 in (True, False):
        weights = heads // HEADS_OF_A_GROUP * RANK * HEADS_OF_A_GROUP * ENTRY
        name = f"output in groups, {'FP8' if fp8 else 'bf16'}"
        size = weights * (1.0 if fp8 else 2.0) + vectors
        yield name, partial(_projection, make, fp8), size, 2.0 * tokens * weights


def _compressor(make: Callable[[int], Layer], ratio: int, features: int) -> Run:
    return make(ratio).compress(features)


def _attention(make: Callable[[int], Layer], ratio: int) -> Run:
    return make(ratio).attend()


def _projection(make: Callable[[int], Layer], fp8: bool) -> Run:
    return make(0).project(fp8=fp8)


class Prompt:
    """Attention of the last tokens of a prompt in a layer, in turns as the engine takes them."""

    def __init__(self, length: int, heads: int, ratio: int, alike: float, turn: int) -> None:
        """`alike`: see `_selected`. `turn`: tokens that attend at once, 0: as in a pass."""
        self.tokens, self.heads, self.ratio, self.alike = min(length, PROMPT), heads, ratio, alike
        self.begin = length - self.tokens
        pages = length // PAGE_TOKENS + 1
        self.q, self.entry = normal(self.tokens, heads, ENTRY), normal(self.tokens, ENTRY)
        self.ring, self.sink = normal(2, WINDOW, ENTRY), normal(heads, dtype=torch.float32)
        self.turn = normal(self.tokens, ROPE, dtype=torch.float32)
        self.out = empty(self.tokens, heads, ENTRY)
        self.paged = normal(pages, max(1, PAGE_TOKENS // ratio), ENTRY) if ratio else None
        self.position = torch.arange(self.begin, length, device=DEVICE)
        seen = (self.position + 1) // max(ratio, 1) if ratio else torch.zeros_like(self.position)
        self.selected = self._selected(seen) if ratio == 4 else None
        entries = torch.clamp(self.position + 1, max=WINDOW) + (seen.clamp(max=SELECTED) if ratio == 4 else seen)
        self.operations = 4.0 * heads * ENTRY * int(entries.sum())
        self.most = WINDOW + (SELECTED if ratio == 4 else length // ratio if ratio else 0)
        self.at_once = turn or attending(self.most)
        table = torch.randperm(pages, device=DEVICE).to(torch.int32).view(1, -1)
        row, slot, fault = (
            torch.zeros(count, dtype=dtype, device=DEVICE)
            for count, dtype in ((self.tokens, torch.int32), (1, torch.int64), (1, torch.int64))
        )
        self.rows = TokenRows(self.position, row, slot, table, fault)

    def _selected(self, seen: Tensor) -> Tensor:
        """Numbers of entries in rising order. An entry's score is a sum of two random numbers: one that all tokens
        have in common, which counts `alike`, and one of the token's own."""
        most = int(seen.max())
        common, rest = torch.randn(most, device=DEVICE) * self.alike**0.5, (1 - self.alike) ** 0.5
        numbers = torch.arange(most, device=DEVICE)
        found = []
        for part in seen.split(1024):
            score = common + rest * torch.randn(len(part), most, device=DEVICE)
            score.masked_fill_(numbers >= part.unsqueeze(1), -torch.inf)
            best = score.topk(SELECTED)
            chosen = best.indices.masked_fill(best.values == -torch.inf, most).sort().values
            found.append(chosen.masked_fill(chosen == most, -1))
        return torch.cat(found).to(torch.int32)

    def attend(self, hopper: bool) -> Run:
        """All turns."""
        turns = []
        for begin in range(0, self.tokens, self.at_once):
            own = slice(begin, begin + self.at_once)
            rows = replace(self.rows, position_T=self.position[own], row_T=self.rows.row_T[own])
            count = len(rows.row_T)
            workspace = AttendWorkspace.allocate(
                count, self.heads, ENTRY, self.most, empty, programs=multiprocessors(self.q.device), hopper=hopper
            )
            selected = None if self.selected is None else self.selected[own]
            tensors = self.q[own], self.ring, self.entry[own], self.paged, selected, self.sink, self.turn[own]
            how = {"window": WINDOW, "ratio": self.ratio, "scale": ENTRY**-0.5}
            turns.append(partial(compressed.attend, *tensors, self.out[own], rows, workspace, **how))

        def run() -> None:
            for turn in turns:
                turn()

        return run


def prompts(lengths: list[int], heads: int, alike: float, turn: int) -> None:
    """Print the table of prompts."""
    for length in lengths:
        print(f"the last {min(length, PROMPT)} of {length} tokens, {heads} heads", flush=True)
        for ratio, name in ((0, "window alone"), (4, f"ratio 4, {SELECTED} selected"), (128, "ratio 128")):
            case, told, outs = Prompt(length, heads, ratio, alike, turn), [], []
            for hopper in (False, True):
                ms = timing.microseconds([case.attend(hopper)]) / 1e3
                told.append(f"{ms:7.3f} ms {case.operations / ms / 1e9:4.0f} TFLOP/s")
                outs.append(case.out.clone())
            apart = float((outs[0].float() - outs[1].float()).norm() / outs[0].float().norm())
            print(f"  {name:24} portable {told[0]}, Hopper {told[1]}, apart {apart:.1e}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,64", help="numbers of decode rows")
    parser.add_argument("--width", type=int, default=1, help="tokens of a row")
    parser.add_argument("--context", type=int, default=65536, help="tokens of a row's cache")
    parser.add_argument("--heads", type=int, default=32, help="heads of a rank, of 64")
    parser.add_argument("--prompts", help="lengths of prompts, in place of decode rows")
    parser.add_argument("--alike", type=float, default=0.8, help="how alike the tokens of a prompt select, 0 to 1")
    parser.add_argument("--turn", type=int, default=0, help="tokens of a prompt that attend at once; 0: as a pass does")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    if chosen.prompts:
        prompts([int(length) for length in chosen.prompts.split(",")], chosen.heads, chosen.alike, chosen.turn)
        return
    for rows in map(int, chosen.rows.split(",")):
        print(f"{rows} rows of width {chosen.width}, {chosen.context} tokens each, {chosen.heads} heads", flush=True)
        make = partial(Layer, rows, chosen.width, chosen.context, chosen.heads)
        for name, call, size, products in steps(make):
            # Calls with tensors of their own, so many that none finds its own in the L2 cache.
            calls = [call() for _ in range(max(1, min(16, int(2 * L2_BYTES / size) + 1)))]
            got = timing.microseconds(calls)
            floor = max(size / BYTES_A_MICROSECOND, products / OPERATIONS_A_MICROSECOND)
            print(f"  {name:32} {got:9.1f} (floor {floor:8.1f}, {floor / got:4.0%})", flush=True)


if __name__ == "__main__":
    main()
