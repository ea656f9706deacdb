"""Fills device memory from mapped files with several threads at once.

A copy from pageable memory is staged by the driver on one core, far below what the link and the page cache can do. Here
each thread copies pieces into page-locked buffers of its own and sends them off on a stream of its own, so that reading
the next piece overlaps with sending the last.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor

THREADS = 8
PIECE_BYTES = 16 << 20
"""Bytes of one page-locked buffer; every thread has two."""
MOST_PENDING = 64
"""Copies asked for and not finished; who asks for more waits, so that progress told between requests is real."""


class _Lane:
    """Stream and page-locked buffers of one thread."""

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        self.cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.cuda else None  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=self.cuda) for _ in range(2)]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def send(self, part: Tensor, into: Tensor) -> None:
        """Copy `part`, which fits a buffer, to `into`; returns when `part` is no longer needed."""
        turn, self._turn = self._turn, 1 - self._turn
        sent = self._sent[turn]
        if sent is not None:
            sent.synchronize()
        staged = self._buffers[turn][: part.nbytes].view(part.dtype).view(part.shape)
        staged.copy_(part)
        into.copy_(staged, non_blocking=True)
        if self.cuda:
            self._sent[turn] = event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self.stream)


class Uploader:
    """Copies that run while the caller goes on; `settle` waits for all of them."""

    def __init__(
        self,
        device: torch.device,
        threads: int = THREADS,
        piece_bytes: int = PIECE_BYTES,
        release: Callable[[Tensor], None] = lambda tensor: None,
    ) -> None:
        """`release` is called with what was read and is no longer needed, in the thread that read it."""
        self._device, self._release = device, release
        self._index = None
        if device.type == "cuda":  # threads begin on GPU 0, and `torch.device("cuda")` has no index
            self._index = torch.cuda.current_device() if device.index is None else device.index
        self._piece_bytes = piece_bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="upload")
        self._own = threading.local()
        self._pending: deque[Future[None]] = deque()

    def fill(self, into: Tensor, read: Callable[[], Tensor]) -> None:
        """Begin to copy what `read` returns, a tensor on the CPU, into `into`; dtypes may differ. The copy comes after
        all that the caller's stream was given before. May raise the error of an earlier copy."""
        self._begin(lambda lane: self._send(lane, read(), into))

    def fill_computed(
        self, into: Tensor, read: Callable[[], tuple[Tensor, ...]], compute: Callable[..., Tensor]
    ) -> None:
        """Fill `into`, as `fill` does, with the result of `compute`, on the device, for the tensors that `read`
        returns. These, and the memory of `compute`, take device memory until that is done."""

        def work(lane: _Lane) -> None:
            given = []
            for tensor in read():
                given.append(torch.empty(tensor.shape, dtype=tensor.dtype, device=into.device))
                self._send(lane, tensor, given[-1])
            into.copy_(compute(*given))

        self._begin(work)

    def _begin(self, work: Callable[[_Lane], None]) -> None:
        if len(self._pending) == MOST_PENDING:
            self._pending.popleft().result()
        before = None
        if self._device.type == "cuda":
            before = torch.cuda.current_stream(self._device).record_event()
        self._pending.append(self._pool.submit(self._do, work, before))

    @torch.inference_mode()
    def _do(self, work: Callable[[_Lane], None], before: torch.cuda.Event | None) -> None:
        if not hasattr(self._own, "lane"):
            if self._index is not None:
                torch.cuda.set_device(self._index)
            self._own.lane = _Lane(self._device, self._piece_bytes)
        lane: _Lane = self._own.lane
        if lane.stream is not None and before is not None:
            lane.stream.wait_event(before)
        with torch.cuda.stream(lane.stream) if lane.stream is not None else nullcontext():
            work(lane)

    def _send(self, lane: _Lane, source: Tensor, into: Tensor) -> None:
        for part, place in _pieces(source, into, self._piece_bytes):
            lane.send(part, place)
        self._release(source)

    def settle(self) -> None:
        """Wait until everything asked for is in place; raises the first error of a copy."""
        while self._pending:
            self._pending.popleft().result()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """End the threads; what has not begun is dropped."""
        self._pool.shutdown(cancel_futures=True)


def _pieces(source: Tensor, into: Tensor, piece_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of `source` that fit a buffer, and where they go."""
    if source.nbytes <= piece_bytes:
        if source.numel():
            yield source, into
        return
    if source.shape[0] == 1:
        yield from _pieces(source[0], into[0], piece_bytes)
        return
    rows = max(1, source.shape[0] * piece_bytes // source.nbytes)
    for part, place in zip(torch.split(source, rows), torch.split(into, rows), strict=True):
        yield from _pieces(part, place, piece_bytes)
