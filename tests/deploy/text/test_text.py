"""Incremental detokenisation against full decode, stop strings against the definition, chat templates."""

import asyncio
import json
import re
import shutil
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizer import TEMPLATE, TEXTS, backend, tiny
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from deploy.text.detok import ByteDetokenizer, WindowDetokenizer
from deploy.text.stop import StopMatcher
from deploy.text.template import check_template, syntax_problem
from deploy.text.tokenizer import INLINE_CHARS, LONG_CHARS, ChatTemplateError, Tokenizer
from workers.vocabulary.spelling import byte_alphabet

DEMO = Path(__file__).resolve().parents[3] / "assets" / "demo"
TOKENS = tiny().size


@given(st.text(max_size=60))
@example("👩‍🚀 e\u0301 \ufffd \ufffd")
@example("<|assistant|> is a token of its own")
def test_encoded_text_comes_back_piece_by_piece(text: str) -> None:
    tokenizer = tiny()
    stream = tokenizer.detokenizer(False)
    pieces = [stream.push(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    assert "".join(pieces) == text  # nothing is left for flush: the text ends with a whole character
    assert stream.flush() == ""


@given(st.lists(st.integers(0, TOKENS + 5), max_size=40), st.booleans())
def test_any_ids_decode_as_at_once(ids: list[int], skip: bool) -> None:
    tokenizer = tiny()
    stream = tokenizer.detokenizer(skip)
    assert isinstance(stream, ByteDetokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids, skip)


@given(st.lists(st.integers(0, TOKENS - 1), max_size=30))
def test_no_piece_shows_part_of_a_character(ids: list[int]) -> None:
    """The text that is shown after any token begins the text that is shown in the end, whatever follows."""
    tokenizer = tiny()
    stream, shown = tokenizer.detokenizer(False), ""
    for count, token in enumerate(ids, 1):
        shown += stream.push(token)
        raw = b"".join(tokenizer.token_bytes(one) for one in ids[:count])
        # U+00E9 continues any pending lead byte or not: in both cases what was shown must stand.
        for more in (b"", b"\xa9", b"x", b"\x80\x80\x80"):
            assert (raw + more).decode("utf-8", "replace").startswith(shown)


def sentencepiece_like(kind: str) -> Backend:
    tokenizer = Backend(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<s>", *alphabet], show_progress=False)
    tokenizer.train_from_iterator(TEXTS[:2], trainer)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps) if kind == "fallback" else decoders.Metaspace()
    return tokenizer


SENTENCEPIECE = {kind: sentencepiece_like(kind) for kind in ("fallback", "metaspace")}


@pytest.mark.parametrize("kind", SENTENCEPIECE)
@settings(deadline=None)  # each example makes a tokenizer
@given(words=st.lists(st.sampled_from(["the", "fox", "Köln", "東京", "👩‍🚀", "of", " ", "\n", "a"]), max_size=12))
def test_other_decoders_go_through_the_window(kind: str, words: list[str]) -> None:
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=SENTENCEPIECE[kind], unk_token="<unk>"))
    ids = tokenizer.encode(" ".join(words), add_special_tokens=False)
    stream = tokenizer.detokenizer(False)
    assert isinstance(stream, WindowDetokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids, False)


def test_incomplete_bytes_at_the_end_become_a_replacement_character() -> None:
    tokenizer = tiny()
    lead = tokenizer.encode("東", add_special_tokens=False)[:1]
    stream = tokenizer.detokenizer()
    assert stream.push(lead[0]) == ""
    assert stream.flush() == "\ufffd" == tokenizer.decode(lead)


def test_the_byte_alphabet_is_the_library_s() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for code in (0x20, 0x7F, 0xAD, 0xE9, 0x4E2D, 0x1F680):
        spelled = "".join(part for part, _ in pre.pre_tokenize_str(chr(code)))
        assert bytes(alphabet[char] for char in spelled) == chr(code).encode()


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(begin, end) by definition: the stop string that ends first, among those the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end - max(map(len, found)), end
    return None


small_text = st.text(alphabet="ab-]^", max_size=30)
small_stops = st.lists(st.text(alphabet="ab-]^", min_size=1, max_size=5), min_size=1, max_size=5)


@settings(max_examples=300)
@given(small_text, small_stops, st.lists(st.integers(0, 30), max_size=8), st.booleans())
@example("aaab", ["aab", "aaab"], [1, 2, 3], False)
@example("abab", ["bab", "ab"], [], True)
def test_stop_strings_by_definition_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    matcher, shown = StopMatcher(tuple(stops), include), ""
    where = first_stop(text, stops)
    kept = text if where is None else text[: where[1] if include else where[0]]
    for begin, end in pairwise(bounds):
        shown += matcher.feed(text[begin:end])
        assert kept.startswith(shown)  # never a character of a stop string, at any moment
        if matcher.matched is not None:
            break
        # What is held back is no more than what could still become a stop string.
        held = text[len(shown) : end]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    if where is None:
        assert matcher.matched is None
        shown += matcher.flush()
    else:
        assert matcher.matched == text[where[0] : where[1]]
    assert shown == kept


def test_many_long_stop_strings_cost_linear_time() -> None:
    stops = tuple("a" * 511 + chr(0x100 + i) for i in range(16))
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed("a") for _ in range(20_000)) + matcher.flush()
    assert shown == "a" * 20_000


def test_long_stop_strings_take_little_memory() -> None:
    """Automata are kept for the next request, and a client may bring other stop strings each time."""
    drawn = Random(1)
    stops = tuple("".join(drawn.choices("abcdeföü東京", k=512)) for _ in range(16))
    tracemalloc.start()
    try:
        matcher = StopMatcher(stops)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 40 * 16 * 512
    assert matcher.feed("a" + stops[3]) == "a"
    assert matcher.matched == stops[3]


def test_text_stream_holds_back_across_tokens() -> None:
    tokenizer = tiny()
    ids = tokenizer.encode("the fox STOP over", add_special_tokens=False)
    stream = tokenizer.stream(stops=("STOP",))
    shown = []
    for token in ids:
        shown.append(stream.push(token))
        if stream.stop is not None:
            break
    assert "".join(shown) == "the fox "
    assert stream.stop == "STOP"


async def test_the_longest_texts_are_encoded_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a lot of memory meanwhile, also when its client's time is over; others pass them by."""
    tokenizer = Tokenizer.load(DEMO)
    assert tokenizer is not None
    go, running = threading.Semaphore(0), []

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > LONG_CHARS:
            running.append(text)
            go.acquire()
        return [len(text)]

    monkeypatch.setattr(tokenizer, "encode", encode)
    sizes = [LONG_CHARS + 1 + number for number in range(4)]
    tasks = [asyncio.create_task(tokenizer.encode_async("x" * size)) for size in sizes]
    for number, task in enumerate(tasks):
        while len(running) <= number:
            await asyncio.sleep(0.01)
        assert await tokenizer.encode_async("x" * LONG_CHARS) == [LONG_CHARS]
        if number == 1:
            task.cancel()
            assert (await asyncio.gather(task, return_exceptions=True))[0].__class__ is asyncio.CancelledError
            await asyncio.sleep(0.05)
        assert len(running) == number + 1
        go.release()
        if number != 1:
            assert await task == [sizes[number]]


@pytest.mark.alone
async def test_a_long_text_leaves_the_event_loop_its_turns() -> None:
    """A thread that kept the interpreter would hold every stream up, and after some seconds look like a front that
    hangs."""
    tokenizer = Tokenizer.load(DEMO)
    assert tokenizer is not None

    async def beside(begin: Callable[[], Awaitable[Any]]) -> Any:
        """Do it again until it leaves half of its time or more to the loop: a machine that stands still for a moment
        takes turns, too."""
        shares: list[float] = []
        for _ in range(10):
            work = asyncio.ensure_future(begin())
            begun = last = time.perf_counter()
            longest = 0.0
            while not work.done():
                await asyncio.sleep(0.005)
                longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
            shares.append(longest / (last - begun))
            if shares[-1] < 0.5:
                return work.result()
        raise AssertionError(f"the longest gaps, as shares of the whole: {shares}")

    text = "def foo(x): return x + 1\n" * 2**15
    ids = await beside(lambda: tokenizer.encode_async(text))
    assert await beside(lambda: tokenizer.decode_async(8 * ids)) == 8 * text


async def test_long_and_many_texts_are_encoded_aside() -> None:
    tokenizer = tiny()
    for texts in (["a", "the fox"], ["the fox " * 2000], ["fox"] * 3000):
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0)

        heart = asyncio.create_task(beat())
        ids = await tokenizer.encode_all_async(texts)
        heart.cancel()
        assert ids == [tokenizer.encode(text) for text in texts]
        assert (beats > 0) == (sum(map(len, texts)) > INLINE_CHARS)
        assert await tokenizer.encode_async(texts[0], False) == tokenizer.encode(texts[0], False)
    long = tokenizer.encode("the fox " * 4000, False)
    assert await tokenizer.decode_async(long) == "the fox " * 4000


def test_bytes_that_are_not_utf_8_are_no_text() -> None:
    with pytest.raises(ValueError, match="not UTF-8"):
        tiny().encode(b"the \xff fox".decode("utf-8", "surrogateescape"))


def test_chat_template_and_its_rejections() -> None:
    tokenizer = tiny()
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "<|system|>be brief<|user|>hi<|assistant|>"
    assert tokenizer.render_chat(messages, template="{{ x }}", extra={"x": "y"}) == "y"
    open_end = [*messages, {"role": "assistant", "content": "Sure, "}]
    text = tokenizer.render_chat(open_end, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|system|>be brief<|user|>hi<|assistant|>Sure, "
    with pytest.raises(ChatTemplateError, match="may be loud"):
        tokenizer.render_chat(messages, extra={"loud": True})
    with pytest.raises(ChatTemplateError, match="may be loud"):  # not what it says of what was tried in its place
        tokenizer.render_chat([*messages, messages[0]], extra={"loud": True})
    assert tokenizer.render_chat(messages[::-1]) == "<|user|>hi\n\nbe brief<|assistant|>"
    with pytest.raises(ChatTemplateError, match="must not set tokenize"):
        tokenizer.render_chat(messages, extra={"tokenize": True})
    with pytest.raises(ChatTemplateError, match="rejects"):
        tokenizer.render_chat(messages, template="{{ nothing.at.all }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ x }}",
        "{% for m in messages %}{% if m.x %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
        "{% generation %}{{ x }}{% endgeneration %}{{ raise_exception('no') if x }}",
        "{% generation %}{{ x }}",
        "{{ x",
        "{% for m in messages %}{{ m }}",
        "{% nonsense %}",
        "{{ x | no_filter_of_this_name }}",
    ],
)
def test_template_syntax_is_as_transformers_reads_it(template: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    try:
        tiny().render_chat(messages, template=template, extra={"x": ""})
    except ChatTemplateError:
        assert syntax_problem(template)
    else:
        assert syntax_problem(template) is None


BROKEN = [
    ("{{ messages[0].content", "user: line 1: "),
    ("{{ messages[0].content | no_filter_of_this_name }}", "user: line 1: No filter named"),
    ("{{ messages[0]['content'].no_method() }}", "user: "),
    ("{{ nothing.at.all }}", "user: 'nothing' is undefined"),
    (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content | tojson(x=1) }}{% endif %}{% endfor %}",
        "system",
    ),
    ("{% for m in messages %}{{ m.content + 1 if m.role == 'assistant' }}{% endfor %}", "user and assistant: "),
]
SOUND = [
    TEMPLATE,
    "{{ messages[-1].content }}{% if tools %}{{ tools.at.all }}{% endif %}",
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}x",
    "{% if messages[0].role != 'system' %}{{ raise_exception('a system message is needed') }}{% endif %}x",
    "{{ raise_exception('never') }}",
    "{% generation %}{{ messages | tojson }}{% endgeneration %}",
]


@pytest.mark.parametrize(("template", "says"), BROKEN)
@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json", None])
def test_a_broken_template_is_found_before_a_client_uses_it(
    tmp_path: Path, template: str, says: str, file: str | None
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text(backend().to_str())
    settings: dict[str, str] = {"chat_template": template} if file == "tokenizer_config.json" else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if file == "chat_template.jinja":
        (tmp_path / file).write_text(template)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    source = f"in {tmp_path / file}" if file else "given as api.chat_template"
    with pytest.raises(ValueError, match=re.escape(f"the chat template {source} cannot write a chat of ")) as found:
        check_template(tokenizer, tmp_path, None if file else template)
    assert says in str(found.value)


@pytest.mark.parametrize("template", [None, *SOUND])
def test_a_template_that_refuses_in_its_own_words_is_sound(tmp_path: Path, template: str | None) -> None:
    check_template(tiny(), tmp_path, template)


def test_a_replica_that_would_refuse_every_chat_does_not_start(tmp_path: Path) -> None:
    from deploy.config.application import ServeConfig
    from deploy.serve.replica import read_tokenizer
    from workers.protocol.front import EngineFault

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    config = ServeConfig.model_validate({"engine": {"model": str(tmp_path)}})
    assert read_tokenizer(config) is not None
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content")
    with pytest.raises(EngineFault, match=re.escape(f"in {tmp_path / 'chat_template.jinja'} cannot write")) as found:
        read_tokenizer(config)
    assert found.value.lasting


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.skipif(not (DEMO / "tokenizer.json").exists(), reason="the demo model is not built")
def test_the_demo_tokenizer_is_read_as_it_lies() -> None:
    tokenizer = Tokenizer.load(DEMO)
    assert tokenizer is not None
    text = Path(__file__).read_text()
    ids = tokenizer.encode(text)
    assert ids == Backend.from_file(str(DEMO / "tokenizer.json")).encode(text).ids
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    assert tokenizer.token_string(ids[0]) == config["bos_token"]
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]).endswith("hi<|assistant|>")
