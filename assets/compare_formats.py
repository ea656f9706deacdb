#!/usr/bin/env python
"""What FP8 and INT4 cost the demo model: loss on held-out text, and how many drafts are accepted; see
docs/demo-model.md.

python assets/compare_formats.py --prompts 16 --new 64
"""

import argparse
import tempfile
from pathlib import Path

import torch
from training import corpus
from training.eagle import load_eagle
from training.evaluate import evenly_chosen, load, speculate
from training.quantize import FORMATS, quantize
from training.train import held_out_losses

ASSETS = Path(__file__).resolve().parent


def compare(folder: Path, prompts: int, new: int, tokens: int | None = None) -> None:
    """Print the table, as Markdown. The loss is that of so many tokens of held-out text, or of all."""
    print("| format | loss | more than bf16 | drafter | temperature | draft 1 | draft 2 | draft 3 | tokens a step |")
    print("| --- " * 9 + "|")
    plain = None
    for form in ("bf16", *FORMATS):
        if form != "bf16":
            quantize(ASSETS / "demo", folder / form, form)
        model, tokenizer = load(ASSETS / "demo" if form == "bf16" else folder / form, torch.device("cpu"))
        documents = corpus.encode_documents(tokenizer, list(corpus.collect().held_out.values()))
        stream = torch.tensor([token for document in documents for token in document])
        loss, _ = held_out_losses(model, stream[:tokens], model.config.max_position_embeddings, 1)
        plain = plain or loss
        asked = evenly_chosen(stream, prompts, 192)
        for name, drafter in (("MTP", model), ("EAGLE-3", load_eagle(model, ASSETS / "demo_eagle3"))):
            for temperature in (0.0, 0.7):
                _, found = speculate(drafter, asked, 3, temperature, new)
                shares = " | ".join(f"{share:.3f}" for share in found.shares)
                print(
                    f"| {form} | {loss:.4f} | {loss / plain - 1:.2%} | {name} | {temperature} | {shares} "
                    f"| {found.tokens_per_step:.2f} |",
                    flush=True,
                )


def main() -> None:
    """Read the command line and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16, help="prompts to measure acceptance on")
    parser.add_argument("--new", type=int, default=64, help="new tokens of each")
    parser.add_argument("--tokens", type=int, help="of held-out text to take the loss of (default: all)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), arguments.prompts, arguments.new, arguments.tokens)


if __name__ == "__main__":
    main()
