"""The training loop: AdamW on shuffled epochs of the corpus, keeping the checkpoint that is best on held-out files."""

import json
import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from training import corpus
from training.model import DemoModel, ModelConfig, export_tensors


@dataclass(frozen=True)
class TrainOptions:
    """What a run can vary; all but the budget defaults to what the demo model was trained with."""

    minutes: float = 10.0  # wall-clock budget of the loop; the learning rate reaches zero at its end
    steps: int | None = None  # ends the run earlier; with it the schedule does not depend on the machine
    device: str = "cuda"
    seed: int = 0
    rows: int = 16  # rows of a batch
    length: int = 2048  # tokens of a row
    learning_rate: float = 6e-3
    weight_decay: float = 0.3
    dropout: float = 0.3  # the corpus is small: 60 epochs of 2.25 M tokens
    drafts: int = 3  # draft steps that the MTP layer is unrolled for
    draft_weight: float = 0.3  # of the draft loss beside the trunk's
    balance_speed: float = 1e-3  # step of the routing biases
    evaluate_every: float = 10.0  # seconds
    files: int | None = None  # at most so many files to train on, and then one held out


def rows_of(stream: Tensor, length: int) -> Tensor:
    """Cut a stream of tokens into rows [n, length + 1] that overlap by one: each token but the first is a target."""
    return stream.unfold(0, length + 1, length)


def batches(
    documents: list[list[int]], chats: list[list[int]], options: TrainOptions, device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """Endless pairs of epoch number and rows [B, T + 1]; cuts and order differ from epoch to epoch."""
    rng = random.Random(options.seed)
    epoch = 0
    while True:
        stream = torch.tensor(corpus.epoch_stream(documents, chats, rng), device=device)
        rows = rows_of(stream[rng.randrange(options.length) :], options.length)
        order = list(range(len(rows)))
        rng.shuffle(order)
        if len(order) < options.rows:
            raise ValueError(f"an epoch has {len(order)} rows, fewer than one batch of {options.rows}")
        for start in range(0, len(order) - options.rows + 1, options.rows):
            yield epoch, rows[order[start : start + options.rows]]
        epoch += 1


@torch.no_grad()
def held_out_losses(model: DemoModel, stream: Tensor, length: int, drafts: int) -> tuple[float, float]:
    """Mean cross-entropy of trunk and of drafts on a stream of held-out tokens, in nats a token."""
    training = model.training
    model.eval()
    rows = rows_of(stream, length)
    sums = torch.zeros(2, device=stream.device)
    for row in torch.split(rows, 8):
        loss, draft_loss = model.losses(row[:, :-1], row[:, 1:], drafts)
        sums += torch.stack([loss, draft_loss]) * len(row)
    model.train(training)
    trunk, draft = (sums / len(rows)).tolist()
    return trunk, draft


def optimizer_for(model: DemoModel, options: TrainOptions) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=options.device == "cuda")


def save_checkpoint(model: DemoModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the whole model folder; the weights appear last and at once, so a reader never sees half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    generation = {
        "bos_token_id": corpus.BOS_ID,
        "eos_token_id": corpus.EOS_ID,
        "pad_token_id": corpus.PAD_ID,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
    }
    (folder / "config.json").write_text(json.dumps(model.config.to_json(), indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    corpus.save_tokenizer(tokenizer, folder, model.config.max_position_embeddings)
    partial = folder / "model.safetensors.partial"
    save_file(export_tensors(model), partial, metadata={"format": "pt"})
    os.replace(partial, folder / "model.safetensors")


def train(out: Path, options: TrainOptions) -> None:
    """Train tokenizer and model on the interpreter's standard library; write the checkpoint best on held-out files."""
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"

    texts = corpus.collect(limit=options.files)
    tokenizer = corpus.train_tokenizer(list(texts.training.values()))
    documents = corpus.encode_documents(tokenizer, list(texts.training.values()))
    chats = corpus.encode_documents(tokenizer, corpus.chat_documents(texts.training))
    held_out = [token for ids in corpus.encode_documents(tokenizer, list(texts.held_out.values())) for token in ids]
    held_out_stream = torch.tensor(held_out, device=device)
    print(
        f"training: {len(documents)} files, {sum(map(len, documents)) / 1e6:.2f} M tokens, "
        f"{len(chats)} chats, {sum(map(len, chats)) / 1e6:.2f} M tokens; "
        f"held out: {len(texts.held_out)} files, {len(held_out) / 1e6:.3f} M tokens",
        flush=True,
    )

    model = DemoModel(ModelConfig(), options.dropout).to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    optimizer = optimizer_for(model, options)
    losses = torch.compile(model.losses, dynamic=False) if on_gpu else model.losses
    start = last_evaluation = time.monotonic()
    best = math.inf

    for step, (epoch, rows) in enumerate(batches(documents, chats, options, device)):
        now = time.monotonic()
        elapsed = now - start
        progress = max(elapsed / (60 * options.minutes), step / options.steps if options.steps else 0.0)
        if progress >= 1 or now - last_evaluation >= options.evaluate_every:
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                trunk, draft = held_out_losses(model, held_out_stream, options.length, options.drafts)
            print(f"step {step} epoch {epoch} {elapsed:.0f} s: held-out {trunk:.4f}, drafts {draft:.4f}", flush=True)
            if trunk + options.draft_weight * draft < best:
                best = trunk + options.draft_weight * draft
                save_checkpoint(model, tokenizer, out)
            last_evaluation = time.monotonic()
            if progress >= 1:
                print(
                    f"{best:.4f} is the least held-out loss, drafts weighted; of that checkpoint is {out}", flush=True
                )
                break

        rate = options.learning_rate * min(1.0, (step + 1) / 100) * (1 - progress)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss, draft_loss = losses(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), options.drafts)
        torch.autograd.backward(loss + options.draft_weight * draft_loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            busiest = max(float(router.load_E.max() / router.load_E.sum()) for router in model.routers())
            print(
                f"step {step} epoch {epoch}: loss {loss.item():.4f}, drafts {draft_loss.item():.4f}, "
                f"busiest expert {busiest:.3f} of its layer's choices",
                flush=True,
            )
        for router in model.routers():
            router.rebalance(options.balance_speed)
        if step == 0:
            start = time.monotonic()  # compiling is not training
