import asyncio
import json

import pytest

from deploy.routing.request_features import MOST_ROWS, FeatureReader
from deploy.text.tokenizer import Tokenizer
from workers.config import DEMO_MODEL
from workers.protocol.request import NO_ROOT, pack_tokens, page_keys

TEXT = "".join(f"def function_{i}(x):\n    return x + {i}\n\n" for i in range(60))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.load(DEMO_MODEL)
    assert found is not None
    return found


def told(ids: list[int], root: bytes = NO_ROOT) -> list[bytes]:
    """The keys that a replica with these pages reports."""
    return [key[:8] for key in page_keys(ids, root)]


def remembered_bytes(reader: FeatureReader) -> int:
    return sum(len(features.prompt.packed) for features, _ in reader._recent.values())


def body(**fields: object) -> bytes:
    return json.dumps({"model": "demo", **fields}).encode()


async def test_a_text_prompt_gets_the_page_hashes_its_replica_computes(tokenizer: Tokenizer) -> None:
    features = await FeatureReader(tokenizer).read(body(prompt=TEXT, n=3))
    ids = tokenizer.encode(TEXT)
    assert len(ids) > 640
    assert (features.tokens, features.keys(NO_ROOT), features.rows) == (len(ids), told(ids), 3)


async def test_ids_need_no_tokenizer() -> None:
    ids = list(range(200))
    features = await FeatureReader(None).read(body(prompt=ids))
    assert (features.tokens, features.keys(NO_ROOT), features.rows) == (200, told(ids), 1)


async def test_several_prompts_add_up(tokenizer: Tokenizer) -> None:
    features = await FeatureReader(tokenizer).read(body(prompt=[[1] * 70, [2] * 10], n=2))
    assert (features.tokens, features.rows, len(features.keys(NO_ROOT))) == (80, 4, 1)


async def test_a_chat_is_rendered_like_its_replica_renders_it(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]
    plain = [messages[0], {"role": "assistant", "content": "x"}]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    text = tokenizer.render_chat(plain, template=template)
    features = await FeatureReader(tokenizer, template).read(body(messages=messages))
    assert features.keys(NO_ROOT) == told(tokenizer.encode(text, add_special_tokens=False))


async def test_a_cut_body_gives_the_head_s_pages_and_a_length_for_the_rest(tokenizer: Tokenizer) -> None:
    whole = body(max_tokens=5, prompt=TEXT)
    full = await FeatureReader(tokenizer).read(whole)
    cut = await FeatureReader(tokenizer).read(whole[: len(whole) // 2], len(whole))
    head, all_keys = cut.keys(NO_ROOT), full.keys(NO_ROOT)
    assert 4 <= len(head) < len(all_keys)
    assert head == all_keys[: len(head)]
    assert abs(cut.tokens - full.tokens) < 0.1 * full.tokens


async def test_a_page_that_ends_where_a_body_was_cut_is_not_promised(tokenizer: Tokenizer) -> None:
    """The last word of a text that was cut may go on."""
    text = tokenizer.decode(tokenizer.encode(TEXT)[:128])
    assert len(tokenizer.encode(text)) == 128
    head = body(prompt=text)[:-2]
    assert len((await FeatureReader(tokenizer).read(head, 10 * len(head))).keys(NO_ROOT)) == 1


async def test_the_same_head_of_longer_bodies_costs_more(tokenizer: Tokenizer) -> None:
    reader, head = FeatureReader(tokenizer), body(prompt=TEXT)[:-2]
    short, long = [(await reader.read(head, factor * len(head))).tokens for factor in (2, 4)]
    assert long == pytest.approx(2 * short, rel=0.01)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"not json",
        b"[1]",
        b'{"prompt": null}',
        b'{"prompt": [null]}',
        b'{"prompt": [-1]}',
        b'{"messages": 3}',
        b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": 1}}',
        b'{"messages": [{"role": "user", "content": {"a": 1}}], "chat_template_kwargs": 7}',
        b'{"prompt": ["a", [1, "b"]]}',
        b'{"prompt": "a", "n": -3}',
        b'{"prompt": "a", "n": 1000000000000}',
        b'{"prompt": {"a": 1}}',
        b'{"prompt": [[99999999999999999999]]}',
    ],
)
@pytest.mark.parametrize("length", [None, 10**7])
async def test_nonsense_is_sent_on_as_something(tokenizer: Tokenizer, raw: bytes, length: int | None) -> None:
    features = await FeatureReader(tokenizer).read(raw, length)
    assert features.tokens >= 0
    assert 1 <= features.rows <= MOST_ROWS


async def test_a_body_seen_before_is_not_read_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = FeatureReader(tokenizer)
    first = await reader.read(body(prompt=TEXT))
    monkeypatch.setattr(tokenizer, "encode_async", None)
    assert await reader.read(body(prompt=TEXT)) is first


async def test_remembered_prompts_take_no_more_memory_than_the_bound_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.routing.request_features.REMEMBERED_BYTES", 4 * 1000)
    reader = FeatureReader(None)
    for number in range(9):
        first = await reader.read(body(prompt=[number] * 300))
        assert await reader.read(body(prompt=[number] * 300)) is first
        assert reader._held == remembered_bytes(reader) <= 4 * 1000
    assert len(reader._recent) == 3
    long = await reader.read(body(prompt=[1] * 1001))
    assert (len(long.keys(NO_ROOT)), reader._held, len(reader._recent)) == (15, 0, 0)


async def test_equal_bodies_that_come_at_one_time_are_read_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of one prompt by single requests: their prompt counts once against the bound, and each is handed over."""
    encoded: list[str] = []
    encode = tokenizer.encode_async

    async def counted(text: str, special: bool) -> list[int]:
        encoded.append(text)
        await asyncio.sleep(0)  # as where a long text is encoded aside
        return await encode(text, special)

    monkeypatch.setattr(tokenizer, "encode_async", counted)
    reader, long = FeatureReader(tokenizer), TEXT + TEXT
    read = await asyncio.gather(*(reader.read_prompt(body(prompt=long)) for _ in range(8)))
    assert len(encoded) == 1
    features, prompt = read[0]
    assert prompt is not None
    assert prompt.packed == pack_tokens(tokenizer.encode(long))
    assert all(one is read[0] for one in [*read, await reader.read_prompt(body(prompt=long))])
    assert reader._held == remembered_bytes(reader) == len(features.prompt.packed)
    assert not reader._reading


async def test_equal_bodies_beyond_the_bound_leave_the_reader_able_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round of them once added to what seemed to be held, until nothing could be read any more."""
    monkeypatch.setattr("deploy.routing.request_features.REMEMBERED_BYTES", 4 * 1000)
    reader = FeatureReader(Slow())  # type: ignore[arg-type]
    for number in range(20):
        read = await asyncio.gather(*(reader.read(body(prompt=f"{number}{TEXT}"[:300])) for _ in range(8)))
        assert {features.tokens for features in read} == {300}
    assert reader._held == remembered_bytes(reader) == 3 * 1200


async def test_who_is_given_up_does_not_take_the_reading_from_the_others() -> None:
    reader = FeatureReader(Slow())  # type: ignore[arg-type]
    first, second = (asyncio.create_task(reader.read(body(prompt="abc"))) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).tokens == 3
    assert first.cancelled()


class Slow:
    """A tokenizer that is always awaited, with a token for each character."""

    chat_template = None
    cuts = None  # prompts of completions have special tokens around them, so they are not cut

    async def encode_async(self, text: str, special: bool) -> list[int]:
        for _ in range(3):
            await asyncio.sleep(0)
        return [ord(char) for char in text]
