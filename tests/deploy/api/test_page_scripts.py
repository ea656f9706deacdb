"""Results of the page's modules, run by node where it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import deploy.page

NODE = shutil.which("node")
MODULES = sorted(Path(deploy.page.__file__).parent.glob("*.js"))
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules, where node takes them for modules."""
    folder = tmp_path_factory.mktemp("page")
    for module in MODULES:
        shutil.copy(module, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


def node(folder: Path, code: str, *arguments: str) -> Any:
    """Run a program in node and return the JSON that it prints."""
    file = folder / "program.mjs"
    file.write_text(code)
    run = subprocess.run([str(NODE), str(file), *arguments], capture_output=True, text=True, timeout=300, cwd=folder)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_every_module_parses(folder: Path) -> None:
    assert len(MODULES) > 5
    for module in MODULES:
        run = subprocess.run(
            [str(NODE), "--check", module.name], capture_output=True, text=True, timeout=300, cwd=folder
        )
        assert run.returncode == 0, run.stderr


def test_a_stream_is_read_alike_however_it_is_cut(folder: Path) -> None:
    code = """
    import { readEvents } from "./sse.js";
    const text = 'data: {"a": "Grüße 🚀"}\\n\\n: note\\n\\ndata: {"b":\\ndata: 2}\\r\\n\\r\\n' +
      'data: [DONE]\\n\\ndata: {"c": 3}\\n\\n';
    const bytes = new TextEncoder().encode(text);
    async function read(...cuts) {
      async function* chunks() {
        let begin = 0;
        for (const cut of [...cuts, bytes.length]) { yield bytes.subarray(begin, cut); begin = cut; }
      }
      const found = [];
      for await (const event of readEvents(chunks())) found.push(event);
      return JSON.stringify(found);
    }
    const found = new Set();
    for (let first = 0; first <= bytes.length; first++) {
      found.add(await read(first));
      for (let second = first; second <= bytes.length; second += 3) found.add(await read(first, second));
    }
    console.log(JSON.stringify([...found]));
    """
    assert [json.loads(one) for one in node(folder, code)] == [[{"a": "Grüße 🚀"}, {"b": 2}]]


def test_a_stream_that_fails_or_breaks_off_throws(folder: Path) -> None:
    code = """
    import { readEvents } from "./sse.js";
    const found = [];
    const failed = 'data: {"error": {"message": "rank 1 is gone"}}\\n\\n';
    for (const text of ['data: {"a": 1}\\n\\n', failed, 'data: {"a"\\n\\n']) {
      try {
        for await (const event of readEvents([new TextEncoder().encode(text)])) void event;
        found.push("no error");
      } catch (error) { found.push(error.message); }
    }
    console.log(JSON.stringify(found));
    """
    broken, failed, nonsense = node(folder, code)
    assert "broke off" in broken
    assert failed == "rank 1 is gone"
    assert nonsense != "no error"


def test_tokens_are_told_apart_where_they_spell_the_text(folder: Path) -> None:
    code = """
    import { align, percent, tokensOf, visible } from "./tokens.js";
    const tokens = (...texts) => texts.map((text) => ({ text }));
    const shapes = [
      ["ab c", tokens("ab", " c")],
      ["ab", tokens("ab", "<|eos|>")],
      ["", tokens("<|eos|>")],
      ["é", tokens("\\ufffd", "\\ufffd")],
      ["ab", tokens("ab", "")],
      ["abc", tokens("ab")],
    ].map(([text, list]) => align(text, list).map((part) => [part.text, part.tokens.length]));
    const chat = tokensOf({ accepted_drafts: [true, false], logprobs: { content: [
      { token: "a", logprob: -1, top_logprobs: [{ token: "b", logprob: -0.5 }] },
      { token: "c", logprob: -2, top_logprobs: [] } ] } });
    const completion = tokensOf({ accepted_drafts: [true, false], logprobs: {
      tokens: ["a", "c"], token_logprobs: [-1, -2], top_logprobs: [{ b: -0.5 }, null] } });
    console.log(JSON.stringify({ shapes, chat, completion, none: tokensOf({ logprobs: null }),
      shares: [0, -0.5, -5, -9999].map(percent), seen: visible(" a\\n") }));
    """
    found = node(folder, code)
    assert found["shapes"] == [
        [["ab", 1], [" c", 1]],
        [["ab", 2]],
        [],
        [["é", 2]],
        [["ab", 2]],
        [["abc", 1]],
    ]
    assert found["chat"] == found["completion"]
    assert [token["drafted"] for token in found["chat"]] == [True, False]
    assert found["none"] == []
    assert found["shares"] == ["100 %", "61 %", "0.7 %", "< 0.1 %"]
    assert found["seen"] == "␣a⏎"


def test_figures_of_replicas_are_added_up_and_kept_for_two_minutes(folder: Path) -> None:
    code = """
    import { combine, falls, History, lines, roundUp } from "./figures.js";
    const figures = (running, rate, seconds, hits) => ({ running, waiting: 0, slots: 4, pages_total: 10, pages_free: 4,
      generated_tokens_per_s: rate, prompt_tokens_per_s: null, steps_per_s: rate, acceptance: [hits],
      acceptance_falls: running - 1, drafts_accepted: null, graph_hit_rate: hits, eager_steps: {},
      steps: { decode: { per_second: rate, seconds, decode_rows: 2, prefill_tokens: 0,
        floor_seconds: seconds > 0.02 ? null : 0.004 } } });
    const two = [{ name: "a", state: "serving", figures: figures(1, 30, 0.01, 1) },
                 { name: "b", state: "serving", figures: figures(2, 10, 0.03, 0.5) },
                 { name: "c", state: "starting", figures: null }];
    const history = new History();
    for (let at = 0; at <= 200; at += 1) history.add({ at, replicas: two });
    history.add({ at: 200, replicas: [] });
    const points = history.points("");
    const path = lines([{ age: 10, figures: { x: 1 } }, { age: 9, figures: { x: 2 } }, { age: 8, figures: null },
      { age: 7, figures: { x: 0 } }, { age: 1, figures: { x: 4 } }], (one) => one.x, 4);
    console.log(JSON.stringify({ falls: [null, ...[0, 1, 3].map((count) => ({ acceptance_falls: count }))].map(falls),
      both: combine(two), none: combine([two[2]]), count: points.length,
      oldest: points[0].age, last: points.at(-1).figures.running, one: history.points("b").at(-1).figures.running, path,
      tops: [0, 0.3, 1, 1.2, 7, 10, 11, 320].map(roundUp) }));
    """
    found = node(folder, code)
    both = found["both"]
    assert (both["running"], both["slots"], both["generated_tokens_per_s"]) == (3, 8, 40)
    assert both["steps"]["decode"]["seconds"] == pytest.approx((30 * 0.01 + 10 * 0.03) / 40)
    assert both["steps"]["decode"]["floor_seconds"] == 0.004
    assert both["graph_hit_rate"] == pytest.approx((30 * 1 + 10 * 0.5) / 40)
    assert (both["acceptance"], both["acceptance_falls"]) == ([0.75], 1)
    before = "fell to half of what was usual: "
    assert found["falls"] == [[], [], [before + "once"], [before + "3 times"]]
    assert both["drafts_accepted"] is None
    assert found["none"] is None
    assert (found["count"], found["oldest"], found["last"], found["one"]) == (121, 120, 3, 2)
    assert found["path"] == "M110.00 0.7500L111.00 0.5000M113.00 1.0000M119.00 0.0000"
    assert found["tops"] == pytest.approx([1, 0.5, 1, 2, 10, 10, 20, 500])
