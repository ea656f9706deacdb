"""A replica whose engine dies starts scheduler and ranks again in their places, without Ray and without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import ray

from deploy.config.application import ServeConfig
from deploy.routing.arrivals import Arrivals
from deploy.routing.policy import OUT_OF_SERVICE_TOKENS
from deploy.serve import replica
from deploy.serve import standby as standby_processes
from deploy.serve.actors import Placement, ReplicaProcesses
from deploy.serve.replica import EngineReplica
from workers.channel.sockets import Addresses
from workers.config import EngineConfig
from workers.processes.failover import FailoverEngine
from workers.processes.hot_standby import HotStandby
from workers.protocol.front import EngineFault, ModelInfo
from workers.protocol.messages import EngineStats, Request
from workers.protocol.plan import SamplingParams

PLACE = Placement("node", 0, 1, "ip", 1, 1)


class Client:
    """Stand-in for the engine's client."""

    fails = False
    """Whether it cannot take the place of another."""

    def __init__(self, *_: Any) -> None:
        self.info = ModelInfo("tiny", 200, 50, (1,), 3, 0)
        self.stats, self.fault, self.died_of_an_error = EngineStats(), None, False
        self.fault_is_lasting = self.took_over = False
        self.start_s: dict[str, float] = {}
        self.on_fault: list[Any] = []
        self.on_progress: list[Any] = []
        self.on_charges: list[Any] = []
        self.closed = False

    async def ready(self, timeout_s: float) -> None:
        pass

    async def health_check(self) -> None:
        pass

    @property
    def serves(self) -> bool:
        return self.fault is None

    async def take_over(self, timeout_s: float) -> None:
        self.took_over = True
        if self.fails:
            raise EngineFault("the memory of its cache is not kept any more")

    def generate(self, request: Request, mailbox: Any) -> Any:
        return mailbox

    def abandon(self, name: str) -> None:
        pass

    async def close(self) -> None:
        self.closed = True

    def fail(self, cause: str) -> None:
        if self.fault is None:
            self.fault = cause  # type: ignore[assignment]
            for callback in self.on_fault:
                callback(cause)


class Processes:
    """Stand-in for a scheduler and ranks under Ray."""

    made: ClassVar[list[Processes]] = []
    hot = False
    """Whether a second engine stands by."""
    lost = False
    """Whether they have died while they stood by."""

    def __init__(self, *_: Any, seats: Sequence[str] = ()) -> None:
        self.killed = self.stood_by = False
        self.seats = seats
        self.folder, self.placements = Path(f"/sockets/{len(self.made)}"), [f"place {len(self.made)}"]
        self.made.append(self)

    async def stand_by(self) -> None:
        assert self.seats
        self.stood_by = True

    async def start(self) -> str:
        if self.lost:
            raise ray.exceptions.RayActorError
        others = [other for other in self.made if other is not self and not other.stood_by]
        if not self.hot and not all(other.killed for other in others):
            raise EngineFault("the processes before these still hold their places")
        return "addresses"

    def run(self, addresses: str, on_end: Any, waiting: int | None = None) -> None:
        self.on_end, self.waiting = on_end, waiting

    async def gone(self, limit_s: float) -> bool:
        assert self.killed
        return True

    def kill(self) -> None:
        self.killed = True


@asynccontextmanager
async def serving(monkeypatch: pytest.MonkeyPatch, standby: str = "none", **settings: Any) -> AsyncIterator[Any]:
    for module in (replica, standby_processes):
        monkeypatch.setattr(module, "EngineClient", Client)
    monkeypatch.setattr(Processes, "made", [])
    made: Any = object.__new__(EngineReplica)
    made.said, made.states, made.folders, made.ended = [], [], [], []
    health = SimpleNamespace(flush_s=0.0, patience_s=30.0, standby=standby)
    engine = EngineConfig(model="demo", start_timeout_s=9.0, tensor_parallel=2, **settings)
    made.config = SimpleNamespace(engine=engine, model_name="tiny", health=health)
    made.status_store = SimpleNamespace(say=made.said.append, fail=lambda cause, wait_s: made.said.append(cause))
    made.live = SimpleNamespace(
        starting_again=lambda cause: made.states.append(("starting", cause)),
        serving=lambda engine: made.states.append("serving"),
        failed=lambda cause: made.states.append(("failed", cause)),
        close=lambda: made.states.append("live is closed"),
    )
    leave = partial(made.states.append, "the watchdog looks for no hang")
    made.watchdog = SimpleNamespace(remove_at_end=made.folders.append, leave=leave, close=lambda: None)
    made.arrivals, made.key_status_store, made.tracing = Arrivals(), None, None
    made.engine = None
    made._serving, made._forgetting, made._reporter, made._beating = True, None, None, None
    made.lacking = []
    closed = partial(made.states.append, "the keeper is closed")
    keeper = SimpleNamespace(lacks=lambda slots: made.lacking[0] if made.lacking else "", close=closed)
    made._keeper, made._new_processes = keeper, Processes
    monkeypatch.setattr(Processes, "hot", standby == "hot")
    monkeypatch.setattr(standby_processes, "HotStandby", partial(HotStandby, backoff_s=0.01, calm_s=0.0))
    made._standby = made._what_stands_by(made.watchdog)
    made.processes = Processes()
    monkeypatch.setattr(replica.os, "_exit", made.ended.append)
    client: Any = await made._start_processes()
    made.engine = FailoverEngine(client, made._start_again, health.patience_s)
    made.engine.on_loss.append(made._lost)
    made.engine.on_return.append(made._returned)
    made.engine.on_fault.append(made._failed)
    try:
        yield made
    finally:
        await made.engine.close()


async def test_scheduler_and_ranks_are_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as made:
        first = Processes.made[0]
        assert made.record_routing_stats()["backlog"] == 0
        first.on_end("rank 0 died", False)
        async with asyncio.timeout(60):
            while not made.engine.down:
                await asyncio.sleep(0)
        assert made.record_routing_stats()["backlog"] >= OUT_OF_SERVICE_TOKENS
        await made.check_health()  # it is well, and must not be replaced
        async with asyncio.timeout(60):
            while made.engine.down:
                await asyncio.sleep(0)
        assert [one.killed for one in Processes.made] == [True, False]
        assert made.processes is Processes.made[1]
        assert made.folders == [Path("/sockets/1")]
        assert made.states == [("starting", "rank 0 died"), "serving"]
        assert made.said[0] == "rank 0 died; its engine is started again, and 0 streams wait for it"
        assert made.said[1].startswith("serving again after ")
        assert made.record_routing_stats()["backlog"] == 0
        # What is still told of those that died concerns nobody.
        first.on_end("scheduler died", False)
        await asyncio.sleep(0.01)
        assert not made.engine.down
        assert not made.ended


async def test_a_replica_that_ends_in_order_says_so_before_its_loop_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as made:
        made.__del__()
        assert made.states == ["the watchdog looks for no hang", "the keeper is closed", "live is closed"]


@pytest.mark.parametrize(("graphs", "at_first"), [("auto", "auto"), ("all", None), ("few", 0)])
async def test_ranks_are_told_how_many_streams_wait(
    monkeypatch: pytest.MonkeyPatch, graphs: str, at_first: int | str | None
) -> None:
    async with serving(monkeypatch, graphs_at_start=graphs) as made:
        assert Processes.made[0].waiting == at_first
        for name in ("a", "b"):
            made.engine.generate(Request(name, (1, 2), SamplingParams(9)))
        Processes.made[0].on_end("rank 0 died", False)
        await until(lambda: made.engine.down)
        await until(lambda: not made.engine.down)
        assert Processes.made[1].waiting == 2


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def test_those_that_stand_by_take_the_places_and_others_stand_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, "imported") as made:
        made._standby.begin()
        first, second = Processes.made
        await until(lambda: second.stood_by)
        assert second.seats == ["place 0"]
        first.on_end("rank 0 died", False)
        await until(lambda: made.engine.down)
        await until(lambda: not made.engine.down)
        assert made.processes is second
        assert [one.killed for one in (first, second)] == [True, False]
        third = Processes.made[2]
        await until(lambda: third.stood_by)
        assert third.seats == ["place 1"]
        made.__del__()
        assert all(one.killed for one in Processes.made)


async def test_where_those_that_stood_by_have_died_others_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, "imported") as made:
        made._standby.begin()
        first, second = Processes.made
        await until(lambda: second.stood_by)
        second.lost = True
        first.on_end("rank 0 died", False)
        await until(lambda: made.engine.down)
        await until(lambda: not made.engine.down)
        assert made.processes is Processes.made[2]
        assert not made.processes.seats
        assert [one.killed for one in Processes.made[:3]] == [True, True, False]
        assert not made.ended
        made.__del__()


@pytest.mark.parametrize("fails", [False, True])
async def test_an_engine_that_stands_by_takes_over_or_another_is_started(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    async with serving(monkeypatch, "hot") as made:
        made._standby.begin()
        await until(lambda: made._standby.ready)
        first, second = Processes.made
        assert second.seats == ["place 0"]
        assert made.folders == [Path("/sockets/1")]
        assert not first.killed
        monkeypatch.setattr(Client, "fails", fails)
        first.on_end("rank 0 died", False)
        await until(lambda: made.states == [("starting", "rank 0 died"), "serving"])
        assert made.engine.serving.took_over is not fails
        assert made.processes is Processes.made[2 if fails else 1]
        assert [one.killed for one in Processes.made[:2]] == [True, fails]
        if fails:
            assert not made.processes.seats
            assert "the engine that stood by cannot serve: the memory of its cache is not kept any more" in made.said
        else:
            assert made._restart.startswith("the engine that stood by took over in ")
        await until(lambda: made._standby.ready)
        assert Processes.made[-1].seats == made.processes.placements
        assert sum(not one.killed for one in Processes.made) == 2
        made.__del__()
        assert all(one.killed for one in Processes.made)
        assert not made.ended


async def test_an_engine_that_takes_over_ends_with_its_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other one is started then."""
    async with serving(monkeypatch, "hot") as made:
        made._standby.begin()
        await until(lambda: made._standby.ready)
        first, second = Processes.made
        under_way, go_on = asyncio.Event(), asyncio.Event()

        async def take_over(client: Client, timeout_s: float) -> None:
            under_way.set()
            await go_on.wait()
            if client.fault is not None:
                raise EngineFault(client.fault)

        monkeypatch.setattr(Client, "take_over", take_over)
        first.on_end("rank 0 died", False)
        await asyncio.wait_for(under_way.wait(), 60)
        made.__del__()
        assert second.killed
        go_on.set()
        await until(lambda: made.engine.over)
        assert len(Processes.made) == 2


async def test_a_second_engine_is_started_only_where_it_would_find_what_it_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(monkeypatch, "hot") as made:
        made.lacking.append("the weight keeper has nothing of rank 1, cache")
        made._standby.begin()
        await until(lambda: made.said)
        assert made.said == [f"no engine stands by: {made.lacking[0]}; none will before the next engine serves"]
        made.lacking.clear()
        made.processes.folder = None  # over TCP
        made._standby.begin()
        await until(lambda: len(made.said) == 2)
        assert made.said[1].startswith("no engine stands by: the ranks are on several nodes")
        assert len(Processes.made) == 1


async def test_a_second_engine_without_a_weight_keeper_is_not_set_to_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[Client] = []

    def run(self: Processes, addresses: str, on_end: Any, waiting: int | None = None) -> None:
        raise OSError("no descriptors are left")

    def client(*_: Any) -> Client:
        clients.append(Client())
        return clients[-1]

    async with serving(monkeypatch, "hot") as made:
        monkeypatch.setattr(Processes, "run", run)
        monkeypatch.setattr(standby_processes, "EngineClient", client)
        made._standby.begin()
        await until(lambda: made.said)
        assert made.said[0].startswith("no engine stands by: no descriptors are left; another one is started in ")
        assert Processes.made[1].killed
        assert clients[0].closed  # its channel is not left to be watched
        made.__del__()


async def test_a_replica_that_cannot_start_them_again_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as made:

        async def ready(client: Client, timeout_s: float) -> None:
            raise EngineFault("no room")

        monkeypatch.setattr(Client, "ready", ready)
        Processes.made[0].on_end("rank 0 died", False)
        async with asyncio.timeout(60):
            while not made.ended:
                await asyncio.sleep(0.001)
        cause = "rank 0 died; it could not be started again: no room"
        assert made.states == [("starting", "rank 0 died"), ("failed", cause)]
        assert [one.killed for one in Processes.made] == [True, True]
        with pytest.raises(EngineFault, match="no room"):
            await made.check_health()


async def test_a_replica_that_ends_starts_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as made:
        made.__del__()
        made.engine._alive.fail("the scheduler has been silent for 3.0 s")
        async with asyncio.timeout(60):
            while not made.engine.over:
                await asyncio.sleep(0)
        assert len(Processes.made) == 1
        assert not made.ended


@pytest.mark.parametrize(("seats", "standby"), [((PLACE,), "hot"), ((), "hot"), ((), "none")])
async def test_ranks_that_stand_by_without_a_weight_keeper_are_not_set_to_work(
    seats: tuple[Placement, ...], standby: str
) -> None:
    """They would load what is there already; what those that serve load is only not kept."""
    ran: list[Any] = []

    def keeper() -> Path:
        raise OSError("no descriptors are left")

    def remote(*given: Any) -> asyncio.Future[None]:
        ran.append(given)
        return asyncio.get_running_loop().create_future()

    config = ServeConfig.model_validate({"engine": {"model": "demo"}, "health": {"standby": standby}})
    made = ReplicaProcesses(config, None, {}, keeper, seats)  # type: ignore[arg-type]
    actor = SimpleNamespace(run=SimpleNamespace(remote=remote))
    made._addresses = Addresses("ipc:///a/b", "", (), "", "")
    made._scheduler, made._workers, made.placements = actor, [actor], [PLACE]
    with pytest.raises(OSError, match="no descriptors") if seats else nullcontext():
        made.run(made._addresses, lambda cause, told: None)
    assert len(ran) == (0 if seats else 2)
    for watcher in made._watchers:
        watcher.cancel()
