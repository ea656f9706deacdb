"""What the documentation quotes: held-out loss, draft acceptance, sample completions.

Speculation is computed plainly here: no cache, every forward pass over the whole rows. It shares the model's modules
with training but none of its unrolled drafting, so the two check each other.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from training import corpus
from training.eagle import WithEagle
from training.model import DemoModel, ModelConfig, load_tensors
from training.quantize import plain_tensors
from training.train import held_out_losses

SAMPLE_PROMPTS = (
    "def read_config(filename, encoding=None):\n    ",
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n        self.queue = []\n\n"
    "    def put(self, item):\n",
    "def main():\n    import argparse\n\n    parser = argparse.ArgumentParser()\n",
    "try:\n    import",
)
SAMPLE_CHATS = (
    "Write a function is_empty. Return True if the queue is empty.",
    "Write a function close. Close the socket.",
)


def load(folder: Path, device: torch.device) -> tuple[DemoModel, Tokenizer]:
    """The exported model, its weights held in fp32 and not training, and its tokenizer."""
    model = DemoModel(ModelConfig.from_json(json.loads((folder / "config.json").read_text())))
    load_tensors(model, plain_tensors(load_file(folder / "model.safetensors")))
    return model.to(device).eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


@dataclass(frozen=True)
class Acceptance:
    """Counts of one run of speculative decoding."""

    steps: int  # verify steps of all rows
    accepted: tuple[int, ...]  # steps in which draft 1, 2, ... was accepted
    repeated: float  # share of new tokens that end an 8-gram the row has already had: high where output loops

    @property
    def shares(self) -> list[float]:
        """Share of steps in which draft 1, 2, ... was accepted."""
        return [count / self.steps for count in self.accepted]

    @property
    def tokens_per_step(self) -> float:
        """New tokens of a verify step: the accepted drafts and the one the trunk adds."""
        return 1 + sum(self.shares)


def _probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Distribution over the last dimension; at temperature 0 all on the largest logit."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return (logits / temperature).softmax(-1)


def _draw(probabilities_BW: Tensor, generator: torch.Generator) -> Tensor:
    """One token [B] a row."""
    return torch.multinomial(probabilities_BW, 1, generator=generator)[:, 0]


@torch.no_grad()
def speculate(
    model: DemoModel | WithEagle, prompts_BT: Tensor, drafts: int, temperature: float, new_tokens: int, seed: int = 0
) -> tuple[Tensor, Acceptance]:
    """Decode at least `new_tokens` tokens a row, or up to eos, drafting `drafts` tokens a step with the MTP layer,
    or with the draft model.

    Drafts are drawn from its distribution and verified by rejection sampling (https://arxiv.org/abs/
    2211.17192), which at temperature 0 is comparison with the argmax. Returns the tokens [B, ...], padded with the pad
    token, and the counts.
    """
    device = prompts_BT.device
    generator = torch.Generator(device).manual_seed(seed)
    B, prompt = prompts_BT.shape
    rows = torch.arange(B, device=device)
    # A row that is done may overshoot by `drafts` tokens, and idles on as if it drafted once more.
    ids_BT = torch.full((B, prompt + new_tokens + 2 * drafts + 1), corpus.PAD_ID, device=device)
    ids_BT[:, :prompt] = prompts_BT
    length_B = torch.full((B,), prompt, device=device)  # tokens that are final
    active_B = torch.ones(B, dtype=torch.bool, device=device)
    hidden_BTD, source_BTD = model.states(ids_BT)
    # The prompt's own next token comes from the trunk alone.
    first = _probabilities(model.lm_head(hidden_BTD[:, prompt - 1]).float(), temperature)
    ids_BT[:, prompt] = _draw(first, generator)
    length_B += 1
    steps, accepted = 0, [0] * drafts

    while True:
        active_B &= (length_B < prompt + new_tokens) & (ids_BT[rows, length_B - 1] != corpus.EOS_ID)
        if not active_B.any():
            break
        draft_hidden_BTD = source_BTD.clone()
        draft_probabilities = []
        for s in range(drafts):
            # Column t of the layer that drafts joins hidden state t with token t + 1. Columns that have a final token
            # after them take the trunk's hidden state, later ones the layer's own output of the column before.
            out_BTD, _ = model.draft(ids_BT.roll(-1, 1), draft_hidden_BTD, [])
            column_B = length_B - 2 + s
            q_BW = _probabilities(model.draft_logits(out_BTD[rows, column_B]).float(), temperature)
            draft_probabilities.append(q_BW)
            ids_BT[rows, column_B + 2] = _draw(q_BW, generator)
            draft_hidden_BTD[rows, column_B + 1] = out_BTD[rows, column_B]
        hidden_BTD, source_BTD = model.states(ids_BT)

        accepted_B = torch.ones(B, dtype=torch.bool, device=device)
        count_B = torch.zeros(B, dtype=torch.long, device=device)
        added_B = torch.zeros(B, dtype=torch.long, device=device)
        for s in range(drafts + 1):
            p_BW = _probabilities(model.lm_head(hidden_BTD[rows, length_B - 1 + s]).float(), temperature)
            if s < drafts:
                q_BW, token_B = draft_probabilities[s], ids_BT[rows, length_B + s]
                ratio_B = p_BW[rows, token_B] / q_BW[rows, token_B]
                keep_B = torch.rand(B, generator=generator, device=device) < ratio_B
                residual_BW = (p_BW - q_BW).clamp(min=0)
                # Where p and q agree the residual is empty, and is never drawn from.
                rest_BW = torch.where(residual_BW.sum(-1, keepdim=True) > 0, residual_BW, p_BW)
            else:
                keep_B, rest_BW = torch.zeros_like(accepted_B), p_BW
            ends_B = accepted_B & ~keep_B
            added_B = torch.where(ends_B, _draw(rest_BW, generator), added_B)
            accepted_B &= keep_B
            count_B += accepted_B
        # An accepted eos ends the row: what stands after it is not counted.
        for s in range(drafts):
            is_eos_B = (ids_BT[rows, length_B + s] == corpus.EOS_ID) & (count_B > s)
            added_B = torch.where(is_eos_B, corpus.EOS_ID, added_B)
            count_B = torch.where(is_eos_B, s, count_B)
        count_B = torch.where(active_B, count_B, 0)
        steps += int(active_B.sum())
        for s in range(drafts):
            accepted[s] += int((count_B > s).sum())
        ids_BT[rows[active_B], (length_B + count_B)[active_B]] = added_B[active_B]
        length_B = torch.where(active_B, length_B + count_B + 1, length_B)

    final_BT = torch.arange(ids_BT.shape[1], device=device) < length_B[:, None]
    ids_BT = ids_BT.where(final_BT, corpus.PAD_ID)
    return ids_BT, Acceptance(steps, tuple(accepted), _repeated(ids_BT.tolist(), prompt))


def _repeated(rows: list[list[int]], prompt: int) -> float:
    """Share of tokens after the prompt that end an 8-gram seen before in their row."""
    repeated = total = 0
    for row in rows:
        seen: set[tuple[int, ...]] = set()
        ids = [token for token in row if token != corpus.PAD_ID]
        for end in range(8, len(ids) + 1):
            gram = tuple(ids[end - 8 : end])
            repeated += end > prompt and gram in seen
            total += end > prompt
            seen.add(gram)
    return repeated / max(total, 1)


def complete(model: DemoModel, tokenizer: Tokenizer, prompt: str, temperature: float, new_tokens: int) -> str:
    """The prompt and its continuation; special tokens in the prompt are read as such."""
    device = next(model.parameters()).device
    ids_BT = torch.tensor([tokenizer.encode(prompt).ids], device=device)
    ids_BT, _ = speculate(model, ids_BT, 1, temperature, new_tokens)
    ids = [token for token in ids_BT[0].tolist() if token not in (corpus.BOS_ID, corpus.EOS_ID, corpus.PAD_ID)]
    return tokenizer.decode(ids, skip_special_tokens=False)


def evenly_chosen(stream: Tensor, prompts: int, prompt_tokens: int) -> Tensor:
    """Prompts [B, T] that lie evenly in a stream of tokens, each with the bos token in front; at most so many."""
    starts = torch.linspace(0, len(stream) - prompt_tokens, prompts).long().tolist()
    bos = torch.tensor([corpus.BOS_ID], device=stream.device)
    prompts_BT = torch.stack([torch.cat([bos, stream[start : start + prompt_tokens - 1]]) for start in starts])
    # A prompt that runs over a file's end would ask for nothing that follows from it.
    return prompts_BT[~(prompts_BT == corpus.EOS_ID).any(1)]


def print_acceptance(model: DemoModel | WithEagle, stream: Tensor, prompts: int, prompt_tokens: int, new: int) -> None:
    """Print the table of draft acceptance over prompts that lie evenly in a stream of held-out tokens."""
    prompts_BT = evenly_chosen(stream, prompts, prompt_tokens)
    print(f"{len(prompts_BT)} prompts of {prompt_tokens} held-out tokens, {new} new tokens each\n")
    print("| temperature | width | draft 1 | draft 2 | draft 3 | tokens a step | repeated 8-grams |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for temperature in (0.0, 0.7):
        for drafts in (1, 2, 3):
            _, result = speculate(model, prompts_BT, drafts, temperature, new)
            shares = [f"{share:.3f}" for share in result.shares] + [""] * (3 - drafts)
            print(
                f"| {temperature} | {drafts + 1} | {' | '.join(shares)} | {result.tokens_per_step:.2f} "
                f"| {result.repeated:.2f} |",
                flush=True,
            )


def evaluate(folder: Path, device: torch.device, prompts: int = 64, prompt_tokens: int = 192, new: int = 192) -> None:
    """Print, as Markdown, what `docs/demo-model.md` quotes of the model in `folder`."""
    model, tokenizer = load(folder, device)
    texts = corpus.collect().held_out
    documents = corpus.encode_documents(tokenizer, list(texts.values()))
    stream = torch.tensor([token for document in documents for token in document], device=device)
    loss, draft_loss = held_out_losses(model, stream, model.config.max_position_embeddings, 3)
    tokens_per_byte = len(stream) / sum(len(text.encode()) for text in texts.values())
    print(f"held-out files {len(texts)}, tokens {len(stream)}, bytes a token {1 / tokens_per_byte:.3f}")
    print(f"held-out loss {loss:.4f} nats a token, {loss * tokens_per_byte / math.log(2):.4f} bits a byte")
    print(f"held-out cross-entropy of drafts to the trunk {draft_loss:.4f} nats a token\n")

    if prompts:
        print_acceptance(model, stream, prompts, prompt_tokens, new)
    chats = [f"{corpus.USER}{request}{corpus.ASSISTANT}" for request in SAMPLE_CHATS]
    for prompt in [*SAMPLE_PROMPTS, *chats]:
        for temperature in (0.0, 0.7):
            print(
                f"\n--- temperature {temperature}\n{complete(model, tokenizer, prompt, temperature, 128)}", flush=True
            )
