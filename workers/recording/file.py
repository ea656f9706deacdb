"""Recorded step plans: what a replica's ranks were told and what came of it, in a file for `latentserve replay`.

A file is `MAGIC`, then frames: four bytes of length, then msgpack. The first frame is the `Header`, every other one a
`StepPlan` or a `StepResult`. Each is flushed when it is written, so the file of a replica that died ends with the plan
that it died of.

Unless prompts are asked for, a file has none, nor anything that was generated: every prompt token is replaced by a
pseudo-random one (`Concealed`). Rows, lengths, pages, sampling parameters and the number of tokens that each row gained
stay, which is what a step's shape, and most of what can go wrong with it, depends on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
from msgspec.structs import replace

from kernels import __version__
from workers.config import EngineConfig
from workers.model_folder import config_values
from workers.protocol.messages import Ready
from workers.protocol.plan import Admission, PrefillRow, StepPlan, StepResult
from workers.protocol.request import TOKEN_BYTES, pack_tokens

logger = logging.getLogger(__name__)

MAGIC: Final = b"latentserve plans\n"
FORMAT: Final = 1
"""Format of the files that are written here, and the only one that is read."""
_LENGTH: Final = struct.Struct(">I")


class RecordingError(ValueError):
    """A file that is no recording, or none that can be read here; the text says why."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of the plans, and the settings that are needed to run them."""

    format: int = FORMAT
    version: str = __version__
    """Version of latentserve."""
    config_hash: str
    """See `config_hash`, of the model."""
    engine: dict[str, Any]
    """The settings of `EngineConfig`."""
    pages: int
    """Number of pages. This and the next three fields are as in `Ready`."""
    max_context: int
    vocab_size: int
    width: int
    prompts: bool
    """Whether token ids are those of the prompts, and results have their tokens."""


@dataclass(frozen=True)
class Step:
    """A recorded step; no result where the replica ended before it came."""

    plan: StepPlan
    result: StepResult | None


@dataclass(frozen=True)
class Recording:
    """Contents of a file."""

    header: Header
    steps: tuple[Step, ...]
    cut_off: bool
    """Whether it ends in the middle of a frame: what had been written before is here."""


def config_hash(folder: Path) -> str:
    """Names the `config.json` of a model folder, whatever its formatting."""
    fields = config_values(folder)
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


class Concealed:
    """Takes from plans and results, in their order, all that says what was asked and answered."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tenants: dict[int, int] = {}
        self._admitted = 0

    def plan(self, plan: StepPlan) -> StepPlan:
        """Return the plan with other tokens, which depend on how many requests were admitted before a row's, and on the
        position."""
        for admission in plan.admissions:
            self._admitted += 1
            self._tenants[admission.slot] = self._admitted
        return replace(
            plan,
            prefill=tuple([self._row(row) for row in plan.prefill]),
            admissions=tuple([self._admission(admission) for admission in plan.admissions]),
        )

    def result(self, result: StepResult) -> StepResult:
        """Return the result with as many tokens, all of them 0, and without log-probabilities."""
        tokens = tuple([(0,) * len(tokens) for tokens in result.tokens])
        return replace(result, tokens=tokens, logprobs=(), scores=())

    def _token(self, slot: int, position: int) -> int:
        return zlib.crc32(struct.pack("<qq", self._tenants.get(slot, 0), position)) % self._vocab_size

    def _tokens(self, slot: int, start: int, count: int) -> tuple[int, ...]:
        return tuple([self._token(slot, position) for position in range(start, start + count)])

    def _row(self, row: PrefillRow) -> PrefillRow:
        end = row.start + len(row.tokens)
        following = -1 if row.final else self._token(row.slot, end)
        return replace(row, tokens=self._tokens(row.slot, row.start, len(row.tokens)), next_token=following)

    def _admission(self, admission: Admission) -> Admission:
        sampling, slot = admission.sampling, admission.slot
        # Biased ids are the client's own words, too; only distinct ones are allowed.
        bias = tuple([(index % self._vocab_size, value) for index, (_, value) in enumerate(sampling.logit_bias)])
        history = self._tokens(slot, 0, len(admission.history))
        tokens = pack_tokens(self._tokens(slot, 0, len(admission.tokens) // TOKEN_BYTES))
        named = tuple([index % self._vocab_size for index in range(len(sampling.logprob_token_ids))])
        sampling = replace(sampling, logit_bias=bias, logprob_token_ids=named, grammar=None)
        return replace(admission, sampling=sampling, history=history, tokens=tokens)


class Recorder:
    """Writes the plans and results of one replica to a file of its own."""

    def __init__(self, config: EngineConfig, ready: Ready) -> None:
        """Begin a recording in `config.record_plans`, or, where that file is there, in one of the same name with .1,
        .2, ... behind it: a replica that is started again keeps what the one before has left. OSError if it cannot be
        written."""
        assert config.record_plans is not None
        self._file, self.path = _created(Path(config.record_plans))
        self._concealed = None if config.record_prompts else Concealed(ready.vocab_size)
        self._ended = False
        self._file.write(MAGIC)
        self._write(
            Header(
                config_hash=config_hash(config.folder),
                engine=config.model_dump(mode="json"),
                pages=ready.pages,
                max_context=ready.max_context,
                vocab_size=ready.vocab_size,
                width=ready.width,
                prompts=config.record_prompts,
            )
        )

    def plan(self, plan: StepPlan) -> None:
        """Record a plan. Call this before anybody runs it."""
        self._add(plan if self._concealed is None else self._concealed.plan(plan))

    def result(self, result: StepResult) -> None:
        """Record a result. Call this in the order of the steps."""
        self._add(result if self._concealed is None else self._concealed.result(result))

    def close(self) -> None:
        """End the recording."""
        with suppress(OSError):  # what a full disk has not taken is lost
            self._file.close()

    def _add(self, frame: msgspec.Struct) -> None:
        """Write a frame. If the disk is full the recording ends; serving goes on."""
        if self._ended:
            return
        try:
            self._write(frame)
        except OSError as error:
            self._ended = True
            logger.error("step plans are recorded no more in %s: %s", self.path, error)

    def _write(self, frame: msgspec.Struct) -> None:
        payload = msgspec.msgpack.encode(frame)
        self._file.write(_LENGTH.pack(len(payload)) + payload)
        self._file.flush()


def _created(path: Path) -> tuple[BinaryIO, Path]:
    number = 0
    while True:
        name = path if not number else path.with_name(f"{path.name}.{number}")
        try:
            # Of its owner alone: prompts and answers may be in it.
            return os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"), name
        except FileExistsError:
            number += 1


def read_recording(path: Path) -> Recording:
    """Read a recording. RecordingError if the file is no recording, has another format or not even a plan; OSError if
    it cannot be read."""
    data = path.read_bytes()
    if not data.startswith(MAGIC):
        raise RecordingError(f"{path} is no recording of step plans: `serve --record-plans` and `generate` write them")
    frames = list(_frames(data))
    try:
        header = _header(path, frames)
        plans, results = _plans_and_results(frames[1:])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordingError(f"{path} is damaged: {error}") from None
    if not plans:
        raise RecordingError(f"{path} ends before the first plan: nothing was run, or the file was cut off")
    steps = tuple([Step(plan, results.get(plan.step)) for plan in plans])
    whole = len(MAGIC) + sum(_LENGTH.size + len(frame) for frame in frames)
    return Recording(header, steps, cut_off=whole < len(data))


def _frames(data: bytes) -> Iterator[bytes]:
    """Yield the frames that are whole."""
    begin = len(MAGIC)
    while begin + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, begin)
        begin += _LENGTH.size
        if begin + length > len(data):
            return
        yield data[begin : begin + length]
        begin += length


def _header(path: Path, frames: list[bytes]) -> Header:
    if not frames:
        raise RecordingError(f"{path} was cut off within its header")
    written = msgspec.msgpack.decode(frames[0])
    if not isinstance(written, dict) or written.get("format") != FORMAT:
        found = written.get("format") if isinstance(written, dict) else None
        version = written.get("version") if isinstance(written, dict) else None
        raise RecordingError(f"{path} has format {found}, not {FORMAT}: replay it with latentserve {version}")
    return msgspec.convert(written, Header)


def _plans_and_results(frames: list[bytes]) -> tuple[list[StepPlan], dict[int, StepResult]]:
    decoder = msgspec.msgpack.Decoder(StepPlan | StepResult)
    plans: list[StepPlan] = []
    results: dict[int, StepResult] = {}
    for frame in frames:
        message = decoder.decode(frame)
        if isinstance(message, StepPlan):
            plans.append(message)
        else:
            results[message.step] = message
    return plans, results
