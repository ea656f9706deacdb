"""Whether processes of this node have ended, and given back what they had."""

from __future__ import annotations

import os
import select
from pathlib import Path


def runs(pid: int) -> bool:
    """Whether any thread of a process has not ended yet: until then it may have memory of a GPU, and write to it. One
    whose parent has not heard of its end has nothing any more. Where the system does not say, it is taken to run."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except AttributeError:  # Pythons that were built for old systems lack the function
        return _has_threads(pid)
    except OSError:  # no descriptor is left, for instance
        return True
    try:
        ended = select.poll()  # select(2) takes no descriptor above 1,023, and each stream of a front has one
        ended.register(descriptor, select.POLLIN)
        return not ended.poll(0)
    finally:
        os.close(descriptor)


def _has_threads(pid: int) -> bool:
    """The same by the states of its threads, for which the system reads a file of each."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True
    for thread in threads:
        try:
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            return True
        if state not in "ZX":
            return True
    return False
