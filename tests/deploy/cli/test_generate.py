"""`latentserve generate` on an engine that counts."""

from __future__ import annotations

import io
import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from deploy.text.tokenizer import Tokenizer as ModelTokenizer
from workers.protocol.request import TABLE, sequence_seeds
from workers.vocabulary.spelling import byte_alphabet


@pytest.fixture
def byte_folder(tmp_path):
    """A model folder whose tokens are the 256 bytes."""
    (tmp_path / "config.json").write_text("{}")
    tokenizer = Tokenizer(models.BPE(dict(byte_alphabet().items()), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return str(tmp_path)


def test_ids_of_a_folder_without_tokenizer(engine, command, model_folder):
    ran = command("generate", "--model", model_folder, "--prompt-ids", "3,14,15", "--max-tokens", "4")
    assert (ran.code, ran.out) == (0, "16,17,18,19\n")
    assert "noise" in ran.err
    assert "3 tokens in, 4 out (length)" in ran.err
    assert engine.requests[0].prompt == (3, 14, 15)


def test_ids_are_separated_when_several_come_at_once(engine, command, model_folder):
    engine.step = 3
    ran = command("generate", "--model", model_folder, "--prompt-ids", "7", "--max-tokens", "6", "--quiet")
    assert ran.out == "8,9,10,11,12,13\n"


def test_json_is_one_object(engine, command, model_folder):
    engine.drafts_a_step, engine.eos = 2, (18,)
    ran = command(
        "generate", "--model", model_folder, "--prompt-ids", "15", "--max-tokens", "9", "--json", "--seed", "5"
    )
    assert ran.code == 0
    result = ran.json
    assert result["token_ids"] == list(range(16, 19))
    assert result["finish_reason"] == "stop"
    assert result["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4, "cached_tokens": 0}
    assert result["drafts"] == {"offered": 4, "accepted": 2}
    assert result["seed"] == 5
    assert "text" not in result
    assert set(result["timings"]) == {"load_s", "first_token_s", "total_s", "tokens_per_s"}


def test_ignore_eos_passes_no_stop_ids(engine, command, model_folder):
    engine.eos = (18,)
    ran = command(
        "generate", "--model", model_folder, "--prompt-ids", "15", "--max-tokens", "9", "--json", "--ignore-eos"
    )
    assert ran.json["usage"]["completion_tokens"] == 9


def test_text_in_and_out(engine, command, byte_folder):
    ran = command("generate", "--model", byte_folder, "--prompt", "abc", "--max-tokens", "5")
    assert (ran.code, ran.out) == (0, "defgh\n")
    assert engine.requests[0].prompt == tuple(b"abc")


def test_text_in_json_is_what_is_printed(engine, command, byte_folder):
    # Bytes 0xc2 0xc3 are no character; both are held back and shown as replacement characters.
    ran = command("generate", "--model", byte_folder, "--prompt-ids", "193", "--max-tokens", "2", "--json")
    assert ran.json["text"] == bytes([194, 195]).decode("utf-8", "replace")


def test_sampling_flags_reach_the_engine(engine, command, model_folder):
    flags = ["--temperature", "0.7", "--top-p", "0.9", "--top-k", "40", "--seed", "11", "--max-tokens", "3"]
    command("generate", "--model", model_folder, "--prompt-ids", "1", *flags)
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.7, 0.9, 40, 3)
    assert [sampling.seed] == sequence_seeds(11, (1,))


def test_every_sampling_parameter_has_a_flag(engine, command, model_folder):
    given = {row.name: row.parameter.taken[0] for row in TABLE}
    flags = [word for row in TABLE for word in (row.option, str(given[row.name]))]
    command("generate", "--model", model_folder, "--prompt-ids", "1", *flags)
    sampling = engine.requests[0].sampling
    assert {row.name: getattr(sampling, row.name) for row in TABLE} == given
    command("generate", "--model", model_folder, "--prompt-ids", "1")
    plain = {row.name: getattr(engine.requests[1].sampling, row.name) for row in TABLE}
    assert plain == {row.name: row.default for row in TABLE} | {"temperature": 0.0}


def test_engine_flags_reach_the_engine(engine, command, model_folder):
    flags = ["--width", "2", "--tensor-parallel", "4", "--dtype", "float16", "--device", "cpu"]
    flags += ["--activations", "bf16", "--kv-cache-dtype", "fp8", "--drafter", "ngram"]
    command("generate", "--model", model_folder, "--prompt-ids", "1", *flags)
    config = engine.configs[0]
    assert (config.width, config.tensor_parallel, config.dtype, config.device) == (2, 4, "float16", "cpu")
    assert config.activations == "bf16"
    assert (config.kv_cache_dtype, config.drafter) == ("fp8", "ngram")


def test_a_seed_of_minus_one_is_none_and_any_other_is_one(engine, command, model_folder):
    def asked(seed: int) -> tuple[int, int]:
        ran = command("generate", "--model", model_folder, "--prompt-ids", "1", "--seed", str(seed), "--json")
        return ran.json["seed"], engine.requests[-1].sampling.seed

    assert asked(-1) != asked(-1)
    found = [asked(seed) for seed in (0, -2, -(2**63), 2**63 - 1)]
    assert [seed for seed, _ in found] == [0, -2, -(2**63), 2**63 - 1]
    assert len({own for _, own in found}) == 4
    assert command("generate", "--model", model_folder, "--prompt-ids", "1", "--seed", str(2**63)).code == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "either --prompt or --prompt-ids"),
        (("--prompt", "x", "--prompt-ids", "1"), "either --prompt or --prompt-ids"),
        (("--prompt-ids", "1,x"), "--prompt-ids takes integers"),
        (("--prompt-ids", "-1"), "--prompt-ids: -1 is less than 0"),
        (("--prompt-ids", ","), "--prompt-ids needs at least one"),
        (("--prompt", "x"), "has no tokenizer; give --prompt-ids"),
        (("--prompt-ids", "4096"), "outside the model's vocabulary of 4096"),
        (("--prompt-ids", "1", "--max-tokens", "2048"), "exceed the context of 2048"),
        (("--prompt-ids", "1", "--dtype", "int3"), "--dtype: Input should be 'auto'"),
        (
            ("--prompt-ids", "1", "--kv-cache-dtype", "int8"),
            "--kv-cache-dtype: Input should be 'auto', 'bf16' or 'fp8'",
        ),
        (("--prompt-ids", "1", "--device", "tpu"), "--device: Input should be 'auto'"),
        (("--prompt-ids", "1", "--max-tokens", "0"), "--max-tokens"),
        (("--prompt-ids", "1", "--no-such"), "--no-such"),
    ],
)
def test_mistakes_are_said_and_exit_2(engine, command, model_folder, args, said):
    ran = command("generate", "--model", model_folder, *args)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert "Traceback" not in ran.err
    assert not any(replica.alive for replica in engine.replicas)


def test_the_engine_starts_before_the_tokenizer_is_read(engine, command, byte_folder, monkeypatch):
    read = ModelTokenizer.load
    alive = []

    def load(folder):
        alive.append([replica.alive for replica in engine.replicas])
        return read(folder)

    monkeypatch.setattr(ModelTokenizer, "load", load)
    assert command("generate", "--model", byte_folder, "--prompt", "abc", "--max-tokens", "5").out == "defgh\n"
    assert alive == [[True]]
    assert not engine.replicas[0].alive


@pytest.mark.parametrize("model", ["bytes", "demo"])
@pytest.mark.parametrize("prompt", ["", "-"])
def test_an_empty_prompt(engine, command, byte_folder, monkeypatch, prompt, model):
    """The demo model's empty prompt leaves a begin-of-sequence id, which HTTP does not complete either."""
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    ran = command("generate", "--model", model if model == "demo" else byte_folder, "--prompt", prompt)
    assert (ran.code, ran.out, engine.configs) == (2, "", [])
    assert "--prompt is empty" in ran.err
    assert not any(replica.alive for replica in engine.replicas)


def test_a_prompt_that_is_not_utf_8(engine, command, byte_folder):
    text = b"a\xff".decode("utf-8", "surrogateescape")
    ran = command("generate", "--model", byte_folder, "--prompt", text)
    assert ran.code == 2
    assert "--prompt: the text holds bytes that are not UTF-8" in ran.err


def test_a_folder_that_is_no_model(command, tmp_path):
    ran = command("generate", "--model", str(tmp_path), "--prompt-ids", "1")
    assert ran.code == 2
    assert "has no config.json" in ran.err
