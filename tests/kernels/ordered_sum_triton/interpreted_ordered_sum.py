"""The ordered sum in the repaired interpreter. Run with TRITON_INTERPRET=1, see test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

import pytest  # noqa: E402
import torch  # noqa: E402
from ordered_sum_case import parts, tree  # noqa: E402

from kernels.ordered_sum import launch_ordered_sum  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("tokens", "features"), [(1, 48), (5, 200), (3, 2100)])
def test_the_tree_bit_for_bit(tokens: int, features: int, count: int, dtype: torch.dtype) -> None:
    part = parts(count, tokens, features)
    out = torch.full((tokens, features + 3), torch.nan, dtype=dtype)
    for x in (part, part.contiguous()):
        launch_ordered_sum(x, out[:, :features].fill_(torch.nan))
        assert torch.equal(out[:, :features], tree(part).to(dtype))
    assert out[:, features:].isnan().all()
    if count > 2:
        assert not torch.equal(tree(part), part.sum(0))


def test_no_tokens() -> None:
    launch_ordered_sum(torch.zeros(4, 0, 8), torch.zeros(0, 8))
