"""A toy folder of a DeepSeek V4, made as the published ones are, as two CPU ranks serve it: started with its self-test,
asked through the openai client, and held against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from demo_server import served
from tiny_tokenizer import backend
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from deploy.text.tokenizer import Tokenizer
from tests.deepseek_v4_layout import (
    DSPARK,
    QUANTIZATION,
    dspark_v4,
    mtp_v4,
    published_v4,
    quantized_v4,
    tiny_v4,
    write_v4,
)
from workers.config import EngineConfig
from workers.processes.launch import local_engine
from workers.protocol.report import SelfTestReport

BEGIN, END, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
SPECIAL = (BEGIN, END, USER, ASSISTANT, "｜DSML｜")
TAGS = ("<think>", "</think>")
SIZES: dict[str, Any] = {
    # An expert's share has whole groups of 32, and a rank's rows whole parts of a block.
    "moe_intermediate_size": 128,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "o_lora_rank": 64,
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128, 0],
    "compress_rate_hca": 128,
    "num_hash_layers": 1,
    "max_position_embeddings": 2048,
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "paint",
        "description": "Paints a wall.",
        "parameters": {
            "type": "object",
            "properties": {"color": {"enum": ["red", "green"]}, "coats": {"enum": [1, 2]}},
            "required": ["color", "coats"],
            "additionalProperties": False,
        },
    },
}
ASK: Any = {"role": "user", "content": "Paint it."}


def write(folder: Path, drafts: str) -> DeepseekV4ForCausalLM:
    """Write experts in MXFP4 and other matrices in FP8, the layers that draft, a tokenizer without a chat template.
    The model that the same numbers make in transformers."""
    copy = Backend.from_str(backend().to_str())
    copy.post_processor = None
    copy.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    copy.add_tokens([AddedToken(name, special=False, normalized=False) for name in TAGS])
    config, model = tiny_v4(seed=5, vocab_size=copy.get_vocab_size(), **SIZES)
    given = {**config, "eos_token_id": copy.token_to_id(END), "num_nextn_predict_layers": 1}
    if drafts == "dspark":
        given |= DSPARK | {"dspark_target_layer_ids": [0, 1, 2], "compress_ratios": [*config["compress_ratios"], 0, 0]}
    layers = dspark_v4(given, seed=6) if drafts == "dspark" else mtp_v4(config, seed=6)[0]
    written, meant = quantized_v4({**published_v4(model), **layers})
    write_v4(folder, {**given, "expert_dtype": "fp4", "quantization_config": QUANTIZATION}, written)
    copy.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": BEGIN, "eos_token": END, "tokenizer_class": "LlamaTokenizerFast"})
    )
    without = {name: tensor for name, tensor in meant.items() if not name.startswith("mtp.")}
    plain = write_v4(folder / "plain", config, without)
    return DeepseekV4ForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()


def expected(model: DeepseekV4ForCausalLM, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out: Tensor = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.long
@pytest.mark.parametrize("drafts", ["mtp", "dspark"])
async def test_chats_and_tools_as_two_cpu_ranks_serve_them(drafts: str, tmp_path: Path) -> None:
    oracle, tokenizer = write(tmp_path, drafts), Tokenizer.load(tmp_path)
    assert tokenizer is not None
    settings: dict[str, Any] = {"max_rows": 4, "token_budget": 128, "max_context": 2048, "cache_pages": 80}
    config = EngineConfig(
        model=str(tmp_path), device="cpu", tensor_parallel=2, width=3, **settings,
        grammar_compile_timeout_s=60.0, heartbeat_timeout_s=60.0,
    )  # fmt: skip
    reports: list[SelfTestReport] = []
    async with (
        local_engine(config, name="v4", on_selftest=reports.append) as engine,
        served(engine, tokenizer) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        [report] = reports
        assert report.passed
        assert report.ranks == 2
        asked: Any = {"model": "v4", "temperature": 0.0, "max_tokens": 24}
        more: Any = {"return_token_ids": True, "ignore_eos": True}
        answer = await client.chat.completions.create(**asked, messages=[ASK], extra_body=more)
        prompt = tokenizer.encode(f"{BEGIN}{USER}Paint it.{ASSISTANT}</think>", add_special_tokens=False)
        [choice] = answer.choices
        assert choice.token_ids == expected(oracle, prompt, 24)
        assert choice.message.content == tokenizer.decode(choice.token_ids)
        thinking = {"chat_template_kwargs": {"thinking": True}, **more}
        answer = await client.chat.completions.create(**asked, messages=[ASK], extra_body=thinking)
        prompt = tokenizer.encode(f"{BEGIN}{USER}Paint it.{ASSISTANT}<think>", add_special_tokens=False)
        [choice] = answer.choices
        assert choice.token_ids == expected(oracle, prompt, 24)
        assert choice.message.reasoning_content == tokenizer.decode(choice.token_ids)
        bound: Any = {**asked, "max_tokens": 400, "tools": [TOOL], "parallel_tool_calls": False}
        answer = await client.chat.completions.create(**bound, messages=[ASK], tool_choice="required")
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        call = (choice.message.tool_calls or [])[0]
        assert call.function.name == "paint"
        arguments = json.loads(call.function.arguments)
        assert arguments["color"] in ("red", "green")
        assert arguments["coats"] in (1, 2)
        result = {"role": "tool", "tool_call_id": call.id, "content": "Done."}
        calls = choice.message.model_dump(exclude_none=True)
        answer = await client.chat.completions.create(**asked, messages=[ASK, calls, result], tools=[TOOL])
        assert answer.usage is not None
        assert answer.usage.prompt_tokens > 300
        assert answer.usage.completion_tokens > 0
