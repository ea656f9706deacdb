"""The two layouts in which Mistral publishes a model hold the same model, plain and in FP8 with one scale for a
matrix."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import load_oracle, oracle_logits
from paged import Paged, load_fp32
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, random_tokens, write_tiny

TOKENS = random_tokens(70, 11, VOCAB)
NAMES = {
    r"^model\.embed_tokens\.": "tok_embeddings.",
    r"^model\.norm\.": "norm.",
    r"^lm_head\.": "output.",
    r"^model\.": "",
    r"\.input_layernorm\.": ".attention_norm.",
    r"\.post_attention_layernorm\.": ".ffn_norm.",
    r"\.self_attn\.q_a_proj\.": ".attention.wq_a.",
    r"\.self_attn\.q_a_layernorm\.": ".attention.q_a_norm.",
    r"\.self_attn\.q_b_proj\.": ".attention.wq_b.",
    r"\.self_attn\.kv_a_proj_with_mqa\.": ".attention.wkv_a_with_mqa.",
    r"\.self_attn\.kv_a_layernorm\.": ".attention.kv_a_norm.",
    r"\.self_attn\.kv_b_proj\.": ".attention.wkv_b.",
    r"\.self_attn\.o_proj\.": ".attention.wo.",
    r"\.mlp\.gate\.": ".gate.",
    r"\.mlp\.(shared_experts\.|experts\.\d+\.)": r".\1",
    r"\.mlp\.": ".feed_forward.",
    r"\.gate_proj\.": ".w1.",
    r"\.down_proj\.": ".w2.",
    r"\.up_proj\.": ".w3.",
    r"\.weight_scale_inv$": ".qscale_weight",
    r"\.activation_scale$": ".qscale_act",
}
"""DeepSeek's names as those of Mistral, one rule behind the other."""


def quantized(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The projections and the experts in FP8 with one scale for a matrix, and what they stand for."""
    stored, meant = dict(tensors), dict(tensors)
    for name, values in tensors.items():
        expert = ".experts." in name
        if not expert and not re.search(r"_proj(_with_mqa)?\.weight$", name):
            continue
        largest = values.abs().amax((1, 2), keepdim=True) if expert else values.abs().max()
        scale = largest / 448
        stored[name] = (values / scale).to(torch.float8_e4m3fn)
        meant[name] = stored[name].float() * scale
        stored[f"{name}_scale_inv"] = scale
        activation = f"{name}_activation_scale" if expert else f"{name.removesuffix('.weight')}.activation_scale"
        stored[activation] = torch.ones(len(values)) if expert else torch.tensor(1.0)
    return stored, meant


def as_mistral(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors in Mistral's own layout: each expert by itself, under Mistral's names."""
    apart: dict[str, torch.Tensor] = {}
    for name, values in tensors.items():
        found = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj(_scale_inv)?", name)
        if found is None:
            if ".experts." not in name:  # scales of activations are one for each projection there
                apart[name] = values
            continue
        for expert, own in enumerate(values):
            end = ".weight" if found[3] is None else ".weight_scale_inv"
            parts = ["gate", "up"] if found[2] == "gate_up" else ["down"]
            halves = [own] * len(parts) if found[3] else own.chunk(len(parts))
            for part, half in zip(parts, halves, strict=True):
                whole = half.reshape(()) if found[3] else half
                apart[f"{found[1]}.{expert}.{part}_proj{end}"] = whole.clone()
    renamed = {}
    for name, values in apart.items():
        for pattern, instead in NAMES.items():
            name = re.sub(pattern, instead, name)
        renamed[name] = values
    return renamed


def params(config: dict[str, Any], *, fp8: bool = False, apply_scale: bool = False) -> dict[str, Any]:
    rope = config["rope_parameters"]
    original = rope["original_max_position_embeddings"]
    names = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "vocab_size")
    return {name: config[name] for name in (*names, "max_position_embeddings", "rope_theta") if name in config} | {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "hidden_dim": config["intermediate_size"],
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": rope["rope_theta"],
        "moe": {
            "num_experts": config["n_routed_experts"],
            "num_experts_per_tok": config["num_experts_per_tok"],
            "expert_hidden_dim": config["moe_intermediate_size"],
            "num_shared_experts": config["n_shared_experts"],
            "first_k_dense_replace": config["first_k_dense_replace"],
        },
        "yarn": {"factor": rope["factor"], "original_max_position_embeddings": original, "apply_scale": apply_scale}
        | {"beta": 32, "alpha": 1},
        "llama_4_scaling": {"beta": rope["llama_4_scaling_beta"], "original_max_position_embeddings": original},
        **({"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}} if fp8 else {}),
    }


def logits(folder: Path) -> torch.Tensor:
    model = load_fp32(folder)
    paged = Paged(model, [TOKENS])
    return model.logits(paged.forward(paged.plan([], 1, [(0, len(TOKENS))]))[0])


def uncorrected(folder: Path) -> None:
    """Have config.json say what `apply_scale: false` means in words that transformers has."""
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"mscale": 0.0, "mscale_all_dim": 0.0, "attention_factor": 1.0}
    (folder / "config.json").write_text(json.dumps(config))


def test_the_makers_say_whether_the_softmax_scale_is_corrected(tmp_path: Path) -> None:
    """By their params.json, also where it lies beside a config.json, which has no word for it and an `mscale_all_dim`
    of 1 in either case. For that transformers corrects, and does not where it is 0."""
    write_tiny(tmp_path, "mistral4", seed=6)
    as_written = json.loads((tmp_path / "config.json").read_text())
    corrected = oracle_logits(load_oracle(tmp_path), TOKENS)
    uncorrected(tmp_path)
    plain = oracle_logits(load_oracle(tmp_path), TOKENS)
    assert (plain - corrected).abs().max() > 0.1
    del as_written["rope_parameters"]["apply_scale"]
    assert as_written["rope_parameters"]["mscale_all_dim"] == 1.0
    (tmp_path / "config.json").write_text(json.dumps(as_written))
    for apply_scale, wanted in ((None, plain), (False, plain), (True, corrected)):
        if apply_scale is not None:
            (tmp_path / "params.json").write_text(json.dumps(params(as_written, apply_scale=apply_scale)))
        torch.testing.assert_close(logits(tmp_path), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("fp8", [False, True])
def test_both_layouts_are_one_model(fp8: bool, tmp_path: Path) -> None:
    theirs, ours, plain = (tmp_path / name for name in ("hugging face", "mistral", "plain"))
    write_tiny(plain, "mistral4", seed=6, first_k_dense_replace=1)
    config, tensors = json.loads((plain / "config.json").read_text()), load_file(plain / "model.safetensors")
    uncorrected(plain)
    del config["rope_parameters"]["apply_scale"]  # as published: params.json alone has it
    if fp8:
        tensors, meant = quantized(tensors)
        save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    theirs.mkdir()
    quantization = {"quant_method": "fp8", "activation_scheme": "static", "fmt": "e4m3", "weight_block_size": None}
    written = config | ({"quantization_config": quantization} if fp8 else {})
    (theirs / "config.json").write_text(json.dumps(written))
    save_file(tensors, theirs / "model.safetensors")
    ours.mkdir()
    (ours / "params.json").write_text(json.dumps(params(config, fp8=fp8)))
    names = as_mistral(tensors) | {"vision_encoder.ln_pre.weight": torch.ones(4), "patch_merger.w": torch.ones(4)}
    halves = [dict(list(names.items())[begin::2]) for begin in (0, 1)]
    files = {f"consolidated-0000{place}-of-00002.safetensors": half for place, half in enumerate(halves)}
    for file, half in files.items():
        save_file(half, ours / file)
    index = {name: file for file, half in files.items() for name in half}
    (ours / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    got = logits(theirs)
    assert torch.equal(logits(ours), got)
    torch.testing.assert_close(got, oracle_logits(load_oracle(plain), TOKENS), atol=1e-4, rtol=0)


def test_without_yarn_and_without_experts(tmp_path: Path) -> None:
    """Rope is plain, which is yarn with a factor of 1; queries are scaled all the same, and all layers are dense, as
    vLLM reads such a params.json."""
    rope = {"rope_type": "yarn", "factor": 1.0, "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
    rope |= {"original_max_position_embeddings": 16, "partial_rotary_factor": 8 / 24, "apply_scale": False}
    theirs, ours = tmp_path / "hugging face", tmp_path / "mistral"
    write_tiny(theirs, "mistral4", seed=6, first_k_dense_replace=3, rope_parameters=rope)
    want = oracle_logits(load_oracle(theirs), TOKENS)
    config = json.loads((theirs / "config.json").read_text())
    said = {name: value for name, value in params(config).items() if name not in ("moe", "yarn")}
    ours.mkdir()
    (ours / "params.json").write_text(json.dumps(said))
    save_file(as_mistral(load_file(theirs / "model.safetensors")), ours / "consolidated.safetensors")
    torch.testing.assert_close(logits(ours), want, atol=1e-4, rtol=0)
    plain = {name: value for name, value in rope.items() if name not in ("factor", "apply_scale")}
    plain["rope_type"] = "default"
    (theirs / "config.json").write_text(json.dumps({**config, "rope_parameters": plain}))
    assert torch.equal(logits(theirs), logits(ours))
