"""Fronts that die in the middle of answers of every API, at every point: another front writes the rest, and the client
has, byte for byte, what an undisturbed front sends."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dying_fronts import Received, Zygote, ask, is_alive

from deploy.serve.heir import MOST_FRONTS
from workers.channel.ports import socket_folder

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 130}
NAMED = {"name": "f", "input_schema": {"type": "object"}}
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 40}),
    "uncached": ("/v1/completions", {"prompt": [5, 6], "max_tokens": 40}),
    "completions": ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 30, "stop": ["END"]}),
    "echo": ("/v1/completions", {"prompt": "Hello", "echo": True, "logprobs": 2, "max_tokens": 20, "seed": 5}),
    "chat": ("/v1/chat/completions", {**CHAT, "stop": ["END"]}),
    "choices": ("/v1/chat/completions", {**CHAT, "n": 4, "tools": [TOOL]}),
    "logprobs": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
    "resumable": ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "header": "x-latentserve-resume: 1\r\n"}),
    "message": ("/v1/messages", {**CHAT, "tools": [NAMED]}),
    "response": ("/v1/responses", {"input": "Hi", "max_output_tokens": 130, "tools": [FLAT]}),
}
STREAMED = ("begun", "fed first", "head", "first piece", "fed", "journalled", "sent", "partly", "last piece", "all")
WHOLE = ("begun", "fed first", "fed", "head", "first piece", "partly", "all")


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.end()


@pytest.fixture(scope="module")
def heir(zygote: Zygote) -> dict[str, Any]:
    """A front that lives."""
    return zygote.front()


def asked(request: str, stream: bool) -> tuple[str, dict[str, Any]]:
    path, body = REQUESTS[request]
    more = {"stream_options": {"include_usage": True}} if stream and "completions" in path else {}
    return path, {**body, "stream": stream, **more}


@pytest.fixture(scope="module")
def undisturbed(heir: dict[str, Any]) -> dict[tuple[str, bool], Received]:
    """What a front sends that lives."""
    found = {}
    for request in REQUESTS:
        for stream in (False, True):
            answer = ask(heir["port"], *asked(request, stream), request)
            assert answer.head.startswith(b"HTTP/1.1 200"), answer
            found[request, stream] = answer
    return found


def pieces(answer: Received, stream: bool) -> int:
    """Count what is written of an answer, its head included."""
    return 2 if not stream else 1 + answer.body.count(b"\n\n\r\n")


def end_at(when: str, answer: Received, stream: bool) -> dict[str, Any]:
    """The event at which a front ends itself, and which one of them."""
    last, middle = pieces(answer, stream), 2 + (pieces(answer, stream) - 2) // 2
    return {
        "begun": {"event": "begun", "count": 1},
        "fed first": {"event": "fed", "count": 1},
        "head": {"event": "journalled", "count": 1},
        "first piece": {"event": "sent", "count": 1},
        "fed": {"event": "fed", "count": 9},
        "journalled": {"event": "journalled", "count": middle},
        "sent": {"event": "sent", "count": middle},
        "partly": {"event": "partly", "count": middle},
        "last piece": {"event": "journalled", "count": last},
        "all": {"event": "sent", "count": last},
    }[when]


def by_choice(answer: Received) -> dict[bytes, bytes]:
    """A streamed answer by its choices, which may take other turns: in each, all bytes in order."""
    found: dict[bytes, bytes] = {}
    for piece in re.split(rb"(?<=\n\n\r\n)", answer.body):
        choice = re.search(rb'"choices":\[\{"index":(\d)', piece)
        name = choice[1] if choice else b"end"
        found[name] = found.get(name, b"") + piece
    return found


def same(found: Received, expected: Received, request: str) -> None:
    """Assert that a client has all it should have, and nothing else."""
    if request in ("completions", "choices") and found.body.endswith(b"\r\n0\r\n\r\n"):
        assert by_choice(found) == by_choice(expected)
        assert len(by_choice(found)) == 5
    else:
        assert found.body == expected.body


def until(condition: Callable[[], bool], what_else: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what_else
        time.sleep(0.005)


def wait_for_the_end_of(front: dict[str, Any]) -> None:
    until(lambda: not (is_alive(front["pid"]) or is_alive(front["watchdog"])), "it, or its watchdog, outlived it")


def has_a_journal(front: dict[str, Any]) -> bool:
    """Whether a front has that of an answer which it goes on with."""
    for name in os.listdir(f"/proc/{front['pid']}/fd"):
        with contextlib.suppress(FileNotFoundError):
            if "latentserve-journal" in os.readlink(f"/proc/{front['pid']}/fd/{name}"):
                return True
    return False


PAIRS = [(r, s, w) for r in REQUESTS for s in (True, False) for w in (STREAMED if s else WHOLE)]
QUICK = {
    pair for number, pair in enumerate(PAIRS) if number % 3 == 0 or pair[2] in ("fed", "journalled", "partly")
}  # each request with streams and without at a third of the points, and each at the hardest ones


@pytest.mark.parametrize(
    ("request_", "stream", "when"),
    [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.soak) for pair in PAIRS],
)
def test_a_client_has_what_an_undisturbed_front_sends(
    zygote: Zygote, heir: dict[str, Any], undisturbed: Any, request_: str, stream: bool, when: str
) -> None:
    expected = undisturbed[request_, stream]
    victim = zygote.front(heirs=[heir["heir"]], **end_at(when, expected, stream))
    found = ask(victim["port"], *asked(request_, stream), request_)
    wait_for_the_end_of(victim)
    same(found, expected, request_)
    assert found.head.splitlines()[0] == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize("request_", ["choices", pytest.param("response", marks=pytest.mark.long)])
@pytest.mark.parametrize("event", ["fed", "taken"])
def test_a_front_that_goes_on_may_die_as_well(
    zygote: Zygote, heir: dict[str, Any], undisturbed: Any, request_: str, event: str
) -> None:
    """Between taking an answer over and saying so, too: nobody, or two fronts, would go on with it otherwise."""
    expected = undisturbed[request_, True]
    for _ in range(20):
        second = zygote.front(heirs=[heir["heir"]], event=event, count=1 if event == "taken" else 7)
        first = zygote.front(heirs=[second["heir"], heir["heir"]], event="journalled", count=9)
        found = ask(first["port"], *asked(request_, True), request_)
        wait_for_the_end_of(first)
        same(found, expected, request_)
        if not is_alive(second["pid"]):
            break  # unless the other one was asked as well, because a busy machine gave this one no processor
    wait_for_the_end_of(second)


def test_an_answer_that_fronts_die_of_is_given_to_no_further_one(zygote: Zygote, heir: dict[str, Any]) -> None:
    path = heir["heir"]
    fronts = []
    for _ in range(MOST_FRONTS):
        fronts.append(zygote.front(heirs=[path], event="fed", count=3))
        path = fronts[-1]["heir"]
    found = ask(fronts[-1]["port"], *asked("chat", True), "chat")
    for front in fronts:
        wait_for_the_end_of(front)
    assert b'"code":"engine_down"' in found.body.rpartition(b"data: ")[2]
    assert is_alive(heir["pid"])


def test_a_stopped_front_is_ended_and_a_dead_heir_is_passed_by(
    zygote: Zygote, heir: dict[str, Any], undisturbed: Any
) -> None:
    gone = zygote.front()
    os.kill(gone["pid"], signal.SIGKILL)
    wait_for_the_end_of(gone)
    stopped = zygote.front(heirs=[gone["heir"], heir["heir"]], pause_s=0.02)
    found = ask(
        stopped["port"], *asked("message", True), "message", then=lambda: os.kill(stopped["pid"], signal.SIGSTOP)
    )
    wait_for_the_end_of(stopped)
    assert found.body == undisturbed["message", True].body


@pytest.fixture
def shared() -> Iterator[str]:
    """A folder of a node's fronts."""
    folder = socket_folder(len("/12345678/heir.new"))
    yield str(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(
    ("request_", "stream"),
    [
        pytest.param(request, stream, marks=() if stream == (number % 2 == 0) else pytest.mark.soak)
        for number, request in enumerate(("completion", "choices", "message", "response"))
        for stream in (True, False)
    ],
)
def test_answers_of_fronts_that_are_down_at_the_same_time_go_on_at_the_next_one_that_comes(
    zygote: Zygote, undisturbed: Any, shared: str, request_: str, stream: bool
) -> None:
    expected = undisturbed[request_, stream]
    waiting = {"shared": shared, "patience_s": 600.0}
    second = zygote.front(event="fed" if stream else "taken", count=7 if stream else 1, **waiting)
    first = zygote.front(event="journalled" if stream else "fed", count=9, **waiting)
    found: list[Received] = []
    reader = threading.Thread(target=lambda: found.append(ask(first["port"], *asked(request_, stream), request_)))
    reader.start()
    while is_alive(first["pid"]) or is_alive(second["pid"]):
        time.sleep(0.005)
    reader.join(0.3)
    assert not found
    comes = zygote.front(**waiting)
    reader.join(60)
    for front in (first, second):
        wait_for_the_end_of(front)
    same(found[0], expected, request_)
    os.kill(comes["pid"], signal.SIGKILL)
    wait_for_the_end_of(comes)
    assert not os.path.exists(shared)


def test_an_answer_waits_for_no_front_longer_than_its_patience_or_where_one_makes_another_answer(
    zygote: Zygote, shared: str
) -> None:
    for number, patience_s in enumerate((0.3, 600.0)):
        if number:
            zygote.front(shared=shared, fingerprint="other weights")
        victim = zygote.front(event="sent", count=4, shared=shared, patience_s=patience_s)
        found = ask(victim["port"], *asked("chat", True), "chat")
        assert b'"code":"engine_down"' in found.body.rpartition(b"data: ")[2]
        wait_for_the_end_of(victim)


def test_a_front_whose_watchdog_is_killed_goes_on(zygote: Zygote, undisturbed: Any) -> None:
    front = zygote.front(pause_s=0.01)

    def kill() -> None:
        os.kill(front["watchdog"], signal.SIGKILL)

    for then in (kill, lambda: None):  # the second answer begins when it is gone
        found = ask(front["port"], *asked("message", True), "message", then=then)
        assert found.body == undisturbed["message", True].body
        until(lambda: not is_alive(front["watchdog"]), "it was killed")


def test_a_watchdog_that_is_killed_while_answers_wait_leaves_no_client_waiting(
    zygote: Zygote, undisturbed: Any, shared: str
) -> None:
    victim = zygote.front(event="sent", count=6, shared=shared, patience_s=600.0)
    found: list[Received] = []
    reader = threading.Thread(target=lambda: found.append(ask(victim["port"], *asked("message", True), "message")))
    reader.start()
    while is_alive(victim["pid"]):
        time.sleep(0.005)
    reader.join(0.3)
    assert not found
    os.kill(victim["watchdog"], signal.SIGKILL)
    reader.join(60)
    assert undisturbed["message", True].body.startswith(found[0].body)
    assert b"message_stop" not in found[0].body


def test_an_answer_that_was_taken_over_needs_the_watchdog_no_more(zygote: Zygote, undisturbed: Any) -> None:
    """Of the front that died; the one that goes on has one of its own."""

    def read(found: list[Received], port: int) -> None:
        found.append(ask(port, *asked("message", True), "message"))

    heir, seen = zygote.front(pause_s=0.02), False
    while not seen:  # a busy machine may give this process no processor before the answer is over
        until(lambda: not has_a_journal(heir), "that of the answer before")
        victim = zygote.front(heirs=[heir["heir"]], event="sent", count=6)
        found: list[Received] = []
        reader = threading.Thread(target=read, args=(found, victim["port"]))
        reader.start()
        while reader.is_alive() and not seen:
            time.sleep(0.001)
            seen = has_a_journal(heir)
        with contextlib.suppress(ProcessLookupError):  # it has ended, unless the machine is busy
            os.kill(victim["watchdog"], signal.SIGKILL)
        reader.join(60)
        assert found[0].body == undisturbed["message", True].body


def test_many_answers_at_once_and_clients_that_read_slowly(zygote: Zygote, heir: dict[str, Any]) -> None:
    """What the front had written and the kernel had not taken is sent again, and nothing that it had; and all of them
    go to the front that is there, though another one was told of."""
    request = asked("logprobs", True)
    path, body = request[0], {**request[1], "max_tokens": 300}
    expected = {name: ask(heir["port"], path, body, name).body for name in ("0", "1", "2", "3")}
    assert len(set(expected.values())) == 4
    heirs = [f"{heir['heir']}-of-one-that-died", heir["heir"]]
    victim = zygote.front(heirs=heirs, event="journalled", count=400, answers=len(expected), stalled=True)
    found: dict[str, bytes] = {}

    def read(name: str) -> None:
        found[name] = ask(victim["port"], path, body, name, slowly=name in "01").body

    readers = [threading.Thread(target=read, args=(name,)) for name in expected]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    wait_for_the_end_of(victim)
    assert found == expected


def test_the_end_that_a_slow_client_has_not_had_when_the_front_is_done_is_sent(
    zygote: Zygote, heir: dict[str, Any]
) -> None:
    path, body = asked("logprobs", True)
    expected = ask(heir["port"], path, {**body, "max_tokens": 300}, "slow")
    victim = zygote.front(heirs=[heir["heir"]], event="done", count=1, stalled=True)
    found = ask(victim["port"], path, {**body, "max_tokens": 300}, "slow", slowly=True)
    wait_for_the_end_of(victim)
    assert found.body == expected.body


def test_a_client_that_leaves_meanwhile_is_left_alone(zygote: Zygote) -> None:
    import socket

    heir = zygote.front(pause_s=0.2)  # it writes for many seconds
    victim = zygote.front(heirs=[heir["heir"]], event="sent", count=5)
    raw = b'{"model": "tiny", "prompt": "Hi", "max_tokens": 400, "stream": true}'
    with socket.create_connection(("127.0.0.1", victim["port"])) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
            + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(raw)
            + raw
        )
        wait_for_the_end_of(victim)
        assert has_a_journal(heir)
    until(lambda: not has_a_journal(heir), "what it held for the client is still there")
    assert ask(heir["port"], "/v1/completions", {"prompt": "Hi", "max_tokens": 4}, "x").head.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("other", ["other weights", "nobody"])
def test_without_a_front_that_serves_the_same_a_stream_ends_with_the_error_event(zygote: Zygote, other: str) -> None:
    heirs = [zygote.front(fingerprint=other)["heir"]] if other != "nobody" else []
    victim = zygote.front(heirs=heirs, event="sent", count=4)
    found = ask(victim["port"], *asked("chat", True), "chat")
    assert found.body.endswith(b"\r\n0\r\n\r\n")
    assert b'"code":"engine_down"' in found.body.rpartition(b"data: ")[2]
    # Of an answer that has not begun a proxy asks another replica, if its connection closes.
    for event, count in (("begun", 1), ("fed", 9)):
        victim = zygote.front(heirs=heirs, event=event, count=count)
        assert ask(victim["port"], *asked("chat", False), "chat").head == b""


@pytest.mark.long
def test_fronts_of_tests_leave_no_folder_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    top = socket_folder(len("/latentserve-12345678/latentserve-12345678/heir.new"))
    monkeypatch.setattr(tempfile, "tempdir", str(top))
    monkeypatch.setenv("TMPDIR", str(top))
    zygote = Zygote()
    try:
        for _ in range(2):
            front = zygote.front()
        assert top in Path(front["heir"]).parents
        os.kill(front["watchdog"], signal.SIGKILL)
    finally:
        zygote.end()
    assert os.listdir(top) == []
    top.rmdir()


FAULTS = {
    # of the front that dies, and where it does
    "taken down behind sending": ({"event": "sent", "count": 6}, True),
    "an output is not taken down": ({"event": "journalled", "count": 12}, True),
    # of the front that goes on
    "an output is lost": ({"event": "journalled", "count": 12}, False),
    "the head is not counted": ({"event": "sent", "count": 6}, False),
    "other draws": ({"event": "sent", "count": 6}, False),
    "an engine that begins again": ({"event": "sent", "count": 6}, False),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(zygote: Zygote, heir: dict[str, Any], undisturbed: Any, fault: str) -> None:
    """And where the fronts notice them themselves, the client is told: it does not get another answer."""
    end, of_victim = FAULTS[fault]
    path = heir["heir"] if of_victim else zygote.front(fault=fault)["heir"]
    victim = zygote.front(heirs=[path], fault=fault if of_victim else "", **end)
    found = ask(victim["port"], *asked("response", True), "response")
    assert found.body != undisturbed["response", True].body
    if fault != "the head is not counted":
        assert b"response.completed" not in found.body
