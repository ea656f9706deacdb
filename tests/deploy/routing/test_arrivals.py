import asyncio
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from deploy.routing.arrivals import (
    RECENT_S,
    ROUTERS_KEPT,
    Arrivals,
    RoutingRecord,
    load_from_report,
    load_to_report,
    out_of_service,
)
from deploy.routing.policy import DISK_TOKEN_COST, HOST_TOKEN_COST, InFlightAccounting, Load, RequestFeatures, choose
from workers.protocol.messages import Distribution, EngineStats
from workers.protocol.request import NO_ROOT, Prompt, pack_keys


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_routing_record_survives_its_header() -> None:
    routing_record = RoutingRecord("abc", 12, 345, 2)
    assert RoutingRecord.parse(routing_record.header()) == routing_record


def test_what_is_no_routing_record_is_none() -> None:
    for value in ("", "a", "a/1/2", "a/1/2/x", "a/1/2/3/4", "a/-1/2/3"):
        assert RoutingRecord.parse(value) is None


ODD_DIGITS = [
    "\u00b2",
    "\u00b9",
    "\u0663",
    "\u0967",
    "\u2460",
    "1" * 5000,
    "0",
    "7",
    "-1",
    "+1",
    "1_0",
    " 1",
    "1\n",
    "",
]


@settings(deadline=None)
@given(st.text() | st.lists(st.sampled_from([*ODD_DIGITS, "a", "/"]), max_size=7).map("/".join))
@example("a/\u00b2/0/0")
@example("a/1/2/" + "9" * 5000)
def test_any_text_is_a_routing_record_or_none(value: str) -> None:
    routing_record = RoutingRecord.parse(value)
    if routing_record is not None:
        assert [part.lstrip("0") for part in routing_record.header().split("/")] == [
            p.lstrip("0") for p in value.split("/")
        ]
        load_to_report(load_after(routing_record))


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_header_is_a_routing_record_or_none(value: bytes) -> None:
    RoutingRecord.parse(value.decode("latin-1"))


@pytest.mark.parametrize("odd", ODD_DIGITS)
@pytest.mark.parametrize("place", [1, 2, 3])
def test_numbers_of_a_routing_record_are_plain_and_short(odd: str, place: int) -> None:
    parts = ["a", "1", "2", "3"]
    parts[place] = odd
    assert (RoutingRecord.parse("/".join(parts)) is None) == (odd not in ("0", "7"))


def load_after(routing_record: RoutingRecord) -> Load:
    arrivals = Arrivals()
    arrivals.arrive(routing_record)
    return arrivals.load(EngineStats())


def test_a_request_counts_from_its_arrival_to_its_end() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    first = arrivals.arrive(RoutingRecord("r", 1, 100, 1))
    second = arrivals.arrive(RoutingRecord("r", 2, 300, 3))
    stats = EngineStats(pages_total=8, pages_free=7)
    load = arrivals.load(stats)
    assert (load.backlog, load.rows, load.pages_free, dict(load.seen)) == (400, 4, 7, {"r": 2})
    # What happens next happens to the second one. A router's word for it stands.
    arrivals.sequence_started(5000)
    arrivals.first_token()
    load = arrivals.load(stats)
    assert (load.backlog, load.rows) == (300, 4)
    arrivals.first_token()
    arrivals.sequence_finished()
    assert (arrivals.load(stats).backlog, arrivals.load(stats).rows) == (200, 3)
    arrivals.leave(second)
    assert (arrivals.load(stats).backlog, arrivals.load(stats).rows) == (100, 1)
    arrivals.leave(first)
    arrivals.leave(first)
    assert (arrivals.load(stats).backlog, arrivals.load(stats).rows) == (0, 0)


def test_a_request_without_a_routing_record_counts_once_the_engine_has_it() -> None:
    arrivals = Arrivals()
    arrival = arrivals.arrive(None)
    assert arrivals.load(EngineStats()).rows == 0
    arrivals.sequence_started(50)
    arrivals.sequence_started(50)
    assert (arrivals.load(EngineStats()).backlog, arrivals.load(EngineStats()).rows) == (100, 2)
    for _ in range(3):
        arrivals.first_token()
        arrivals.sequence_finished()
    assert (arrivals.load(EngineStats()).backlog, arrivals.load(EngineStats()).rows) == (0, 0)
    arrivals.leave(arrival)


def test_the_scheduler_s_progress_with_a_long_prompt_counts() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    arrivals.arrive(RoutingRecord("r", 1, 4000, 1))
    # Its figures cannot hold it yet ...
    assert arrivals.load(EngineStats(prefill_backlog=0)).backlog == 4000
    clock.now = 2 * RECENT_S
    arrivals.arrive(RoutingRecord("r", 2, 100, 1))
    # ... now they do, but not what has only just come.
    assert arrivals.load(EngineStats(prefill_backlog=1500)).backlog == 1600


async def test_requests_of_different_tasks_are_told_apart() -> None:
    arrivals = Arrivals()

    async def request(tokens: int, number: int) -> None:
        arrival = arrivals.arrive(RoutingRecord("r", number, tokens, 1))
        await asyncio.sleep(0.01)

        async def body() -> None:
            arrivals.first_token()

        if number == 1:
            await asyncio.create_task(body())  # frameworks stream from a task of their own
        under_way.append(number)
        await release.wait()
        arrivals.leave(arrival)

    release, under_way = asyncio.Event(), list[int]()
    tasks = [asyncio.create_task(request(100 * number, number)) for number in (1, 2, 3)]
    async with asyncio.timeout(60):
        while len(under_way) < 3:
            await asyncio.sleep(0.001)
    load = arrivals.load(EngineStats(prefill_backlog=10_000))
    assert (load.backlog, load.rows) == (500, 3)
    release.set()
    await asyncio.gather(*tasks)
    assert arrivals.load(EngineStats()).rows == 0


def test_routers_that_are_gone_are_forgotten() -> None:
    arrivals = Arrivals()
    for number in range(ROUTERS_KEPT + 10):
        arrivals.arrive(RoutingRecord("busy", 1 + number, 1, 1))
        arrivals.arrive(RoutingRecord(f"r{number}", 1, 1, 1))
        seen = arrivals.load(EngineStats()).seen
        assert seen["busy"] == 1 + number
    assert len(seen) == ROUTERS_KEPT
    assert "r0" not in seen


def test_a_late_sequence_number_does_not_turn_the_count_back() -> None:
    arrivals = Arrivals()
    for number in (1, 3, 2):
        arrivals.arrive(RoutingRecord("r", number, 1, 1))
    assert arrivals.load(EngineStats()).seen == {"r": 3}


def test_a_load_survives_its_report() -> None:
    load = Load(1, 2, 3, frozenset({b"8 bytes.", b"8 others"}), {"r": 4}, 6.0, root=b"sixteen bytes...")
    assert load_from_report(load_to_report(load)) == load
    assert load_from_report({}) == Load()


def test_a_replica_whose_engine_is_away_gets_a_request_only_where_there_is_no_other() -> None:
    """Nothing else counts for such a replica: neither what the others have to do, nor how much of the prompt it has
    had."""
    features = RequestFeatures(640, Prompt.of(range(640)))
    away = out_of_service(
        Load(backlog=0, rows=0, pages_free=100, keys=frozenset(features.keys(NO_ROOT)), seen={"r": 4}, at=1.0)
    )
    assert load_from_report(load_to_report(away)).seen == {"r": 4}
    busy = Load(backlog=500_000, rows=900, pages_free=0, keys=frozenset(), seen={}, at=1.0)
    accounting: InFlightAccounting[str] = InFlightAccounting("r", 32.0)
    accounting.record("away", Load(), features, 1.0)  # its own engine had the prompt a moment ago
    assert choose(accounting, {"away": away, "busy": busy}, features, 1.0)[0] == "busy"
    assert choose(accounting, {"away": away}, features, 1.0) == ["away"]


def test_what_a_page_from_host_memory_costs_is_measured() -> None:
    steps = {"prefill": Distribution((1,), 2.0), "mixed": Distribution((1,), 2.0), "decode": Distribution((1,), 100.0)}
    stats = EngineStats(
        prompt_tokens=5000,
        cached_tokens=1000,
        step_seconds=steps,
        host_loaded_pages=10,
        host_load_seconds=0.016,
        host_keys=pack_keys([b"8 bytes.", b"8 others"]),
        pages_total=9,
    )
    load = Arrivals().load(stats)
    assert load.host_token_cost == pytest.approx((0.016 / 640) / (4.0 / 4000))
    assert load.host_keys == {b"8 bytes.", b"8 others"}
    # What tokens on disk cost is told where there are any.
    assert load_from_report(load_to_report(load)) == replace(load, disk_token_cost=DISK_TOKEN_COST)
    assert Arrivals().load(structs.replace(stats, host_load_seconds=1e9)).host_token_cost == 1.0
    assert Arrivals().load(structs.replace(stats, host_loaded_pages=0)).host_token_cost == HOST_TOKEN_COST
    read = Arrivals().load(
        structs.replace(stats, disk_loaded_pages=5, disk_load_seconds=0.032, disk_keys=pack_keys([b"8 on disk"[:8]]))
    )
    assert read.disk_token_cost == pytest.approx(load.host_token_cost + (0.032 / 320) / (4.0 / 4000))
    assert read.disk_keys == {b"8 on dis"}
    assert load_from_report(load_to_report(read)) == read
    assert out_of_service(read).disk_keys == frozenset()
    assert load.disk_token_cost == pytest.approx(load.host_token_cost + DISK_TOKEN_COST)
    report = load_to_report(load)
    # Of a replica that is older than its router: its keys have 8 bytes each, and no root before them.
    del report["host_keys"], report["host_token_cost"]
    report["keys"] = pack_keys([b"8 bytes."])
    assert load_from_report(report).keys == frozenset()
    assert load_from_report(report).host_keys == frozenset()
    assert out_of_service(load).host_keys == frozenset()
