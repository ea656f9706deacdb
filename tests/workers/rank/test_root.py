"""The root of a replica's page keys: equal wherever pages hold the same, another one wherever they may not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny

from workers.config import DEMO_DRAFT_MODEL, EngineConfig
from workers.parallel.group import Group
from workers.rank import root
from workers.rank.rank import Rank

NAME = "model.safetensors"
SMALL = {"cache_pages": 4, "max_rows": 1, "token_budget": 16, "max_context": 128, "selftest": False, "device": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("root") / "model", "v3", num_nextn_predict_layers=1)


def root_of(folder: Path, **settings: Any) -> bytes:
    """The root of which a rank with these settings tells."""
    config = EngineConfig(model=str(folder), **{**SMALL, **settings})
    rank = Rank(config, Group(), torch.device("cpu"))
    assert rank.ready.root == root.cache_root(
        config, rank.model, next(iter(rank.model.caches)).dtype, torch.device("cpu")
    )
    return rank.ready.root


def test_a_replica_of_a_copy_has_the_same_whatever_does_not_change_a_page(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "config.json").write_text(json.dumps(json.loads((copy / "config.json").read_text()), sort_keys=True))
    known = root_of(folder)
    assert len(known) == 16
    assert known == root_of(copy)
    assert known == root_of(folder, cache_pages=6, max_rows=2, token_budget=32, prefix_cache=False, queue_limit=3)
    assert known == root_of(folder, host_cache_bytes=1 << 22)


def test_whatever_may_change_a_page_gives_another(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = {"as it is": root_of(folder)}

    def note(what: str, found: bytes) -> None:
        assert found not in roots.values(), f"{what} changes nothing"
        roots[what] = found

    changes: tuple[dict[str, Any], ...] = (
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
        {"drafter": "ngram"},
        {"drafter": "none"},
        {"activations": "bf16"},
        {"invariant": True},
    )
    for change in changes:
        note(str(change), root_of(folder, **change))
    other = Path(shutil.copytree(folder, tmp_path / "weights"))
    tensors = load_file(other / NAME)
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, other / NAME, metadata={"format": "pt"})
    note("weights", root_of(other))
    other = Path(shutil.copytree(folder, tmp_path / "config"))
    values = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**values, "rms_norm_eps": 2 * values["rms_norm_eps"]}))
    note("config", root_of(other))
    for name, value in (("KEY_FORMAT", 2), ("PAGE_TOKENS", 32), ("__version__", "another")):
        with monkeypatch.context() as patched:
            patched.setattr(root, name, value)
            note(name, root_of(folder))


def test_ranks_count_only_where_they_change_bits(folder: Path) -> None:
    config = EngineConfig(model=str(folder), **SMALL)
    rank = Rank(config, Group(), torch.device("cpu"))
    made = {
        (ranks, invariant): root.cache_root(
            config.model_copy(update={"tensor_parallel": ranks, "invariant": invariant}),
            rank.model,
            torch.float32,
            torch.device("cpu"),
        )
        for ranks in (1, 2)
        for invariant in (False, True)
    }
    assert made[1, True] == made[2, True]
    assert len({*made.values()}) == 3


def test_a_draft_model_and_its_weights_count(tmp_path: Path) -> None:
    draft = Path(shutil.copytree(DEMO_DRAFT_MODEL, tmp_path / "draft"))
    roots = {root_of(Path("demo"), draft_model=model) for model in (None, "demo-eagle3", str(draft))}
    assert len(roots) == 2, "a copy of the draft model is the same"
    tensors = load_file(draft / NAME)
    save_file(
        {name: tensor if tensor.dtype == torch.int64 else tensor * 1.01 for name, tensor in tensors.items()},
        draft / NAME,
    )
    assert root_of(Path("demo"), draft_model=str(draft)) not in roots
