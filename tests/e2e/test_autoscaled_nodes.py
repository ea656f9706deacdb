"""Ray's autoscaler under the policy: a burst brings a replica and a node for it, and no stream is cut when both go."""

import asyncio
import json
import shutil
from itertools import chain
from pathlib import Path

import httpx
import psutil
import pytest
from autoscaled_nodes import ClusterOfNodesOnDemand, Nodes
from served_application import Server, wait_gone
from timed_client import Stream, client, how_far, stream, until

from workers.config import DEMO_MODEL

CODE = "from autoscaled_program import main; main()"
CONTEXT, STREAM_TOKENS = 8192, 4000
"""A stream outlasts the decisions of Serve and of the autoscaler, and the time after which an idle node goes. The demo
model's own context has 2,048 tokens."""
ENGINE = {"device": "cpu", "width": 1, "max_rows": 8, "token_budget": 512, "invariant": True}
CONFIG = {
    "name": "demo",
    "autoscaling": {"max_replicas": 2, "upscale_delay_s": 1.0, "downscale_delay_s": 1.0},
    "port": 0,
    "host": "0.0.0.0",
    "ingress": "direct",
    "proxies": "head",  # nodes of one machine would all listen on the same port
    "drain": {"deregister_s": 0.5, "timeout_s": 900},
}
BURST, BURST_TOKENS = 20, 32
"""Streams at a time: more than one replica has slots."""
PATIENCE_S = 600.0
"""A node and the replica on it take a minute to start on a slow machine, and the streams several."""
FRONTS, RANKS = "ray::ServeReplica:latentserve:engine", "ray::WorkerActor"


def test_ray_s_autoscaler_reads_the_configuration(tmp_path: Path) -> None:
    from ray.autoscaler._private.providers import _get_node_provider_cls
    from ray.autoscaler._private.util import prepare_config, validate_config
    from ray.autoscaler.v2.instance_manager.config import FileConfigReader

    node = {"resources": {"CPU": 3}, "node_config": {}, "min_workers": 0, "max_workers": 2}
    cluster = ClusterOfNodesOnDemand(tmp_path, {"CPU": 0}, {"node": node}, idle_timeout_minutes=0.5)
    file = tmp_path / "written.yaml"
    file.write_text(json.dumps(cluster.config))
    validate_config(prepare_config(json.loads(file.read_text())))
    read = FileConfigReader(str(file)).get_cached_autoscaling_config()
    assert {name: kind.resources for name, kind in read.get_node_type_configs().items()} == {
        read.get_head_node_type(): {"CPU": 0},
        "node": {"CPU": 3},
    }
    assert (read.get_max_num_worker_nodes(), read.get_idle_timeout_s()) == (2, 30)
    assert read.disable_node_updaters(), "nodes would be set up over SSH"
    assert _get_node_provider_cls(read.get_provider_config()) is Nodes


def test_a_cluster_that_never_started_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Least of all other Rays of this machine, as the class that it is made of does."""
    started: list[object] = []
    monkeypatch.setattr("subprocess.check_call", started.append)
    ClusterOfNodesOnDemand(tmp_path, {"CPU": 0}, {}).shutdown()
    assert started == []


@pytest.fixture(scope="module")
def server(launch, tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder = tmp_path_factory.mktemp("long") / "demo"
    shutil.copytree(DEMO_MODEL, folder)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "max_position_embeddings": CONTEXT}))
    return launch({**CONFIG, "engine": {**ENGINE, "model": str(folder)}}, CODE).wait()


def raylet_of(pid: int) -> int:
    """The node of an actor."""
    for parent in psutil.Process(pid).parents():
        if parent.name() == "raylet":
            return parent.pid
    raise AssertionError(f"{pid} is no Ray process")


def nodes(server: Server) -> set[int]:
    """Raylets of the nodes that the autoscaler started, which are all but the head's."""
    head = raylet_of(server.pids("ray::ServeController")[0])
    found = set()
    for process in psutil.Process(server.process.pid).children(recursive=True):
        try:
            if process.name() == "raylet" and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found - {head}


def logged(server: Server, *patterns: str) -> str:
    """What processes of Ray logged so far. `patterns`: of files among its logs."""
    folder = Path(server.find(r"^logs in (\S+)"))
    return "".join(file.read_text() for file in chain.from_iterable(map(folder.glob, patterns)))


def everybody_says(server: Server) -> str:
    """The last lines of all who decide: the command, Serve's controller, the autoscaler and the nodes' raylets."""
    told = {
        "command": "\n".join(server.lines),
        "controller": logged(server, "serve/controller_*.log"),
        "autoscaler": logged(server, "monitor.log", "monitor.err"),
        "raylets": logged(server, "raylet*.err"),
    }
    return "\n".join(f"--- {who}:\n" + "\n".join(text.splitlines()[-25:]) for who, text in told.items())


async def replicas(http: httpx.AsyncClient, server: Server) -> set[str]:
    live = (await http.get(f"{server.url}/live")).json()
    return {replica["name"] for replica in live["replicas"] if replica["state"] == "serving"}


async def ask(http: httpx.AsyncClient, server: Server, result: Stream | None = None, tokens: int = 8) -> Stream:
    return await stream(
        http, server.url, result, max_tokens=tokens, ignore_eos=True, stream_options={"include_usage": True}
    )


def tokens_of(result: Stream) -> int:
    """Tokens of a stream that ended as it should; 0 of any other."""
    return result.events[-1]["usage"]["completion_tokens"] if result.done and not result.error else 0


@pytest.mark.cluster
@pytest.mark.soak
@pytest.mark.timeout(3000)
async def test_a_burst_brings_a_node_and_no_stream_is_cut_when_it_goes(server: Server) -> None:
    answered: list[Stream] = []
    asked: list[Stream] = []
    over = asyncio.Event()

    def seen() -> str:
        where = f"nodes {nodes(server)}, fronts {server.pids(FRONTS)}, ranks {server.pids(RANKS)}"
        return f"{how_far(answered, asked)}\n{where}\n{everybody_says(server)}"

    async def keep_asking(http: httpx.AsyncClient) -> None:
        while not over.is_set() and all(each.done for each in answered):
            asked.append(Stream())
            answered.append(await ask(http, server, asked[-1], BURST_TOKENS))

    async with client(PATIENCE_S) as http:
        waits = r"^(autoscaling.min_replicas = 1, tensor_parallel = 1 take 3 CPUs where there are 0: waiting for nodes)"
        assert server.find(waits), "the first replica did not wait for a node"
        first = nodes(server)
        assert len(first) == len(server.pids(FRONTS)) == 1, seen()
        undisturbed = await ask(http, server, tokens=STREAM_TOKENS)
        assert tokens_of(undisturbed) == STREAM_TOKENS, undisturbed.error or undisturbed.broken
        assert nodes(server) == first, "one stream brought a node"

        burst = [asyncio.create_task(keep_asking(http)) for _ in range(BURST)]

        async def two_answer() -> set[str] | None:
            assert all(each.done for each in answered), seen()
            serving = await replicas(http, server)
            return serving if len(serving) == 2 and serving <= {each.replica for each in answered} else None

        both = await until(two_answer, PATIENCE_S, period_s=0.2, seen=seen)
        grown = nodes(server)
        assert len(grown) == 2, seen()
        assert first < grown, seen()
        assert sorted(map(raylet_of, server.pids(FRONTS))) == sorted(grown), seen()
        assert sorted(map(raylet_of, server.pids(RANKS))) == sorted(grown), seen()

        begun: dict[str, tuple[Stream, asyncio.Task[Stream]]] = {}

        async def one_at_each() -> bool:
            """Begin one more stream, and keep it if it is the first at its replica: so few ask for one replica."""
            new = Stream()
            task = asyncio.create_task(ask(http, server, new, STREAM_TOKENS))

            async def placed() -> bool:
                return new.begun or bool(new.broken)

            await until(placed, PATIENCE_S, seen=seen)
            assert not new.broken, f"{new.broken}\n{seen()}"
            if new.replica in begun:
                task.cancel()
            else:
                begun[new.replica] = new, task
            return begun.keys() == both

        await until(one_at_each, PATIENCE_S, period_s=0.5, seen=seen)
        results, long = map(list, zip(*begun.values(), strict=True))
        over.set()
        await asyncio.gather(*burst)

        async def one_ends() -> bool:
            return "Downscaling Deployment(" in logged(server, "serve/controller_*.log")

        await until(one_ends, PATIENCE_S, seen=seen)
        assert not any(each.done for each in results), "the streams had ended before a replica was to end"
        # Long after an idle node would have gone, that of the replica that is to end is there.
        while not any(task.done() for task in long):
            assert nodes(server) == grown, seen()
            await asyncio.sleep(0.5)
        await asyncio.gather(*long)

        async def one_is_left() -> bool:
            return len(await replicas(http, server)) == len(nodes(server)) == len(server.pids(FRONTS)) == 1

        await until(one_is_left, PATIENCE_S, period_s=0.2, seen=seen)
        assert nodes(server) == set(map(raylet_of, server.pids(FRONTS))), seen()
        later = [await ask(http, server) for _ in range(4)]
    assert [tokens_of(each) for each in results] == [STREAM_TOKENS] * len(results), seen()
    assert [tokens_of(each) for each in answered] == [BURST_TOKENS] * len(answered), seen()
    assert [tokens_of(each) for each in later] == [8] * len(later), seen()
    assert {each.text for each in results} == {undisturbed.text}
    (short,) = {each.text for each in answered}
    assert undisturbed.text.startswith(short.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert {each.replica for each in later} < both
    assert "The load asks for 2 replicas where there are to be 1" in logged(server, "serve/controller_*.log")


@pytest.mark.cluster
@pytest.mark.soak
def test_stopping_ends_every_node(server: Server) -> None:
    """Last in this module: the application is gone afterwards."""
    pids = server.pids()
    assert server.stop() == 0, "\n".join(server.lines)
    wait_gone(pids)
