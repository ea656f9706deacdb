"""A text before the constraint that is closed in time: which tokens its masks allow, and that tokens are the same at
every width."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grammar_model import EOS, TEXTS, THINK_END, text_of, write_grammar_model

from tests.tiny_models import VOCAB
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.grammar.compiler import Compiled, Compiler
from workers.grammar.matcher import OPENING, RequestMatcher
from workers.protocol.grammar import COMPILED_AT_ONCE, ForgetGrammar, Grammar, GrammarReady
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams
from workers.protocol.request import Prompt
from workers.scheduler.grammars import Grammars
from workers.scheduler.sequence import Sequence, Tokens

WORDS = -(-VOCAB // 32)
THINK, OPEN, CALL = TEXTS.index(THINK_END), TEXTS.index("<"), TEXTS.index("ab")
A, B, C = (TEXTS.index(letter) for letter in "abc")
ALL = set(range(VOCAB))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_grammar_model(tmp_path_factory.mktemp("v3"))


def next_of(compiled: Compiled, tokens: list[int], sampling: SamplingParams | None = None) -> set[int]:
    """The ids that may follow these tokens."""
    matcher = RequestMatcher(compiled, sampling or SamplingParams(99, stop_ids=(EOS,)), (EOS,), VOCAB)
    matcher.accept(tokens)
    assert not matcher.lost
    mask_B = np.zeros(WORDS, dtype=np.int32)
    assert matcher.fill([], [mask_B]) == (1, False)
    return {int(i) for i in np.flatnonzero(np.unpackbits(mask_B.view(np.uint8), bitorder="little"))} & ALL


def free(**more: Any) -> Compiled:
    return Compiled(Grammar("free", begin_after=(THINK,), **more), None)


def test_the_tag_is_forced_in_time() -> None:
    bound = free(most_before=4)
    for count in range(3):
        assert next_of(bound, [A] * count) == ALL
    assert next_of(bound, [A] * 3) == {THINK}
    assert next_of(bound, [A] * 3 + [THINK]) == ALL
    assert next_of(bound, [A, THINK, *[B] * 9]) == ALL
    assert next_of(free(most_before=1), []) == {THINK}
    assert next_of(bound, [A] * 3, SamplingParams(99, stop_ids=(EOS, THINK), min_tokens=9)) == {THINK}
    assert next_of(bound, [A, THINK], SamplingParams(99, stop_ids=(EOS,), min_tokens=9)) == ALL - {EOS}


def test_an_end_of_several_tokens_is_forced_as_a_whole() -> None:
    bound = Compiled(Grammar("free", begin_after=(A, A, B), most_before=5), None)
    assert next_of(bound, [C]) == ALL
    assert next_of(bound, [C, C]) == {A}
    assert next_of(bound, [C, C, A]) == {A}
    assert next_of(bound, [C, C, A, A]) == {B}
    assert next_of(bound, [C, A]) == {A}
    assert next_of(bound, [C, C, A, A, B]) == ALL


def test_a_call_ends_it_too() -> None:
    bound = free(most_before=4, begun_by=(CALL,))
    assert next_of(bound, [A, CALL, *[B] * 9]) == ALL


def test_a_text_that_the_model_may_open_itself() -> None:
    bound = free(most_before=3, opened_by=(OPEN,))
    assert next_of(bound, [OPEN, A]) == {THINK}
    assert next_of(bound, [A, OPEN, B]) == {THINK}
    assert next_of(bound, [A, OPEN, B, THINK, C]) == ALL
    assert next_of(bound, [A] * 3) == ALL
    assert next_of(bound, [A] * OPENING + [OPEN, B, C]) == ALL


def test_a_constraint_begins_behind_it(folder: Path) -> None:
    compiler = Compiler(folder, VOCAB, (EOS,), lambda grammar_id, error: None)
    choice = Grammar("choice", '["abc"]', begin_after=(THINK,), begun_by=(CALL,), most_before=4)
    bound = compiler.compile(choice)
    assert next_of(bound, [C]) == ALL - {EOS}
    assert next_of(bound, [C] * 3) == {THINK}
    for begun in ([C] * 3 + [THINK], [THINK]):
        assert next_of(bound, begun) == {A, CALL, TEXTS.index("abc")}
    assert next_of(bound, [C, CALL]) == {C}


def test_special_tokens_that_are_spelled(folder: Path) -> None:
    """`<|bos|>` is no text but where a grammar says that it is, as markers of calls may have to be."""
    compiler = Compiler(folder, VOCAB, (EOS,), lambda grammar_id, error: None)
    regex = r"<\|bos\|>x"
    assert next_of(compiler.compile(Grammar("regex", regex)), []) == {OPEN}
    assert next_of(compiler.compile(Grammar("regex", regex, spelled=(0,))), []) == {OPEN, 0}


def test_masks_of_a_window_are_those_of_its_tokens_one_by_one() -> None:
    draw = random.Random(0)
    for most, width in itertools.product((1, 2, 5), (2, 3, 4)):
        for bound in (free(most_before=most, begun_by=(CALL,)), free(most_before=most, opened_by=(OPEN,))):
            sampling = SamplingParams(99, stop_ids=(EOS,))
            matcher, tokens = RequestMatcher(bound, sampling, (EOS,), VOCAB), []
            for _ in range(6):
                drafts = [draw.choice([A, B, OPEN, THINK, CALL]) for _ in range(width - 1)]
                masks_WB = np.zeros((width, WORDS), dtype=np.int32)
                filled, dead_end = matcher.fill(drafts, list(masks_WB))
                assert not dead_end
                for place in range(filled):
                    bits = np.flatnonzero(np.unpackbits(masks_WB[place].view(np.uint8), bitorder="little"))
                    assert {int(i) for i in bits} & ALL == next_of(bound, tokens + drafts[:place])
                allowed = next_of(bound, tokens + drafts[: filled - 1])
                gained = [*drafts[: filled - 1], draw.choice(sorted(allowed & {A, B, THINK}))]
                matcher.accept(gained)
                tokens += gained


@pytest.mark.long
def test_tokens_are_the_same_at_every_width(folder: Path) -> None:
    """There is a form behind the text or none, sampling is greedy or drawn, and other rows are free."""
    form = Grammar("choice", '["abc", "a true tale"]')
    asked: list[SamplingParams] = []
    for seed, most in enumerate((1, 2, 5, 9, 30)):
        sampler: dict[str, Any] = {"temperature": 0.0 if seed % 2 else 1.2, "seed": seed, "stop_ids": (EOS,)}
        grammar = Grammar("free", begin_after=(THINK,), most_before=most)
        asked += [
            SamplingParams(40, grammar=grammar, **sampler),
            SamplingParams(60, grammar=Grammar("choice", form.text, begin_after=(THINK,), most_before=most), **sampler),
            SamplingParams(20, **sampler),
        ]
    prompts = [[5 + index, 9, 30] for index in range(len(asked))]

    def run(**settings: Any) -> list[list[int]]:
        defaults = {"max_rows": 8, "token_budget": 150, "cache_pages": 160, "max_context": 500, "selftest": False}
        config = EngineConfig(model=str(folder), device="cpu", invariant=True, **{**defaults, **settings})
        return InlineEngine(config).generate(prompts, asked)

    tokens = run(width=1)
    for params, got in zip(asked, tokens, strict=True):
        if params.grammar is None:
            continue
        most = params.grammar.most_before
        ended = got[:-1] if got[-1] == EOS else got
        assert THINK in got[:most] or len(ended) < most
        if params.grammar.kind == "choice":
            assert text_of(got[got.index(THINK) + 1 :]) in ("abc", "a true tale")
    assert run(width=3) == tokens
    assert run() == tokens


def test_any_text_is_ready_at_once_however_busy_the_compilers_are(folder: Path) -> None:
    """The scheduler admits it with the next plan, before which rank 0 hears of it; no vocabulary is needed."""
    news: list[tuple[int, str]] = []
    compiler = Compiler(folder / "nowhere", VOCAB, (EOS,), lambda *told: news.append(told))
    bound = Grammar("free", begin_after=(THINK,), most_before=4)
    compiler.ask(7, bound)
    assert (compiler.ready(7).grammar, news) == (bound, [(7, "")])
    now = [0.0]
    grammars = Grammars(1.0, lambda: now[0])
    for seed in range(COMPILED_AT_ONCE):
        grammars.take(sequence(), Grammar("regex", f"{seed}"))
    now[0] = 2.0
    assert grammars.why_refused(Grammar("regex", "x")) is not None
    assert grammars.why_refused(bound) is None
    user = sequence()
    assert grammars.take(user, bound)
    grammars.leave(user)
    assert isinstance(grammars.outbox[-1], ForgetGrammar)
    assert grammars.answered(GrammarReady(COMPILED_AT_ONCE + 1)) == []


def sequence() -> Sequence:
    prompt = Prompt.of((1,))
    request = Request("r", (1,), SamplingParams(9))
    return Sequence(request, (0, 0), 10, Tokens(prompt), frozenset(), 1, -1)
