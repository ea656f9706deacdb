"""Times what stands between the large products of a step on this machine's GPU: norms, rope and cache writes, gates,
routing, merges, sums of parts, and the state of decode rows, each alone in a CUDA graph, at DeepSeek-V2-Lite's shape;
residual streams at DeepSeek V4 Flash's.

    python bench/token_wise.py                                     # every kernel
    python bench/token_wise.py --only norm,merge --tokens 1,256
    python bench/token_wise.py --only decode_state,sample --rows 1,64 --widths 1,2,4
    python bench/token_wise.py --only add_to_streams --tokens 1,16,64,8192

In a step these kernels find what the kernel before has just written, which is in the L2 cache while it fits there: "L2"
is the time of calls that all have the same tensors. It is the one to look at for decode steps, and may be below the
floor, which takes memory's 4.2 TB/s for the bytes that must be read and written. Tensors of many tokens do not fit, and
what was written some kernels ago has been driven out by weights: "memory" is the time of calls that go through tensors
of their own in turn, together four times the L2 cache. "-": the tensors are too large to stay there, or so small that
they would still be there when they come round again.

A call's time is from its start to that of the next one, so it includes what lies between two launches of a graph.
Kernels that steps launch dependently are launched so here (a star). "error" is of one call before: the largest of any
tensor that the kernel read or wrote, in norms of what its reference makes of it (1 where whole numbers differ). Exit
status 1 when a result is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import timing
from shapes import BANDWIDTH, V2_LITE
from token_wise_calls import Call, Sizes, Tensors, calls
from verdict import MOST_ERROR, error

from kernels.runtime.ahead import compile_ahead
from kernels.runtime.dependent import launches_dependently

L2_BYTES = 60e6
MOST_SETS = 128
"""Sets of tensors that calls go through in turn."""
CALLS = 256
"""Calls of a graph, or a few more: as many of each set."""
REPEATS = 5


def microseconds(runs: Sequence[Callable[[], None]]) -> float:
    """Median time of one of `runs`, which a graph goes through in turn. These kernels neither heat nor slow a GPU, so
    nothing rests before, and every graph has as many calls."""
    count = -(-CALLS // len(runs)) * len(runs)
    return timing.milliseconds(timing.captured(runs, count), REPEATS) / count * 1e3


def times(call: Call, dependent: bool) -> tuple[float | None, float | None]:
    """Microseconds of a call from L2, and from memory; None where there is no such thing."""
    tensors = call.make()
    size = call.footprint(tensors)
    resident = microseconds([partial(call.run, tensors, dependent)]) if size <= L2_BYTES / 2 else None
    count = max(2, -(-int(4 * L2_BYTES) // size))
    if count > MOST_SETS:
        return resident, None
    sets = [tensors, *(call.make() for _ in range(count - 1))]
    return resident, microseconds([partial(call.run, one, dependent) for one in sets])


def error_of(call: Call, dependent: bool) -> float:
    """Return the distance between the kernel's effect on its tensors and the reference's on copies of them."""
    found = call.make()
    wanted = {name: tensor.clone() for name, tensor in found.items()}
    call.run(found, dependent)
    call.reference(wanted)
    return max(_apart(found, wanted, name) for name in found)


def _apart(found: Tensors, wanted: Tensors, name: str) -> float:
    if found[name].is_floating_point():
        apart = error(found[name], wanted[name])
        return apart if apart == apart else float("inf")  # max would lose a NaN
    return float(not torch.equal(found[name], wanted[name]))


def line(call: Call, dependent: bool) -> tuple[str, bool]:
    """A line of the table, and whether the result is right."""
    dependent = dependent and call.dependent
    apart = error_of(call, dependent)
    floor = call.bytes(call.make()) / BANDWIDTH * 1e3
    resident, memory = (f"{'-' if us is None else f'{us:.2f}':>8}" for us in times(call, dependent))
    right = apart <= MOST_ERROR
    name = call.name + "*" * dependent
    return f"{name:26} {call.size:>8} {floor:8.2f} {resident} {memory} {apart:8.1e}{'' if right else '  WRONG'}", right


def table(chosen: Sequence[Call], device: torch.device, plain: bool) -> bool:
    """Print it. Whether every result is right."""
    dependent = not plain and launches_dependently(device)
    print(f"{'kernel':26} {'size':>8} {'floor':>8} {'L2':>8} {'memory':>8} {'error':>8}   µs a call", flush=True)
    all_right = True
    for call in chosen:
        text, right = line(call, dependent)
        print(text, flush=True)
        all_right &= right
    return all_right


def compile_all(chosen: Sequence[Call], device: torch.device, plain: bool) -> None:
    """Compile side by side, so that the GPU does not wait for one compiler."""
    dependent = not plain and launches_dependently(device)
    with compile_ahead(device, os.cpu_count() or 1):
        for call in chosen:
            call.run(call.make(), dependent and call.dependent)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=_numbers, default=[1, 16, 64, 256, 2048])
    parser.add_argument("--rows", type=_numbers, default=[1, 4, 16, 64, 256], help="of the decode state")
    parser.add_argument("--widths", type=_numbers, default=[1, 4], help="tokens that those feed")
    parser.add_argument("--only", default="", help="kernels whose names contain one of these, by commas")
    parser.add_argument("--plain", action="store_true", help="without programmatic dependent launch")
    return parser.parse_args(words)


def _numbers(text: str) -> list[int]:
    numbers = [int(word) for word in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError("numbers must be positive")
    return numbers


@torch.inference_mode()
def main() -> None:
    """Print the table."""
    given = arguments()
    if not torch.cuda.is_available():
        sys.exit("no GPU here that torch can use: times of these kernels need one")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    with device:
        every = calls(Sizes.of(V2_LITE), given.tokens, given.rows, given.widths, device)
        chosen = [call for call in every if any(word in call.name for word in given.only.split(","))]
        if not chosen:
            sys.exit(f"no kernel's name contains {' or '.join(given.only.split(','))}")
        compile_all(chosen, device, given.plain)
        sys.exit(not table(chosen, device, given.plain))


if __name__ == "__main__":
    main()
