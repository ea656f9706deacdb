#!/usr/bin/env python
"""Trains an EAGLE-3 draft model for the demo model, and measures how many of its drafts are accepted; see
docs/demo-model.md.

python assets/train_eagle.py --out assets/demo_eagle3 --minutes 22
python assets/train_eagle.py --out assets/demo_eagle3 --evaluate
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from training import corpus
from training.eagle import EagleOptions, load_eagle, train_eagle
from training.evaluate import load, print_acceptance

DEMO = Path(__file__).resolve().parent / "demo"


def main() -> None:
    """Read the command line and train or evaluate."""
    defaults = EagleOptions()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO, help="folder of the model that it drafts for")
    parser.add_argument("--out", type=Path, required=True, help="folder of the draft model")
    parser.add_argument("--device", default=defaults.device)
    parser.add_argument("--minutes", type=float, default=defaults.minutes, help="wall-clock time of the training loop")
    parser.add_argument("--steps", type=int, help="end, and end the learning rate's schedule, after so many steps")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--smoke", action="store_true", help="two short steps on a few files")
    parser.add_argument("--evaluate", action="store_true", help="measure the draft model in --out instead")
    parser.add_argument("--prompts", type=int, default=64, help="prompts to measure acceptance on")
    parser.add_argument("--new", type=int, default=192, help="new tokens of each")
    arguments = parser.parse_args()

    trunk, tokenizer = load(arguments.model, torch.device(arguments.device))
    if arguments.evaluate:
        model = load_eagle(trunk, arguments.out).to(arguments.device)
        documents = corpus.encode_documents(tokenizer, list(corpus.collect().held_out.values()))
        stream = torch.tensor([token for document in documents for token in document], device=arguments.device)
        print_acceptance(model, stream, arguments.prompts, 192, arguments.new)
        return
    options = EagleOptions(
        **{name: getattr(arguments, name) for name in vars(arguments) if name in EagleOptions.__dataclass_fields__}
    )
    if arguments.smoke:
        options = replace(options, steps=2, rows=2, length=64, files=60, written=6)
    train_eagle(trunk, tokenizer, arguments.out, options)


if __name__ == "__main__":
    main()
