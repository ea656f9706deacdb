"""Resources of replicas and of a Ray, and the message about the difference."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from deploy.cluster import connection
from deploy.config.application import ServeConfig
from deploy.serve import app, capacity
from deploy.serve.app import StartFailed
from deploy.serve.application import settled
from deploy.serve.capacity import LOOK_PERIOD_S, PATIENCE_S, WaitingReplicas, shortage
from workers.environment import EnvironmentProblem


def config(ranks: int = 1, device: str = "auto", **fields: object) -> ServeConfig:
    engine = {"model": "demo", "tensor_parallel": ranks, "device": device}
    return ServeConfig.model_validate({"engine": engine, **fields})


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch):
    """Says what all nodes of the pretended Ray have together."""

    def have(**resources: float) -> None:
        monkeypatch.setattr("ray.cluster_resources", lambda: resources)

    return have


@pytest.mark.parametrize(
    ("device", "given", "there", "found"),
    [
        ("auto", None, {"GPU": 2, "CPU": 8}, ("auto", 1)),
        ("auto", None, {"CPU": 8}, ("cpu", 0)),
        ("auto", 0.5, {"CPU": 8}, ("auto", 0.5)),
        # A rank that no GPU is reserved for may still see some, which belong to others.
        ("auto", 0, {"GPU": 2, "CPU": 8}, ("cpu", 0)),
        ("cuda", None, {}, ("cuda", 1)),
        ("cpu", None, {"GPU": 2}, ("cpu", 0)),
        ("cpu", 1, {}, ("cpu", 1)),
    ],
)
def test_device_and_gpus_are_decided_together(nodes, device: str, given: float | None, there: dict, found) -> None:
    nodes(**there)
    result = settled(config(device=device, gpus_per_rank=given))
    assert (result.engine.device, result.gpus_per_rank) == found


def test_nothing_is_decided_by_a_head_that_takes_no_ranks(nodes) -> None:
    """An autoscaler brings the GPUs when somebody asks for some."""
    nodes(memory=1e9)
    with pytest.raises(EnvironmentProblem, match="set device to cuda or cpu"):
        settled(config())


@pytest.mark.parametrize(
    ("settings", "there", "said"),
    [
        ({"ranks": 2}, {"GPU": 2, "CPU": 4}, ""),
        ({"ranks": 2}, {"GPU": 1, "CPU": 4}, "replicas = 1, tensor_parallel = 2 take 2 GPUs where there are 1"),
        ({"ranks": 2, "replicas": 2}, {"GPU": 4, "CPU": 7}, "take 8 CPUs where there are 7"),
        ({"device": "cuda"}, {"CPU": 4}, "take 1 GPU where there are 0"),
        # Two halves of different GPUs are of no use to a rank.
        ({"ranks": 3, "gpus_per_rank": 0.6}, {"GPU": 2, "CPU": 9}, "take 3 GPUs where there are 2"),
        ({"replicas": 3, "gpus_per_rank": 0.4}, {"GPU": 1.0, "CPU": 9}, "take 2 GPUs where there are 1"),
        ({"replicas": 4, "gpus_per_rank": 0.5}, {"GPU": 2, "CPU": 12}, ""),
        ({"replicas": 10, "gpus_per_rank": 0.1}, {"GPU": 1, "CPU": 30}, ""),
        ({"gpus_per_rank": 0.5}, {"CPU": 3}, "take 0.5 GPUs where there are 0"),
        ({"autoscaling": {"max_replicas": 4}}, {"GPU": 2, "CPU": 64}, "autoscaling.max_replicas = 4, tensor_parallel"),
    ],
)
def test_what_is_short(nodes, settings: dict, there: dict, said: str) -> None:
    nodes(**there)
    found = shortage(config(**settings))
    assert found == said if not said else said in found


@pytest.mark.parametrize("hidden", [None, "0"])
def test_a_ray_of_our_own_that_is_too_small_is_an_error_with_advice(nodes, monkeypatch, hidden: str | None) -> None:
    nodes(GPU=1, CPU=64)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    lines: list[str] = []
    with pytest.raises(StartFailed, match=r"2 GPUs where there are 1 on this machine.*--replicas") as error:
        app._check_capacity(config(replicas=2), SimpleNamespace(own=True), lines.append)
    assert ("CUDA_VISIBLE_DEVICES = 0" in str(error.value)) == (hidden is not None)
    app._check_capacity(config(replicas=2), SimpleNamespace(own=False), lines.append)
    assert len(lines) == 1
    assert "waiting for nodes" in lines[0]


def test_a_cluster_needs_room_for_the_fewest_replicas_and_a_ray_of_our_own_for_the_most(nodes) -> None:
    """Nodes of a cluster may come with the replicas; a machine does not grow."""
    following = config(autoscaling={"min_replicas": 2, "max_replicas": 4})
    lines: list[str] = []
    nodes(GPU=2, CPU=64)
    app._check_capacity(following, SimpleNamespace(own=False), lines.append)
    assert lines == []
    with pytest.raises(StartFailed, match=r"max_replicas = 4.*4 GPUs where there are 2.*fewer replicas there"):
        app._check_capacity(following, SimpleNamespace(own=True), lines.append)
    nodes(GPU=1, CPU=64)
    app._check_capacity(following, SimpleNamespace(own=False), lines.append)
    assert len(lines) == 1
    assert "autoscaling.min_replicas = 2" in lines[0]


def test_replicas_without_a_place_are_news_once(nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes(GPU=8, CPU=64)
    groups: dict[str, dict] = {}
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(capacity.time, "monotonic", lambda: clock.now)
    free = {"GPU": 3.0, "CPU": 60.0}
    monkeypatch.setattr("ray.available_resources", lambda: free)
    looks: list[float] = []
    monkeypatch.setattr("ray.util.placement_group_table", lambda: looks.append(clock.now) or groups)
    waiting = WaitingReplicas("ours", config(4, replicas=2))

    def news(after_s: float, *pending: str) -> list[str]:
        clock.now += after_s
        groups.clear()
        groups.update({name: {"name": name, "state": "PENDING"} for name in pending})
        groups["placed"] = {"name": "SERVE_REPLICA::ours#engine#a", "state": "CREATED"}
        return waiting.news()

    ours, other = "SERVE_REPLICA::ours#engine#b", "SERVE_REPLICA::ours2#engine#b"
    assert news(0.0, ours, other) == []
    assert news(PATIENCE_S / 2, ours, other) == []
    assert news(PATIENCE_S, other) == []  # found a place in time
    assert news(1.0, ours, other) == []
    [line] = news(PATIENCE_S, ours, other)
    assert line.startswith(
        "1 of 2 replicas wait for room: one takes 4 GPUs and 6 CPUs, free are 3 of 8 GPUs, 60 of 64 CPUs"
    )
    assert waiting.line == line
    assert news(60.0, ours, other) == []
    before = len(looks)
    assert news(LOOK_PERIOD_S / 2) == []
    assert len(looks) == before, "Ray is asked once a second at the most"
    assert news(1.0) == []
    assert waiting.line == ""
    free["GPU"] = 8.0  # but every node has too few cores
    assert news(1.0, ours) == []
    [line] = news(PATIENCE_S, ours)
    assert "no node has 2 CPUs for its front, or enough have not 1 GPU and 1 CPU for a rank" in line


def test_room_that_has_just_come_is_not_said_to_be_in_pieces(nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that was replaced has ended: Ray takes a moment to place the one that waits for its GPU."""
    nodes(GPU=1, CPU=64)
    clock = SimpleNamespace(now=0.0)
    free = {"GPU": 0.0, "CPU": 61.0}
    groups = {"a": {"name": "SERVE_REPLICA::ours#engine#a", "state": "PENDING"}}
    monkeypatch.setattr(capacity.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr("ray.available_resources", lambda: free)
    monkeypatch.setattr("ray.util.placement_group_table", lambda: groups)
    waiting = WaitingReplicas("ours", config())

    def news(after_s: float) -> list[str]:
        clock.now += after_s
        return waiting.news()

    assert news(0.0) == []
    free.update(GPU=1.0, CPU=64.0)
    assert news(PATIENCE_S) == []
    groups["a"]["state"] = "CREATED"
    assert news(1.0) == []
    assert waiting.line == ""


def test_a_replica_that_shares_a_gpu_waits_for_its_share(nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes(GPU=1, CPU=64)
    group = {"name": "SERVE_REPLICA::ours#engine#a", "state": "PENDING"}
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(capacity.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr("ray.available_resources", lambda: {"GPU": 0.5, "CPU": 2.0})
    monkeypatch.setattr("ray.util.placement_group_table", lambda: {"a": group})
    waiting = WaitingReplicas("ours", config(gpus_per_rank=0.5))
    assert waiting.news() == []
    clock.now = PATIENCE_S
    [line] = waiting.news()
    assert "one takes 0.5 GPUs and 3 CPUs, free are 0.5 of 1 GPUs, 2 of 64 CPUs" in line


@pytest.mark.parametrize(
    ("own", "said"), [(True, "no GPU on this machine"), (False, "no GPU on the nodes that are there")]
)
def test_running_on_cpus_because_there_are_no_gpus_is_said(nodes, own: bool, said: str) -> None:
    nodes(CPU=8)
    lines: list[str] = []
    app._check_capacity(config(device="cpu"), SimpleNamespace(own=own), lines.append)
    app._check_capacity(config(gpus_per_rank=0), SimpleNamespace(own=own), lines.append)
    assert lines == []
    app._check_capacity(config(), SimpleNamespace(own=own), lines.append)
    [line] = lines
    assert said in line


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch):
    """Says which node this process is on, of a pretended Ray to join: the head is 10.0.0.1."""

    def on(node: str) -> connection.RayConnection:
        nodes = [("dead", "10.0.0.9", False), ("other", "10.0.0.2", True), ("head", "10.0.0.1", True)]
        heads = {"dead": {"node:__internal_head__": 1.0}, "head": {"node:__internal_head__": 1.0}}
        found = [
            {"NodeID": name, "NodeManagerAddress": ip, "Alive": alive, "Resources": heads.get(name, {})}
            for name, ip, alive in nodes
        ]
        monkeypatch.setattr(connection, "_knock", lambda address: address)
        monkeypatch.setattr("ray.init", lambda **options: None)
        monkeypatch.setattr(
            "ray.remote", lambda task: SimpleNamespace(options=lambda **options: SimpleNamespace(remote=task))
        )
        monkeypatch.setattr("ray.get", lambda result: result)
        monkeypatch.setattr("ray.nodes", lambda: found)
        context = SimpleNamespace(get_node_id=lambda: node, gcs_address="127.0.0.1:6379")
        monkeypatch.setattr("ray.get_runtime_context", lambda: context)
        return connection.RayConnection(config(ray_address="auto"), lambda line: None)

    return on


@pytest.mark.parametrize(("node", "address"), [("head", "127.0.0.1"), ("other", "10.0.0.1")])
def test_a_cluster_is_asked_at_its_head(joined, node: str, address: str) -> None:
    """Nodes other than the head take requests only if they have a replica."""
    connected = joined(node)
    connected.close()
    assert (connected.own, connected.head_address) == (False, address)


@pytest.mark.parametrize(
    "error", [ConnectionError("no Ray"), RuntimeError("Version mismatch"), ValueError("bad address")]
)
def test_a_cluster_that_cannot_be_joined_is_an_error_with_its_cause(monkeypatch, error: Exception) -> None:
    def init(**options: object) -> None:
        raise error

    monkeypatch.setattr(connection, "_knock", lambda address: address)
    monkeypatch.setattr("ray.init", init)
    with pytest.raises(StartFailed, match=f"cannot join Ray at auto: {error}; give the address"):
        app.launch(config(ray_address="auto", port=0), lambda line: None)


def test_an_address_is_tried_as_ray_understands_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` may be a cluster that is gone, and a head may not listen on 127.0.0.1."""
    with socket.socket() as there, socket.socket() as gone:
        there.bind(("127.0.0.1", 0))
        there.listen()
        gone.bind(("127.0.0.1", 0))  # nobody listens
        for listening, means in ((True, there), (False, gone)):
            found = f"127.0.0.1:{means.getsockname()[1]}"
            monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address_or_die", lambda _, f=found: f)
            if listening:
                assert connection._knock("auto") == found
            else:
                with pytest.raises(ConnectionRefusedError):
                    connection._knock("localhost:6379")
    assert connection._knock("ray://10.0.0.1:10001") == "ray://10.0.0.1:10001"


@pytest.mark.parametrize(
    ("setting", "variable", "joins"),
    [(None, None, None), (None, "", None), ("local", None, None), (None, "local", None), ("auto", "local", "auto")],
)
def test_which_ray_is_meant(monkeypatch, setting: str | None, variable: str | None, joins: str | None) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    assert connection.cluster_to_join(config(ray_address=setting)) == joins
