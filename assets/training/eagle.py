"""An EAGLE-3 draft model for the demo model (Li et al., 2025, arXiv:2503.01840), and how it is trained.

It reads the hidden states that enter three of the trunk's layers, and learns the trunk's distribution over the most
frequent ids, unrolled for several drafts, each on its own hidden state of the one before. Half of what it learns from
are texts that the trunk wrote, as it is used. The trunk stays as it is.
"""

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from training import corpus
from training.generate import continued
from training.model import MLP, DemoModel, KeyValue, RMSNorm
from training.train import TrainOptions, batches, rows_of

AUX_HIDDEN_STATE_LAYERS = (1, 2, 3)
"""Layers of the trunk whose input is read."""
WRITTEN_AT_ONCE, TEMPERATURES = 128, (0.0, 0.7, 1.0)
"""Rows, and temperatures, of texts that the trunk writes."""
HEADS, KEY_HEADS, FEATURES, INTERMEDIATE, DRAFT_VOCAB = 8, 4, 32, 512, 3072


@dataclass(frozen=True)
class EagleOptions:
    """What a run can vary."""

    minutes: float = 22.0  # wall-clock budget; the learning rate reaches zero at its end
    steps: int | None = None  # ends the run earlier
    device: str = "cpu"
    seed: int = 0
    rows: int = 8  # rows of a batch
    length: int = 256  # tokens of a row
    learning_rate: float = 4e-3
    written: int = 1024  # rows that the trunk writes itself
    drafts: int = 3  # that the layer is unrolled for
    evaluate_every: float = 120.0  # seconds
    files: int | None = None  # at most so many files to train on, and then one held out


class EagleAttention(nn.Module):
    """Grouped-query attention over embedding and hidden state, side by side; all features of a head are roped."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * hidden, HEADS * FEATURES, bias=False)
        self.k_proj = nn.Linear(2 * hidden, KEY_HEADS * FEATURES, bias=False)
        self.v_proj = nn.Linear(2 * hidden, KEY_HEADS * FEATURES, bias=False)
        self.o_proj = nn.Linear(HEADS * FEATURES, hidden, bias=False)

    def forward(self, x_BTF: Tensor, theta: float, earlier: list[KeyValue]) -> tuple[Tensor, KeyValue]:
        """Output [B, T, D], keys and values. `earlier`: as in the trunk's `Attention`."""
        (B, T, _), step = x_BTF.shape, len(earlier)
        q, k, v = (p(x_BTF).view(B, T, -1, FEATURES).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        frequency = theta ** (-torch.arange(0, FEATURES, 2, device=x_BTF.device) / FEATURES)
        angle = torch.arange(step, T + step, device=x_BTF.device)[:, None] * frequency
        q, k = (_rotated(x, angle.cos(), angle.sin()) for x in (q, k))
        k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
        if not earlier:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            causal = torch.ones(T, T, dtype=torch.bool, device=x_BTF.device).tril()
            own = torch.eye(T, dtype=torch.bool, device=x_BTF.device)
            keys, values = (torch.cat([*(pair[i] for pair in earlier), (k, v)[i]], 2) for i in (0, 1))
            out = F.scaled_dot_product_attention(q, keys, values, torch.cat([causal] + [own] * step, 1))
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1)), (k, v)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class EagleLayer(nn.Module):
    """What files call `midlayer`."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.self_attn, self.mlp = EagleAttention(hidden), MLP(hidden, INTERMEDIATE)
        self.input_layernorm, self.hidden_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)

    def forward(
        self, embedded_BTD: Tensor, hidden_BTD: Tensor, theta: float, earlier: list[KeyValue]
    ) -> tuple[Tensor, KeyValue]:
        """The residual stream behind the layer, keys and values."""
        both = torch.cat([self.input_layernorm(embedded_BTD), self.hidden_norm(hidden_BTD)], -1)
        attended, key_value = self.self_attn(both, theta, earlier)
        x_BTD = hidden_BTD + attended
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD)), key_value


class Eagle(nn.Module):
    """The draft model's own weights; the embedding is the trunk's."""

    def __init__(self, trunk: DemoModel, ids_D: Tensor) -> None:
        """`ids_D`: the trunk's ids that it can draft, ascending. It begins with the trunk's own norm and head, and with
        the last hidden state that it reads."""
        super().__init__()
        hidden, eps = trunk.config.hidden_size, trunk.config.rms_norm_eps
        self.fc = nn.Linear(len(AUX_HIDDEN_STATE_LAYERS) * hidden, hidden, bias=False)
        self.midlayer = EagleLayer(hidden, eps)
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, len(ids_D), bias=False)
        self.register_buffer("ids_D", ids_D, persistent=False)
        with torch.no_grad():
            self.fc.weight.copy_(torch.cat([torch.zeros(hidden, 2 * hidden), torch.eye(hidden)], 1))
            self.lm_head.weight.copy_(trunk.lm_head.weight[ids_D])
            self.norm.weight.copy_(trunk.norm.weight)
            for projection in (self.midlayer.self_attn.o_proj, self.midlayer.mlp.down_proj):
                projection.weight.mul_(0.3)


class WithEagle(nn.Module):
    """The demo model with a draft model in place of its MTP layer."""

    def __init__(self, trunk: DemoModel, eagle: Eagle) -> None:
        super().__init__()
        self.model, self.eagle, self.config = trunk, eagle, trunk.config

    def lm_head(self, hidden: Tensor) -> Tensor:
        """The trunk's."""
        return self.model.lm_head(hidden)  # type: ignore[no-any-return]

    @torch.no_grad()
    def aux_hidden(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The trunk's final hidden states, and the auxiliary hidden states that the draft model reads, [B, T, 3 D]."""
        found: list[Tensor] = []

        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found.append(inputs[0])

        hooks = [self.model.layers[layer].register_forward_pre_hook(keep) for layer in AUX_HIDDEN_STATE_LAYERS]
        hidden_BTD = self.model.trunk(ids_BT)
        for hook in hooks:
            hook.remove()
        return hidden_BTD, torch.cat(found, -1)

    def states(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """See `DemoModel`."""
        hidden_BTD, aux_hidden_BTF = self.aux_hidden(ids_BT)
        return hidden_BTD, self.eagle.fc(aux_hidden_BTF)

    def draft(self, next_ids_BT: Tensor, hidden_BTD: Tensor, earlier: list[KeyValue]) -> tuple[Tensor, KeyValue]:
        """See `DemoModel`; the hidden state is a residual stream."""
        embedded_BTD = self.model.embed_tokens(next_ids_BT)
        return self.eagle.midlayer(embedded_BTD, hidden_BTD, self.config.rope_theta, earlier)  # type: ignore[no-any-return]

    def small_logits(self, hidden: Tensor) -> Tensor:
        """Of the draft vocabulary."""
        return self.eagle.lm_head(self.eagle.norm(hidden))  # type: ignore[no-any-return]

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """See `DemoModel`: -inf at the ids that it cannot draft."""
        small = self.small_logits(hidden)
        return small.new_full((*small.shape[:-1], self.config.vocab_size), -torch.inf).index_copy_(
            -1, self.eagle.ids_D, small
        )

    def loss(self, ids_BT: Tensor, drafts: int) -> tuple[Tensor, list[float]]:
        """Mean cross-entropy of `drafts` unrolled drafts to the trunk's distribution, and the share of each draft that
        is the trunk's most probable token."""
        T = ids_BT.shape[1]
        hidden_BTD, aux_hidden_BTF = self.aux_hidden(ids_BT)
        with torch.no_grad():
            teacher_BTW = self.lm_head(hidden_BTD).float().softmax(-1)
            wanted_BT, teacher_BTD = teacher_BTW.argmax(-1), teacher_BTW[..., self.eagle.ids_D]
        hidden_BTD = self.eagle.fc(aux_hidden_BTF)
        # A draft counts only where those before it were accepted; the factor is the paper's code's.
        weights = [0.8**step for step in range(drafts)]
        total, shares, earlier = hidden_BTD.new_zeros(()), [], []
        for step in range(drafts):
            hidden_BTD, key_value = self.draft(ids_BT.roll(-1 - step, 1), hidden_BTD, earlier)
            earlier.append(key_value)
            logits_BTD = self.small_logits(hidden_BTD).float()
            usable = T - 1 - step
            cross = -(teacher_BTD.roll(-1 - step, 1) * logits_BTD.log_softmax(-1)).sum(-1)
            total = total + cross[:, :usable].mean() * weights[step] / sum(weights)
            same = self.eagle.ids_D[logits_BTD.argmax(-1)] == wanted_BT.roll(-1 - step, 1)
            shares.append(float(same[:, :usable].float().mean()))
        return total, shares


def train_eagle(trunk: DemoModel, tokenizer: Tokenizer, out: Path, options: EagleOptions) -> None:
    """Train on the files that the demo model was trained on; write the draft model that has learnt longest."""
    torch.manual_seed(options.seed)
    device, texts = torch.device(options.device), corpus.collect(limit=options.files)
    documents = corpus.encode_documents(tokenizer, list(texts.training.values()))
    chats = corpus.encode_documents(tokenizer, corpus.chat_documents(texts.training))
    held_out = [token for ids in corpus.encode_documents(tokenizer, list(texts.held_out.values())) for token in ids]
    held_out_NT = rows_of(torch.tensor(held_out, device=device), options.length)[::4][:32]
    counts = Counter(token for ids in documents for token in ids)
    ids = sorted(token for token, _ in counts.most_common(DRAFT_VOCAB))
    ids += [token for token in range(trunk.config.vocab_size) if token not in counts][: DRAFT_VOCAB - len(ids)]
    for parameter in trunk.parameters():
        parameter.requires_grad_(False)
    model = WithEagle(trunk.eval(), Eagle(trunk, torch.tensor(sorted(ids))).to(device))
    print(
        f"{sum(p.numel() for p in model.eagle.parameters()) / 1e6:.2f} M parameters; the draft vocabulary has "
        f"{sum(counts[token] for token in ids) / counts.total():.1%} of the tokens",
        flush=True,
    )
    written = None
    if options.written:
        prompts = torch.tensor([token for ids in documents for token in ids], device=device)
        written = written_rows(trunk, prompts, options)
        print(f"{written.numel() / 1e6:.2f} M tokens of the model's own", flush=True)
    optimizer = torch.optim.AdamW(model.eagle.parameters(), lr=options.learning_rate, betas=(0.9, 0.95))
    begin = looked = time.monotonic()
    shape = TrainOptions(rows=options.rows, length=options.length, seed=options.seed)
    for step, (epoch, rows) in enumerate(batches(documents, chats, shape, device)):
        now = time.monotonic()
        done = max((now - begin) / (60 * options.minutes), step / options.steps if options.steps else 0.0)
        if done >= 1 or now - looked >= options.evaluate_every:
            print(
                f"step {step} epoch {epoch} {now - begin:.0f} s: {_held_out(model, held_out_NT, options)}", flush=True
            )
            save(model, out)
            looked = time.monotonic()
            if done >= 1:
                return
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1.0, (step + 1) / 50) * (1 - done)
        rows = rows[:, :-1].contiguous()
        if written is not None:
            half = options.rows // 2
            rows = torch.cat([rows[half:], written[torch.randint(len(written), (half,))]])
        with torch.autocast(device.type, torch.bfloat16):
            loss, _ = model.loss(rows, options.drafts)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.eagle.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def _held_out(model: WithEagle, ids_NT: Tensor, options: EagleOptions) -> str:
    loss, shares = model.loss(ids_NT, options.drafts)
    return f"held-out {loss:.4f}, drafts {', '.join(f'{share:.3f}' for share in shares)}"


def written_rows(trunk: DemoModel, stream: Tensor, options: EagleOptions) -> Tensor:
    """Rows [N, T] that begin with a quarter of the library's, and go on as the trunk does: every third the most
    probable way, which ends in loops, the others drawn."""
    generator = torch.Generator(stream.device).manual_seed(options.seed)
    prompt, found = options.length // 4, []
    for begin in range(0, options.written, WRITTEN_AT_ONCE):
        count = min(WRITTEN_AT_ONCE, options.written - begin)
        starts = torch.randint(len(stream) - prompt, (count,), generator=generator, device=stream.device)
        prompts = torch.stack([stream[start : start + prompt] for start in starts.tolist()])
        temperature_B = torch.tensor(TEMPERATURES, device=stream.device).repeat(-(-count // 3))[:count]
        found.append(continued(trunk, prompts, options.length - prompt, temperature_B, generator))
    return torch.cat(found)


def save(model: WithEagle, folder: Path) -> None:
    """Write the draft model as they are published."""
    folder.mkdir(parents=True, exist_ok=True)
    config, ids_D = model.config, model.eagle.ids_D.cpu()
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": FEATURES,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": len(ids_D),
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(AUX_HIDDEN_STATE_LAYERS),
        "torch_dtype": "bfloat16",
    }
    tensors = {name: tensor.detach().cpu().bfloat16() for name, tensor in model.eagle.state_dict().items()}
    tensors["d2t"] = ids_D - torch.arange(len(ids_D))
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids_D, True)
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_eagle(trunk: DemoModel, folder: Path) -> WithEagle:
    """The demo model with the draft model of `folder`, in fp32."""
    tensors = load_file(folder / "model.safetensors")
    ids_D = tensors.pop("d2t") + torch.arange(DRAFT_VOCAB)
    tensors.pop("t2d")
    eagle = Eagle(trunk, ids_D)
    eagle.load_state_dict(tensors)
    return WithEagle(trunk, eagle).eval()
