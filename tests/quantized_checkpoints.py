"""Quantized tensors as publishers write them, and what they stand for, by numpy alone: no code that is tested, and none
of torch's, has a part in the reference.

    tensors, numbers = fp8("a.weight", 200, 300, seed=1)
    numbers["a.weight"]  # fp32 [200, 300], exactly what the tensors mean
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny_models import save_headers

BLOCK, GROUP, WORD = 128, 32, 8

FP8_CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
INT4_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
}
"""Quantization of Kimi-K2-Thinking."""
MXFP8_CONFIG: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "MXFP8",
    "group_size": 32,
    "ignore": ["lm_head"],
}
MXFP8_NESTED: dict[str, Any] = {
    "quant_method": "modelopt",
    "quantization": {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]},
}
"""The form that Hy4-preview-FP8 has."""

FP8_MODELOPT_CONFIG: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
            "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.42.0"},
}
"""The form that Sarvam-105B has in FP8."""
FP8_MODELOPT_NESTED: dict[str, Any] = {
    "quant_method": "modelopt",
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}


def e4m3(byte: np.ndarray) -> np.ndarray:
    """Decode bytes of float8_e4m3fn: a sign, four bits of exponent with bias 7, three of mantissa."""
    sign = np.where(byte & 0x80, -1.0, 1.0)
    exponent, mantissa = (byte >> 3 & 15).astype(np.float64), (byte & 7).astype(np.float64)
    return sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def fp8(name: str, rows: int, columns: int, seed: int) -> tuple[dict[str, Tensor], np.ndarray]:
    """The tensors of a random matrix in FP8, and what they stand for."""
    random = np.random.default_rng(seed)
    byte = random.integers(0, 256, (rows, columns), dtype=np.uint8)
    byte[byte & 0x7F == 0x7F] = 0  # NaN
    scale = (random.uniform(0.5, 1.5, (-(-rows // BLOCK), -(-columns // BLOCK))) * 1e-3).astype(np.float32)
    spread = np.kron(scale, np.ones((BLOCK, BLOCK), np.float32))[:rows, :columns]
    tensors = {
        name: torch.from_numpy(byte).view(torch.float8_e4m3fn),
        f"{name}_scale_inv": torch.from_numpy(scale),
    }
    return tensors, e4m3(byte).astype(np.float32) * spread


def int4(name: str, rows: int, columns: int, seed: int) -> tuple[dict[str, Tensor], np.ndarray]:
    """The tensors of a random matrix in INT4, and what they stand for."""
    random = np.random.default_rng(seed)
    nibble = random.integers(0, 16, (rows, columns))
    scale = torch.from_numpy(random.uniform(0.5, 1.5, (rows, -(-columns // GROUP))) * 1e-2).bfloat16()
    word = np.zeros((rows, -(-columns // WORD)), np.uint32)
    number = np.zeros((rows, columns), np.float32)
    for k in range(columns):
        word[:, k // WORD] |= nibble[:, k].astype(np.uint32) << np.uint32(4 * (k % WORD))
        number[:, k] = (nibble[:, k] - 8) * scale[:, k // GROUP].float().numpy()
    tensors = {
        f"{name}_packed": torch.from_numpy(word.view(np.int32)),
        f"{name}_scale": scale,
        f"{name}_shape": torch.tensor([rows, columns], dtype=torch.int32),
    }
    return tensors, number


def mxfp8(name: str, rows: int, columns: int, seed: int) -> tuple[dict[str, Tensor], np.ndarray]:
    """The tensors of a random matrix in MXFP8, and what they stand for."""
    random = np.random.default_rng(seed)
    byte = random.integers(0, 256, (rows, columns), dtype=np.uint8)
    byte[byte & 0x7F == 0x7F] = 0  # NaN
    exponent = random.integers(115, 119, (rows, -(-columns // GROUP)), dtype=np.uint8)
    spread = np.repeat(2.0 ** (exponent.astype(np.float64) - 127), GROUP, axis=1)[:, :columns]
    tensors = {
        name: torch.from_numpy(byte).view(torch.float8_e4m3fn),
        f"{name}_scale": torch.from_numpy(exponent),
    }
    return tensors, (e4m3(byte) * spread).astype(np.float32)


E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Sizes of the numbers in E2M1 (OCP Microscaling Formats, version 1.0, table 5)."""


def mxfp4(name: str, rows: int, columns: int, seed: int) -> tuple[dict[str, Tensor], np.ndarray]:
    """The tensors of a random matrix in MXFP4, and what they stand for."""
    random = np.random.default_rng(seed)
    nibble = random.integers(0, 16, (rows, columns + columns % 2), dtype=np.uint8)
    exponent = random.integers(120, 125, (rows, -(-columns // GROUP)), dtype=np.uint8)
    spread = np.repeat(2.0 ** (exponent.astype(np.float64) - 127), GROUP, axis=1)[:, :columns]
    number = np.where(nibble & 8, -1.0, 1.0) * E2M1[nibble & 7]
    tensors = {
        name: torch.from_numpy((nibble[:, 1::2] << 4 | nibble[:, ::2]).view(np.int8)),
        f"{name}_scale": torch.from_numpy(exponent).view(torch.float8_e8m0fnu),
    }
    return tensors, (number[:, :columns] * spread).astype(np.float32)


def fp8_exponents(name: str, rows: int, columns: int, seed: int) -> tuple[dict[str, Tensor], np.ndarray]:
    """The tensors of a random matrix in FP8 whose blocks' scales are exponents, and what they stand for."""
    tensors, _ = fp8(name, rows, columns, seed)
    byte = tensors[name].view(torch.uint8).numpy()
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    exponent = np.random.default_rng(seed + 1).integers(115, 119, blocks, dtype=np.uint8)
    spread = np.kron(2.0 ** (exponent.astype(np.float64) - 127), np.ones((BLOCK, BLOCK)))[:rows, :columns]
    scales = {f"{name}_scale_inv": torch.from_numpy(exponent).view(torch.float8_e8m0fnu)}
    return {name: tensors[name], **scales}, (e4m3(byte) * spread).astype(np.float32)


def plain(name: str, rows: int, columns: int, seed: int) -> tuple[dict[str, Tensor], np.ndarray]:
    """The tensor of a random matrix in bf16, and its numbers."""
    tensor = torch.from_numpy(np.random.default_rng(seed).normal(0, 0.1, (rows, columns))).bfloat16()
    return {name: tensor}, tensor.float().numpy()


WRITERS = {
    "fp8": fp8,
    "fp8_exponents": fp8_exponents,
    "int4": int4,
    "mxfp4": mxfp4,
    "mxfp8": mxfp8,
    "plain": plain,
}
CONFIGS = {"fp8": FP8_CONFIG, "int4": INT4_CONFIG, "mxfp8": MXFP8_CONFIG}
"""The quantization_config of each kind."""

FP8_NAMES = r"(?<!eh_proj)(?<!weights_proj)(?<!mlp\.gate)(?<!embed_tokens)(?<!lm_head)\.weight$"
INT4_NAMES = r"\.experts\.\d+\.\w+_proj\.weight$"


HYV4_NAMES = r"(?<!eh)(?<!weights)_proj(_with_mqa|\.weight)*$"
"""The projections of a Hy4, stacked ones included, but for those that are small."""


def quantize_headers(folder: Path, kind: str, names: str) -> None:
    """Do what `quantize` does, in a checkpoint without numbers (`write_tiny_headers`)."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if len(shape) == 2 and re.search(names, name):
            # The quantized tensors of one element: their names and dtypes.
            written, _ = WRITERS[kind](name, 1, 1, seed=0)
            tensors |= {
                other: torch.empty(_stored_shape(other, *shape), dtype=tensor.dtype, device="meta")
                for other, tensor in written.items()
            }
        else:
            tensors[name] = torch.empty(shape, device="meta")
    save_headers(tensors, folder / "model.safetensors")
    _note(folder, kind)


def _stored_shape(name: str, rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of a quantized matrix's tensor of this name."""
    if name.endswith("_scale_inv"):
        return -(-rows // BLOCK), -(-columns // BLOCK)
    if name.endswith("_packed"):
        return rows, -(-columns // WORD)
    if name.endswith("_scale"):
        return rows, -(-columns // GROUP)
    return (2,) if name.endswith("_shape") else (rows, columns)


def _note(folder: Path, kind: str) -> None:
    """Note the quantization in config.json."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = CONFIGS[kind]
    (folder / "config.json").write_text(json.dumps(config))


def quantize(folder: Path, kind: str, names: str, seed: int = 0) -> dict[str, Tensor]:
    """Replace those matrices of the checkpoint in `folder` that are called so (`re.search`) by random quantized ones.
    Returns all tensors of a checkpoint that means the same, in fp32."""
    tensors = load_file(folder / "model.safetensors")
    meant = dict(tensors)
    for number, name in enumerate(sorted(tensors)):
        if tensors[name].dim() == 3 and re.search(names, name):  # experts
            experts, *shape = tensors.pop(name).shape
            made = [WRITERS[kind](name, *shape, seed=seed * 10_000 + 100 * number + x) for x in range(experts)]
            tensors |= {own: torch.stack([written[own] for written, _ in made]) for own in made[0][0]}
            meant[name] = torch.from_numpy(np.stack([numbers for _, numbers in made]))
        elif tensors[name].dim() == 2 and re.search(names, name):
            written, numbers = WRITERS[kind](name, *tensors.pop(name).shape, seed=seed * 10_000 + number)
            tensors |= written
            meant[name] = torch.from_numpy(numbers)
    save_file(tensors, folder / "model.safetensors")
    _note(folder, kind)
    return meant
