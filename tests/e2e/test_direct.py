"""One replica of two ranks behind HAProxy: the way `latentserve serve` runs on one machine."""

import contextlib
import json
import os
import re
import signal
import socket
import time
from ipaddress import ip_address
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from induced_failures import kill_under_load
from served_application import Server, wait_gone
from timed_client import begin, client, stream, until

pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.long]

CONFIG = {
    "engine": {"model": "demo", "tensor_parallel": 2, "max_rows": 16, "token_budget": 512},
    "port": 0,
    "ingress": "direct",
    "drain": {"deregister_s": 0.5, "timeout_s": 60},
    "health": {"patience_s": 0},
    "log": {"access": True},
}


@pytest.fixture(scope="module")
def server(launch) -> Server:
    return launch(CONFIG).wait()


def maps_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has just ended
        return ""


def test_progress_is_shown(server: Server) -> None:
    text = "\n".join(server.lines)
    for expected in (
        "starting Ray",
        "starting 2 ranks of demo",
        "rank 0: ",
        "rank 1: ",
        "latent cache, ",
        "requests of 2,048 tokens at once",
        "serving demo at",
    ):
        assert expected in text


def test_the_start_is_told_by_part(server: Server) -> None:
    (begin,) = [n for n, line in enumerate(server.lines) if line.startswith("the first answer was possible ")]
    (end,) = [n for n, line in enumerate(server.lines) if line.startswith("serving demo at ")]
    table = [re.fullmatch(r"    (\S.*\S) +([\d.]+) s", line) for line in server.lines[begin + 1 : end]]
    assert all(table), server.lines
    seconds = {row[1].strip(): float(row[2]) for row in table if row}
    whole = float(server.lines[begin].split()[5])
    assert abs(sum(seconds.values()) - whole) <= 0.1 * (len(seconds) + 6)  # rounded, and without the shortest ones
    long = ("imports", "Ray", "Ray Serve", "front", "processes", "self-test")
    assert [part for part in seconds if part in long] == list(long)


def test_ranks_alone_have_torch_in_their_memory(server: Server) -> None:
    """Each process that imports it starts seconds later."""
    ranks = set(server.pids("ray::WorkerActor"))
    assert len(ranks) == 2
    assert {pid for pid in server.pids() if "libtorch_cpu" in maps_of(pid)} == ranks


def test_the_openai_client_gets_the_same_text_streamed_and_whole(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=httpx.Client(trust_env=False)) as api:
        assert [model.id for model in api.models.list()] == ["demo"]
        arguments = {"model": "demo", "prompt": "def read_lines(path):", "max_tokens": 48, "temperature": 0}
        whole = api.completions.create(**arguments)
        parts = list(api.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert len(parts) > 3
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text != ""
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_one_request_id_reaches_the_client(server: Server) -> None:
    answer = httpx.get(f"{server.url}/v1/models", headers={"x-request-id": "mine-1"}, trust_env=False, timeout=60)
    assert answer.headers.get_list("x-request-id") == ["mine-1"]


def test_live_shows_the_replica_and_what_was_proven(server: Server) -> None:
    body = {"model": "demo", "prompt": "def f(x):", "max_tokens": 32, "ignore_eos": True}
    deadline = time.monotonic() + 60
    while True:
        assert httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False, timeout=60).status_code == 200
        time.sleep(1.1)  # an answer is kept for a second, and the scheduler reports ten times in it
        answer = httpx.get(f"{server.url}/live", trust_env=False, timeout=60)
        assert answer.status_code == 200
        live = answer.json()
        [replica] = live["replicas"]
        figures = replica["figures"]
        if figures["acceptance"] and figures["window_s"] > 0:
            break  # on a busy machine it reports later
        assert time.monotonic() < deadline, live
    assert replica["state"] == "serving"
    assert replica["name"] == live["replica"] == answer.headers["x-latentserve-replica"]
    assert figures["slots"] == 16
    assert live["selftest"] == httpx.get(f"{server.url}/selftest", trust_env=False, timeout=60).json()


def test_a_long_chat_comes_encoded_from_its_router(server: Server) -> None:
    def handed() -> float:
        figures = httpx.get(f"{server.url}/metrics", trust_env=False, timeout=60).text
        found = re.search(r"^latentserve_handed_prompts_total (\S+)$", figures, re.MULTILINE)
        assert found
        return float(found[1])

    def prompt_tokens(words: str) -> int:
        body = {"model": "demo", "messages": [{"role": "user", "content": words}], "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, trust_env=False, timeout=60)
        assert answer.status_code == 200
        return answer.json()["usage"]["prompt_tokens"]

    before = handed()
    assert prompt_tokens("short") < 1024
    assert handed() == before
    content = "".join(f"def f{number}(x): return x + {number}\n" for number in range(120))
    # The router waits a quarter of a second for the replica to take a prompt. A replica that is held up for longer
    # encodes it itself, as it would without a router.
    for attempt in range(1, 21):
        assert prompt_tokens(f"{content}{attempt}") >= 1024
        if handed() > before:
            break
    assert handed() == before + 1


async def test_a_client_that_leaves_cancels_its_request(server: Server) -> None:
    async def running(http: httpx.AsyncClient) -> bool:
        figures = (await http.get(f"{server.url}/metrics")).text
        return "latentserve_requests_in_flight 1.0" in figures

    async def generated(http: httpx.AsyncClient) -> float:
        figures = (await http.get(f"{server.url}/metrics")).text
        return float(re.findall(r"^latentserve_generated_tokens_total\S* (\S+)$", figures, re.M)[0])

    body = {"model": "demo", "prompt": "a", "max_tokens": 1900, "stream": True, "ignore_eos": True}
    async with client() as http, client() as other:
        before = await generated(other)
        async with http.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            lines = response.aiter_lines()  # held: a collected iterator closes the connection
            assert "choices" in await anext(lines)
            assert await running(other)

        async def stopped() -> bool:
            return not await running(other)

        await until(stopped, 60.0)
        after = await generated(other)
    assert after - before < 1900 / 2, "nothing stopped it"


@pytest.mark.parametrize(("megabytes", "status"), [(3, 400), (9, 413)])
def test_a_body_larger_than_haproxy_s_buffer_reaches_the_front(server: Server, megabytes: int, status: int) -> None:
    body = {"model": "demo", "prompt": "x " * (megabytes * 2**19), "max_tokens": 1}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False, timeout=30)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


async def test_logs_are_json_with_the_request_id(server: Server) -> None:
    """The line is written behind the answer, which may be here first."""
    httpx.get(f"{server.url}/v1/models", headers={"x-request-id": "find-me-1"}, trust_env=False, timeout=60)
    session = server.find(r"logs in (\S+)")

    async def written() -> list[str]:
        lines = [line for file in Path(session).glob("worker-*.err") for line in file.read_text().splitlines(True)]
        return [line for line in lines if "find-me-1" in line and line.endswith("\n")]

    (text,) = await until(written, 60.0)
    line = json.loads(text)
    expected = {"request_id": "find-me-1", "process": "front", "application": "latentserve", "status": 200}
    assert expected.items() <= line.items()
    assert line["replica"]


def test_only_the_asked_for_address_is_open_to_others(server: Server) -> None:
    """All other sockets listen for this machine alone: Ray's own and those between the ranks."""
    listening = {}
    for pid in [server.process.pid, *server.pids()]:
        with contextlib.suppress(psutil.NoSuchProcess):  # Ray ends processes that nobody needed
            process = psutil.Process(pid)
            title = " ".join(process.cmdline())[:120]
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    listening[connection.laddr] = title
    for address, title in sorted(listening.items()):
        print(address.ip, address.port, title)
    titles = " ".join(listening.values())
    for expected in ("gcs_server", "raylet", "haproxy", "ServeReplica", "SchedulerActor", "WorkerActor"):
        assert expected in titles
    assert {a: t for a, t in listening.items() if not ip_address(a.ip.removeprefix("::ffff:")).is_loopback} == {}
    port = int(server.url.rsplit(":", 1)[1])
    for address in {a.address for group in psutil.net_if_addrs().values() for a in group if a.family == socket.AF_INET}:
        if not address.startswith("127."):
            with pytest.raises(OSError, match="refused"):
                socket.create_connection((address, port), 1)


async def test_figures_are_on_ray_s_metrics_endpoint(server: Server) -> None:
    endpoint = server.find(r"figures for Prometheus at (\S+)")
    async with client() as http:
        result = await stream(http, server.url, max_tokens=40, ignore_eos=True)
        assert result.done

        async def figures() -> dict[str, float]:
            text = (await http.get(endpoint)).text
            rows = re.findall(r"^ray_(latentserve_\w+)\{([^}]*)\} (\S+)$", text, re.M)
            found: dict[str, float] = {}
            for name, labels, value in rows:
                if "le=" not in labels:
                    assert 'application="latentserve"' in labels
                    assert 'deployment="engine"' in labels
                    found[name] = found.get(name, 0.0) + float(value)
            told = "latentserve_time_per_output_token_seconds_count" in found
            return found if told and found["latentserve_engine_generated_tokens_total"] >= 40 else {}

        found = await until(figures, 60.0)
    assert found["latentserve_engine_prompt_tokens_total"] >= 3
    assert found["latentserve_engine_drafts_offered_total"] >= found["latentserve_engine_drafts_accepted_total"] > 0
    assert found["latentserve_engine_step_seconds_count"] > found["latentserve_engine_step_prefill_tokens_count"] > 0
    assert found["latentserve_engine_step_seconds_sum"] > 0
    assert found["latentserve_engine_step_decode_rows_sum"] >= found["latentserve_engine_step_decode_rows_count"] > 0
    assert found["latentserve_engine_graph_eager_steps_total"] > 0  # on a CPU there are no graphs
    assert found["latentserve_engine_graph_bytes"] == 0
    assert found["latentserve_engine_pages_total"] > 0
    assert found["latentserve_engine_healthy"] == 1
    assert found["latentserve_time_to_first_token_seconds_count"] >= 1
    assert {"latentserve_engine_running", "latentserve_engine_waiting"} <= set(found)


@pytest.mark.parametrize(
    ("title", "number", "cause"),
    [
        ("ray::WorkerActor", signal.SIGKILL, "rank . died"),
        # What their streams end with is tested without Ray, too, in tests/workers/processes.
        ("ray::SchedulerActor", signal.SIGKILL, "scheduler died"),
        ("ray::ServeReplica:latentserve:engine", signal.SIGKILL, "front died"),
        ("ray::WorkerActor", signal.SIGSTOP, "silent"),
    ],
    ids=["worker killed", "scheduler killed", "replica killed", "worker stopped"],
)
async def test_a_failure_ends_every_stream_with_its_cause_and_is_repaired(
    server: Server, title: str, number: int, cause: str
) -> None:
    errors = await kill_under_load(server, server.pids(title)[-1], number)
    assert all(re.search(cause, error) for error in errors), errors


async def test_ctrl_c_lets_streams_finish_and_leaves_nothing_behind(server: Server) -> None:
    """Last in this module: the application is gone afterwards."""
    pids = server.pids()
    port = int(server.url.rsplit(":", 1)[1])
    async with client() as http:
        (running,) = await begin(http, server.url, 1, max_tokens=500, ignore_eos=True)
        begun = time.monotonic()
        os.killpg(server.process.pid, signal.SIGINT)  # as Ctrl-C in a terminal: every process gets it
        result = await running
    assert result.done, result.broken or result.error
    assert sum(len(event["choices"][0]["text"]) > 0 for event in result.events if event["choices"]) > 100
    assert result.ended > begun
    assert server.ended() == 0
    wait_gone(pids)
    # Nothing else on the terminal, for all that was killed above.
    assert [line.partition(":")[0] for line in server.lines if "draining" in line or "stopped" in line] == [
        "draining",
        "stopped",
    ]
    assert server.lines[-1] == "stopped"
    assert not [line for line in server.lines if re.search(r"raylet|INFO|WARNING|Traceback", line)]
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
    assert not os.path.exists(f"/proc/{server.process.pid}")
