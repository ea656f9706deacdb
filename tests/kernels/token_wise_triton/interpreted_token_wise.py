"""The token-wise kernels in the repaired interpreter. Run with TRITON_INTERPRET=1, see
test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from token_wise_case import (  # noqa: E402
    Case,
    Gate,
    Norm,
    OutputGate,
    RopeCache,
    Sink,
    Streams,
    check_invariant,
    check_tokens_alone,
)

from kernels.residual_streams import memory  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(case: Case) -> None:
    case.run()
    case.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("tokens", "features"), [(1, 8), (5, 24), (3, 192), (2, 1536)])
def test_norm(tokens: int, features: int, add: bool, dtype: torch.dtype) -> None:
    check(Norm(tokens, dtype, features=features, add=add))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "features", "parts"), [(1, 8, 1), (5, 24, 8), (3, 192, 4), (17, 2048, 4)])
def test_norm_of_parts(tokens: int, features: int, parts: int, dtype: torch.dtype) -> None:
    check(Norm(tokens, dtype, features=features, parts=parts))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "features"), [(1, 8), (5, 40), (2, 1408)])
def test_gate(tokens: int, features: int, dtype: torch.dtype) -> None:
    check(Gate(tokens, dtype, features=features))
    check(Gate(tokens, dtype, features=features, limit=2.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "features", "before", "alone"),
    [(1, 5, 0, True), (3, 12, 24, False), (20, 64, 96, False), (1, 1100, 0, False)],
)
def test_output_gate(heads: int, features: int, before: int, alone: bool, dtype: torch.dtype) -> None:
    check(OutputGate(3, dtype, heads=heads, features=features, before=before, alone=alone))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "features", "before"), [(1, 5, 0), (3, 12, 24), (20, 64, 0), (1, 1100, 4)])
def test_attention_sink(heads: int, features: int, before: int, dtype: torch.dtype) -> None:
    check(Sink(3, dtype, heads=heads, features=features, before=before))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("features", "streams", "gates"),
    [(8, 4, 2), (600, 4, 1), (1200, 2, 2), (40, 3, 0), (40, 3, 2), (600, 4, 3), (40, 2, 3)],
)
def test_residual_streams(features: int, streams: int, gates: int, dtype: torch.dtype) -> None:
    check(Streams(3, dtype, features=features, streams=streams, gates=gates))
    if gates < 2:  # behind the last part of a model
        check(Streams(3, dtype, features=features, streams=streams, gates=gates, mixed=True, keeps=True))


@pytest.fixture(params=["short", "long"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens of a call in tiles that has short or long parts of sums."""
    if request.param == "long":
        monkeypatch.setattr(memory, "FEWEST_LONG", 70)
    return 70


@pytest.mark.parametrize(
    ("features", "streams", "gates"), [(8, 4, 2), (300, 4, 1), (600, 2, 2), (40, 3, 2), (300, 4, 3), (40, 2, 3)]
)
def test_residual_streams_in_tiles(features: int, streams: int, gates: int, tiles: int) -> None:
    check(Streams(tiles, features=features, streams=streams, gates=gates))
    if gates < 2:
        check(Streams(tiles, features=features, streams=streams, gates=gates, mixed=True, keeps=True))


@pytest.mark.parametrize("gates", [2, 3])
def test_a_tokens_streams_depend_on_no_other_token(gates: int, tiles: int) -> None:
    check_tokens_alone(Streams(tiles, features=300, gates=gates))
    check_tokens_alone(Streams(7, features=300, gates=gates))


def test_invariant_streams_are_those_of_one_token() -> None:
    check_invariant(Streams(20, features=600, invariant=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "latent", "rope"), [(1, 6, 8), (3, 32, 16), (16, 64, 16), (20, 24, 12)])
def test_rope_cache(heads: int, latent: int, rope: int, dtype: torch.dtype) -> None:
    check(RopeCache(9, dtype, heads=heads, latent=latent, rope=rope))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "latent", "rope"), [(1, 6, 8), (3, 32, 16), (2, 128, 16), (1, 200, 12), (1, 512, 64)]
)
def test_rope_cache_of_fp8_entries(heads: int, latent: int, rope: int, dtype: torch.dtype) -> None:
    check(RopeCache(9, dtype, heads=heads, latent=latent, rope=rope, fp8=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_entries_of_zeros_of_tiny_numbers_and_of_what_is_not_finite(dtype: torch.dtype) -> None:
    """The norm's weights make the numbers; a group whose largest is too small has scale 1."""
    case = RopeCache(9, dtype, heads=1, latent=300, rope=8, fp8=True)
    case.tensors["weight"][:128] = 0
    case.tensors["weight"][128:256] *= 2.0**-20 if dtype == torch.float16 else 2.0**-104
    case.inputs["weight"].copy_(case.tensors["weight"])
    check(case)
    for number in (torch.nan, torch.inf):
        case.refill()
        case.tensors["weight"][140] = number
        case.run()
        slot, scales = case.tensors["slot"], case.tensors["cache"].flatten(0, 1)[:, 300:312].contiguous()
        written = slot[(slot >= 64) & (slot < len(scales))]
        assert scales.view(torch.float32)[written].isnan().any(0).tolist() == [False, True, False]


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(1, 70),
    heads=st.integers(1, 40),
    latent=st.integers(1, 20).map(lambda n: 2 * n),
    rope=st.integers(1, 12).map(lambda n: 2 * n),
    seed=st.integers(0, 100),
)
def test_rope_cache_at_any_size(tokens: int, heads: int, latent: int, rope: int, seed: int) -> None:
    check(RopeCache(min(tokens, 3 + 200 // heads), torch.float32, seed=seed, heads=heads, latent=latent, rope=rope))


def test_norm_in_place() -> None:
    case = Norm(4, features=40)
    case.tensors["out"] = case.tensors["x"]
    case.run()
    case.check()
    assert not case.tensors["x"].isnan().any()


def test_no_tokens() -> None:
    for case in (Norm(0), Gate(0), RopeCache(0)):
        case.run()
        assert all(torch.equal(case.tensors[name], case.inputs[name]) for name in case.outputs)


def test_norm_of_zeros_is_zero() -> None:
    case = Norm(2, add=False)
    case.tensors["x"].zero_()
    case.run()
    assert torch.equal(case.tensors["out"], torch.zeros(2, 64, dtype=torch.bfloat16))
