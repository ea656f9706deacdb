"""The token-wise kernels on a GPU: eager, captured, and replayed on other values."""

from __future__ import annotations

import pytest
import torch
from captured import capture, check_replays
from token_wise_case import Gate, Norm, OutputGate, RopeCache, Sink, Streams, check_invariant, check_tokens_alone

from kernels.latent_entry import rope_cache
from kernels.residual_streams import FEWEST_LONG
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.silu_mul import silu_mul

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MAKERS = {
    "norm": lambda tokens, dtype, seed: Norm(tokens, dtype, "cuda", seed, features=2048),
    "norm of V3": lambda tokens, dtype, seed: Norm(tokens, dtype, "cuda", seed, features=7168),
    "norm of parts": lambda tokens, dtype, seed: Norm(tokens, dtype, "cuda", seed, features=2048, parts=4),
    "norm of many parts": lambda tokens, dtype, seed: Norm(tokens, dtype, "cuda", seed, features=2560, parts=8),
    "norm alone": lambda tokens, dtype, seed: Norm(tokens, dtype, "cuda", seed, features=1536, add=False),
    "gate": lambda tokens, dtype, seed: Gate(tokens, dtype, "cuda", seed, features=1408),
    "output gate": lambda tokens, dtype, seed: OutputGate(
        tokens, dtype, "cuda", seed, heads=32, features=64, before=96
    ),
    "gate of a norm": lambda tokens, dtype, seed: OutputGate(
        tokens, dtype, "cuda", seed, heads=1, features=7168, before=0
    ),
    "sinks": lambda tokens, dtype, seed: Sink(tokens, dtype, "cuda", seed, heads=64, features=256),
    "streams": lambda tokens, dtype, seed: Streams(tokens, dtype, "cuda", seed, features=6144),
    "streams at an end": lambda tokens, dtype, seed: Streams(tokens, dtype, "cuda", seed, features=2048, gates=1),
    "streams of V4": lambda tokens, dtype, seed: Streams(tokens, dtype, "cuda", seed, features=4096, gates=3),
    "streams at an end, kept": lambda tokens, dtype, seed: Streams(
        tokens, dtype, "cuda", seed, features=4096, gates=1, mixed=True, keeps=True
    ),
    "streams alone": lambda tokens, dtype, seed: Streams(tokens, dtype, "cuda", seed, features=2048, gates=0),
    "rope of the demo": lambda tokens, dtype, seed: RopeCache(tokens, dtype, "cuda", seed, heads=8, latent=64),
    "rope of V2-Lite": lambda tokens, dtype, seed: RopeCache(
        tokens, dtype, "cuda", seed, heads=16, latent=512, rope=64
    ),
    "rope of V3": lambda tokens, dtype, seed: RopeCache(tokens, dtype, "cuda", seed, heads=128, latent=512, rope=64),
    "rope of V3, FP8 entries": lambda tokens, dtype, seed: RopeCache(
        tokens, dtype, "cuda", seed, heads=128, latent=512, rope=64, fp8=True
    ),
    "rope of 200 features, FP8 entries": lambda tokens, dtype, seed: RopeCache(
        tokens, dtype, "cuda", seed, heads=4, latent=200, rope=12, fp8=True
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 3, 64, 333])
@pytest.mark.parametrize("name", MAKERS)
def test_eager(name: str, tokens: int, dtype: torch.dtype) -> None:
    case = MAKERS[name](tokens, dtype, 0)
    case.run()
    case.check()


@pytest.mark.parametrize("name", [name for name in MAKERS if name.startswith("streams")])
def test_streams_of_many_tokens(name: str) -> None:
    case = MAKERS[name](FEWEST_LONG + 87, torch.bfloat16, 0)
    case.run()
    case.check()


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize("name", MAKERS)
def test_replayed_on_other_values(name: str, tokens: int, dependent: bool) -> None:
    if dependent and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    case, other = MAKERS[name](tokens, torch.bfloat16, 0), MAKERS[name](tokens, torch.bfloat16, 50)
    graph = capture(lambda: case.run(dependent))
    case.inputs = other.inputs
    check_replays(graph, case.refill, [case.tensors[output] for output in case.outputs])
    case.check()


@pytest.mark.parametrize("tokens", [8, 333, 600])
@pytest.mark.parametrize(("features", "gates"), [(6144, 2), (4096, 3)])
def test_a_tokens_streams_depend_on_no_other_token(features: int, gates: int, tokens: int) -> None:
    check_tokens_alone(Streams(tokens, device="cuda", features=features, gates=gates))
    check_invariant(Streams(tokens, device="cuda", features=features, gates=gates, invariant=True))


def test_public_functions_dispatch_to_the_kernels() -> None:
    norm, gate, rope = Norm(3, device="cuda", add=False), Gate(3, device="cuda"), RopeCache(3, device="cuda")
    rms_norm(norm.tensors["x"], norm.tensors["weight"], norm.tensors["out"], eps=norm.eps)
    silu_mul(gate.tensors["gate_up"], gate.tensors["out"])
    rope_cache(*list(rope.tensors.values())[:7], eps=rope.eps)
    norm.check()
    gate.check()
    rope.check()
    residual = Norm(3, device="cuda")
    add_rms_norm(*residual.tensors.values(), eps=residual.eps)
    residual.check()


def test_addresses_past_two_to_the_31_elements() -> None:
    """Rows so far apart that a 32-bit offset would wrap."""
    wide = torch.empty(2**20 + 4, 2048 + 64, dtype=torch.bfloat16, device="cuda")
    x = wide[:, :2048]
    x[-1] = torch.randn(2048, device="cuda")
    want = torch.nn.functional.rms_norm(x[-1].float(), (2048,), eps=1e-6)
    rms_norm(x, torch.ones(2048, dtype=torch.bfloat16, device="cuda"), x, eps=1e-6)
    torch.testing.assert_close(x[-1].float(), want, atol=1e-6, rtol=2**-8)
