"""The noise of sampling: the generator against published vectors and Triton's own, and the distribution it gives."""

import math
import os
import subprocess
import sys

import pytest
import torch

from kernels.sampling.reference import (
    _philox_on_cpu,
    gumbel_from_words,
    gumbel_noise,
    philox_4x32,
    random_words,
    random_words_at,
)

# (counter, key, result): the known-answer vectors that Random123 publishes for philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    ((0x0, 0x0, 0x0, 0x0), (0x0, 0x0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

TRITON_WORDS = """
import torch, triton, triton.language as tl

@triton.jit
def words(seed, low, high, out, COUNTERS: tl.constexpr):
    quad = tl.arange(0, COUNTERS)
    zero = quad * 0
    w0, w1, w2, w3 = tl.philox(tl.load(seed), quad.to(tl.uint32), (zero + low).to(tl.uint32),
                               (zero + high).to(tl.uint32), zero.to(tl.uint32))
    tl.store(out + 4 * quad, w0.to(tl.int64))
    tl.store(out + 4 * quad + 1, w1.to(tl.int64))
    tl.store(out + 4 * quad + 2, w2.to(tl.int64))
    tl.store(out + 4 * quad + 3, w3.to(tl.int64))

for seed, position in CASES:
    out = torch.zeros(64, dtype=torch.int64)
    words[(1,)](torch.tensor([seed]), position & 0xFFFFFFFF, position >> 32, out, 16)
    print(*out.tolist())
"""


def tensor(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value], dtype=torch.int64) for value in values)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_published_vectors(counter, key, expected):
    assert tuple(int(word) for word in philox_4x32(tensor(*counter), tensor(*key))) == expected


@pytest.mark.long
def test_triton_computes_the_same_words(tmp_path):
    cases = [(0, 0), (7, 5), (-3, 129), (0x7123456789ABCDEF, 2**31 + 3), (-(2**63), 2**32 - 1)]
    script = TRITON_WORDS.replace("CASES", repr(cases))
    path = tmp_path / "words.py"  # the interpreter reads the kernel's source from its file
    path.write_text(script)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    theirs = torch.tensor([[int(word) for word in line.split()] for line in done.stdout.splitlines()])
    seed_N, position_N = (torch.tensor(values) for values in zip(*cases, strict=True))
    assert torch.equal(random_words(seed_N, position_N, 64), theirs)


def test_the_ways_to_compute_words_agree():
    """NumPy does the rounds on a CPU; torch does on other devices."""
    generator = torch.Generator().manual_seed(3)
    counter = tuple(torch.randint(0, 2**32, (500,), generator=generator) for _ in range(4))
    key = tuple(torch.randint(0, 2**32, (500,), generator=generator) for _ in range(2))
    for ours, theirs in zip(_philox_on_cpu(counter, key), philox_4x32(counter, key), strict=True):
        assert torch.equal(ours, theirs)
    for counter, key, expected in KNOWN_ANSWERS:
        assert tuple(int(word) for word in _philox_on_cpu(tensor(*counter), tensor(*key))) == expected
    seed_N, position_N = torch.arange(6) * 10**17 - 5, torch.arange(6) * 10**12
    token = torch.arange(101).expand(6, 101)
    alone = random_words_at(seed_N.unsqueeze(1), position_N.unsqueeze(1), token)
    assert torch.equal(random_words(seed_N, position_N, 101), alone)


def test_every_bit_of_seed_and_position_counts():
    base = random_words(torch.tensor([12345]), torch.tensor([678]), 64)
    for bit in range(64):
        flip = -(1 << 63) if bit == 63 else 1 << bit
        assert not torch.equal(base, random_words(torch.tensor([12345 ^ flip]), torch.tensor([678]), 64))
        if bit < 63:
            assert not torch.equal(base, random_words(torch.tensor([12345]), torch.tensor([678 ^ flip]), 64))


def test_a_row_does_not_depend_on_the_others_nor_on_the_vocabulary():
    seed_N, position_N = torch.arange(9) * 77 - 300, torch.arange(9) ** 5
    for vocab in (1, 3, 4, 5, 130):
        together = gumbel_noise(seed_N, position_N, vocab)
        assert together.shape == (9, vocab)
        for row in range(9):
            alone = gumbel_noise(seed_N[row : row + 1], position_N[row : row + 1], 257)
            assert torch.equal(together[row], alone[0, :vocab])


def test_gumbel_is_the_double_logarithm_and_finite_at_the_ends():
    generator = torch.Generator().manual_seed(0)
    word = torch.randint(0, 2**32, (200_000,), generator=generator)
    ends = torch.tensor([0, 1, 2, 255, 2**8, 2**24 - 1, 2**24, 2**31, 2**32 - 257, 2**32 - 2, 2**32 - 1])
    word = torch.cat((word, ends))
    ours = gumbel_from_words(word)
    assert ours.dtype == torch.float32
    assert ours.isfinite().all()
    assert float(ours.max()) == pytest.approx(33 * math.log(2), abs=1e-5)
    v = (word.double() + 0.5) * 2.0**-32
    exact = -torch.log(-torch.log1p(-v))
    # Float32 rounds v by 3e-8; near v = 1 that moves the result by 3e-8 / ((1 - v) * log(1 / (1 - v))).
    clear = v < 0.99
    torch.testing.assert_close(ours[clear].double(), exact[clear], rtol=0, atol=2e-6)
    torch.testing.assert_close(ours[v < 1 - 1e-6].double(), exact[v < 1 - 1e-6], rtol=0, atol=4e-3)
    assert float(ours.min()) > -2.82


def test_gumbel_distribution():
    draws = gumbel_noise(torch.arange(50), torch.arange(50) * 3 + 1, 4000).double().flatten().sort().values
    count = len(draws)
    distribution = torch.exp(-torch.exp(-draws))
    empirical = torch.arange(count, dtype=torch.float64) / count
    distance = float((distribution - empirical).abs().max())
    assert distance < 1.95 / math.sqrt(count)  # Kolmogorov-Smirnov at 1e-3
    assert float(draws.mean()) == pytest.approx(0.57721566, abs=5 * 1.28255 / math.sqrt(count))


@pytest.mark.parametrize("along", ["position", "seed", "id", "seed and position"])
def test_neighbours_are_independent(along):
    """Serial correlation of Gumbel noise, and of its exceedances (what an argmax sees), at lags 1 to 5."""
    steps = torch.arange(400)
    fixed = torch.full_like(steps, 17)
    seed_N = fixed if along == "position" else steps
    position_N = steps if "position" in along else fixed
    noise = gumbel_noise(seed_N, position_N, 500)
    series = noise if along == "id" else noise.T
    series = series.double()
    for values in (series, (series > 2.0).double()):
        centred = values - values.mean()
        for lag in range(1, 6):
            product = centred[:, :-lag] * centred[:, lag:]
            correlation = float(product.mean() / centred.square().mean())
            assert abs(correlation) < 4 / math.sqrt(product.numel()), (along, lag)


def test_streams_of_different_seeds_and_positions_do_not_overlap():
    seed_N = torch.arange(64).repeat_interleave(64)
    position_N = torch.arange(64).repeat(64)
    words = random_words(seed_N, position_N, 8)
    pairs = (words[:, 0] << 31) ^ words[:, 1]  # 63 bits of each row: a repeat by chance is a 1e-12 event
    assert len(pairs.unique()) == len(pairs)
