"""Time of a graph's replay, or of anything else, by kernel, as CUPTI saw them run.

Kernels that are launched dependently overlap, so how long each ran does not add up. What does is how much later than
the one before it each ended: the time by which the replay would be shorter without it, if nothing else changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

REPLAYS = 12


def timeline(graph: torch.cuda.CUDAGraph, between: Callable[[], object]) -> None:
    """Print a graph's kernels in the order in which they end: by name, and one by one. `between` runs before every
    replay."""
    replays = [_replay(graph, between) for _ in range(REPLAYS)]
    names = [name for name, _, _ in replays[-1]]
    same = [replay for replay in replays[2:] if [name for name, _, _ in replay] == names]
    if not same:
        print("  no two replays ran the same kernels in the same order")
        return
    later = [_later(replay) for replay in same]
    each = [median(column) for column in zip(*later, strict=True)]
    ran = [median(end - begin for _, begin, end in column) for column in zip(*same, strict=True)]
    print(f"  {'in the graph':44}{'launches':>9}{'ms later':>10}{'ms it ran':>10}")
    for name in dict.fromkeys(names):
        own = [i for i, other in enumerate(names) if other == name]
        print(f"  {name:44}{len(own):9}{sum(each[i] for i in own) / 1e3:10.4f}{sum(ran[i] for i in own) / 1e3:10.4f}")
    print(f"  {'sum':44}{len(names):9}{sum(each) / 1e3:10.4f}")
    print("  one by one, us later (us it ran):")
    print("  " + " ".join(f"{n} {a:.1f}({b:.1f})" for n, a, b in zip(names, each, ran, strict=True)), flush=True)


def _replay(graph: torch.cuda.CUDAGraph, between: Callable[[], object]) -> list[tuple[str, float, float]]:
    """Name, begin and end (us) of each kernel and copy of one replay."""
    between()
    torch.cuda.synchronize()
    return _kernels(graph.replay)


def by_name(run: Callable[[], object]) -> None:
    """Print what ran on the device while `run` did its work, by name, the longest first."""
    found: dict[str, list[float]] = {}
    events = _kernels(run)
    for name, begin, end in events:
        found.setdefault(name, []).append(end - begin)
    print(f"  {'on the device':44}{'launches':>9}{'ms it ran':>10}")
    for name, ran in sorted(found.items(), key=lambda item: -sum(item[1])):
        print(f"  {name:44}{len(ran):9}{sum(ran) / 1e3:10.3f}")
    spent = (max(end for _, _, end in events) - min(begin for _, begin, _ in events)) / 1e3
    ran = sum(map(sum, found.values())) / 1e3
    print(f"  {'sum':44}{len(events):9}{ran:10.3f}, within {spent:.3f} ms", flush=True)


def _kernels(run: Callable[[], object]) -> list[tuple[str, float, float]]:
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    events = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    found = [(_short(event.name), event.time_range.start, event.time_range.end) for event in events]
    return sorted(found, key=lambda event: event[2])


def _later(replay: list[tuple[str, float, float]]) -> list[float]:
    first = replay[0][2] - replay[0][1]
    return [first, *(after[2] - before[2] for before, after in pairwise(replay))]


def _short(name: str) -> str:
    return re.sub(r"<.*|\(.*|^void ", "", name)[-44:]
