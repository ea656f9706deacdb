"""Compiles kernels side by side, before they are needed.

Triton compiles a kernel when it is first launched, one at a time: a start with an empty cache would wait for every one
of them. Most of the work is done outside the interpreter's lock (MLIR, ptxas, the C compiler that builds a launcher),
so threads share it. So do the ranks of a replica, which need the same kernels and find in Triton's cache what another
one has put there: each begins with a share of its own.

Written for Triton 3.6, of which it needs private parts: what a launch calls, the mode that compiles elsewhere, where a
launch finds what was compiled, how a launcher that was built is loaded, and how its cache names its folders.
Without them `possible` says no and logs a line: kernels are then compiled when they are first launched.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from types import ModuleType
from typing import Any, Final, TypeVar

import torch
import triton
from triton.runtime import cache
from typing_extensions import override

from kernels.private_api import PrivateApi

_PRIVATE: Final = PrivateApi(
    "triton",
    (
        "triton.AsyncCompileMode(executor, ignore_errors)",
        "triton.AsyncCompileMode.submit(key, compile_fn, finalize_fn)",
        "triton.runtime.jit.JITFunction.run(grid, warmup)",
        "triton.runtime.jit.JITCallable.parse",
        "triton.runtime.build._load_module_from_path(name, path)",
        "triton.runtime.cache._base32(key)",
        "triton.knobs.cache.dir",
    ),
    "kernels are compiled when they are first launched, one at a time, and a first start takes minutes longer",
)
_VERSION: Final = PrivateApi(
    "triton",
    ("triton.runtime.cache.triton_key",),
    "Triton reads its own files when the first kernel is looked up in its cache, which a start waits for",
)

_Piece = TypeVar("_Piece")
_launches_compute = True


@dataclass
class Compiled:
    """Result of `compile_ahead`."""

    kernels: int = 0
    """Handed to its threads: kernels that this process had not compiled or loaded before."""
    folders: set[str] = field(default_factory=set)
    """Names of the folders of Triton's cache in which they are now."""


@dataclass(frozen=True)
class Share:
    """Part of the kernels that a process compiles first, where several processes need all of them at the same time."""

    index: int = 0
    of: int = 1

    def distance(self, key: str) -> int:
        """Return how far the share that a kernel of this key belongs to is behind this one: 0 if it is this one."""
        return (zlib.crc32(key.encode()) - self.index) % self.of


class _Builders(Executor):
    """Threads that compile a kernel and load it onto their device: at once those of the own share, and those of others
    when all kernels are known, which their owners have compiled by then, or most of them. Of a share that another
    process is not through with, its last kernels are taken first, so that the two meet."""

    def __init__(self, device: torch.device, threads: int, done: Compiled, share: Share) -> None:
        self._cuda, self._done, self._share = device.type == "cuda", done, share
        prepare = partial(torch.cuda.set_device, device) if self._cuda else None
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="compile", initializer=prepare)
        self._of_others: list[tuple[int, int, Future[Any], Callable[[], Any]]] = []
        self.key = ""
        """Key of the kernel that is submitted next."""

    @override
    def submit(self, compile: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        self._done.kernels += 1
        future: Future[Any] = Future()
        if distance := self._share.distance(self.key):
            self._of_others.append((distance, -self._done.kernels, future, compile))
        else:
            self._pool.submit(self._build, future, compile)
        return future

    def all_known(self) -> None:
        """Note that no more kernels will be submitted: compile those of other shares, too."""
        for _, _, future, compile in sorted(self._of_others, key=lambda one: one[:2]):
            self._pool.submit(self._build, future, compile)
        self._of_others.clear()

    def _build(self, future: Future[Any], compile: Callable[[], Any]) -> None:
        try:
            kernel = compile()
            if self._cuda:
                kernel.run  # noqa: B018 - builds its launcher and loads it
            self._done.folders.add(cache._base32(kernel.hash))
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(kernel)

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


ALL: Final = Share()


def possible() -> bool:
    """Whether this Triton can compile ahead; a line is logged where it cannot."""
    return _PRIVATE.there()


def cache_folder() -> Path | None:
    """Return the folder of Triton's cache; None where this Triton does not say it."""
    return Path(triton.knobs.cache.dir) if possible() else None


def still_compiled(folders: Iterable[str]) -> bool:
    """Whether Triton's cache has all of these folders (`Compiled.folders`): who launches what is there waits for no
    compiler."""
    return possible() and all((Path(triton.knobs.cache.dir) / folder).is_dir() for folder in folders)


def read_version() -> None:
    """Let Triton find out, in a thread of its own, what it adds to the name of every kernel in its cache: a checksum of
    its own files, some 400 MB. Else the first kernel that is looked up waits for it."""
    if _VERSION.there():
        Thread(target=cache.triton_key, name="Triton's version", daemon=True).start()


def launches_compute() -> bool:
    """Whether launches compute anything: not within `compile_ahead`, where it is of no use to launch a kernel again
    that was launched for the same sizes."""
    return _launches_compute


def distinct(pieces: Sequence[_Piece]) -> Sequence[_Piece]:
    """Return the pieces of a computation that are to be launched one after the other: all of them. Within
    `compile_ahead` a few, which launch every kernel that all of them do.

    `pieces`: all but the last are of one size, and lie one behind the other. The last may be smaller. Triton compiles a
    kernel anew for an address that is no multiple of 16 bytes, and for a number that is 1 or a multiple of 16. Where
    piece i begins is i times the size of a piece: whether that is a multiple of 16 depends on the largest power of two
    up to 16 that divides i, and only that of the second piece is ever 1.
    """
    last = len(pieces) - 1
    return pieces if _launches_compute else [pieces[i] for i in sorted({0, 1, 2, 3, 4, 8, last}) if 0 <= i <= last]


@contextmanager
def compile_ahead(device: torch.device, threads: int, share: Share = ALL) -> Iterator[Compiled]:
    """Compile kernels ahead: within this context a launch computes nothing; its kernel is compiled, in one of `threads`
    threads, if it was not before. At the end all are ready. A kernel that does not compile raises where it is launched
    afterwards. `share`: of this process, where others compile the same kernels beside it.

    For the whole process, so nobody else may launch anything meanwhile. What launches would have written is what it
    was: with memory of zeros, say, all indices are valid. PrivateApiGone where it is not `possible`.
    """
    global _launches_compute
    _PRIVATE.require()
    from triton import AsyncCompileMode
    from triton.runtime import build
    from triton.runtime.jit import JITCallable, JITFunction

    class Mode(AsyncCompileMode):  # type: ignore[misc]
        def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
            self.executor.key = key
            future = super().submit(key, compile_fn, finalize_fn)
            # Whoever launches it again finds it at once: Triton would hash source and options anew at every launch,
            # which takes many times as long as all else.
            finalize_fn(future)
            submitted.append((future, finalize_fn))
            return future

    submitted: list[tuple[Any, Callable[[Any], None]]] = []
    done, one_at_a_time = Compiled(), Lock()
    plain_run, plain_parse, plain_load = JITFunction.run, JITCallable.parse, build._load_module_from_path

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return plain_run(self, *args, grid=grid, warmup=True, **options)

    def parse(self: Any) -> Any:
        # `ast.parse` in several threads fails at times before Python 3.11.8 and 3.12.2 (cpython issue 106905).
        with one_at_a_time:
            return plain_parse(self)

    def load(name: str, path: str) -> ModuleType:
        # All launchers are modules of one name, and whichever file is loaded for the second time Python puts into one
        # and the same module (those whose state is global: `import_find_extension`). Whoever looks into it a moment
        # later may find what another thread has loaded since: the launcher of another kernel.
        with one_at_a_time:
            loaded, own = plain_load(name, path), ModuleType(name)
            vars(own).update(vars(loaded))
            return own

    JITCallable.parse, build._load_module_from_path = parse, load
    try:
        with _Builders(device, threads, done, share) as builders, Mode(builders, ignore_errors=True):
            JITFunction.run, _launches_compute = compile_only, False
            try:
                yield done
            finally:
                JITFunction.run, _launches_compute = plain_run, True
                builders.all_known()
    finally:
        JITCallable.parse, build._load_module_from_path = plain_parse, plain_load
        for future, finalize in submitted:
            finalize(future.kernel)  # None if it did not compile: a launch tries again
