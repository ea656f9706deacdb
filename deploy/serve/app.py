"""Bring the application up: as a builder for `serve deploy` and `serve run`, or in one call with a Ray of its own.

Ray Serve reads its settings from the environment when it is imported, so nothing here imports it at the top.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from deploy.cluster.connection import CannotJoin, RayConnection, Say, cluster_to_join, port_problem
from deploy.cluster.sessions import Sessions, Watch
from deploy.cluster.spared_pandas import spare_pandas
from deploy.config.application import EVERYWHERE, LOOPBACK, ServeConfig
from deploy.mistakes import explain, first_line
from deploy.serve import early_imports, entrance, prestarted, start_table
from workers.channel.ports import free_ports, six_alone
from workers.environment import check_environment, visible_gpus
from workers.families.registry import load_config
from workers.fit.settings import Unfit, check_fit
from workers.models.config import ConfigError
from workers.rank.start_times import StartTimes

if TYPE_CHECKING:
    from ray.serve import Application

APPLICATION = "latentserve"
POLL_S = 0.2
NEWS_PERIOD_S = 1.0
ANSWER_PATIENCE_S = 5.0
"""Seconds that the entrance may take to find out about replicas that serve."""
END_TIMEOUT_S = 30.0
"""Seconds beyond the drain times until a deleted application must be gone."""
END_S = 12.0
"""Seconds beyond the drain times until a Ray of our own must have ended, too."""
SAME_S = 0.5
"""Two SIGTERMs within are one: `timeout`, for example, signals the command it runs, then the group it is in."""


def tell(line: str) -> None:
    """Print a line at once, wherever it goes. One for which a disk has no room is lost: what serves goes on."""
    try:
        print(line, flush=True)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


class StartFailed(RuntimeError):
    """The application did not come up; the message is the first cause."""


def build(args: dict[str, Any]) -> Application:
    """Builder for `import_path: deploy.serve.app:build`; `args`: fields of `ServeConfig` (see deploy/serve.yaml)."""
    check_environment()
    try:
        config = ServeConfig.model_validate(args)
    except ValidationError as error:
        raise ValueError(explain(error, settings=ServeConfig, source="args")) from None
    _check_model(config)
    return build_app(config)


def build_app(config: ServeConfig, engine_class: type | None = None) -> Application:
    """The Serve application for a Ray that runs. `engine_class` replaces the engine deployment's class."""
    from deploy.serve.application import build_application
    from deploy.serve.replica import replica_class

    return build_application(config, engine_class or replica_class)


class Running:
    """An application that serves."""

    ahead: prestarted.PrestartedRanks | None = None
    """Ranks that started ahead of Ray, if any did."""

    def __init__(self, config: ServeConfig, connection: RayConnection) -> None:
        from deploy.serve.capacity import WaitingReplicas
        from deploy.serve.progress import ProgressReader

        self.config, self._connection = config, connection
        self._reader, self._waiting = ProgressReader(APPLICATION), WaitingReplicas(APPLICATION, config)
        self.proxies = entrance.Proxies()
        self._to_delete = True
        self.start_s: dict[str, float] = {}
        """Seconds of the parts of the start, by their names, in order; empty where no replica reported its own."""
        self.ahead_s: dict[str, float] = {}
        """Seconds of the parts of rank 0 that ran beside those."""
        self._address = _reached_at(config.host, connection)

    @property
    def url(self) -> str:
        """URL at which the application serves."""
        return f"http://{self._address}:{self.config.port}"

    @property
    def waits_for(self) -> str:
        """Resources that replicas without a place wait for; empty while there are no such replicas."""
        return self._waiting.line

    def news(self) -> list[str]:
        """Return the news since the last call: progress while replicas and proxies start, failures, resources that
        they wait for."""
        return [
            *self._reader.new_lines(),
            *self._waiting.news(),
            *self._connection.news(),
            *self.proxies.news(),
        ]

    def started(self, command: dict[str, float], handed_over: float) -> None:
        """Note that the application answers. `command`: seconds of the parts until it was `handed_over` to Serve (Unix
        time, seconds)."""
        if (last := self._reader.last_start()) is not None:
            waited, until_replica = time.time() - handed_over, last.started - handed_over
            self.start_s = start_table.of_application(command, waited, until_replica, last.start_s)
            self.ahead_s = last.ahead_s

    def failures(self) -> list[str]:
        """Causes of every replica that failed so far, oldest first."""
        return self._reader.failures()

    def lasting_failure(self) -> str:
        """Cause of the first failure that another start would only repeat; empty while there is none."""
        return self._reader.lasting_failure()

    def stop(self, say: Say = lambda line: None) -> None:
        """Let streams finish (at most `drain.timeout_s`), end every process this started, free every port.

        A KeyboardInterrupt meanwhile has this `abandon` the rest."""
        from ray import serve

        second = "ends them" if self._connection.own else "ends this command, and not them"
        say(f"draining: running streams may finish; a second signal {second}")
        told = "stopped"
        try:
            self._delete()
            deadline = time.monotonic() + self.config.drain.deregister_s + self.config.drain.timeout_s + END_TIMEOUT_S
            while APPLICATION in serve.status().applications and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if self._connection.own:
                serve.shutdown()
        except KeyboardInterrupt:
            self.abandon(say)
            return
        except _no_serve() as error:
            told = _ended_by_others(error)
        finally:
            self._leave()
        say(told)

    def abandon(self, say: Say = lambda line: None) -> None:
        """Wait for no stream. A Ray of our own ends with them; one that was joined is told to end the application, and
        lets them finish without us. Nothing is done twice: Ray Serve, asked for anything once we have left, would join
        or start another Ray."""
        try:
            if self._to_delete and not self._connection.own:
                self._delete()
        except _no_serve() as error:
            say(_ended_by_others(error))
        finally:
            self._leave()

    def _delete(self) -> None:
        from ray import serve

        entrance.delete(APPLICATION)
        serve.status()  # by its answer the controller has heard of the deletion
        self._to_delete = False

    def _leave(self) -> None:
        self._to_delete = False
        try:
            self._connection.close()
        finally:
            if self.ahead is not None:
                self.ahead.close()


def _no_serve() -> tuple[type[Exception], ...]:
    """Errors by which Ray or Ray Serve tells that somebody has ended it."""
    from ray import exceptions
    from ray.serve.exceptions import RayServeException

    of_ray = exceptions.RayActorError, exceptions.RaySystemError, exceptions.LocalRayletDiedError, exceptions.RpcError
    return (*of_ray, RayServeException)


def _ended_by_others(error: Exception) -> str:
    cause = first_line(error)
    return f"stopped; Ray Serve was ended by somebody else, so streams that still ran were broken off: {cause}"


def launch(
    config: ServeConfig,
    say: Say = tell,
    engine_class: type | None = None,
    sessions: Sessions | None = None,
    before_s: float = 0.0,
) -> Running:
    """Bring the application up and return once `/health` answers 200. `say` gets lines about progress; a Ray of our own
    runs in `sessions`. `before_s`: seconds of the start that have passed already, with imports.

    Unfit where the model cannot be served with these settings, before anything is started; StartFailed with the first
    cause, and nothing is left running then.
    """
    times = StartTimes(before_s)
    check_environment()
    _check_model(config, gpus=None if cluster_to_join(config) else visible_gpus())
    config = config.model_copy(update={"host": six_alone(config.host)})
    if config.port == 0:
        config = config.model_copy(update={"port": free_ports(config.host, 1)[0]})
    sessions, ahead = sessions or Sessions(), None
    if not cluster_to_join(config):
        _check_port(config)
        if engine_class is None:
            ahead = _begin_ranks(config, say, sessions)
    try:
        times.end("imports")
        return _bring_up(config, say, engine_class, sessions, times, ahead)
    except BaseException:
        if ahead is not None:
            ahead.close()
        raise


def _begin_ranks(config: ServeConfig, say: Say, sessions: Sessions) -> prestarted.PrestartedRanks | None:
    ahead = prestarted.begin(config, len(os.sched_getaffinity(0)), visible_gpus(), sessions)
    if ahead is not None:
        say(f"{len(ahead)} rank{'s start' if len(ahead) > 1 else ' starts'} ahead of Ray")
    return ahead


def _bring_up(
    config: ServeConfig,
    say: Say,
    engine_class: type | None,
    sessions: Sessions,
    times: StartTimes,
    ahead: prestarted.PrestartedRanks | None,
) -> Running:
    """Start Ray or join one, and the application there. As `launch`."""
    cores = len(os.sched_getaffinity(0))
    more = early_imports.environment(config, cores) if ahead is None else ahead.environment
    spare_pandas()
    try:
        connection = RayConnection(config, say, sessions, _import_what_follows, {**early_imports.preloaded(), **more})
    except CannotJoin as error:
        raise StartFailed(str(error)) from None
    there_before = True
    try:
        if not connection.own:
            _check_host(config)
            _check_entrance(config, say)
        times.end("Ray")
        running = Running(config, connection)
        running.ahead = ahead
        _check_capacity(config, connection, say)
        if connection.own:
            early_imports.begin(config)
        there_before = _enter(running, beside=connection.own)
        _deploy(running, engine_class)
        times.end("Ray Serve")
        handed_over = time.time()
        _wait(running, say)
        running.started(times.parts, handed_over)
        if ahead is not None:
            ahead.served()  # here: a signal that comes meanwhile ends Ray, too
    except BaseException:
        if there_before:
            connection.close()  # Serve keeps replicas whose successors fail
        else:
            running.abandon()
        raise
    return running


def start(config: ServeConfig, say: Say = tell, engine_class: type | None = None) -> None:
    """`launch`, wait for SIGINT, SIGTERM or SIGHUP, `stop`. A second signal ends without draining. Where Ray, of our
    own or joined, was ended as well, or our own does not end, this process exits within seconds, with code 0."""
    wanted = threading.Event()
    running: Running | None = None
    sessions = Sessions()
    watch = Watch(sessions, config.drain.deregister_s + config.drain.timeout_s + END_S, say)
    first = 0.0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal first
        again = wanted.is_set()
        if again and number == signal.SIGTERM and time.monotonic() - first < SAME_S:
            return
        first = first or time.monotonic()
        wanted.set()  # first: an import may drop the exception, and then the application is stopped once it runs
        if running is None or again:
            watch.hurry()
            raise KeyboardInterrupt
        watch.stop()

    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)  # nohup
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, *hangup)}
    try:
        running = launch(config, say, engine_class, sessions, start_table.process_age_s())
        for line in start_table.lines_of(running.start_s, running.ahead_s) if running.start_s else ():
            say(line)
        say(f"serving {config.model_name} at {running.url}/v1 (Ctrl-C stops)")
        try:
            while not wanted.wait(NEWS_PERIOD_S):
                for line in running.news():
                    say(line)
            running.stop(say)
        except KeyboardInterrupt:
            running.abandon(say)
    finally:
        watch.over()
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_model(config: ServeConfig, gpus: int | None = None) -> None:
    """Unfit, or FileNotFoundError, for all that the model's config.json decides. `gpus`: those that there will be for a
    Ray of our own; None for another."""
    check_fit(config.engine, gpus=gpus)
    try:
        load_config(config.engine.folder)
    except ConfigError as error:
        raise Unfit(f"{config.engine.folder}: {error}") from None


def _check_port(config: ServeConfig) -> None:
    if problem := port_problem(config.host, config.port):
        raise StartFailed(
            f"port {config.port} of {config.host} cannot be used: {problem}; choose another with --port, or another "
            "address of this machine with --host"
        )


def _reached_at(host: str, connection: RayConnection) -> str:
    """The host of a URL for what listens at `host`."""
    if host == "::" and connection.own:
        host = "::1"
    elif host in EVERYWHERE:
        host = connection.head_address
    return f"[{host}]" if ":" in host else host


def _check_host(config: ServeConfig) -> None:
    """StartFailed for one interface of a cluster's nodes with HAProxy in front."""
    if config.ingress == "proxy" or config.host in (*EVERYWHERE, *LOOPBACK):
        return
    raise StartFailed(
        f"host = {config.host}: HAProxies of a cluster reach replicas of their own node over 127.0.0.1 and those of "
        "others by the node's address, so listen on 127.0.0.1 or 0.0.0.0 (and let a firewall choose the interface), or "
        "set ingress to proxy"
    )


def _check_entrance(config: ServeConfig, say: Say) -> None:
    """StartFailed where Ray Serve runs and listens elsewhere: it goes on to, whatever it is told."""
    from ray import serve

    if not entrance.known():
        return
    if (there := entrance.listens_at()) is None:
        _check_port(config)
    elif there != (config.host, config.port):
        host, port = there
        raise StartFailed(
            f"Ray Serve runs on this cluster and listens on {host}:{port}, not on {config.host}:{config.port}; give "
            f"--host {host} --port {port}, which replaces its application {APPLICATION}, or end it (`serve shutdown`)"
        )
    elif APPLICATION in serve.status().applications:
        say(f"replacing the application {APPLICATION} that runs there")


def _check_capacity(config: ServeConfig, connection: RayConnection, say: Say) -> None:
    """A Ray of our own never grows: StartFailed when it is too small. To another nodes may come, so Serve waits."""
    from deploy.serve.application import settled
    from deploy.serve.capacity import shortage

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    here = "this machine" if hidden is None else f"this machine with CUDA_VISIBLE_DEVICES = {hidden}"
    if config.engine.device != settled(config).engine.device and config.gpus_per_rank is None:
        where, more = (here, "") if connection.own else ("the nodes that are there", "; cuda waits for GPUs")
        say(f"device = auto, and no GPU on {where}: ranks run on CPUs{more}")
    if not (short := shortage(config, all_at_once=connection.own)):
        return
    fewer = "fewer --replicas" if config.autoscaling.max_replicas is None else "fewer replicas there"
    if connection.own:
        raise StartFailed(f"{short} on {here}; give {fewer} or ranks (--tensor-parallel), or --device cpu")
    say(f"{short}: waiting for nodes that have them; {fewer} or ranks (--tensor-parallel) take less")


def _import_what_follows() -> None:
    """Import what handing an application over to Serve needs, and waiting for it, which takes a second or more."""
    import httpx

    import deploy.serve.application
    import deploy.serve.capacity
    import deploy.serve.progress
    import deploy.serve.replica

    assert deploy.serve.application
    assert httpx


def _enter(running: Running, *, beside: bool) -> bool:
    """Let Serve run; its proxies come up meanwhile if `beside`. Return whether there is an application already where
    this one goes."""
    from ray import serve
    from ray.exceptions import RayError

    config = running.config
    location = "HeadOnly" if config.proxies == "head" else "EveryNode"
    try:
        running.proxies = entrance.begin(location, config.host, config.port, beside=beside)
    except (RayError, TimeoutError) as error:
        raise StartFailed(entrance.problem(error)) from error
    return APPLICATION in serve.status().applications


def _deploy(running: Running, engine_class: type | None) -> None:
    """Hand the application to Serve; StartFailed where it refuses."""
    from ray import serve
    from ray.serve.api import RunTarget
    from ray.serve.exceptions import RayServeException

    from deploy.serve import progress

    progress.clear(APPLICATION)
    target = RunTarget(build_app(running.config, engine_class), name=APPLICATION, route_prefix="/")
    try:
        with entrance.handing_over():
            serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    except RayServeException as error:  # such as another application at the same place
        cause = getattr(error, "cause", error)  # Ray's own account of it holds a traceback
        raise StartFailed(f"Ray Serve refuses the application: {cause}") from None
    except TimeoutError as error:  # of a Serve that waits for its proxies, whatever it is told
        raise StartFailed(entrance.problem(error)) from error


def _wait(running: Running, say: Say) -> None:
    """Wait until the application answers; StartFailed with the first cause once it never will."""
    from ray import serve

    begin = time.monotonic()
    ready: float | None = None
    told = False
    while True:
        lines, cause = running.news(), running.lasting_failure() or running.proxies.failure
        for line in lines:
            if not (cause and cause in line):  # the error says it
                say(line)
        if cause:
            raise StartFailed(cause)  # Serve would try again
        status = serve.status().applications.get(APPLICATION)
        if status is None:
            raise StartFailed("somebody else deleted the application while it started")
        whole = status.deployments and all(d.status == "HEALTHY" for d in status.deployments.values())
        problem = ""
        if status.status == "RUNNING" and whole:
            if not (problem := _health_problem(running.url)):
                return
            if not running.proxies.starting:
                ready = ready or time.monotonic()
            if ready and not told and time.monotonic() - ready > ANSWER_PATIENCE_S:
                told = True
                hint = "" if running.config.host in EVERYWHERE else "; replicas on other nodes need --host 0.0.0.0"
                say(f"all replicas serve, but {running.url}/health does not answer well: {problem}{hint}")
        if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise StartFailed((running.failures() or [status.message])[0])
        if time.monotonic() - begin > running.config.engine.start_timeout_s:
            cause = problem or running.waits_for or status.message or "replicas still start"
            raise StartFailed(f"not ready within {running.config.engine.start_timeout_s:.0f} s: {cause}")
        time.sleep(POLL_S)


def _health_problem(url: str) -> str:
    """Return what is wrong with the answer of /health; empty if nothing is."""
    import httpx

    try:
        status = httpx.get(f"{url}/health", timeout=10.0, trust_env=False).status_code
    except httpx.HTTPError as error:
        return f"no answer: {str(error) or 'none in time'}"
    return "" if status == 200 else f"HTTP status {status}"
