"""DSpark behind the scheduler on a CPU: what it drafts, with which logits and confidences, is what its formulas in
float64 make of transformers' streams, and no token is another one for it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import compressed, decode_state, moe
from tests.deepseek_v4_dspark import Block, DsparkReference
from tests.deepseek_v4_layout import DSPARK, TINY, VOCAB, dspark_v4, published_v4, tiny_v4, write_v4
from tests.workers.called_graphs import call_graphs
from tests.workers.harness import InlineEngine
from workers.cache.snapshots import RingSnapshots
from workers.config import EngineConfig
from workers.drafters import dspark
from workers.drafters.dspark import DsparkDrafter
from workers.fit.settings import Unfit, check_fit
from workers.graphs.guard import capture_guard
from workers.memory.scratch import Scratch
from workers.models import compressed_kernels, compressed_pass, general
from workers.models.attention.compressed_rows import CompressedRows
from workers.models.batch import Batch, DecodeBatch
from workers.proof.decode_steps import Candidate, SelfTest
from workers.protocol.plan import BatchLayout, DecodeBuckets, GraphKey, SamplingParams
from workers.step.decode import DecodeStep
from workers.step.parts import _Drafted

CONFIG: dict[str, Any] = {**TINY, **DSPARK, "compress_ratios": [*TINY["compress_ratios"], 0, 0, 0]}
BLOCK: int = DSPARK["dspark_block_size"]


@cache
def tensors() -> dict[str, Tensor]:
    _, model = tiny_v4(seed=1)
    return {**published_v4(model), **dspark_v4(CONFIG, seed=8)}


@cache
def means(tokens: tuple[int, ...]) -> Tensor:
    """Means of the streams behind the layers that are read, side by side, of transformers' model."""
    _, model = tiny_v4(seed=1)
    seen: list[Tensor] = []
    for layer in DSPARK["dspark_target_layer_ids"]:
        model.model.layers[layer].register_forward_hook(lambda _, __, out: seen.append(out))
    with torch.inference_mode():
        model(torch.tensor([tokens]))
    return torch.cat([streams_1TZE[0].mean(1) for streams_1TZE in seen], 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, _ = tiny_v4(seed=1)
    return write_v4(tmp_path_factory.mktemp("dspark"), {**config, **CONFIG}, tensors())


def engine(folder: Path, **settings: Any) -> InlineEngine:
    defaults = {"max_rows": 4, "token_budget": 48, "cache_pages": 40, "max_context": 300, "width": BLOCK + 1}
    options = {**defaults, "selftest": False, **settings}
    return InlineEngine(EngineConfig(model=str(folder), device="cpu", **options))


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(tokens, temperature=0.0)


@dataclass
class Drafts:
    """What was drafted for one row in one step."""

    slot: int
    position: int
    """Of the first draft."""
    newest: int
    """The token before it."""
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)


def note_drafts(patch: pytest.MonkeyPatch) -> list[Drafts]:
    """Everything that is drafted from now on, of rows of somebody, by steps that are not captured."""
    found: list[Drafts] = []
    choose, confidence = _Drafted.choose, DsparkDrafter.confidence

    def note(self: DsparkDrafter, *given: Any) -> Tensor:
        sure_DR = confidence(self, *given)
        for row, drafts in enumerate(noted_rows):
            drafts.confidence = sure_DR[:, row].tolist()
        return sure_DR

    def noted(self: _Drafted, logits: Callable[[], Tensor], index: int) -> Tensor:
        kept: list[Tensor] = []

        def keep() -> Tensor:
            kept.append(logits())
            return kept[-1]

        token_R = choose(self, keep, index)
        if index == 0:
            of_rows = self.slot_R.tolist(), self.position_R.tolist(), self.state.last_S[self.slot_R].tolist()
            noted_rows[:] = [Drafts(*of_row) for of_row in zip(*of_rows, strict=True)]
            found.extend(row for row in noted_rows if row.slot >= 0)
        for row, drafts in enumerate(noted_rows):
            drafts.tokens.append(int(token_R[row]))
            drafts.logits.append(kept[0][row].cpu().clone())
        return token_R

    noted_rows: list[Drafts] = []
    patch.setattr(_Drafted, "choose", noted)
    patch.setattr(DsparkDrafter, "confidence", note)
    return found


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[Drafts]:
    return note_drafts(monkeypatch)


def differs(drafts: Drafts, tokens: list[int]) -> str:
    """What differs in what was drafted from what the reference drafts behind a part of `tokens`."""
    newest, count = drafts.position - 1, len(drafts.tokens)
    want = expected(tuple(tokens), newest)
    if drafts.tokens != want.tokens[:count]:
        return f"{drafts.tokens} behind token {newest} instead of {want.tokens[:count]}"
    found = [(torch.stack(drafts.logits).double() - want.logits_KV[:count]).abs().max() / want.logits_KV.abs().max()]
    if drafts.confidence:  # it is not asked for where all drafts are verified
        found.append((torch.tensor(drafts.confidence, dtype=torch.float64) - want.confidence_K[:count]).abs().max())
    return "" if max(found) < 1e-4 else f"logits and confidences by {found} behind token {newest}"


@cache
def reference() -> DsparkReference:
    return DsparkReference(CONFIG, tensors())


@cache
def expected(tokens: tuple[int, ...], newest: int) -> Block:
    return reference().block(means(tokens)[:newest], tokens[newest])


def check(drafted: list[Drafts], sequences: list[list[int]]) -> int:
    """Hold all that was drafted against the reference: each is behind a part of one of these. How many there were. A
    step that was launched ahead may draft behind the end of a request, which is left out."""
    checked = 0
    for drafts in drafted:
        behind = [tokens for tokens in sequences if tokens[drafts.position - 1 : drafts.position] == [drafts.newest]]
        if behind:
            found = [differs(drafts, tokens) for tokens in behind]
            assert "" in found, found
            checked += 1
    return checked


LONG = pytest.mark.long


@pytest.mark.parametrize("length", [1, 8, 9, *(pytest.param(length, marks=LONG) for length in (2, 7, 47, 64, 150))])
def test_drafts_are_those_of_the_formulas(length: int, folder: Path, drafted: list[Drafts]) -> None:
    """Behind prompts in one chunk or several, at the window's border and behind it, and behind steps whose drafts were
    rejected."""
    (prompt,) = prompts(length, seed=length)
    (answer,) = engine(folder, max_rows=1).generate([prompt], greedy(6))
    assert check(drafted, [[*prompt, *answer]]) >= 6
    assert {len(drafts.tokens) for drafts in drafted} == {BLOCK}
    confidences = [confidence for drafts in drafted for confidence in drafts.confidence]
    assert max(confidences) - min(confidences) > 0.5


@pytest.mark.parametrize("budget", [8, 13, *(pytest.param(budget, marks=LONG) for budget in (6, 17, 21))])
def test_chunks_of_any_size(budget: int, folder: Path, drafted: list[Drafts]) -> None:
    """Of less, as much and more than the window and a ring hold."""
    (prompt,) = prompts(60, seed=4)
    (answer,) = engine(folder, max_rows=1, token_budget=budget).generate([prompt], greedy(2))
    assert check(drafted, [[*prompt, *answer]]) >= 2


@LONG
def test_tokens_are_those_without_drafts(folder: Path, drafted: list[Drafts]) -> None:
    """In mixed batches, behind snapshots, and after preemption; and every draft is that of the formulas."""
    asked = prompts(5, 58, 140, 33, seed=2)
    asked += [asked[2], asked[2][:130] + asked[0]]
    want = engine(folder, width=1).generate(asked, greedy(8))
    run = engine(folder)
    assert run.generate(asked, greedy(8)) == want
    assert run.generate(asked[2:3], greedy(8)) == want[2:3]
    stats = run.scheduler.stats()
    assert stats.drafts_offered > 100
    assert stats.cached_tokens > 300
    few = prompts(58, 57, 56, seed=1)
    crowded = engine(folder, max_context=100, cache_pages=4, max_rows=3)
    wanted = engine(folder, width=1).generate(few, greedy(12))
    assert crowded.generate(few, greedy(12)) == wanted
    assert crowded.scheduler.stats().preemptions > 0
    sequences = [[*prompt, *answer] for prompt, answer in zip([*asked, *few], [*want, *wanted], strict=True)]
    assert check(drafted, sequences) > 80


def test_a_prefix_hit_has_the_whole_context(folder: Path, drafted: list[Drafts]) -> None:
    """Nothing is missing behind a snapshot: entries are made of tokens before the next one alone."""
    run, (prompt, other) = engine(folder, max_rows=1), prompts(140, 3, seed=3)
    sequences = []
    for asked in (prompt, prompt, prompt[:128] + other):
        (answer,) = run.generate([asked], greedy(4))
        sequences.append([*asked, *answer])
    assert run.scheduler.stats().cached_tokens == 256
    assert check(drafted, sequences) >= 12


def a_context_of_a_former_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RingSnapshots, "restore", lambda *given: None)


def streams_before_the_layers(patch: pytest.MonkeyPatch) -> None:
    honest = DsparkDrafter.__init__

    def early(own: DsparkDrafter, *given: Any) -> None:
        honest(own, *given)
        own.aux_hidden_state_layers = own.sizes.layers

    patch.setattr(DsparkDrafter, "__init__", early)


def attending_otherwise(patch: pytest.MonkeyPatch, wrong: Callable[[int], dict[str, int]]) -> None:
    """Let blocks attend with other options, which `wrong` gives for a window."""
    honest = dspark.attend

    def attend(*given: Any, **options: Any) -> None:
        honest(*given, **{**options, **wrong(options["window"])})

    patch.setattr(dspark, "attend", attend)


def a_block_that_sees_no_later_token(patch: pytest.MonkeyPatch) -> None:
    """As a layer of the model would."""
    attending_otherwise(patch, lambda window: {"window": window - BLOCK, "block": 0})


@pytest.mark.parametrize(
    "plant", [a_context_of_a_former_row, streams_before_the_layers, a_block_that_sees_no_later_token]
)
def test_other_drafts_are_noticed(
    plant: Any, folder: Path, drafted: list[Drafts], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="behind token"):
        test_a_prefix_hit_has_the_whole_context(folder, drafted)


@pytest.fixture
def foretold(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Of rows, by their slot, tokens that are put in place of what is drafted."""
    told: dict[int, list[int]] = {}
    draft = DsparkDrafter.draft

    def instead(self: DsparkDrafter, hidden_RE: Any, rows: _Drafted, drafts: int, *others: Any) -> None:
        draft(self, hidden_RE, rows, drafts, *others)
        state = rows.state
        for slot in rows.slot_R.tolist():
            if slot in told:
                position = int(state.length_S[slot]) + 1
                known = told[slot][position : position + drafts]
                state.draft_SK[slot, : len(known)] = torch.tensor(known, dtype=torch.int64)

    monkeypatch.setattr(DsparkDrafter, "draft", instead)
    return told


@pytest.mark.parametrize("width", [BLOCK + 1, pytest.param(2, marks=LONG), pytest.param("auto", marks=LONG)])
def test_drafts_behind_accepted_ones(
    width: Any, folder: Path, foretold: dict[int, list[int]], drafted: list[Drafts]
) -> None:
    """Of each step another number is accepted. What rejected drafts have left in the rings is not read."""
    asked = prompts(6, 21, seed=5)
    answers = engine(folder, width=1).generate(asked, greedy(60))
    sequences = [[*prompt, *answer] for prompt, answer in zip(asked, answers, strict=True)]
    for slot, (tokens, more) in enumerate(zip(sequences, prompts(9, 9, seed=6), strict=True)):
        foretold[slot] = [token ^ (place % 6 == 0) for place, token in enumerate(tokens + more)]
    run = engine(folder, width=width, max_rows=2, least_draft_confidence=0.0)
    assert run.generate(asked, greedy(60)) == answers
    stats = run.scheduler.stats()
    assert stats.drafts_offered > stats.drafts_accepted > 20
    assert check([drafts for drafts in drafted if drafts.position <= len(sequences[drafts.slot])], sequences) > 20


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of rows that went through attention and experts of the model's layers, of each pass."""
    found: list[int] = []
    honest = compressed_pass.rows_of_pass

    def rows_of_pass(*given: Any) -> list[CompressedRows]:
        kinds = honest(*given)
        found.append(sum(int((own._rows.slot_R[own._rows.row_T[own._rows.row_T >= 0]] >= 0).sum()) for own in kinds))
        return kinds

    monkeypatch.setattr(compressed_pass, "rows_of_pass", rows_of_pass)
    return found


def test_drafts_that_are_unlikely_cost_nothing(
    folder: Path, foretold: dict[int, list[int]], computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that would stand are left out behind the first whose confidence, times that of those before it, is too
    little; their tokens go through no layer. Rows differ, and so do the steps of a row."""

    def told(drafter: DsparkDrafter, x_DRE: Tensor, before_DRM: Tensor, scratch: Scratch) -> Tensor:
        """Row 0 has two likely drafts. Row 1 has one: each of its first two would be alone, but not both."""
        return torch.tensor([(0.9, 0.9, 0.1, 1.0), (0.7, 0.7, 1.0, 1.0)]).T[:, : x_DRE.shape[1]].contiguous()

    asked = prompts(9, 9, seed=7)
    answers = engine(folder, width=1).generate(asked, greedy(40))
    for slot, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
        foretold[slot] = [*prompt, *answer, *prompt]
    monkeypatch.setattr(DsparkDrafter, "confidence", told)
    run = engine(folder, max_rows=2, least_draft_confidence=0.5)
    computed.clear()
    assert run.generate(asked, greedy(40)) == answers
    first, second = ([len(output.tokens) for output in run.finished[name].outputs] for name in ("r0-0", "r0-1"))
    # One of the prompt's end, then steps; there are more rows than one as long as both go on.
    assert first == [1, *[3] * 13]
    assert second[:14] == [1, *[2] * 13]
    assert computed[1:14] == [3 + 2] * 13
    assert run.scheduler.stats().drafts_accepted == 2 * 13 + 40 - len(second)


@pytest.mark.parametrize(
    "least",
    [pytest.param(0.0, marks=LONG), 0.4, pytest.param(1.0, marks=LONG)],
)
def test_no_threshold_changes_a_token(least: float, folder: Path, computed: list[int]) -> None:
    asked = prompts(5, 58, 33, seed=9)
    want = engine(folder, width=1).generate(asked, greedy(15))
    sampled = SamplingParams(15, temperature=0.8, top_p=0.9, seed=5, repetition_penalty=1.2)
    seeded = engine(folder, width=1).generate(asked, sampled)
    run = engine(folder, least_draft_confidence=least)
    for sampling, expected_tokens in ((greedy(15), want), (sampled, seeded)):
        computed.clear()
        assert run.generate(asked, sampling) == expected_tokens
        decode = computed[-8:-3]
        if 0 < least < 1:
            assert 3 < sum(decode) / len(decode) < 3 * (BLOCK + 1)
        else:  # all, or the newest token of each row alone
            assert {*decode} == {3 * (1 if least else BLOCK + 1)}


def found(folder: Path, *keys: GraphKey) -> list[str]:
    """What the self-test says of buckets."""
    parts = engine(folder).runner.parts
    steps = [DecodeStep(parts, key, Scratch(parts.device)) for key in keys]
    reports = SelfTest(parts).run([Candidate(step, step.run) for step in steps])
    return [problem for report in reports for problem in report.problems]


def test_which_drafts_are_left_out_is_found_in_memory_of_the_step(folder: Path) -> None:
    """So a decode step can be captured; a row of padding is nobody's."""
    parts = engine(folder).runner.parts
    state, scratch = parts.state.tensors, Scratch(parts.device, torch.empty(4096, dtype=torch.uint8))
    drafter, slot_R = parts.drafter, torch.tensor([1, -1, 0])
    state.unlikely_S.copy_(torch.arange(len(state.unlikely_S)) % BLOCK)
    unlikely = state.unlikely_S.tolist()
    of_rows = [unlikely[1], unlikely[-1], unlikely[0]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "least_confidence", 0.5)
        empty = torch.empty(0, dtype=torch.int64)
        drafted = _Drafted(parts, slot_R, empty, empty, empty, None, scratch, dense=False)
        likely_R = torch.tensor([2, 0, 9])
        with capture_guard(parts.device):
            verified_R, wanted_R = parts.verified(slot_R, scratch), parts.wanted(slot_R, 3, scratch)
            drafted.verify(likely_R, 3)
    assert verified_R is not None
    assert wanted_R is not None
    most = state.draft_SK.shape[1]
    assert verified_R.tolist() == [most - each for each in of_rows]
    assert wanted_R.tolist() == [min(most - each + 1, 3) for each in of_rows]
    unlikely[1], unlikely[0] = most - 2, most - 3
    assert state.unlikely_S.tolist() == unlikely


KERNELS: dict[Any, tuple[str, ...]] = {
    compressed: ("begin", "rope_store", "attend"),
    compressed_kernels: ("group_linear",),
    general: ("add_to_streams", "linear", "rms_norm", "silu_mul"),
    decode_state: ("feed_draft",),
    moe: ("route", "experts"),
}
"""What computes on a GPU, whose references on a CPU may allocate: modules, and names of functions there."""


@pytest.mark.parametrize("width", [1, BLOCK + 1])
def test_between_kernels_nothing_is_allocated_or_read(
    width: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a decode step with it can be captured: all memory is the step's."""
    parts = dataclasses.replace(engine(folder).runner.parts, sampling=None)
    called: set[str] = set()
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, lambda *given, own=name, **options: called.add(own))
    drafter, config = parts.drafter, parts.model.config
    drafter.least_confidence = 0.5
    slot_R, tokens = torch.tensor([1, -1, 0]), 3 * width
    length_R, page_RP = torch.tensor([9, 0, 70], dtype=torch.int32), torch.zeros(3, 5, dtype=torch.int32)
    position_T = torch.arange(tokens)
    decode = DecodeBatch(length_R, page_RP, slot_R=slot_R)
    batch = Batch(BatchLayout(width, 3), position_T, position_T, decode, None, first=1)
    hidden_TF = torch.zeros(tokens, len(DSPARK["dspark_target_layer_ids"]) * config.hidden_size)
    scratch = Scratch(parts.device, torch.zeros(1 << 22, dtype=torch.uint8))
    drafted = _Drafted(parts, slot_R, torch.zeros_like(slot_R), length_R, page_RP, None, scratch, dense=False)
    with torch.inference_mode(), capture_guard(parts.device):
        drafter.catch_up(position_T, hidden_TF, batch, parts.cache, scratch)
        drafter.draft(None, drafted, BLOCK, parts.cache, scratch)
    assert called == {name for names in KERNELS.values() for name in names}


def test_captured_steps_pass_the_self_test_and_draft_the_same(
    folder: Path, drafted: list[Drafts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of decode rows alone the drafts are in the step that is captured; in mixed steps they are eager, behind segments
    for all tokens."""
    call_graphs(monkeypatch)
    run, (prompt,) = engine(folder, max_rows=2, selftest=True), prompts(30, seed=9)
    assert {bucket.kind for bucket in run.reports[-1].buckets} == {"decode", "masked", "mixed", "tail"}
    drafted.clear()
    (answer,) = run.generate([prompt], greedy(7))
    assert run.runner.stats.replays > 0
    assert check(drafted, [[*prompt, *answer]]) >= 3


def test_the_self_test_proves_it(folder: Path) -> None:
    assert found(folder, *(key for key in DecodeBuckets(3, BLOCK + 1, adaptive=True) if key.rows == 3)) == []


def test_drafts_without_numbers_are_those_of_the_runs_that_are_compared(folder: Path) -> None:
    parts = engine(folder).runner.parts
    step = DecodeStep(parts, GraphKey(4, BLOCK + 1, BLOCK), Scratch(parts.device))
    assert parts.sampling is not None
    invalid_1 = parts.sampling.invalid_drafts_1
    with torch.inference_mode():
        fixture = SelfTest(parts).fixture(step.key)
        step.slot_R.fill_(-1)
        step.slot_R[: len(fixture.rows)] = fixture.slot_R
        eager = fixture.outcome(step.run())
        invalid_1 += 1  # by a replay that is timed
        fixture.restore()
        assert fixture.problems(eager, fixture.outcome(step.run())) == []
        fixture.restore()
        output = step.run()
        invalid_1 += 1
        replay = fixture.outcome(output)
        fixture.restore()
        assert fixture.problems(eager, replay) == ["logits of drafts were no numbers"]


def no_room_for_rejected_drafts(patch: pytest.MonkeyPatch) -> None:
    """Of which the kernels do not tell."""
    honest = DsparkDrafter.rings
    patch.setattr(compressed, "room", lambda *given: None)
    patch.setattr(DsparkDrafter, "rings", lambda drafter, width: honest(drafter, 1))


def a_window_of_a_token_more(patch: pytest.MonkeyPatch) -> None:
    attending_otherwise(patch, lambda window: {"window": window + 1})


def entries_a_position_late(patch: pytest.MonkeyPatch) -> None:
    """Where those of a layer for multi-token prediction lie."""
    patch.setattr(dspark, "_own_positions", lambda batch, scratch: batch.position_T.clone())


def a_window_of_another_row(patch: pytest.MonkeyPatch) -> None:
    honest = DsparkDrafter.block

    def rolled(own: DsparkDrafter, token_R: Tensor, start_R: Tensor, slot_R: Tensor, *others: Any) -> Any:
        return honest(own, token_R, start_R, slot_R.roll(1), *others)

    patch.setattr(DsparkDrafter, "block", rolled)


FAULTS = {
    "no room for rejected drafts": (no_room_for_rejected_drafts, "has no room for drafts"),
    "a window of a token more": (a_window_of_a_token_more, "logits of drafts were no numbers"),
    "entries a position late": (entries_a_position_late, "changed outside the rows' own tokens"),
    "a window of another row": (a_window_of_another_row, "logits of drafts were no numbers"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, said = FAULTS[name]
    plant(monkeypatch)
    problems = found(folder, GraphKey(4, BLOCK + 1, BLOCK), GraphKey(4, 1, 1))
    assert any(said in problem for problem in problems), problems


def test_a_start_without_it(folder: Path) -> None:
    assert isinstance(engine(folder).runner.parts.model.drafter, DsparkDrafter)
    assert engine(folder, drafter="none").runner.parts.model.drafter is None
    assert engine(folder, width=1).runner.parts.width == 1


def test_fit_refuses_draft_layers_that_are_switched_off_as_a_start_does(tmp_path: Path) -> None:
    config, _ = tiny_v4(seed=1)
    write_v4(tmp_path, {**config, **CONFIG, "num_nextn_predict_layers": 0}, tensors())
    with pytest.raises(ValueError, match="no draft layer"):
        engine(tmp_path, drafter="mtp")
    with pytest.raises(Unfit, match=r"declares no draft layer .* give --drafter ngram"):
        check_fit(EngineConfig(model=str(tmp_path), drafter="mtp", device="cpu"))


def test_a_width_is_no_more_than_a_block_has_drafts(folder: Path) -> None:
    with pytest.raises(ValueError, match=f"draft {BLOCK} tokens at a time: give --width {BLOCK + 1} or less"):
        engine(folder, width=BLOCK + 2)
    assert engine(folder, width="auto").runner.parts.width == 4
    assert engine(folder, width=BLOCK + 2, drafter="ngram").runner.parts.width == BLOCK + 2


def test_auto_is_no_wider_than_a_block(tmp_path: Path) -> None:
    config, _ = tiny_v4(seed=1)
    write_v4(tmp_path, {**config, **CONFIG, "dspark_block_size": 2}, tensors())
    run = engine(tmp_path, width="auto")
    assert run.runner.parts.width == 3
    asked = prompts(20, 9, seed=3)
    assert run.generate(asked, greedy(9)) == engine(tmp_path, width=1).generate(asked, greedy(9))
