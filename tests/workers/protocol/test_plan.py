import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.protocol.messages import FromWorker, Heartbeat, ToWorker
from workers.protocol.plan import (
    Admission,
    BatchLayout,
    PageGrant,
    PrefillRow,
    SamplingParams,
    StepPlan,
    StepResult,
    TopLogprobs,
)

layouts = st.builds(
    lambda width, rows, prefill: BatchLayout(width, rows, tuple(n for n, _ in prefill), tuple(f for _, f in prefill)),
    st.integers(1, 8),
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(1, 200), st.booleans()), max_size=6),
)


@given(layouts)
def test_rows_tile_the_tokens_without_gap_or_overlap(layout: BatchLayout) -> None:
    covered = [i for row in range(layout.decode_rows) for i in range(layout.tokens)[layout.decode_slice(row)]]
    offsets = layout.prefill_offsets()
    for begin, end, count in zip(offsets, offsets[1:], layout.prefill_tokens, strict=False):
        assert end - begin == count
        covered += range(begin, end)
    assert covered == list(range(layout.tokens))
    assert layout.rows == layout.decode_rows + len(layout.prefill_tokens)


@given(layouts)
def test_every_sampled_position_has_one_logits_row_and_its_token(layout: BatchLayout) -> None:
    tokens = layout.logits_tokens()
    assert len(tokens) == layout.logits_rows
    seen = []
    for row in range(layout.decode_rows):
        for position in range(layout.width):
            seen.append(layout.logits_row(row, position))
            assert tokens[seen[-1]] == row * layout.width + position
    offsets = layout.prefill_offsets()
    finals = [index for index, final in enumerate(layout.prefill_final) if final]
    for count, index in enumerate(finals):
        seen.append(layout.logits_row(layout.decode_rows + count))
        assert tokens[seen[-1]] == offsets[index + 1] - 1
    assert seen == list(range(layout.logits_rows))
    assert layout.sampled_rows == layout.decode_rows + len(finals)


@given(layouts)
def test_a_decision_is_tokens_then_counts_then_nonfinite_rows_then_faults(layout: BatchLayout) -> None:
    places = range(layout.decision_size)
    windows = [place for row in range(layout.decode_rows) for place in places[layout.decode_slice(row)]]
    assert [*windows, *places[layout.final_slice]] == list(places[layout.target_slice])
    sections = layout.target_slice, layout.accepted_slice, layout.nonfinite_slice
    assert [*(place for section in sections for place in places[section]), places[-1]] == list(places)
    assert [*places[layout.nonfinite_slice], places[-1]] == list(places[layout.fault_slice])
    assert len(places[layout.nonfinite_slice]) == layout.logits_rows
    assert len(places[layout.accepted_slice]) == layout.decode_rows


def test_positions_outside_a_row_are_refused() -> None:
    layout = BatchLayout(2, 1, (3,), (True,))
    for row, position in [(0, 2), (0, -1), (1, 1), (2, 0)]:
        with pytest.raises(IndexError):
            layout.logits_row(row, position)


def test_a_bucket_smaller_than_its_rows_has_no_key() -> None:
    assert BatchLayout(3, 5).graph_key(8, drafts=2) == (8, 3, 2, False)
    with pytest.raises(ValueError, match="do not fit"):
        BatchLayout(3, 5).graph_key(4, drafts=2)
    mixed = BatchLayout(3, 5, (4, 2), (False, True))
    assert mixed.token_key(32) == (32,)
    with pytest.raises(ValueError, match="do not fit"):
        mixed.token_key(20)


@pytest.mark.parametrize(
    "bad", [{"width": 0}, {"prefill_tokens": (0,), "prefill_final": (True,)}, {"prefill_tokens": (1,)}]
)
def test_impossible_layouts_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"width|token|length"):
        BatchLayout(**{"width": 1, "decode_rows": 1, **bad})  # type: ignore[arg-type]


def test_plans_survive_the_wire() -> None:
    sampling = SamplingParams(5, temperature=0.7, logit_bias=((3, 1.5),), stop_ids=(2,), seed=2**63)
    plan = StepPlan(
        step=7,
        width=3,
        drafts=2,
        decode_slots=(4, 1),
        prefill=(PrefillRow(2, 63, (5, 6), 64, False, 9),),
        admissions=(Admission(2, sampling, 3, (1, 2)),),
        grants=(PageGrant(2, 0, (8, 9)),),
        logprobs=0,
    )
    decoded = msgspec.msgpack.Decoder(ToWorker).decode(msgspec.msgpack.encode(plan))
    assert decoded == plan
    assert decoded.layout == BatchLayout(3, 2, (2,), (False,))


def test_results_and_heartbeats_are_told_apart_on_the_wire() -> None:
    decoder = msgspec.msgpack.Decoder(FromWorker)
    result = StepResult(3, ((1, 2), (5,)), 0.25, ((TopLogprobs(-0.5, (1,), (-0.5,)),), ()))
    for message in (result, Heartbeat(1)):
        assert decoder.decode(msgspec.msgpack.encode(message)) == message
