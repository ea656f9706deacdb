"""The draft layer against transformers' multi-token prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import load_oracle
from paged import Paged, load_fp32
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, add_draft_tables, random_tokens, write_tiny
from torch import Tensor
from torch.nn import functional as F
from transformers import DeepseekV3ForCausalLM
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from kernels.matrix import BlockScaled
from workers.cache.paged import PagedCache
from workers.memory.scratch import Scratch
from workers.models import general
from workers.models.model import Model
from workers.rank.runner import Runner
from workers.weights.weight import Weight

LAYERS = 3
V3_KINDS = ["v3", "v3-yarn", "v3-one-group", "v3-no-q-lora", "v3-tied"]


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    # transformers recognises the draft layer by this list, which it keeps for checkpoints of 61 layers only.
    pattern = [rf"model\.layers\.{LAYERS}\..*"]
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", pattern)
    return write_tiny(tmp_path, request.param, seed=3, num_hidden_layers=LAYERS)


@torch.no_grad()
def oracle_drafts(
    oracle: Any, tokens: list[int], more: int, own: tuple[Tensor | None, Tensor | None] = (None, None)
) -> tuple[Tensor, list[Tensor]]:
    """Draft logits over a prompt (row i: from hidden i and token i + 1), then those of `more` further greedy drafts,
    each made from the draft layer's own output. `own`: an embedding and a head, which transformers leaves unread."""
    mtp = MtpModel.from_pretrained(oracle)
    embedding, head = own
    if embedding is not None:
        mtp.embed_tokens = torch.nn.Embedding.from_pretrained(embedding)
    head = oracle.lm_head.weight if head is None else head
    cache = MtpCache(config=oracle.config.get_mtp_config())
    ids = torch.tensor([tokens])
    hidden = oracle(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
    positions = torch.arange(1, len(tokens))[None]
    hidden = mtp.forward_layer(0, hidden, positions, cache, input_ids=ids[:, 1:])
    first = F.linear(hidden, head)[0]
    logits, further = first[-1], []
    for step in range(more):
        token = logits.argmax()[None, None]
        hidden = mtp.forward_layer(0, hidden[:, -1:], torch.tensor([[len(tokens) + step]]), cache, input_ids=token)
        logits = F.linear(hidden, head)[0, -1]
        further.append(logits)
    return first, further


def our_drafts(model: Model, tokens: list[int], cuts: list[int], more: int) -> tuple[Tensor, list[Tensor]]:
    """The same from our model: the prompt in prefill chunks that end at `cuts`, further drafts as decode rows."""
    paged = Paged(model, [tokens], room=more + 1)
    parts = []
    for count in [b - a for a, b in zip([0, *cuts], [*cuts, len(tokens) - 1], strict=True)]:
        step = paged.plan([], 1, [(0, count)])
        hidden = paged.draft(step, paged.forward(step))
        parts.append(model.drafter.logits(hidden[0]))
    logits, further = parts[-1][-1], []
    for _ in range(more):
        paged.rows[0].tokens.append(int(logits.argmax()))
        step = paged.plan([0], 1, [])
        hidden = paged.draft(step, {0: hidden[0][-1:]})
        paged.rows[0].written += 1
        logits = model.drafter.logits(hidden[0])[-1]
        further.append(logits)
    return torch.cat(parts), further


@pytest.mark.parametrize("folder", V3_KINDS, indirect=True)
@pytest.mark.parametrize("cuts", [[], [64], [1, 2, 70]])
def test_draft_logits(folder: Path, cuts: list[int]) -> None:
    tokens = random_tokens(131, 5, VOCAB)
    want, want_more = oracle_drafts(load_oracle(folder), tokens, more=3)
    got, got_more = our_drafts(load_fp32(folder), tokens, cuts, more=3)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    for ours, theirs in zip(got_more, want_more, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("folder", ["v3-yarn", "v3-tied"], indirect=True)
@pytest.mark.parametrize("own", [("embed_tokens", "shared_head.head"), ("embed_tokens",), ("shared_head.head",)])
def test_an_embedding_and_a_head_of_its_own(folder: Path, own: tuple[str, ...]) -> None:
    """One, the other or both, beside which the other is not there."""
    tables = add_draft_tables(folder)
    tensors = load_file(folder / "model.safetensors")
    given: list[Tensor | None] = []
    for name, table in zip(("embed_tokens", "shared_head.head"), tables, strict=True):
        given.append(table if name in own else None)
        if name not in own:
            del tensors[f"model.layers.{LAYERS}.{name}.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = random_tokens(131, 5, VOCAB)
    want, want_more = oracle_drafts(load_oracle(folder), tokens, 3, (given[0], given[1]))
    got, got_more = our_drafts(load_fp32(folder), tokens, [70], more=3)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    for ours, theirs in zip(got_more, want_more, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    shared, _ = oracle_drafts(load_oracle(folder), tokens, 0)
    assert (want - shared).abs().max() > 0.1, "the model's own would have done as well"


@pytest.mark.parametrize("folder", ["v3-yarn", "v3-tied"], indirect=True)
def test_what_repeats_the_model_s_takes_no_memory(folder: Path) -> None:
    add_draft_tables(folder, first_row=None)
    model = load_fp32(folder)
    assert model.drafter.embedding_YE is model.embedding_YE
    assert model.drafter.head_YE is model.head_YE
    add_draft_tables(folder, first_row=VOCAB - 1)  # one row is enough
    model = load_fp32(folder)
    assert not torch.equal(model.drafter.embedding_YE, model.embedding_YE)
    assert not torch.equal(model.drafter.head_YE.plain, model.head_YE.plain)


@pytest.mark.parametrize("folder", ["v3"], indirect=True)
def test_verified_tokens_reach_the_draft_layer_in_decode_rows(folder: Path) -> None:
    """A decode row of width 4 feeds the draft layer as a prefill chunk of 4 does."""
    model, tokens = load_fp32(folder), random_tokens(75, 6, VOCAB)
    want, _ = oracle_drafts(load_oracle(folder), tokens, more=0)
    paged = Paged(model, [tokens])
    parts = []
    for decode, width, chunks in [([], 1, [(0, 62)]), ([0], 4, []), ([0], 4, []), ([0], 4, [])]:
        step = paged.plan(decode, width, chunks)
        parts.append(model.drafter.logits(paged.draft(step, paged.forward(step))[0]))
    torch.testing.assert_close(torch.cat(parts), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("folder", ["v3"], indirect=True)
def test_proposals_of_speculative_generation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token that transformers' generate proposes while it decodes 24 tokens, ours proposes in the same place."""
    proposals: list[tuple[list[int], int]] = []
    original = MTPCandidateGenerator.get_candidates

    def recorded(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        candidates, logits = original(self, input_ids, *args, **kwargs)
        if candidates.shape[1] > input_ids.shape[1]:
            proposals.append((input_ids[0].tolist(), int(candidates[0, input_ids.shape[1]])))
        return candidates, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", recorded)
    oracle, model = load_oracle(folder), load_fp32(folder)
    ids = torch.tensor([random_tokens(70, 7, VOCAB)])
    oracle.generate(
        ids, attention_mask=torch.ones_like(ids), use_mtp=True, do_sample=False, max_new_tokens=24, pad_token_id=0
    )
    assert len(proposals) >= 12
    for tokens, proposed in proposals:
        logits, _ = our_drafts(model, tokens, [], more=0)
        assert int(logits[-1].argmax()) == proposed


@pytest.mark.parametrize("folder", ["v3"], indirect=True)
def test_entry_zero_is_never_read(folder: Path) -> None:
    """Entry 0 of the draft layer's cache is never written: it stays NaN, and no draft shows it."""
    model, tokens = load_fp32(folder), random_tokens(70, 8, VOCAB)
    paged = Paged(model, [tokens])
    step = paged.plan([], 1, [(0, 60)])
    paged.draft(step, paged.forward(step))
    step = paged.plan([0], 2, [])
    hidden = paged.draft(step, paged.forward(step))
    assert bool(paged.cache.layers[LAYERS][paged.rows[0].pages[0], 0].isnan().all())
    assert bool(hidden[0].isfinite().all())


@pytest.mark.parametrize("folder", ["v3"], indirect=True)
def test_without_draft_layer(folder: Path) -> None:
    from paged import ALONE, CPU

    from workers.families import load_model

    model = load_model(folder, group=ALONE, dtype=torch.float32, device=CPU, max_positions=64, draft_layer=False)
    assert model.drafter is None
    assert len(model.caches) == LAYERS
    with pytest.raises(ValueError, match="width 2 needs a drafter, and the model has none"):
        Runner(model, PagedCache.allocate(model.caches, 4, CPU), 2, 2, 2, 16, ALONE)


@pytest.mark.parametrize("folder", ["v3"], indirect=True)
@pytest.mark.parametrize(("tokens", "stored"), [(1, True), (8, True), (9, False)])
@torch.inference_mode()
def test_few_tokens_are_joined_by_a_matrix_in_fp8_as_it_is_stored(
    folder: Path, tokens: int, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No draft of a few rows dequantizes it."""
    drafter, widened, honest = load_fp32(folder).drafter, [], general.dequantize
    monkeypatch.setattr(general, "dequantize", lambda *given: widened.append(honest(*given)))
    rows, features = drafter.join_EF.shape
    data, blocks = torch.randn(rows, features).to(torch.float8_e4m3fn), (-(-rows // 128), -(-features // 128))
    matrix = BlockScaled(data, torch.rand(blocks) + 0.5)
    drafter.join_EF = Weight(matrix)
    token_T, hidden_TE = torch.arange(tokens), torch.randn(tokens, rows)
    joined_TE, _ = drafter._join(token_T, hidden_TE, Scratch(torch.device("cpu")))
    assert bool(widened) != stored
    norms = zip(
        (drafter.embedding_YE[token_T], hidden_TE), (drafter.embedding_norm_E, drafter.hidden_norm_E), strict=True
    )
    both_TF = torch.cat([F.rms_norm(x.double(), (rows,), weight.double(), drafter.eps) for x, weight in norms], 1)
    scale_EF = matrix.scales.double().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :features]
    want = both_TF @ (data.double() * scale_EF).T
    torch.testing.assert_close(joined_TE.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
