"""Several applications on one cluster, each behind a prefix of its own: they serve side by side, and one that finds no
room keeps none of them from serving. What HAProxy answers for it is counted at Ray's endpoint."""

import asyncio
import time

import httpx
import pytest
from served_application import Server, wait_gone

pytestmark = [pytest.mark.cluster, pytest.mark.soak]

CODE = "from two_applications_program import main; main()"
CONFIG = {
    "engine": {"model": "demo", "device": "cpu", "tensor_parallel": 1, "width": 1, "max_rows": 4, "token_budget": 256},
    "ingress": "direct",
    "drain": {"deregister_s": 0.5, "timeout_s": 30},
}


REFUSED = 7
FIGURES_S = 90.0
"""Seconds until Ray's endpoint must tell what HAProxy has answered."""


def test_two_applications_serve_and_a_third_waits_for_room(launch) -> None:
    server: Server = launch(CONFIG, CODE).wait()
    names = server.find(r"^running: (.*)").split()
    waits = server.find(r"^(\S+ waits: .*)")
    assert waits.split()[0] not in names
    assert 'Resources required for each replica: [{"CPU": 2.0}, {"CPU": 1.0}]' in waits

    async def ask(http: httpx.AsyncClient, name: str, number: int) -> tuple[str, str]:
        body = {"model": name, "prompt": f"def f{number}(", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = await http.post(f"{server.url}/{name}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"], answer.json()["model"]

    async def all_ask() -> None:
        async with httpx.AsyncClient(timeout=120.0, trust_env=False) as http:
            answers = await asyncio.gather(*(ask(http, name, number) for number in range(12) for name in names))
            for number in range(12):
                one, other = answers[2 * number : 2 * number + 2]
                assert (one[0], one[1], other[1]) == (other[0], *names)  # one model, greedy
            for name in names:
                live = (await http.get(f"{server.url}/{name}/live")).json()
                assert [replica["state"] for replica in live["replicas"]] == ["serving"]
                assert live["model"]["names"] == [name]
                figures = (await http.get(f"{server.url}/{name}/metrics")).text
                assert 'latentserve_requests_total{endpoint="completions",reason="length"} 12.0' in figures

    asyncio.run(all_ask())
    refused = {"first", "second", "third"}.difference(names).pop()
    with httpx.Client(timeout=30.0, trust_env=False) as http:
        for _ in range(REFUSED):
            answer = http.post(f"{server.url}/{refused}/v1/completions", json={"model": refused, "prompt": "x"})
            assert answer.status_code == 503
            assert answer.json()["error"]["message"]
        counted = 0.0
        deadline = time.monotonic() + FIGURES_S
        while counted < REFUSED:
            assert time.monotonic() < deadline, counted
            text = http.get(server.find(r"^figures at (\S+)")).text
            counted = sum(
                float(line.rpartition(" ")[2])
                for line in text.splitlines()
                if line.startswith("ray_serve_num_http_requests_total{") and 'status_code="503"' in line
            )
            time.sleep(0.5)
        assert counted == REFUSED
    pids = server.pids()
    assert server.stop() == 0, server.lines
    wait_gone(pids)
