"""Answers that are not in the canonical form: no call is lost, none is invented, and no marker reaches the content."""

from __future__ import annotations

import random

import pytest
from drawn_answers import KINDS, OUTPUTS, REASONING, Drawn, Writer, drawn_answers
from written_calls import CONTROL, WRITERS, Found, events_of, found, parser, with_ending

from deploy.parsing.registry import TOOL_PARSERS

FORMATS = sorted(KINDS)


def read(drawn: Drawn, pieces: list[str]) -> Found:
    reasoning = None if drawn.thought is None else REASONING[drawn.name]
    return found(events_of(parser(drawn.name, reasoning, "inside"), pieces))


def pieces_of(text: str, draw: random.Random) -> list[str]:
    places = sorted(draw.randrange(len(text) + 1) for _ in range(draw.choice([1, 3, 9, 60])))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("name", FORMATS)
def test_every_drawn_answer_is_read_as_it_was_meant(name: str) -> None:
    seen: dict[str, int] = dict.fromkeys(KINDS[name], 0)
    for drawn in drawn_answers(name):
        answer = read(drawn, [drawn.text])
        assert answer.calls == drawn.calls, (drawn, answer)
        assert len(set(answer.ids)) == len(answer.ids), (drawn, answer)
        assert CONTROL[name].search(answer.content) is None, (drawn, answer)
        assert "</think>" not in answer.content
        assert "[/THINK]" not in answer.content
        assert "DSML" not in answer.content
        assert answer.reasoning == (drawn.thought or "")
        if not drawn.cut:
            assert answer.content.split() == drawn.words, (drawn, answer)
            assert not answer.broken
        for kind in drawn.kinds:
            seen[kind] += 1
        draw = random.Random(drawn.text)
        assert read(drawn, pieces_of(drawn.text, draw)) == answer
        assert read(drawn, pieces_of(drawn.text, draw)) == answer
        assert read(drawn, list(drawn.text)) == answer
    assert OUTPUTS >= 400
    assert min(seen.values()) >= 5, seen


def test_every_parser_has_its_answers() -> None:
    """Those of Hy4 are GLM's, see below."""
    assert {*FORMATS, "hy_v4"} == set(TOOL_PARSERS)


@pytest.mark.parametrize("name", FORMATS)
def test_without_deviations_answers_are_canonical(name: str) -> None:
    for seed in range(50):
        drawn = Writer(name, random.Random(seed), frozenset()).answer()
        assert drawn.text == WRITERS[name](drawn.calls)


def test_hy4_is_read_as_glm_whatever_ends_its_tags() -> None:
    """Its calls are GLM's; the tag around them all may be missing, or stand around a part of them."""
    assert set(WRITERS) - set(FORMATS) == {"hy_v4"}
    for drawn in drawn_answers("glm"):
        reasoning = None if drawn.thought is None else "hy_v4:open"
        want = read(drawn, [drawn.text])
        text = with_ending(drawn.text, ":open")
        for own in (text, text.replace("<tool_call:open>", "<tool_calls:open><tool_call:open>", 1)):
            got = found(events_of(parser("hy_v4:open", reasoning, "inside"), list(own)))
            assert (got.calls, got.reasoning) == (want.calls, with_ending(want.reasoning, ":open")), (drawn, got)
            assert got.content.split() == with_ending(want.content, ":open").split(), (drawn, got)
