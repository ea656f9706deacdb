#!/usr/bin/env python
"""Writes the demo model in a format in which large models are published; see docs/demo-model.md.

python assets/quantize_demo.py --format fp8 --out demo-fp8
python assets/quantize_demo.py --format int4 --out demo-int4
"""

import argparse
from pathlib import Path

from training.quantize import FORMATS, quantize


def main() -> None:
    """Read the command line and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "demo", help="folder of the model")
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args()
    quantize(arguments.model, arguments.out, arguments.format)


if __name__ == "__main__":
    main()
