"""A new format of weights is one class, here those of toy_format.py, and one line of the registry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints
import torch
import toy_format
from harness import InlineEngine
from quantized_checkpoints import FP8_NAMES, INT4_CONFIG, INT4_NAMES, MXFP8_CONFIG, quantize
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, write_tiny
from toy_format import GROUP, Int8Groups, Int8Scaled, KeptInt8Groups
from transformers import AutoModelForCausalLM

from kernels.dequantize import launch_dequantize
from kernels.moe.records import stored as as_experts
from workers.config import EngineConfig
from workers.models.feed_forward import MixtureOfExperts
from workers.protocol.plan import SamplingParams
from workers.quantization import unsupported_quantization
from workers.weights.checkpoint import WeightsError
from workers.weights.formats import FORMATS
from workers.weights.formats.format import Format
from workers.weights.formats.registry import assumed_dtypes

WHOLE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "v_head_dim": 32,
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
}
CUT = {**WHOLE, "hidden_size": 160, "moe_intermediate_size": 40}


@pytest.fixture(params=[Int8Groups(), KeptInt8Groups()], ids=["dequantized", "kept"])
def toy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Format]:
    monkeypatch.setitem(quantized_checkpoints.WRITERS, "int8", toy_format.write)
    monkeypatch.setitem(quantized_checkpoints.CONFIGS, "int8", toy_format.CONFIG)
    FORMATS.append(request.param)
    yield request.param
    FORMATS.remove(request.param)


def folders(folder: Path, names: str, sizes: dict[str, Any]) -> tuple[Path, Path]:
    """A checkpoint in INT8, and a plain one of the same numbers."""
    twin, quantized = (write_tiny(folder / name, "v3-one-group", seed=4, **sizes) for name in ("twin", "int8"))
    save_file(quantize(quantized, "int8", names), twin / "model.safetensors", metadata={"format": "pt"})
    return quantized, twin


@pytest.mark.parametrize(("names", "sizes"), [(FP8_NAMES, WHOLE), (INT4_NAMES, WHOLE), (FP8_NAMES, CUT)])
def test_tokens_are_transformers_tokens_of_the_dequantized_weights(
    toy: Format, names: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    folder, twin = folders(tmp_path, names, sizes)
    engine = InlineEngine(
        EngineConfig(model=str(folder), width=2, max_rows=4, token_budget=64, cache_pages=40, device="cpu")
    )
    prompts = [[(7 * index + 5 * place) % VOCAB for place in range(20 + index)] for index in range(3)]
    got = engine.generate(prompts, SamplingParams(16, temperature=0.0))
    oracle = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32).eval()
    for prompt, tokens in zip(prompts, got, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            want = oracle.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, eos_token_id=None
            )
        assert tokens == want[0, len(prompt) :].tolist()
    model = engine.replica.runner.parts.model
    (mixture, *_) = (layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, MixtureOfExperts))
    keeps = isinstance(toy, KeptInt8Groups) and sizes is WHOLE
    assert isinstance(mixture.mixture.gate_up_XFE.matrix, Int8Scaled) == keeps
    experts, features, hidden = mixture.mixture.gate_up_XFE.shape
    numbers = experts * features * hidden
    assert mixture.mixture.gate_up_XFE.nbytes == (numbers + 4 * numbers // GROUP if keeps else 4 * numbers)


def test_a_config_that_has_it_is_supported_where_it_is_registered(toy: Format) -> None:
    values = {"quantization_config": toy_format.CONFIG}
    assert not unsupported_quantization(values)
    assert not unsupported_quantization({"quantization_config": INT4_CONFIG})
    other = json.loads(json.dumps(toy_format.CONFIG).replace('"group_size": 64', '"group_size": 128'))
    said = unsupported_quantization({"quantization_config": other})
    assert "(INT8, compressed-tensors)" in said
    assert "; INT8 in groups of 64 (int-quantized); and bfloat16" in said
    FORMATS.remove(toy)
    try:
        assert "supported: 'pack-quantized'" in unsupported_quantization(values)
    finally:
        FORMATS.append(toy)


def test_files_that_are_not_there_are_assumed_to_be_so(toy: Format) -> None:
    dtype_of = assumed_dtypes(toy_format.CONFIG)
    assert [dtype_of(f"a.up_proj.weight{end}") for end in ("", "_scale", "_packed")] == ["I8", "F32", None]
    assert dtype_of("a.norm.weight") == "BF16"
    assert assumed_dtypes(INT4_CONFIG)("a.experts.3.up_proj.weight_scale") == "BF16"
    assert assumed_dtypes(None)("a.up_proj.weight") == "BF16"
    # What only ends like the scales of a matrix is there, too.
    assert assumed_dtypes(MXFP8_CONFIG)("a.hc_attn_layer.hc_pre.hc_scale") == "BF16"


def test_scales_that_are_no_numbers_are_refused(toy: Format, tmp_path: Path) -> None:
    folder, _ = folders(tmp_path, FP8_NAMES, WHOLE)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("o_proj.weight_scale"))
    tensors[name][0, 0] = float("inf")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=f"{name} has scales that are NaN or infinite"):
        InlineEngine(EngineConfig(model=str(folder), max_rows=1, cache_pages=9, device="cpu"))


def test_kernels_refuse_a_matrix_that_they_do_not_read() -> None:
    matrix = Int8Scaled(torch.zeros(2, 4, GROUP, dtype=torch.int8), torch.ones(2, 4, 1))
    with pytest.raises(TypeError, match="no kernel dequantizes Int8Scaled"):
        launch_dequantize(matrix[0], torch.zeros(4, GROUP))
    with pytest.raises(TypeError, match="no kernel multiplies experts in Int8Scaled"):
        as_experts(matrix)
