"""Times sparse attention on this machine's GPU: index scores, selection and attention over the selected entries of one
layer, inside a CUDA graph, with caches that come from memory.

    python bench/sparse.py                       # all parts
    python bench/sparse.py --only decode,alone   # some of: decode, wide, alone, prefill
    python bench/sparse.py --cache fp8           # latents in FP8, index keys in INT8; or bf16
    python bench/sparse.py --cache fp8 --vllm    # beside vLLM's kernels, which must be on the PYTHONPATH

Times are of one layer, in microseconds, each step alone and then all three in a row. "floor" is the bytes that a step
must read and write over 4.2 TB/s, or its products over 790 TFLOP/s (of 8 bits 1,580) where that is more: keys of all
tokens for the scores, scores once written and once read, selected entries for the attention. "dense" is this project's
decode attention over the whole cache in the same form. Prefill times are of one chunk, all its calls together; where
its context is widened to bf16 before, that is in the time of the attention.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sparse_vllm
import timing

from kernels.gather_context import gather_context
from kernels.index_entry import SCALE_BYTES
from kernels.latent_entry import fp8_entry
from kernels.mla_decode import launch as dense_launch
from kernels.mla_decode.schedule import DecodeShape, Workspace, hopper_tiling
from kernels.sparse import SelectWorkspace, SparseWorkspace, attention_launch, launch
from workers.models.attention.widened import FEW_HEADS

LATENT, ROPE, PAGE, SELECTED, FEATURES = 512, 64, 64, 2048, 128
L2_BYTES = 60e6
BYTES_A_MICROSECOND = 4.2e6


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Allocate a tensor on the GPU."""
    return torch.empty(shape, dtype=dtype, device="cuda")


@dataclass(frozen=True)
class Problem:
    """Rows of one length, of `width` tokens each."""

    rows: int
    width: int
    context: int
    heads: int
    fp8: bool
    index_heads: int = 64

    @property
    def tokens(self) -> int:
        """Query tokens."""
        return self.rows * self.width

    @property
    def entry(self) -> int:
        """Bytes of an entry of the latent cache."""
        return fp8_entry(LATENT, ROPE, torch.bfloat16).size if self.fp8 else 2 * (LATENT + ROPE)

    @property
    def key(self) -> int:
        """Bytes of an entry of the index cache."""
        return FEATURES + SCALE_BYTES if self.fp8 else 2 * FEATURES

    def floors(self) -> tuple[float, float, float]:
        """Microseconds that scores, selection and attention cannot beat on one H200."""
        seen = self.tokens * self.context
        score = max(
            (self.rows * self.context * self.key + 4 * seen) / BYTES_A_MICROSECOND,
            2 * seen * self.index_heads * FEATURES / (1580e6 if self.fp8 else 790e6),
        )
        select = 4 * (seen + self.tokens * SELECTED) / BYTES_A_MICROSECOND
        entries = self.tokens * min(SELECTED, self.context)
        vectors = self.tokens * self.heads * (2 * LATENT + ROPE)
        attention = max((entries * self.entry + 2 * vectors) / BYTES_A_MICROSECOND, self.products() / 790e6)
        return score, select, attention

    def products(self) -> float:
        """Floating-point operations of attention."""
        return 2.0 * self.tokens * self.heads * min(SELECTED, self.context) * (2 * LATENT + ROPE)


class Layer:
    """Tensors of one layer's call, and its steps. Caches are random bytes."""

    def __init__(self, problem: Problem, shared: Layer | None = None) -> None:
        p = problem
        pages = p.context // PAGE
        total = p.rows * pages
        self.problem = p
        self.page = torch.randperm(total, dtype=torch.int32, device="cuda").view(p.rows, pages)
        self.row = torch.arange(p.rows, dtype=torch.int32, device="cuda").repeat_interleave(p.width)
        back = torch.arange(p.width - 1, -1, -1, dtype=torch.int32, device="cuda").repeat(p.rows)
        self.bound = p.context - back
        self.index, self.cache = self._index(total), self._cache(total)
        self.attended = self.cache, self.page
        index_q = torch.randn(p.tokens, p.index_heads, FEATURES, device="cuda")
        self.index_q = (40 * index_q).clamp(-127, 127).to(torch.int8) if p.fp8 else index_q.bfloat16()
        self.weight = torch.randn(p.tokens, p.index_heads, device="cuda")
        self.q = torch.randn(p.tokens, p.heads, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
        if shared is not None:
            for name in ("score", "selected", "out", "lse", "fault", "select_workspace", "workspace"):
                setattr(self, name, getattr(shared, name))
            return
        self.score = empty(p.tokens, p.context, dtype=torch.float32)
        self.selected = empty(p.tokens, SELECTED, dtype=torch.int32)
        self.out = empty(p.tokens, p.heads, LATENT, dtype=torch.bfloat16)
        self.lse = empty(p.tokens, p.heads, dtype=torch.float32)
        self.fault = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.select_workspace = SelectWorkspace.allocate(p.tokens, p.context, empty)
        self.workspace = SparseWorkspace.allocate(p.tokens, p.heads, LATENT, SELECTED, torch.bfloat16, empty, fp8=p.fp8)

    def _index(self, pages: int) -> Tensor:
        if not self.problem.fp8:
            return torch.randn(pages, PAGE, FEATURES, device="cuda", dtype=torch.bfloat16)
        index = torch.randint(0, 256, (pages, PAGE, self.problem.key), dtype=torch.uint8, device="cuda")
        index.view(pages, -1)[:, PAGE * FEATURES :].view(torch.float32).uniform_(0.5, 1.5)
        return index

    def _cache(self, pages: int) -> Tensor:
        if not self.problem.fp8:
            return torch.randn(pages, PAGE, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
        at = fp8_entry(LATENT, ROPE, torch.bfloat16)
        cache = torch.randint(0, 256, (pages, PAGE, at.size), dtype=torch.uint8, device="cuda")
        cache[..., :LATENT] &= 0xB7  # e4m3 below 2**-2 or so, and no NaN
        cache[..., at.scales : at.rope] = torch.ones(4, device="cuda").view(torch.uint8)
        cache[..., at.rope :] = torch.ones(ROPE, dtype=torch.bfloat16, device="cuda").view(torch.uint8)
        return cache

    def scores(self) -> None:
        """Scores of all that the tokens see."""
        launch.index_scores(
            self.index_q,
            self.weight,
            self.index,
            self.page,
            self.row,
            self.bound,
            self.score,
            self.fault,
            width=self.problem.width,
            dependent=True,
        )

    def select(self) -> None:
        """The best of them."""
        launch.select_positions(
            self.score, self.bound, self.selected, self.fault, self.select_workspace, dependent=True
        )

    def attend(self) -> None:
        """Attention over these."""
        attention_launch.sparse_decode(
            self.q,
            *self.attended,
            self.row,
            self.selected,
            self.out,
            self.lse,
            self.fault,
            self.workspace,
            scale=0.04,
            dependent=True,
        )

    def widen(self) -> None:
        """Widen the context once, as steps do for a chunk of many heads over FP8 entries: from then on its tokens
        attend to these entries in bf16."""
        pages, cu = self.page.numel(), torch.tensor([0, self.page.numel() * PAGE], dtype=torch.int32, device="cuda")
        wide = empty(pages, PAGE, LATENT + ROPE, dtype=torch.bfloat16)
        self.attended = wide, torch.arange(pages, dtype=torch.int32, device="cuda").view(1, pages)
        self.filling = partial(
            gather_context, self.cache, self.page, cu, wide.view(-1, LATENT + ROPE), begin=0, latent=LATENT
        )
        self.filling()

    def all(self) -> None:
        """The three in a row."""
        self.scores()
        self.select()
        self.attend()


def layers_of(problem: Problem) -> list[Layer]:
    """Make as many layers as make the caches four times the L2; one where they are larger than that."""
    size = problem.rows * problem.context * problem.key
    count = max(1, min(32, int(4 * L2_BYTES / size) + 1))
    first = Layer(problem)
    return [first, *(Layer(problem, first) for _ in range(count - 1))]


def microseconds(layers: list[Layer], step: Callable[[Layer], None]) -> float:
    """Measure a step of one layer, in microseconds."""
    return timing.microseconds([partial(step, layer) for layer in layers], 3000.0, 7)


def dense(problem: Problem, layer: Layer) -> float:
    """Microseconds of dense attention, and its merge, over the same cache."""
    p = problem
    shape = DecodeShape(p.rows, p.width, p.heads, LATENT, ROPE, p.context // PAGE)
    tiling = hopper_tiling(shape, torch.cuda.get_device_properties(0).multi_processor_count, fp8=p.fp8)
    buffer = empty(Workspace.bytes(shape, tiling, torch.bfloat16), dtype=torch.uint8)
    workspace = Workspace.over(buffer, shape, tiling, torch.bfloat16)
    length = torch.full((p.rows,), p.context, dtype=torch.int32, device="cuda")
    dense_launch.schedule(length, layer.page, workspace)
    q = layer.q.view(p.rows, p.width, p.heads, -1)
    out, lse = layer.out.view(*q.shape[:3], -1), layer.lse.view(q.shape[:3])

    def run() -> None:
        dense_launch.attend(q, layer.cache, layer.page, length, out, lse, workspace, scale=0.04, dependent=True)
        dense_launch.merge(out, lse, workspace, dependent=True)

    return timing.microseconds([run], 3000.0, 5)


def reported(problem: Problem, *, beside_dense: bool = False, times: int = 1, vllm: bool = False) -> None:
    """Print a line of the table, and one of vLLM's kernels. `times`: calls of a chunk."""
    layers = layers_of(problem)
    widening = 0.0
    if times > 1 and problem.fp8 and problem.heads > FEW_HEADS:
        for layer in layers:
            layer.widen()
        widening = timing.microseconds([layer.filling for layer in layers], 3000.0, 7)
    layers[0].all()  # so that steps measured alone have what the one before leaves
    found = [times * microseconds(layers, step) for step in (Layer.scores, Layer.select, Layer.attend, Layer.all)]
    found[2:] = [us + widening for us in found[2:]]
    floors = [times * floor for floor in problem.floors()]
    p = problem
    line = f"{p.rows:5}x{p.width} {p.context:7} {p.heads:4} {'fp8' if p.fp8 else 'bf16':4} |"
    for name, got, floor in zip(("scores", "select", "attend"), found, floors, strict=False):
        line += f" {name} {got:8.1f} ({floor / got:4.0%} of {floor:7.1f}) |"
    line += f" all {found[3]:8.1f} ({sum(floors) / found[3]:4.0%})"
    line += f" | indexer {found[0] + found[1]:7.1f} | attention {times * p.products() / found[2] / 1e6:4.0f} TFLOP/s"
    if beside_dense:
        whole = dense(p, layers[0])
        line += f" | dense {whole:7.1f}, ratio {found[3] / whole:.2f}"
    print(line, flush=True)
    assert int(layers[0].fault) == 0
    if vllm and p.fp8:
        del layers
        try:
            print(sparse_vllm.line(p.rows, p.width, p.context, p.heads, p.index_heads, times=times), flush=True)
        except (ImportError, RuntimeError) as failure:
            print(f"  vLLM: {failure}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="decode,wide,alone,prefill")
    parser.add_argument("--cache", default="fp8,bf16")
    parser.add_argument("--vllm", action="store_true", help="measure its kernels beside those over FP8")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, microseconds a layer", flush=True)
    for form in chosen.cache.split(","):
        fp8 = form == "fp8"
        parts = chosen.only.split(",")
        report = partial(reported, vllm=chosen.vllm)
        if "alone" in parts:
            for context in (4096, 65536, 131072):
                report(Problem(1, 1, context, 16, fp8), beside_dense=True)
            report(Problem(1, 2, 131072, 128, fp8))
        if "decode" in parts:
            for width in (1, 2):
                report(Problem(64, width, 65536, 16, fp8), beside_dense=True)
            report(Problem(16, 1, 65536, 16, fp8), beside_dense=True)
            report(Problem(64, 1, 1024, 16, fp8), beside_dense=True)
        if "wide" in parts:
            report(Problem(64, 1, 65536, 128, fp8))
            report(Problem(128, 1, 16384, 128, fp8))
        if "prefill" in parts:
            # A row whose last tokens are asked for: 512 of a chunk of 8,192 at a time.
            for context in (8192, 32768):
                report(Problem(1, 512, context, 128, fp8), times=16)


if __name__ == "__main__":
    main()
