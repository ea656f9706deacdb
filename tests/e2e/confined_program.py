"""An application in a mount namespace of its own: /dev/shm and Ray's folder are as small as in a container."""

import ctypes
import os
import sys

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18
RAY_FOLDER = "/mnt"
SHARED_MIB, RAY_MIB = 64, 96


def mount(kind: str, at: str, flags: int, options: str) -> None:
    if ctypes.CDLL(None, use_errno=True).mount(kind.encode(), at.encode(), kind.encode(), flags, options.encode()):
        raise OSError(ctypes.get_errno(), f"mount {kind} at {at}")


def confine() -> None:
    """Give this process and its children a view of the file system of their own. OSError where it may not."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    mount("none", "/", MS_REC | MS_PRIVATE, "")
    mount("tmpfs", "/dev/shm", 0, f"size={SHARED_MIB}m")
    mount("tmpfs", RAY_FOLDER, 0, f"size={RAY_MIB}m")


def main() -> None:
    confine()
    os.environ["RAY_TMPDIR"] = RAY_FOLDER
    from deploy.config.application import ServeConfig
    from deploy.serve.app import start

    start(ServeConfig.load(sys.argv[1]))


if __name__ == "__main__":  # to see whether it may
    confine()
