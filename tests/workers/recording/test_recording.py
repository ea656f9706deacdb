"""Files of recorded step plans: what is in them, what must not be, and what is wrong with a file."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from workers.config import DEMO_MODEL, EngineConfig
from workers.protocol.messages import Ready
from workers.protocol.plan import Admission, PageGrant, PrefillRow, SamplingParams, StepPlan, StepResult, TopLogprobs
from workers.protocol.request import pack_tokens
from workers.recording.file import MAGIC, Recorder, Recording, RecordingError, config_hash, read_recording

VOCAB = 50_000
READY = Ready(0, pages=20, max_context=300, vocab_size=VOCAB, width=3)
SECRET = tuple(range(40_000, 40_070))
SAMPLING = SamplingParams(
    9,
    temperature=0.5,
    seed=7,
    logit_bias=((40_001, 1.5), (40_002, -2.0)),
    frequency_penalty=1.0,
    logprobs=0,
    logprob_token_ids=(40_007, 40_008),
)
PLANS = (
    StepPlan(
        1,
        3,
        2,
        prefill=(PrefillRow(2, 0, SECRET[:40], 0, False, SECRET[40]), PrefillRow(0, 0, SECRET[:3], 0, True)),
        admissions=(Admission(2, SAMPLING, 5, SECRET, tokens=pack_tokens(SECRET)), Admission(0, SamplingParams(4))),
        grants=(PageGrant(2, 0, (4, 5)), PageGrant(0, 0, (6,))),
        logprobs=1,
    ),
    StepPlan(2, 3, 2, decode_slots=(0,), prefill=(PrefillRow(2, 40, SECRET[40:], 0, True),)),
    StepPlan(3, 3, 2, decode_slots=(0, 2)),
)
RESULTS = (
    StepResult(1, ((40_003,),), 0.5, ((TopLogprobs(-1.0, (40_004,), (-0.5,)),),)),
    StepResult(2, ((40_005, 40_006), ()), 0.25, (), (1,)),
)


def record(file: Path, **settings: Any) -> Path:
    recorder = Recorder(EngineConfig(model="demo", record_plans=str(file), **settings), READY)
    for index, plan in enumerate(PLANS):
        recorder.plan(plan)
        if index:
            recorder.result(RESULTS[index - 1])
    recorder.close()
    return recorder.path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return record(tmp_path / "plans.bin", record_prompts=True)


def numbers(value: object) -> set[int]:
    """Every integer in a structure."""
    found: set[int] = set()
    stack = [msgspec.to_builtins(value)]
    while stack:
        match stack.pop():
            case int() as number:
                found.add(number)
            case list() | tuple() as items:
                stack += items
            case dict() as items:
                stack += items.values()
    return found


def test_with_prompts_everything_comes_back(file: Path) -> None:
    recording = read_recording(file)
    assert tuple(step.plan for step in recording.steps) == PLANS
    assert tuple(step.result for step in recording.steps) == (*RESULTS, None)
    assert not recording.cut_off
    header = recording.header
    assert (header.pages, header.max_context, header.vocab_size, header.width) == (20, 300, VOCAB, 3)
    assert header.config_hash == config_hash(DEMO_MODEL)
    assert EngineConfig(**header.engine).record_plans == str(file)


def test_without_them_nothing_is_left_of_prompts_and_answers(tmp_path: Path) -> None:
    file = record(tmp_path / "plans.bin")
    steps = read_recording(file).steps
    hidden = numbers([step.plan for step in steps]) | numbers([step.result for step in steps])
    assert not hidden & {*SECRET[3:], *range(40_000, 40_007)}
    assert not read_recording(file).header.prompts
    for step, plan in zip(steps, PLANS, strict=True):
        assert step.plan.layout == plan.layout
        assert (step.plan.grants, step.plan.decode_slots, step.plan.width) == (
            plan.grants,
            plan.decode_slots,
            plan.width,
        )
        assert all(0 <= token < VOCAB for row in step.plan.prefill for token in row.tokens)
    [long, other] = steps[0].plan.admissions
    assert (long.generated, len(long.history), long.sampling.seed) == (5, len(SECRET), 7)
    assert [value for _, value in long.sampling.logit_bias] == [1.5, -2.0]
    assert steps[0].plan.prefill[0].next_token == steps[1].plan.prefill[0].tokens[0]
    assert long.history[:40] == steps[0].plan.prefill[0].tokens
    assert long.tokens == pack_tokens(long.history)
    assert other.history == ()
    results = [step.result for step in steps if step.result]
    assert [[len(tokens) for tokens in result.tokens] for result in results] == [[1], [2, 0]]
    assert (results[0].logprobs, results[1].nonfinite) == ((), (1,))


def test_what_stands_for_a_prompt_does_not_depend_on_it(tmp_path: Path) -> None:
    """Two files of prompts of equal lengths are equal."""
    file = record(tmp_path / "plans.bin")
    recorder = Recorder(EngineConfig(model="demo", record_plans=str(file)), READY)
    for plan in PLANS:
        rows = tuple(msgspec.structs.replace(row, tokens=(1,) * len(row.tokens)) for row in plan.prefill)
        recorder.plan(msgspec.structs.replace(plan, prefill=rows))
    first, second = (
        [row.tokens for step in read_recording(name).steps for row in step.plan.prefill]
        for name in (file, recorder.path)
    )
    assert first == second


def test_a_recording_is_its_owner_s_alone(file: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    names = [record(tmp_path / "plans.bin").name for _ in range(3)]
    assert names == ["plans.bin", "plans.bin.1", "plans.bin.2"]


def test_a_disk_that_is_full_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    recorder = Recorder(EngineConfig(model="demo", record_plans=str(tmp_path / "p")), READY)
    recorder.plan(PLANS[0])
    with recorder._file, Path("/dev/full").open("wb") as full:
        recorder._file = full
        recorder.plan(PLANS[1])
        recorder.result(RESULTS[0])
        recorder.close()
    assert len(read_recording(recorder.path).steps) == 1


def test_a_plan_is_in_the_file_before_it_runs(tmp_path: Path) -> None:
    recorder = Recorder(EngineConfig(model="demo", record_plans=str(tmp_path / "p")), READY)
    recorder.plan(PLANS[0])
    assert len(read_recording(recorder.path).steps) == 1


def test_a_file_that_was_cut_off_has_what_was_written_before(file: Path) -> None:
    data, whole = file.read_bytes(), read_recording(file)
    seen = set()
    for end in range(0, len(data), 7):
        file.write_bytes(data[:end])
        try:
            recording: Recording = read_recording(file)
        except RecordingError as error:
            seen.add(str(error).removeprefix(f"{file} ").split(":")[0])
            continue
        count = len(recording.steps)
        seen.add(str(count))
        assert [step.plan for step in recording.steps] == [step.plan for step in whole.steps][:count]
    assert seen == {
        "1",
        "2",
        "3",
        "was cut off within its header",
        "is no recording of step plans",
        "ends before the first plan",
    }


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (b"hello", "no recording"),
        (MAGIC + b"\0\0\0\1\xc1", "damaged"),
        (MAGIC + b"\0\0\0\1\x01", "has format None, not 1"),
        (MAGIC + b"\0\0\0\x13" + msgspec.msgpack.encode({"format": 2, "version": "9"}), "format 2, not 1: .* 9"),
    ],
)
def test_what_is_no_recording_says_why(tmp_path: Path, wrong: bytes, says: str) -> None:
    file = tmp_path / "plans.bin"
    file.write_bytes(wrong)
    with pytest.raises(RecordingError, match=says):
        read_recording(file)


def test_damage_inside_a_file_is_noticed(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-30:-20] = b"\xc1" * 10
    file.write_bytes(data)
    with pytest.raises(RecordingError, match="damaged"):
        read_recording(file)


def test_prompts_are_recorded_with_a_file_alone() -> None:
    with pytest.raises(ValueError, match="record_prompts needs a file"):
        EngineConfig(model="demo", record_prompts=True)
