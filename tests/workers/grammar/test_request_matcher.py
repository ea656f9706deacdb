"""Masks of a window are those that a matcher gives that takes one token after the other, without drafts."""

from __future__ import annotations

import json
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xgrammar as xgr
from grammar_model import EOS, TEXTS, THINK_END, text_of, write_grammar_model
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_models import VOCAB
from workers.grammar import compiler as compiler_module
from workers.grammar import matcher as matcher_module
from workers.grammar import rows as rows_module
from workers.grammar.compiler import Compiled, Compiler, NotCompiled
from workers.grammar.matcher import RequestMatcher
from workers.grammar.rows import ConstrainedRows
from workers.protocol.grammar import COMPILED_AT_ONCE, Grammar
from workers.protocol.plan import Admission, BatchLayout, SamplingParams
from workers.step.masks import StepMasks

WORDS = -(-VOCAB // 32)
GRAMMARS = [
    Grammar("json", ""),
    Grammar("json_schema", json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 3})),
    Grammar("choice", '["abc", "abcabc", "10"]'),
    Grammar("regex", "[a-c]*(12|10)+"),
    Grammar("choice", '["ab"]', begin_after=(TEXTS.index(THINK_END),)),
    Grammar("choice", '["ab"]', begin_after=(TEXTS.index("a"), TEXTS.index("a"), TEXTS.index("b"))),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    folder = write_grammar_model(tmp_path_factory.mktemp("v3"))
    compiler = Compiler(folder, VOCAB, (EOS,), lambda grammar_id, error: None)
    return [compiler.compile(grammar) for grammar in GRAMMARS]


def bits_of(mask_B: np.ndarray) -> set[int]:
    return {int(i) for i in np.flatnonzero(np.unpackbits(mask_B.view(np.uint8), bitorder="little"))}


def plain_allowed(compiled: Compiled, tokens: list[int], sampling: SamplingParams) -> set[int] | None:
    """Return what may follow these tokens, by the definition: a fresh matcher takes them one by one. None where one of
    them was not allowed."""
    matcher, begin = xgr.GrammarMatcher(compiled.handle), compiled.grammar.begin_after
    begun = not begin
    for place, token in enumerate(tokens):
        if begun:
            if matcher.is_terminated():
                if token != EOS:
                    return None
            elif not matcher.accept_token(token):
                return None
        elif tuple(tokens[: place + 1][-len(begin) :]) == begin:
            begun = True
    if not begun:
        found = {*range(VOCAB), *range(VOCAB, WORDS * 32)} - {EOS}
    elif matcher.is_terminated():
        found = {EOS}
    else:
        mask_1B = np.zeros((1, WORDS), dtype=np.int32)
        matcher.fill_next_token_bitmask(mask_1B)
        found = {token for token in bits_of(mask_1B) if token < VOCAB}
    if len(tokens) < sampling.min_tokens:
        found = (found - set(sampling.stop_ids)) or found
    return found


@settings(max_examples=120, deadline=None)
@given(data=st.data(), which=st.integers(0, len(GRAMMARS) - 1), width=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_masks_of_a_window(compiled: list[Compiled], data: st.DataObject, which: int, width: int, seed: int) -> None:
    rng, grammar = random.Random(seed), compiled[which]
    sampling = SamplingParams(99, stop_ids=(EOS, 40), min_tokens=data.draw(st.sampled_from([0, 3, 9])))
    matcher = RequestMatcher(grammar, sampling, (EOS,), VOCAB)
    tokens: list[int] = []
    for _ in range(8):
        # Drafts are mostly allowed ones, and now and then any.
        drafts: list[int] = []
        for _ in range(width - 1):
            could = plain_allowed(grammar, tokens + drafts, sampling) or set()
            could = {token for token in could if token < VOCAB}
            drafts.append(rng.choice(sorted(could)) if could and rng.random() < 0.8 else rng.randrange(VOCAB))
        masks_WB = np.full((width, WORDS), 0x5A5A5A5A, dtype=np.int32)
        filled, dead_end = matcher.fill(drafts, list(masks_WB))
        for place in range(filled):
            want = plain_allowed(grammar, tokens + drafts[:place], sampling)
            assert want is not None
            assert bits_of(masks_WB[place]) == want, (tokens, drafts, place)
            assert dead_end == (not want) or place + 1 < filled
            if place + 1 < filled:
                assert drafts[place] in want
        if filled < width and not dead_end:  # nothing behind a draft that is not allowed is read
            assert drafts[filled - 1] not in (plain_allowed(grammar, tokens + drafts[: filled - 1], sampling) or set())
        if dead_end:
            return
        # What is gained: the drafts before some place, and another token behind them.
        gained = drafts[: rng.randrange(filled)]
        behind = [t for t in sorted(plain_allowed(grammar, tokens + gained, sampling) or ()) if t < VOCAB]
        if not behind:
            return
        gained = [*gained, rng.choice(behind)]
        matcher.accept(gained)
        tokens += gained
        assert not matcher.lost
        if EOS in gained:
            return


def test_a_token_that_is_not_allowed_is_told(compiled: list[Compiled]) -> None:
    matcher = RequestMatcher(compiled[2], SamplingParams(9, stop_ids=(EOS,)), (EOS,), VOCAB)
    matcher.accept([TEXTS.index("abc")])
    assert not matcher.lost
    matcher.accept([TEXTS.index("z")])
    assert matcher.lost


def test_tokens_before_one_that_is_not_allowed_are_kept(compiled: list[Compiled]) -> None:
    a, z = TEXTS.index("abc"), TEXTS.index("z")
    rows = ConstrainedRows(VOCAB, (EOS,), lambda grammar_id: compiled[3])
    sampling = SamplingParams(9, stop_ids=(EOS,))
    for history in ((), (a,)):
        rows.admit([Admission(0, sampling, generated=len(history), history=history, grammar=1)])
        assert rows.gained([0], [[a, a]], [0]) == {}
        assert rows.gained([0], [[a, z, a]], [0]) == {0: 1}
        assert rows.gained([0], [[a]], [0]) == {0: 0}


class Thread:
    """The clocks of a thread that computes and waits for a processor as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch, self.own, self.now = monkeypatch, 0.0, 0.0
        clocks = SimpleNamespace(thread_time=lambda: self.own, perf_counter=lambda: self.now)
        monkeypatch.setattr("workers.grammar.matcher.time", clocks)

    def for_seconds(self, of: Any, name: str, computing: Sequence[float], waiting: Sequence[float] = ()) -> None:
        """The next calls of a method compute for so long, and wait."""
        method, times = getattr(of, name), iter(zip(computing, waiting or [0.0] * len(computing), strict=True))

        def timed(*args: Any) -> Any:
            own, waited = next(times, (0.0, 0.0))
            self.own += own
            self.now += own + waited
            return method(*args)

        self.patch.setattr(of, name, timed)


def test_tokens_before_a_costly_one_or_a_costly_mask_are_kept(
    compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, sampling = TEXTS.index("a"), SamplingParams(9, stop_ids=(EOS,))
    computing = Thread(monkeypatch)
    matcher = RequestMatcher(compiled[3], sampling, (EOS,), VOCAB)
    computing.for_seconds(matcher._matcher, "accept_token", [0.0, 0.0, 7.0])
    assert matcher.accept([a, a, a]) == 2
    assert matcher.lost
    masks = list(np.zeros((3, WORDS), dtype=np.int32))
    matcher = RequestMatcher(compiled[3], sampling, (EOS,), VOCAB)
    computing.for_seconds(matcher._matcher, "fill_next_token_bitmask", [0.0, 7.0])
    assert matcher.fill([a, a], masks) == (2, False)
    assert matcher.accept([a, a]) == 1
    assert matcher.lost


def test_waiting_for_a_processor_is_not_computing(compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does what came before count, however long it took."""
    a, computing = TEXTS.index("a"), Thread(monkeypatch)
    matcher = RequestMatcher(compiled[3], SamplingParams(9, stop_ids=(EOS,)), (EOS,), VOCAB)
    computing.for_seconds(matcher._matcher, "accept_token", [0.09, 0.09, 0.0, 0.09], waiting=[0.0, 0.0, 60.0, 60.0])
    assert matcher.accept([a, a, a, a]) == 4
    computing.for_seconds(matcher._matcher, "fill_next_token_bitmask", [0.0], waiting=[60.0])
    assert matcher.fill((), list(np.zeros((1, WORDS), dtype=np.int32))) == (1, False)
    assert not matcher.lost


def test_a_costly_grammar_is_given_up(compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.grammar.matcher.COSTLY_S", -1.0)
    matcher = RequestMatcher(compiled[2], SamplingParams(9, stop_ids=(EOS,)), (EOS,), VOCAB)
    matcher.accept([TEXTS.index("abc")])
    assert matcher.lost


def test_a_grammar_whose_masks_are_costly_is_given_up(
    compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first mask is used, none behind it is filled, and the request ends with the tokens of that step."""
    monkeypatch.setattr("workers.grammar.matcher.COSTLY_S", -1.0)
    matcher = RequestMatcher(compiled[2], SamplingParams(9, stop_ids=(EOS,)), (EOS,), VOCAB)
    masks = np.zeros((2, -(-VOCAB // 32)), dtype=np.int32)
    assert matcher.fill([TEXTS.index("abc")], list(masks)) == (1, False)
    assert matcher.lost


UMLAUTS = {"type": "object", "properties": {"größe": {"enum": ["é1"]}}, "required": ["größe"]}
EITHER = {"type": "or", "elements": [{"type": "const_string", "value": text} for text in ("éd", "a")]}
LITERALS = [
    (Grammar("choice", '["ße", "x"]'), "ße", "\u0dfe"),
    (Grammar("choice", '["\\u0000a", "a"]'), "\0a", ""),
    (Grammar("json_schema", json.dumps(UMLAUTS, ensure_ascii=False), strict=True), '{"größe": "é1"}', '{"gr'),
    (Grammar("regex", "[ße]é1"), "eé1", "\u0dfe"),
    (Grammar("regex", "[^ße]"), "a", "ß"),
    (Grammar("ebnf", 'root ::= "a" | "\\u00dfe" [ße]'), "ßee", "\u0dfe"),
    (Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": EITHER})), "éd", "e"),
]


@pytest.mark.parametrize(("grammar", "taken", "not_taken"), LITERALS)
def test_letters_before_digits_are_themselves(tmp_path: Path, grammar: Grammar, taken: str, not_taken: str) -> None:
    """Letters such as ß before one that may be a hexadecimal digit, which xgrammar's cache makes another letter of."""
    compiler = Compiler(write_grammar_model(tmp_path), VOCAB, (EOS,), lambda grammar_id, error: None)
    handle = compiler.compile(grammar).handle
    for text, right in ((taken, True), (not_taken, False)):
        matcher = xgr.GrammarMatcher(handle, terminate_without_stop_token=True)
        assert (matcher.accept_string(text) and matcher.is_terminated()) == right


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar("regex", "(a"), "position"),
        (Grammar("ebnf", "root ::= root"), "no text"),
        (Grammar("regex", "~+"), "no text"),
        (Grammar("ebnf", 'root ::= Regex("a")'), "Regex"),
    ],
)
def test_what_cannot_be_compiled_says_why(tmp_path: Path, grammar: Grammar, text: str) -> None:
    compiler = Compiler(write_grammar_model(tmp_path), VOCAB, (EOS,), lambda grammar_id, error: None)
    with pytest.raises(NotCompiled, match=text):
        compiler.compile(grammar)


@pytest.mark.parametrize(("eos_ids", "text"), [((), "end-of-sequence"), ((EOS,), "tokenizer")])
def test_a_model_that_can_have_no_grammar_starts_all_the_same(
    tmp_path: Path, eos_ids: tuple[int, ...], text: str
) -> None:
    """The model says why when a grammar is asked for."""
    before, failed = set(threading.enumerate()), []
    compiler = Compiler(tmp_path, VOCAB, eos_ids, lambda grammar_id, error: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", failed.append)
        compiler.prepare()
        for thread in set(threading.enumerate()) - before:
            thread.join(60)
    assert not failed
    with pytest.raises(NotCompiled, match=text):
        compiler.compile(GRAMMARS[0])


def test_what_is_forgotten_before_its_turn_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered: queue.Queue[int] = queue.Queue()
    compiler = Compiler(tmp_path, VOCAB, (EOS,), lambda grammar_id, error: answered.put(grammar_id))
    begun, go_on = threading.Semaphore(0), threading.Event()

    def compile(grammar: Grammar, started: Callable[[], None]) -> Compiled:
        begun.release()
        assert go_on.wait(60)
        return Compiled(grammar, None)

    monkeypatch.setattr(compiler, "compile", compile)
    for grammar_id in range(1, COMPILED_AT_ONCE + 3):
        compiler.ask(grammar_id, Grammar("regex", str(grammar_id)))
    for _ in range(COMPILED_AT_ONCE):
        assert begun.acquire(timeout=60)
    compiler.forget(COMPILED_AT_ONCE + 1)
    go_on.set()
    tickets = [answered.get(timeout=60) for _ in range(COMPILED_AT_ONCE + 1)]
    assert sorted(tickets) == [*range(1, COMPILED_AT_ONCE + 1), COMPILED_AT_ONCE + 2]
    compiler.close()


def test_reports_say_how_long_a_processor_has_worked_on_a_grammar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports do not say how long a grammar is under way: one waits, as on a machine that is busy, and one computes."""
    worked: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
    over = threading.Event()
    monkeypatch.setattr(compiler_module, "PROGRESS_PERIOD_S", 0.02)
    compiler = Compiler(tmp_path, VOCAB, (EOS,), lambda *told: None, lambda *told: worked.put(told))

    def compile(grammar: Grammar, started: Callable[[], None]) -> Compiled:
        if grammar.text != "never begun":
            started()
        while grammar.text == "computes" and not over.is_set():
            sum(range(1000))
        assert over.wait(60)
        return Compiled(grammar, None)

    monkeypatch.setattr(compiler, "compile", compile)
    for grammar_id, text in enumerate(("computes", "waits", "never begun"), 1):
        compiler.ask(grammar_id, Grammar("regex", text))
    most = {1: 0.0, 2: 0.0}
    deadline = time.monotonic() + 60
    while most[1] < 0.2 and time.monotonic() < deadline:
        grammar_id, seconds = worked.get(timeout=60)
        assert seconds >= most[grammar_id]
        most[grammar_id] = seconds
    over.set()
    compiler.close()
    assert most[1] >= 0.2
    assert most[2] < 0.05


@pytest.mark.parametrize("slow", [(), (1,), (5, 7), (1, 5, 7)])
def test_a_mask_belongs_to_a_position_of_a_row(compiled: list[Compiled], slow: tuple[int, ...]) -> None:
    """Rows with and without grammars, final prompts among them: the index says whose each mask is, also where some
    take so long that they are filled beside the others. Where none do, masks lie side by side."""
    import torch

    rows = ConstrainedRows(VOCAB, (EOS,), lambda grammar_id: compiled[grammar_id])
    sampling = SamplingParams(9, stop_ids=(EOS,))
    rows.admit([Admission(slot, sampling, grammar=which) for slot, which in ((5, 2), (1, 3), (7, 1))])
    abc, z = TEXTS.index("abc"), TEXTS.index("z")
    rows.drafted(5, [abc, z])
    rows.drafted(1, [z, z])
    layout = BatchLayout(3, 3, (4, 6), (True, False))
    masks = StepMasks(20, VOCAB, torch.device("cpu"))
    masks.clear()
    for slot in slow:
        rows._matcher_of[slot].slow = True
    # Decode rows of slots 5 (grammar), 2 (none), 1 (grammar), and the end of a prompt in slot 7.
    assert rows.fill(layout, [5, 2, 1, 7], [5, 1, 7], masks) == {}
    got = masks.upload()
    index = got.index_N.tolist()
    assert [n for n in range(20) if index[n] >= 0] == [0, 1, 6, 9]
    places = sorted(i for i in index if i >= 0)
    assert len(set(places)) == 4
    assert slow or places == [0, 1, 2, 3]
    words = {n: got.bits_MB[index[n]].numpy() for n in (0, 1, 6, 9)}
    want = {
        0: plain_allowed(compiled[2], [], sampling),
        1: plain_allowed(compiled[2], [abc], sampling),
        6: plain_allowed(compiled[3], [], sampling),
        9: plain_allowed(compiled[1], [], sampling),
    }
    assert {n: bits_of(mask_B) for n, mask_B in words.items()} == want


def test_masks_that_take_long_are_filled_at_the_same_time(
    compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(rows_module.os, "sched_getaffinity", lambda _: {0, 1})
    rows, both = (
        ConstrainedRows(VOCAB, (EOS,), lambda grammar_id: compiled[grammar_id]),
        threading.Barrier(2, timeout=60),
    )
    rows.admit([Admission(slot, SamplingParams(9), grammar=2) for slot in range(2)])
    for matcher in rows._matcher_of.values():
        matcher.slow, honest = True, matcher.fill
        monkeypatch.setattr(matcher, "fill", lambda *what, honest=honest: (both.wait(), honest(*what))[1])
    assert rows.fill(BatchLayout(1, 2), [0, 1], [0, 1], StepMasks(2, VOCAB, torch.device("cpu"))) == {}


def test_a_row_is_slow_as_long_as_its_masks_are(compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = RequestMatcher(compiled[2], SamplingParams(9), (EOS,), VOCAB)
    assert not matcher.slow
    for seconds in (-1.0, 60.0):
        monkeypatch.setattr(matcher_module, "SLOW_S", seconds)
        matcher.fill((), [np.zeros(WORDS, dtype=np.int32)])
        assert matcher.slow == (seconds < 0)


def test_a_preempted_request_begins_behind_what_it_had(compiled: list[Compiled]) -> None:
    tokens = [TEXTS.index("a"), TEXTS.index("b")]
    sampling = SamplingParams(9, stop_ids=(EOS,))
    rows = ConstrainedRows(VOCAB, (EOS,), lambda grammar_id: compiled[2])
    rows.admit([Admission(0, sampling, generated=2, history=tuple(tokens), grammar=1)])
    assert rows.gained([0], [[TEXTS.index("c")]], [0]) == {}
    assert rows.gained([0], [[TEXTS.index("x")]], [0]) == {0: 0}
    assert text_of(tokens) == "ab"
