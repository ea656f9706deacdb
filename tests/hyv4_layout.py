"""Names and rows of a Hy4's tensors, as checkpoints have them and as transformers' `HYV4ForCausalLM` does.

That class rotates features (i, i + half) of what checkpoints have in pairs (2i, 2i + 1). What transformers saves,
as of 5.24, has names that it cannot read itself: it reverses its table of names in the wrong order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_NAMES = {
    r"\.self_attn\.sinks$": ".self_attn.learnable_sink_param",
    r"\.self_attn\.gate_proj\.": ".self_attn.linear_gate.",
    r"\.attn_hc\.": ".hc_attn_layer.hc_pre.hc_",
    r"\.ffn_hc\.": ".hc_mlp_layer.hc_pre.hc_",
    r"\.hc_head\.hc_": ".hc_head.hc_head_",
}
"""transformers' names, as patterns, and those of checkpoints."""


def published(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """A model's tensors as a checkpoint has them."""
    found = {}
    for name, tensor in tensors.items():
        own = name
        for theirs, ours in _NAMES.items():
            own = re.sub(theirs, ours, own)
        own = own.replace(f"model.layers.{config['num_hidden_layers']}.", "model.mtp_layers.0.")
        own = own.replace("shared_head.norm.", "final_layernorm.")
        found[own] = _reordered(name, tensor, config, pairs=True)
    return found


def in_transformers(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """A checkpoint's tensors as `HYV4ForCausalLM` has them."""
    names = {re.escape(ours): theirs.replace("\\", "").replace("$", "") for theirs, ours in _NAMES.items()}
    found = {}
    for name, tensor in tensors.items():
        own = name
        for ours, theirs in names.items():
            own = re.sub(ours, theirs, own)
        found[own] = _reordered(name, tensor, config, pairs=False)
    return found


def _reordered(name: str, tensor: Tensor, config: Mapping[str, Any], *, pairs: bool) -> Tensor:
    """Bring the roped rows, the last ones of each head, from halves into pairs or back."""
    rope, index = config["qk_rope_head_dim"], config["index_head_dim"]
    heads = {
        r"\.q_b_proj\.weight": config["qk_nope_head_dim"] + rope,
        r"\.kv_a_proj_with_mqa\.weight": config["kv_lora_rank"] + rope,
        r"\.indexer\.(wq_b|wk|k_norm)\.": index,
    }
    head = next((features for of, features in heads.items() if re.search(of, name)), None)
    if head is None or tensor.is_meta:
        return tensor
    place = torch.arange(rope).view(2, -1).t() if pairs else torch.arange(rope).view(-1, 2).t()
    order = torch.arange(len(tensor)).view(-1, head)
    order[:, head - rope :] = order[:, head - rope :][:, place.flatten()]
    return tensor[order.flatten()].contiguous()
