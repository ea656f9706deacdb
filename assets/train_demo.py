#!/usr/bin/env python
"""Trains, exports and evaluates the demo model; see docs/demo-model.md.

python assets/train_demo.py --out assets/demo --minutes 10 --device cuda
python assets/train_demo.py --out assets/demo --device cuda --evaluate
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from training.evaluate import evaluate
from training.train import TrainOptions, train


def main() -> None:
    """Read the command line and train or evaluate."""
    defaults = TrainOptions()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=defaults.minutes, help="wall-clock time of the training loop")
    parser.add_argument("--steps", type=int, help="end, and end the learning rate's schedule, after so many steps")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--weight-decay", type=float, default=defaults.weight_decay)
    parser.add_argument("--dropout", type=float, default=defaults.dropout)
    parser.add_argument("--draft-weight", type=float, default=defaults.draft_weight)
    parser.add_argument("--rows", type=int, default=defaults.rows, help="rows of a batch")
    parser.add_argument(
        "--smoke", action="store_true", help="two short steps on a few files, to see that all parts run"
    )
    parser.add_argument("--evaluate", action="store_true", help="measure the model in --out instead of training one")
    parser.add_argument("--prompts", type=int, default=64, help="prompts to measure draft acceptance on; 0: do not")
    arguments = parser.parse_args()

    if arguments.evaluate:
        evaluate(arguments.out, torch.device(arguments.device), arguments.prompts)
        return
    options = TrainOptions(
        **{name: getattr(arguments, name) for name in vars(arguments) if name in TrainOptions.__dataclass_fields__}
    )
    if arguments.smoke:
        options = replace(options, steps=2, rows=2, length=64, files=60)
    train(arguments.out, options)


if __name__ == "__main__":
    main()
