"""The demo model in the formats in which large models are published: FP8 in blocks, experts in INT4 groups.

Rounding to nearest, without a calibration: a scale is what lets the largest number of its block or group be stored, in
INT4 the best of a few such, by squared error. Layouts: docs/models.md, under Checkpoints.
"""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = 128
GROUP = 32
FP8_LARGEST = 448.0
FP8_NAMES = r"(?<!eh)_proj(_with_mqa)?\.weight$"
"""What DeepSeek-V3 stores in FP8: all matrices of layers but the router and `eh_proj`."""
INT4_NAMES = r"\.experts\.\d+\.\w+_proj\.weight$"
"""What Kimi K2 stores in INT4: routed experts."""
FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
INT4_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": GROUP,
                "symmetric": True,
                "dynamic": False,
                "actorder": None,
            },
        }
    },
}


def _spread(scales_BC: Tensor, rows: int, columns: int) -> Tensor:
    """The scale of every number of a matrix."""
    return scales_BC.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


def fp8(name: str, weight_NK: Tensor) -> dict[str, Tensor]:
    """The tensors of a matrix in e4m3, with a scale for each block of 128 x 128."""
    (rows, columns), wide_NK = weight_NK.shape, weight_NK.float()
    blocks = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(blocks[0] * BLOCK, blocks[1] * BLOCK)
    padded[:rows, :columns] = wide_NK
    scales_BC = padded.view(blocks[0], BLOCK, blocks[1], BLOCK).abs().amax((1, 3)).clamp(min=1e-12) / FP8_LARGEST
    return {
        name: (wide_NK / _spread(scales_BC, rows, columns)).to(torch.float8_e4m3fn),
        f"{name}_scale_inv": scales_BC,
    }


def int4(name: str, weight_NK: Tensor) -> dict[str, Tensor]:
    """The tensors of a matrix in INT4, with a bf16 scale for each 32 input features of a row."""
    rows, columns = weight_NK.shape
    group_NGK = weight_NK.float().view(rows, columns // GROUP, GROUP)
    largest_NG1 = group_NGK.abs().amax(2, keepdim=True).clamp(min=1e-12)
    best_NG1, least_NG1 = torch.zeros_like(largest_NG1), torch.full_like(largest_NG1, torch.inf)
    for share in torch.linspace(0.7, 1.0, 13):
        scale_NG1 = (largest_NG1 * share / 7.5).bfloat16().float()
        number_NGK = (group_NGK / scale_NG1).round().clamp(-8, 7)
        error_NG1 = (number_NGK * scale_NG1 - group_NGK).square().sum(2, keepdim=True)
        best_NG1 = torch.where(error_NG1 < least_NG1, scale_NG1, best_NG1)
        least_NG1 = torch.minimum(error_NG1, least_NG1)
    nibble_NK = ((group_NGK / best_NG1).round().clamp(-8, 7) + 8).to(torch.uint8).view(rows, columns)
    byte_NB = nibble_NK[:, 0::2] | nibble_NK[:, 1::2] << 4
    name = name.removesuffix(".weight")
    return {
        f"{name}.weight_packed": byte_NB.view(torch.int32),
        f"{name}.weight_scale": best_NG1.squeeze(2).bfloat16(),
        f"{name}.weight_shape": torch.tensor([rows, columns], dtype=torch.int32),
    }


FORMATS = {"fp8": (fp8, FP8_NAMES, FP8_CONFIG), "int4": (int4, INT4_NAMES, INT4_CONFIG)}


def quantize(folder: Path, out: Path, form: str) -> None:
    """Write the model of `folder` to `out`, which need not exist, in "fp8" or "int4"."""
    store, names, config = FORMATS[form]
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors |= store(name, tensor) if re.search(names, name) else {name: tensor}
    out.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, out)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(json.dumps(values | {"quantization_config": config}, indent=2) + "\n")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def plain_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same checkpoint with every matrix in fp32, whatever it is stored in."""
    plain = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight_packed"):
            stem = name.removesuffix("_packed")
            byte_NB = tensor.view(torch.uint8)
            number_NK = torch.stack([byte_NB & 15, byte_NB >> 4], 2).flatten(1).float() - 8
            plain[stem] = number_NK * tensors[f"{stem}_scale"].float().repeat_interleave(GROUP, 1)
        elif f"{name}_scale_inv" in tensors:
            plain[name] = tensor.float() * _spread(tensors[f"{name}_scale_inv"], *tensor.shape)
        elif not name.endswith(("_scale_inv", ".weight_scale", ".weight_shape")):
            plain[name] = tensor
    return plain
