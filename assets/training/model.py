"""The DeepSeek-V3 architecture with one multi-token-prediction (MTP) layer, written for training.

Modules are named as the official checkpoints name their tensors; `export_tensors` and `load_tensors` translate the
two places that differ (the experts are held as one tensor, the MTP layer as a module of its own).

Shape suffixes: B rows, T tokens of a row, N = B·T, D hidden size, H heads, K query/key size of a head (nope + rope),
V value size of a head, R rope size, E experts, F width of an expert, W vocabulary.
DeepSeek-V3: https://arxiv.org/abs/2412.19437
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.corpus import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

KeyValue = tuple[Tensor, Tensor]  # keys_BHTK, values_BHTV
Rope = tuple[Tensor, Tensor]  # cosines and sines, each [T, R/2]


@dataclass(frozen=True)
class ModelConfig:
    """The sizes, under the names that `config.json` has for them."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 192
    intermediate_size: int = 640
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 4
    num_nextn_predict_layers: int = 1
    first_k_dense_replace: int = 1
    num_attention_heads: int = 8
    num_key_value_heads: int = 8
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    n_routed_experts: int = 8
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.0
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def to_json(self) -> dict[str, Any]:
        """`config.json` in the form of the official checkpoints."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            **asdict(self),
            "rope_scaling": None,
            "rope_interleave": True,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "moe_layer_freq": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "tie_word_embeddings": False,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "ModelConfig":
        """Read the sizes back from `config.json`."""
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})


class RMSNorm(nn.Module):
    """Root mean square norm, computed in fp32: https://arxiv.org/abs/1910.07467."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norm over the last dimension; any shape, dtype kept."""
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def rope_table(config: ModelConfig, length: int, first: int, device: torch.device) -> Rope:
    """Cosines and sines [length, R/2] of positions `first`, `first` + 1, ..."""
    exponents = torch.arange(0, config.qk_rope_head_dim, 2, device=device) / config.qk_rope_head_dim
    positions_T = torch.arange(first, first + length, device=device, dtype=torch.float32)
    angles = positions_T[:, None] * config.rope_theta**-exponents
    return angles.cos(), angles.sin()


def apply_rope(x_BHTR: Tensor, rope: Rope) -> Tensor:
    """Rotate the interleaved pairs (x0, x1), (x2, x3), ...; the result holds all first halves, then all second ones."""
    cos, sin = rope
    a, b = x_BHTR.float()[..., 0::2], x_BHTR.float()[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_BHTR.dtype)


class Attention(nn.Module):
    """Multi-head latent attention; keys and values are expanded from the latent, as training wants it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = c = config
        self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        qk_head_dim = c.qk_nope_head_dim + c.qk_rope_head_dim
        self.q_b_proj = nn.Linear(c.q_lora_rank, c.num_attention_heads * qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
        kv_head_dim = c.qk_nope_head_dim + c.v_head_dim
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, c.num_attention_heads * kv_head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.v_head_dim, c.hidden_size, bias=False)

    def projected(self, x_BTD: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys [B, H, T, K] and values [B, H, T, V] of these tokens."""
        c = self.config
        B, T, _ = x_BTD.shape
        q_BHTK = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD))).view(B, T, c.num_attention_heads, -1)
        q_nope, q_rope = q_BHTK.transpose(1, 2).split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x_BTD).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        kv_BTHX = self.kv_b_proj(self.kv_a_layernorm(latent)).view(B, T, c.num_attention_heads, -1)
        k_nope, v_BHTV = kv_BTHX.transpose(1, 2).split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        k_rope = apply_rope(k_rope[:, None], rope).expand(-1, c.num_attention_heads, -1, -1)
        q_BHTK = torch.cat([q_nope, apply_rope(q_rope, rope)], dim=-1)
        return q_BHTK, torch.cat([k_nope, k_rope], dim=-1), v_BHTV

    def forward(self, x_BTD: Tensor, rope: Rope, earlier: list[KeyValue]) -> tuple[Tensor, KeyValue]:
        """Attend causally. Returns the output [B, T, D] and this call's keys and values.

        `earlier` is for drafting several tokens from every position at once: it holds what earlier draft steps
        returned. Then a token attends to the first step's entries up to its own column, and to its own column of the
        later steps: what a decoder would find in its cache.
        """
        B, T, _ = x_BTD.shape
        q_BHTK, k_BHTK, v_BHTV = self.projected(x_BTD, rope)
        if not earlier:
            out_BHTV = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTV, is_causal=True)
        else:
            steps = [*earlier, (k_BHTK, v_BHTV)]
            causal_TT = torch.ones(T, T, dtype=torch.bool, device=x_BTD.device).tril()
            own_TT = torch.eye(T, dtype=torch.bool, device=x_BTD.device)
            out_BHTV = F.scaled_dot_product_attention(
                q_BHTK,
                torch.cat([keys for keys, _ in steps], dim=2),
                torch.cat([values for _, values in steps], dim=2),
                attn_mask=torch.cat([causal_TT] + [own_TT] * len(earlier), dim=1),
            )
        return self.o_proj(out_BHTV.transpose(1, 2).reshape(B, T, -1)), (k_BHTK, v_BHTV)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Router(nn.Module):
    """Sigmoid scores, group-limited top-k, balanced by a bias that only the choice sees (section 2.1.2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.e_score_correction_bias: Tensor
        self.load_E: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.register_buffer("load_E", torch.zeros(config.n_routed_experts), persistent=False)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Weights [N, E] in fp32, zero for experts not chosen."""
        c = self.config
        with torch.autocast(x_ND.device.type, enabled=False):
            scores_NE = F.linear(x_ND.float(), self.weight.float()).sigmoid()
        with torch.no_grad():
            choice_NE = scores_NE + self.e_score_correction_bias
            group_scores_NG = choice_NE.view(len(x_ND), c.n_group, -1).topk(2, dim=-1)[0].sum(-1)
            groups = group_scores_NG.topk(c.topk_group, dim=-1)[1]
            kept_NG = torch.zeros_like(group_scores_NG).scatter(1, groups, 1.0)
            kept_NE = kept_NG.repeat_interleave(c.n_routed_experts // c.n_group, dim=1)
            experts = choice_NE.masked_fill(kept_NE == 0, -torch.inf).topk(c.num_experts_per_tok, dim=-1)[1]
            chosen_NE = torch.zeros_like(scores_NE).scatter(1, experts, 1.0)
            if self.training:
                self.load_E += chosen_NE.sum(0)
        weights_NE = scores_NE * chosen_NE
        return weights_NE / (weights_NE.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor

    @torch.no_grad()
    def rebalance(self, speed: float) -> None:
        """Raise the bias of experts that got less than the mean load since the last call, lower that of the others."""
        self.e_score_correction_bias += speed * (self.load_E.mean() - self.load_E).sign()
        self.load_E.zero_()


class MoE(nn.Module):
    """Routed and shared experts. All experts compute all tokens: at this size dense products are faster."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = (config.n_routed_experts, config.moe_intermediate_size, config.hidden_size)
        self.gate = Router(config)
        self.gate_EFD = nn.Parameter(torch.empty(shape))
        self.up_EFD = nn.Parameter(torch.empty(shape))
        self.down_EFD = nn.Parameter(torch.empty(shape))
        self.shared_experts = MLP(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        x_ND = x_BTD.flatten(0, 1)
        weights_NE = self.gate(x_ND).to(x_ND.dtype)
        inner = F.silu(F.linear(x_ND, self.gate_EFD.flatten(0, 1))) * F.linear(x_ND, self.up_EFD.flatten(0, 1))
        inner_NEF = inner.view(*weights_NE.shape, -1) * weights_NE[..., None]
        routed_ND = inner_NEF.flatten(1) @ self.down_EFD.flatten(0, 1).to(inner_NEF.dtype)
        return routed_ND.view_as(x_BTD) + self.shared_experts(x_BTD)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, with dropout on both branches."""

    def __init__(self, config: ModelConfig, dense: bool, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size) if dense else MoE(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, rope: Rope, earlier: list[KeyValue]) -> tuple[Tensor, KeyValue]:
        """[B, T, D] to [B, T, D] and the keys and values of the attention."""
        attended_BTD, key_value = self.self_attn(self.input_layernorm(x_BTD), rope, earlier)
        x_BTD = x_BTD + self.dropout(attended_BTD)
        return x_BTD + self.dropout(self.mlp(self.post_attention_layernorm(x_BTD))), key_value


class MTPLayer(nn.Module):
    """Joins a hidden state with the embedding of the token after it, and predicts one token further on."""

    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = DecoderLayer(config, dense=False, dropout=dropout)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, embedded_BTD: Tensor, hidden_BTD: Tensor, rope: Rope, earlier: list[KeyValue]
    ) -> tuple[Tensor, KeyValue]:
        """Returns the normed hidden state [B, T, D], for the head and for the next draft, and keys and values."""
        joined = torch.cat([self.enorm(embedded_BTD), self.hnorm(hidden_BTD)], dim=-1)
        x_BTD, key_value = self.block(self.eh_proj(joined), rope, earlier)
        return self.norm(x_BTD), key_value


class DemoModel(nn.Module):
    """Trunk, head and MTP layer; embedding and head serve both."""

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, dense=i < config.first_k_dense_replace, dropout=dropout)
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp = MTPLayer(config, dropout)
        self.dropout = nn.Dropout(dropout)
        self._initialize()

    @torch.no_grad()
    def _initialize(self) -> None:
        """Variance-preserving weights; projections back into the residual stream are shrunk by their number."""
        for name, weight in self.named_parameters():
            if weight.dim() == 1:
                continue  # norms start at one
            fan_in = weight.shape[1] if name.endswith("down_EFD") else weight.shape[-1]
            std = fan_in**-0.5
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_EFD")):
                std *= (2 * self.config.num_hidden_layers) ** -0.5
            elif name == "lm_head.weight":
                std = 0.02
            nn.init.normal_(weight, std=std)

    def trunk(self, ids_BT: Tensor) -> Tensor:
        """Hidden states [B, T, D] after the final norm."""
        rope = rope_table(self.config, ids_BT.shape[1], 0, ids_BT.device)
        x_BTD = self.dropout(self.embed_tokens(ids_BT))
        for layer in self.layers:
            x_BTD, _ = layer(x_BTD, rope, [])
        return self.norm(x_BTD)  # type: ignore[no-any-return]

    def draft(self, next_ids_BT: Tensor, hidden_BTD: Tensor, earlier: list[KeyValue]) -> tuple[Tensor, KeyValue]:
        """One MTP step in every column t: `next_ids_BT[:, t]` is the token after `hidden_BTD[:, t]`.

        In draft step s = len(`earlier`) a column's token stands s places further on than in step 0.
        Returns the hidden state [B, T, D] of the draft and its keys and values.
        """
        rope = rope_table(self.config, next_ids_BT.shape[1], len(earlier), next_ids_BT.device)
        return self.mtp(self.dropout(self.embed_tokens(next_ids_BT)), hidden_BTD, rope, earlier)  # type: ignore[no-any-return]

    def losses(self, ids_BT: Tensor, targets_BT: Tensor, drafts: int) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy of the trunk, and the mean over `drafts` draft steps of theirs, in nats a token.

        Drafts are unrolled on their own hidden states and learn the trunk's distribution, not the text: a draft is
        accepted when trunk and draft agree.
        """
        T = ids_BT.shape[1]
        hidden_BTD = self.trunk(ids_BT)
        logits_BTW = self.lm_head(hidden_BTD).float()
        loss = F.cross_entropy(logits_BTW.flatten(0, 1), targets_BT.flatten())
        teacher_BTW = logits_BTW.detach().softmax(-1)
        draft_loss = torch.zeros_like(loss)
        earlier: list[KeyValue] = []
        for step in range(drafts):
            hidden_BTD, key_value = self.draft(ids_BT.roll(-1 - step, 1), hidden_BTD, earlier)
            earlier.append(key_value)
            log_probs_BTW = self.lm_head(hidden_BTD).float().log_softmax(-1)
            # Column t drafts what the trunk predicts in column t + 1 + step; the last columns have no such column.
            usable = T - 1 - step
            cross_entropy_BT = -(teacher_BTW.roll(-1 - step, 1) * log_probs_BTW).sum(-1)
            draft_loss = draft_loss + cross_entropy_BT[:, :usable].mean() / drafts
        return loss, draft_loss

    def states(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """What the head reads of every token, and what `draft` does, [B, T, D] both: the same here."""
        hidden_BTD = self.trunk(ids_BT)
        return hidden_BTD, hidden_BTD

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Of what `draft` returned, [..., W]."""
        return self.lm_head(hidden)  # type: ignore[no-any-return]

    def routers(self) -> list[Router]:
        """All routers, the MTP layer's last."""
        return [module for module in self.modules() if isinstance(module, Router)]


def _official_name(name: str, layers: int) -> str:
    """The name of a module's tensor in an official checkpoint."""
    if not name.startswith("mtp."):
        return name if name.startswith("lm_head.") else f"model.{name}"
    name = name.removeprefix("mtp.").removeprefix("block.")
    return f"model.layers.{layers}." + ("shared_head.norm.weight" if name == "norm.weight" else name)


def export_tensors(model: DemoModel) -> dict[str, Tensor]:
    """Tensors by official name, on the CPU: bf16, routing biases fp32.

    Embedding and head are shared by trunk and MTP layer and stored once, under the trunk's names.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        official = _official_name(name, model.config.num_hidden_layers)
        value = tensor.detach().cpu()
        if official.endswith("_EFD"):
            prefix, kind = official.removesuffix("_EFD").rsplit(".", 1)
            for expert, weight_FD in enumerate(value.bfloat16()):
                weight = weight_FD.T if kind == "down" else weight_FD
                tensors[f"{prefix}.experts.{expert}.{kind}_proj.weight"] = weight.contiguous()
        else:
            tensors[official] = value if official.endswith("e_score_correction_bias") else value.bfloat16()
    return tensors


@torch.no_grad()
def load_tensors(model: DemoModel, tensors: dict[str, Tensor]) -> None:
    """Fill the model from tensors as `export_tensors` gives them."""
    for name, target in model.state_dict().items():
        official = _official_name(name, model.config.num_hidden_layers)
        if official.endswith("_EFD"):
            prefix, kind = official.removesuffix("_EFD").rsplit(".", 1)
            for expert in range(model.config.n_routed_experts):
                weight = tensors[f"{prefix}.experts.{expert}.{kind}_proj.weight"]
                target[expert].copy_(weight.T if kind == "down" else weight)
        else:
            target.copy_(tensors[official])
