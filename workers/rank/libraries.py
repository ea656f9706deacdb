"""Imports of a rank's process, in the time that they take and no more."""

from __future__ import annotations

import gc


def load_libraries() -> None:
    """Import what `workers.rank.worker_process` needs, which takes seconds.

    The garbage collector is kept from what is loaded, all of which stays: it would search it again and again during the
    imports, for a tenth of a second whenever it looks through everything later on, and several times at the process's
    end.
    """
    gc.disable()
    import workers.rank.worker_process
    from kernels.runtime import ahead
    from workers.environment import visible_gpus

    assert workers.rank.worker_process
    if visible_gpus():
        ahead.read_version()
    gc.freeze()
    gc.enable()
