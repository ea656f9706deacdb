"""Prefill attention and the merge on a GPU."""

from __future__ import annotations

import pytest
import torch
from captured import capture, check_replays, same_bits
from prefill_case import REAL, SMALL, Case

from kernels.merge_attention import merge_attention, merge_attention_reference
from kernels.mla_prefill import launch
from kernels.mla_prefill.launch import HOPPER, PrefillTiling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GLM = {"nope": 192, "rope": 64, "value": 256}
DEMO = {"nope": 32, "rope": 16, "value": 32}
both_keys = pytest.mark.parametrize("features", [REAL, SMALL], ids=["128", "64"])
RAGGED = [(1, 1), (63, 63), (64, 64), (65, 65), (200, 1000), (1, 4097), (129, 3), (5, 0), (500, 500)]


@pytest.fixture(
    params=[
        pytest.param(None, id="triton"),
        # A deadlock on the device ends the process.
        pytest.param(HOPPER, id="hopper", marks=pytest.mark.timeout(60, method="thread")),
    ]
)
def tiles(request: pytest.FixtureRequest) -> PrefillTiling | None:
    """Tilings for features of `REAL` and `SMALL`: the launcher's own choice, or Hopper's kernel."""
    if request.param is HOPPER and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this kernel is Hopper's")
    return request.param


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [REAL, SMALL, DEMO, GLM, {"nope": 24, "rope": 12, "value": 20}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ragged_rows(dtype: torch.dtype, sizes: dict[str, int], causal: bool) -> None:
    if sizes is GLM and dtype == torch.float32:
        pytest.skip("no model of these sizes runs in fp32 on a GPU")
    for heads, rows in ((3, RAGGED), (16, [(40, 700), (64, 64)])):
        case = Case(rows, heads=heads, dtype=dtype, device="cuda", **sizes)
        case.run(causal)
        case.check(causal)


@both_keys
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_either_path(
    tiles: PrefillTiling | None, features: dict[str, int], out_dtype: torch.dtype, causal: bool
) -> None:
    lengths = (0, 1, 63, 64, 65, 127, 128, 129, 300)
    for rows in (RAGGED, [(queries, keys) for queries in lengths for keys in lengths]):
        case = Case(rows, heads=3, dtype=torch.bfloat16, out_dtype=out_dtype, device="cuda", **features)
        case.run(causal, tiles)
        case.check(causal)


@both_keys
@pytest.mark.parametrize("parts", [1, 2, 5, 8])
def test_parts_of_the_keys(tiles: PrefillTiling | None, features: dict[str, int], parts: int) -> None:
    case = Case(RAGGED, heads=3, dtype=torch.bfloat16, out_dtype=torch.float32, device="cuda", **features)
    case.cut(parts, 128)
    # Of the portable kernel a tiling with tiles of as many keys, which it does not choose where Hopper's runs.
    case.run(False, tiles or PrefillTiling(128, 128, 8, 2))
    case.check(False)


@both_keys
def test_long_rows(tiles: PrefillTiling | None, features: dict[str, int]) -> None:
    case = Case([(4097, 4097), (300, 9000)], heads=2, dtype=torch.bfloat16, device="cuda", **features)
    case.run(True, tiles)
    case.check(True)


@both_keys
@pytest.mark.parametrize("causal", [False, True])
def test_replayed_on_other_rows(tiles: PrefillTiling | None, features: dict[str, int], causal: bool) -> None:
    """The grid is for the longest row there may be; which rows there are is the replay's."""
    first = Case([(300, 300), (100, 100)], heads=4, dtype=torch.bfloat16, device="cuda", **features)
    graph = capture(lambda: first.run(causal, tiles, max_q=512))
    for seed, rows in enumerate(([(1, 200), (399, 200)], [(400, 0), (0, 400)], [(200, 100), (200, 300)])):
        other = Case(rows, heads=4, dtype=torch.bfloat16, device="cuda", seed=seed, **features)

        def refill() -> None:
            for name in ("q", "kv", "latent"):
                getattr(first, name).copy_(getattr(other, name))  # noqa: B023
            for ours, theirs in zip(first.cu, other.cu, strict=True):  # noqa: B023
                ours.copy_(theirs)
            first.out.fill_(7.0)
            first.lse.fill_(7.0)

        check_replays(graph, refill, [first.out, first.lse])
        first.rows, first.cu_q, first.cu_k = other.rows, other.cu_q, other.cu_k
        first.check(causal)


@both_keys
def test_a_row_alone_equals_the_row_in_a_batch(tiles: PrefillTiling | None, features: dict[str, int]) -> None:
    case = Case(RAGGED, heads=4, dtype=torch.bfloat16, device="cuda", **features)
    case.run(True, tiles)
    for row, (queries, keys) in enumerate(RAGGED):
        if not keys and tiles is HOPPER:
            continue  # its keys have at least one token, which may be of no row
        own = slice(case.cu_q[row], case.cu_q[row] + queries)
        seen = slice(case.cu_k[row], case.cu_k[row] + keys)
        kv, latent = case.kv[seen].clone(), case.latent[seen].clone()
        cu = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (queries, keys)]
        out, lse = torch.empty_like(case.out[own]), torch.empty_like(case.lse[own])
        launch.mla_prefill(
            case.q[own].clone(),
            kv[..., : case.nope],
            latent[:, 24:],
            kv[..., case.nope :],
            *cu,
            out,
            lse,
            scale=case.scale,
            causal=True,
            max_q=500,  # the same tiling
            tiles=tiles,
        )
        assert same_bits(out, case.out[own])
        assert same_bits(lse, case.lse[own])


@both_keys
def test_addresses_past_two_to_the_31_elements(tiles: PrefillTiling | None, features: dict[str, int]) -> None:
    """Keys so far apart that a 32-bit offset would wrap."""
    case = Case([(130, 600)], heads=2, dtype=torch.bfloat16, device="cuda", **features)
    case.run(True, tiles)
    want = case.out.clone()
    wide = torch.empty(len(case.kv), 2**22, dtype=torch.bfloat16, device="cuda")
    wide[:, : case.kv[0].numel()] = case.kv.flatten(1)
    case.kv = wide[:, : case.kv[0].numel()].view(case.kv.shape)
    case.run(True, tiles)
    assert torch.equal(case.out[3:-3], want[3:-3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 777])
@pytest.mark.parametrize("cut", [(), (1,), (5,)], ids=str)
def test_merge(tokens: int, dtype: torch.dtype, cut: tuple[int, ...]) -> None:
    shapes = ((tokens, 16), (*cut, tokens, 16))
    parts = [torch.randn(*shape, 128, device="cuda") for shape in shapes]
    logs = [torch.randn(shape, device="cuda") * 20 for shape in shapes]
    for part, log in zip(parts, logs, strict=True):
        part[::3], log[::3] = 0.0, -torch.inf
    want, want_log = torch.empty(tokens, 16, 128, device="cuda"), torch.empty(tokens, 16, device="cuda")
    merge_attention_reference(parts[0], logs[0], parts[1], logs[1], want, want_log)
    out, out_log = torch.full_like(want, torch.nan, dtype=dtype), torch.full_like(want_log, torch.nan)
    graph = capture(lambda: merge_attention(parts[0], logs[0], parts[1], logs[1], out, out_log))
    check_replays(graph, lambda: None, [out, out_log])
    torch.testing.assert_close(out.float(), want, atol=1e-6, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5)
    torch.testing.assert_close(out_log, want_log, atol=1e-5, rtol=1e-6)
    merge_attention(parts[0], logs[0], parts[1], logs[1], parts[0], logs[0])
    torch.testing.assert_close(parts[0], want, atol=1e-6, rtol=1e-5)
