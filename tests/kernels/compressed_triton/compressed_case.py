"""Rows whose tokens come step by step, in chunks and with drafts that are rejected, and what their rings and pages must
hold then, in float64 from the whole row's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from kernels.compressed import TokenRows, attention_launch, launch
from kernels.page import PAGE_TOKENS, pages_for

ARBITRARY_PAGE = 2147480000
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Of one rounding, and for fp32 of the sums behind it."""


def rotations(positions: int, features: int, theta: float = 100.0) -> Tensor:
    """fp32 rotations by position: (cos, sin) of the i-th angle at (2i, 2i + 1)."""
    angle = torch.arange(positions).unsqueeze(1) * theta ** (-torch.arange(0, features, 2) / features)
    return torch.stack([angle.cos(), angle.sin()], -1).flatten(1)


def turned(x: Tensor, turn: Tensor, back: bool = False) -> Tensor:
    """The last features of x, [N, .., D], turned by rotations [N, O], in float64 and by complex numbers."""
    plain, pairs = x.shape[-1] - turn.shape[-1], turn.shape[-1] // 2
    angle = torch.view_as_complex(turn.double().view(len(turn), *[1] * (x.dim() - 2), pairs, 2))
    pair = torch.view_as_complex(x[..., plain:].double().reshape(*x.shape[:-1], pairs, 2))
    roped = torch.view_as_real(pair * (angle.conj() if back else angle)).flatten(-2)
    return torch.cat([x[..., :plain].double(), roped], -1)


def normed(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    """Root-mean-square norm in float64."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


class Rows:
    """Rows with a slot and pages each, between rows of nobody; the tables' tails are huge ids."""

    dependent = False
    """Whether kernels of decode rows are launched dependently."""

    def launched(self, width: int) -> dict[str, bool]:
        """How kernels of rows of this width are launched; references know of no launch."""
        return {"dependent": True} if self.dependent and width else {}

    def __init__(self, rows: int, most: int, seed: int = 0, device: str = "cpu") -> None:
        """`most`: tokens that a row may have."""
        self.random = torch.Generator().manual_seed(seed)
        self.count, self.most, self.device = rows, most, device
        self.slots = rows + 2
        self.slot = torch.randperm(self.slots, generator=self.random)[:rows].tolist()
        columns = pages_for(most)
        self.pages = rows * columns + 2
        free = (torch.randperm(self.pages - 1, generator=self.random) + 1)[: rows * columns]
        self.page = free.view(rows, columns).to(torch.int32)
        self.length = [0] * rows

    def step(self, counts: Sequence[int], width: int = 0) -> tuple[TokenRows, list[tuple[int, int]]]:
        """The tokens of a step, of which row i has `counts[i]`, and behind them those of nobody: of each token here its
        row and its position, -1 for nobody. With `width` a row of nobody is among the decode rows; without one there
        are tokens without a row."""
        order = [(row, self.length[row] + i) for row, count in enumerate(counts) for i in range(count)]
        nobody = width or 3
        table = torch.full((self.count + 1, self.page.shape[1] + 2), ARBITRARY_PAGE, dtype=torch.int32)
        table[: self.count, : self.page.shape[1]] = self.page
        for row, count in enumerate(counts):
            table[row, pages_for(self.length[row] + count) :] = ARBITRARY_PAGE
        # A row without tokens in this step is not among the decode rows of one.
        assert not width or all(count == width for count in counts)
        positions = [position for _, position in order] + [0] * nobody
        own = [row for row, _ in order] + [self.count if width else -1] * nobody
        rows = TokenRows(
            torch.tensor(positions).to(self.device),
            torch.tensor(own, dtype=torch.int32).to(self.device),
            torch.tensor([*self.slot, -1]).to(self.device),
            table.to(self.device),
            torch.zeros(1, dtype=torch.int64, device=self.device),
            width,
        )
        return rows, [*order, *[(-1, -1)] * nobody]


class Compressing(Rows):
    """A compressor and its rows."""

    def __init__(
        self,
        rows: int,
        most: int,
        *,
        ratio: int,
        features: int,
        overlaps: bool,
        rope: int,
        width: int = 1,
        dtype: torch.dtype = torch.float32,
        made_dtype: torch.dtype = torch.float32,
        functions: ModuleType = launch,
        seed: int = 0,
        device: str = "cpu",
        spare: int = 0,
    ) -> None:
        """`width`: the most tokens of a decode row. `spare`: tokens for which the ring has room beside those needed."""
        super().__init__(rows, most, seed, device)
        self.functions, self.ratio, self.features, self.overlaps, self.eps = functions, ratio, features, overlaps, 1e-6
        made = features * (1 + overlaps)
        self.reach = ratio * (1 + overlaps)
        self.made = torch.randn(rows, most, 2 * made, generator=self.random).to(made_dtype)
        self.made[..., made:] *= 3
        self.bias = torch.randn(ratio, made, generator=self.random)
        self.norm = (1 + 0.3 * torch.randn(features, generator=self.random)).to(dtype)
        self.rotation = rotations(most, rope)
        shape = self.slots + 1, self.reach + width - 1 + spare, 2 * made
        self.state = torch.full(shape, torch.nan, device=device)
        self.entry = torch.full(
            (self.pages, max(1, PAGE_TOKENS // ratio), features), torch.nan, dtype=dtype, device=device
        )

    def run(self, counts: Sequence[int], width: int = 0, accepted: Sequence[int] | None = None) -> None:
        """A step. `accepted`: of each decode row the drafts that were right; what the others made is huge."""
        rows, order = self.step(counts, width)
        made = torch.full((len(order), self.made.shape[2] + 3), torch.nan, dtype=self.made.dtype)[:, 1:-2]
        for token, (row, position) in enumerate(order):
            if row < 0:
                continue
            made[token] = self.made[row, position]
            if accepted is not None and position > self.length[row] + accepted[row]:
                made[token] = 1e4 * torch.randn(made.shape[1], generator=self.random)
        tensors = made.to(self.device), self.bias.to(self.device), self.norm.to(self.device)
        state = self.rotation.to(self.device), self.state, self.entry, rows, self.eps
        self.functions.compress(*tensors, *state, **self.launched(width))
        assert int(rows.fault_1) == 0
        for row, count in enumerate(counts):
            self.length[row] += count if accepted is None else accepted[row] + 1
        self.check()

    def want(self, row: int, number: int) -> Tensor:
        """An entry of a row, float64."""
        first = number * self.ratio
        value, logit = self.made[row].double().chunk(2, 1)
        logit = logit + self.bias.double().repeat(-(-self.most // self.ratio), 1)[: self.most]
        own = slice(first, first + self.ratio)
        value_W, logit_W = value[own], logit[own]
        if self.overlaps:
            value_W, logit_W = value_W[:, self.features :], logit_W[:, self.features :]
            if number:
                before = slice(first - self.ratio, first)
                value_W = torch.cat([value[before, : self.features], value_W])
                logit_W = torch.cat([logit[before, : self.features], logit_W])
        mean = (logit_W.softmax(0) * value_W).sum(0)
        return turned(normed(mean, self.norm.double(), self.eps).unsqueeze(0), self.rotation[first : first + 1])[0]

    def place(self, row: int, number: int) -> tuple[int, int]:
        """Page and place of an entry."""
        last = (number + 1) * self.ratio - 1
        return int(self.page[row, last // PAGE_TOKENS]), last % PAGE_TOKENS // self.ratio

    def check(self) -> None:
        entry, state = self.entry.cpu(), self.state.cpu()
        written = torch.zeros(entry.shape[:2], dtype=torch.bool)
        for row, length in enumerate(self.length):
            for number in range(self.most // self.ratio):
                written[self.place(row, number)] = True
            for number in range(length // self.ratio):
                got, want = entry[self.place(row, number)].double(), self.want(row, number)
                close = TOLERANCE[self.entry.dtype] * want.abs().max()
                torch.testing.assert_close(got, want, rtol=TOLERANCE[self.entry.dtype], atol=float(close))
            at = torch.arange(max(0, length - self.reach + 1), length)
            made = self.made[row, at].float()
            made[:, made.shape[1] // 2 :] += self.bias[at % self.ratio]
            assert torch.equal(state[self.slot[row] + 1, at % state.shape[1]], made)
        assert bool(entry[~written].isnan().all()), "a place of nobody's was written"
        assert bool(state[[place for place in range(self.slots + 1) if place - 1 not in self.slot]].isnan().all())


class Storing(Rows):
    """Queries, entries of tokens and their ring."""

    def __init__(
        self,
        rows: int,
        most: int,
        *,
        heads: int,
        features: int,
        rope: int,
        window: int,
        width: int = 1,
        dtype: torch.dtype = torch.float32,
        functions: ModuleType = launch,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        super().__init__(rows, most, seed, device)
        self.functions, self.window, self.heads, self.eps, self.dtype = functions, window, heads, 1e-6, dtype
        self.kv = torch.randn(rows, most, features, generator=self.random).to(dtype)
        self.norm = (1 + 0.3 * torch.randn(features, generator=self.random)).to(dtype)
        self.rotation = rotations(most, rope)
        shape = self.slots + 1, window + width - 1, features
        self.ring = torch.full(shape, torch.nan, dtype=dtype, device=device)

    def run(self, counts: Sequence[int], width: int = 0, accepted: Sequence[int] | None = None) -> None:
        """A step, as of `Compressing`."""
        rows, order = self.step(counts, width)
        tokens, features = len(order), self.kv.shape[2]
        kv = torch.full((tokens, features + 5), torch.nan, dtype=self.dtype)[:, 3:-2]
        q = torch.randn(tokens, self.heads * features + 7, generator=self.random).to(self.dtype)
        q = q[:, : self.heads * features].view(tokens, self.heads, features)
        turn = torch.full((tokens, self.rotation.shape[1]), torch.nan)
        for token, (row, position) in enumerate(order):
            if row < 0:
                continue
            turn[token], kv[token] = self.rotation[position], self.kv[row, position]
            if accepted is not None and position > self.length[row] + accepted[row]:
                kv[token] = torch.nan
        entry = torch.full((tokens, features), torch.nan, dtype=self.dtype).to(self.device)
        made_q = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=self.device).copy_(q)
        tensors = made_q, kv.to(self.device), self.norm.to(self.device), turn.to(self.device), entry, self.ring
        before = self.ring.clone()
        self.functions.rope_store(*tensors, rows, self.eps, **self.launched(width))
        if not width:
            assert torch.equal(before.nan_to_num(7), self.ring.nan_to_num(7)), "a chunk has written its ring too early"
            self.functions.keep_entries(entry, self.ring, rows)
        assert int(rows.fault_1) == 0
        for row, count in enumerate(counts):
            self.length[row] += count if accepted is None else accepted[row] + 1
        real = [token for token, (row, _) in enumerate(order) if row >= 0]
        want = turned(normed(q[real], 1.0, self.eps), turn[real])
        close = 2 * TOLERANCE[self.dtype]
        torch.testing.assert_close(made_q.cpu()[real].double(), want, rtol=close, atol=close)
        ring = self.ring.cpu()
        for row, length in enumerate(self.length):
            at = torch.arange(max(0, length - self.window + 1), length)
            want = turned(normed(self.kv[row, at], self.norm.double(), self.eps), self.rotation[at])
            got = ring[self.slot[row] + 1, at % ring.shape[1]].double()
            torch.testing.assert_close(got, want, rtol=close, atol=close)
        assert bool(ring[[place for place in range(self.slots + 1) if place - 1 not in self.slot]].isnan().all())


class Attending(Rows):
    """Attention of a step's tokens to entries that are there. All that no token may read is NaN."""

    def __init__(
        self,
        rows: int,
        most: int,
        *,
        heads: int,
        features: int,
        rope: int,
        window: int,
        ratio: int = 0,
        selected: int = 0,
        first: int = 0,
        width: int = 1,
        programs: int = 132,
        dtype: torch.dtype = torch.float32,
        functions: ModuleType = attention_launch,
        seed: int = 0,
        device: str = "cpu",
        hopper: bool | None = None,
    ) -> None:
        """`hopper`: see `AttendWorkspace.allocate`."""
        super().__init__(rows, most, seed, device)
        self.hopper = hopper
        self.functions, self.heads, self.window, self.ratio, self.first = functions, heads, window, ratio, first
        self.selected, self.programs, self.dtype, self.features = selected, programs, dtype, features
        self.rotation, self.ring_tokens = rotations(most, rope), window + width - 1
        self.near = self._drawn(rows, most, features)
        self.far = self._drawn(rows, most // ratio if ratio else 0, features)
        self.missing: set[tuple[int, int]] = set()
        """Rows and positions whose entry a layer that drafts has not made."""
        self.entry = None
        if ratio:
            shape = self.pages, max(1, PAGE_TOKENS // ratio), features
            self.entry = torch.full(shape, torch.nan, dtype=dtype)

    def _drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def poisoned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory of which all bits are set."""
        return torch.full((*shape, dtype.itemsize), 255, dtype=torch.uint8, device=self.device).view(dtype).view(shape)

    def place(self, row: int, number: int) -> tuple[int, int]:
        """Page and place of an entry."""
        last = (number + 1) * self.ratio - 1
        return int(self.page[row, last // PAGE_TOKENS]), last % PAGE_TOKENS // self.ratio

    def run(
        self, counts: Sequence[int], width: int = 0, outside: tuple[int, int] | None = None, block: int = 0
    ) -> None:
        """A step of rows with `length` tokens before it. `outside`: a row and a column of its table, where a page
        stands that there is not. `block`: of each row so many tokens, which see all of each other and a window of
        entries before them."""
        assert not block or set(counts) == {block}
        rows, order = self.step(counts, width)
        if outside is not None:
            rows.page_RP[outside] = self.pages
        tokens, S = len(order), self.selected
        q = torch.full((tokens, self.heads, self.features), torch.nan, dtype=self.dtype)
        own = torch.full((tokens, self.features), torch.nan, dtype=self.dtype)
        turn = torch.full((tokens, self.rotation.shape[1]), torch.nan)
        listed = torch.full((tokens, S), 1 << 20, dtype=torch.int32)
        ring = torch.full((self.slots + 1, self.ring_tokens, self.features), torch.nan, dtype=self.dtype)
        for row, count in enumerate(counts):
            begin, end = self.length[row], self.length[row] + count
            least = begin - self.window + (0 if block else 1)
            kept = torch.arange(max(least, self.first, 0), end if width else begin)
            ring[self.slot[row] + 1, kept % self.ring_tokens] = self.near[row, kept]
            for number in range(end // self.ratio if self.ratio else 0):
                assert self.entry is not None
                self.entry[self.place(row, number)] = self.far[row, number]
        for row, position in self.missing:
            ring[self.slot[row] + 1, position % self.ring_tokens] = torch.nan
        for token, (row, position) in enumerate(order):
            if row < 0:
                continue
            q[token] = self._drawn(self.heads, self.features)
            own[token], turn[token] = self.near[row, position], self.rotation[position]
            if S:
                seen = (position + 1) // self.ratio
                some = torch.randperm(seen, generator=self.random)[:S].sort().values
                listed[token, : len(some)], listed[token, len(some) :] = some.to(torch.int32), -1
        sink = torch.randn(self.heads, generator=self.random)
        out = torch.full_like(q, torch.nan).to(self.device)
        entries = self.window + block + (S or (self.most // self.ratio if self.ratio else 0))
        given = [
            None if x is None else x.to(self.device)
            for x in (q, ring, None if width else own, self.entry, listed if S else None, sink, turn)
        ] + [out]
        how = {"window": self.window + block, "ratio": self.ratio, "first": self.first, "block": block}
        if self.functions is attention_launch:
            workspace = attention_launch.AttendWorkspace.allocate(
                tokens,
                self.heads,
                self.features,
                entries,
                self.poisoned,
                programs=self.programs,
                dtype=self.dtype,
                hopper=self.hopper,
            )
            self.functions.attend(*given, rows, workspace, scale=0.17, **how, **self.launched(width))
        else:
            self.functions.attend(*given, rows, scale=0.17, **how)
        assert out is not None
        self.absent, self.out = 0, out.cpu()
        for token, (row, position) in enumerate(order):
            if row < 0:
                assert bool((self.out[token] == 0).all())
                continue
            at = range(max(position - self.window + 1, self.first), position + 1)
            if block:
                at = range(max(self.length[row] - self.window, 0), self.length[row] + block)
            keys = [self.near[row, p] for p in at if (row, p) not in self.missing]
            if self.ratio:
                complete = range((position + 1) // self.ratio)
                chosen = [w for w in complete if not S or w in listed[token].tolist()]
                absent = [w for w in chosen if (row, ((w + 1) * self.ratio - 1) // PAGE_TOKENS) == outside]
                keys += [self.far[row, w] for w in chosen if w not in absent]
                self.absent += len(absent)
            key = torch.stack(keys).double()
            score = torch.cat([0.17 * q[token].double() @ key.t(), sink.double().unsqueeze(1)], 1)
            want = score.softmax(1)[:, :-1] @ key
            want = turned(want.unsqueeze(0), self.rotation[position : position + 1], back=True)[0]
            error, size = (torch.linalg.vector_norm(x, dim=-1) for x in (self.out[token].double() - want, want))
            assert bool((error <= 2 * TOLERANCE[self.dtype] * size + 1e-6).all()), (token, (error / size).max())
        assert int(rows.fault_1) == self.absent
