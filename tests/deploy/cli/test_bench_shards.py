"""bench/shards.py prints what a shared cache costs and gives; here with tiny sizes, on ranks of a CPU, and with what an
endpoint would have printed."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest
import torch

from kernels.page import Shards

pytestmark = pytest.mark.soak


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "bench"))
    import shards

    return shards


@pytest.mark.parametrize("shape", ["v3-slice", "v32-slice"])
def test_every_line_is_measured(bench: ModuleType, capfd: pytest.CaptureFixture[str], shape: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        bench.main(["--tiny", "--device", "cpu", "--only", shape])
    assert exit_.value.code == 0
    head, *lines, end = capfd.readouterr().out.splitlines()
    assert head.split() == ["1", "shard", "2", "shards", "ratio", "on", "two", "H200"]
    assert end.endswith("s in all")
    wanted = bench.measurements_of(shape, tiny=True)
    assert [text[:46].rstrip() for text in lines] == [f"{shape} {what.title}" for what in wanted]
    for what, text in zip(wanted, lines, strict=True):
        times = [float(word) for word in text[46:70].split()]
        assert len(times) == (1 if what.kind == "exchanges" else 2)
        assert all(ms > 0 for ms in times)
        assert f"<= {what.most:g}" in text


def test_rows_lie_on_all_shards(bench: ModuleType) -> None:
    """A planted fault: local ids in the page table, which would have all ranks read one rank's pages."""
    from shapes import scattered_pages

    for count in (1, 2, 4):
        page_RP, own = scattered_pages(5, 7, count, torch.device("cpu"))
        pages = page_RP.flatten().tolist()
        assert len(set(pages)) == 35
        shards = Shards(count)
        assert max(shards.local(page) for page in pages) == own - 1 == -(-35 // count)
        for row in page_RP.tolist():
            owners = [shards.owner(page) for page in row]
            assert all((a + 1) % count == b for a, b in pairwise(owners))


def printed(tokens: int, speeds: tuple[float, ...]) -> str:
    loads = [json.dumps({"url": "", "output_tokens_per_s": speed}) for speed in speeds]
    return "\n".join(["served", json.dumps({"held_tokens": tokens}), *loads, "exit status 0"])


def test_lines_of_what_was_served(bench: ModuleType) -> None:
    lines = bench.http_lines(printed(1000, (50.0, 20.0)), printed(1980, (49.0, 25.0)))
    assert [text[46:].split() for text in lines] == [
        ["1000", "1980", "1.980", "x", ">=", "1.95", "x"],
        ["50", "49", "0.980", "x", ">=", "0.95", "x"],
        ["20", "25", "1.250", "x", ">=", "1.1", "x"],
    ]
    with pytest.raises(ValueError, match="1 caches and 1 of 2 loads"):
        bench.http_lines(printed(1000, (50.0, 20.0)), printed(1980, (49.0,)))


def test_an_endpoint_says_how_much_its_cache_holds(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """At first nobody serves."""
    answers = iter([{"total": {"pages_total": 0}}, {"total": {"pages_total": 120}}])

    class Live(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/live?selftest=false"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(next(answers)).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Live) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        bench.main(["--url", f"http://127.0.0.1:{server.server_port}"])
        server.shutdown()
    assert json.loads(capsys.readouterr().out) == {"held_tokens": 64 * 120}
