"""Parts of Ray Serve that an application needs: a start that does not wait for its proxies, the address at which it
listens already, and the shutdown of an application that has begun to start.

Written for Ray 2.60.0: all are private parts of Serve. Each function says what happens without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from kernels.private_api import PrivateApi

_CLIENT: Final = PrivateApi(
    "ray",
    ("ray.serve.context._get_global_client(raise_if_no_controller_running)",),
    "a Ray Serve that listens elsewhere already is not noticed, and the start waits for an answer that never comes",
)
_DELETION: Final = PrivateApi(
    "ray",
    ("ray.serve.delete(_blocking)",),
    "the end of the application is waited for by Ray Serve, without a limit of our own",
)
_BEGINNING: Final = PrivateApi(
    "ray",
    (
        "ray.serve._private.api._coerce_controller_options(controller_options)",
        "ray.serve._private.api._create_controller_and_proxy_refs(http_options, grpc_options, global_logging_config, "
        "global_tracing_config, controller_options, proxy_location)",
        "ray.serve._private.client.ServeControllerClient(controller)",
        "ray.serve._private.client.ServeControllerClient.wait_for_proxies_serving(wait_for_applications_running)",
        "ray.serve.context._set_global_client(client)",
    ),
    "replicas are started when HAProxy or Serve's own proxy is there, and not beside it",
)


class Proxies:
    """Proxies of Ray Serve that come up while replicas start."""

    def __init__(self, starting: Iterable[Any] = ()) -> None:
        """`starting`: references that can be got once their proxy is there, and raise why it cannot start."""
        self._starting = list(starting)
        self.failure = ""
        """The error message of the first that could not start; empty while there is none."""

    @property
    def starting(self) -> bool:
        """Whether some were not there yet at the last look."""
        return bool(self._starting)

    def news(self) -> list[str]:
        """Look at them. Return a line for each that turned out, since the last look, not to start."""
        import ray
        from ray.exceptions import RayError

        if not self._starting:
            return []
        there, self._starting = ray.wait(self._starting, num_returns=len(self._starting), timeout=0)
        lines = []
        for proxy in there:
            try:
                ray.get(proxy)
            except RayError as error:
                failure = problem(error)
                self.failure = self.failure or failure
                lines.append(f"a proxy of {failure}")
        return lines


def problem(error: Exception) -> str:
    """Return the error message where Serve does not start: of the traceback of another process the line that says why,
    HAProxy's own alert where there is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    alert = (line for line in reversed(lines) if "[ALERT]" in line)
    return f"Ray Serve does not start: {next(alert, lines[-1] if lines else 'no cause is known')}"


def begin(location: str, host: str, port: int, *, beside: bool) -> Proxies:
    """Let Serve run and listen at `host` and `port`, unless it runs. RayError or TimeoutError where it cannot start.

    `beside`: for a Ray of our own, on which Serve does not run yet, do not wait for its proxies, and return those that
    start. Otherwise, and where this Serve always waits, which is logged, none start any more. On another cluster Serve
    may give a proxy so little time that it does not come up beside replicas: Serve ends it and starts another, of which
    `Proxies` would not know.
    """
    from ray import serve

    options = {"host": host, "port": port}
    if not beside or not _BEGINNING.there():
        serve.start(proxy_location=location, http_options=options)  # where it runs it says what it does not change
        return Proxies()
    from ray.serve._private import api
    from ray.serve._private.client import ServeControllerClient
    from ray.serve.context import _set_global_client

    unchanged = api._coerce_controller_options(None)
    controller, proxies = api._create_controller_and_proxy_refs(options, None, None, None, unchanged, location)
    _set_global_client(ServeControllerClient(controller))
    return Proxies(proxies)


@contextmanager
def handing_over() -> Iterator[None]:
    """Have Serve, when it is given an application within this context, not wait for its proxies; whoever gives it looks
    whether the application answers. Where this Serve always waits, a line is logged."""
    if not _BEGINNING.there():
        yield
        return
    from ray.serve._private.client import ServeControllerClient

    # Not in one client alone: Serve takes another one when a busy controller did not answer for five seconds.
    kept: Any = ServeControllerClient.wait_for_proxies_serving
    there: Any = ServeControllerClient
    there.wait_for_proxies_serving = lambda client, wait_for_applications_running=True: None
    try:
        yield
    finally:
        there.wait_for_proxies_serving = kept


def known() -> bool:
    """Whether `listens_at` can tell; a line is logged where it cannot."""
    return _CLIENT.there()


def listens_at() -> tuple[str, int] | None:
    """Host and port of the Ray Serve that runs on this cluster; None where none does."""
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else (client.http_config.host, client.http_config.port)


def delete(application: str) -> None:
    """Have Serve delete an application, and do not wait for that; where this Serve always waits, a line is logged."""
    from ray import serve

    if _DELETION.there():
        serve.delete(application, _blocking=False)
    else:
        serve.delete(application)
