"""The figures that take a whole engine on one GPU, one after the other, and a table of what each command did.

    python bench/one_gpu.py                       # some ten minutes, most of them compilation
    python bench/one_gpu.py --only weights,mixed
    python bench/one_gpu.py --list                # say the commands and run none

The steps: streams over HTTP beside long prompts, of the DeepSeek-V2-Lite shape; what masks of structured output cost a
step of a DeepSeek-V3 slice; `--width auto` against the best fixed width, of the demo model, of the V2-Lite shape with
drafts that cost nothing, and of the slice; and sparse attention alone. The slice's weights are generated as they are
read (`bench/generated.py`), the other's are written.

Each step has a limit, which `--patience` multiplies, and a step that fails ends none of the others. What each printed
is written to `--out`, a file per step. Exit status 0 when all passed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from steps import LATENTSERVE, PYTHON, STEADY, Step, add_options, chosen_steps, list_steps, run_steps


def engine_steps(folder: Path) -> list[Step]:
    """Return the steps to run; `folder` takes 31 GB."""
    whole, part = str(folder / "v2-lite"), str(folder / "v3-slice")
    serve = (*LATENTSERVE, "serve", *STEADY, "--model", whole, "--width", "1")
    adaptive, masked = (PYTHON, "bench/adaptive_width.py"), (PYTHON, "bench/masked_steps.py", "--full-vocabulary")
    # The demo model's context is short, and a GPU is quick with it.
    demo = ("--model", "demo", "--context", "2048", "--input", "64", "--seconds", "2")
    free = ("--model", whole, "--drafter", "ngram")  # without a draft layer, which is a seventh of the slice
    return [
        Step("weights", ((PYTHON, "bench/checkpoint.py", "v2-lite", whole),)),
        Step("mixed", ((PYTHON, "bench/mixed_load.py"),), 240.0, server=serve),
        Step("slice", ((PYTHON, "bench/generated.py", "v3-slice", part),)),
        Step("masks", ((*masked, "--model", part, "--grammar", "json", "--bound", "1.03"),), generated=True),
        Step("adaptive-demo", ((*adaptive, *demo),), 360.0),
        Step("adaptive-free", ((*adaptive, *free),), 700.0),
        Step("adaptive", ((*adaptive, "--model", part),), 900.0, generated=True),
        Step("sparse", ((PYTHON, "bench/sparse.py"),)),
    ]


def main() -> None:
    """Run them, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "one_gpu")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        chosen = chosen_steps(parser, given, engine_steps(given.folder or Path(made)))
        if given.list:
            list_steps(chosen)
            return
        if not torch.cuda.is_available():
            parser.error("needs a GPU that torch can use")
        run_steps(chosen, given)


if __name__ == "__main__":
    main()
