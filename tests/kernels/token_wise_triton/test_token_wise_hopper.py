"""Compilation of the token-wise kernels for Hopper: no spills, wide loads, few variants."""

import re
from functools import partial

import pytest
from token_wise_case import Gate, Norm, OutputGate, RopeCache, Sink, Streams

from kernels.residual_streams import FEWEST_LONG, FEWEST_TILED
from tests.support.hopper import SHARED_MEMORY_LIMIT, compile_only, machine_code, resources

pytestmark = pytest.mark.gate

CASES = {
    "norm 192": Norm(2, features=192),
    "norm 2048": Norm(2, features=2048),
    "norm 7168": Norm(2, features=7168),
    "norm 2048 of 4": Norm(2, features=2048, parts=4),
    "norm 2560 of 6": Norm(2, features=2560, parts=6),
    "norm 1536 alone": Norm(2, features=1536, add=False),
    "gate 2816": Gate(2, features=2816),
    "gate 18432": Gate(2, features=18432),
    "clamped gate 2048": Gate(2, features=2048, limit=10.0),
    "output gate of 32 heads": OutputGate(2, heads=32, features=64, before=96),
    "gate of a norm 2048": OutputGate(2, heads=1, features=2048, before=0),
    "gate of a norm 7168": OutputGate(2, heads=1, features=7168, before=0),
    "rope demo": RopeCache(2, heads=8, latent=64, rope=16),
    "rope V2-Lite": RopeCache(2, heads=16, latent=512, rope=64),
    "rope V3": RopeCache(2, heads=128, latent=512, rope=64),
    "rope demo, FP8 entries": RopeCache(2, heads=8, latent=64, rope=16, fp8=True),
    "rope V3, FP8 entries": RopeCache(2, heads=128, latent=512, rope=64, fp8=True),
}

PLAIN = {
    "sinks of Hy4": Sink(2, heads=64, features=256),
    "sinks of Hy4 on 8 ranks": Sink(2, heads=8, features=256),
}


STREAMS = {
    "streams of Hy4": partial(Streams, features=6144),
    "streams at the end of Hy4": partial(Streams, features=6144, gates=1),
    "streams of V4": partial(Streams, features=4096, gates=3),
    "streams of V4 Pro": partial(Streams, features=7168, gates=3),
    "streams at the end of V4": partial(Streams, features=4096, gates=1, mixed=True),
    "streams at the end of DSpark": partial(Streams, features=4096, gates=1, mixed=True, keeps=True),
    "streams of a shared expert of Hy4": partial(Streams, features=6144, gates=0),
}


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_compiles_without_spills_and_loads_wide(name: str, dependent: bool) -> None:
    with compile_only() as compiled:
        CASES[name].run(dependent)
    found = resources(compiled[0])
    found.check(registers=128)
    assert "demo" in name or "192" in name or "LDG.E.128" in machine_code(compiled[0])
    assert found.waits == dependent


@pytest.mark.parametrize("name", PLAIN)
def test_kernels_that_are_launched_plainly(name: str) -> None:
    with compile_only() as compiled:
        PLAIN[name].run()
    for kernel in compiled:
        found = resources(kernel)
        found.check(registers=160)
        assert not found.waits
    assert "LDG.E.128" in machine_code(compiled[0]) or "LDG.E.64" in machine_code(compiled[0])


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("tokens", [2, 17])
@pytest.mark.parametrize("name", STREAMS)
def test_streams(name: str, tokens: int, dependent: bool) -> None:
    """Launched dependently they ask for the weights of few tokens' gates before they wait, and read what others have
    written behind that, and not from L1."""
    case = STREAMS[name](tokens, invariant=True)
    with compile_only() as compiled:
        case.run(dependent)
    for kernel in compiled:
        found = resources(kernel)
        found.check(registers=160)
        assert found.waits == dependent
        ptx = kernel.asm["ptx"]
        before, _, behind = ptx.partition("griddepcontrol.wait") if dependent else ("", "", ptx)
        early = dependent and ("read_streams" in kernel.name or (tokens <= 16 and case.gates > 0))
        assert ("ld.global" in before) == early
        assert "ld.global.cg" not in before
        assert "ld.global.cg" in behind
    assert re.search(r"LDG\.E\.(128|64)", machine_code(compiled[0]))


@pytest.mark.parametrize(
    ("tokens", "dependent"), [(FEWEST_TILED, False), (FEWEST_TILED, True), (FEWEST_LONG, False), (FEWEST_LONG, True)]
)
@pytest.mark.parametrize("name", [name for name, case in STREAMS.items() if case(1).gates])
def test_streams_in_tiles(name: str, tokens: int, dependent: bool) -> None:
    """Products are those of tensor cores, and two programs fit on a multiprocessor. Those of few tokens ask for the
    weights of gates before they wait; those of many wait for nothing and ask for lines of the L2 cache."""
    with compile_only() as compiled:
        STREAMS[name](tokens).run(dependent)
    add, read = compiled
    few = tokens < FEWEST_LONG
    assert add.name == "add_to_many_streams_kernel"
    assert read.name == ("read_streams_kernel" if few else "read_many_streams_kernel")
    for kernel in compiled:
        found = resources(kernel)
        found.check(registers=128)
        assert found.waits == (dependent and few)
        assert found.shared <= SHARED_MEMORY_LIMIT // 2
        ptx = kernel.asm["ptx"]
        before, _, behind = ptx.partition("griddepcontrol.wait") if found.waits else ("", "", ptx)
        assert ("ld.global" in before) == found.waits
        assert "ld.global.cg" not in before
        assert "ld.global.cg" in behind
        assert "LDG.E.128" in machine_code(kernel)
    assert "HGMMA" in machine_code(add)
    assert ("prefetch.global.L2" in add.asm["ptx"]) != few


def test_the_number_of_tokens_compiles_nothing_new() -> None:
    with compile_only() as compiled:
        for tokens in (1, 2, 16, 17, 100):
            for case in (Norm(tokens), Gate(tokens), RopeCache(tokens)):
                case.run()
    assert len({kernel.hash for kernel in compiled}) == 3


def test_the_number_of_tokens_compiles_streams_thrice() -> None:
    """Those of few tokens, those of more, and those of many; the latter two differ in what is read early alone."""
    with compile_only() as compiled:
        for tokens in (1, 2, FEWEST_TILED, 16, 100, 128, FEWEST_LONG, 528):
            Streams(tokens, features=512, gates=3).run()
    assert len({kernel.hash for kernel in compiled}) == 6
