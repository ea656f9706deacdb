"""What config.json alone decides, held against what a rank says about the same when it loads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from workers.config import EngineConfig
from workers.fit import SHARED, Unfit, check_fit

DEMO: dict[str, Any] = json.loads((EngineConfig(model="demo").folder / "config.json").read_text())


def model(folder: Path, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**DEMO, **changes}))
    return str(folder)


def fit(**settings: Any) -> str:
    """What is wrong; empty when nothing is."""
    try:
        check_fit(EngineConfig(**settings))
    except Unfit as error:
        return str(error)
    return ""


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("heads", [4, 12, 60, 7])
def test_values_are_named_that_work_and_only_those(tmp_path: Path, heads: int, invariant: bool) -> None:
    folder = model(tmp_path, num_attention_heads=heads, intermediate_size=480, moe_intermediate_size=240)
    ranks = (1, 2, 4, 8) if invariant else range(1, 65)
    said = {n: fit(model=folder, tensor_parallel=n, invariant=invariant) for n in ranks}
    works = {n for n in ranks if all(count % n == 0 for count in (heads, 480, 240))}
    assert {n for n in ranks if not said[n]} == works
    for n, text in said.items():
        if text:
            assert text.startswith(f"tensor_parallel = {n} (--tensor-parallel): ")
            named = text.rpartition("values that work: ")[2]
            assert {int(value) for value in re.findall(r"\d+", named)} <= works | set(range(65, 1000))
            assert (f"num_attention_heads = {heads}" in text) == bool(heads % n)


def test_a_context_that_the_model_was_not_made_for(tmp_path: Path) -> None:
    folder = model(tmp_path, max_position_embeddings=4096)
    assert not fit(model=folder, max_context=4096)
    said = fit(model=folder, max_context=4097)
    assert said.startswith("max_context = 4097 (--max-context)")
    assert said.endswith("give 4096 or less")


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "(fp8)"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "(fp8)"),
        (
            {
                "text_config": {
                    "quantization_config": {
                        "quant_method": "compressed-tensors",
                        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
                    }
                }
            },
            "(INT4, compressed-tensors)",
        ),
        ({"quantization_config": {}}, "(of unknown method)"),
    ],
)
def test_quantized_checkpoints_say_what_is_supported_and_where(tmp_path: Path, changes: dict, kind: str) -> None:
    said = fit(model=model(tmp_path, **changes))
    for expected in (kind, "not supported yet", "bfloat16", "docs/models.md"):
        assert expected in said


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    folder = model(tmp_path, quantization_config={"quant_method": "fp8"}, max_position_embeddings=8)
    assert len(fit(model=folder, tensor_parallel=977, max_context=9).splitlines()) == 3


@pytest.mark.parametrize(
    "strange",
    [
        {name: value}
        for name in (*SHARED, "max_position_embeddings", "text_config", "quantization_config")
        for value in (None, "x", 0, 1.5, [])
    ],
)
def test_strange_values_are_left_to_who_reads_the_model(tmp_path: Path, strange: dict) -> None:
    said = fit(model=model(tmp_path, **strange), max_context=1)
    assert ("quantized" in said) == (strange.get("quantization_config") is not None)


def test_a_file_that_is_no_config(tmp_path: Path) -> None:
    for text, said in (("{", "cannot read"), ("[]", "does not hold a JSON object")):
        (tmp_path / "config.json").write_text(text)
        assert said in fit(model=str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match=re.escape(f"is a file, not a model folder: give its folder, {tmp_path}")
    ):
        check_fit(EngineConfig(model=str(tmp_path / "config.json")))
