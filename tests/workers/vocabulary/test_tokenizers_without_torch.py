"""A tokenizer that is read without torch is the one that is read with it, and torch is there for whoever wants it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from workers.unimported import unimported

ROOT = Path(__file__).resolve().parents[3]

READ = """
import hashlib, json, sys
from pathlib import Path
from workers.vocabulary.folder import load_tokenizer
hf = load_tokenizer(Path("assets/demo"))
text = "def f(x: int) -> str:\\n    return 'na\\u00efve \\U0001f600'"
ids = hf.encode(text)
seen = {
    "ids": ids,
    "text": hf.decode(ids),
    "ended": [hf.bos_token_id, hf.eos_token_id],
    "backend": hashlib.sha256(hf.backend_tokenizer.to_str().encode()).hexdigest(),
    "chat": hf.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, chat_template="{{ messages[0].content }}!"
    ),
}
torch_is_there = "torch" in sys.modules
"""

MODEL = """
import torch
import transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
model = transformers.LlamaForCausalLM(config).eval()
seen["logits"] = model(torch.arange(8)[None]).logits.flatten().tolist()
from transformers.utils import is_torch_available
from transformers.utils.generic import is_torch_tensor
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
seen["is there"] = is_torch_available(), is_torch_tensor(torch.zeros(1)), callable(load_gguf_checkpoint)
seen["stand-in"] = isinstance(load_gguf_checkpoint, type)
"""

SAY = "print(json.dumps([torch_is_there, seen]))"


def said(*parts: str) -> Any:
    ran = subprocess.run([sys.executable, "-c", "\n".join(parts)], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_a_tokenizer_is_read_without_torch() -> None:
    """Before transformers 5.19 it was not: `tests/test_oldest_transformers.py` runs this with such a version."""
    there, _ = said(READ, SAY)
    assert not there


@pytest.mark.long
def test_it_is_the_same_as_with_torch_and_models_work_afterwards() -> None:
    there, without = said(READ, MODEL, SAY)
    assert not there
    there, with_torch = said("import torch", READ, MODEL, SAY)
    assert there
    assert without == with_torch
    assert with_torch["is there"] == [True, True, True]
    assert not with_torch["stand-in"]


def test_nothing_stands_in_where_torch_is_there_already() -> None:
    program = """
import sys, json
import torch
import workers.unimported
def hide(module):
    raise AssertionError(f"{module} is hidden")
workers.unimported.unimported = hide
import workers.vocabulary.library
print(json.dumps("transformers" in sys.modules))
"""
    assert said(program)


def test_others_stand_in_within_the_context_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden() -> bool:
        import colorsys

        return isinstance(colorsys.rgb_to_hsv, type)

    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with unimported("colorsys"):
        assert hidden()
    assert not hidden()
    with unimported("colorsys"):  # which has been imported now
        assert not hidden()
    assert not hidden()


def test_what_is_imported_in_earnest_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    real = ModuleType("colorsys")
    with unimported("colorsys"):
        monkeypatch.setitem(sys.modules, "colorsys", real)
    assert sys.modules["colorsys"] is real


def test_a_failed_import_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with pytest.raises(RuntimeError, match="failed"), unimported("colorsys"):
        raise RuntimeError("failed")
    assert "colorsys" not in sys.modules
