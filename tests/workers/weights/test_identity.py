"""What names the weights of a model folder."""

from __future__ import annotations

import json
import os
import random
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny

from workers.weights import identity
from workers.weights.checkpoint import WeightsError
from workers.weights.identity import SAMPLE_BYTES, weights_identity

NAME = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model")


def test_a_copy_elsewhere_and_at_another_time_is_the_same(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    os.utime(copy / NAME, (1, 1))
    (copy / "README.md").write_text("no weights")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / NAME).symlink_to(folder / NAME)  # as in Hugging Face's cache
    assert weights_identity(folder) == weights_identity(copy) == weights_identity(tmp_path / "linked")
    assert len(weights_identity(folder)) == 16


def test_other_numbers_names_and_sizes_are_other_weights(folder: Path) -> None:
    tensors = load_file(folder / NAME)
    found = {weights_identity(folder)}

    def save(changed: dict[str, torch.Tensor], **metadata: str) -> None:
        save_file(changed, folder / NAME, metadata={"format": "pt", **metadata})
        found.add(weights_identity(folder))

    first, second = [name for name, tensor in tensors.items() if tensor.dim() == 2][:2]
    save({**tensors, first: tensors[first] + 1e-3})  # the header is the same, and so is the size
    save({**tensors, first: tensors[first].bfloat16()})
    save({**tensors, first: tensors[second], second: tensors[first]})
    save({name: tensor for name, tensor in tensors.items() if name != second})
    save({**tensors, "another": torch.zeros(2)})
    save(tensors, epoch="2")
    assert len(found) == 7
    with (folder / NAME).open("ab") as file:
        file.write(b"\0")
    assert weights_identity(folder) not in found


def test_files_are_told_by_their_names(folder: Path) -> None:
    tensors, found = load_file(folder / NAME), set()
    (folder / NAME).unlink()
    for names in (("a", "b"), ("b", "a"), ("a", "c")):
        files = [f"{name}.safetensors" for name in names]
        parts = [dict([*tensors.items()][start::2]) for start in range(2)]
        for file, part in zip(files, parts, strict=True):
            save_file(part, folder / file)
        index = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (folder / f"{NAME}.index.json").write_text(json.dumps({"weight_map": index}))
        found.add(weights_identity(folder))
    assert len(found) == 3


def test_of_large_files_samples_are_read_and_they_reach_from_the_header_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = b"{}      "
    size = 8 + len(header) + 1000 * SAMPLE_BYTES + 77
    contents = bytearray(len(header).to_bytes(8, "little") + header + random.Random(0).randbytes(size - 16))
    file, read = tmp_path / NAME, []
    pread = os.pread
    monkeypatch.setattr(identity, "SAMPLES", 50)
    monkeypatch.setattr(
        os, "pread", lambda descriptor, length, at: read.append((at, length)) or pread(descriptor, length, at)
    )

    def named() -> bytes:
        file.write_bytes(contents)
        read.clear()
        return weights_identity(tmp_path)

    before = named()
    samples = sorted(read[2:])  # several threads read them
    assert len(samples) == 50
    assert (samples[0], samples[-1]) == ((16, SAMPLE_BYTES), (size - SAMPLE_BYTES, SAMPLE_BYTES))
    gaps = [after - at for (at, _), (after, _) in pairwise(samples)]
    assert max(gaps) - min(gaps) <= 1
    for at, length in samples:
        for place in (at, at + length - 1):
            contents[place] ^= 1
            assert named() != before
            contents[place] ^= 1
    assert named() == before


@pytest.mark.parametrize("contents", [b"", b"\1", (2**63).to_bytes(8, "little"), b"\xff" * 20])
def test_a_file_that_is_none_is_still_named(tmp_path: Path, contents: bytes) -> None:
    """Whether it can be served is for others to say."""
    (tmp_path / NAME).write_bytes(contents)
    assert len(weights_identity(tmp_path)) == 16


def test_files_that_are_not_there_are_an_error_that_says_so(folder: Path) -> None:
    (folder / NAME).unlink()
    with pytest.raises(WeightsError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        weights_identity(folder)
    (folder / f"{NAME}.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(WeightsError, match=r"cannot read .*gone\.safetensors: No such file"):
        weights_identity(folder)
