"""Tiny random draft models as Mistral publishes them (EAGLE behind `eagle_linear`), and what they compute, in fp64.

folder = write_eagle(tmp_path, target, seed=1, layers=2)
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

_SIZES = ("vocab_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def write_eagle(
    folder: Path, target: Path, *, seed: int = 1, layers: int = 2, experts: int = 0, dense: int = 0, fp8: bool = False
) -> Path:
    """Write a draft model for the Mistral 4 in `target`: `layers` of which all are dense, or, with `experts`, the first
    `dense`. `fp8`: matrices in FP8 with one scale each, and scales of activations beside them, as published."""
    config = json.loads((target / "config.json").read_text())
    rope = config["rope_parameters"]
    original = rope["original_max_position_embeddings"]
    params: dict[str, Any] = {name: config[name] for name in _SIZES} | {
        "dim": config["hidden_size"],
        "n_layers": layers,
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_attention_heads"],
        "hidden_dim": 80,
        "norm_eps": 1e-5,
        "rope_theta": rope["rope_theta"],
        "tied_embeddings": False,
        "yarn": {"factor": rope["factor"], "original_max_position_embeddings": original, "apply_scale": False}
        | {"beta": 32, "alpha": 1},
        "llama_4_scaling": {"beta": rope["llama_4_scaling_beta"], "original_max_position_embeddings": original},
    }
    if experts:
        params["moe"] = {
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "expert_hidden_dim": 32,
            "num_shared_experts": 1,
            "first_k_dense_replace": dense,
            "routed_scale": 1.5,
        }
    if fp8:
        params["quantization"] = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in _shapes(params).items():
        tensor = torch.empty(shape)
        if len(shape) == 1:
            tensor.uniform_(0.5, 1.5, generator=generator)
        else:
            tensor.normal_(0.0, 1.0 / shape[-1] ** 0.5, generator=generator)
        quantized = fp8 and len(shape) == 2 and not name.endswith(".gate.weight")
        if quantized:
            scale = tensor.abs().max() / 448
            tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
            tensors[name.removesuffix("weight") + "qscale_weight"] = scale
            tensors[name.removesuffix("weight") + "qscale_act"] = torch.tensor(0.5)
        else:
            tensors[name] = tensor
    return save(folder, params, tensors)


def save(folder: Path, params: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write both files of a draft model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(params))
    save_file(tensors, folder / "consolidated.safetensors")
    return folder


def _shapes(params: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    h, heads = params["dim"], params["n_heads"]
    rank, latent, value = params["q_lora_rank"], params["kv_lora_rank"], params["v_head_dim"]
    nope, roped = params["qk_nope_head_dim"], params["qk_rope_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"eagle_linear.weight": (h, 2 * h), "norm.weight": (h,)}
    moe = params.get("moe")
    for layer in range(params["n_layers"]):
        own: dict[str, tuple[int, ...]] = {
            "attention_norm": (h,),
            "ffn_norm": (h,),
            "attention.wq_a": (rank, h),
            "attention.q_a_norm": (rank,),
            "attention.wq_b": (heads * (nope + roped), rank),
            "attention.wkv_a_with_mqa": (latent + roped, h),
            "attention.kv_a_norm": (latent,),
            "attention.wkv_b": (heads * (nope + value), latent),
            "attention.wo": (h, heads * value),
        }
        if moe is None or layer < moe["first_k_dense_replace"]:
            networks = {"feed_forward": params["hidden_dim"]}
        else:
            own["gate"] = (moe["num_experts"], h)
            width = moe["expert_hidden_dim"]
            networks = {f"experts.{expert}": width for expert in range(moe["num_experts"])}
            networks["shared_experts"] = moe["num_shared_experts"] * width
        for name, width in networks.items():
            own |= {f"{name}.w1": (width, h), f"{name}.w2": (h, width), f"{name}.w3": (width, h)}
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    return shapes


class PlainEagle:
    """A draft model by its formulas, fp64, one sequence, no cache: everything is computed anew for every draft.

    Entry j reads the token at j beside the model's final hidden state at j - 1, and its position is that of the latter,
    as these models are trained.
    """

    def __init__(self, folder: Path, embedding_VE: Tensor, head_VE: Tensor) -> None:
        self.params = json.loads((folder / "params.json").read_text())
        stored = load_file(folder / "consolidated.safetensors")
        self.w = {
            name: tensor.double() * stored.get(name.removesuffix("weight") + "qscale_weight", torch.tensor(1.0))
            for name, tensor in stored.items()
            if name.endswith(".weight")
        }
        self.embedding_VE, self.head_VE = embedding_VE.double(), head_VE.double()

    def _norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        x = x / (x.square().mean(-1, keepdim=True) + (eps or self.params["norm_eps"])).sqrt()
        return x * self.w[f"{name}.weight"]

    def _frequencies(self) -> Tensor:
        """Radians a position (YaRN, section 3.2; the factor on cosines and sines is 1 where nothing is corrected)."""
        features, theta = self.params["qk_rope_head_dim"], self.params["rope_theta"]
        kept = theta ** (-torch.arange(0, features, 2, dtype=torch.float64) / features)
        if (yarn := self.params.get("yarn")) is None:
            return kept
        turns = yarn["original_max_position_embeddings"] / (2 * math.pi)
        low, high = (features * math.log(turns / yarn[name]) / (2 * math.log(theta)) for name in ("beta", "alpha"))
        low, high = max(math.floor(low), 0), min(math.ceil(high), features - 1)
        high = high + 0.001 if low == high else high
        interpolated = ((torch.arange(features // 2) - low) / (high - low)).clamp(0, 1)
        return kept * (1 - interpolated) + kept / yarn["factor"] * interpolated

    def _rope(self, x_SHO: Tensor) -> Tensor:
        angle_SI = torch.arange(len(x_SHO), dtype=torch.float64)[:, None] * self._frequencies()
        cos, sin = angle_SI.cos()[:, None], angle_SI.sin()[:, None]
        a, b = x_SHO[..., 0::2], x_SHO[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    def _attention(self, x_SE: Tensor, layer: int) -> Tensor:
        p, w, prefix, count = self.params, self.w, f"layers.{layer}.attention.", len(x_SE)
        heads, nope, value = p["n_heads"], p["qk_nope_head_dim"], p["v_head_dim"]
        query = self._norm(x_SE @ w[f"{prefix}wq_a.weight"].T, f"{prefix}q_a_norm", 1e-6) @ w[f"{prefix}wq_b.weight"].T
        query = query.view(count, heads, -1)
        query = torch.cat([query[..., :nope], self._rope(query[..., nope:])], -1)
        if (scaling := p.get("llama_4_scaling")) is not None:
            times = torch.arange(count) // scaling["original_max_position_embeddings"]
            query = query * (1 + scaling["beta"] * torch.log1p(times.double()))[:, None, None]
        latent, roped = (x_SE @ w[f"{prefix}wkv_a_with_mqa.weight"].T).split(
            [p["kv_lora_rank"], p["qk_rope_head_dim"]], -1
        )
        both = self._norm(latent, f"{prefix}kv_a_norm", 1e-6) @ w[f"{prefix}wkv_b.weight"].T
        key, values = both.view(count, heads, nope + value).split([nope, value], -1)
        key = torch.cat([key, self._rope(roped[:, None]).expand(-1, heads, -1)], -1)
        score_HSS = torch.einsum("shd,thd->hst", query, key) / math.sqrt(query.shape[-1])
        score_HSS = score_HSS.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -math.inf)
        out = torch.einsum("hst,thv->shv", score_HSS.softmax(-1), values)
        return out.flatten(1) @ w[f"{prefix}wo.weight"].T

    def _network(self, x: Tensor, prefix: str) -> Tensor:
        gate, down, up = (self.w[f"{prefix}w{number}.weight"] for number in (1, 2, 3))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def _feed_forward(self, x_SE: Tensor, layer: int) -> Tensor:
        moe, prefix = self.params.get("moe"), f"layers.{layer}."
        if moe is None or layer < moe["first_k_dense_replace"]:
            return self._network(x_SE, f"{prefix}feed_forward.")
        score_SX = (x_SE @ self.w[f"{prefix}gate.weight"].T).softmax(-1)
        best = score_SX.topk(moe["num_experts_per_tok"], -1)
        weight = best.values / best.values.sum(-1, keepdim=True) * moe["routed_scale"]
        out = self._network(x_SE, f"{prefix}shared_experts.")
        for token in range(len(x_SE)):
            for expert, factor in zip(best.indices[token].tolist(), weight[token], strict=True):
                out[token] += factor * self._network(x_SE[token], f"{prefix}experts.{expert}.")
        return out

    def hidden(self, hidden_SE: Tensor, tokens: list[int]) -> Tensor:
        """Return its own hidden states, of `tokens` beside the hidden states of the positions before them."""
        x = torch.cat([self.embedding_VE[tokens], hidden_SE.double()], -1) @ self.w["eagle_linear.weight"].T
        for layer in range(self.params["n_layers"]):
            x = x + self._attention(self._norm(x, f"layers.{layer}.attention_norm"), layer)
            x = x + self._feed_forward(self._norm(x, f"layers.{layer}.ffn_norm"), layer)
        return self._norm(x, "norm")

    def logits(self, hidden_SE: Tensor, tokens: list[int]) -> Tensor:
        """Logits behind each of `tokens`."""
        return self.hidden(hidden_SE, tokens) @ self.head_VE.T

    def drafts(self, hidden_SE: Tensor, tokens: list[int], count: int) -> list[int]:
        """Greedy drafts behind the last of `tokens`, whose first has no entry. `hidden_SE`: of every token but the
        last."""
        tokens, found = tokens[1:], list[int]()
        for _ in range(count):
            own = self.hidden(hidden_SE, tokens)
            found.append(int((own[-1] @ self.head_VE.T).argmax()))
            hidden_SE, tokens = torch.cat([hidden_SE.double(), own[-1:]]), [*tokens, found[-1]]
        return found
