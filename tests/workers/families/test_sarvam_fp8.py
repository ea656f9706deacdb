"""Sarvam's model in FP8 as its makers publish it with modelopt: one scale for a matrix, beside scales of activations
and of a cache, which nothing reads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import load_oracle, oracle_logits
from paged import Paged, load_fp32
from quantized_checkpoints import FP8_MODELOPT_CONFIG, FP8_MODELOPT_NESTED
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, random_tokens, write_tiny

from kernels.matrix import BlockScaled

TOKENS = random_tokens(40, 5, VOCAB)


@pytest.mark.parametrize("quantization", [FP8_MODELOPT_CONFIG, FP8_MODELOPT_NESTED], ids=["flat", "nested"])
def test_logits_are_those_of_what_the_files_mean(quantization: dict[str, Any], tmp_path: Path) -> None:
    write_tiny(tmp_path, "sarvam", seed=8)
    meant, written = load_file(tmp_path / "model.safetensors"), {}
    for name, values in meant.items():
        if not re.search(r"_proj(_with_mqa)?\.weight$", name):
            written[name] = values
            continue
        stem, scale = name.removesuffix(".weight"), values.abs().max() / 448
        written[name] = (values / scale).to(torch.float8_e4m3fn)
        written[f"{stem}.weight_scale"], written[f"{stem}.input_scale"] = scale, torch.tensor(3.0)
        meant[name] = written[name].float() * scale
    for layer in range(2):
        attention = f"model.layers.{layer}.self_attn."
        written |= {f"{attention}{end}": torch.tensor(2.0) for end in ("kv_b_proj.k_scale", "kv_b_proj.v_scale")}
    save_file(meant, tmp_path / "model.safetensors", metadata={"format": "pt"})
    wanted = oracle_logits(load_oracle(tmp_path), TOKENS)
    save_file(written, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    model = load_fp32(tmp_path)
    assert isinstance(model.layers[0].attention.out_EF.matrix, BlockScaled)
    paged = Paged(model, [TOKENS])
    got = model.logits(paged.forward(paged.plan([], 1, [(0, len(TOKENS))]))[0])
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
