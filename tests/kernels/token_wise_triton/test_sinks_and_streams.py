"""Attention sinks and residual streams in plain torch, against the formulas in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import token_wise_case
import torch
from token_wise_case import TOLERANCE, Sink, Streams

from kernels.attention_sink import attention_sink, launch_attention_sink
from kernels.residual_streams import StreamGates, StreamMemory, add_to_streams, launch_add_to_streams


@pytest.fixture(autouse=True)
def _references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases run what a CPU runs."""

    def add(x, residual, memory, gates, weight, out, eps, **options):  # type: ignore[no-untyped-def]
        add_to_streams(x, residual, memory, gates, weight, out, eps=eps)

    monkeypatch.setattr(token_wise_case, "launch_attention_sink", attention_sink)
    monkeypatch.setattr(token_wise_case, "launch_add_to_streams", add)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_sink_is_a_key_whose_value_is_0(dtype: torch.dtype) -> None:
    case = Sink(5, dtype, heads=3, features=10, before=2)
    case.run()
    case.check()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("streams", "gates"), [(4, 2), (4, 1), (2, 2), (3, 0), (4, 3)])
def test_streams(streams: int, gates: int, dtype: torch.dtype) -> None:
    for mixed in {gates == 3, gates != 2}:
        case = Streams(5, dtype, features=40, streams=streams, gates=gates, mixed=mixed, keeps=mixed)
        case.run()
        case.check()


def test_launchers_refuse_what_their_kernels_cannot_read() -> None:
    x, lse, sink = torch.empty(2, 3, 8), torch.empty(2, 3), torch.empty(3)
    for wrong in ((x.transpose(1, 2), lse, sink), (x, lse[:, :2], sink), (x, lse.t().contiguous().t(), sink)):
        with pytest.raises(ValueError, match="log-sum-exps are contiguous"):
            launch_attention_sink(*wrong)
    for other in (sink.double(), sink[:2]):
        with pytest.raises(ValueError, match="sinks are 3 numbers in fp32"):
            launch_attention_sink(x, lse, other)
    streams = torch.empty(2, 4, 16)
    memory = StreamMemory.empty(2, 4, 16, torch.empty)
    x, weight = torch.empty(2, 16), torch.empty(16)
    with pytest.raises(ValueError, match="residual streams are contiguous"):
        launch_add_to_streams(x, streams.transpose(1, 2), memory, None, weight, x, 1e-6)
    with pytest.raises(ValueError, match="do not fit 2 tokens of 4 streams"):
        launch_add_to_streams(x, streams, StreamMemory.empty(3, 4, 16, torch.empty), None, weight, x, 1e-6)
    gates = StreamGates(torch.empty(4, 64), torch.empty(4), torch.empty(1), 2.0, 1e-2, 1e-4)
    with pytest.raises(ValueError, match="sums of 2 tokens do not fit"):
        launch_add_to_streams(x, streams, replace(memory, read_TE=torch.empty(3, 16)), gates, weight, x, 1e-6)
