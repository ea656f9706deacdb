"""Texts that the demo model writes itself: a draft model meets these, and not the library's, when it drafts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from training.corpus import EOS_ID, PAD_ID
from training.model import DemoModel, KeyValue, rope_table


@torch.no_grad()
def continued(
    model: DemoModel, prompts_BT: Tensor, new_tokens: int, temperature_B: Tensor, generator: torch.Generator
) -> Tensor:
    """The prompts and `new_tokens` more tokens a row, [B, T + new_tokens]: the most probable ones where a row's
    temperature is 0, else drawn. Behind eos there are pad tokens."""
    (rows, prompt), device = prompts_BT.shape, prompts_BT.device
    ids_BT = F.pad(prompts_BT, (0, new_tokens), value=PAD_ID)
    cached: list[KeyValue | None] = [None] * len(model.layers)
    done_B = torch.zeros(rows, dtype=torch.bool, device=device)
    begin = 0
    for end in range(prompt, prompt + new_tokens):
        logits_BW = _logits(model, ids_BT[:, begin:end], begin, cached)
        drawn_BW = (logits_BW / temperature_B.clamp(min=1e-3)[:, None]).softmax(-1)
        token_B = torch.multinomial(drawn_BW, 1, generator=generator)[:, 0]
        token_B = torch.where(temperature_B > 0, token_B, logits_BW.argmax(-1))
        ids_BT[:, end] = token_B.where(~done_B, PAD_ID)
        done_B |= token_B == EOS_ID
        begin = end
    return ids_BT


def _logits(model: DemoModel, ids_BT: Tensor, begin: int, cached: list[KeyValue | None]) -> Tensor:
    """Of the token behind the last one, fp32 [B, W]. Keys and values of the `begin` tokens before are cached, and those
    of these tokens join them."""
    rope = rope_table(model.config, ids_BT.shape[1], begin, ids_BT.device)
    x_BTD = model.embed_tokens(ids_BT)
    for index, layer in enumerate(model.layers):
        q, k, v = layer.self_attn.projected(layer.input_layernorm(x_BTD), rope)
        if (before := cached[index]) is not None:
            k, v = torch.cat([before[0], k], 2), torch.cat([before[1], v], 2)
        cached[index] = k, v
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=begin == 0)
        x_BTD = x_BTD + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        x_BTD = x_BTD + layer.mlp(layer.post_attention_layernorm(x_BTD))
    return model.lm_head(model.norm(x_BTD[:, -1])).float()  # type: ignore[no-any-return]
