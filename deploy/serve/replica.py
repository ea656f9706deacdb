"""One Serve replica: HTTP front, scheduler process and ranks, alive together and ended together."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from starlette.types import ASGIApp

from deploy.api.http.errors import FAILURES, engine_down
from deploy.api.limits.keys import KeyRing
from deploy.cluster.haproxy import fault_note, note_fault
from deploy.cluster.replica_ports import listen_at_home
from deploy.config.application import ServeConfig
from deploy.observability import logs
from deploy.observability.ray_metrics import RayFrontMetrics
from deploy.routing.arrivals import Arrivals, load_to_report, out_of_service
from deploy.serve import early_imports, prestarted
from deploy.serve.actors import ReplicaProcesses
from deploy.serve.autoscaling import load_of
from deploy.serve.front_silence import BEAT_S
from deploy.serve.key_status_store import KeyStatusStore
from deploy.serve.live_status_store import LiveStatusStore
from deploy.serve.neighbor_store import NeighborStore, Place
from deploy.serve.progress import StatusStore
from deploy.serve.standby import Standby
from deploy.serve.start_table import FIRST_STEP, PROCESSES, of_replica
from deploy.serve.stream_watchdog import StreamWatchdog
from deploy.text.handed import EncodedPrompt, HandedPrompts
from deploy.text.template import check_template, why_no_chat
from deploy.text.tokenizer import Tokenizer
from workers.memory.keeper import WeightKeeper
from workers.processes.client import EngineClient
from workers.processes.failover import FailoverEngine, Neighbors
from workers.protocol.captures import FIRST_ENGINE, Waiting
from workers.protocol.front import Engine, EngineFault
from workers.rank.start_times import StartTimes

if TYPE_CHECKING:
    from deploy.api.job.defaults import SamplingDefaults
    from deploy.observability.tracing import Tracing  # what it needs is there only where spans are asked for
    from deploy.serve.heir import Heir

logger = logging.getLogger("latentserve.replica")

FIRST_CAUSE_WAIT_S = 0.3
"""Seconds for the scheduler's report of a process that failed in order."""
START_CAUSE_WAIT_S = 2.0
"""Seconds for that report while the replica starts, when no stream waits and processes are slow."""
MEMORY_FREED_S = 30.0
"""Seconds in which killed processes give the memory of GPUs and node back: the driver needs some for a full GPU."""
REPORT_S = 0.5
"""Seconds for which streams wait, with the event loop, until the end of their replica is reported: it is written in a
thread, which has `health.flush_s` longer."""
REWRITTEN_BYTES = 4096
"""Bytes of HAProxy's buffer, which has `routing.affinity_bytes`, that a request which it is to send again leaves free:
for headers that it adds, and its own."""
NOTE_KEPT_S = 5.0
"""Seconds that the last replica's fault stays noted once there is a new one."""
NUMERIC = {"tensor_parallel", "invariant", "activations", "dtype", "kv_cache_dtype", "device"}
"""Settings of the engine that decide how it rounds, beside `cache_shards`, which the engine says (`ModelInfo`)."""
FRONT_DIED = "the replica's front died"


def read_tokenizer(config: ServeConfig) -> Tokenizer | None:
    """The model's tokenizer, whose chat template works. EngineFault, which another start would only repeat."""
    folder = config.engine.folder
    try:
        tokenizer = Tokenizer.load(folder)
        if tokenizer is not None:
            check_template(tokenizer, folder, config.api.chat_template)
    except Exception as error:
        raise EngineFault(f"tokenizer: {error}", lasting=True) from error
    return tokenizer


def import_what_answers() -> None:
    """Import what makes answers, which takes a third of a second or more: once the ranks import, and not before."""
    import deploy.api.app
    import deploy.serve.heir
    import deploy.serve.journals
    import deploy.serve.under_serve

    assert deploy.api.app


def read_what_answers(config: ServeConfig) -> Tokenizer | None:
    """Import what makes answers, and read the tokenizer. As `read_tokenizer`."""
    import_what_answers()
    return read_tokenizer(config)


def import_what_checks_grammars(config: ServeConfig) -> Thread | None:
    """Import in a thread, which is returned, what the first request for structured output needs: xgrammar, and torch
    with it, for a second in which other streams would wait, too. Only beside ranks on GPUs that still start; ranks on
    CPUs would start later for it. The tokenizer has been read before: a module may stand in for
    transformers meanwhile."""
    if not config.gpus_per_rank:
        return None
    thread = Thread(target=_import_grammars, name="imports", daemon=True)
    thread.start()
    return thread


def _import_grammars() -> None:
    with suppress(Exception):  # that request gets it, too
        import workers.grammar.build

        assert workers.grammar.build


def sampling_defaults(config: ServeConfig) -> SamplingDefaults:
    """Return the sampling parameters for requests that give none. EngineFault, lasting because another start would only
    repeat it, for a file that cannot be used."""
    if config.api.generation_config == "none":
        return {}
    from deploy.api.job.defaults import read_defaults

    try:
        return read_defaults(config.engine.folder)
    except ValueError as error:
        raise EngineFault(str(error), lasting=True) from error


def what_is_not_taken(config: ServeConfig) -> str | None:
    """Name the fields of the folder's generation_config.json that would change answers and are not used; None if there
    are none. EngineFault as above."""
    if config.api.generation_config == "none":
        return None
    from deploy.api.job.defaults import not_taken

    try:
        names = not_taken(config.engine.folder)
    except ValueError as error:
        raise EngineFault(str(error), lasting=True) from error
    return f"of generation_config.json is not used: {', '.join(names)}" if names else None


def _tracing_to(endpoint: str | None, replica: str) -> Tracing | None:
    if endpoint is None:
        return None
    from deploy.observability.tracing import Tracing, exporter_for

    return Tracing(exporter_for(endpoint), replica)


class EngineReplica:
    """The engine deployment.

    Where its engine dies, scheduler and ranks are started again in their places, and the streams go on with them
    (`workers.processes.failover`). When that fails, or `health.patience_s` is 0, every stream ends with an error event,
    new requests are refused, and the process exits once the events are flushed: Serve replaces a dead replica at once,
    an unhealthy one only after several health checks.
    """

    processes_class: type[ReplicaProcesses] = ReplicaProcesses
    key_status_store: KeyStatusStore | None = None
    neighbor_store: NeighborStore | None = None
    heir: Heir | None = None
    shared: Path | None = None
    """Folder in which this front and the others of its application on the node are found by stream watchdogs."""
    tracing: Tracing | None = None

    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        listen_at_home()
        self.config = config
        context = serve.get_replica_context()
        self.name = context.replica_id.unique_id
        labels = {"application": context.app_name, "replica": self.name}
        logs.configure(config.log, process="front", **labels)
        group = ray.util.get_current_placement_group()
        if group is None:
            raise RuntimeError("the engine deployment needs a placement group; build it with deploy.serve.app")
        self.status_store = StatusStore(context.app_name, self.name)
        self.live = LiveStatusStore(context.app_name, self.name)
        self.arrivals = Arrivals()
        self.keys = KeyRing(config.api.api_keys)
        self.key_status_store = KeyStatusStore(context.app_name, self.name, self.keys) if self.keys.named else None
        self.tracing = _tracing_to(config.api.otlp_endpoint, self.name)
        self.engine: FailoverEngine | None = None
        if config.most_replicas > 1 and config.health.patience_s > 0:
            place = Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())
            self.neighbor_store = NeighborStore(context.app_name, self.name, config, place)
        self.watchdog: StreamWatchdog | None = None
        self._reporter: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._serving = False
        self._forgetting: asyncio.TimerHandle | None = None
        self._keeper = WeightKeeper() if config.keeps_weights else None
        keeper = self._keeper.path if self._keeper is not None else lambda: None
        self._new_processes = partial(self.processes_class, config, group, labels, keeper)
        self._standby: Standby | None = None
        self._restart = ""
        self._start_s: dict[str, float] = {}
        self._ahead_s: dict[str, float] = {}
        self.processes = self._new_processes(early=early_imports.waiting(), ahead=prestarted.folder())
        try:
            self.engine = await self._bring_up()
        except Exception as error:
            cause = str(error) or type(error).__name__
            # Last the status store: who reads there that it is hopeless may end this process at once.
            self.processes.kill()
            self._let_go()
            note_fault(cause)
            self.live.failed(cause)
            self.status_store.fail(cause, isinstance(error, EngineFault) and error.lasting)
            raise RuntimeError(cause) from error
        last_words = [engine_down(FRONT_DIED).event(path) for path in FAILURES]
        if self.neighbor_store is not None:
            from deploy.serve.heir import shared_folder

            self.shared = shared_folder(f"{context.app_name} {ray.get_runtime_context().gcs_address}")
        waits = self.shared, config.health.patience_s, config.routing.affinity_bytes - REWRITTEN_BYTES
        self.watchdog = StreamWatchdog(
            last_words, self.processes.folder, fault_note(FRONT_DIED), config.health.timeout_s, *waits
        )
        self._beating = asyncio.ensure_future(self._beat(self.watchdog))
        # What was loaded stays: to look through all of it for garbage again and again takes 0.1 s each time, for which
        # no stream goes on.
        gc.collect()
        gc.freeze()
        self._serving = True
        self._standby = self._what_stands_by(self.watchdog)
        self.live.standby = self._standby.hot
        self.live.serving(self.engine)
        if self.key_status_store is not None:
            self.key_status_store.serving(self.engine)
        if self.neighbor_store is not None:
            self.neighbor_store.open(self.engine, self.watchdog)
        # Until proxies know this replica, the end of the one before it is still what there is to say.
        self._forgetting = asyncio.get_running_loop().call_later(NOTE_KEPT_S, note_fault, None)
        self.status_store.serving(self._start_s, self._ahead_s)
        self._standby.begin()
        placements = [f"{placement.ip} device {placement.device}" for placement in self.processes.placements]
        logger.info("serving", extra={logs.FIELDS: {"ranks": placements}})

    async def _bring_up(self) -> FailoverEngine:
        config = self.config
        self.status_store.say(f"starting {config.engine.mesh().world.size} ranks of {config.model_name}")
        times = StartTimes()
        # Where ranks started ahead, nothing that they need is held up by it; elsewhere they import first.
        reading = (
            asyncio.ensure_future(asyncio.to_thread(read_what_answers, config)) if self.processes.asks_ahead else None
        )
        try:
            client = await self._start_processes()
        except BaseException:
            if reading is not None:
                reading.cancel()
            raise
        times.end(PROCESSES)
        if self.processes.not_ahead:
            self.status_store.say(f"ranks that started ahead of Ray are not used: {self.processes.not_ahead}")
        if (nodes := len({placement.node for placement in self.processes.placements})) > 1:
            self.status_store.say(f"its ranks are on {nodes} nodes: what they sum goes over the network")
        self.tokenizer = await (reading or asyncio.to_thread(read_what_answers, config))
        if not client.serves:  # ranks that started ahead may be there: then it would hold up the front
            import_what_checks_grammars(config)
        if why := why_no_chat(self.tokenizer, config.engine.folder, config.api.chat_template):
            self.status_store.say(why)
        self.sampling_defaults = sampling_defaults(config)
        if why := what_is_not_taken(config):
            self.status_store.say(why)
        times.end("tokenizer, beside the ranks")
        await client.ready(config.engine.start_timeout_s)
        times.end("ranks")
        await client.health_check()
        times.end(FIRST_STEP)
        self.status_store.say(f"the replica started in {times}")
        if self.processes.ahead:
            self._start_s, self._ahead_s = times.parts, client.start_s
        else:
            self._start_s = of_replica(times.parts, client.start_s)
        neighbors: Neighbors = tuple if self.neighbor_store is None else self.neighbor_store.neighbors
        engine = FailoverEngine(client, self._start_again, config.health.patience_s, neighbors=neighbors)
        engine.on_loss.append(self._lost)
        engine.on_return.append(self._returned)
        engine.on_fault.append(self._failed)
        self.metrics = RayFrontMetrics(self.arrivals)
        self.handed = HandedPrompts(self.metrics.prompt_handed_over)
        self._reporter = asyncio.ensure_future(self._report(engine))
        return engine

    async def _start_processes(self) -> EngineClient:
        """Place scheduler and ranks and set them to work; the client of them, before they are ready."""
        config = self.config
        addresses = await self.processes.start()
        client = EngineClient(config.engine, addresses, config.model_name)
        client.on_progress.append(self.status_store.say)
        if self.engine is not None:  # whose place these take: streams wait for them
            waiting: Waiting = self.engine.waiting
        else:
            waiting = FIRST_ENGINE[config.engine.graphs_at_start]
        self.processes.run(addresses, lambda cause, told: self._ended(client, cause, told), waiting)
        return client

    async def _start_again(self) -> EngineClient:
        """Start another scheduler and other ranks in the places of those that died. Return their client, ready to
        serve."""
        if not self._serving:
            raise EngineFault("the replica is ending")
        assert self._standby is not None
        begin = time.monotonic()
        if (taken := await self._standby.take_over(self.processes)) is not None:
            self.processes, client = taken
            self._restart = f"the engine that stood by took over in {time.monotonic() - begin:.1f} s"
            return client
        self.processes.kill()
        await self.processes.gone(MEMORY_FREED_S)
        if not self._serving:
            raise EngineFault("the replica is ending")
        standby = self._standby.imported()
        self.processes = standby or self._new_processes()
        try:
            client = await self._start_processes()
        except ray.exceptions.RayError:
            if standby is None:
                raise
            logger.warning("the processes that stood by cannot be used, and others are started", exc_info=True)
            standby.kill()
            self.processes = self._new_processes()
            client = await self._start_processes()
        try:
            assert self.watchdog is not None
            self.watchdog.remove_at_end(self.processes.folder)
            placed = time.monotonic()
            await client.ready(self.config.engine.start_timeout_s)
            ready = time.monotonic()
            await client.health_check()
        except BaseException:
            await client.close()
            raise
        parts = {"processes": placed - begin, "ranks": ready - placed, "first step": time.monotonic() - ready}
        self._restart = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in parts.items())
        return client

    def _lost(self, cause: str) -> None:
        """The engine died, and another one is about to be started in its place."""
        assert self.engine is not None
        logger.error("engine lost", extra={logs.FIELDS: {"cause": cause, "waiting": self.engine.streams}})
        self.live.starting_again(cause)
        self.status_store.say(f"{cause}; its engine is started again, and {self.engine.streams} streams wait for it")

    def _returned(self, seconds: float) -> None:
        assert self.engine is not None
        fields = {"seconds": seconds, "parts": self._restart, "continued": self.engine.streams}
        logger.info("engine serves again", extra={logs.FIELDS: fields})
        self.live.serving(self.engine)
        self.status_store.say(f"serving again after {seconds:.1f} s: {self._restart}")
        assert self._standby is not None
        self._standby.begin()

    def _ended(self, client: EngineClient, cause: str, told: bool) -> None:
        """A process of the replica ended. If it `told` its scheduler why, that cause is on its way: wait for it."""
        wait = (FIRST_CAUSE_WAIT_S if self._serving else START_CAUSE_WAIT_S) if told else 0.0
        asyncio.get_running_loop().call_later(wait, client.fail, cause)

    def _failed(self, cause: str) -> None:
        """The engine died, and none takes its place. By now every stream has been told."""
        if not self._serving:
            return  # the constructor raises it
        try:
            logger.error("engine failed", extra={logs.FIELDS: {"cause": cause}})
            self.live.failed(cause)
            self.status_store.fail(cause, wait_s=REPORT_S)
            if self._forgetting is not None:  # the last replica's fault: this one's has just taken its place
                self._forgetting.cancel()
            note_fault(cause)
            self.processes.kill()
            if self._standby is not None:
                self._standby.kill()  # the weight keeper ends with this process, and frees weights meanwhile
        finally:
            # Whatever failed, this process ends and is replaced. Counted from here: all of the above kept the loop, and
            # the streams' events wait for it.
            asyncio.get_running_loop().call_later(self.config.health.flush_s, os._exit, 1)

    def _what_stands_by(self, watchdog: StreamWatchdog) -> Standby:
        def serving() -> EngineClient | None:
            return None if self.engine is None else self.engine.serving

        told = self._ended, watchdog.remove_at_end, self.status_store.say
        return Standby(self.config, self._new_processes, lambda: self.processes, serving, self._keeper, *told)

    def _let_go(self) -> None:
        """End what is there for the next time that the engine dies."""
        if self._standby is not None:
            self._standby.kill()
        if self._keeper is not None:
            self._keeper.close()

    async def _report(self, engine: FailoverEngine) -> None:
        while True:
            self.metrics.report(engine.down or None, standby=self._standby is not None and self._standby.ready)
            await asyncio.sleep(self.config.metrics_period_s)

    async def _beat(self, watchdog: StreamWatchdog) -> None:
        while True:
            others = self.neighbor_store
            watchdog.beat(*(() if others is None else (others.heirs(), others.elsewhere())))
            await asyncio.sleep(BEAT_S)

    def front(self, engine: Engine) -> ASGIApp:
        """The HTTP application."""
        from deploy.api.app import create_app

        numerics = self.config.engine.model_dump(mode="json", include=NUMERIC)
        known = (self.metrics, numerics, self.live, self.keys, self.tracing, self.sampling_defaults)
        return create_app(engine, self.tokenizer, self.config.api, *known, self.handed)

    def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI application that Serve mounts, once the constructor is through."""
        from deploy.serve.heir import Heir
        from deploy.serve.journals import Journals
        from deploy.serve.under_serve import REPLICA_HEADER, UnderServe

        assert self.engine is not None
        app, journals = self.front(self.engine), None
        if self.neighbor_store is not None:
            assert self.watchdog is not None
            serves = self.neighbor_store.answers_as
            journals = Journals(self.watchdog, serves)
            replica = (REPLICA_HEADER.encode(), self.name.encode())
            self.heir = Heir(app, self.watchdog, serves, replica, self.arrivals, self.shared)
            self.neighbor_store.heir = self.heir.path
        return UnderServe(app, self.name, self.arrivals, self.watchdog, self.handed, journals)

    async def take_prompt(self, ticket: str, digest: bytes, packed: bytes, to: object) -> None:
        """Called by a router, before the request with this ticket comes: its prompt, as an `EncodedPrompt` has it.
        `to`: this replica, for Serve to find it."""
        self.handed.give(ticket, EncodedPrompt(digest, packed))

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the load for routers. Serve calls this, and routers find the result with the replica."""
        assert self.engine is not None
        load = self.arrivals.load(self.engine.stats)
        return load_to_report(out_of_service(load) if self.engine.down else load)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for the controller, which Serve asks for where the number of replicas follows it."""
        assert self.engine is not None
        return load_of(self.engine.stats, self.engine.waiting, serving=not self.engine.down)

    async def check_health(self) -> None:
        """Called by Serve. The exit after a fault makes this the second line of defence. A replica whose engine is
        being started again is well: it has streams that wait."""
        if self.engine is not None and self.engine.over:
            raise EngineFault(self.engine.down)

    def __del__(self) -> None:
        """End the replica's own tasks. Serve calls this once every request is through."""
        if self.watchdog is not None:
            self.watchdog.leave()  # what follows waits for threads, processes and a collector of spans, in the loop
        for task in (self._reporter, self._beating):
            if task is not None:
                task.cancel()
        self._serving = False
        self.processes.kill()
        self._let_go()
        self.live.close()
        if self.key_status_store is not None:
            self.key_status_store.close()
        if self.neighbor_store is not None:
            self.neighbor_store.close()
        if self.tracing is not None:
            self.tracing.close()
        if self.heir is not None:
            self.heir.close()
            if self.heir.answers:
                # Serve knows nothing of them. They go on where they would if this front were killed, and so it is.
                os.kill(os.getpid(), signal.SIGKILL)
        if self.watchdog is not None:
            self.watchdog.close()


replica_class = serve.ingress()(EngineReplica)
"""`EngineReplica` as Serve deploys it."""
