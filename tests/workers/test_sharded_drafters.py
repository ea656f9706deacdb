"""Every drafter drafts the same where ranks share out one latent cache as where one rank has all of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.page import NULL_PAGE, Shards
from tests.rank_processes import run_ranks
from tests.tiny_draft_models import write_draft
from tests.tiny_mistral_eagle import write_eagle
from tests.tiny_models import VOCAB, write_tiny
from tests.workers.harness import InlineEngine
from workers.cache.paged import PagedCache
from workers.cache.random_pages import RandomPages
from workers.cache.spec import LatentSpec, page_bytes
from workers.config import EngineConfig
from workers.drafters.attention import KeyValueSpec
from workers.fit.memory_plan import memory_plan
from workers.fit.settings import Unfit, check_fit
from workers.models.config import ConfigError
from workers.parallel.group import Group
from workers.protocol.plan import SamplingParams
from workers.rank.rank import Rank

CPU = torch.device("cpu")
DRAFTERS = ("mtp", "ngram", "gqa", "mla", "eagle")
PAGES = 4


def settings_of(folder: Path, drafter: str, **settings: Any) -> EngineConfig:
    chosen = {"drafter": drafter} if drafter in ("mtp", "ngram") else {"draft_model": str(folder / drafter)}
    defaults = {"max_rows": 4, "token_budget": 80, "max_context": 400, "device": "cpu", "selftest": False}
    model = folder / ("mistral4" if drafter == "eagle" else "v3")
    return EngineConfig(model=str(model), **{**defaults, **chosen, **settings})


def drafted(folder: Path, group: Group, drafter: str, **settings: Any) -> dict[str, Any]:
    """Tokens of some requests, of which not all fit at once, and the drafts of all slots behind every step."""
    engine = InlineEngine(settings_of(folder, drafter, **settings), group=group)
    for layer in engine.runner.parts.cache.layers:
        layer.fill_(torch.nan)
    rng = random.Random(4)
    shared = [rng.randrange(VOCAB) for _ in range(130)]
    for index, length in enumerate((62, 63, 3, 64, 60)):
        prompt = (shared if index in (2, 4) else []) + [rng.randrange(VOCAB) for _ in range(length)]
        engine.add(f"r{index}", prompt, SamplingParams(70 if index < 2 else 5, temperature=0.0))
    drafts = []
    while engine.step():
        drafts.append(engine.runner.parts.state.tensors.draft_SK.clone())
    stats = engine.scheduler.stats()
    return {
        "tokens": [engine.finished[f"r{index}"].tokens for index in range(5)],
        "drafts": torch.stack(drafts),
        "preemptions": stats.preemptions,
        "cached": stats.cached_tokens,
    }


def rank_main(rank: int, ranks: int, shards: int, folder: Path, cases: list[tuple[str, int]]) -> None:
    torch.set_num_threads(1)
    sizes = {"tensor_parallel": ranks, "cache_shards": shards, "cache_pages": PAGES // shards + 1}
    mesh = settings_of(folder, "ngram", width=1, **sizes).mesh(rank)
    group = Group.connect(mesh, f"file://{folder}/rendezvous", CPU, timeout_s=120)
    try:
        found = {
            case: drafted(folder, group, case[0], width=case[1], selftest=case == ("gqa", 3), **sizes) for case in cases
        }
        torch.save(found, folder / f"rank{rank}.pt")
    finally:
        group.close()


@pytest.mark.parametrize(
    ("ranks", "shards", "widths"),
    [
        pytest.param(2, 2, (1, 3), marks=pytest.mark.long, id="2 ranks"),
        pytest.param(2, 2, (2, 4), marks=pytest.mark.soak, id="other widths"),
        pytest.param(4, 2, (3,), marks=pytest.mark.soak, id="2 shards of 4 ranks"),
    ],
)
def test_drafters(tmp_path: Path, ranks: int, shards: int, widths: tuple[int, ...]) -> None:
    """Hits and preemptions come between. Planted faults that this finds: keys and values of grouped-query attention
    are written where latents are; the passes behind the first draft read the table as if they had all pages."""
    write_tiny(tmp_path / "v3", "v3", seed=3, num_hidden_layers=4)
    for layout in ("gqa", "mla"):
        write_draft(tmp_path / layout, layout, hidden_size=48, vocab_size=VOCAB, draft_vocab=90)
    write_eagle(tmp_path / "eagle", write_tiny(tmp_path / "mistral4", "mistral4", seed=3), fp8=True)
    cases = [(drafter, width) for drafter in DRAFTERS for width in widths if width > 1 or drafter == "mtp"]
    run_ranks(rank_main, ranks, ranks, shards, tmp_path, cases)
    found = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(ranks)]
    preemptions = 0
    for case in cases:
        want = drafted(tmp_path, Group(), case[0], width=case[1], cache_pages=PAGES + 1)
        for got in found:
            assert got[case]["tokens"] == want["tokens"], case
            assert torch.equal(got[case]["drafts"], want["drafts"]), case
            assert (got[case]["preemptions"], got[case]["cached"]) == (want["preemptions"], want["cached"])
        preemptions += want["preemptions"]
        assert want["cached"] > 0
    assert preemptions > 0


def test_a_cache_that_is_not_shared_out_has_the_pages_of_all() -> None:
    """A planted fault: pages of keys and values are counted, zeroed or looked for by their local ids."""
    shards = Shards(2, 1)
    specs = [LatentSpec(5, torch.float32), KeyValueSpec(4, torch.float32)]
    cache = PagedCache.allocate(specs, 4, CPU, shards)
    assert [len(layer) for layer in cache.layers] == [4, 7]
    assert page_bytes(specs, shards) == 64 * 4 * (5 + 2 * 4)
    assert page_bytes(specs) == 64 * 4 * (5 + 4)
    generator = torch.Generator().manual_seed(0)
    pages = RandomPages(cache, [NULL_PAGE, 6, 3, 2], generator)
    pages.restore()
    assert [layer.flatten(1).any(1).tolist() for layer in cache.layers] == [
        [True, True, False, True],  # the null page; 2 and 6 are its first and its third
        [True, False, True, True, False, False, True],
    ]
    cache.layers[1][3, 7] += 1
    cache.layers[0][3, 5] += 1
    assert pages.changed(0).nonzero().tolist() == [[1, 5]]
    assert pages.changed(1).nonzero().tolist() == [[2, 7]]
    cache.zero_fill([6, 3])
    assert [layer.flatten(1).any(1).tolist() for layer in cache.layers] == [
        [True, True, False, False],
        [True, False, True, False, False, False, False],
    ]


@pytest.mark.parametrize("shards", [1, 2])
def test_host_memory_has_no_keys_of_all_heads(tmp_path: Path, shards: int) -> None:
    """One rank writes what all of them load. A planted fault: it is asked for only where ranks share out a cache.
    Nothing but the configs is there, so it is known before anything is loaded."""
    write_tiny(tmp_path / "v3", "v3", seed=3, num_hidden_layers=4)
    for layout in ("gqa", "mla"):
        write_draft(tmp_path / layout, layout, hidden_size=48, vocab_size=VOCAB, draft_vocab=90)
    tiers = {"host_cache_bytes": 1 << 20}
    two = {"tensor_parallel": 2, "cache_shards": shards}
    made = settings_of(tmp_path, "gqa", **two, **tiers)
    said = "each of 2 ranks has the keys and values of its own heads alone.*: give --host-cache-bytes 0"
    with pytest.raises(Unfit, match=said):
        check_fit(made)
    with pytest.raises(ConfigError, match=said):
        memory_plan(made, 8 << 30)
    (tmp_path / "v3" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=said):
        Rank(made, Group(made.mesh()), CPU)
    for works in (
        settings_of(tmp_path, "mla", **two, **tiers),
        settings_of(tmp_path, "gqa", **two),
        settings_of(tmp_path, "gqa", width=1, **two, **tiers),
        settings_of(tmp_path, "gqa", **tiers),
    ):
        check_fit(works)
