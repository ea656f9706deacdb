"""Which kernel norms a latent that is made in pieces."""

import pytest
import torch

from kernels.linear import stream_k_launch
from kernels.matrix import BlockScaled


@pytest.mark.parametrize(("rows", "features", "together"), [(2112, 7168, True), (1536, 4096, False)])
def test_a_norm_adds_up_few_pieces(rows: int, features: int, together: bool) -> None:
    scales = torch.empty(-(-rows // 128), features // 128)
    weight = BlockScaled(torch.empty(rows, features, dtype=torch.float8_e4m3fn), scales)
    assert stream_k_launch.norms_pieces(weight, 132) == together
