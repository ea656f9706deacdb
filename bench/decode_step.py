"""Times a whole decode step of the DeepSeek-V2-Lite shape on this machine's GPU: forward pass, output head and argmax
as one CUDA graph, beside the time in which its bytes can be read.

    python bench/decode_step.py                      # 1, 2, 4 and 16 rows of 1024 cached tokens
    python bench/decode_step.py --rows 1 --width 4   # four tokens of one row
    python bench/decode_step.py --rows 1 --kernels   # and every kernel alone

Weights are normal(0, 0.02), norms 1, so that routing is that of random tokens. `--check` compares a model of few layers
with the same model in fp32. A kernel alone is its launches of one step, in order, in a graph without the others: its
share is of the bytes of weights it streams at 4.2 TB/s, the read bandwidth of an H200.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels.linear import best_linear, best_token
from workers.batch import Batch, DecodeBatch, LatentCache
from workers.models.config import ModelConfig
from workers.models.decode_path import DecodePath
from workers.models.deepseek import DeepseekModel
from workers.parallel import TensorParallel
from workers.plan import BatchLayout
from workers.scratch import Scratch
from workers.weights import WeightSource

BANDWIDTH = 4.2e6
"""Bytes a microsecond."""
DEVICE = torch.device("cuda")
V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "max_position_embeddings": 4096,
}


class RandomWeights(WeightSource):
    """Norms of 1, everything else normal(0, 0.02) rounded to bf16; the same numbers in every dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(TensorParallel(), dtype, DEVICE)

    def fill_part(self, into: Tensor, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> None:
        """Random numbers for `into`."""
        if "norm" in name:
            into.fill_(1.0)
        else:
            into.copy_(torch.empty(into.shape, device=DEVICE, dtype=torch.bfloat16).normal_(0, 0.02))

    def progress(self, text: str) -> None:
        """Says nothing."""


def model_of(layers: int, dtype: torch.dtype) -> DeepseekModel:
    torch.manual_seed(0)
    config = ModelConfig.parse(V2_LITE | {"num_hidden_layers": layers})
    return DeepseekModel(RandomWeights(dtype), config, draft_layer=False, max_positions=4096)


class DecodeStep:
    """One step of `rows` rows of `width` tokens, each row with `context` entries when the step ends."""

    def __init__(self, model: DeepseekModel, rows: int, width: int, context: int) -> None:
        self.model, self.path = model, DecodePath(model)
        self.rows, self.width, self.context = rows, width, context
        torch.manual_seed(rows)
        pages = -(-context // 64)
        dtype = model.norm_E.dtype
        self.cache = LatentCache.allocate(model.cache_layers, rows * pages + 1, 64, model.cache_width, dtype, DEVICE)
        for layer in self.cache.layers:
            layer.normal_()
        table = torch.randperm(rows * pages, device=DEVICE).view(rows, pages).int() + 1
        position = torch.arange(context - width, context, device=DEVICE).repeat(rows, 1)
        slot = torch.gather(table.long(), 1, position // 64) * 64 + position % 64
        length = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
        layout = BatchLayout(width, rows)
        self.batch = Batch(layout, position.flatten(), slot.flatten(), DecodeBatch(length, table), None)
        self.tokens = layout.tokens
        self.token_T = torch.randint(0, model.config.vocab_size, (self.tokens,), device=DEVICE)
        vocab = model.head_YE.shape[0]
        self.logit_TY = torch.empty(self.tokens, vocab, device=DEVICE)
        self.value_TP = torch.empty(self.tokens, -(-vocab // 16), device=DEVICE)
        self.index_TP = torch.empty(self.tokens, -(-vocab // 16), dtype=torch.int32, device=DEVICE)
        self.best_T = torch.empty(self.tokens, dtype=torch.int64, device=DEVICE)
        self.scratch = Scratch(DEVICE)
        self.forward = self.path.forward

    def __call__(self) -> None:
        """Launch the step."""
        with self.scratch.scope():
            self.hidden_TE = self.forward(self.token_T, self.batch, self.cache, self.scratch)
            best_linear(self.hidden_TE, self.model.head_YE, self.logit_TY, self.value_TP, self.index_TP, dependent=True)
            best_token(self.value_TP, self.index_TP, self.best_T, dependent=True)

    def graph(self) -> torch.cuda.CUDAGraph:
        """Warm up, size the scratch memory, capture."""
        self()
        torch.cuda.synchronize()
        self.scratch = Scratch(DEVICE, torch.empty(self.scratch.peak, dtype=torch.uint8, device=DEVICE))
        return capture(self)


def capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph, repeats: int = 50) -> float:
    """Median of one replay; a stream of replays, so that the host's gaps do not count."""
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(events))


def floor_bytes(step: DecodeStep) -> float:
    """Bytes of weights and cache that this step cannot but read; its experts are those its tokens chose."""
    model, total = step.model, 0.0
    for layer, cache in zip(model.layers, step.cache.layers, strict=False):
        attention = layer.attention
        tensors = [attention.down_FE, attention.kv_up_HFL, attention.out_EF]
        if attention.q_up_QA is not None:
            tensors.append(attention.q_up_QA)
        total += sum(t.numel() * t.element_size() for t in tensors)
        total += step.rows * step.context * cache.shape[-1] * cache.element_size()
    total += model.head_YE.numel() * model.head_YE.element_size()
    return total + feed_forward_bytes(step)


def feed_forward_bytes(step: DecodeStep) -> float:
    """As `floor_bytes`, of the feed-forward parts."""
    total = 0.0
    for layer, count in zip(step.model.layers, chosen_experts(step), strict=True):
        network = layer.feed_forward
        dense = network if hasattr(network, "gate_up_FE") else network.shared
        if dense is not None:
            total += 2 * (dense.gate_up_FE.numel() + dense.down_EI.numel())
        if count:
            total += 2 * count * (network.gate_up_XFE[0].numel() + network.down_XEI[0].numel())
            total += 4 * network.router_XE.numel()
    return total


def chosen_experts(step: DecodeStep) -> list[int]:
    """How many experts each layer's tokens wake."""
    from kernels.few_experts import launch

    counts, plain = [0] * step.model.config.num_dense_layers, launch.choose

    def counting(*args: Any, **options: Any) -> None:
        plain(*args, **options)
        counts.append(int(args[3].slot_S[-1]))

    launch.choose = counting
    try:
        step()
    finally:
        launch.choose = plain
    return counts


def record(run: Callable[[], None]) -> list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]]:
    """Every kernel launch of `run`: kernel, grid, arguments."""
    launches: list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]] = []
    plain = JITFunction.run

    def noting(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        launches.append((self, grid, args, kwargs))
        return plain(self, *args, grid=grid, warmup=warmup, **kwargs)

    JITFunction.run = noting
    try:
        run()
    finally:
        JITFunction.run = plain
    torch.cuda.synchronize()
    return launches


def by_kernel(step: DecodeStep) -> None:
    """Every kernel alone."""
    plain, step.scratch = step.scratch, Scratch(DEVICE)  # every buffer its own: launches are repeated out of order
    launches = record(step)
    step.scratch = plain
    groups: dict[str, list[Any]] = {}
    for launch in launches:
        kernel, _, _, options = launch
        name = kernel.fn.__name__
        if "F" in options and "K" in options:
            name += f" {options['F']}x{options['K']}"
        elif name == "stream_gate_up":
            name += f" 2x{options['I']}x{options['K']}"
        groups.setdefault(name, []).append(launch)
    experts = sum(chosen_experts(step)) / max(1, len(step.model.layers) - step.model.config.num_dense_layers)
    print(f"  {'kernel alone':34}{'launches':>9}{'us each':>9}{'ms':>8}{'share of 4.2 TB/s':>19}")
    total = 0.0
    for name, own in groups.items():

        def run(own: list[Any] = own) -> None:
            for kernel, grid, args, kwargs in own:
                kernel.run(*args, grid=grid, warmup=False, **kwargs)

        ms = milliseconds(capture(run))
        total += ms
        size = streamed_bytes(own[0], experts)
        share = f"{size * len(own) / BANDWIDTH / ms / 10:18.0f}%" if size else ""
        print(f"  {name:34}{len(own):9}{ms / len(own) * 1e3:9.2f}{ms:8.3f}{share}")
    print(f"  {'sum':34}{len(launches):9}{'':9}{total:8.3f}")


def streamed_bytes(launch: Any, experts: float) -> float:
    """Bytes of weights one launch reads."""
    kernel, grid, _, o = launch
    name = kernel.fn.__name__
    if name == "stream_linear":
        return 2.0 * o["F"] * o["K"] * grid[1]
    if name == "stream_gate_up":
        return 4.0 * o["I"] * o["K"]
    if name == "gate_up":
        return 4.0 * o["K"] * (o["SHARED"] + experts * o["I"])
    if name == "down":
        return 2.0 * o["E"] * (o["SHARED"] + experts * o["I"])
    return 0.0


def check(rows: int, width: int) -> None:
    """Three layers: the path in bf16 against the layers in fp32, and twenty replays against one another."""
    step = DecodeStep(model_of(3, torch.bfloat16), rows, width, 1000)
    wide = DecodeStep(model_of(3, torch.float32), rows, width, 1000)
    for ours, theirs in zip(step.cache.layers, wide.cache.layers, strict=True):
        theirs.copy_(ours)
    wide.token_T, wide.batch = step.token_T, step.batch
    graph = step.graph()
    step()
    torch.cuda.synchronize()
    eager_TE = step.hidden_TE.clone()
    eager_logit_TY = step.logit_TY.clone()
    different = 0
    for _ in range(20):
        step.hidden_TE.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        different += int(not torch.equal(step.hidden_TE, eager_TE) or not torch.equal(step.logit_TY, eager_logit_TY))
    want_TE = wide.model.forward(wide.token_T, wide.batch, wide.cache, Scratch(DEVICE))
    error_T = (step.hidden_TE.float() - want_TE).norm(dim=1) / want_TE.norm(dim=1)
    want_T = wide.model.logits(want_TE, Scratch(DEVICE)).argmax(1)
    same = float((want_T == step.best_T).float().mean())
    entries = max(
        float((a.float() - b).norm() / b.norm()) for a, b in zip(step.cache.layers, wide.cache.layers, strict=True)
    )
    assert torch.equal(step.best_T, step.logit_TY.argmax(1))
    print(
        f"check rows {rows} width {width}: relative error max {error_T.max():.1e} median {error_T.median():.1e}, cache "
        f"{entries:.1e}, same argmax {same:.2f}, replays that differ from eager {different}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1,2,4,16")
    parser.add_argument("--width", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--kernels", action="store_true", help="time every kernel alone")
    parser.add_argument("--check", action="store_true", help="compare with fp32 on three layers, then stop")
    given = parser.parse_args()
    with torch.inference_mode():
        if given.check:
            for rows, width in ((1, 1), (2, 1), (4, 1), (16, 1), (1, 4), (5, 3)):
                check(rows, width)
            return
        model = model_of(V2_LITE["num_hidden_layers"], torch.bfloat16)
        for rows in map(int, given.rows.split(",")):
            step = DecodeStep(model, rows, given.width, given.context)
            graph = step.graph()
            times = [milliseconds(graph) for _ in range(3)]
            floor = floor_bytes(step) / BANDWIDTH / 1e3
            print(
                f"rows {rows} width {given.width} context {given.context}: {min(times):.3f} ms "
                f"({', '.join(f'{t:.3f}' for t in times)}), floor {floor:.3f} ms, {floor / min(times):.0%}, "
                f"experts {sum(chosen_experts(step)) / 26:.1f}",
                flush=True,
            )
            if given.kernels:
                by_kernel(step)


if __name__ == "__main__":
    main()
