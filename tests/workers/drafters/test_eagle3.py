"""EAGLE-3 in both published layouts, against a few lines of torch on transformers' hidden states."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.rank_processes import run_ranks
from tests.tiny_draft_models import LAYOUTS, PlainEagle3, write_draft
from tests.tiny_models import VOCAB, write_tiny
from tests.workers.harness import InlineEngine
from tests.workers.models.paged import Paged
from workers.config import EngineConfig
from workers.drafters.draft_model import load_draft_model
from workers.drafters.eagle3.checkpoint import read_eagle3
from workers.drafters.eagle3.misfits import aux_hidden_state_layers_of
from workers.fit.memory_plan import memory_plan
from workers.fit.settings import Unfit, check_fit
from workers.models.config import ConfigError
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.protocol.plan import SamplingParams
from workers.rank.rank import Rank
from workers.scheduler.sequence import Phase
from workers.weights.checkpoint import WeightsError

HIDDEN, LAYERS = 48, 4
KINDS = {
    "gqa": {"draft_vocab": 90},
    "gqa-all-ids": {"norm_before_residual": True},
    "mla": {"draft_vocab": 90, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
    "mla-3.1": {"fc_norm": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": [3, 1, 2]},
}
"""The last as Kimi K2.6's draft model has it."""
AUX_HIDDEN_STATE_LAYERS = {"gqa": (2, 2, 1), "gqa-all-ids": (2, 2, 1), "mla": (1, 2, 3), "mla-3.1": (3, 1, 2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target"), "v2", seed=3, num_hidden_layers=LAYERS, hidden_size=HIDDEN)


@pytest.fixture(scope="module")
def drafts_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    return {
        kind: write_draft(root / kind, kind.split("-")[0], hidden_size=HIDDEN, vocab_size=VOCAB, **values)
        for kind, values in KINDS.items()
    }


def engine(folder: Path, draft: Path | None, **settings: Any) -> InlineEngine:
    defaults = {"width": 3, "max_rows": 4, "token_budget": 48, "cache_pages": 60, "max_context": 300}
    defaults |= {"device": "cpu", "selftest": False, "draft_model": None if draft is None else str(draft)}
    made = InlineEngine(EngineConfig(model=str(folder), **{**defaults, **settings}))
    for layer in made.runner.parts.cache.layers:
        layer.fill_(torch.nan)
    return made


@cache
def oracle(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def aux_hidden(folder: Path, tokens: list[int], aux_hidden_state_layers: tuple[int, ...]) -> torch.Tensor:
    """Hidden states that enter these layers, of every token."""
    states = oracle(folder)(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in aux_hidden_state_layers], -1)


def plain(folder: Path, draft: Path) -> PlainEagle3:
    return PlainEagle3(draft, oracle(folder).get_input_embeddings().weight.detach())


def prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(130)]
    return [
        (shared if index % 2 else []) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))]
        for index in range(count)
    ]


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_logits(folder: Path, drafts_of: dict[str, Path], kind: str) -> None:
    """Logits are those of prompts in chunks, then of decode rows."""
    made = engine(folder, drafts_of[kind])
    model, drafter = made.runner.parts.model, made.runner.parts.drafter
    assert drafter.aux_hidden_state_layers == AUX_HIDDEN_STATE_LAYERS[kind]
    tokens = prompts(1, 100, seed=1)[0] + prompts(2, 9, seed=2)[1]
    want, _ = plain(folder, drafts_of[kind]).drafts(
        aux_hidden(folder, tokens[:-1], AUX_HIDDEN_STATE_LAYERS[kind]), tokens, 1
    )
    paged, found = Paged(model, [tokens]), []
    for decode, width, chunks in [([], 1, [(0, 62)]), ([0], 4, []), ([], 1, [(0, 20)]), ([0], 1, []), ([0], 8, [])]:
        step = paged.plan(decode, width, chunks)
        (feed,) = step.feeds
        own = tokens[feed.start : feed.start + feed.count]
        aux_hidden_TF = torch.full((feed.count, 3 * HIDDEN), torch.nan)
        model.forward(torch.tensor(own), paged.batch(step, 0), paged.cache, aux_hidden_TF=aux_hidden_TF)
        paged.rows[0].written += feed.count
        following = torch.tensor(tokens[feed.start + 1 : feed.start + feed.count + 1])
        found.append(drafter.logits(drafter.catch_up(following, aux_hidden_TF, paged.batch(step, 1), paged.cache)))
    got = torch.cat(found)
    torch.testing.assert_close(got, want[: len(got)], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "pages"),
    [
        pytest.param("gqa", 60, marks=pytest.mark.long),
        pytest.param("gqa-all-ids", 60, marks=pytest.mark.long),
        ("mla", 60),
        pytest.param("mla-3.1", 60, marks=pytest.mark.long),
        pytest.param("gqa", 8, marks=pytest.mark.long),
    ],
)
def test_drafts_are_those_of_the_whole_sequence(
    folder: Path, drafts_of: dict[str, Path], kind: str, pages: int
) -> None:
    """Anything may come between: chunks, decode rows beside them, shared pages, and, with few pages, preemptions."""
    made, reference = engine(folder, drafts_of[kind], cache_pages=pages), plain(folder, drafts_of[kind])
    for index, prompt in enumerate(prompts(6, 40, seed=4)):
        made.add(f"r{index}", prompt, SamplingParams(20 if pages == 60 else 100, temperature=0.0))
    every = 4 if pages == 60 else 16
    tensors = made.runner.parts.state.tensors
    compared: Counter[tuple[bool, bool]] = Counter()
    while made.step():
        plan = made.plans[made.runner._steps - 1]
        for sequence in made.scheduler._live.values():
            if sequence.phase is Phase.DECODE and sequence.tokens.length > sequence.goal and plan.step % every < 2:
                tokens, slot = list(sequence.tokens.span(0, sequence.tokens.length)), sequence.slot
                _, want = reference.drafts(
                    aux_hidden(folder, tokens[:-1], AUX_HIDDEN_STATE_LAYERS[kind]), tokens, plan.drafts
                )
                assert tensors.draft_SK[slot, : plan.drafts].tolist() == want
                compared[bool(plan.prefill), slot in plan.decode_slots] += plan.drafts
    assert compared[True, True] + compared[True, False] > 0
    assert compared[False, True] > 20
    stats = made.scheduler.stats()
    assert stats.cached_tokens > 0
    assert bool(stats.preemptions) == (pages == 8)


@pytest.mark.parametrize(
    ("kind", "temperature", "widths"),
    [
        ("mla", 0.9, (4,)),
        pytest.param("mla", 0.9, (1, 2), marks=pytest.mark.long),
        pytest.param("gqa", 0.0, (1, 2, 4), marks=pytest.mark.long),
    ],
)
def test_no_token_changes(
    folder: Path, drafts_of: dict[str, Path], kind: str, temperature: float, widths: tuple[int, ...]
) -> None:
    asked = prompts(6, 60, seed=5)
    params = [
        SamplingParams(25, temperature=temperature, seed=seed, top_k=(0, 100)[seed % 2], repetition_penalty=1.1)
        for seed in range(len(asked))
    ]
    without = engine(folder, None, prefix_cache=False).generate(asked, params)
    for width in widths:
        crowded = engine(folder, drafts_of[kind], width=width, cache_pages=9)
        assert crowded.generate(asked, params) == without
        assert (crowded.scheduler.stats().drafts_offered > 0) == (width > 1)


def test_prefix_hits_keep_their_length(folder: Path, drafts_of: dict[str, Path]) -> None:
    cached = set()
    for draft in (drafts_of["gqa"], drafts_of["mla"], None):
        made = engine(folder, draft, max_rows=1)
        made.generate(prompts(6, 60, seed=8), SamplingParams(5, temperature=0.0))
        cached.add(made.scheduler.stats().cached_tokens)
    assert len(cached) == 1
    assert cached.pop() > 0


@pytest.mark.parametrize("kind", ["gqa", "mla", pytest.param("mla-3.1", marks=pytest.mark.long)])
def test_steps_pass_the_self_test(folder: Path, drafts_of: dict[str, Path], kind: str) -> None:
    made = engine(folder, drafts_of[kind], selftest=True, max_rows=2, token_budget=32, max_context=200)
    assert made.replica.selftest is not None
    assert made.replica.selftest.passed


def rank_main(rank: int, size: int, folder: Path, root: Path) -> None:
    torch.set_num_threads(1)
    group = Group.connect(Mesh.of(rank, size), f"file://{root}/rendezvous{size}", torch.device("cpu"), timeout_s=60)
    try:
        torch.save(logits_of_ranks(folder, root, group), root / f"rank{rank}of{size}.pt")
    finally:
        group.close()


@torch.inference_mode()
def logits_of_ranks(folder: Path, root: Path, group: Group) -> dict[str, torch.Tensor]:
    """Draft logits over a prompt."""
    found = {}
    tokens = torch.tensor(prompts(2, 60, seed=9)[1])
    for kind in ("gqa", "mla"):
        settings = {"tensor_parallel": group.mesh.world.size, "max_rows": 2, "token_budget": 64, "cache_pages": 9}
        config = EngineConfig(
            model=str(folder), draft_model=str(root / kind), device="cpu", selftest=False, max_context=200, **settings
        )
        model = Rank(config, group, torch.device("cpu")).model
        paged = Paged(model, [tokens.tolist()])
        step = paged.plan([], 1, [(0, len(tokens) - 1)])
        aux_hidden_TF = torch.empty(len(tokens) - 1, 3 * HIDDEN)
        model.forward(tokens[:-1], paged.batch(step, 0), paged.cache, aux_hidden_TF=aux_hidden_TF)
        hidden = model.drafter.catch_up(tokens[1:], aux_hidden_TF, paged.batch(step, 1), paged.cache)
        found[kind] = model.drafter.logits(hidden)
    return found


@pytest.mark.parametrize(
    "size",  # two ranks draft in tests/workers/parallel/test_rank_features.py, too
    [pytest.param(2, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.long)],
)
def test_ranks_agree_with_one(folder: Path, drafts_of: dict[str, Path], size: int) -> None:
    root = drafts_of["gqa"].parent
    alone = logits_of_ranks(folder, root, Group())
    run_ranks(rank_main, size, size, folder, root)
    for rank in range(size):
        for kind, logits in torch.load(root / f"rank{rank}of{size}.pt").items():
            torch.testing.assert_close(logits, alone[kind], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hidden_size": 64}, "hidden_size = 64 of the draft model, but 48 of the model"),
        ({"vocab_size": VOCAB + 1}, rf"vocab_size = {VOCAB + 1} of the draft model, but {VOCAB} of the model"),
        ({"draft_vocab_size": VOCAB + 1}, "draft_vocab_size = 132 must lie between 1 and vocab_size"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, LAYERS - 1]}},
            "layers 1, 2, 4 .* three of 0 to 3",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, "inputs of layers 0, 1"),
        ({"eagle_aux_hidden_state_layer_ids": "1"}, "must be a list of layers"),
        ({"num_hidden_layers": 2}, "num_hidden_layers = 2"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused_by_name(
    folder: Path, drafts_of: dict[str, Path], tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    """The model is refused before any weights are read: there are none."""
    config = json.loads((drafts_of["gqa"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | values))
    with pytest.raises(Unfit, match=said):
        check_fit(EngineConfig(model=str(folder), draft_model=str(tmp_path)))
    with pytest.raises(ConfigError, match=said):
        engine(folder, tmp_path)


def test_a_model_with_several_residual_streams_is_refused(drafts_of: dict[str, Path], tmp_path: Path) -> None:
    """What a draft model reads would be one of them."""
    folder, said = write_tiny(tmp_path, "hyv4"), r"the model has 4 residual streams \(hc_mult\)"
    with pytest.raises(Unfit, match=said):
        check_fit(EngineConfig(model=str(folder), draft_model=str(drafts_of["gqa"])))
    with pytest.raises(ConfigError, match=said):
        engine(folder, drafts_of["gqa"])


def test_drafts_of_a_model_with_sparse_attention(drafts_of: dict[str, Path], tmp_path: Path) -> None:
    """As published of A.X K2: the layers of the model have gates and indexers, the draft model's has neither."""
    folder = write_tiny(tmp_path, "axk2", seed=3, num_hidden_layers=LAYERS)
    made, reference = engine(folder, drafts_of["gqa"]), plain(folder, drafts_of["gqa"])
    for index, prompt in enumerate(prompts(3, 40, seed=4)):
        made.add(f"r{index}", prompt, SamplingParams(12, temperature=0.0))
    tensors, compared = made.runner.parts.state.tensors, 0
    while made.step():
        plan = made.plans[made.runner._steps - 1]
        for sequence in made.scheduler._live.values():
            if sequence.phase is Phase.DECODE and sequence.tokens.length > sequence.goal and plan.step % 3 == 0:
                tokens, slot = list(sequence.tokens.span(0, sequence.tokens.length)), sequence.slot
                states = aux_hidden(folder, tokens[:-1], AUX_HIDDEN_STATE_LAYERS["gqa"])
                _, want = reference.drafts(states, tokens, plan.drafts)
                assert tensors.draft_SK[slot, : plan.drafts].tolist() == want
                compared += plan.drafts
    assert compared > 10


@pytest.mark.parametrize(
    "values",
    [
        {"speculators_model_type": "dspark", "markov_rank": 256, "block_size": 5, "mask_token_id": 3},
        {"architectures": ["Qwen3DSparkModel"], "block_size": 5},
        {"dflash_config": {"mask_token_id": 3}},
    ],
)
def test_draft_models_that_draft_blocks_are_refused(
    folder: Path, drafts_of: dict[str, Path], tmp_path: Path, values: dict[str, Any]
) -> None:
    """As published of A.X K2 and of GLM-5.2: DSpark and DFlash."""
    config = json.loads((drafts_of["gqa"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | values))
    with pytest.raises(Unfit, match=r"speculators_model_type = 'dspark'|drafts a block at a time"):
        check_fit(EngineConfig(model=str(folder), draft_model=str(tmp_path)))


def test_a_folder_without_a_draft_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"it has neither config\.json \(EAGLE-3\) nor params\.json"):
        check_fit(EngineConfig(model=str(folder), draft_model=str(tmp_path)))


def test_ranks_that_cannot_share_the_layer_are_refused(folder: Path, drafts_of: dict[str, Path]) -> None:
    with pytest.raises(Unfit, match="num_key_value_heads = 4 of the draft model cannot be divided by 8 ranks"):
        check_fit(EngineConfig(model=str(folder), draft_model=str(drafts_of["gqa"]), tensor_parallel=8))


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("d2t", torch.zeros(90, dtype=torch.int64) + VOCAB, "outside the model's vocabulary"),
        ("d2t", -torch.arange(90), "names ids twice"),
        ("d2t", torch.zeros(89, dtype=torch.int64), r"config.json wants integers, \[90\]"),
        ("d2t", None, "no tensor d2t"),
        ("fc.weight", None, "1 missing"),
        ("fc.bias", torch.zeros(HIDDEN), "1 unexpected"),
    ],
)
def test_tensors_that_do_not_fit(
    folder: Path, drafts_of: dict[str, Path], tmp_path: Path, name: str, wrong: torch.Tensor | None, said: str
) -> None:
    tensors = load_file(drafts_of["gqa"] / "model.safetensors")
    tensors |= {name: wrong} if wrong is not None else {}
    if wrong is None:
        del tensors[name]
    (tmp_path / "config.json").write_text((drafts_of["gqa"] / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    model = engine(folder, None).replica.model
    with pytest.raises(WeightsError, match=said):
        load_draft_model(read_eagle3(tmp_path, model.config, Mesh()), model)


def test_other_names_and_an_embedding_of_its_own(folder: Path, drafts_of: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(drafts_of["gqa"] / "model.safetensors")
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    (tmp_path / "config.json").write_text((drafts_of["gqa"] / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    model = engine(folder, None).replica.model
    drafter = load_draft_model(read_eagle3(tmp_path, model.config, Mesh()), model)
    assert torch.equal(drafter.embedding_YE, tensors["embed_tokens.weight"])


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_the_memory_plan_counts_the_draft_model(folder: Path, drafts_of: dict[str, Path], kind: str) -> None:
    without, with_it = (
        memory_plan(EngineConfig(model=str(folder), draft_model=draft, max_context=300, dtype="float32"), 8 << 30)
        for draft in (None, str(drafts_of[kind]))
    )
    stored = load_file(drafts_of[kind] / "model.safetensors")
    numbers = sum(tensor.numel() for name, tensor in stored.items() if name not in ("d2t", "t2d"))
    assert with_it.weights - without.weights == 4 * numbers
    assert with_it.page_bytes > without.page_bytes


@pytest.mark.parametrize(
    ("values", "aux_hidden_state_layers"),
    [
        ({}, (2, 30, 58)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": None}}, (2, 30, 58)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}}, (2, 30, 58)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}, (2, 30, 58)),
    ],
    ids=["default", "none given", "behind layers", "in front of layers"],
)
def test_conventions_of_aux_hidden_state_layers(
    values: dict[str, Any], aux_hidden_state_layers: tuple[int, ...]
) -> None:
    """All mean the same three of 61 layers: trainers count layers whose output they keep, vLLM's project those whose
    input it takes, and where nothing is said both take the paper's."""
    assert aux_hidden_state_layers_of(values, 61) == aux_hidden_state_layers


def test_a_config_of_speculators(folder: Path, drafts_of: dict[str, Path], tmp_path: Path) -> None:
    """The layer's fields in a part of their own, other names of tensors, and a residual stream that begins normed."""
    values = json.loads((drafts_of["gqa-all-ids"] / "config.json").read_text())
    top = {"speculators_model_type": "eagle3", "target_hidden_size": None, "draft_vocab_size": VOCAB}
    top["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    layer = {name: value for name, value in values.items() if name not in (*top, "norm_before_residual")}
    (tmp_path / "config.json").write_text(json.dumps({**top, "transformer_layer_config": layer}))
    tensors = load_file(drafts_of["gqa-all-ids"] / "model.safetensors")
    save_file({n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}, tmp_path / "model.safetensors")
    model = engine(folder, None).replica.model
    got = load_draft_model(read_eagle3(tmp_path, model.config, Mesh()), model)
    want = load_draft_model(read_eagle3(drafts_of["gqa-all-ids"], model.config, Mesh()), model)
    assert got.aux_hidden_state_layers == (1, 2, 3)
    assert replace(got.sizes, aux_hidden_state_layers=want.aux_hidden_state_layers) == want.sizes
    assert torch.equal(got.join_EF.plain, want.join_EF.plain)
    check_fit(EngineConfig(model=str(folder), draft_model=str(tmp_path)))


@pytest.mark.parametrize(
    "values",
    [
        {"mla_use_nope": True},
        {"logit_scale": 0.5},
        {"norm_before_fc": True},
        {"bias": True},
        {"eagle_config": {"use_aux_hidden_state": False}},
    ],
)
def test_what_would_draft_wrongly_is_refused(
    folder: Path, drafts_of: dict[str, Path], tmp_path: Path, values: dict[str, Any]
) -> None:
    """Only acceptance would show such a draft model."""
    config = json.loads((drafts_of["gqa"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | values))
    with pytest.raises(ConfigError, match=next(iter(values))):
        read_eagle3(tmp_path, engine(folder, None).replica.model.config, Mesh())


def test_settings_that_exclude_each_other(folder: Path, drafts_of: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="a draft model is given, but drafter = ngram"):
        EngineConfig(model=str(folder), draft_model=str(drafts_of["gqa"]), drafter="ngram")
    with pytest.raises(ValueError, match="needs a draft model"):
        EngineConfig(model=str(folder), drafter="eagle3")


def test_layouts_are_all_tried() -> None:
    assert {kind.split("-")[0] for kind in KINDS} == set(LAYOUTS)
