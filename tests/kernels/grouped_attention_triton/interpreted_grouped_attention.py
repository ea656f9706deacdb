"""Grouped-query attention, reference and Triton, against torch's own. Run with TRITON_INTERPRET=1, see
test_grouped_attention.py."""

from tests.support import interpreter

interpreter.repair()

from collections.abc import Callable  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import kernels.grouped_attention as family  # noqa: E402
from kernels.page import PAGE_TOKENS, pages_for  # noqa: E402

ARBITRARY_PAGE = 2147480000
PATHS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "reference": (family.rope_store, family.attend),
    "triton": (family.launch_rope_store, family.launch_attend),
}


def rotated(x: torch.Tensor, position_T: torch.Tensor, theta: float = 100.0) -> torch.Tensor:
    """[T, H, D], pairs (2i, 2i + 1)."""
    features = x.shape[-1]
    angle_TI = position_T[:, None] * theta ** (-torch.arange(0, features, 2) / features)
    cos, sin = angle_TI.cos()[:, None], angle_TI.sin()[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("heads", "key_heads", "features"), [(4, 2, 16), (40, 2, 8), (3, 3, 24)])
@pytest.mark.parametrize("width", [3, 0])
def test_against_torch(path: str, heads: int, key_heads: int, features: int, width: int) -> None:
    """Rows of one width, one of them padding, or ragged prefill rows (width 0); entry 0 does not exist."""
    torch.manual_seed(heads + width)
    store, attend = PATHS[path]
    counts = [width] * 4 if width else [1, 17, 20, 3]
    starts = [1, 62, 63, 66] if width else [1, 62, 1, 63]
    tokens, total = sum(counts), (heads + 2 * key_heads) * features
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    order = torch.randperm(20).add(1).tolist()
    pages = [[order.pop() for _ in range(pages_for(length))] for length in lengths]
    page_RP = torch.full((4, 4), ARBITRARY_PAGE, dtype=torch.int32)
    for row, own in enumerate(pages):
        page_RP[row, : len(own)] = torch.tensor(own)
    cache_PKC = torch.full((21, PAGE_TOKENS, 2 * key_heads * features), torch.nan)
    histories = [torch.randn(start, 2 * key_heads, features) for start in starts]
    flat = cache_PKC.view(-1, cache_PKC.shape[-1])

    def entries(row: int, begin: int, end: int) -> torch.Tensor:
        places = [pages[row][p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for p in range(begin, end)]
        return torch.tensor(places, dtype=torch.int64)

    for row, history in enumerate(histories):
        flat[entries(row, 1, starts[row])] = history[1:].flatten(1)
    position_T = torch.cat([torch.arange(start, end) for start, end in zip(starts, lengths, strict=True)])
    slot_T = torch.cat([entries(row, starts[row], lengths[row]) for row in range(4)])
    qkv_THD = torch.randn(tokens, heads + 2 * key_heads, features)
    ones = torch.zeros(tokens, 1, features)
    ones[..., 0::2] = 1
    rotation_TO = rotated(ones, position_T)[:, 0]  # (1, 0) turned is (cos, sin)
    before, qkv_TF = cache_PKC.clone(), qkv_THD.reshape(tokens, total).clone()
    store(qkv_TF, rotation_TO, slot_T, cache_PKC, heads)
    roped_THD = torch.cat([rotated(qkv_THD[:, : heads + key_heads], position_T), qkv_THD[:, heads + key_heads :]], 1)
    torch.testing.assert_close(flat[slot_T], roped_THD[:, heads:].flatten(1))
    before.view_as(flat)[slot_T] = flat[slot_T]
    assert torch.equal(before.nan_to_num(7.0), cache_PKC.nan_to_num(7.0)), "other entries have changed"

    q_THD, out_THD = qkv_TF.view(tokens, -1, features)[:, :heads], torch.full((tokens, heads, features), torch.nan)
    if width:
        length_R = torch.tensor(lengths, dtype=torch.int32)
        length_R[1] = 0
        attend(q_THD, cache_PKC, page_RP, out_THD, first=1, scale=0.3, length_R=length_R, width=width)
    else:
        tile_4N = torch.tensor(list(family.tiles(starts, counts, 0)), dtype=torch.int32).t().contiguous()
        attend(q_THD, cache_PKC, page_RP, out_THD, first=1, scale=0.3, tile_4N=tile_4N)
    begin = 0
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        own, begin = slice(begin, begin + count), begin + count
        if width and row == 1:
            assert bool((out_THD[own] == 0).all())
            continue
        key, value = torch.cat([histories[row][1:], roped_THD[own, heads:]]).split(key_heads, 1)
        mask = torch.arange(1, start + count) <= torch.arange(start, start + count)[:, None]
        want = F.scaled_dot_product_attention(
            roped_THD[own, :heads].transpose(0, 1),
            key.transpose(0, 1).repeat_interleave(heads // key_heads, 0),
            value.transpose(0, 1).repeat_interleave(heads // key_heads, 0),
            mask,
            scale=0.3,
        )
        torch.testing.assert_close(out_THD[own], want.transpose(0, 1), atol=1e-5, rtol=1e-5)
