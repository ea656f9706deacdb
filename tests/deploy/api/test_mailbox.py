"""The mailbox between an engine and the reader of one request's outputs."""

import asyncio

import msgspec
import pytest
from fake_engine import out

from workers.processes.client import OutputMailbox
from workers.protocol.front import EngineFault, ModelInfo
from workers.protocol.plan import TopLogprobs


async def test_outputs_come_as_they_are_put_and_end_with_the_finish() -> None:
    left: list[int] = []
    mailbox = OutputMailbox(lambda: left.append(1))
    reader = asyncio.create_task(anext(mailbox))
    await asyncio.sleep(0)
    mailbox.put(out(5, cached=64))
    assert await reader == out(5, cached=64)
    mailbox.put(out(6, finish="stop"))
    assert [output async for output in mailbox] == [out(6, finish="stop")]
    mailbox.put(out(7))  # a step too far
    with pytest.raises(StopAsyncIteration):
        await anext(mailbox)
    await mailbox.aclose()
    assert left == []


async def test_what_waits_is_merged() -> None:
    mailbox = OutputMailbox(lambda: None)
    scores = [TopLogprobs(-0.1), TopLogprobs(-0.2), TopLogprobs(-0.3)]
    mailbox.put(out(5, 6, cached=64, logprobs=scores[:2]))
    mailbox.put(out(7, logprobs=scores[2:]))
    mailbox.put(out(finish="length"))
    [merged] = [output async for output in mailbox]
    whole = out(5, 6, 7, finish="length", cached=64, logprobs=scores)
    assert msgspec.structs.replace(merged, accepted=()) == whole
    assert merged.drafts == (True, False, False)
    assert whole.drafts == (True, True, False)  # as one step it would be


async def test_an_error_comes_after_what_was_put() -> None:
    left: list[int] = []
    mailbox = OutputMailbox(lambda: left.append(1))
    mailbox.put(out(5))
    mailbox.fail(EngineFault("first"))
    mailbox.fail(EngineFault("second"))
    assert (await anext(mailbox)).tokens == (5,)
    with pytest.raises(EngineFault, match="first"):
        await anext(mailbox)
    await mailbox.aclose()
    assert left == []


@pytest.mark.parametrize("reading", [False, True])
async def test_leaving_early_cancels_once(reading: bool) -> None:
    left: list[int] = []
    mailbox = OutputMailbox(lambda: left.append(1))
    if reading:
        reader = asyncio.create_task(anext(mailbox))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
    for _ in range(2):
        await mailbox.aclose()
    assert left == [1]


@pytest.mark.parametrize(
    "wrong", [{"max_context": 1}, {"vocab_size": 0}, {"eos_ids": (10,)}, {"eos_ids": (-1,)}, {"max_width": 0}]
)
def test_model_info_checks_itself(wrong: dict[str, object]) -> None:
    good = {"name": "m", "max_context": 8, "vocab_size": 10, "eos_ids": (1,), "max_width": 1, "created": 0}
    ModelInfo(**good)
    with pytest.raises(ValueError, match=r"positive|vocabulary"):
        ModelInfo(**{**good, **wrong})
