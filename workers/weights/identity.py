"""Identity of the weights in a model folder, for keys of cached pages that outlive a process: what other weights
computed must not be found under them.

Nobody reads hundreds of gigabytes to start. So of every file the name, the size, the header and samples of the contents
are hashed. Equal copies on other disks are the same. Files that another training has written are others, even where all
names, shapes and sizes are alike; a change of a few bytes between two samples is not noticed.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Final

from workers.weights.checkpoint import WeightsError, weight_files

SAMPLE_BYTES: Final = 4096
SAMPLES: Final = 4096
"""Samples of all files together, and at least `LEAST_SAMPLES` of each: as many reads take a second from a disk."""
LEAST_SAMPLES: Final = 16
READERS: Final = 16
"""Threads that read samples: from a file system far away each takes its time."""
_LENGTH_BYTES: Final = 8
"""Of the header's length, with which a safetensors file begins."""
_MOST_HEADER: Final = 100_000_000
"""Bytes of the longest header that safetensors reads."""


def weights_identity(folder: Path) -> bytes:
    """Return 16 bytes that name the safetensors files of `folder` by their names, sizes, headers and samples of their
    contents. WeightsError where they cannot be read."""
    found = blake2b(digest_size=16)
    files = weight_files(folder)
    samples = max(LEAST_SAMPLES, SAMPLES // len(files))
    with ThreadPoolExecutor(READERS) as readers:
        for file in files:
            try:
                _add(found, file, samples, readers)
            except OSError as error:
                raise WeightsError(f"cannot read {file}: {error.strerror}") from error
    return found.digest()


def _add(found: blake2b, file: Path, samples: int, readers: ThreadPoolExecutor) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # nothing behind a sample is wanted
        size = os.fstat(descriptor).st_size
        length = min(int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little"), size, _MOST_HEADER)
        begin = _LENGTH_BYTES + length
        # A name may hold anything, so its length stands before it.
        name = os.fsencode(file.name)
        found.update(b"%d %d %d\n" % (len(name), size, length) + name)
        found.update(os.pread(descriptor, length, _LENGTH_BYTES))
        for sample in readers.map(partial(os.pread, descriptor, SAMPLE_BYTES), _places(begin, size, samples)):
            found.update(sample)
    finally:
        os.close(descriptor)


def _places(begin: int, end: int, samples: int) -> list[int]:
    """Return where samples begin: all from `begin` to `end` where that is no more, else as far apart as they can be."""
    room = end - begin
    if room <= samples * SAMPLE_BYTES:
        return list(range(begin, end, SAMPLE_BYTES))
    return [begin + (room - SAMPLE_BYTES) * number // (samples - 1) for number in range(samples)]
