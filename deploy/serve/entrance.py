"""Parts of Ray Serve that an application needs: a start that does not wait for its proxies, the address at which it
listens already, and the shutdown of an application that has begun to start.

Written for Ray 2.60.0: all are private parts of Serve. Each function says what happens without.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def begin(location: str, host: str, port: int, *, beside: bool) -> list[Any]:
    """Let Serve run and listen at `host` and `port`, unless it runs. RayError or TimeoutError where it cannot start.

    `beside`: for a Ray of our own, on which Serve does not run yet, do not wait for its proxies. Return references to
    them: each can be got, without a value, once its proxy is there, and raises why it cannot start. Otherwise, and
    where this Serve always waits, which is logged, there are no references. On another cluster Serve may give a proxy
    so little time that it does not come up beside replicas: Serve ends it and starts another, which no reference tells.
    """
    from ray import serve

    options = {"host": host, "port": port}
    if not beside or not _BEGINNING.there():
        serve.start(proxy_location=location, http_options=options)  # where it runs it says what it does not change
        return []
    from ray.serve._private import api
    from ray.serve._private.client import ServeControllerClient
    from ray.serve.context import _set_global_client

    unchanged = api._coerce_controller_options(None)
    controller, proxies = api._create_controller_and_proxy_refs(options, None, None, None, unchanged, location)
    _set_global_client(ServeControllerClient(controller))
    return list(proxies)


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
