"""The demo model as shipped, and the script that made it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

ASSETS = Path(__file__).resolve().parents[2] / "assets"
DEMO = ASSETS / "demo"
sys.path.insert(0, str(ASSETS))  # the script's own modules, found as `python assets/train_demo.py` finds them

from training import corpus  # noqa: E402
from training.evaluate import load, speculate  # noqa: E402
from training.model import DemoModel, ModelConfig, export_tensors  # noqa: E402
from training.train import save_checkpoint  # noqa: E402

PROMPT = "import os\n\n\ndef read_lines(path):\n"


def load_in_transformers(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import DeepseekV3ForCausalLM

    class WithMTP(DeepseekV3ForCausalLM):  # type: ignore[misc]
        # transformers knows the MTP layer of the 61-layer model only
        _keys_to_ignore_on_load_unexpected = (r"model\.layers\.4\..*",)

    model, info = WithMTP.from_pretrained(folder, dtype=dtype, local_files_only=True, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO, local_files_only=True)


@pytest.fixture(scope="module")
def prompt_BT() -> Tensor:
    return torch.tensor([Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(PROMPT).ids])


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoModel, Path]:
    """Random norms and routing biases as well: with norms of one, a wrong convention would pass."""
    torch.manual_seed(1)
    model = DemoModel(ModelConfig()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 2.0)
        for router in model.routers():
            router.e_score_correction_bias.uniform_(-0.2, 0.2)
    folder = tmp_path_factory.mktemp("random")
    save_checkpoint(model, Tokenizer.from_file(str(DEMO / "tokenizer.json")), folder)
    return load(folder, torch.device("cpu"))[0], folder


def test_folder_is_small() -> None:
    assert (DEMO / "model.safetensors").stat().st_size <= 11.5e6
    assert sum(file.stat().st_size for file in DEMO.iterdir()) <= 12e6
    assert (DEMO / "LICENSE-DATA.md").exists()


@given(text=st.text())
@settings(max_examples=200, deadline=None)
def test_tokenizer_round_trip(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= token < corpus.VOCAB_SIZE for token in ids)


def test_tokenizer_round_trips_source_and_adds_bos(tokenizer: Any) -> None:
    text = (ASSETS / "training" / "model.py").read_text()[:4000]
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id == corpus.BOS_ID
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer) == corpus.VOCAB_SIZE
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (corpus.EOS_ID, corpus.PAD_ID)


def test_tokenizer_alone_agrees(tokenizer: Any) -> None:
    alone = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    assert alone.encode(PROMPT).ids == tokenizer.encode(PROMPT)


def test_chat_template(tokenizer: Any) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write a function."}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|bos|><|system|>Be brief.<|user|>Write a function.<|assistant|>"
    answered = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": "pass"}], tokenize=False)
    assert answered == prompt + "pass<|eos|>"
    with pytest.raises(Exception, match="unknown role: nobody"):
        tokenizer.apply_chat_template([{"role": "nobody", "content": ""}], tokenize=False)


def test_config_is_the_one_trained() -> None:
    from transformers import AutoConfig

    config = json.loads((DEMO / "config.json").read_text())
    assert ModelConfig.from_json(config) == ModelConfig()
    loaded = AutoConfig.from_pretrained(DEMO, local_files_only=True)
    assert loaded.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert loaded.num_nextn_predict_layers == 1


@pytest.mark.parametrize("shipped", [True, False], ids=["shipped", "random norms"])
@torch.no_grad()
def test_logits_agree_with_transformers(random_model: tuple[DemoModel, Path], prompt_BT: Tensor, shipped: bool) -> None:
    folder = DEMO if shipped else random_model[1]
    model, _ = load(folder, torch.device("cpu"))
    expected = load_in_transformers(folder, torch.float32)(prompt_BT).logits
    # Both in fp32 from the same bf16 weights: only the order of sums differs.
    torch.testing.assert_close(model.lm_head(model.trunk(prompt_BT)), expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_mtp_layer_agrees_with_transformers(random_model: tuple[DemoModel, Path]) -> None:
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    model, folder = random_model
    reference = load_in_transformers(folder, torch.float32)
    ids_BT = torch.randint(corpus.VOCAB_SIZE, (1, 24), generator=torch.Generator().manual_seed(3))
    hidden_BTD = model.trunk(ids_BT)[:, :-1]
    expected_BTD = MtpModel.from_pretrained(reference).forward_layer(
        0,
        hidden_BTD,
        torch.arange(1, 24)[None],
        MtpCache(config=reference.config.get_mtp_config()),
        input_ids=ids_BT[:, 1:],
    )
    actual_BTD, _ = model.draft(ids_BT[:, 1:], hidden_BTD, [])
    torch.testing.assert_close(actual_BTD, expected_BTD, rtol=1e-3, atol=1e-3)


def count_calls(module: torch.nn.Module, run: Callable[[], Any]) -> tuple[Any, int]:
    calls = []
    handle = module.register_forward_hook(lambda *_: calls.append(1))
    result = run()
    handle.remove()
    return result, len(calls)


@pytest.mark.parametrize("shipped", [True, False], ids=["shipped", "random norms"])
def test_first_draft_is_that_of_transformers(
    random_model: tuple[DemoModel, Path], prompt_BT: Tensor, shipped: bool
) -> None:
    """Same text in the same number of verify steps: so the same drafts were accepted."""
    folder = DEMO if shipped else random_model[1]
    reference = load_in_transformers(folder, torch.float32)
    new = 48
    settings_of_run = {"do_sample": False, "max_new_tokens": new}
    mask_BT = torch.ones_like(prompt_BT)
    expected_BT, calls = count_calls(
        reference.model,
        lambda: reference.generate(prompt_BT, attention_mask=mask_BT, use_mtp=True, **settings_of_run),
    )
    model, _ = load(folder, torch.device("cpu"))
    ids_BT, acceptance = speculate(model, prompt_BT, 1, 0.0, new)
    assert ids_BT[0, : expected_BT.shape[1]].tolist() == expected_BT[0].tolist()
    assert acceptance.steps == calls - 1  # theirs also counts the prompt's pass


@pytest.mark.parametrize("drafts", [1, 3])
def test_speculation_does_not_change_greedy_output(prompt_BT: Tensor, drafts: int) -> None:
    model, _ = load(DEMO, torch.device("cpu"))
    new = 32
    ids_BT, acceptance = speculate(model, prompt_BT, drafts, 0.0, new)
    plain_BT = prompt_BT
    with torch.no_grad():
        for _ in range(new):
            next_B = model.lm_head(model.trunk(plain_BT)[:, -1]).argmax(-1)
            plain_BT = torch.cat([plain_BT, next_B[:, None]], dim=1)
    assert ids_BT[0, : plain_BT.shape[1]].tolist() == plain_BT[0].tolist()
    assert acceptance.tokens_per_step > 1.3


def test_rows_of_a_batch_do_not_see_each_other(prompt_BT: Tensor) -> None:
    model, _ = load(DEMO, torch.device("cpu"))
    prompts_BT = torch.cat([prompt_BT, prompt_BT.roll(3, 1), prompt_BT.roll(6, 1)])
    together_BT, acceptance = speculate(model, prompts_BT, 3, 0.0, 12)
    alone = [speculate(model, row_T[None], 3, 0.0, 12) for row_T in prompts_BT]
    for row, (ids_BT, _) in enumerate(alone):
        assert together_BT[row].tolist() == ids_BT[0].tolist()
    assert acceptance.steps == sum(result.steps for _, result in alone)
    assert acceptance.accepted == tuple(sum(counts) for counts in zip(*(r.accepted for _, r in alone), strict=True))


@torch.no_grad()
def test_unrolled_drafts_are_those_of_decoding(random_model: tuple[DemoModel, Path]) -> None:
    """Training drafts from all columns at once, decoding from one column with a cache: the hidden states agree."""
    model, _ = random_model
    ids_BT = torch.randint(corpus.VOCAB_SIZE, (1, 24), generator=torch.Generator().manual_seed(2))
    trunk_BTD = hidden_BTD = model.trunk(ids_BT)
    earlier: list[tuple[Tensor, Tensor]] = []
    unrolled = []
    for step in range(3):
        hidden_BTD, key_value = model.draft(ids_BT.roll(-1 - step, 1), hidden_BTD, earlier)
        earlier.append(key_value)
        unrolled.append(hidden_BTD)
    column = 13
    inputs_BTD = trunk_BTD.clone()
    for step in range(3):
        decoded_BTD, _ = model.draft(ids_BT.roll(-1, 1), inputs_BTD, [])
        torch.testing.assert_close(unrolled[step][:, column], decoded_BTD[:, column + step], rtol=1e-4, atol=1e-4)
        inputs_BTD[:, column + step + 1] = decoded_BTD[:, column + step]


def test_export_has_official_names_and_no_duplicates(random_model: tuple[DemoModel, Path], tmp_path: Path) -> None:
    tensors = export_tensors(random_model[0])
    assert {name for name in tensors if name.startswith("model.layers.4.") and ".self_attn." not in name} >= {
        "model.layers.4.enorm.weight",
        "model.layers.4.hnorm.weight",
        "model.layers.4.eh_proj.weight",
        "model.layers.4.shared_head.norm.weight",
        "model.layers.4.mlp.experts.7.down_proj.weight",
        "model.layers.4.mlp.gate.e_score_correction_bias",
    }
    assert "model.layers.4.embed_tokens.weight" not in tensors
    assert "model.layers.4.shared_head.head.weight" not in tensors
    save_file(tensors, tmp_path / "model.safetensors")  # refuses tensors that share memory


@pytest.mark.long
def test_smoke_training_exports_a_loadable_model(tmp_path: Path) -> None:
    command = [sys.executable, str(ASSETS / "train_demo.py"), "--smoke", "--device", "cpu", "--out", str(tmp_path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    assert "held-out" in output
    model = load_in_transformers(tmp_path, torch.bfloat16)
    with torch.no_grad():
        assert model(torch.tensor([[corpus.BOS_ID, 5, 6]])).logits.isfinite().all()
