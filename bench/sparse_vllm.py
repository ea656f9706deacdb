"""vLLM's sparse attention, for `bench/sparse.py` to measure beside: DeepGEMM's index scores, a selection of its own,
and FlashMLA over FP8 latents, or in a chunk of a prompt over what it widened to bf16.

vLLM must be on the `PYTHONPATH`. It attends with 64 or 128 heads, so that 16 are padded, as it does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import timing
import torch
from torch import Tensor

FEATURES, PAGE, SELECTED, LATENT, ENTRY_BYTES, QUERY = 128, 64, 2048, 512, 656, 576
WORKSPACE_BYTES = 1 << 20
FEW = 32
"""Rows up to which vLLM selects in another kernel."""
CHUNK = 2048
"""Tokens of a prompt whose scores are made at once."""


def _keys(entries: int) -> tuple[Tensor, Tensor]:
    """Keys of 128 features in FP8, and their scales."""
    key = torch.randn(entries, FEATURES, device="cuda").to(torch.float8_e4m3fn)
    return key, torch.rand(entries, device="cuda") + 0.5


def _padded(heads: int) -> int:
    return 64 if heads <= 64 else 128


class Rows:
    """Tensors of one layer's call for decode rows, and its steps."""

    def __init__(self, rows: int, width: int, context: int, heads: int, index_heads: int) -> None:
        import vllm._custom_ops  # noqa: F401 - registers operators
        from vllm.third_party.flashmla import flash_mla_interface as flashmla
        from vllm.utils import deep_gemm

        self.deep_gemm, self.flashmla = deep_gemm, flashmla
        self.context, tokens, pages = context, rows * width, context // PAGE
        self.page = torch.randperm(rows * pages, dtype=torch.int32, device="cuda").view(rows, pages)
        back = torch.arange(width - 1, -1, -1, dtype=torch.int32, device="cuda")
        self.length = (context - back).expand(rows, width).contiguous()
        key, scale = _keys(rows * context)
        self.index = torch.empty(rows * pages, PAGE * (FEATURES + 4), dtype=torch.uint8, device="cuda")
        self.index[:, : PAGE * FEATURES] = key.view(torch.uint8).view(rows * pages, -1)
        self.index[:, PAGE * FEATURES :] = scale.view(torch.uint8).view(rows * pages, -1)
        self.index = self.index.view(rows * pages, PAGE, 1, FEATURES + 4)
        shape = rows, width, index_heads, FEATURES
        self.index_q = torch.randn(*shape, device="cuda").to(torch.float8_e4m3fn)
        self.weight = torch.randn(tokens, index_heads, device="cuda")
        programs = torch.cuda.get_device_properties(0).multi_processor_count
        self.schedule = deep_gemm.get_paged_mqa_logits_metadata(self.length, PAGE, programs)
        self.work = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self.selected = torch.zeros(tokens, SELECTED, dtype=torch.int32, device="cuda")
        self.place = torch.randint(0, rows * context, (rows, width, SELECTED), dtype=torch.int32, device="cuda")
        self.q = torch.randn(rows, width, _padded(heads), QUERY, device="cuda", dtype=torch.bfloat16)
        self.cache = torch.zeros(rows * pages, PAGE, 1, ENTRY_BYTES, dtype=torch.uint8, device="cuda")
        self.plan = flashmla.FlashMLASchedMeta()
        self.scores()

    def scores(self) -> None:
        """Compute the scores of everything that the tokens see."""
        self.score = self.deep_gemm.fp8_fp4_paged_mqa_logits(
            (self.index_q, None),
            self.index,
            self.weight,
            self.length,
            self.page,
            self.schedule,
            max_model_len=self.context,
            clean_logits=False,
        )

    def select(self) -> None:
        """The best of them."""
        few = len(self.selected) <= FEW
        choose = torch.ops._C.cooperative_topk if few else torch.ops._C.persistent_topk
        choose(self.score, self.length, self.selected, self.work, SELECTED, self.context)

    def attend(self) -> None:
        """Attention to these; where they lie is known."""
        self.flashmla.flash_mla_with_kvcache(
            self.q,
            self.cache,
            None,
            None,
            LATENT,
            self.plan,
            softmax_scale=0.04,
            is_fp8_kvcache=True,
            indices=self.place,
        )


class Chunk:
    """Tensors of one layer's call for tokens of a prompt, the last of its context, and its steps."""

    def __init__(self, tokens: int, context: int, heads: int, index_heads: int) -> None:
        import vllm._custom_ops  # noqa: F401
        from vllm.third_party.flashmla import flash_mla_interface as flashmla
        from vllm.utils import deep_gemm

        self.deep_gemm, self.flashmla = deep_gemm, flashmla
        self.key = _keys(context)
        self.index_q = torch.randn(tokens, index_heads, FEATURES, device="cuda").to(torch.float8_e4m3fn)
        self.weight = torch.randn(tokens, index_heads, device="cuda")
        self.begin = torch.zeros(tokens, dtype=torch.int32, device="cuda")
        self.end = torch.arange(context - tokens + 1, context + 1, dtype=torch.int32, device="cuda")
        self.selected = torch.zeros(tokens, SELECTED, dtype=torch.int32, device="cuda")
        self.place = torch.randint(0, context, (tokens, 1, SELECTED), dtype=torch.int32, device="cuda")
        self.q = torch.randn(tokens, _padded(heads), QUERY, device="cuda", dtype=torch.bfloat16)
        self.cache = torch.randn(context, 1, QUERY, device="cuda", dtype=torch.bfloat16)
        self.scores()

    def scores(self) -> None:
        """Scores of the entries."""
        queries = self.index_q, None
        self.score = self.deep_gemm.fp8_fp4_mqa_logits(
            queries, self.key, self.weight, self.begin, self.end, clean_logits=False
        )

    def select(self) -> None:
        """Select entries."""
        sizes = len(self.selected), self.score.stride(0), self.score.stride(1)
        torch.ops._C.top_k_per_row_prefill(self.score, self.begin, self.end, self.selected, *sizes, SELECTED)

    def attend(self) -> None:
        """Attend to what is selected; latents have been widened before."""
        self.flashmla.flash_mla_sparse_fwd(self.q, self.cache, self.place, 0.04)


def line(rows: int, width: int, context: int, heads: int, index_heads: int, *, times: int = 1) -> str:
    """Measure vLLM on a problem of `bench/sparse.py`, of whose calls a chunk has `times`, and describe it in a line."""
    parts: tuple[str, ...] = "scores", "select", "attend"
    layers: list[Rows] | list[Chunk]
    if times > 1:
        tokens, times = min(CHUNK, width * times), -(-width * times // CHUNK)
        layers = [Chunk(tokens, context, heads, index_heads)]
    else:
        count = max(1, min(32, int(240e6 / (rows * context * (FEATURES + 4))) + 1))
        layers = [Rows(rows, width, context, heads, index_heads) for _ in range(count)]
    found = [times * _microseconds([[getattr(layer, part)] for layer in layers]) for part in parts]
    found.append(times * _microseconds([[getattr(layer, part) for part in parts] for layer in layers]))
    return "  vLLM: " + " | ".join(f"{name} {us:8.1f}" for name, us in zip((*parts, "all"), found, strict=True))


def _microseconds(layers: list[list[Callable[[], None]]]) -> float:
    """Measure one layer's steps, each layer's in a row, in microseconds."""
    for step in itertools.chain.from_iterable(layers):
        step()
    runs = [lambda steps=steps: [step() for step in steps] for steps in layers]
    return timing.microseconds(runs, 3000.0, 7)
