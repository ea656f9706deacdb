import pytest
import torch

from workers.graphs.guard import CaptureViolation, capture_guard

CPU = torch.device("cpu")


def test_an_allocation_is_refused_and_its_line_named() -> None:
    x, out = torch.ones(4), torch.empty(4)
    with capture_guard(CPU):
        torch.add(x, x, out=out)
        out.view(2, 2).mul_(2)
        with pytest.raises(CaptureViolation, match=r"test_guard\.py:\d+: torch\.add\(x, x\)"):
            torch.add(x, x)
        with pytest.raises(CaptureViolation, match="allocates"):
            torch.empty(3)
        with pytest.raises(CaptureViolation, match="allocates"):
            x[torch.tensor([0, 1])]
    assert out.tolist() == [4.0] * 4
    torch.add(x, x)


def test_views_and_results_in_given_memory_pass() -> None:
    buffer = torch.arange(12.0)
    index = torch.tensor([2, 0])
    picked = torch.empty(2, 4)
    with capture_guard(CPU):
        rows = buffer[:12].view(3, 4)
        torch.index_select(rows, 0, index, out=picked)
        picked[:, 1:].copy_(rows[:2, 1:])
        torch.mm(rows[:2], picked.t()[:, :1], out=buffer[:2].unsqueeze(1))
