"""Settings of a whole application: every field with its unit and default. One replica's own are `workers.config`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from deploy.config.api import ApiConfig
from deploy.config.autoscaling import AutoscalingConfig
from workers.config import EngineConfig, Flag

Ingress = Literal["direct", "proxy"]

PLACE: Final = "Where it runs"
"""A heading in the help of commands."""


EVERYWHERE: Final = ("0.0.0.0", "::")
"""Hosts that stand for every interface."""
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
"""Hosts that nobody on other machines reaches."""


class RoutingConfig(BaseModel):
    """Choice of a replica. Costs are in prompt tokens still to be computed (`deploy.routing.policy`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    row_tokens: Annotated[float, Field(ge=0)] = 32.0
    """Cost of one running or waiting request for the next one, as prompt tokens."""
    stats_period_s: Annotated[float, Field(gt=0)] = 0.2
    """Time between two reports of a replica's load."""
    affinity_bytes: Annotated[int, Field(ge=16384)] = 512 * 1024
    """Bytes of a request's body that the router reads for prefix affinity; the rest of a longer one it estimates."""


class DrainConfig(BaseModel):
    """Times that an ending replica or proxy waits for what it still serves."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    deregister_s: Annotated[float, Field(ge=0)] = 2.0
    """Time for which an ending replica stays reachable, so that every proxy hears of it first."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest time that streams of an ending replica may still take. Those of other replicas go on."""


class HealthConfig(BaseModel):
    """Detection of failures that nobody reported, and the time in which a replica that failed leaves."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    period_s: Annotated[float, Field(gt=0)] = 0.5
    """Time between two health checks of a replica by the Serve controller, which finds a dead one by them."""
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Time until a health check without an answer counts as failed; three in a row replace the replica.

    A front that gives no sign of life for as long, and at least for a second, is ended; where the kernel says that it
    hangs, within some seconds (docs/operations.md)."""
    patience_s: Annotated[float, Field(ge=0)] = 60.0
    """Longest time that streams wait for an engine, or a front, after theirs died; then they end with an error.

    Scheduler and ranks are started again in place. Streams go on there, or before that at another replica, with the
    tokens that they would have had. 0: streams end at once, and the whole replica is replaced."""
    standby: Literal["none", "imported", "hot"] = "none"
    """Processes that stand by for scheduler and ranks. imported: one for each, which has imported its libraries.

    hot: they are a second engine, which is ready. Where an engine dies they take the places of its processes: imported
    saves the seconds that imports take, hot all of a start. Either reserves nothing of Ray's. Imported processes
    compute nothing, have no GPU memory, and take some 400 MB of host memory each. A hot engine shares weights and the
    memory of the cache with the one that serves; what else it takes of each GPU is left free for it, a start says how
    much, and so does `latentserve fit`. It needs `engine.keep_weights` and `patience_s`, ranks on one node
    with GPUs of their own, and no `engine.host_cache_bytes` (docs/operations.md)."""
    flush_s: Annotated[float, Field(ge=0)] = 0.25
    """Time between the error event on every stream of a failed replica and its exit."""
    start_attempts: Annotated[int, Field(ge=1)] = 3
    """Replicas in a row that may fail while starting before the application counts as failed."""


class LogConfig(BaseModel):
    """Structured logs: one JSON object per line."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least level of what is logged."""
    access: bool = False
    """Log one line for every HTTP request."""


class ServeConfig(BaseModel):
    """Settings in a file for `latentserve serve --config`, and in the `args` of a Serve config file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    engine: EngineConfig
    api: ApiConfig = ApiConfig()
    name: str | None = None
    """The model's own name, which clients ask for unless `api.served_model_names` is given. None: the folder's."""
    replicas: Annotated[int, Field(ge=1), Flag(panel=PLACE)] = 1
    """Engines behind the endpoint, each with `engine.tensor_parallel` ranks."""
    host: Annotated[str, Flag(panel=PLACE)] = "127.0.0.1"
    """Address or name to listen on; 0.0.0.0, or :: with IPv6, for every interface, which several nodes need."""
    port: Annotated[int, Field(ge=0, le=65535), Flag(panel=PLACE)] = 8000
    """Port to listen on; 0 takes a free one."""
    ingress: Annotated[Literal["auto", "direct", "proxy"], Flag(panel=PLACE)] = "auto"
    """direct: replicas answer themselves behind HAProxy. proxy: Serve's own. auto: direct where HAProxy is found.

    On a running cluster auto is direct where its processes were started for it."""
    proxies: Literal["every_node", "head"] = "every_node"
    """Nodes of a cluster that take requests: the head and all that run a replica, or the head alone.

    With every_node a load balancer belongs in front. Each node has a router of its own, which learns what the others
    sent from the replicas' next report."""
    ray_address: Annotated[str | None, Flag(metavar="auto|HOST:PORT", default="one of its own", panel=PLACE)] = None
    """Cluster to join.

    Where it is not given, the one that RAY_ADDRESS names is joined, if it names one."""
    ray_auth: Literal["token", "disabled"] = "token"
    """Whether Ray's own ports ask for a token; for the cluster that `serve` starts by itself."""
    object_store_bytes: Annotated[int, Field(ge=78643200)] = 128 * 1024 * 1024
    """Ray's shared memory on a cluster that `serve` starts by itself; requests and tokens never go through it."""
    dashboard: bool = True
    """Ray's dashboard, on the cluster that `serve` starts by itself."""
    cpus_per_process: Annotated[float, Field(ge=0.0001)] = 1.0
    """Cores reserved for each of a replica's front, scheduler and ranks. Ray knows no less than a ten-thousandth."""
    gpus_per_rank: Annotated[float, Field(ge=0, le=1)] | None = None
    """GPUs reserved for a rank. None: 1 where the engine runs on GPUs, else 0.

    Less lets replicas of one rank share a GPU, with `engine.cache_pages` given; a rank for which none is reserved runs
    on a CPU."""
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    routing: RoutingConfig = RoutingConfig()
    drain: DrainConfig = DrainConfig()
    health: HealthConfig = HealthConfig()
    log: LogConfig = LogConfig()
    metrics_period_s: Annotated[float, Field(gt=0)] = 1.0
    """Time between two reports of a replica's figures to Ray's metrics."""

    @model_validator(mode="after")
    def _ranks_have_gpus_of_their_own(self) -> Self:
        gpus, ranks = self.gpus_per_rank, self.engine.mesh().world.size
        if gpus is None or self.engine.device == "cpu":
            return self
        if gpus == 0 and self.engine.device == "cuda":
            raise ValueError(
                "gpus_per_rank = 0 reserves no GPU, but device = cuda: leave gpus_per_rank out, or set device to cpu"
            )
        if 0 < gpus <= 0.5 and ranks > 1:
            raise ValueError(
                f"gpus_per_rank = {gpus:g} puts ranks of one replica on the same GPU, and tensor_parallel = {ranks} "
                "needs one for each: leave gpus_per_rank out, or set tensor_parallel to 1"
            )
        return self

    @model_validator(mode="after")
    def _an_engine_can_stand_by(self) -> Self:
        if self.health.standby != "hot":
            return self
        if self.health.patience_s == 0:
            raise ValueError(
                "health.standby = hot, but with health.patience_s = 0 no engine takes the place of one that died: give "
                "a patience, or standby none"
            )
        if not self.engine.keep_weights:
            raise ValueError(
                "health.standby = hot shares the weights that serve, which engine.keep_weights = false does not keep: "
                "leave that out, or give standby none or imported"
            )
        if self.engine.host_cache_bytes:
            raise ValueError(
                f"health.standby = hot does not go with engine.host_cache_bytes = {self.engine.host_cache_bytes} yet: "
                "give 0, or standby none or imported"
            )
        if self.gpus_per_rank is not None and 0 < self.gpus_per_rank < 1:
            raise ValueError(
                f"health.standby = hot takes memory of each GPU, and gpus_per_rank = {self.gpus_per_rank:g} shares "
                "GPUs among replicas: leave gpus_per_rank out, or give standby none or imported"
            )
        return self

    @model_validator(mode="after")
    def _replicas_are_counted_once(self) -> Self:
        if self.autoscaling.max_replicas is not None and "replicas" in self.model_fields_set:
            raise ValueError(
                f"replicas = {self.replicas} fixes the number of replicas, and autoscaling.max_replicas = "
                f"{self.autoscaling.max_replicas} lets it follow the load: leave one of them out"
            )
        return self

    @property
    def least_replicas(self) -> int:
        """Fewest replicas that there are once all have started, and the number that a start brings up."""
        return self.replicas if self.autoscaling.max_replicas is None else self.autoscaling.min_replicas

    @property
    def most_replicas(self) -> int:
        """Most replicas that there may be, apart from those that are ending."""
        return self.autoscaling.max_replicas or self.replicas

    @property
    def model_name(self) -> str:
        """The model's own name."""
        return self.name or (self.engine.model if self.engine.model == "demo" else self.engine.folder.resolve().name)

    @property
    def keeps_weights(self) -> bool:
        """Whether weights stay for an engine that takes the place of one that died."""
        return self.engine.keep_weights and self.health.patience_s > 0

    def settled(self, *, gpus_there: bool) -> ServeConfig:
        """These settings with `gpus_per_rank` decided, by whether there are GPUs.

        Where none is reserved for a rank `device: auto` becomes the CPU: ranks decide by what they see, and one that
        Ray reserved no GPU for may see GPUs that it reserved for others, or that came later.
        """
        gpus, device = self.gpus_per_rank, self.engine.device
        if gpus is None:
            gpus = 1.0 if device == "cuda" or (device == "auto" and gpus_there) else 0.0
        engine = self.engine if gpus else self.engine.model_copy(update={"device": "cpu"})
        return self.model_copy(update={"gpus_per_rank": gpus, "engine": engine})

    @staticmethod
    def load(path: str | Path, **overrides: Any) -> ServeConfig:
        """Settings from a YAML file; `overrides` (None: not given) replace fields, dotted names reach inner ones."""
        data = yaml.safe_load(Path(path).read_text()) or {}
        return ServeConfig.model_validate(merged(data, overrides))


def merged(data: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`data` with the overrides that are not None; `{"engine.width": 2}` sets data["engine"]["width"]."""
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in data.items()}
    for name, value in overrides.items():
        if value is None:
            continue
        *path, leaf = name.split(".")
        target = result
        for part in path:
            target = target.setdefault(part, {})
        target[leaf] = value
    return result
