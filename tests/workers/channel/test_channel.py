import pickle
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
import zmq

from workers.channel.curve import ClientKeys
from workers.channel.heartbeats import HeartbeatThread
from workers.channel.ports import free_port
from workers.channel.sockets import (
    Binding,
    PeerGone,
    Receiver,
    connect_receiver,
    connect_sender,
    encode,
)
from workers.protocol.messages import (
    Cancel,
    FromWorker,
    Heartbeat,
    Outputs,
    RequestOutput,
    Shutdown,
    ToFront,
    ToScheduler,
    ToWorker,
)
from workers.protocol.plan import StepPlan, StepResult


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_messages_reach_every_end(host: str | None) -> None:
    binding = Binding(2, host, ToScheduler, FromWorker)
    addresses = binding.addresses
    keys = addresses.keys
    front, outputs = connect_sender(addresses.requests, keys), connect_receiver(addresses.outputs, ToFront, keys)
    ranks = [connect_receiver(address, ToWorker, addresses.keys) for address in addresses.plans]
    results = connect_sender(addresses.results, addresses.keys)
    try:
        front.send(Cancel("a"))
        assert binding.requests.receive(60_000) == Cancel("a")
        plan = StepPlan(1, 2, 1, (0,))
        for sender in binding.plans:
            sender.send_encoded(encode(plan))
        assert [rank.receive(60_000) for rank in ranks] == [plan, plan]
        results.send(StepResult(1, ((4,),), 0.1))
        assert binding.results.receive(60_000) == StepResult(1, ((4,),), 0.1)
        binding.outputs.send(Outputs((RequestOutput("a", (1, 2)),)))
        assert outputs.receive(60_000) == Outputs((RequestOutput("a", (1, 2)),))
        assert outputs.receive(0) is None
        for sender in binding.plans:
            sender.send(Shutdown())
        assert ranks[0].receive(60_000) == Shutdown()
    finally:
        for end in (front, results):
            end.close()
        for receiver in (outputs, *ranks):
            receiver.close()
        binding.close()
    if host is None:
        assert not Path(addresses.requests.removeprefix("ipc://")).parent.exists()


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_a_message_ends_a_wait(host: str | None) -> None:
    binding = Binding(1, host, ToScheduler, FromWorker)
    plans = connect_receiver(binding.addresses.plans[0], ToWorker, binding.addresses.keys)
    try:
        for step in range(20):
            plan = StepPlan(step, 2, 1, (0,))
            sending = threading.Timer(0.02 * (step % 2), lambda plan=plan: binding.plans[0].send(plan))
            sending.start()
            deadline = time.monotonic() + 60
            while (received := plans.receive(0)) is None:
                plans.wait(90.0)
                assert time.monotonic() < deadline, "nobody woke it"
            sending.join()
            assert received == plan
        binding.plans[0].send(Shutdown())
        binding.plans[0].send(Shutdown())
        assert plans.receive(60_000) == Shutdown()
        plans.wait(90.0)  # the second one came with the first
        assert plans.receive(60_000) == Shutdown()
        assert time.monotonic() < deadline
        assert plans.receive(0) is None
    finally:
        plans.close()
        binding.close()


@pytest.mark.alone
def test_a_wait_without_a_message_ends_after_its_time() -> None:
    binding = Binding(1, None, ToScheduler, FromWorker)
    plans = connect_receiver(binding.addresses.plans[0], ToWorker, None)
    try:
        waits: list[float] = []
        deadline = time.monotonic() + 60
        # What the system adds is not ours, and a busy one adds milliseconds to most waits. A poll would wait for a
        # whole millisecond every time.
        while len(waits) < 50 or min(waits[10:]) >= 900e-6:
            assert time.monotonic() < deadline, f"the shortest wait took {min(waits[10:])} s"
            begin = time.perf_counter()
            plans.wait(300e-6)
            waits.append(time.perf_counter() - begin)
        assert sum(waits[10:]) >= len(waits[10:]) * 300e-6
    finally:
        plans.close()
        binding.close()


def test_a_socket_that_select_cannot_name_is_not_waited_for() -> None:
    socket = SimpleNamespace(poll=lambda timeout: 0, fileno=lambda: 1 << 20)
    Receiver(cast("zmq.Socket[bytes]", socket), ToWorker).wait(3600.0)


def stranger(kind: int, address: str, keys: ClientKeys | None) -> zmq.Socket[bytes]:
    """Somebody who reaches the port, with keys of its own making or none."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    if keys is not None:
        keys.guard(socket)
    socket.connect(address)
    return socket


def wrong_keys(right: ClientKeys) -> list[ClientKeys | None]:
    """Return wrong keys: none at all; a client's pair that nobody handed out; the right pair for another server."""
    public, secret = zmq.curve_keypair()
    return [None, ClientKeys(right.server, public, secret), ClientKeys(public, right.public, right.secret)]


def test_over_tcp_only_those_who_were_given_the_keys_send_or_receive() -> None:
    binding = Binding(1, "127.0.0.1", ToScheduler, FromWorker)
    addresses = binding.addresses
    assert addresses.keys is not None
    strangers = []
    for keys in wrong_keys(addresses.keys):
        pull = stranger(zmq.PULL, addresses.plans[0], keys)
        push = stranger(zmq.PUSH, addresses.requests, keys)
        with suppress(zmq.Again):
            push.send(encode(Cancel("stray")), zmq.NOBLOCK)
        strangers += [pull, push]
    time.sleep(0.3)  # strangers have had the time to be first
    front = connect_sender(addresses.requests, addresses.keys)
    rank = connect_receiver(addresses.plans[0], ToWorker, addresses.keys)
    try:
        plans = [StepPlan(step, 2, 1, (0,)) for step in range(20)]
        for plan in plans:
            binding.plans[0].send(plan)
        assert [rank.receive(60_000) for _ in plans] == plans
        front.send(Cancel("ours"))
        assert binding.requests.receive(60_000) == Cancel("ours")
        assert binding.requests.receive(200) is None
        assert not any(socket.poll(0) for socket in strangers[::2])
    finally:
        for socket in strangers:
            socket.close(linger=0)
        front.close()
        rank.close()
        binding.close()


def test_keys_are_not_printed_and_travel() -> None:
    binding = Binding(1, "127.0.0.1", ToScheduler, FromWorker)
    try:
        keys = binding.addresses.keys
        assert keys is not None
        assert not any(key.decode() in repr(binding.addresses) for key in (keys.server, keys.public, keys.secret))
        assert pickle.loads(pickle.dumps(binding.addresses)) == binding.addresses
    finally:
        binding.close()


def test_over_tcp_only_the_address_that_was_named_listens() -> None:
    before = set(psutil.Process().net_connections("inet"))
    binding = Binding(2, "127.0.0.2", ToScheduler, FromWorker)
    try:
        found = set(psutil.Process().net_connections("inet")) - before
        listening = [one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN]
        assert listening == ["127.0.0.2"] * 6
    finally:
        binding.close()


LAST_WORDS = """
import os, sys
from workers.channel.sockets import connect_sender, last_words_have_left
from workers.protocol.messages import Cancel
sender = connect_sender(sys.argv[1], None)
sender.send(Cancel("a"))
sender.close(linger_ms=60_000)
print("sent", flush=True)
assert last_words_have_left(60.0)
os._exit(1)
"""


def test_a_process_that_ends_at_once_has_been_heard() -> None:
    """The message of that process leaves only when somebody binds the address, after the process has said so."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with subprocess.Popen([sys.executable, "-c", LAST_WORDS, address], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "sent\n"
        socket = zmq.Context.instance().socket(zmq.PULL)
        socket.bind(address)
        receiver = Receiver(socket, ToScheduler)
        try:
            assert receiver.receive(60_000) == Cancel("a")
        finally:
            receiver.close()
        assert process.wait(60) == 1


def test_order_is_kept_and_nothing_is_dropped() -> None:
    binding = Binding(1, None, ToScheduler, FromWorker)
    sender = connect_sender(binding.addresses.requests, None)
    try:
        for index in range(5000):
            sender.send(Cancel(str(index)))
        received = [binding.requests.receive(60_000) for _ in range(5000)]
        assert [message.request_id for message in received] == [str(index) for index in range(5000)]
    finally:
        sender.close()
        binding.close()


@pytest.mark.alone
def test_a_peer_that_left_is_an_error_at_once() -> None:
    binding = Binding(2, None, ToScheduler, FromWorker)
    rank = connect_receiver(binding.addresses.plans[0], ToWorker, None)
    binding.plans[0].send(Shutdown())
    assert rank.receive(60_000) == Shutdown()
    rank.close()

    def send_until_noticed() -> None:  # the socket hears of it a moment later
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            binding.plans[0].send(Shutdown())

    try:
        with pytest.raises(PeerGone, match="rank 0 has left"):
            send_until_noticed()
        begin = time.monotonic()
        with pytest.raises(PeerGone, match="rank 0 has left"):
            binding.plans[0].send(Shutdown())
        assert time.monotonic() - begin < 5
    finally:
        binding.close()


def test_the_first_message_waits_for_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.channel.sockets.CONNECT_TIMEOUT_S", 60)
    binding = Binding(1, None, ToScheduler, FromWorker)
    connecting = threading.Timer(0.2, lambda: late.append(connect_receiver(binding.addresses.plans[0], ToWorker, None)))
    late: list[Receiver] = []
    connecting.start()
    try:
        binding.plans[0].send(Shutdown())
        connecting.join()
        assert late[0].receive(60_000) == Shutdown()
    finally:
        for receiver in late:
            receiver.close()
        binding.close()


def test_a_peer_that_never_comes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.channel.sockets.CONNECT_TIMEOUT_S", 0.3)
    binding = Binding(2, None, ToScheduler, FromWorker)
    try:
        with pytest.raises(PeerGone, match="rank 1 never came"):
            binding.plans[1].send(Shutdown())
    finally:
        binding.close()


def test_heartbeats_carry_the_newest_figures() -> None:
    binding = Binding(1, None, ToScheduler, FromWorker)
    heartbeat = HeartbeatThread(binding.addresses, 0, silence_s=60)
    try:
        assert binding.results.receive(60_000) == Heartbeat(0)
        for steps in (3, 4):
            expected = {"steps": {"eager": steps}}
            heartbeat.figures = lambda figures=expected: figures
            while (message := binding.results.receive(60_000)).figures != expected:
                assert isinstance(message, Heartbeat)
    finally:
        heartbeat.close()
        binding.close()


def test_heartbeats_come_while_the_main_thread_is_busy_and_stop_when_told() -> None:
    binding = Binding(1, None, ToScheduler, FromWorker)
    heartbeat = HeartbeatThread(binding.addresses, 0, silence_s=60)
    try:
        beats, deadline = 0, time.monotonic() + 60
        while beats < 3:
            sum(range(1000))
            beats += binding.results.receive(0) == Heartbeat(0)
            assert time.monotonic() < deadline
        heartbeat.close()
        while binding.results.receive(600) is not None:  # what was under way
            assert time.monotonic() < deadline
    finally:
        heartbeat.close()
        binding.close()
