"""`latentserve bench latency` on an engine with known times."""

from __future__ import annotations

import json

import pytest


def test_time_per_output_token_is_the_step_time(engine, command, model_folder):
    ran = command(
        "bench", "latency", "--model", model_folder, "--batch", "1,4", "--input", "64", "--output", "9,17", "--json"
    )
    assert ran.code == 0
    one, four = ran.json["results"]
    assert one["time_per_output_token"] == pytest.approx(0.01)
    assert four["time_per_output_token"] == pytest.approx(0.01)
    assert one["prefill_time"] == pytest.approx(0.5)
    assert (one["decode_speed"], four["decode_speed"]) == (pytest.approx(100), pytest.approx(400))
    assert four["prefill_speed"] == pytest.approx(4 * 64 / 0.5)
    assert one["acceptance"] is None


def test_what_is_asked_of_the_engine(engine, command, model_folder):
    engine.eos = (5,)
    command("bench", "latency", "--model", model_folder, "--batch", "3", "--input", "32", "--output", "2,4", "--json")
    (config,) = engine.configs
    assert config.max_rows == 3
    assert not config.prefix_cache
    assert config.graphs
    assert all(r.sampling.temperature == 0 and not r.sampling.stop_ids for r in engine.requests)
    # warm-up of the engine, then per batch: warm-up, two of one token, two of each length
    assert [r.sampling.max_tokens for r in engine.requests] == [4] * 2 + [4] * 3 + [1] * 6 + [2] * 6 + [4] * 6
    assert all(len(r.prompt) == 32 for r in engine.requests)
    assert len({r.prompt for r in engine.requests}) == len(engine.requests)
    assert len({r.request_id for r in engine.requests}) == len(engine.requests)


@pytest.mark.parametrize(
    ("made_for", "long", "context"), [(163840, 64, 16384), (163840, 20000, 20016), (1024, 64, 1024), (None, 64, None)]
)
def test_context_is_what_is_served(engine, command, tmp_path, made_for, long, context):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": made_for} if made_for else {}))
    command("bench", "latency", "--model", str(tmp_path), "--input", "16", "--output", f"2,{long}", "--json")
    assert engine.configs[0].max_context == context


def test_eager_runs_without_graphs(engine, command, model_folder):
    ran = command("bench", "latency", "--model", model_folder, "--input", "8", "--output", "2,4", "--eager", "--json")
    assert not engine.configs[0].graphs
    assert ran.json["graphs"] is False


def test_activations_in_bf16_are_measured_on_demand(engine, command, model_folder):
    arguments = ("bench", "latency", "--model", model_folder, "--input", "8", "--output", "2,4", "--json")
    assert command(*arguments, "--activations", "bf16").json["activations"] == "bf16"
    assert engine.configs[0].activations == "bf16"
    assert command(*arguments).json["activations"] == "auto"


def test_invariant_mode_is_measured_on_demand(engine, command, model_folder):
    arguments = ("bench", "latency", "--model", model_folder, "--input", "8", "--output", "2,4", "--json")
    ran = command(*arguments, "--invariant")
    assert engine.configs[0].invariant
    assert ran.json["invariant"] is True
    assert command(*arguments).json["invariant"] is False
    assert command(*arguments, "--invariant", "--tensor-parallel", "3").code == 2


def test_the_form_of_the_cache_is_said(engine, command, model_folder):
    arguments = ("bench", "latency", "--model", model_folder, "--input", "8", "--output", "2,4", "--json")
    assert command(*arguments, "--kv-cache-dtype", "fp8").json["kv_cache_dtype"] == "fp8"
    assert engine.configs[0].kv_cache_dtype == "fp8"
    assert command(*arguments).json["kv_cache_dtype"] == "auto"


def test_more_than_the_model_was_made_for(engine, command, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    ran = command("bench", "latency", "--model", str(tmp_path), "--input", "60", "--output", "2,5")
    assert (ran.code, engine.configs) == (2, [])
    assert "65 tokens, exceed the model's context of 64" in ran.err


def test_prompts_are_seeded(engine, command, model_folder):
    args = ("bench", "latency", "--model", model_folder, "--input", "16", "--output", "2,4", "--json")
    for seed in ("1", "1", "2"):
        command(*args, "--seed", seed)
    third = len(engine.requests) // 3
    runs = [[r.prompt for r in engine.requests[i * third : (i + 1) * third]] for i in range(3)]
    assert runs[0] == runs[1] != runs[2]


def test_a_prompt_that_is_not_utf_8(engine, command):
    ran = command("bench", "latency", "--prompt", b"a\xff".decode("utf-8", "surrogateescape"))
    assert (ran.code, engine.configs) == (2, [])
    assert "--prompt: the text holds bytes that are not UTF-8" in ran.err


def test_acceptance_counts_the_measured_runs_only(engine, command, model_folder):
    engine.drafts_a_step = 2
    ran = command(
        "bench", "latency", "--model", model_folder, "--input", "8", "--output", "2,4", "--repeats", "3", "--json"
    )
    (result,) = ran.json["results"]
    assert result["drafts_offered"] == 2 * 3 * (1 + 3)
    assert result["acceptance"] == pytest.approx(0.5, abs=0.05)


def test_table_for_people(engine, command, model_folder):
    ran = command("bench", "latency", "--model", model_folder, "--batch", "1", "--input", "8", "--output", "2,4")
    assert ran.code == 0
    assert "10.000" in ran.out
    assert "noise" not in ran.out
    assert "batch 1: 10.000 ms per output token" in ran.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--output", "33"), "--output takes two lengths"),
        (("--output", "161,33"), "--output takes two lengths"),
        (("--batch", "0"), "--batch: 0 is less than 1"),
        (("--batch", "2000"), "--max-rows: Input should be less than or equal to 1024"),
        (("--prompt", "x"), "has no tokenizer"),
        (("--input", "2000", "--output", "33,161"), "exceed the context of 2048"),
    ],
)
def test_mistakes_are_said_and_exit_2(engine, command, model_folder, args, said):
    ran = command("bench", "latency", "--model", model_folder, *args)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_an_engine_that_stops_early_is_a_failure(engine, command, model_folder, monkeypatch):
    from workers.protocol.messages import RequestOutput

    async def short(request):
        yield RequestOutput(request.request_id, (1,), "stop")

    monkeypatch.setattr(engine, "generate", short)
    ran = command("bench", "latency", "--model", model_folder, "--input", "8", "--output", "2,4")
    assert (ran.code, ran.out) == (1, "")
    assert "asked for 4 tokens, got 1" in ran.err
