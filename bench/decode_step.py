"""Times whole decode steps of the DeepSeek-V2-Lite shape on this machine's GPU, as a replica replays them: state,
embedding, layers, head, sampling, verification and drafts in one graph.

    python bench/decode_step.py                       # 1, 2, 4 and 16 rows of 1024 cached tokens, greedy
    python bench/decode_step.py --rows 1 --width 4    # one row that verifies and drafts three tokens
    python bench/decode_step.py --no-kernels          # without the tables of single kernels

One line a number of rows: the few-token path, the plain layers beside it, and the time in which the bytes can be read.
Then every kernel of the path alone: its launches of one step, in order, in a graph without the others; its share is of
the bytes of weights it streams at 4.2 TB/s, the read bandwidth of an H200. Weights are normal(0, 0.02), norms 1, so
that routing is that of random tokens; a draft layer, where there is one, is as random.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from workers.batch import LatentCache
from workers.decode_step import DecodeStep
from workers.models.config import ModelConfig
from workers.models.decode_path import DecodePath
from workers.models.deepseek import DeepseekModel
from workers.parallel import TensorParallel
from workers.plan import BatchLayout
from workers.sampling import SamplingState
from workers.scratch import Scratch
from workers.slots import SlotState
from workers.step import StepParts
from workers.weights import WeightSource

BANDWIDTH = 4.2e6
"""Bytes a microsecond."""
REPEATS = 50
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
    """Norms of 1, everything else normal(0, 0.02)."""

    def fill_part(self, into: Tensor, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> None:
        """Random numbers for `into`."""
        if "norm" in name:
            into.fill_(1.0)
        else:
            into.normal_(0, 0.02)

    def progress(self, text: str) -> None:
        """Says nothing."""


def model_of(values: dict[str, Any], width: int, dtype: torch.dtype, device: torch.device) -> DeepseekModel:
    """A random model of these config values, with a draft layer if rows feed more than one token."""
    torch.manual_seed(0)
    source = RandomWeights(TensorParallel(), dtype, device)
    return DeepseekModel(source, ModelConfig.parse(values), draft_layer=width > 1, max_positions=4096)


class Case:
    """Steps of `rows` rows of `width` tokens over `context` cached tokens each."""

    def __init__(self, model: DeepseekModel, rows: int, width: int, context: int) -> None:
        self.model, self.rows, self.width, self.context = model, rows, width, context
        self.device = device = model.norm_E.device
        torch.manual_seed(rows)
        pages = -(-(context + 40 * REPEATS * width) // 64)  # every replay moves on
        shape = (model.cache_layers, rows * pages + 1, 64, model.cache_width)
        self.cache = LatentCache.allocate(*shape, model.norm_E.dtype, device)
        for layer in self.cache.layers:
            layer.normal_()
        self.state = SlotState(rows, width - 1, pages, device)
        sampling = SamplingState(rows, model.config.vocab_size, device)
        sampling.reserve()
        self.parts = StepParts(model, self.cache, self.state, sampling, TensorParallel(), width)
        tensors = self.state.tensors
        tensors.page_SP[:rows] = torch.randperm(rows * pages, device=device).view(rows, pages).int() + 1
        for ids in (tensors.last_S, tensors.draft_SK):
            ids.copy_(torch.randint(0, model.config.vocab_size, ids.shape, device=device))
        self.rewind()

    def rewind(self) -> None:
        """Let the rows have `context` tokens again."""
        self.state.tensors.length_S[: self.rows] = self.context - self.width

    def step(self, scratch: Scratch) -> DecodeStep:
        """The step of all rows."""
        key = BatchLayout(self.width, self.rows).graph_key(self.rows, self.width - 1)
        step = DecodeStep(self.parts, key, scratch)
        step.slot_R.copy_(torch.arange(self.rows))
        return step

    def milliseconds(self) -> list[float]:
        """Three measurements of the step as a graph."""
        measured = Scratch(self.device)
        self.step(measured).run()
        scratch = Scratch(self.device, torch.empty(measured.peak, dtype=torch.uint8, device=self.device))
        step = self.step(scratch)
        graph = capture(lambda: step.run())
        times = []
        for _ in range(3):
            self.rewind()
            times.append(milliseconds(graph))
        self.rewind()
        return times


@contextmanager
def plain_layers() -> Iterator[None]:
    """Within this context no pass takes the few-token path."""
    takes = DecodePath.takes
    DecodePath.takes = lambda self, batch: False
    try:
        yield
    finally:
        DecodePath.takes = takes


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Median of one replay; a stream of replays, so that the host's gaps do not count."""
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(events))


def floor_bytes(case: Case, experts: float) -> float:
    """Bytes of weights and cache that the target's pass cannot but read, `experts` in each layer that has them."""
    model, total = case.model, float(case.model.head_YE.numel())
    for layer in model.layers:
        attention, network = layer.attention, layer.feed_forward
        tensors = [attention.down_FE, attention.kv_up_HFL, attention.out_EF, attention.q_up_QA]
        dense = network if hasattr(network, "gate_up_FE") else network.shared
        if dense is not None:
            tensors += [dense.gate_up_FE, dense.down_EI]
        total += sum(t.numel() for t in tensors if t is not None)
        total += case.rows * case.context * model.cache_width
        if dense is not network:
            total += experts * (network.gate_up_XFE[0].numel() + network.down_XEI[0].numel())
            total += 2 * network.router_XE.numel()  # fp32
    return total * model.norm_E.element_size()


def chosen_experts(case: Case) -> float:
    """How many experts the tokens of a step wake in each layer, on average."""
    from kernels.few_experts import launch

    counts, plain = [], launch.choose

    def counting(*args: Any, **options: Any) -> None:
        plain(*args, **options)
        counts.append(int(args[3].slot_S[-1]))

    launch.choose = counting
    try:
        case.step(Scratch(case.device)).run()
    finally:
        launch.choose = plain
    return sum(counts) / max(len(counts), 1)


def record(run: Callable[[], object]) -> list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]]:
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


def by_kernel(case: Case, experts: float) -> None:
    """Every kernel alone."""
    # Every buffer its own, and kept: launches are repeated out of order.
    launches = record(case.step(Scratch(case.device)).run)
    groups: dict[str, list[Any]] = {}
    for launch in launches:
        kernel, _, _, options = launch
        name = kernel.fn.__name__
        if "F" in options and "K" in options:
            name += f" {options['F']}x{options['K']}"
        elif name == "stream_gate_up":
            name += f" 2x{options['I']}x{options['K']}"
        groups.setdefault(name, []).append(launch)
    print(f"  {'kernel alone':34}{'launches':>9}{'us each':>9}{'ms':>8}{'share of 4.2 TB/s':>19}")
    total = 0.0
    for name, own in groups.items():

        def run(own: list[Any] = own) -> None:
            for kernel, grid, args, kwargs in own:
                kernel.run(*args, grid=grid, warmup=False, **kwargs)

        ms = milliseconds(capture(run))
        case.rewind()
        total += ms
        size = streamed_bytes(own[0], experts)
        share = f"{size * len(own) / BANDWIDTH / ms / 10:18.0f}%" if size else ""
        print(f"  {name:34}{len(own):9}{ms / len(own) * 1e3:9.2f}{ms:8.3f}{share}")
    print(f"  {'sum':34}{len(launches):9}{'':9}{total:8.3f}", flush=True)


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1,2,4,16")
    parser.add_argument("--width", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument(
        "--kernels", action=argparse.BooleanOptionalAction, default=True, help="time every kernel alone"
    )
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this measures a GPU, and there is none")
    with torch.inference_mode():
        model = model_of(V2_LITE, given.width, torch.bfloat16, torch.device("cuda"))
        for rows in map(int, given.rows.split(",")):
            case = Case(model, rows, given.width, given.context)
            experts = chosen_experts(case)
            ours = case.milliseconds()
            with plain_layers():
                plain = case.milliseconds()
            floor = floor_bytes(case, experts) / BANDWIDTH / 1e3
            print(
                f"rows {rows} width {given.width} context {given.context}: path {min(ours):.3f} ms "
                f"({', '.join(f'{t:.3f}' for t in ours)}), plain layers {min(plain):.3f} ms, floor of the target's "
                f"pass {floor:.3f} ms ({floor / min(ours):.0%}), experts {experts:.1f}",
                flush=True,
            )
            if given.kernels:
                by_kernel(case, experts)


if __name__ == "__main__":
    main()
