"""Checkpoints that lay tensors out otherwise than DeepSeek's do, shown as these: Mistral's own names, the text part of
a model that sees, scales under other names or one for a whole matrix, and experts that are stacked in one tensor.

A checkpoint's entries are rewritten once, when its files have been opened. Whoever asks for a tensor behind that
neither knows nor needs to know of it.

Shape legend: X experts, N output features, K input features, I intermediate features.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from workers.weights.wanted import BLOCK, FP8_DTYPE, FP8_SCALES, MX_DTYPES, MX_SCALES, Shape


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint, or a part of one that is shown as a tensor."""

    file: Path
    shape: Shape
    dtype: str
    name: str
    """Name in the file of the tensor that holds it."""
    outer: tuple[int, ...] = ()
    """Indices of the item that it is, along that tensor's first dimensions."""
    row: int = 0
    """First of its rows there."""
    repeated: bool = False
    """Whether there is one number, which stands for all of `shape`."""
    stored: Shape = field(default=())
    """The shape of the tensor that holds it."""


_OF_MISTRAL: Final = {
    r"tok_embeddings\.": "model.embed_tokens.",
    r"norm\.": "model.norm.",
    r"output\.": "lm_head.",
    r"layers\.(\d+)\.attention_norm\.": r"model.layers.\1.input_layernorm.",
    r"layers\.(\d+)\.ffn_norm\.": r"model.layers.\1.post_attention_layernorm.",
    r"layers\.(\d+)\.attention\.wq_a\.": r"model.layers.\1.self_attn.q_a_proj.",
    r"layers\.(\d+)\.attention\.q_a_norm\.": r"model.layers.\1.self_attn.q_a_layernorm.",
    r"layers\.(\d+)\.attention\.wq_b\.": r"model.layers.\1.self_attn.q_b_proj.",
    r"layers\.(\d+)\.attention\.wkv_a_with_mqa\.": r"model.layers.\1.self_attn.kv_a_proj_with_mqa.",
    r"layers\.(\d+)\.attention\.kv_a_norm\.": r"model.layers.\1.self_attn.kv_a_layernorm.",
    r"layers\.(\d+)\.attention\.wkv_b\.": r"model.layers.\1.self_attn.kv_b_proj.",
    r"layers\.(\d+)\.attention\.wo\.": r"model.layers.\1.self_attn.o_proj.",
    r"layers\.(\d+)\.gate\.": r"model.layers.\1.mlp.gate.",
    **{
        rf"layers\.(\d+)\.{ours}w{number}\.": rf"model.layers.\1.mlp.{theirs}{name}_proj."
        for ours, theirs in {
            r"feed_forward\.": "",
            r"shared_experts\.": "shared_experts.",
            r"experts\.(\d+)\.": r"experts.\2.",
        }.items()
        for number, name in {1: "gate", 2: "down", 3: "up"}.items()
    },
}
"""Beginnings of names in files as Mistral publishes them (`consolidated*.safetensors`), and those that DeepSeek's
have."""
_TEXT_PARTS: Final = {
    r"^language_model\.(?=(model|lm_head)\.)": "",
    r"^model\.language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
}
"""Beginnings of names of the text part of a model that sees, and what stands there without it."""
_ENDS: Final = (FP8_SCALES, MX_SCALES, "_weight_scale")
"""Ends of the names of scales of experts that are stacked."""
_STACKED: Final = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<what>gate_up_proj|down_proj)")


def shown(entries: Mapping[str, Entry], *, mistral: bool) -> dict[str, Entry]:
    """The entries under the names and in the shapes of DeepSeek's checkpoints. `mistral`: the files are Mistral's."""
    found = {_renamed(name) if mistral else name: entry for name, entry in entries.items()}
    found = _text_alone(found)
    found = _unstacked(_show_drafts(found))
    found = _named_scales(found)
    for name in [name for name, entry in found.items() if entry.dtype == FP8_DTYPE and len(entry.shape) == 2]:
        _show_scales(found, name)
    return found


def _renamed(name: str) -> str:
    for begin, instead in _OF_MISTRAL.items():
        if (match := re.match(begin, name)) is not None:
            return match.expand(instead) + name[match.end() :]
    return name


def _text_alone(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Show the text part of a model that sees under the names that it has without what sees: publishers write
    `language_model.model.layers`, transformers 5 `model.language_model.layers`. Where a tensor of that name is there
    already, this one keeps its own, and whoever compares them with a model finds one too many."""
    found: dict[str, Entry] = {}
    for name, entry in entries.items():
        own = name
        for pattern, instead in _TEXT_PARTS.items():
            own = re.sub(pattern, instead, own)
        found[name if own in entries or own in found else own] = entry
    return found


def _show_drafts(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Show layers that draft behind the model's last one, where they have a list and a number of their own, as in Hy4;
    their last norm is called as DeepSeek calls it."""
    layers = [int(match[1]) for name in entries if (match := re.match(r"model\.layers\.(\d+)\.", name))]
    found: dict[str, Entry] = {}
    for name, entry in entries.items():
        if (match := re.match(r"model\.mtp_layers\.(\d+)\.", name)) is not None:
            rest = re.sub(r"^final_layernorm\.", "shared_head.norm.", name[match.end() :])
            name = f"model.layers.{max(layers, default=-1) + 1 + int(match[1])}.{rest}"
        found[name] = entry
    return found


def _unstacked(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Show each expert's matrices in place of [X, 2 I, K], gate rows then up rows, and [X, K, I]; scales likewise."""
    found: dict[str, Entry] = {}
    for name, entry in entries.items():
        match = _STACKED.fullmatch(name)
        if match is None or len(entry.shape) != 3:
            found[name] = entry
            continue
        experts, parts = match["experts"], ["down"]
        if match["what"] == "gate_up_proj":
            parts = ["gate", "up"]
        scales = next((entries[scale] for end in _ENDS if (scale := name + end) in entries), None)
        end = FP8_SCALES if scales is None or scales.dtype not in MX_DTYPES else MX_SCALES
        rows, columns = entry.shape[1] // len(parts), entry.shape[2]
        for expert in range(entry.shape[0]):
            for place, part in enumerate(parts):
                own = f"{experts}.{expert}.{part}_proj.weight"
                found[own] = replace(entry, shape=(rows, columns), outer=(expert,), row=place * rows)
                if scales is not None:
                    found[own + end] = _scales_of(scales, entry.shape[0], expert, place, len(parts))
    return {name: entry for name, entry in found.items() if not _is_scales_of_stack(name, entries)}


def _is_scales_of_stack(name: str, entries: Mapping[str, Entry]) -> bool:
    ends = [end for end in _ENDS if name.endswith(end)]
    return any(_STACKED.fullmatch(of := name.removesuffix(end)) is not None and of in entries for end in ends)


def _scales_of(scales: Entry, experts: int, expert: int, place: int, parts: int) -> Entry:
    """The scales of one expert's part, of scales [X, rows, columns], or of one for each part or each expert, [X, parts]
    or [X] with any further dimensions of 1, or of one for all. Others keep their shape, which is then no expert's."""
    shape = scales.shape
    if shape.count(1) == len(shape):
        return replace(scales, shape=(), outer=(0,) * len(shape))
    if not shape or shape[0] != experts:
        return scales
    ones = (0,) * (len(shape) - 2)
    if shape.count(1) == len(shape) - 1:
        return replace(scales, shape=(), outer=(expert, 0, *ones)[: len(shape)])
    if len(shape) > 1 and shape[1] == parts and shape[2:].count(1) == len(ones):
        return replace(scales, shape=(), outer=(expert, place, *ones))
    if len(shape) != 3:
        return scales
    rows, columns = shape[1:]
    return replace(scales, shape=(rows // parts, columns), outer=(expert,), row=place * (rows // parts))


def _named_scales(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Show scales that are called `X.scale` beside `X.weight`, as in DeepSeek V4, under the name that those of their
    kind have: of blocks, or of 32 input features of a row."""
    found: dict[str, Entry] = {}
    for name, entry in entries.items():
        weight = f"{name.removesuffix('.scale')}.weight"
        if name.endswith(".scale") and weight in entries and len(entry.shape) == 2:
            of = entries[weight]
            blocks = tuple(-(-size // BLOCK) for size in of.shape)
            name = weight + (FP8_SCALES if of.dtype == FP8_DTYPE and entry.shape == blocks else MX_SCALES)
        found[name] = entry
    return found


def _show_scales(entries: dict[str, Entry], name: str) -> None:
    """Have an FP8 matrix have the scales of its blocks, under the name that DeepSeek has for them."""
    scales = name + FP8_SCALES
    if scales not in entries:
        others = (name.removesuffix(".weight") + end for end in (".weight_scale", ".qscale_weight"))
        other = next((other for other in others if other in entries and entries[other].dtype not in MX_DTYPES), None)
        if other is None:
            return
        entries[scales] = entries.pop(other)
    entry, (rows, columns) = entries[scales], entries[name].shape
    if all(size == 1 for size in entry.shape):
        outer = entry.outer or (0,) * len(entry.shape)
        blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
        entries[scales] = replace(entry, shape=blocks, outer=outer, repeated=True)
