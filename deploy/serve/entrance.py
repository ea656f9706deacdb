"""Parts of Ray Serve that an application needs: the address at which it listens already, and the shutdown of an
application that has begun to start.

Written for Ray 2.60.0: both are private parts of Serve. Each function says what happens without.
"""

from __future__ import annotations

from typing import Final

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
