"""Times what it costs, and what it gives, that GPUs share out one latent cache: the same work with a whole cache on
each of them, and with as many shards as there are GPUs.

    python bench/shards.py                        # all GPUs, some eight minutes on two
    python bench/shards.py --only v3-slice,http   # some of: v2-lite, v3-slice, v32-slice, http
    python bench/shards.py --ranks 4
    python bench/shards.py --tiny --device cpu --only v2-lite   # tiny sizes on CPUs: whether it runs

One line per measurement: with one shard, with all, their ratio, and what it should be at the most (`<=`) or at the
least (`>=`) on two H200. Where the GPUs are no two H200 the last column is none to go by.

Whole steps and attention are those of decode rows over random entries, captured and replayed on all ranks at once; the
slowest rank's time counts. The pages of a row go round the shards. "attention" is all that a layer does between its
products, the exchanges included; with an indexer it begins with the scores. "exchanges" are those of queries and of
partial results alone, one behind the other. "prompt" is a step of 1,024 tokens behind cached context, as the device
needs it. Weights are generated as they are read (`bench/generated.py`), so no disk is needed.

"http" serves the V3 slice with one shard and with all, through Ray: the tokens that its cache has room for, and tokens
a second of two loads. What servers and loads print is written to `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from decode_step import replayed, room
from families import values_of
from generated import GENERATED, TABLE, installed, write_folder
from shapes import Case, Tokens
from share import compile_steps
from step_parts import beside, prompts_behind
from steps import LATENTSERVE, PYTHON, STEADY, Step, run_step
from timing import captured, milliseconds

from kernels.page import PAGE_TOKENS
from kernels.runtime.ahead import Share
from kernels.runtime.repeat import nothing_repeated
from workers.families.loading import load_model
from workers.memory.scratch import Scratch
from workers.models.attention.latent import LatentAttention
from workers.models.attention.sparse import SparseAttention
from workers.models.model import Model
from workers.parallel.group import Group
from workers.parallel.mesh import CACHE_SHARDS, Mesh

PROMPT = 1024
"""Tokens of the prompt that is computed behind cached context."""
REPEATS = 10
IN_A_ROW = 50
"""Exchanges that a graph has."""
TIMEOUT_S = 400.0
"""Longest time that ranks wait for one another, while they compile."""
POSITIONS = 1 << 17
"""Tokens that a row may have."""
TINY_BY = 256
"""By this contexts are divided with `--tiny`, whose models have few positions."""
HTTP = "http"


@dataclass(frozen=True)
class Measurement:
    """A line of the table."""

    kind: Literal["step", "attention", "exchanges", "prompt"]
    rows: int
    context: int
    most: float
    """Ratio of the time with all shards to that with one, at the most; of exchanges their microseconds."""

    @property
    def title(self) -> str:
        """Its name in the table."""
        if self.kind == "prompt":
            return f"prompt of {PROMPT:,} behind {self.context:,}, ms"
        unit = "ms" if self.kind == "step" else "us a layer"
        return f"{self.kind}, {self.rows} x {self.context:,}, {unit}"


MEASUREMENTS: dict[str, tuple[Measurement, ...]] = {
    "v2-lite": (
        Measurement("step", 1, 1024, 1.10),
        Measurement("step", 64, 1024, 1.00),
        Measurement("step", 64, 16384, 0.75),
    ),
    "v3-slice": (
        Measurement("step", 1, 1024, 1.06),
        Measurement("step", 16, 1024, 1.03),
        Measurement("attention", 64, 16384, 0.90),
        Measurement("attention", 64, 65536, 0.83),
        Measurement("exchanges", 1, 1024, 5.5),
        Measurement("exchanges", 64, 1024, 24.0),
        Measurement("prompt", 1, 32768, 1.08),
    ),
    "v32-slice": (Measurement("attention", 64, 65536, 0.80),),
}
"""What is measured of each shape, and what it should be with two shards on two H200."""


@dataclass(frozen=True)
class HttpLoad:
    """Streams over HTTP, all of which come at once."""

    streams: int
    input: int
    output: int
    least: float
    """Ratio of the tokens a second with all shards to those with one, at the least."""

    @property
    def command(self) -> tuple[str, ...]:
        """The command of the client, with what it asks for."""
        sizes = {
            "concurrency": self.streams,
            "requests": self.streams,
            "input": self.input,
            "output": self.output,
        }
        options = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
        return (*LATENTSERVE, "bench", "http", *options, "--token-ids", "--json")

    def tiny(self) -> HttpLoad:
        """Return one that tiny models have positions, and a CPU time, for."""
        return HttpLoad(min(self.streams, 4), self.input // TINY_BY, self.output // 32, self.least)


LOADS = HttpLoad(512, 1024, 128, 0.95), HttpLoad(128, 16384, 256, 1.1)
MORE_TOKENS = 1.95
"""Ratio of the tokens that the cache holds, at the least."""


def line(title: str, whole: float | None, shared: float, bound: str, *, form: str = ".3f") -> str:
    """A line of the table. `whole`: None where there is nothing of the kind with one shard."""
    found = "" if whole is None else format(whole, form)
    ratio = "" if whole is None else f"{shared / whole:.3f} x"
    return f"{title:46}{found:>12}{shared:12{form}}{ratio:>10}  {bound}"


@contextmanager
def noted_attention() -> Iterator[list[Callable[[], object]]]:
    """Note the attention of every layer that runs within this context, so that it can be run again by itself."""
    found: list[Callable[[], object]] = []
    plain = {kind: kind.attend for kind in (LatentAttention, SparseAttention)}

    def noting(attend: Callable[..., None]) -> Callable[..., None]:
        def noted(*given: Any) -> None:
            found.append(partial(attend, *given))
            attend(*given)

        return noted

    for kind, attend in plain.items():
        kind.attend = noting(attend)  # type: ignore[method-assign]
    try:
        with nothing_repeated():
            yield found
    finally:
        for kind, attend in plain.items():
            kind.attend = attend  # type: ignore[method-assign]


def all_of(runs: Sequence[Callable[[], object]]) -> None:
    """Run them in turn."""
    for run in runs:
        run()


def on_host(run: Callable[[], object]) -> float:
    """Milliseconds of `run`, on a CPU."""
    run()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) * 1e3)
    return median(times)


class Measured:
    """One rank, with its model, measures what the others measure at the same time."""

    def __init__(self, model: Model) -> None:
        self.model, self.device = model, model.norm_E.device
        self.cuda = self.device.type == "cuda"

    def __call__(self, what: Measurement) -> float:
        """The slowest rank's milliseconds, or microseconds of a layer; all ranks together."""
        ways = {"step": self.step, "attention": self.attention, "exchanges": self.exchanges, "prompt": self.prompt}
        slowest = torch.tensor([ways[what.kind](what)], device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if self.cuda:
            torch.cuda.empty_cache()
        return float(slowest)

    def case(self, what: Measurement) -> Case:
        """Its rows."""
        return Case(self.model, what.rows, 1, what.context, room(1))

    def step(self, what: Measurement) -> float:
        """Whole decode steps."""
        case = self.case(what)
        return min(replayed(case)) if self.cuda else on_host(case.step(Scratch(self.device)).run)

    def attention(self, what: Measurement) -> float:
        """The attention of all layers, of which each has a cache of its own."""
        case = self.case(what)
        with noted_attention() as layers:
            case.step(Scratch(self.device)).run()
        run = partial(all_of, layers)
        ms = milliseconds(captured([run]), 3 * REPEATS, warm=3) if self.cuda else on_host(run)
        return ms * 1e3 / len(layers)

    def exchanges(self, what: Measurement) -> float:
        """Both exchanges of decode rows."""
        group, heads = self.model.group, self.model.layers[0].attention.heads
        shards, dtype = group.mesh.cache.size, heads.norm_L.dtype
        rows, count, features = what.rows, heads.count, heads.latent + heads.rope
        q_TY = torch.zeros(rows, count * features, dtype=dtype, device=self.device)
        every_TDY = q_TY.new_empty(rows, shards, q_TY.shape[1])
        part_TDHL = q_TY.new_zeros(rows, shards, count, heads.latent)
        lse_TDH = torch.zeros(rows, shards, count, device=self.device)
        out = q_TY.new_empty(rows, count, heads.latent), lse_TDH.new_empty(rows, count)

        def run() -> None:
            group.gather_shards(q_TY, every_TDY)
            group.merge_shards(part_TDHL, lse_TDH, *out)

        if not self.cuda:
            return on_host(run) * 1e3
        return milliseconds(captured([run], IN_A_ROW), 2 * REPEATS, warm=3) * 1e3 / IN_A_ROW

    def prompt(self, what: Measurement) -> float:
        """A step of one prompt behind cached tokens, as the device needs it."""
        length = PROMPT if self.cuda else PROMPT // TINY_BY
        case = Case(self.model, 1, 1, what.context + length, 2, 2 * length)
        rows = (), range(1), length, what.context
        if not self.cuda:
            plan = prompts_behind(case, *rows)
            return on_host(lambda: case.runner.execute(plan(case.runner._steps + 1)))
        measured, times = beside("", case, Tokens(length, 1, 0.0), *rows), []
        for _ in range(REPEATS):
            dist.barrier()
            # Who begins last waits for nobody.
            ms = torch.tensor([measured.held_back(50.0)[0]], device=self.device)
            dist.all_reduce(ms, op=dist.ReduceOp.MIN)
            times.append(float(ms))
        return median(times)


def measurements_of(shape: str, *, tiny: bool) -> list[Measurement]:
    """Return what is measured of a shape; with `tiny` contexts and rows that tiny models have positions and time
    for."""
    found = list(MEASUREMENTS[shape])
    if not tiny:
        return found
    return [Measurement(m.kind, min(m.rows, 4), max(m.context // TINY_BY, 64), m.most) for m in found]


def rank_main(rank: int, ranks: int, shape: str, folder: Path, device_type: str, tiny: bool) -> None:
    """Measure all of a shape, with one shard and then with all. Rank 0 prints the lines."""
    cuda = device_type == "cuda"
    device = torch.device(device_type, rank) if cuda else torch.device(device_type)
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    alone = Group.connect(Mesh.of(rank, ranks), f"file://{folder}/rendezvous", device, TIMEOUT_S)
    times: dict[Measurement, list[float]] = {what: [] for what in measurements_of(shape, tiny=tiny)}
    with torch.inference_mode():
        for shards in (1, ranks):
            model = loaded(folder, alone.sharing_out(shards, device, TIMEOUT_S), device, tiny=tiny)
            if cuda:
                steps = sorted({(what.rows, 1) for what in times if what.kind in ("step", "attention")})
                threads = max(1, len(os.sched_getaffinity(0)) // ranks)
                compile_steps(model, steps, threads, Share(rank, ranks))
            measured = Measured(model)
            for what, found in times.items():
                if what.kind == "exchanges" and shards == 1:
                    continue
                found.append(measured(what))
                if rank == 0 and shards > 1:
                    bound = f"<= {what.most:g}" + (" us" if what.kind == "exchanges" else " x")
                    print(line(f"{shape} {what.title}", *[None, *found][-2:], bound), flush=True)
            del model, measured
            if cuda:
                torch.cuda.empty_cache()
    Group.close()


def loaded(folder: Path, group: Group, device: torch.device, *, tiny: bool) -> Model:
    """This rank's share of the model, without a draft layer."""
    with installed():
        return load_model(
            folder,
            group=group,
            dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
            device=device,
            max_positions=1024 if tiny else POSITIONS,
            draft_layer=False,
            quantize_activations=True,
        )


def folder_of(shape: str, folder: Path, *, tiny: bool) -> Path:
    """Write a folder of a shape, for long contexts, whose weights are generated."""
    values = {**values_of(shape, tiny=tiny), "max_position_embeddings": 1024 if tiny else POSITIONS}
    write_folder(values, GENERATED[shape][1], folder / shape, size=1 << 20 if tiny else TABLE)
    return folder / shape


def http_steps(folder: Path, ranks: int, given: argparse.Namespace) -> list[Step]:
    """An endpoint with one shard and one with all, and what is asked of them."""
    loads = [load.tiny() for load in LOADS] if given.tiny else LOADS
    longest, most = max(load.input + load.output for load in loads), max(load.streams for load in loads)
    serve = (*LATENTSERVE, "serve", *STEADY, "--model", str(folder), "--device", given.device, "--width", "1")
    serve += ("--tensor-parallel", str(ranks), "--max-rows", str(most), "--max-context", str(longest + 512))
    return [
        Step(
            f"http-{shards}",
            ((PYTHON, "bench/shards.py"), *(load.command for load in loads)),
            400.0,
            server=(*serve, "--cache-shards", str(shards)),
            generated=True,
        )
        for shards in (1, ranks)
    ]


def held_tokens(url: str) -> int:
    """Tokens that the cache of an endpoint holds. RuntimeError where no replica says so within a minute."""
    for _ in range(60):
        with urllib.request.urlopen(f"{url}/live?selftest=false", timeout=10) as answer:
            if pages := json.load(answer)["total"]["pages_total"]:
                return int(pages) * PAGE_TOKENS
        time.sleep(1)
    raise RuntimeError(f"no replica of {url} says how many pages it has")


def http_lines(whole: str, shared: str) -> list[str]:
    """Lines of the table, of what the two endpoints and their clients printed. ValueError where something is
    missing."""
    found = []
    for printed in (whole, shared):
        held = [json.loads(text)["held_tokens"] for text in printed.splitlines() if text.startswith('{"held_tokens"')]
        reports = [json.loads(text) for text in printed.splitlines() if text.startswith('{"url"')]
        if len(held) != 1 or len(reports) != len(LOADS):
            raise ValueError(f"{len(held)} caches and {len(reports)} of {len(LOADS)} loads are in what was printed")
        found.append((held[0], [report["output_tokens_per_s"] for report in reports]))
    (fewer, speeds), (more, shared_speeds) = found
    lines = [line("v3-slice tokens that the cache holds", fewer, more, f">= {MORE_TOKENS} x", form=".0f")]
    for load, speed, other in zip(LOADS, speeds, shared_speeds, strict=True):
        title = f"v3-slice {load.streams} streams, {load.input:,} + {load.output}, tokens/s"
        lines.append(line(title, speed, other, f">= {load.least} x", form=".0f"))
    return lines


def over_http(folder: Path, ranks: int, given: argparse.Namespace) -> bool:
    """Serve and ask, print the lines, and return whether all of it worked."""
    given.out.mkdir(parents=True, exist_ok=True)
    steps = http_steps(folder, ranks, given)
    done = [run_step(step, given.out, given.patience)[0] for step in steps]
    try:
        for text in http_lines(*((given.out / f"{step.name}.txt").read_text() for step in steps)):
            print(text, flush=True)
    except ValueError as error:
        print(f"FAILED  http: {error}: see {given.out}", flush=True)
        return False
    return all(done)


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="default: every GPU, or 2 ranks on a CPU")
    parser.add_argument("--only", default=",".join((*MEASUREMENTS, HTTP)), help="some of these, with commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes in place of the published ones")
    parser.add_argument("--out", type=Path, default=Path("shards"), help="for what servers and loads print")
    parser.add_argument("--patience", type=float, default=1.0, help="what limits are multiplied by")
    parser.add_argument("--url", help="print how many tokens the cache of this endpoint holds, and nothing else")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table. Exit status 0 when nothing failed, whatever the ratios are."""
    parser = options()
    given = parser.parse_args(arguments)
    if given.url:
        print(json.dumps({"held_tokens": held_tokens(given.url)}))
        return
    wanted = given.only.split(",")
    if unknown := {*wanted} - {*MEASUREMENTS, HTTP}:
        parser.error(f"nothing is called {', '.join(sorted(unknown))}: {', '.join((*MEASUREMENTS, HTTP))}")
    if given.device == "cpu" and not given.tiny:
        parser.error("on a CPU there is --tiny alone")
    ranks, most = given.ranks or torch.cuda.device_count() or 2, torch.cuda.device_count()
    if given.device == "cuda" and not 2 <= ranks <= most:
        parser.error(f"{ranks} ranks on {most} GPUs: needs at least 2 of each")
    if ranks == 1 or ranks not in CACHE_SHARDS:
        parser.error(f"{ranks} ranks: 2, 4 or 8 of them share out a cache here")
    begin, passed = time.monotonic(), True
    print(f"{'':46}{'1 shard':>12}{f'{ranks} shards':>12}{'ratio':>10}  on two H200", flush=True)
    with tempfile.TemporaryDirectory() as made:
        for shape in [name for name in MEASUREMENTS if name in wanted]:
            folder = folder_of(shape, Path(made), tiny=given.tiny)
            multiprocessing.spawn(rank_main, (ranks, shape, folder, given.device, given.tiny), ranks)
        if HTTP in wanted:
            passed = over_http(folder_of("v3-slice", Path(made), tiny=given.tiny), ranks, given)
    print(f"{time.monotonic() - begin:.0f} s in all", flush=True)
    sys.exit(0 if passed else "not all of it worked")


if __name__ == "__main__":
    # What runs is in sessions of its own, and ends with this program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    main()
