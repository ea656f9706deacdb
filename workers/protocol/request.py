"""What a request asks for, on its way through front, scheduler and ranks: a prompt, sampling parameters and a seed.

A prompt's token ids are packed once, and the keys of its pages hashed once, both shared by every sequence that
continues it. A page's key is a 128-bit hash of the key of the page before it and of its own 64 token ids, so a key
names a whole prefix. The first page of a prompt continues a root, which names the model that computes it
(`workers.rank.root`) and, where there is a salt, who may share its pages (`salted_root`). Keys only find candidates:
who shares pages compares their tokens, too.

The noise of sampling is a function of a sequence's seed, of the position and of the token id. If sequences of different
prompts had the same seed, they would draw with the same noise at the same position, and whoever evaluates a thousand
prompts with one seed would measure one draw. So a sequence's seed is a hash of the request's seed and of the prompt
(`sequence_seeds`).

A field of `SamplingParams` that is annotated with a `Parameter` is a row of the table of sampling parameters. From it
follow the field of request bodies with its range, the default that a model's generation_config.json gives it, the check
before a request is queued, the option of `latentserve generate`, the column that the sampling kernels read by a row's
slot, and the table in docs/api.md.

Pure Python on purpose: front and scheduler never import torch.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Annotated, Any, Final, get_type_hints, overload

import msgspec
from typing_extensions import override

from kernels.page import PAGE_TOKENS
from workers.protocol.grammar import Grammar

TOKEN_BYTES = 4
PAGE_BYTES = TOKEN_BYTES * PAGE_TOKENS
KEY_BYTES = 16
REPORTED_BYTES = 8
"""Bytes of a key that routers are told: its first ones. Two pages that share them cost a router a wrong guess."""
NO_ROOT = bytes(KEY_BYTES)
"""Root of keys that leave no process and name no model."""


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian 32-bit unsigned integers. OverflowError for an id outside 0 ... 2^32 - 1."""
    packed = array("I", tokens)
    assert packed.itemsize == TOKEN_BYTES
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> array[int]:
    """The inverse. ValueError if that is no whole number of ids."""
    tokens = array("I", packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def salted_root(root: bytes, salt: bytes) -> bytes:
    """Root of the prompts that share pages only with those of equal `salt`; `root` itself where that is empty."""
    return blake2b(salt, digest_size=KEY_BYTES, salt=root).digest() if salt else root


def chain_key(parent: bytes, page: bytes) -> bytes:
    """128-bit key of a page of packed tokens that continues the page of key `parent`; equal in every process."""
    # As BLAKE2's salt the parent takes no room in the message, so that a page is two blocks of it instead of three.
    return blake2b(page, digest_size=KEY_BYTES, salt=parent).digest()


def chain_keys(parent: bytes, packed: bytes) -> list[bytes]:
    """Keys of all full pages of packed tokens that continue the page of key `parent`."""
    keys: list[bytes] = []
    key = parent
    for begin in range(0, len(packed) - PAGE_BYTES + 1, PAGE_BYTES):
        key = chain_key(key, packed[begin : begin + PAGE_BYTES])
        keys.append(key)
    return keys


def page_keys(tokens: Sequence[int], root: bytes = NO_ROOT) -> list[bytes]:
    """Keys of all full pages of a prompt, first to last. A key names its whole prefix: a replica that reports key i
    (`EngineStats.prefix_keys`) holds pages 0 ... i, so look for the deepest key it has. OverflowError for an id outside
    0 ... 2^32 - 1."""
    return chain_keys(root, pack_tokens(tokens))


def pack_keys(keys: Iterable[bytes]) -> bytes:
    """Page keys as routers are told them: the first 8 bytes of each."""
    return b"".join([key[:REPORTED_BYTES] for key in keys])


def unpack_keys(packed: bytes) -> list[bytes]:
    """The keys that `pack_keys` packed, 8 bytes of each. ValueError if that is no whole number of them."""
    if len(packed) % REPORTED_BYTES:
        raise ValueError(f"{len(packed)} bytes are no whole number of {REPORTED_BYTES}-byte keys")
    return [packed[at : at + REPORTED_BYTES] for at in range(0, len(packed), REPORTED_BYTES)]


class Prompt(Sequence[int]):
    """Token ids of one prompt, which never change. What is computed from them is computed once, when it is wanted."""

    def __init__(self, packed: bytes) -> None:
        """`packed`: as `pack_tokens` makes it. ValueError if that is no whole number of ids."""
        if len(packed) % TOKEN_BYTES:
            raise ValueError(f"{len(packed)} bytes are no whole number of {TOKEN_BYTES}-byte token ids")
        self.packed = packed
        self.length = len(packed) // TOKEN_BYTES
        """Tokens. Cheaper than `len`, for what happens to every row in every step."""
        self._keys: dict[bytes, list[bytes]] = {}

    @staticmethod
    def of(tokens: Sequence[int]) -> Prompt:
        """Make a prompt of ids; a prompt is given back as it is. OverflowError for an id outside 0 ... 2^32 - 1."""
        return tokens if isinstance(tokens, Prompt) else Prompt(pack_tokens(tokens))

    def keys(self, root: bytes) -> list[bytes]:
        """Keys of its full pages, first to last, of which the first continues `root`. The list is shared by all who ask
        for it: nobody may change it."""
        known = self._keys.get(root)
        if known is None:
            known = self._keys[root] = chain_keys(root, self.packed)
        return known

    @cached_property
    def highest(self) -> int:
        """The highest id; -1 of an empty prompt."""
        return max(self._ids, default=-1)

    @cached_property
    def _ids(self) -> memoryview:
        if sys.byteorder == "little":
            return memoryview(self.packed).cast("I")
        swapped = array("I", self.packed)
        swapped.byteswap()
        return memoryview(swapped)

    @override
    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    @override
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return tuple(self._ids[index]) if isinstance(index, slice) else self._ids[index]

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)


LEAST_SEED: Final = -(2**63)
MOST_SEED: Final = 2**63 - 1
NO_SEED: Final = -1
"""Clients of other engines send it where they want none."""


def sequence_seeds(seed: int, prompt: Sequence[int], choices: int = 1) -> list[int]:
    """The seeds of sequences that continue a prompt, one for each choice of a request.

    Args:
        seed: of the request, LEAST_SEED ... MOST_SEED; different ones give different seeds.
        prompt: its token ids.

    Returns:
        Values in 0 ... 2^63 - 1, a function of seed, prompt and the choice's place alone.

    Raises:
        OverflowError: an id of the prompt is outside 0 ... 2^32 - 1.
    """
    common = blake2b(seed.to_bytes(8, "little", signed=True) + Prompt.of(prompt).packed, digest_size=8)
    found = []
    for choice in range(choices):
        own = common.copy()
        own.update(choice.to_bytes(8, "little"))
        found.append(int.from_bytes(own.digest(), "little") & MOST_SEED)
    return found


@dataclass(frozen=True, slots=True)
class Parameter:
    """Meaning and allowed values of a sampling parameter that is one number.

    Bounds belong to the range. One whose second value is None has no upper end.
    """

    meaning: str
    """Help on the command line, and description of the field in a request's body."""
    asked: tuple[float, float | None]
    """Range that clients may ask for over HTTP."""
    taken: tuple[float, float]
    """Range that the engine takes from anyone. It is wide enough for any use, and no value inside can turn finite
    logits into infinite ones, which a worker must take for broken weights."""
    in_generation_config: bool = False
    """A generation_config.json may say under this name what requests get that leave it out."""
    penalty: bool = False
    """The logits depend on the tokens that came before. Workers are told of those tokens, and count them."""


@dataclass(frozen=True, slots=True)
class Row:
    """A sampling parameter with all that is stated of it."""

    name: str
    """Field of a request's body and of `SamplingParams`, and column of the device tables: of
    `kernels.sampling.SlotTables.real_SF`, which is float32, except for top_k."""
    kind: type[float] | type[int]
    default: float
    """Changes nothing (a temperature of 1: the model's own distribution)."""
    parameter: Parameter

    @property
    def option(self) -> str:
        """Name on the command line."""
        return "--" + self.name.replace("_", "-")

    def out_of_range(self, value: float) -> str:
        """Return why the engine does not take this value, "" if it does. NaN is outside of every range."""
        least, most = self.parameter.taken
        if least <= value <= most:
            return ""
        given = value if self.kind is int else f"{value:g}"
        return f"{self.name} must be between {_bound(least)} and {_bound(most)}, not {given}"


def _bound(value: float) -> str:
    return "2^31 - 1" if value == _INT31 else f"{value:g}"


_INT31: Final = 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """Sampling parameters of one request. Field meanings follow the OpenAI API and vLLM's extensions to it."""

    max_tokens: int
    temperature: Annotated[
        float,
        Parameter(
            "0 is greedy; otherwise logits are divided by it.",
            asked=(0.0, 2.0),
            taken=(0.0, 100.0),
            in_generation_config=True,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Parameter(
            "Keep the k most probable tokens; 0 keeps all, and so does -1 in a request.",
            asked=(-1, None),
            taken=(0, _INT31),
            in_generation_config=True,
        ),
    ] = 0
    top_p: Annotated[
        float,
        Parameter(
            "Keep the smallest set of most probable tokens whose probability reaches this. 0 keeps the most probable "
            "token.",
            asked=(0.0, 1.0),
            taken=(0.0, 1.0),
            in_generation_config=True,
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Parameter(
            "Keep tokens at least this share as probable as the most probable one.",
            asked=(0.0, 1.0),
            taken=(0.0, 1.0),
            in_generation_config=True,
        ),
    ] = 0.0
    seed: int = 0
    """64-bit, of this sequence: see `sequence_seeds`. The front end draws one when the user gives none."""
    presence_penalty: Annotated[
        float,
        Parameter(
            "Taken off the logits of tokens that were generated before.",
            asked=(-2.0, 2.0),
            taken=(-100.0, 100.0),
            penalty=True,
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Parameter(
            "Taken off a token's logit as often as it was generated before.",
            asked=(-2.0, 2.0),
            taken=(-100.0, 100.0),
            penalty=True,
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Parameter(
            "Logits above 0 of tokens of the prompt and of generated ones are divided by it, others multiplied.",
            asked=(0.01, 10.0),
            # Positive logits are divided by it: a denormal one makes them infinite.
            taken=(0.01, 100.0),
            in_generation_config=True,
            penalty=True,
        ),
    ] = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias) pairs, added to the logits."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end the request, end-of-sequence ids included unless the request ignores them."""
    min_tokens: int = 0
    """Stop ids cannot be sampled before this many tokens were generated."""
    logprobs: int = -1
    """-1: none; 0: of the chosen token; k > 0: of the k most probable tokens too."""
    grammar: Grammar | None = None
    """Grammar of the text. With one `stop_ids` must have an id that ends every text, because a complete grammar allows
    nothing else; `min_tokens` yields to that."""
    prompt_logprobs: int = -1
    """Number of log-probabilities per prompt token but the first, as `logprobs` for generated ones."""
    logprob_token_ids: tuple[int, ...] = ()
    """Ids whose log-probabilities are told at each position, too, whatever they are, with `logprobs`."""

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on which tokens came before."""
        return any(getattr(self, name) != default for name, default in PENALTIES)


def rows_of(params: type[SamplingParams]) -> tuple[Row, ...]:
    """The fields that are annotated with a `Parameter`."""
    hints: dict[str, Any] = get_type_hints(params, include_extras=True)
    defaults = {field.name: field.default for field in msgspec.structs.fields(params)}
    return tuple(
        Row(name, hint.__origin__, defaults[name], parameter)
        for name, hint in hints.items()
        for parameter in getattr(hint, "__metadata__", ())
        if isinstance(parameter, Parameter)
    )


TABLE: Final = rows_of(SamplingParams)
"""Table of the sampling parameters that are one number each."""
PENALTIES: Final = tuple((row.name, row.default) for row in TABLE if row.parameter.penalty)
"""Name and default of those that depend on the tokens that came before."""
