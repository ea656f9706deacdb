"""The address at which a Ray of our own listens, that at which another one is looked for, and the folder of its logs.

Written for Ray 2.60.0, which has no settings for that: what stands here uses private parts of it. Where one is missing,
each function says what it does without.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kernels.private_api import PrivateApi
from workers.environment import EnvironmentProblem

KNOCK_TIMEOUT_S = 10.0

_ALONE: Final = PrivateApi(
    "ray",
    ("ray._private.ray_constants.ENABLE_RAY_CLUSTER",),
    "Ray listens where other machines reach it, and nothing but its token keeps them out",
)
_SETTINGS: Final = PrivateApi(
    "ray", (), "Ray cannot be told to listen on 127.0.0.1 alone, nor where to show its figures"
)
_ADDRESS: Final = PrivateApi(
    "ray",
    ("ray._private.services.canonicalize_bootstrap_address_or_die",),
    "an address is not tried before Ray does, which takes minutes where nobody listens",
)
_LOGS: Final = PrivateApi(
    "ray",
    ("ray._private.worker._global_node.get_logs_dir_path",),
    "the logs are named by the link to those of the Ray that was started last on this machine",
)


@contextmanager
def alone(token: bool) -> Iterator[None]:
    """Make Ray, within this context, take the address 127.0.0.1 for what it is, so that all that it starts listens
    there alone. It would otherwise put in its place the one by which other machines reach this one.

    Where Ray has no such switch, it does that, and a line is logged; EnvironmentProblem where no `token` guards it. The
    same where Ray does not know the settings by which it is given its addresses.
    """
    if not token and (gone := _ALONE.missing()):
        raise EnvironmentProblem(_ALONE.problem(gone))
    try:
        if not _ALONE.there():
            yield
            return
        from ray._private import ray_constants

        before = ray_constants.ENABLE_RAY_CLUSTER
        ray_constants.ENABLE_RAY_CLUSTER = False
        try:
            yield
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = before
    except RuntimeError as error:
        unknown, _, names = str(error).partition("Unknown keyword argument(s): ")
        if unknown or not names:
            raise
        raise EnvironmentProblem(_SETTINGS.problem(f"{names} in ray.init")) from error


def knock(address: str) -> str:
    """The address that Ray takes it for; OSError where nobody listens there, which Ray itself tries for minutes.

    Where Ray does not say what it takes an address for, it is returned as it is, and a line is logged.
    """
    if "://" in address or not _ADDRESS.there():
        return address
    from ray._private.services import canonicalize_bootstrap_address_or_die

    # Of the cluster that was started last, or with an address of this machine for localhost.
    address = canonicalize_bootstrap_address_or_die(address)
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), KNOCK_TIMEOUT_S).close()
    return str(address)


def logs_folder() -> str:
    """Return the log folder of the Ray that this process started."""
    if not _LOGS.there():
        return f"{os.environ.get('RAY_TMPDIR') or '/tmp'}/ray/session_latest/logs"
    import ray._private.worker

    return str(ray._private.worker._global_node.get_logs_dir_path())
