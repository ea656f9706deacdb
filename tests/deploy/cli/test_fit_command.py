"""`latentserve fit`."""

from __future__ import annotations

import json
import re

import pytest
from published_configs import V3, V4_FLASH
from tiny_models import write_tiny


def test_the_demo_model_fits(command):
    ran = command("fit", "--gpu", "h100")
    assert (ran.code, ran.err) == (0, "")
    first, weights, graphs, _, plain, fp8, verdict = ran.out.splitlines()
    assert first == "each of 1 GPU (h100) 79.10 GiB, of which 90% may be used"
    assert weights.split()[0:3] == ["weights", "0.01", "GiB"]
    assert "as their files store them" in weights
    assert "estimated" in graphs
    held = r" +[\d.]+ GiB  in {}: [\d,]+ pages, [\d,]+ tokens, 64 requests of 2,048 tokens at once"
    assert re.fullmatch("cache" + held.format("bfloat16"), plain)
    assert re.fullmatch("or" + held.format(re.escape("FP8 (--kv-cache-dtype fp8)")), fp8)
    assert verdict == "fits: 64 requests of 2,048 tokens at once (--max-rows)"


def test_json_says_the_same(command):
    said = command("fit", "--gpu", "16 GiB", "--context", "1000", "--max-rows", "8", "--json").json
    assert (said["fits"], said["rows"], said["context"], said["change"]) == (True, 8, 1000, None)
    assert said["gpu_bytes"] == 16 << 30
    assert said["tokens"] == 64 * (said["pages"] - 1)


def test_host_memory_behind_the_cache_is_counted(command):
    arguments = ("fit", "--gpu", "16 GiB", "--context", "1000", "--host-cache-bytes", str(10 << 30))
    said = command(*arguments, "--json").json
    page = said["cache_bytes"] // said["pages"]
    assert (10 << 30) / page * 64 * 0.9 < said["host_tokens"] <= (10 << 30) / page * 64
    line = re.search(r"^host +10\.00 GiB .* ([\d,]+) tokens$", command(*arguments).out, re.MULTILINE)
    assert line
    assert int(line[1].replace(",", "")) == said["host_tokens"]
    assert command("fit", "--gpu", "16 GiB", "--json").json["host_tokens"] == 0
    # The machine that is asked about is another one.
    assert command("fit", "--gpu", "16 GiB", "--host-cache-bytes", str(10**15), "--json").json["host_tokens"] > 10**12


def test_an_engine_that_stands_by_is_counted(command):
    alone, said = (command("fit", "--gpu", "16 GiB", *more, "--json").json for more in ((), ("--standby",)))
    assert alone["standby_bytes"] == 0
    assert said["standby_bytes"] > (1 << 30) + said["graph_bytes_estimated"] + said["other_bytes"]
    assert re.search(r"^standby +1\.\d\d GiB", command("fit", "--gpu", "16 GiB", "--standby").out, re.MULTILINE)
    ran = command("fit", "--gpu", "2 GiB", "--standby")
    assert ran.code == 1
    assert ran.out.splitlines()[-1] == "fits with no --standby"
    assert "does not go with --host-cache-bytes" in command("fit", "--standby", "--host-cache-bytes", "99999999").err


def test_a_disk_behind_host_memory_is_counted(command):
    arguments = ("fit", "--gpu", "16 GiB", "--context", "1000", "--host-cache-bytes", str(10 << 30))
    arguments += ("--disk-cache-bytes", str(80 << 30), "--disk-cache-dir", "/nvme")
    said = command(*arguments, "--json").json
    assert 7.5 < said["disk_tokens"] / said["host_tokens"] <= 8
    line = re.search(r"^disk +80\.00 GiB .* ([\d,]+) tokens$", command(*arguments).out, re.MULTILINE)
    assert line
    assert int(line[1].replace(",", "")) == said["disk_tokens"]
    assert command("fit", "--gpu", "16 GiB", "--json").json["disk_tokens"] == 0


def test_a_cache_in_fp8_holds_more(command, tmp_path):
    folder = write_tiny(tmp_path, "v3", kv_lora_rank=512, qk_rope_head_dim=64, max_position_embeddings=1 << 20)
    arguments = ("fit", "--model", str(folder), "--gpu", "4GiB", "--context", "1024", "--max-rows", "1024")
    arguments += ("--token-budget", "3073")
    plain, fp8 = (command(*arguments, *more).out for more in ((), ("--kv-cache-dtype", "fp8")))
    told = re.compile(
        r" GiB  in (\w+)(?: \((.*)\))?: ([\d,]+) pages, ([\d,]+) tokens, ([\d,]+) requests of 1,024 tokens"
    )
    asked = [("bfloat16", ""), ("FP8", "--kv-cache-dtype fp8")], [("bfloat16", "--kv-cache-dtype auto"), ("FP8", "")]
    assert [[found[:2] for found in told.findall(out)] for out in (plain, fp8)] == list(asked)
    assert [found[2:] for found in told.findall(plain)] == [found[2:] for found in told.findall(fp8)]
    rows = [found[4] for found in told.findall(plain)]
    assert [f"fits: {count} requests" in out for out, count in zip((plain, fp8), rows, strict=True)] == [True, True]
    plain, fp8 = (command(*arguments, *more, "--json").json for more in ((), ("--kv-cache-dtype", "fp8")))
    assert (plain["kv_cache_dtype"], fp8["kv_cache_dtype"]) == ("auto", "fp8")
    assert fp8["tokens"] / plain["tokens"] == pytest.approx(1152 / 656, rel=1e-3)
    assert plain["caches"] == fp8["caches"]
    for name, said in (("plain", plain), ("fp8", fp8)):
        cache = said["caches"][name]
        assert cache.pop("dtype") == ("fp8" if name == "fp8" else "bfloat16")
        assert cache == {field: said[field] for field in cache}
    refused = command(*arguments, "--kv-cache-dtype", "bf16", "--dtype", "float32")
    assert refused.code == 2
    assert "kv_cache_dtype = bf16 (--kv-cache-dtype), but the model runs in float32" in refused.err


def test_what_does_not_fit_names_what_does(command, tmp_path):
    folder = write_tiny(tmp_path, "v3", max_position_embeddings=1 << 20)
    (folder / "model.safetensors").unlink()
    ran = command("fit", "--model", str(folder), "--gpu", "1.5GiB")
    assert ran.code == 1
    *_, why, change = ran.out.splitlines()
    assert why.startswith("does not fit: ")
    assert change.startswith("fits with --")
    again = command("fit", "--model", str(folder), "--gpu", "1.5GiB", *change.removeprefix("fits with ").split())
    assert again.code == 0
    tiny = command("fit", "--model", str(folder), "--gpu", "0.001GiB", "--json")
    assert tiny.code == 1
    assert json.loads(tiny.out)["change"].startswith("--gpu h100")


@pytest.mark.parametrize("gpu", ["8", "b300", "0GiB", "-1GiB", "8GB", ""])
def test_gpus_nobody_knows(command, gpu):
    ran = command("fit", "--gpu", gpu)
    assert ran.code == 2
    assert "give h100, h200, or a size such as 80GiB" in ran.err


def test_mistakes_of_the_model_are_one_line(command, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    ran = command("fit", "--model", str(tmp_path))
    assert ran.code == 2
    assert "model_type = 'llama' is not supported" in ran.err
    folder = write_tiny(tmp_path / "broken", "v3")
    (folder / "model.safetensors").write_bytes(b"nothing")
    ran = command("fit", "--model", str(folder))
    assert ran.code == 2
    assert "is the download complete" in ran.err
    assert "Traceback" not in ran.err


def test_ranks_that_share_a_cache_are_chosen(command, tmp_path):
    folder = tmp_path / "v3"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**V3, "num_hidden_layers": 4}))
    arguments = ("fit", "--model", str(folder), "--tensor-parallel", "8", "--gpu", "28GiB", "--max-rows", "256")
    said = command(*arguments, "--cache-shards", "auto").out
    (chosen,) = [line for line in said.splitlines() if line.startswith("cache_shards = 4 (auto): ")]
    assert "pages and tokens are of 4 GPUs, which share out one cache (--cache-shards)" in said
    assert command(*arguments, "--cache-shards", "4").out == said.replace(chosen + "\n", "")
    assert command(*arguments, "--cache-shards", "auto", "--json").json["cache_shards"] == 4


def test_a_model_with_compressed_entries(command, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(V4_FLASH))
    arguments = ("fit", "--model", str(tmp_path), "--gpu", "400GiB", "--context", "8192")
    ran = command(*arguments)
    assert ran.code == 1
    assert re.search(r"graphs +[\d.]+ GiB  estimated; a start measures it", ran.out)
    assert "snapshots      0.39 GiB  of newest tokens, where 64 prompts share pages" in ran.out
    assert "--kv-cache-dtype" not in ran.out
    said = command(*arguments, "--json").json
    assert said["graph_bytes_estimated"] > 1 << 30
    assert [*said["caches"]] == ["plain"]
