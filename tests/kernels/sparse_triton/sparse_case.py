"""Random calls of sparse attention over poisoned paged caches, and their answers in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels import sparse
from kernels.index_entry import parts
from kernels.page import PAGE_TOKENS, pages_for
from kernels.sparse import attention_launch, launch
from tests.support import fp8_entries

POISONED_PAGE = 2147480000
VALUES = ["normal", "few", "zeros", "wide", "odd", "in one group"]
"""Kinds of `drawn_scores`."""


@dataclass
class Sparse:
    """Row r has `rows[r][0]` entries, of which its `rows[r][1]` tokens are the last; a row without entries is padding.
    Caches hold NaN wherever no row has an entry, the table's tail huge ids."""

    rows: list[tuple[int, int]]
    heads: int = 4
    index_heads: int = 8
    features: int = 128
    """Features of an index key."""
    keys: int = PAGE_TOKENS
    """Keys of a page of the index; of other than 64 nothing but the scores is computed."""
    latent: int = 64
    rope: int = 16
    selected: int = 64
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    """Whether the cache of latents has FP8 entries, and that of index keys INT8 entries."""
    invariant: bool = False
    width: int = 0
    kernels: bool = False
    """Whether the kernels are launched whatever the device, and not what the device has."""
    dependent: bool = False
    hopper: bool | None = None
    """Whether the steps take Hopper's own kernels; None asks the device."""
    programs: int = 132
    """Multiprocessors for which attention is cut up."""
    spare_columns: int = 2
    least_columns: int = 0
    """Table columns at least."""
    least_pages: int = 0
    """Pages of the caches at least."""
    seed: int = 0
    device: str = "cpu"
    scale: float = 0.11
    tensors: dict[str, Tensor] = field(default_factory=dict, init=False)
    exact: bool = field(default=False, init=False)
    """Whether attention took FP8 entries for the numbers that they stand for, not rounded to `dtype`."""

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        lengths = [length for length, _ in self.rows]

        def needed(length: int) -> int:
            return -(-length // self.keys)

        used = sum(map(needed, lengths))
        self.pages = max(used + 2, self.least_pages)
        columns = max(max(map(needed, lengths)) + self.spare_columns, self.least_columns)
        page = torch.full((len(lengths), columns), POISONED_PAGE, dtype=torch.int32)
        free = (torch.randperm(used, generator=random) + 1).tolist()
        slots = []
        for row, length in enumerate(lengths):
            for column in range(needed(length)):
                page[row, column] = free.pop()
            at = torch.arange(length)
            slots.append(page[row, at // self.keys].long() * self.keys + at % self.keys)
        slot = torch.cat(slots)
        row = [r for r, (_, tokens) in enumerate(self.rows) for _ in range(tokens)]
        bound = [max(0, length - tokens + 1 + i) for length, tokens in self.rows for i in range(tokens)]
        tokens = len(row)
        q = torch.randn(tokens, self.heads, self.latent + self.rope, generator=random)
        index_q = torch.randn(tokens, self.index_heads, self.features, generator=random)
        key = torch.randn(len(slot), self.features, generator=random)
        key *= torch.randint(1, 5, (len(slot), 1), generator=random)
        self.key, self.slot = key.to(self.dtype), slot
        tensors = {
            "index_q": (index_q * 40).clamp(-127, 127).to(torch.int8) if self.fp8 else index_q.to(self.dtype),
            "weight": torch.randn(tokens, self.index_heads, generator=random),
            "index": self._index(),
            "cache": self._cache(random),
            "page": page,
            "row": torch.tensor(row, dtype=torch.int32),
            "bound": torch.tensor(bound, dtype=torch.int32),
            "score": torch.full((tokens, pages_for(columns * self.keys) * PAGE_TOKENS), torch.nan),
            "selected": torch.full((tokens, self.selected), 1 << 20, dtype=torch.int32),
            "q": q.to(self.dtype),
            "out": torch.full((tokens, self.heads, self.latent), torch.nan, dtype=self.dtype),
            "lse": torch.full((tokens, self.heads), torch.nan),
            "fault": torch.zeros(1, dtype=torch.int64),
        }
        self.tensors = {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def _index(self) -> Tensor:
        """NaN all over, and then the keys."""
        shape = (self.pages, self.keys)
        if not self.fp8:
            index = torch.full((*shape, self.features * self.dtype.itemsize), 255, dtype=torch.uint8).view(self.dtype)
            index.flatten(0, 1)[self.slot] = self.key
            return index
        index = torch.full((*shape, self.features + 4), 255, dtype=torch.uint8)
        place = self.slot // PAGE_TOKENS, self.slot % PAGE_TOKENS
        codes, scales = parts(index)
        scale = self.key.float().abs().amax(-1) / 127
        codes[place] = (self.key.float() / scale[:, None]).round().to(torch.int8)
        scales[place] = scale
        return index

    def _cache(self, random: torch.Generator) -> Tensor:
        cache = torch.full((self.pages * self.keys, self.latent + self.rope), torch.nan, dtype=self.dtype)
        cache[self.slot] = torch.randn(len(self.slot), self.latent + self.rope, generator=random).to(self.dtype)
        if self.fp8:
            bytes = fp8_entries.encoded(cache, self.latent)
            cache = bytes.masked_fill(cache.isnan().any(-1, keepdim=True), 255)
        return cache.view(self.pages, self.keys, -1)

    def write(self) -> None:
        """Write the keys to a cache that holds NaN."""
        t = self.tensors
        self.written = t["index"].clone()
        t["index"].view(torch.uint8).fill_(255)
        write = launch.write_index_keys if self.kernels else sparse.write_index_keys
        write(self.key.to(self.device), self.slot.to(self.device), t["index"], dependent=self.dependent)

    def check_keys(self) -> None:
        assert torch.equal(self.tensors["index"].view(torch.uint8), self.written.view(torch.uint8))

    def score(self) -> None:
        t = self.tensors
        tensors = (t[name] for name in ("index_q", "weight", "index", "page", "row", "bound", "score", "fault"))
        options = {"width": self.width, "invariant": self.invariant, "dependent": self.dependent}
        if self.kernels:
            launch.index_scores(*tensors, hopper=self.hopper, **options)
        else:
            sparse.index_scores(*tensors, **options)

    def select(self) -> None:
        t = self.tensors
        tensors = t["score"], t["bound"], t["selected"], t["fault"]
        workspace = sparse.SelectWorkspace.allocate(*t["score"].shape, self._poisoned, hopper=self.hopper)
        (launch.select_positions if self.kernels else sparse.select_positions)(
            *tensors, workspace, dependent=self.dependent
        )

    def attend(self) -> None:
        t = self.tensors
        tensors = [t[name] for name in ("q", "cache", "page", "row", "selected", "out", "lse", "fault")]
        if self.invariant:
            sizes = len(t["row"]), self.heads, self.latent, self.rope, self.selected, self.dtype
            own = sparse.InvariantWorkspace.allocate(*sizes, t["cache"], self._poisoned)
            if self.kernels:
                attention_launch.invariant_sparse_decode(*tensors, own, scale=self.scale)
            else:
                sparse.sparse_decode(*tensors, scale=self.scale, workspace=own, invariant=True)
            return
        shape = len(t["row"]), self.heads, self.latent, self.selected, self.dtype
        workspace = sparse.SparseWorkspace.allocate(
            *shape, self._poisoned, fp8=self.fp8, multiprocessors=self.programs, hopper=self.hopper
        )
        self.exact = workspace.tiling.path == "fp8"
        if self.kernels:
            attention_launch.sparse_decode(*tensors, workspace, scale=self.scale, dependent=self.dependent)
        else:
            sparse.sparse_decode(*tensors, scale=self.scale, workspace=workspace, dependent=self.dependent)

    def _poisoned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.full((*shape, dtype.itemsize), 255, dtype=torch.uint8, device=self.device).view(dtype).view(shape)

    def _host(self) -> dict[str, Tensor]:
        return {name: tensor.cpu() for name, tensor in self.tensors.items()}

    def _places(self, t: dict[str, Tensor], token: int, position: Tensor) -> Tensor:
        """Return the places in the flattened caches of those positions that exist."""
        rows, columns = t["page"].shape
        row = int(t["row"][token])
        if not 0 <= row < rows:
            return position[:0].long()
        position = position[(position >= 0) & (position < columns * PAGE_TOKENS)].long()
        page = t["page"][row, position // PAGE_TOKENS].long()
        place = page * PAGE_TOKENS + position % PAGE_TOKENS
        return place[(page >= 0) & (page < self.pages)]

    def _keys(self, t: dict[str, Tensor]) -> Tensor:
        if not self.fp8:
            return t["index"].flatten(0, 1).double()
        codes, scales = parts(t["index"])
        return (codes.double() * scales.double().unsqueeze(-1)).flatten(0, 1)

    def check_scores(self) -> None:
        """Products of exact numbers, summed in fp32."""
        t = self._host()
        keys = self._keys(t)
        for token, bound in enumerate(t["bound"].tolist()):
            if not 0 < bound <= t["score"].shape[1] or not 0 <= int(t["row"][token]) < len(t["page"]):
                continue
            page = t["page"][int(t["row"][token]), torch.arange(bound) // self.keys].long()
            there = (page >= 0) & (page < self.pages)
            key = keys[page.where(there, 0) * self.keys + torch.arange(bound) % self.keys]
            q, weight = t["index_q"][token].double().t(), t["weight"][token].double()
            dot = (key @ q).relu() * weight
            got = t["score"][token, :bound].double()
            assert (got[~there] == -torch.inf).all()
            bar = ((key.abs() @ q.abs()) * weight.abs()).sum(-1)[there] * self._rounding()
            off = (got - dot.sum(-1))[there].abs()
            assert (off <= bar).all(), f"token {token}: {(off / bar).nan_to_num(9e9).max()}"

    def _rounding(self) -> float:
        """Bound of the rounding of scores, as a part of the sum of all products' magnitudes. Tensor cores add floats
        with fewer bits, and integers exactly."""
        return 1e-5 if self.tensors["score"].is_cuda and not self.fp8 else 1e-6

    def check_selected(self) -> None:
        t = self._host()
        want = torch.full_like(t["selected"], -1)
        for token, bound in enumerate(t["bound"].tolist()):
            score = (t["score"][token, :bound] + 0.0).numpy()
            # From the last key to the first: NaN stands above infinity, then scores, then positions.
            order = np.lexsort((np.arange(bound), -np.where(np.isnan(score), 0, score), ~np.isnan(score)))
            best = np.sort(order[: self.selected])
            want[token, : len(best)] = torch.from_numpy(best.astype(np.int32))
        assert torch.equal(t["selected"], want)

    def check_attention(self) -> None:
        """bfloat16: weights, parts and outputs are rounded to 8 bits of significand, each once. float32: rounding of
        sums over a few thousand terms."""
        t, t_is_cuda = self._host(), self.tensors["out"].is_cuda
        sizes = self.latent, self.rope, self.dtype
        flat = t["cache"].flatten(0, 1)
        tolerance = 1e-5 if self.dtype == torch.float32 else 2**-7
        for token, position in enumerate(t["selected"]):
            place = self._places(t, token, position)
            out, lse = t["out"][token].double(), t["lse"][token].double()
            if not len(place):
                assert (out == 0).all()
                assert (lse == -torch.inf).all()
                continue
            read = fp8_entries.numbers if self.exact else fp8_entries.read
            entry = read(flat[place], *sizes).double() if self.fp8 else flat[place].double()
            q = t["q"][token].double()
            score = self.scale * (q @ entry.t())
            # Of sums of 8-bit products Hopper's tensor cores keep 14 bits.
            short = 2**-13 * self.scale if self.exact and t_is_cuda else 0.0
            longest = torch.linalg.vector_norm(q, dim=-1).max() * torch.linalg.vector_norm(entry, dim=-1).max()
            off = 2e-5 + short * float(longest)
            torch.testing.assert_close(lse, torch.logsumexp(score, -1), rtol=1e-5, atol=off)
            want = torch.softmax(score, -1) @ entry[:, : self.latent]
            error, norm = (torch.linalg.vector_norm(x, dim=-1) for x in (out - want, want))
            assert (error <= tolerance * norm).all(), (error / norm).max()

    def plant_faults(self) -> None:
        """A page of the first token's row that is outside the cache, and a bound of the second behind the scores."""
        self.tensors["page"][0, 1] = self.pages
        self.tensors["bound"][1] = self.tensors["score"].shape[1] + 1


def drawn_scores(values: str, tokens: int, columns: int, seed: int, few: int = 8192) -> Tensor:
    """Scores of one kind. `few`: of so many groups a fifth have large scores, where that is the kind."""
    random = torch.Generator().manual_seed(seed)
    score = torch.randn(tokens, columns, generator=random)
    if values == "few":
        score = score.round()
    elif values == "zeros":
        score = score.relu() * (score > 2) * score.sign()
    elif values == "wide":
        score = score.sign() * 10 ** (score * 12)
    elif values == "odd":
        odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-42, -1e-42, 2.0])
        score = odd[torch.randint(0, len(odd), score.shape, generator=random)]
    elif values == "in one group":
        # Those of few groups are large, so that there are more candidates than there is room for.
        score += 9.0 * (torch.arange(columns) % few < few // 5)
    return score
