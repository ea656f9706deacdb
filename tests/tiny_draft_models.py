"""Tiny random EAGLE-3 draft models in both published layouts, and what they compute, in plain torch.

folder = write_draft(tmp_path, "gqa", hidden_size=48, vocab_size=131, seed=1)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYOUTS = ("gqa", "mla")


def write_draft(
    folder: Path, layout: str, *, hidden_size: int, vocab_size: int, draft_vocab: int = 0, seed: int = 1, **values: Any
) -> Path:
    """A draft model whose vocabulary is every id, or `draft_vocab` of them. `values`: of its config.json."""
    generator = torch.Generator().manual_seed(seed)
    within = draft_vocab or vocab_size
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "draft_vocab_size": within,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "max_position_embeddings": 512,
        **values,
    }
    if layout == "mla":
        config |= {
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
        }
        config |= {"num_key_value_heads": 8, "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2"}
    h, heads = hidden_size, config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, 3 * h),
        "norm.weight": (h,),
        "lm_head.weight": (within, h),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
        **{f"midlayer.mlp.{name}_proj.weight": (64, h) for name in ("gate", "up")},
        "midlayer.mlp.down_proj.weight": (h, 64),
    }
    attention = "midlayer.self_attn."
    if layout == "gqa":
        own, keys = heads * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
        sizes = {"q_proj": (own, 2 * h), "k_proj": (keys, 2 * h), "v_proj": (keys, 2 * h), "o_proj": (h, own)}
    else:
        sizes = {
            "q_a_proj": (24, 2 * h),
            "q_a_layernorm": (24,),
            "q_b_proj": (heads * 24, 24),
            "kv_a_proj_with_mqa": (40, 2 * h),
            "kv_a_layernorm": (32,),
            "kv_b_proj": (heads * 28, 32),
            "o_proj": (h, heads * 12),
        }
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (h,) for index in range(3)}
    shapes |= {f"{attention}{name}.weight": shape for name, shape in sizes.items()}
    tensors = {}
    for name, shape in shapes.items():
        tensor = torch.empty(shape)
        if len(shape) == 1:
            tensor.uniform_(0.5, 1.5, generator=generator)
        else:
            tensor.normal_(0.0, 1.5 / shape[-1] ** 0.5, generator=generator)
        tensors[name] = tensor
    if draft_vocab:
        ids = torch.randperm(vocab_size, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


class PlainEagle3:
    """A draft model as its paper has it, fp32, one sequence, no cache: everything is computed anew for every draft."""

    def __init__(self, folder: Path, embedding_YE: Tensor) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.w = load_file(folder / "model.safetensors")
        self.embedding_YE = self.w.get("embed_tokens.weight", embedding_YE)

    def _norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        weight = self.w[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, eps or self.config["rms_norm_eps"])

    def _rope(self, x_SHD: Tensor, *, halves: bool) -> Tensor:
        """Rope entries at positions 1, 2, ..."""
        features = x_SHD.shape[-1]
        position_S = torch.arange(1, len(x_SHD) + 1)
        angle_SI = position_S[:, None] * self.config["rope_theta"] ** (-torch.arange(0, features, 2) / features)
        cos, sin = angle_SI.cos()[:, None], angle_SI.sin()[:, None]
        a, b = x_SHD.chunk(2, -1) if halves else (x_SHD[..., 0::2], x_SHD[..., 1::2])
        turned = a * cos - b * sin, a * sin + b * cos
        return torch.cat(turned, -1) if halves else torch.stack(turned, -1).flatten(-2)

    def _attend(self, x_SF: Tensor) -> Tensor:
        w, count, heads = {n.removeprefix("midlayer.self_attn."): t for n, t in self.w.items()}, len(x_SF), 8
        if "q_proj.weight" in w:
            features = self.config["head_dim"]
            q, k, v = ((x_SF @ w[f"{n}_proj.weight"].T).view(count, -1, features) for n in "qkv")
            q, k = self._rope(q, halves=True), self._rope(k, halves=True)
            k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
        else:
            prefix = "midlayer.self_attn."
            q = self._norm(x_SF @ w["q_a_proj.weight"].T, f"{prefix}q_a_layernorm", 1e-6) @ w["q_b_proj.weight"].T
            q = q.view(count, heads, 24)
            latent, roped = (x_SF @ w["kv_a_proj_with_mqa.weight"].T).split([32, 8], -1)
            kv = self._norm(latent, f"{prefix}kv_a_layernorm", 1e-6) @ w["kv_b_proj.weight"].T
            k, v = kv.view(count, heads, 28).split([16, 12], -1)
            q = torch.cat([q[..., :16], self._rope(q[..., 16:], halves=False)], -1)
            k = torch.cat([k, self._rope(roped[:, None], halves=False).expand(-1, heads, -1)], -1)
        out = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), is_causal=True)
        return out.transpose(0, 1).flatten(1) @ w["o_proj.weight"].T

    def _layer(self, hidden_SE: Tensor, tokens: list[int]) -> Tensor:
        embedded = self._norm(self.embedding_YE[tokens], "midlayer.input_layernorm")
        normed = self._norm(hidden_SE, "midlayer.hidden_norm")
        residual = normed if self.config.get("norm_before_residual") else hidden_SE
        x = residual + self._attend(torch.cat([embedded, normed], -1))
        y = self._norm(x, "midlayer.post_attention_layernorm")
        gate, up, down = (self.w[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        out = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
        return self._norm(out, "norm") if self.config.get("norm_output") else out

    def logits(self, residual_SE: Tensor) -> Tensor:
        """Compute logits by the model's ids."""
        normed = residual_SE if self.config.get("norm_output") else self._norm(residual_SE, "norm")
        small = normed @ self.w["lm_head.weight"].T
        if "d2t" not in self.w:
            return small
        out = torch.full((len(small), self.config["vocab_size"]), -torch.inf)
        for index, offset in enumerate(self.w["d2t"].tolist()):
            out[:, index + offset] = small[:, index]
        return out

    def drafts(self, aux_SF: Tensor, tokens: list[int], count: int) -> tuple[Tensor, list[int]]:
        """Logits behind tokens 1, 2, ... of `tokens`, and greedy drafts behind the last. `aux_SF`: the model's hidden
        states of every token but the last."""
        if self.config.get("fc_norm"):
            parts = enumerate(aux_SF.chunk(3, -1))
            aux_SF = torch.cat([self._norm(part, f"fc_norm.{index}") for index, part in parts], -1)
        hidden, tokens, found = aux_SF @ self.w["fc.weight"].T, tokens[1:], []
        first = None
        for _ in range(count):
            residual = self._layer(hidden, tokens)
            logits = self.logits(residual)
            first = logits if first is None else first
            found.append(int(logits[-1].argmax()))
            hidden, tokens = torch.cat([hidden, residual[-1:]]), [*tokens, found[-1]]
        assert first is not None
        return first, found
