"""Settings, and the environment they become."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from deploy.cluster.environment import SidePorts, node_environment, resolve_ingress
from deploy.config.application import ServeConfig, merged
from deploy.serve.application import bundles, replica_count


def config(**fields: object) -> ServeConfig:
    return ServeConfig.model_validate({"engine": {"model": "demo"}, **fields})


def test_flags_replace_fields_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("engine: {model: demo, width: 2}\nport: 9000\n")
    loaded = ServeConfig.load(file, **{"engine.width": 4, "port": None, "drain.timeout_s": 5})
    assert (loaded.engine.width, loaded.port, loaded.drain.timeout_s) == (4, 9000, 5)


def test_merging_leaves_the_original_alone() -> None:
    data = {"engine": {"model": "demo"}}
    assert merged(data, {"engine.width": 1}) == {"engine": {"model": "demo", "width": 1}}
    assert data == {"engine": {"model": "demo"}}


@pytest.mark.parametrize(
    "fields",
    [
        {"prot": 1},
        {"engine": {"model": "demo", "wide": 2}},
        {"port": 70000},
        {"ingress": "sideways"},
        {"replicas": 0},
        {"cpus_per_process": 0.00001},
        {"drain": {"timeout_s": 0}},
    ],
)
def test_wrong_settings_are_refused(fields: dict) -> None:
    with pytest.raises(ValidationError):
        config(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"autoscaling": {"min_replicas": 3, "max_replicas": 2}}, "max_replicas = 2 is less than .*min_replicas = 3"),
        ({"autoscaling": {"min_replicas": 2}}, "autoscaling.min_replicas is given, but without .*max_replicas"),
        ({"autoscaling": {"slots_used": 0.5}}, "autoscaling.slots_used is given"),
        ({"replicas": 2, "autoscaling": {"max_replicas": 4}}, "replicas = 2 fixes .*max_replicas = 4 .*leave one"),
        ({"autoscaling": {"max_replicas": 0}}, "greater than or equal to 1"),
        ({"autoscaling": {"max_replicas": 2, "slots_used": 1.5}}, "less than or equal to 1"),
    ],
)
def test_numbers_of_replicas_that_contradict_each_other_are_refused(fields: dict, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config(**fields)


def test_replicas_are_a_number_or_follow_the_load() -> None:
    fixed, following = config(replicas=3), config(autoscaling={"min_replicas": 2, "max_replicas": 5})
    assert (fixed.least_replicas, fixed.most_replicas) == (3, 3)
    assert (following.least_replicas, following.most_replicas) == (2, 5)
    assert (config().least_replicas, config().most_replicas) == (1, 1)
    assert replica_count(fixed) == {"num_replicas": 3}
    assert replica_count(following).keys() == {"autoscaling_config"}


def test_the_model_is_named_after_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "DeepSeek-V3"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert config().model_name == "demo"
    assert config(engine={"model": str(folder)}).model_name == "DeepSeek-V3"
    assert config(engine={"model": str(folder)}, name="mine").model_name == "mine"


def test_a_replica_gets_one_bundle_for_itself_and_one_a_rank() -> None:
    engine = {"model": "demo", "tensor_parallel": 2}
    assert bundles(config(engine=engine, gpus_per_rank=1)) == [{"CPU": 2}, {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}]
    assert bundles(config(engine=engine, gpus_per_rank=0)) == [{"CPU": 2}, {"CPU": 1}, {"CPU": 1}]


@pytest.mark.parametrize(
    ("device", "ranks", "gpus", "said"),
    [
        ("cuda", 1, 0, "gpus_per_rank = 0 reserves no GPU"),
        ("cuda", 2, 0.5, "on the same GPU, and tensor_parallel = 2 needs one for each"),
        ("auto", 3, 0.3, "on the same GPU"),
        ("cuda", 1, 2, "less than or equal to 1"),
        ("cuda", 1, 0.5, None),
        ("cuda", 2, 0.6, None),
        ("auto", 1, 0, None),
        ("cpu", 2, 0.5, None),
    ],
)
def test_ranks_that_would_share_a_gpu_are_refused(device: str, ranks: int, gpus: float, said: str | None) -> None:
    engine = {"model": "demo", "device": device, "tensor_parallel": ranks}
    if said is None:
        assert config(engine=engine, gpus_per_rank=gpus).gpus_per_rank == gpus
        return
    with pytest.raises(ValidationError, match=said):
        config(engine=engine, gpus_per_rank=gpus)


def test_drain_times_reach_ray(tmp_path: Path) -> None:
    settings = config(drain={"deregister_s": 3, "timeout_s": 77})
    found = node_environment(settings, "direct", tmp_path, SidePorts(1, 2, 3))
    assert found["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] == "3.0"
    # Streams of replicas that stay are in the process that a reload replaces, too.
    assert int(found["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) >= 24 * 3600
    assert 77 < float(found["RAY_SERVE_PORT_QUARANTINE_S"]) < 120
    ports = ("RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT")
    assert [found[name] for name in ports] == ["1", "2", "3"]


def test_every_variable_is_one_that_this_ray_reads(tmp_path: Path) -> None:
    """A name that Ray does not know would be ignored in silence."""
    import ray

    root = Path(ray.__file__).parent
    places = ["serve/_private/constants.py", "dashboard", "_private", "_common", "cluster_utils.py"]
    files = [
        f for place in places for f in ([root / place] if (root / place).is_file() else (root / place).rglob("*.py"))
    ]
    known = "\n".join(file.read_text(errors="replace") for file in files)
    native = (root / "_raylet.so").read_bytes()
    for name in node_environment(config(), "direct", tmp_path, SidePorts()):
        if name.startswith("RAY_"):
            assert name in known or name.removeprefix("RAY_").encode() in native, name


def test_the_proxy_is_taken_where_there_is_no_haproxy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_ingress(config()) == "direct"
    assert resolve_ingress(config(ingress="proxy")) == "proxy"
    monkeypatch.setattr("deploy.cluster.environment.find_binary", lambda: None)
    assert resolve_ingress(config()) == "proxy"
    with pytest.raises(RuntimeError, match="no HAProxy binary"):
        resolve_ingress(config(ingress="direct"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"health": {"patience_s": 0}}, "standby = hot, but with health.patience_s = 0 .*give a patience"),
        ({"engine": {"keep_weights": False}}, "standby = hot shares the weights .*keep_weights = false"),
        ({"engine": {"host_cache_bytes": 1 << 30}}, "hot does not go with engine.host_cache_bytes = 1073741824 yet"),
        ({"gpus_per_rank": 0.5}, "hot takes memory of each GPU, and gpus_per_rank = 0.5 shares GPUs"),
    ],
)
def test_what_an_engine_cannot_stand_by_with_is_refused(fields: dict, said: str) -> None:
    with_hot = merged(fields, {"engine.model": "demo", "health.standby": "hot"})
    with pytest.raises(ValidationError, match=said):
        ServeConfig.model_validate(with_hot)
    ServeConfig.model_validate(merged(with_hot, {"health.standby": "none"}))
