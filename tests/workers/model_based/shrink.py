"""Makes a failing schedule small: whatever can be left out, or made plainer, without the failure going away."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from tests.workers.model_based.schedules import Add, Schedule
from workers.protocol.plan import SamplingParams

Fails = Callable[[Schedule], bool]


def shrink(schedule: Schedule, fails: Fails, attempts: int = 400) -> Schedule:
    """A schedule that fails still, after at most so many runs: first without whole stretches of events, then with
    plainer requests and settings, until nothing helps."""

    def still_fails(candidate: Schedule) -> bool:
        nonlocal attempts
        attempts -= 1
        return fails(candidate)

    better = True
    while better and attempts > 0:
        better = False
        for plainer in (_without_events, _plainer_settings, _plainer_requests):
            changed = True
            while changed:
                changed = False
                for candidate in plainer(schedule):
                    if attempts <= 0:
                        return schedule
                    if still_fails(candidate):
                        schedule, changed, better = candidate, True, True
                        break
    return schedule


def _without_events(schedule: Schedule) -> Iterator[Schedule]:
    """Large stretches first."""
    events = schedule.events
    size = len(events) // 2
    while size:
        for begin in range(0, len(events), size):
            yield replace(schedule, events=events[:begin] + events[begin + size :])
        size //= 2


def _plainer_settings(schedule: Schedule) -> Iterator[Schedule]:
    if schedule.widths:
        yield replace(schedule, widths=False)
    plain = {
        "disk_pages": 0,
        "host_pages": 0,
        "invariant": False,
        "prefix_cache": False,
        "cache_pages": 30,
        "width": 1,
        "max_rows": 1,
    }
    for name, value in plain.items():
        if schedule.engine.get(name, value) != value:
            yield replace(schedule, engine={**schedule.engine, name: value})


def _plainer_requests(schedule: Schedule) -> Iterator[Schedule]:
    for index, event in enumerate(schedule.events):
        if isinstance(event, Add):
            for plainer in _plainer(event):
                yield replace(schedule, events=(*schedule.events[:index], plainer, *schedule.events[index + 1 :]))


def _plainer(event: Add) -> Iterator[Add]:
    if len(event.prompt) > 1:
        half = len(event.prompt) // 2
        yield replace(event, prompt=event.prompt[:half])
        yield replace(event, prompt=event.prompt[half:])
    if event.priority:
        yield replace(event, priority=0)
    sampling = event.sampling
    if sampling.max_tokens > 1:
        yield replace(event, sampling=replace(sampling, max_tokens=sampling.max_tokens // 2))
        yield replace(event, sampling=replace(sampling, max_tokens=sampling.max_tokens - 1))
    plain = SamplingParams(sampling.max_tokens, temperature=0.0, seed=sampling.seed)
    for name in SamplingParams.__struct_fields__[1:]:
        if getattr(sampling, name) != getattr(plain, name):
            yield replace(event, sampling=replace(sampling, **{name: getattr(plain, name)}))
