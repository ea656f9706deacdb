"""EAGLE as Mistral publishes it, against its formulas in fp64 on transformers' hidden states."""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Mistral4ForCausalLM

from tests.rank_processes import run_ranks
from tests.scenarios.served import StandInGraphs
from tests.tiny_mistral_eagle import PlainEagle, save, write_eagle
from tests.tiny_models import VOCAB, write_tiny
from tests.workers.harness import InlineEngine
from tests.workers.models.paged import Paged
from workers.config import EngineConfig
from workers.drafters.draft_model import load_draft_model
from workers.families.draft_models import read_draft_model
from workers.fit.memory_plan import memory_plan
from workers.fit.settings import Unfit, check_fit
from workers.memory.scratch import Scratch
from workers.models import general
from workers.models.config import ConfigError
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.protocol.plan import SamplingParams
from workers.rank.rank import Rank
from workers.scheduler.sequence import Phase
from workers.weights.checkpoint import WeightsError

KINDS: dict[str, dict[str, Any]] = {
    "small 4": {"layers": 2, "fp8": True},
    "large 3": {"layers": 1, "experts": 8, "fp8": True},
    "both kinds of layers": {"layers": 3, "experts": 4, "dense": 1},
}
"""As published of Mistral Small 4: two dense layers; of Mistral Large 3: one of experts."""
TARGET = "mistral4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose queries are scaled anew at every 16th position."""
    return write_tiny(tmp_path_factory.mktemp("target"), TARGET, seed=3)


@pytest.fixture(scope="module")
def drafts_of(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    return {kind: write_eagle(root / kind, folder, **values) for kind, values in KINDS.items()}


def settings(folder: Path, draft: Path | None, **changes: Any) -> EngineConfig:
    defaults = {"width": 3, "max_rows": 4, "token_budget": 48, "cache_pages": 60, "max_context": 300}
    defaults |= {"device": "cpu", "selftest": False, "draft_model": None if draft is None else str(draft)}
    return EngineConfig(model=str(folder), **{**defaults, **changes})


def engine(folder: Path, draft: Path | None, **changes: Any) -> InlineEngine:
    made = InlineEngine(settings(folder, draft, **changes))
    for layer in made.runner.parts.cache.layers:
        layer.fill_(torch.nan)
    return made


@cache
def oracle(folder: Path) -> Any:
    return Mistral4ForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()


@torch.inference_mode()
def hidden_of(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Final hidden states of every token."""
    return oracle(folder).model(torch.tensor([tokens])).last_hidden_state[0]


def plain(folder: Path, draft: Path) -> PlainEagle:
    model = oracle(folder)
    return PlainEagle(draft, model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach())


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
    """Of prompts in chunks, then of decode rows of every width, past several borders of the queries' scale."""
    made, tokens = engine(folder, drafts_of[kind]), prompts(1, 1, seed=7)[0] + prompts(2, 1, seed=6)[1][:90]
    model, drafter = made.replica.model, made.replica.model.drafter
    want = plain(folder, drafts_of[kind]).logits(hidden_of(folder, tokens[:-1]), tokens[1:])
    paged, found = Paged(model, [tokens]), []
    for step in [([], 1, [(0, 41)]), ([0], 4, []), ([], 1, [(0, 20)]), *(([0], width, []) for width in (1, 2, 3, 8))]:
        step = paged.plan(*step)
        found.append(drafter.logits(paged.draft(step, paged.forward(step))[0]))
    got = torch.cat(found)
    assert len(got) == 79
    torch.testing.assert_close(got.double(), want[: len(got)], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("tokens", "stored"), [(1, True), (8, True), (9, False)])
@torch.inference_mode()
def test_few_tokens_are_joined_by_the_matrix_in_fp8_as_it_is_stored(
    folder: Path, drafts_of: dict[str, Path], tokens: int, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No draft of a few rows dequantizes it."""
    drafter, widened, honest = engine(folder, drafts_of["small 4"]).replica.model.drafter, [], general.dequantize
    monkeypatch.setattr(general, "dequantize", lambda *given: widened.append(honest(*given)))
    files, of_model = (
        load_file(drafts_of["small 4"] / "consolidated.safetensors"),
        load_file(folder / "model.safetensors"),
    )
    token_T, hidden_TE = torch.arange(tokens), torch.randn(tokens, drafter.join_EF.shape[0])
    joined_TE, _ = drafter._join(token_T, hidden_TE, Scratch(torch.device("cpu")))
    assert bool(widened) != stored
    both_TF = torch.cat([of_model["model.embed_tokens.weight"][token_T], hidden_TE], 1).double()
    want = both_TF @ (files["eagle_linear.weight"].double() * files["eagle_linear.qscale_weight"].double()).T
    torch.testing.assert_close(joined_TE.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["small 4", pytest.param("large 3", marks=pytest.mark.long)])
def test_drafts_are_those_of_the_whole_sequence(folder: Path, drafts_of: dict[str, Path], kind: str) -> None:
    """Anything may come between: chunks, decode rows beside them, and shared pages."""
    made, reference = engine(folder, drafts_of[kind]), plain(folder, drafts_of[kind])
    for index, prompt in enumerate(prompts(6, 40, seed=4)):
        made.add(f"r{index}", prompt, SamplingParams(20, temperature=0.0))
    tensors = made.runner.parts.state.tensors
    compared: Counter[tuple[bool, bool]] = Counter()
    while made.step():
        plan = made.plans[made.runner._steps - 1]
        for sequence in made.scheduler._live.values():
            if sequence.phase is Phase.DECODE and sequence.tokens.length > sequence.goal and plan.step % 6 < 2:
                tokens, slot = list(sequence.tokens.span(0, sequence.tokens.length)), sequence.slot
                want = reference.drafts(hidden_of(folder, tokens[:-1]), tokens, plan.drafts)
                assert tensors.draft_SK[slot, : plan.drafts].tolist() == want
                compared[bool(plan.prefill), slot in plan.decode_slots] += plan.drafts
    assert compared[True, True] + compared[True, False] > 0
    assert compared[False, True] > 20
    assert made.scheduler.stats().cached_tokens > 0


@pytest.mark.parametrize(
    ("kind", "invariant", "widths"),
    [
        ("small 4", False, (4,)),
        pytest.param("large 3", False, (1, 2, 3, 4), marks=pytest.mark.long),
        pytest.param("small 4", True, (1, 2, 3), marks=pytest.mark.long),
    ],
)
def test_no_token_changes(
    folder: Path, drafts_of: dict[str, Path], kind: str, invariant: bool, widths: tuple[int, ...]
) -> None:
    asked = prompts(6, 60, seed=5)
    params = [
        SamplingParams(25, temperature=(0.0, 0.9)[seed % 2], seed=seed, top_k=(0, 100)[seed % 2])
        for seed in range(len(asked))
    ]
    without = engine(folder, None, prefix_cache=False, invariant=invariant).generate(asked, params)
    for width in widths:
        crowded = engine(folder, drafts_of[kind], width=width, cache_pages=9, invariant=invariant)
        assert crowded.generate(asked, params) == without
        assert (crowded.scheduler.stats().drafts_offered > 0) == (width > 1)


def good(folder: Path, root: Path) -> Path:
    """A draft model that reads embeddings alone, with the model's layers behind them: it answers as the model does,
    but for the first token, which it does not see, and for the place of the borders of the queries' scale."""
    weak = write_eagle(root / "weak", folder)
    params = json.loads((weak / "params.json").read_text())
    tensors, of_model = load_file(weak / "consolidated.safetensors"), load_file(folder / "model.safetensors")
    names = {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_a_proj": "attention.wq_a",
        "self_attn.q_a_layernorm": "attention.q_a_norm",
        "self_attn.q_b_proj": "attention.wq_b",
        "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
        "self_attn.kv_a_layernorm": "attention.kv_a_norm",
        "self_attn.kv_b_proj": "attention.wkv_b",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
    }
    for layer in range(params["n_layers"]):
        for theirs, ours in names.items():
            tensors[f"layers.{layer}.{ours}.weight"] = of_model[f"model.layers.{layer}.{theirs}.weight"]
    hidden = params["dim"]
    tensors["eagle_linear.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    tensors["norm.weight"] = of_model["model.norm.weight"]
    params["hidden_dim"] = len(tensors["layers.0.feed_forward.w1.weight"])
    params["yarn"]["apply_scale"], params["norm_eps"] = True, 1e-6
    return save(root / "good", params, tensors)


def test_a_draft_model_like_the_model_is_accepted(tmp_path: Path) -> None:
    """Most of what it drafts; of a random one next to nothing is."""
    folder = write_tiny(tmp_path / "target", TARGET, seed=3, first_k_dense_replace=2, num_hidden_layers=2)
    asked, sampled = prompts(6, 60, seed=5), SamplingParams(40, temperature=0.0)
    without = engine(folder, None).generate(asked, sampled)
    made = engine(folder, good(folder, tmp_path), width=4)
    assert made.generate(asked, sampled) == without
    weak = engine(folder, tmp_path / "weak", width=4)
    assert weak.generate(asked, sampled) == without
    stats, of_weak = made.scheduler.stats(), weak.scheduler.stats()
    assert stats.drafts_accepted > 0.6 * stats.drafts_offered > 0
    assert of_weak.drafts_accepted < 0.05 * of_weak.drafts_offered


@pytest.mark.parametrize("kind", ["small 4", "large 3"])
def test_steps_pass_the_self_test(folder: Path, drafts_of: dict[str, Path], kind: str) -> None:
    made = engine(folder, drafts_of[kind], selftest=True, max_rows=2, token_budget=32, max_context=200)
    assert made.replica.selftest is not None
    assert made.replica.selftest.passed


@pytest.mark.parametrize("kind", ["small 4", pytest.param("large 3", marks=pytest.mark.long)])
def test_replayed_steps_draft_the_same(folder: Path, drafts_of: dict[str, Path], kind: str) -> None:
    """Steps that were made for buckets, whose other rows and tokens are padding, in place of graphs."""
    asked, sampled = prompts(5, 60, seed=5), SamplingParams(20, temperature=0.0)
    found = []
    for replayed in (False, True):
        made = engine(folder, drafts_of[kind])
        runner = made.runner
        if replayed:
            graphs = StandInGraphs(runner.parts, made.scheduler.config.token_budget, runner.stats)
            runner.graphs = graphs  # type: ignore[assignment]
        tokens, stats = made.generate(asked, sampled), made.scheduler.stats()
        found.append((tokens, stats.drafts_offered, stats.drafts_accepted))
    assert sum(graphs.replayed.values()) > 10
    assert found[0] == found[1]


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
    found, tokens = {}, prompts(2, 60, seed=9)[1]
    for kind in KINDS:
        size = group.mesh.world.size
        sizes = {"tensor_parallel": size, "max_rows": 2, "token_budget": 64, "cache_pages": 9, "max_context": 200}
        model = Rank(settings(folder, root / kind, **sizes), group, torch.device("cpu")).model
        paged = Paged(model, [tokens])
        step = paged.plan([], 1, [(0, len(tokens) - 1)])
        assert model.drafter is not None
        found[kind] = model.drafter.logits(paged.draft(step, paged.forward(step))[0])
    return found


@pytest.mark.long
def test_two_ranks_agree_with_one(folder: Path, drafts_of: dict[str, Path]) -> None:
    root = drafts_of["small 4"].parent
    alone = logits_of_ranks(folder, root, Group())
    run_ranks(rank_main, 2, 2, folder, root)
    for rank in range(2):
        for kind, logits in torch.load(root / f"rank{rank}of2.pt").items():
            torch.testing.assert_close(logits, alone[kind], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dim": 64}, "hidden_size = 64 of the draft model, but 48 of the model"),
        ({"vocab_size": VOCAB + 1}, rf"vocab_size = {VOCAB + 1} of the draft model, but {VOCAB} of the model"),
        ({"n_heads": 8, "n_kv_heads": 8}, "num_attention_heads = 8 of the draft model, but 4 of the model"),
        ({"kv_lora_rank": 32}, "kv_lora_rank = 32 of the draft model, but 16 of the model"),
        ({"hidden_dim": 81}, "intermediate_size = 81 of the draft model cannot be divided by 2 ranks"),
        ({"use_biases": True}, "use_biases"),
        ({"yarn": {"factor": 8.0, "original_max_position_embeddings": 16}}, "apply_scale"),
        ({"quantization": {"quant_method": "awq"}}, "awq"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused_by_name(
    folder: Path, drafts_of: dict[str, Path], tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """Before any weights are read: there are none."""
    params = json.loads((drafts_of["small 4"] / "params.json").read_text())
    (tmp_path / "params.json").write_text(json.dumps(params | changes))
    config = settings(folder, tmp_path, tensor_parallel=2)
    with pytest.raises(Unfit, match=said):
        check_fit(config)
    with pytest.raises(ConfigError, match=said):
        read_draft_model(config, engine(folder, None).replica.model.config, config.mesh())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("v3", r"its queries are scaled by their position \(llama_4_scaling\), and the model's are not"),
        ("v32", "the model has sparse attention"),
        ("hyv4", "the model has several residual streams"),
    ],
)
def test_models_of_other_kinds_are_refused(drafts_of: dict[str, Path], tmp_path: Path, kind: str, said: str) -> None:
    model = write_tiny(tmp_path, kind)
    with pytest.raises(Unfit, match=said):
        check_fit(settings(model, drafts_of["small 4"]))


def test_a_drafter_of_the_other_kind_is_refused(folder: Path, drafts_of: dict[str, Path]) -> None:
    with pytest.raises(Unfit, match=r"drafter = eagle3 .* is of another kind: give --drafter eagle, or auto"):
        check_fit(settings(folder, drafts_of["small 4"], drafter="eagle3"))
    with pytest.raises(Unfit, match=r"drafter = eagle .* is of another kind: give --drafter eagle3, or auto"):
        check_fit(EngineConfig(model="demo", draft_model="demo-eagle3", drafter="eagle"))
    check_fit(settings(folder, drafts_of["small 4"], drafter="eagle"))


@pytest.mark.parametrize(
    ("name", "said"), [("eagle_linear.weight", "missing"), ("tok_embeddings.weight", "1 unexpected")]
)
def test_tensors_that_do_not_fit(
    folder: Path, drafts_of: dict[str, Path], tmp_path: Path, name: str, said: str
) -> None:
    draft = drafts_of["both kinds of layers"]
    tensors = load_file(draft / "consolidated.safetensors")
    if tensors.pop(name, None) is None:
        tensors[name] = torch.zeros(VOCAB, 48)
    save(tmp_path, json.loads((draft / "params.json").read_text()), tensors)
    model = engine(folder, None).replica.model
    read = read_draft_model(settings(folder, tmp_path), model.config, Mesh())
    assert read is not None
    with pytest.raises(WeightsError, match=said):
        load_draft_model(read, model)


def test_a_draft_model_is_no_model(drafts_of: dict[str, Path]) -> None:
    with pytest.raises(WeightsError, match=r"is a draft model .*--draft-model"):
        engine(drafts_of["small 4"], None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_plan_counts_the_draft_model(folder: Path, drafts_of: dict[str, Path], kind: str) -> None:
    without, with_it = (
        memory_plan(EngineConfig(model=str(folder), draft_model=draft, max_context=300, dtype="float32"), 8 << 30)
        for draft in (None, str(drafts_of[kind]))
    )
    made = engine(folder, drafts_of[kind])
    assert with_it.page_bytes - without.page_bytes == KINDS[kind]["layers"] * without.page_bytes // 3
    assert with_it.weights > without.weights
    assert made.replica.model.drafter.position_numbers == 8 + 1
