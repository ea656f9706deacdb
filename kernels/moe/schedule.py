"""Schedule of one call of the experts: the tiles, and the memory it needs.

All of it follows from the sizes of the call, known when a graph is captured; which expert gets how many tokens only the
device knows. Grids are made for the worst case, and programs without work end at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Final

import torch
from torch import Tensor

from kernels.matrix import GROUP
from kernels.moe.records import FOUR_BITS, PLAIN, Stored

MOST_EXPERTS = 1024
MOST_CHOSEN = 32
FEW = 4096
"""Most choices that are sorted by programs which look at all of them, of at most so many tokens and routed experts:"""
FEW_TOKENS, FEW_EXPERTS = 512, 128
SPAN = 2048
"""Pairs a sorting program looks at at once."""
SEGMENTS = 16
"""Most parts the pairs are sorted in."""
FOUR_BIT_FEATURES: Final = 256
"""Input features come in multiples of so many in Hopper's kernels for few tokens and weights of four bits (INT4 and
MXFP4)."""
FOUR_BIT_PAIRS: Final = (2, 8)
"""Pairs of a tile in that for several tokens: of few tokens, of more."""
THREE_SINGLE: Final = 3
"""Most blocks of 64 rows of a single token's product, on each multiprocessor, for which it has three programs and no
room for a fourth: more than three on one would leave others idle. More blocks have four programs. With three, and
THREE_AHEAD, V4 Flash's token took 36.4 us on an H200, and 47.5 with four, two steps on their way, and more asked of the
L2 cache (`python bench/moe.py --model v4-flash --format mxfp4 --tokens 1`)."""
THREE_AHEAD: Final = 4
"""Steps of weights that are on their way there, where the features are whole multiples of them."""
FEW_FOUR_BIT: Final = 4
"""Tokens up to which tiles of two are the better: of Kimi K2's 216 us on one H200, where those of eight took 227."""
MOST_FOUR_BIT: Final = 7168
"""Input features there, so that the shared memory of a program leaves half of a multiprocessor's to its cache."""
FEWEST_W4A8_MEAN: Final = 64
"""Tokens that an expert with weights in MXFP4 has on average, at least, where activations are in FP8. It lies between
two that were measured on one H200, of DeepSeek V4 Flash: 48 took 1.07 times as long as in bf16, 192 took 0.61."""
MOST_FOUR_BIT_MEAN: Final = 7
"""Tokens that an expert may have on average there: of more, too many have several tiles, each of which reads its
weights. On one H200 an average of 5 of Kimi K2 took 2.6 ms; one of 8 took 3.8, in tiles of 64 pairs 3.5."""
FEWEST_OF_64: Final = 12
"""Tokens that an expert has on average, at least, in Triton's tiles of 64 pairs; fewer have tiles of 16."""
MOST_OF_64: Final = 56
"""Tokens that an expert may have on average in tiles of 64 pairs."""
W8A8_BLOCK: Final = 128
"""Features that share a scale then, of activations and, in either direction, of weights."""


@dataclass(frozen=True)
class ExpertsShape:
    """The sizes of one call."""

    tokens: int
    chosen: int
    """Experts of a token, shared ones included."""
    experts: int
    """Experts that are stored, shared ones included."""
    hidden: int
    """Features of a token (E)."""
    intermediate: int
    """Features of one expert (I)."""
    dtype: torch.dtype = torch.bfloat16
    groups: int = 0
    """Equal groups of the intermediate features that are summed apart, bitwise the same in every call; 0: one sum."""
    shared: int = 0
    """The last so many experts are every token's, and among its `chosen`."""
    hopper: int = 0
    """Multiprocessors of the GPU, if it is a Hopper and its own kernels may read the tokens; otherwise 0."""
    quantize_activations: bool = False
    """Whether activations may be quantized to FP8 where the weights of both products are FP8."""
    limit: float = 0.0
    """Where above 0: of what experts multiply, see `activation.clamped`."""

    def __post_init__(self) -> None:
        if not (0 < self.chosen <= MOST_CHOSEN and 0 < self.experts <= MOST_EXPERTS):
            raise ValueError(f"at most {MOST_CHOSEN} of {MOST_EXPERTS} experts: {self}")
        if not 0 <= self.shared < min(self.chosen, self.experts):
            raise ValueError(f"some experts must be left to choose: {self}")
        if self.hidden % 16 or self.intermediate % 16:
            raise ValueError(f"features must be multiples of 16: {self}")
        if self.groups and self.intermediate % self.groups:
            raise ValueError(f"{self.intermediate} features do not make {self.groups} equal groups")
        if self.tokens * self.chosen >= 2**31:
            raise ValueError(f"too many tokens: {self}")

    @property
    def pairs(self) -> int:
        """(Token, expert) pairs."""
        return self.tokens * self.chosen

    @property
    def routed_pairs(self) -> int:
        """Pairs that the tokens chose, those of shared experts not among them."""
        return self.tokens * (self.chosen - self.shared)

    @property
    def routed_wanted(self) -> int:
        """The most routed experts that can get a token."""
        return min(self.experts - self.shared, self.routed_pairs)

    @property
    def mean(self) -> float:
        """Tokens of a routed expert, if as many experts as can get one get equally many."""
        return self.routed_pairs / max(self.routed_wanted, 1)

    @property
    def for_group_sums(self) -> bool:
        """Whether Hopper's own kernel for sums of groups takes these sizes: 16-bit floats, blocks of output features,
        groups that the copy engine fetches."""
        return self.groups > 0 and self.dtype.itemsize == 2 and self.hidden >= 128 and self.features_of_a_group % 8 == 0

    @property
    def features_of_a_group(self) -> int:
        """Features of a pair that are summed apart."""
        return self.intermediate // self.parts

    @property
    def for_hopper(self) -> bool:
        """Whether Hopper's own kernels take these sizes: 16-bit floats, in one sum, no less than their blocks."""
        return self.dtype.itemsize == 2 and self.hidden >= 64 and self.intermediate >= 32 and not self.groups

    @property
    def suits_w8a8(self) -> bool:
        """Whether the kernels for activations in FP8 take these sizes: whole blocks, of `down` two at least."""
        whole = self.hidden % W8A8_BLOCK == 0 and self.intermediate % W8A8_BLOCK == 0
        return whole and self.hidden >= 2 * W8A8_BLOCK and self.dtype == torch.bfloat16 and not self.groups

    @property
    def for_four_bit_alone(self) -> bool:
        """Whether Hopper's kernel for a single token and weights of four bits takes these sizes: bf16, in one sum,
        whole steps of features."""
        return self._in_four_bit_steps and self.tokens == 1 and self.chosen > 1

    @property
    def for_four_bit_tiles(self) -> bool:
        """Whether Hopper's kernel for several tokens and weights of four bits takes these sizes: the same, and few
        enough that inputs of a tile find room."""
        fit = max(self.hidden, self.intermediate) <= MOST_FOUR_BIT
        return self._in_four_bit_steps and self.tokens > 1 and self.mean <= MOST_FOUR_BIT_MEAN and fit

    def for_four_bit_grouped(self, stored: tuple[Stored, Stored]) -> bool:
        """Whether Hopper's kernels for many tokens and weights of four bits take these sizes: bf16, in one sum, whole
        steps of features. The copy engine fetches scales of a row 16 bytes at a time, which MXFP4 has for twice as many
        features as INT4."""
        fetched = 2 * FOUR_BIT_FEATURES if stored[0].format == "mxfp4" else FOUR_BIT_FEATURES
        whole = self.hidden % fetched == 0 and self.intermediate % fetched == 0
        return self._in_four_bit_steps and whole and self.tokens > 1

    def suits_w4a8(self, stored: tuple[Stored, Stored]) -> bool:
        """Whether the kernels for activations in FP8 and weights in MXFP4 take these sizes and weights: those that
        become FP8 exactly, whole blocks of scales that the copy engine fetches, and several experts a token, so that
        sorted tokens find room."""
        whole = self.hidden % (2 * FOUR_BIT_FEATURES) == 0 and self.intermediate % (2 * FOUR_BIT_FEATURES) == 0
        exact = all(how.format == "mxfp4" and how.in_fp8 for how in stored)
        return exact and whole and self.dtype == torch.bfloat16 and not self.groups and self.chosen > 1

    @property
    def _in_four_bit_steps(self) -> bool:
        whole = self.hidden % FOUR_BIT_FEATURES == 0 and self.intermediate % FOUR_BIT_FEATURES == 0
        return whole and self.dtype == torch.bfloat16 and not self.groups

    @property
    def parts(self) -> int:
        """Results of a pair."""
        return max(self.groups, 1)


@dataclass(frozen=True)
class Product:
    """The tile of one of the two products."""

    block: int
    """Output features of a program (`gate_up`: of gate, and as many of up)."""
    block_k: int
    stages: int
    warps: int
    group: int = 1
    """Tiles that go through the output features together."""
    tma: bool = False
    """Weights come through the copy engine."""

    def blocks(self, features: int) -> int:
        """Programs that share a tile."""
        return -(-features // self.block)


@dataclass(frozen=True)
class ExpertTiling:
    """The static choices of one call."""

    rows: int
    """Pairs of a tile; 0: every pair on its own (`single`, `four_bit_single`)."""
    gate_up: Product
    down: Product
    partial: torch.dtype
    """Dtype of a pair's result, before weighting: that of the call, so that fewer bytes are written and read between
    weights; fp32 where groups are summed apart."""
    programs: int = 0
    """Number of programs. Hopper's own kernels (`hopper`, `w8a8`, `four_bit_grouped`) go through all tiles with one
    program for each multiprocessor; for those of few tokens with weights of four bits it is the number of
    multiprocessors, each of which has several programs; 0: the Triton kernels."""
    spread: bool = False
    """Whether Hopper's own kernels spread the work of shared experts evenly among that of the others."""
    w8a8: bool = False
    """Whether Hopper's own kernels are those for activations in FP8 (`w8a8`; of weights in MXFP4 `w4a8`)."""
    stored: tuple[Stored, Stored] = (PLAIN, PLAIN)
    """Storage of the weights of either product."""
    walked: int = 1
    """Neighbouring groups that a program of `down` goes through, one after the other."""
    down_programs: int = 0
    """Number of programs of Hopper's own kernel for `down` of sums of groups (`group_sums`), one for each
    multiprocessor; 0: the Triton kernels."""

    @property
    def rearranged(self) -> bool:
        """Whether they are the ones for many tokens with weights of four bits (`four_bit_grouped`), whose inputs have
        an order of their own."""
        few = self.rows <= FOUR_BIT_PAIRS[-1]
        return self.programs > 0 and not few and not self.w8a8 and alike_in_four_bits(self.stored)

    @property
    def w4a8(self) -> bool:
        """Whether they are the ones for activations in FP8 and weights in MXFP4 (`w4a8`), whose tokens are sorted."""
        return self.w8a8 and alike_in_four_bits(self.stored)

    def tiles(self, shape: ExpertsShape) -> int:
        """Most tiles the pairs of a call can fill."""
        return (shape.pairs + (shape.routed_wanted + shape.shared) * (self.rows - 1)) // self.rows


PRODUCTS = {
    0: (Product(4, 2048, 1, 4), Product(8, 1024, 1, 8)),
    16: (Product(32, 256, 3, 4, 128), Product(128, 128, 3, 4, 128, tma=True)),
    64: (Product(64, 64, 3, 4, 128, tma=True), Product(128, 64, 3, 4, 4, tma=True)),
    128: (Product(128, 64, 4, 8, 8, tma=True), Product(256, 64, 4, 8, 8, tma=True)),
}
"""`gate_up` and `down` of each height of tile: the fastest that bench/moe.py found on one H200. Tiles of 64 have so few
stages that three programs stand on a multiprocessor. With one stage more and two programs `gate_up` and `down` of 256
tokens of DeepSeek-V2-Lite took 180 and 98 us in place of 176 and 93."""
MOST_HIDDEN = 4096
"""Input features up to which three programs are the better for `gate_up`, too: with 7168, of an eighth of DeepSeek-V3
and 512 tokens, they took 472 us, two 464."""
IN_GROUPS = (Product(64, 64, 3, 4, tma=True), Product(128, 64, 3, 4, tma=True))
"""The same, of 64 pairs, for sums of groups: of any number of tokens, so that tiles of an expert go one by one."""
FEW_IN_GROUPS = replace(IN_GROUPS[0], block=32, stages=4), IN_GROUPS[1]
"""The same where IN_GROUPS would have no more programs of `gate_up` than stand at once: half as wide, so that they are
dealt out more evenly. Every result has the bits of the wide ones: it is the sum over the same features in the same
order, by the same instruction of fewer columns."""
FEW_PROGRAMS: Final = 3
"""Programs of IN_GROUPS that stand on a multiprocessor; 0 switches FEW_IN_GROUPS off."""
MOST_WALKED: Final = 4
"""Most groups that a program of the Triton kernel `down` goes through in sums of groups of FP8 weights, a power of two;
1 gives every group a program of its own, which ends after a few steps of weights. On its way through several of them a
program asks for the weights of the next group before it is done with one. Sums stay those of a group alone, so that
bits do not depend on it."""
SUMS_OF_GROUPS = Product(128, 64, 9, 4, tma=True)
"""`down` of sums of groups in Hopper's own kernel: as many stages as shared memory holds."""
GROUPS_OF_AN_ITEM: Final = 2
"""Groups of a work item there. With one, items end after as few as three stages; with more, the programs that are left
over at the end take longer."""
MOST_IN_A_RING: Final = 256
"""Tokens that an expert may have on average there. More have the Triton kernel, which gives the same bits: its tiles
find their weights in L2. Of DeepSeek-V2-Lite on one H200 it took 120 us for 64 tokens where the ring took 102, 404 and
398 for 1,024, and 2,636 and 2,808 for 8,192 (`python bench/moe.py --model v2-lite+shared --groups 8`)."""
SCALED = {
    0: PRODUCTS[0],
    16: (Product(64, 128, 4, 4, 128, tma=True), Product(128, 128, 4, 4, 128, tma=True)),
    64: (Product(64, 64, 4, 4, 128, tma=True), Product(64, 128, 3, 4, 4, tma=True)),
    128: (Product(64, 128, 3, 8, 8, tma=True), Product(128, 128, 3, 8, 8, tma=True)),
}
"""The same of weights in 8 or 4 bits, of which 64 rows make a product of Hopper's tensor cores, whatever the pairs.
What they become in registers, and sums that wait for their scale, leave room for smaller tiles than plain weights have.
Of 64 pairs three programs stand on a multiprocessor, as of plain weights. Not compared with others on a GPU yet."""
SCALED_IN_GROUPS = (Product(64, 64, 4, 4, tma=True), Product(64, 64, 4, 4, tma=True))


def tiling(shape: ExpertsShape, stored: tuple[Stored, Stored] = (PLAIN, PLAIN)) -> ExpertTiling:
    """The tiles for a call: as tall as a routed expert's tokens are many on average, so that weights are streamed once.
    A shared expert, which has all tokens, fills as many tiles as it takes. Hopper has kernels of its own for the
    tallest with plain weights, for FP8 where activations may be quantized, and for four bits. Whether they take a call
    or not, and however the weights of `gate_up` and of `down` are stored, its memory is the same.

    Sums of groups have one tile for every number of tokens but for the columns of `gate_up`, and keep what the order of
    a sum could round.
    """

    def of(plain: tuple[Product, Product], scaled: tuple[Product, Product]) -> tuple[Product, Product]:
        first, second = (plain if how == PLAIN else scaled for how in stored)
        return first[0], second[1]

    if shape.groups:
        gate_up, down = of(IN_GROUPS, SCALED_IN_GROUPS)
        tiles = ExpertTiling(64, gate_up, down, torch.float32, stored=stored)
        programs = tiles.tiles(shape) * gate_up.blocks(shape.intermediate)
        if stored[0] == PLAIN and programs <= FEW_PROGRAMS * shape.hopper:
            tiles = replace(tiles, gate_up=FEW_IN_GROUPS[0])
        tiles = fitted(tiles, shape)
        if stored[1] == PLAIN and shape.hopper and shape.for_group_sums and shape.mean <= MOST_IN_A_RING:
            return group_sums(tiles, shape, shape.hopper)
        return replace(tiles, walked=walked(tiles, shape))
    mean = shape.mean
    rows = 16 if mean < FEWEST_OF_64 else 64 if mean <= MOST_OF_64 else 128
    few_bits = shape.hopper > 0 and alike_in_four_bits(stored)
    if shape.tokens <= 1:
        if few_bits and shape.for_four_bit_alone:
            return four_bit_alone(shape, shape.hopper, stored)
        # The cores that are not for tensors are too slow to unpack four bits.
        if not any(how.format in FOUR_BITS for how in stored):
            rows = 0
    if rows and few_bits and shape.for_four_bit_tiles:
        return four_bit_tiled(shape, shape.hopper, stored)
    if mean >= FEWEST_W4A8_MEAN and shape.quantize_activations and shape.hopper and shape.suits_w4a8(stored):
        return w4a8(shape, shape.hopper, stored)
    if mean > MOST_FOUR_BIT_MEAN and few_bits and shape.for_four_bit_grouped(stored):
        return four_bit_grouped(shape, shape.hopper, stored)
    if rows and shape.quantize_activations and shape.hopper and shape.suits_w8a8 and all(map(in_whole_blocks, stored)):
        return w8a8(shape, shape.hopper, stored)
    if rows == 128 and shape.hopper and shape.for_hopper and stored == (PLAIN, PLAIN):
        return grouped(shape, shape.hopper)
    gate_up, down = of(PRODUCTS[rows], SCALED[rows])
    if rows == 64 and shape.hidden > MOST_HIDDEN:
        gate_up = replace(gate_up, stages=4)
    return fitted(ExpertTiling(rows, gate_up, down, shape.dtype, stored=stored), shape)


def walked(tiling: ExpertTiling, shape: ExpertsShape) -> int:
    """Groups that a program of the Triton kernel `down` goes through: of FP8 weights, where groups are of whole steps,
    as many as leave a program for every multiprocessor. Elsewhere it is one: steps of FP8 weights may begin before a
    group; other formats go on to the next step while products read weights in registers, which must not be written
    then, but are in a loop with sums that begin anew; and plain weights have `group_sums`."""
    several = tiling.stored[1].format == "fp8" and shape.features_of_a_group % tiling.down.block_k == 0
    found = gcd(shape.parts, MOST_WALKED) if several else 1
    programs = tiling.tiles(shape) * tiling.down.blocks(shape.hidden) * shape.parts
    while found > 1 and programs // found < shape.hopper:
        found //= 2
    return found


def group_sums(tiling: ExpertTiling, shape: ExpertsShape, programs: int) -> ExpertTiling:
    """`tiling` of sums of groups, with Hopper's own kernel for `down`; a program for each multiprocessor."""
    if not shape.for_group_sums or tiling.rows != 64 or tiling.stored[1] != PLAIN:
        raise ValueError(
            f"Hopper's sums of groups take 16-bit floats, at least 128 hidden ones, and groups of 8 at a time: {shape}"
        )
    walked = gcd(shape.parts, GROUPS_OF_AN_ITEM)
    return replace(tiling, down=SUMS_OF_GROUPS, walked=walked, down_programs=programs)


def grouped(shape: ExpertsShape, programs: int) -> ExpertTiling:
    """The tiles of Hopper's own kernels, for many tokens of 16-bit floats; a program for each multiprocessor.

    As long as a routed expert's tokens fill one tile, its weights come from memory; a shared expert's, which has many
    tiles, mostly from L2. Spread among the others these are computed while memory is read: on one H200 that took
    `gate_up` of 1024 tokens of DeepSeek-V2-Lite from 225 to 215 us. Where routed experts have several tiles each, it
    is one or two hundredths slower.
    """
    if not shape.for_hopper:
        raise ValueError(
            f"Hopper's kernels take 16-bit floats, at least 64 hidden and 32 intermediate of them, in one sum: {shape}"
        )
    products = Product(128, 64, 4, 4, 4, tma=True), Product(256, 64, 4, 4, 4, tma=True)
    return fitted(ExpertTiling(128, *products, shape.dtype, programs, shape.mean <= 128), shape)


def alike_in_four_bits(stored: tuple[Stored, Stored]) -> bool:
    """Whether the weights of both products have one format of four bits."""
    return stored[0].format in FOUR_BITS and stored[0].format == stored[1].format


def in_whole_blocks(stored: Stored) -> bool:
    """Whether weights are FP8 with a scale for every 128 x 128."""
    return (stored.format, stored.rows, stored.features) == ("fp8", W8A8_BLOCK, W8A8_BLOCK)


def w8a8(shape: ExpertsShape, programs: int, stored: tuple[Stored, Stored]) -> ExpertTiling:
    """The tiles of Hopper's kernels for activations in FP8; a program for each multiprocessor, as in `grouped`."""
    if not shape.suits_w8a8 or not all(map(in_whole_blocks, stored)):
        raise ValueError(f"activations in FP8 take bf16 and weights in whole blocks of 128 x 128, in one sum: {shape}")
    products = Product(128, 128, 4, 4, 4, tma=True), Product(256, 128, 4, 4, 4, tma=True)
    return ExpertTiling(128, *products, shape.dtype, programs, shape.mean <= 128, w8a8=True, stored=stored)


def w4a8(shape: ExpertsShape, programs: int, stored: tuple[Stored, Stored]) -> ExpertTiling:
    """The tiles of Hopper's kernels for activations in FP8 and weights in MXFP4; a program for each multiprocessor, as
    in `grouped`."""
    if not shape.suits_w4a8(stored):
        raise ValueError(
            f"activations in FP8 with weights in MXFP4 take bf16, weights that are FP8 times a power of two for each "
            f"row, features in multiples of {2 * FOUR_BIT_FEATURES} and several experts a token, in one sum: {shape}"
        )
    product = Product(128, 128, 3, 4, 4, tma=True)
    return ExpertTiling(256, product, product, shape.dtype, programs, shape.mean <= 256, w8a8=True, stored=stored)


def four_bit_alone(shape: ExpertsShape, multiprocessors: int, stored: tuple[Stored, Stored]) -> ExpertTiling:
    """One token without tiles, on tensor cores: Hopper's kernel for weights of four bits (`four_bit_single`)."""
    if not shape.for_four_bit_alone or not alike_in_four_bits(stored):
        raise ValueError(
            f"a single token's weights of four bits take bf16, features in multiples of {FOUR_BIT_FEATURES} and "
            f"several experts a token, in one sum: {shape}"
        )
    blocks = [shape.pairs * 2 * shape.intermediate // 64, shape.pairs * shape.hidden // 64]
    ahead = [THREE_AHEAD if few_blocks(count, multiprocessors) else 2 for count in blocks]
    return ExpertTiling(0, *_four_bit_products(shape, 4, ahead), shape.dtype, multiprocessors, stored=stored)


def four_bit_tiled(shape: ExpertsShape, multiprocessors: int, stored: tuple[Stored, Stored]) -> ExpertTiling:
    """Tiles of two or eight pairs for Hopper's kernel for several tokens with weights of four bits
    (`four_bit_tiles`)."""
    if not shape.for_four_bit_tiles or not alike_in_four_bits(stored):
        raise ValueError(
            f"several tokens' weights of four bits take bf16, features in multiples of {FOUR_BIT_FEATURES} up to "
            f"{MOST_FOUR_BIT}, at most {MOST_FOUR_BIT_MEAN} tokens an expert, and one sum: {shape}"
        )
    rows = FOUR_BIT_PAIRS[shape.tokens > FEW_FOUR_BIT]
    products = _four_bit_products(shape, 4 if rows == 2 else 16)
    return ExpertTiling(rows, *products, shape.dtype, multiprocessors, stored=stored)


def four_bit_grouped(shape: ExpertsShape, programs: int, stored: tuple[Stored, Stored]) -> ExpertTiling:
    """Tiles of 64 or 128 pairs for Hopper's kernels for many tokens with weights of four bits (`four_bit_grouped`); a
    program for each multiprocessor, as in `grouped`. Stages are as many as find room."""
    if not alike_in_four_bits(stored) or not shape.for_four_bit_grouped(stored):
        raise ValueError(
            f"many tokens' weights of four bits take bf16 and features in multiples of {FOUR_BIT_FEATURES}, of MXFP4 "
            f"of {2 * FOUR_BIT_FEATURES}, in one sum: {shape}"
        )
    rows, stages = (64, 5) if shape.mean <= MOST_OF_64 else (128, 4)
    products = Product(128, 128, stages, 4, 4, tma=True), Product(256, 128, stages, 4, 4, tma=True)
    return ExpertTiling(rows, *products, shape.dtype, programs, shape.mean <= rows, stored=stored)


def few_blocks(blocks: int, multiprocessors: int) -> bool:
    """Whether three programs on a multiprocessor are enough for so many blocks of a single token."""
    return blocks <= THREE_SINGLE * multiprocessors


def _four_bit_products(shape: ExpertsShape, warps: int, ahead: Sequence[int] = (2, 2)) -> tuple[Product, Product]:
    """Gate and up, and down. `ahead`: steps of weights that are on their way, of either; fewer where the features are
    no whole multiples of as many."""
    sizes = zip((shape.hidden, shape.intermediate), ahead, strict=True)
    steps = [gcd(features // FOUR_BIT_FEATURES, most) for features, most in sizes]
    gate_up, down = (Product(16 * warps, FOUR_BIT_FEATURES, count, warps) for count in steps)
    return gate_up, down


def fitted(tiling: ExpertTiling, shape: ExpertsShape) -> ExpertTiling:
    """`tiling`, with blocks no larger than the matrices, steps of weights that share a scale, and no more shared memory
    than fp32 may take."""

    def fit(product: Product, stored: Stored, features: int, depth: int) -> Product:
        block, block_k = product.block, product.block_k
        while block > features:
            block //= 2
        while block_k > 16 and block_k >= 2 * depth:
            block_k //= 2
        if shape.dtype == torch.float32 and tiling.rows:
            block, block_k = min(block, 32), min(block_k, 32)
        if stored.format == "fp8" and tiling.rows:
            block_k = min(block_k, stored.features)
        if stored != PLAIN and tiling.rows and shape.groups and depth % block_k:
            # Steps begin where they would if the features of other ranks stood before: at groups at least.
            block_k = min(block_k, GROUP)
        # The copy engine fetches what begins at a multiple of 16 bytes, no fewer at a time.
        fetched = depth % 8 == 0 if stored == PLAIN else block_k >= (32 if stored.format in FOUR_BITS else 16)
        tma = product.tma and shape.dtype != torch.float32 and fetched
        return replace(product, block=block, block_k=block_k, tma=tma)

    return replace(
        tiling,
        rows=min(tiling.rows, 32) if shape.dtype == torch.float32 else tiling.rows,
        gate_up=fit(tiling.gate_up, tiling.stored[0], shape.intermediate, shape.hidden),
        down=fit(tiling.down, tiling.stored[1], shape.hidden, shape.features_of_a_group),
    )


@dataclass(frozen=True)
class Workspace:
    """The scratch memory of one call. Calls in stream order may share it; nothing in it needs to be initialised."""

    sorted_Y: Tensor
    """int32: the pairs, expert by expert."""
    table: Tensor
    """int32 [4 * (tiles + 1)], see `sorting`."""
    counts: Tensor
    """int32 [SEGMENTS * experts]."""
    act_YI: Tensor
    partial_YGE: Tensor
    """Every pair's results, of each group."""

    @staticmethod
    def bytes(shape: ExpertsShape, tiling: ExpertTiling) -> int:
        """Bytes `over` needs."""
        return sum(size for _, size in _parts(shape, tiling))

    @staticmethod
    def over(buffer: Tensor, shape: ExpertsShape, tiling: ExpertTiling) -> Workspace:
        """Lay a workspace over the front of a uint8 buffer (ValueError when it is too small)."""
        need = Workspace.bytes(shape, tiling)
        if buffer.dtype != torch.uint8 or buffer.numel() < need:
            raise ValueError(f"{shape} needs a uint8 buffer of {need} bytes, not {buffer.numel()} of {buffer.dtype}")
        views: list[Tensor] = []
        offset = 0
        for dtype, size in _parts(shape, tiling):
            views.append(buffer[offset : offset + size].view(dtype))
            offset += size
        sorted_Y, table, counts, act, partial = views
        return Workspace(
            sorted_Y,
            table,
            counts,
            act[: shape.pairs * shape.intermediate].view(shape.pairs, shape.intermediate),
            partial[: shape.pairs * shape.parts * shape.hidden].view(-1, shape.parts, shape.hidden),
        )


def _parts(shape: ExpertsShape, tiling: ExpertTiling) -> list[tuple[torch.dtype, int]]:
    """(dtype, bytes) of the parts of a workspace, each padded to 256 bytes.

    How weights are stored decides whether few tokens have tiles, and how tall ones, and must not change the size: it is
    that of the lowest.
    """
    act = (shape.dtype, shape.pairs * shape.intermediate * shape.dtype.itemsize)
    lowest = tiling.rows if shape.groups or shape.mean >= FEWEST_OF_64 else min(FOUR_BIT_PAIRS)
    tiles = replace(tiling, rows=lowest).tiles(shape)
    sizes = [
        (torch.int32, 4 * shape.pairs),
        (torch.int32, 16 * (tiles + 1)),
        (torch.int32, 4 * SEGMENTS * shape.experts),
        act,
        (tiling.partial, shape.pairs * shape.parts * shape.hidden * tiling.partial.itemsize),
    ]
    return [(dtype, -(-size // 256) * 256) for dtype, size in sizes]
