"""The formulas of DSpark in float64, of a whole sequence at once, without caches: what drafts, their logits and their
confidences are compared with. Transformers has no DSpark. They are written from what is published, not from the code
under test, and were compared with DeepSeek's published inference program.

Shape legend: N tokens of context, K tokens of a block, T tokens, E hidden features, Z residual streams, H heads, D
features of an entry, G groups of heads, S entries, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """What is drafted behind a token."""

    tokens: list[int]
    logits_KV: Tensor
    confidence_K: Tensor
    """Estimate that a draft is accepted if those before it are."""


class DsparkReference:
    """Drafts of a checkpoint's tensors, by their published names, which are taken as they are."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._config = config
        self._weights = {name: tensor.double() for name, tensor in tensors.items()}
        self._eps: float = config["rms_norm_eps"]

    def block(self, context_NF: Tensor, newest: int, stages: int = 3) -> Block:
        """The greedy drafts behind token `newest`, which stands at position N. `context_NF`: the means of the streams
        behind each of the layers that are read, side by side, of all tokens before it."""
        config, weights = self._config, self._weights
        size, vocab = config["dspark_block_size"], config["vocab_size"]
        main_NE = self._norm(context_NF.double() @ weights["mtp.0.main_proj.weight"].T, "mtp.0.main_norm")
        fed = [newest] + [config["dspark_noise_token_id"]] * (size - 1)
        streams_KZE = weights["embed.weight"][fed].unsqueeze(1).expand(-1, config["hc_mult"], -1)
        for stage in range(stages):
            streams_KZE = self._stage(f"mtp.{stage}", streams_KZE, main_NE)
        last = f"mtp.{stages - 1}"
        flat_KF = streams_KZE.flatten(1)
        m_KZ = self._rms(flat_KF) @ weights[f"{last}.hc_head_fn"].T * weights[f"{last}.hc_head_scale"]
        read_KZ = torch.sigmoid(m_KZ + weights[f"{last}.hc_head_base"]) + config["hc_eps"]
        x_KE = (read_KZ.unsqueeze(2) * streams_KZE).sum(1)
        logits_KV = self._norm(x_KE, f"{last}.norm") @ weights["head.weight"].T
        w1_VM, w2_VM = (weights[f"{last}.markov_head.markov_w{number}.weight"] for number in (1, 2))
        tokens, confidences = [newest], []
        for index in range(size):
            w1_M = w1_VM[tokens[-1]]
            logits_KV[index] += w2_VM @ w1_M
            score = torch.cat([x_KE[index], w1_M]) @ weights[f"{last}.confidence_head.proj.weight"][0]
            confidences.append(torch.sigmoid(score))
            tokens.append(int(logits_KV[index].argmax()))
        assert logits_KV.shape == (size, vocab)
        return Block(tokens[1:], logits_KV, torch.stack(confidences))

    def _rms(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self._eps).sqrt()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self._rms(x) * self._weights[f"{name}.weight"]

    def _stage(self, name: str, streams_KZE: Tensor, main_NE: Tensor) -> Tensor:
        x_KE, add = self._read(f"{name}.hc_attn_", streams_KZE)
        streams_KZE = add(self._attention(f"{name}.attn", self._norm(x_KE, f"{name}.attn_norm"), main_NE))
        x_KE, add = self._read(f"{name}.hc_ffn_", streams_KZE)
        return add(self._experts(f"{name}.ffn", self._norm(x_KE, f"{name}.ffn_norm")))

    def _read(self, name: str, streams_KZE: Tensor) -> tuple[Tensor, Any]:
        """What a part of a layer reads, and how its output is added: a sum over streams by sigmoids, and a mixture of
        them by a matrix whose columns and rows were divided by their sums in turn."""
        count, eps = self._config["hc_mult"], self._config["hc_eps"]
        fn, base, (s0, s1, s2) = (self._weights[f"{name}{part}"] for part in ("fn", "base", "scale"))
        m_KM = self._rms(streams_KZE.flatten(1)) @ fn.T
        pre_KZ = torch.sigmoid(m_KM[:, :count] * s0 + base[:count]) + eps
        post_KZ = 2 * torch.sigmoid(m_KM[:, count : 2 * count] * s1 + base[count : 2 * count])
        mix_KZZ = (m_KM[:, 2 * count :] * s2 + base[2 * count :]).view(-1, count, count)
        mix_KZZ = mix_KZZ.softmax(-1) + eps
        mix_KZZ = mix_KZZ / (mix_KZZ.sum(-2, keepdim=True) + eps)
        for _ in range(self._config["hc_sinkhorn_iters"] - 1):
            mix_KZZ = mix_KZZ / (mix_KZZ.sum(-1, keepdim=True) + eps)
            mix_KZZ = mix_KZZ / (mix_KZZ.sum(-2, keepdim=True) + eps)

        def add(x_KE: Tensor) -> Tensor:
            mixed_KZE = torch.einsum("kji,kje->kie", mix_KZZ, streams_KZE)
            return mixed_KZE + post_KZ.unsqueeze(2) * x_KE.unsqueeze(1)

        return torch.einsum("kz,kze->ke", pre_KZ, streams_KZE), add

    def _rope(self, x: Tensor, position: Tensor) -> Tensor:
        """The last features of `x` [T, .., D] turned, in pairs, by a plain rope."""
        turned, theta = self._config["qk_rope_head_dim"], self._config["rope_theta"]
        frequency = theta ** -(torch.arange(0, turned, 2, dtype=torch.float64) / turned)
        angle = position.double().view(-1, *[1] * (x.dim() - 1)) * frequency
        plain, rest = x[..., :-turned], x[..., -turned:]
        even, odd = rest[..., 0::2], rest[..., 1::2]
        pairs = torch.stack([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1)
        return torch.cat([plain, pairs.flatten(-2)], -1)

    def _attention(self, name: str, x_KE: Tensor, main_NE: Tensor) -> Tensor:
        """Every token of the block sees the newest entries of the context and all of the block, its later tokens,
        too."""
        config, weights = self._config, self._weights
        heads, features, groups = config["num_attention_heads"], config["head_dim"], config["o_groups"]
        begin, block = len(main_NE), torch.arange(len(main_NE), len(main_NE) + len(x_KE))
        c_KA = self._norm(x_KE @ weights[f"{name}.wq_a.weight"].T, f"{name}.q_norm")
        q_KHD = self._rms((c_KA @ weights[f"{name}.wq_b.weight"].T).view(-1, heads, features))
        q_KHD = self._rope(q_KHD, block)
        both_SE, position_S = torch.cat([main_NE, x_KE]), torch.arange(begin + len(x_KE))
        entry_SD = self._norm(both_SE @ weights[f"{name}.wkv.weight"].T, f"{name}.kv_norm")
        entry_SD = self._rope(entry_SD, position_S)[max(0, begin - config["sliding_window"]) :]
        score_KHS = torch.einsum("khd,sd->khs", q_KHD, entry_SD) / features**0.5
        sink_KH1 = weights[f"{name}.attn_sink"].view(1, -1, 1).expand(len(x_KE), -1, 1)
        weight_KHS = torch.cat([score_KHS, sink_KH1], -1).softmax(-1)[..., :-1]
        out_KHD = self._rope(torch.einsum("khs,sd->khd", weight_KHS, entry_SD), -block)
        wo_a = weights[f"{name}.wo_a.weight"].view(groups, config["o_lora_rank"], -1)
        grouped = torch.einsum("kgd,gud->kgu", out_KHD.reshape(len(x_KE), groups, -1), wo_a)
        return grouped.flatten(1) @ weights[f"{name}.wo_b.weight"].T

    def _experts(self, name: str, x_KE: Tensor) -> Tensor:
        config, weights = self._config, self._weights
        score_KX = torch.nn.functional.softplus(x_KE @ weights[f"{name}.gate.weight"].T).sqrt()
        chosen_KA = (score_KX + weights[f"{name}.gate.bias"]).topk(config["num_experts_per_tok"]).indices
        out_KE = torch.stack([self._network(f"{name}.shared_experts", x_E) for x_E in x_KE])
        for row, chosen in enumerate(chosen_KA.tolist()):
            total = score_KX[row, chosen].sum()
            for expert in chosen:
                share = config["routed_scaling_factor"] * score_KX[row, expert] / total
                out_KE[row] += share * self._network(f"{name}.experts.{expert}", x_KE[row])
        return out_KE

    def _network(self, name: str, x_E: Tensor) -> Tensor:
        limit: float = self._config["swiglu_limit"]
        gate, up = (self._weights[f"{name}.w{number}.weight"] @ x_E for number in (1, 3))
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return self._weights[f"{name}.w2.weight"] @ (gate * torch.sigmoid(gate) * up)
