"""Few tokens and matrices in FP8 on a GPU, in passes that do not take the small-batch path as a whole: multiplied as
they are stored, eagerly and captured."""

from __future__ import annotations

import pytest
import torch
from captured import capture

from kernels.matrix import BlockScaled
from kernels.runtime.dependent import launches_dependently
from workers.memory.scratch import Scratch
from workers.models.general import DecodeOps, GeneralOps
from workers.parallel.group import Group
from workers.weights.weight import Weight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize(("rows", "features"), [(1024, 4096), (32768, 1024), (4096, 8192), (512, 4096)])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
def test_products(tokens: int, rows: int, features: int) -> None:
    """There is no memory in which a matrix could be dequantized. Scales are powers of two, as DeepSeek V4 has them."""
    if not launches_dependently(DEVICE):
        pytest.skip("the kernels of few tokens are launched dependently")
    random = torch.Generator(DEVICE).manual_seed(tokens)
    data = torch.randn(rows, features, device=DEVICE, generator=random).to(torch.float8_e4m3fn)
    blocks = rows // 128, features // 128
    scales = torch.exp2(torch.randint(-9, 3, blocks, device=DEVICE, generator=random).float())
    weight = BlockScaled(data, scales)
    x_TE = torch.randn(tokens, features, device=DEVICE, generator=random).bfloat16()
    scratch = Scratch(DEVICE, torch.empty(1 << 19, dtype=torch.uint8, device=DEVICE))
    wide_FE = data.double() * scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    want = x_TE.double() @ wide_FE.T
    for dtype in (torch.bfloat16, torch.float32):
        out_TF = torch.full((tokens, rows), torch.nan, dtype=dtype, device=DEVICE)
        capture(lambda out_TF=out_TF: GeneralOps(Group()).linear(x_TE, Weight(weight), out_TF, scratch)).replay()
        bound = 2**-8 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(out_TF.double(), want, rtol=bound, atol=bound * float(want.abs().max()))


@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
def test_products_behind_a_latent(tokens: int) -> None:
    """Those of a query's latent, whose norm is pending where there is one token."""
    if not launches_dependently(DEVICE):
        pytest.skip("the kernels of few tokens are launched dependently")
    random = torch.Generator(DEVICE).manual_seed(tokens)

    def matrix(rows: int, features: int) -> Weight:
        data = torch.randn(rows, features, device=DEVICE, generator=random).to(torch.float8_e4m3fn)
        scales = torch.rand(rows // 128, features // 128, device=DEVICE, generator=random) + 0.5
        return Weight(BlockScaled(data, scales / features))

    def wide(weight: Weight) -> torch.Tensor:
        return weight.matrix.float().double()

    down, asked = matrix(1536, 4096), [matrix(32768, 1024), matrix(8192, 1024)]
    norm_A = torch.randn(1024, device=DEVICE, generator=random).bfloat16()
    x_TE = torch.randn(tokens, 4096, device=DEVICE, generator=random).bfloat16()
    latent_TF = torch.full((tokens, 1536), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    outs = [torch.full((tokens, each.shape[0]), torch.nan, dtype=torch.bfloat16, device=DEVICE) for each in asked]
    scratch = Scratch(DEVICE, torch.empty(1 << 19, dtype=torch.uint8, device=DEVICE))
    given = x_TE, down, norm_A, 1e-6, latent_TF, list(zip(asked, outs, strict=True))
    capture(lambda: DecodeOps(Group()).through_latent(*given, scratch)).replay()
    made_TF = x_TE.double() @ wide(down).T
    torch.testing.assert_close(latent_TF[:, 1024:].double(), made_TF[:, 1024:], rtol=2**-8, atol=2**-8)
    normed_TA = torch.nn.functional.rms_norm(made_TF[:, :1024], (1024,), norm_A.double(), 1e-6)
    for weight, out_TN in zip(asked, outs, strict=True):
        want = normed_TA @ wide(weight).T
        assert float((out_TN.double() - want).norm() / want.norm()) < 2**-7
