"""The gather of cached context in the repaired interpreter. Run with TRITON_INTERPRET=1, see
test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

import pytest  # noqa: E402
import torch  # noqa: E402
from gather_case import Gather  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [24, 576])
@pytest.mark.parametrize("counts", [[1], [64, 3], [0, 70, 0, 0, 31, 0]])
def test_every_entry_comes_from_its_row(counts: list[int], features: int, dtype: torch.dtype) -> None:
    case = Gather(counts, 128, features, dtype)
    case.run()
    case.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("latent", "features"), [(512, 576), (32, 40), (200, 216), (6, 14)])
@pytest.mark.parametrize("counts", [[1], [0, 70, 0, 31]])
def test_fp8_entries(counts: list[int], latent: int, features: int, dtype: torch.dtype) -> None:
    case = Gather(counts, 64, features, dtype, latent=latent)
    case.run()
    case.check()
    case.serve()  # the reference
    case.check()


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9) | st.integers(60, 70), min_size=1, max_size=40),
    begin=st.integers(0, 130),
    seed=st.integers(0, 100),
)
def test_any_rows(counts: list[int], begin: int, seed: int) -> None:
    case = Gather(counts, begin, 8, torch.float32, seed=seed)
    case.run()
    case.check()
