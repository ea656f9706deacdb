"""Checkpoints without numbers have the headers, the sizes and the config.json of those with numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from tiny_models import KINDS, SPARSE_KINDS, write_tiny, write_tiny_headers

from tests.quantized_checkpoints import FP8_NAMES, INT4_NAMES, quantize, quantize_headers


def header(folder: Path) -> dict[str, tuple[str, list[int]]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (slice_.get_dtype(), slice_.get_shape()) for name, slice_ in slices.items()}


@pytest.mark.parametrize("form", [None, "fp8", "int4"])
@pytest.mark.parametrize("kind", [*KINDS, *SPARSE_KINDS])
def test_only_the_numbers_are_missing(kind: str, form: str | None, tmp_path: Path) -> None:
    whole, bare = tmp_path / "whole", tmp_path / "bare"
    write_tiny(whole, kind, hidden_size=136)
    write_tiny_headers(bare, kind, hidden_size=136)
    if form:
        names = FP8_NAMES if form == "fp8" else INT4_NAMES
        quantize(whole, form, names)
        quantize_headers(bare, form, names)
    assert header(bare) == header(whole)
    assert json.loads((bare / "config.json").read_text()) == json.loads((whole / "config.json").read_text())
