"""Processes of a head node of our own: those that nobody needs are not started, and nobody waits for the dashboard.

Written for Ray 2.60.0, whose head node starts its dashboard first and waits for it, in a private part of it. Without
that part a line is logged, and a start takes some seconds more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from deploy.mistakes import first_line
from kernels.private_api import PrivateApi
from workers.environment import EnvironmentProblem

_START: Final = PrivateApi(
    "ray",
    (
        "ray._private.node.Node.start_api_server(include_dashboard, raise_on_failure)",
        "ray._private.node.Node.start_log_monitor",
        "ray._private.ray_constants.DASHBOARD_ADDRESS",
        "ray._private.ray_constants.PROCESS_TYPE_DASHBOARD",
        "ray._private.utils.get_dashboard_dependency_error()",
        "ray._private.worker._global_node",
        "ray.experimental.internal_kv._internal_kv_get",
    ),
    "a start waits some seconds for Ray's dashboard, even where none is asked for",
)
DASHBOARD_NICE: Final = 10
"""Added to the nice value of the dashboard's processes: where cores are few, a start and what serves go first."""
ATTEMPTS: Final = 3
"""Starts of a node that does not come up. By the second one the system has its agents' files in memory."""
_LATE: Final = ("Timed out waiting for file", "Failed to start GCS")
"""Beginnings of the RuntimeErrors by which Ray tells that its head did not tell its port, or did not answer."""


@contextmanager
def short_start(address: str, then: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Let a Ray that is started within this context go on while its dashboard, which listens at `address` (host:port),
    comes up. Where no dashboard is asked for, nothing is started in its place, and no process that reads all logs for
    drivers, of which ours wants none.

    `then` is called just before the node is started, for which this process then waits; it may start a thread that
    imports what it likes, as this process imports nothing more for the node. It is not called where this Ray cannot be
    told any of that.
    """
    if not _START.there():
        yield
        return
    from ray._private import utils
    from ray._private.node import Node

    kept: Any = Node.start_api_server, Node.start_log_monitor
    called = False

    def start(node: Any, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        nonlocal called
        if include_dashboard:
            with _taken_to_be_at(address):
                kept[0](node, include_dashboard=include_dashboard, raise_on_failure=raise_on_failure)
            nice = min(os.getpriority(os.PRIO_PROCESS, 0) + DASHBOARD_NICE, 19)
            for process in _dashboard(node):
                with suppress(OSError):  # it has ended
                    os.setpriority(os.PRIO_PROCESS, process.pid, nice)
        # Ray imports aiohttp, grpc and others when it starts the node: now, and not beside what `then` may import.
        utils.get_dashboard_dependency_error()
        if not called:  # for the first of several nodes
            called = True
            then()

    Node.start_api_server, Node.start_log_monitor = start, lambda node: None
    try:
        yield
    finally:
        Node.start_api_server, Node.start_log_monitor = kept


def patient(init: Callable[..., object], forget: Callable[[], bool], say: Callable[[str], None]) -> Callable[..., None]:
    """Return `init`, which is `ray.init`, such that it begins anew where the node does not come up, ATTEMPTS times in
    all; EnvironmentProblem, which says what to do, where it still does not.

    The node ends itself where one of its agents has not told its port within 15 s, which imports take on a machine that
    is busy; Ray then waits for it all the same, and tells of a timeout or of `Deadline Exceeded`. There is no setting
    for those seconds. `forget` ends what was started, and returns whether it has: without that there is no other try.
    `say` gets a line for each.
    """

    def start(**settings: Any) -> None:
        for left in reversed(range(ATTEMPTS)):
            try:
                init(**settings)
                return
            except Exception as error:
                if not _did_not_come_up(error):
                    raise
                cause = first_line(error)
                if left and forget():
                    say(f"Ray has not come up: {cause} It is started again")
                    continue
                logs = f"{os.environ.get('RAY_TMPDIR') or '/tmp'}/ray/session_latest/logs"
                raise EnvironmentProblem(
                    f"Ray does not start on this machine: {cause} If the machine is busy with other work, try again "
                    f"later; if not, raylet.out and gcs_server.out in {logs} say more"
                ) from error

    return start


def _did_not_come_up(error: Exception) -> bool:
    """Whether Ray tells by this of a node that did not come up: of most by a plain Exception. Other errors of Python's
    own are defects, or settings that Ray does not know."""
    from ray.exceptions import RayError

    late = isinstance(error, RuntimeError) and str(error).startswith(_LATE)
    return late or type(error) is Exception or isinstance(error, ConnectionError | RayError)


@contextmanager
def _taken_to_be_at(address: str) -> Iterator[None]:
    """Answer whoever asks Ray's store within this context where the dashboard is, as if it were there."""
    from ray._private import ray_constants
    from ray.experimental import internal_kv

    get: Any = internal_kv._internal_kv_get

    def known(key: Any, *arguments: Any, **options: Any) -> Any:
        return address.encode() if key == ray_constants.DASHBOARD_ADDRESS else get(key, *arguments, **options)

    internal_kv._internal_kv_get = known
    try:
        yield
    finally:
        internal_kv._internal_kv_get = get


def _dashboard(node: Any) -> list[Any]:
    from ray._private import ray_constants

    return [info.process for info in node.all_processes.get(ray_constants.PROCESS_TYPE_DASHBOARD, [])]


def dashboard_ended() -> bool:
    """Whether the dashboard of the Ray that this process started has ended, most likely because it could not start.
    False where nobody knows."""
    if not _START.there():
        return False
    import ray._private.worker

    node: Any = ray._private.worker._global_node
    return node is not None and any(process.poll() is not None for process in _dashboard(node))
