"""Writes a model folder of a published shape, in the format in which it is published, with random weights: what can be
served, proved and timed where the real files cannot be had.

    python bench/checkpoint.py v3-slice /dev/shm/v3-slice    # DeepSeek-V3, one dense layer and five of experts, in FP8

Matrices are normal(0, 0.02), norms 1, so that routing is that of random tokens. Text is the demo model's: token ids
past its vocabulary are no text. A file per layer, made on the GPU where there is one.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import struct
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "assets"))

from shapes import MXFP8_EXPONENT, SHAPES
from training.quantize import FP8_CONFIG, INT4_CONFIG

from workers.families.loading import counted
from workers.families.registry import parse_config
from workers.parallel.group import Group
from workers.weights.formats import FP8_BLOCKS, INT4_GROUPS, MXFP8, PLAIN
from workers.weights.formats.format import Format
from workers.weights.formats.int4_groups import INT4_SCALES, INT4_SHAPE
from workers.weights.formats.registry import assumed_dtypes
from workers.weights.wanted import FP8_DTYPE, FP8_SCALES, MX_SCALES, Shape, Wanted

ROOT = Path(__file__).resolve().parent.parent
TEXT = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
QUANTIZED: dict[Format, dict[str, Any]] = {
    PLAIN: {},
    FP8_BLOCKS: {"quantization_config": FP8_CONFIG},
    INT4_GROUPS: {"quantization_config": INT4_CONFIG},
    MXFP8: {"quantization_config": {"quant_method": MXFP8.method, "quantization": {"quant_algo": MXFP8.algorithm}}},
}
BYTES = {"F32": 4, "BF16": 2, "I32": 4, FP8_DTYPE: 1, "U8": 1}
EXPONENTS = {FP8_SCALES: MXFP8_EXPONENT, MX_SCALES: 119}
"""The lesser of the two scales in E8M0 that are drawn, by what the name ends with: matrices are normal(0, 0.02), or in
MXFP4 uniform over its numbers with nearly that deviation."""


def wanted(values: dict[str, Any]) -> dict[str, Wanted]:
    """All tensors of a model with these config values, its draft layer included, as they are published."""
    config, group = parse_config(values), Group()
    dtype_of = assumed_dtypes(values.get("quantization_config"))
    draft_layer = config.draft_layers > 0
    _, dry_run = counted(config, group, torch.bfloat16, dtype_of, draft_layer=draft_layer, invariant=False)
    return {name: Wanted(tensor.shape, (_dtype(name, tensor),)) for name, tensor in sorted(dry_run.wanted.items())}


def _dtype(name: str, tensor: Wanted) -> str:
    if name.endswith((FP8_SCALES, "e_score_correction_bias")):
        return "F32"
    return "BF16" if "BF16" in tensor.dtypes else tensor.dtypes[0]


def numbers(name: str, shape: Shape, dtype: str, device: torch.device) -> Tensor:
    """The bytes of a tensor."""
    if name.endswith(INT4_SHAPE):
        raise ValueError(f"{name} depends on its matrix")
    if dtype == FP8_DTYPE:
        some = (torch.randn(shape, device=device, dtype=torch.float16) * 64).to(torch.float8_e4m3fn)
    elif dtype == "I32":
        some = torch.randint(-(2**31), 2**31, shape, device=device, dtype=torch.int32)
    elif dtype == "F8_E8M0":
        least = next(least for ending, least in EXPONENTS.items() if name.endswith(ending))
        some = torch.randint(least, least + 2, shape, device=device, dtype=torch.uint8)
    elif dtype == "U8":
        some = torch.randint(MXFP8_EXPONENT, MXFP8_EXPONENT + 2, shape, device=device, dtype=torch.uint8)
    elif dtype == "I8":
        some = torch.randint(0, 256, shape, device=device, dtype=torch.uint8)
    elif dtype == "I64":
        some = torch.randint(0, 2**31, shape, device=device)
    elif name.endswith(FP8_SCALES):
        some = torch.empty(shape, device=device).uniform_(0.5 * 0.02 / 64, 1.5 * 0.02 / 64)
    elif name.endswith(f".weight{INT4_SCALES}"):
        some = torch.empty(shape, device=device, dtype=torch.bfloat16).uniform_(0.5 * 0.02 / 4.6, 1.5 * 0.02 / 4.6)
    elif dtype == "F32" and len(shape) == 1 and name.endswith("_scale"):
        some = torch.ones(shape, device=device)
    elif dtype == "F32" and len(shape) > 1:
        some = torch.empty(shape, device=device).normal_(0, 0.02)
    elif dtype == "F32" or name.endswith(".bias"):
        some = torch.zeros(shape, device=device, dtype=torch.float32 if dtype == "F32" else torch.bfloat16)
    elif len(shape) == 1:
        some = torch.ones(shape, device=device, dtype=torch.bfloat16)
    else:
        some = torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(0, 0.02)
    return some.view(torch.uint8)


def write(path: Path, tensors: dict[str, Wanted], device: torch.device) -> int:
    """Write a safetensors file; its bytes."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + prod(tensor.shape) * BYTES[tensor.dtypes[0]]
        header[name] = {"dtype": tensor.dtypes[0], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in tensors.items():
            if name.endswith(INT4_SHAPE):
                rows, words = tensors[name.removesuffix(INT4_SHAPE) + "_packed"].shape
                some = torch.tensor([rows, 8 * words], dtype=torch.int32).view(torch.uint8)
            else:
                some = numbers(name, tensor.shape, tensor.dtypes[0], device)
            data = memoryview(some.cpu().view(-1).numpy())
            while data:
                data = data[file.write(data) :]
    return end


def by_layer(tensors: dict[str, Wanted]) -> Iterator[dict[str, Wanted]]:
    """The tensors of each file: those of a layer, and those of none."""
    layers: dict[str, dict[str, Wanted]] = {}
    for name, tensor in tensors.items():
        found = re.search(r"layers\.(\d+)\.", name)
        layers.setdefault(found[1] if found else "", {})[name] = tensor
    yield from layers.values()


def write_folder(values: dict[str, Any], form: Format, folder: Path, device: torch.device) -> int:
    """Write all of it; the bytes of its weights."""
    values = {**values, "torch_dtype": "bfloat16", **QUANTIZED[form]}
    folder.mkdir(parents=True, exist_ok=True)
    for name in TEXT:
        shutil.copy(ROOT / "assets" / "demo" / name, folder)
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    files = list(by_layer(wanted(values)))
    names = [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    with ThreadPoolExecutor(8) as threads:
        sizes = list(threads.map(lambda name, file: write(folder / name, file, device), names, files))
    index = {tensor: name for name, file in zip(names, files, strict=True) for tensor in file}
    metadata = {"metadata": {"total_size": sum(sizes)}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(metadata), encoding="utf-8")
    return sum(sizes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    start = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = write_folder(*SHAPES[given.shape], given.folder, device)
    print(f"{given.folder}: {size / 1e9:.2f} GB in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
