"""The Ray Serve application: the engine deployment, and the router HAProxy asks in front of it."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from deploy.config import Ingress, ServeConfig
from deploy.replica import EngineReplica, replica_class
from deploy.router import LoadRouter, picker_class

ENGINE = "engine"
ROUTER = "router"
ONGOING_REQUESTS = 1 << 20
"""Serve's own limit, out of the way: the front counts sequences and answers 429 with Retry-After by itself."""


def running_ingress(config: ServeConfig) -> Ingress:
    """What this cluster's processes were started for; RuntimeError when the settings ask for something else."""
    if config.ingress == "direct" and not RAY_SERVE_ENABLE_HA_PROXY:
        raise RuntimeError(
            "ingress = direct, but Ray was started without RAY_SERVE_ENABLE_HA_PROXY=1: evaluate "
            '`eval "$(python -m deploy.environment)"` before `ray start` on every node, or set ingress to proxy'
        )
    if config.ingress == "proxy" and RAY_SERVE_ENABLE_HA_PROXY:
        raise RuntimeError("ingress = proxy, but Ray was started with RAY_SERVE_ENABLE_HA_PROXY=1; use auto or direct")
    return "direct" if RAY_SERVE_ENABLE_HA_PROXY else "proxy"


def gpus_per_rank(config: ServeConfig) -> float:
    """GPUs to reserve for each rank."""
    if config.gpus_per_rank is not None:
        return config.gpus_per_rank
    if config.engine.device == "auto":
        return 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0
    return 1.0 if config.engine.device == "cuda" else 0.0


def bundles(config: ServeConfig) -> list[dict[str, float]]:
    """Placement-group bundles of one replica: front and scheduler, then one a rank."""
    cpus, gpus = config.cpus_per_process, config.gpus_per_rank
    rank = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
    return [{"CPU": 2 * cpus}, *({**rank} for _ in range(config.engine.tensor_parallel))]


def shortage(config: ServeConfig) -> str:
    """What all replicas together need and the nodes of this Ray do not have; empty when they have it."""
    config = config.model_copy(update={"gpus_per_rank": gpus_per_rank(config)})
    there, short = ray.cluster_resources(), []
    for name in ("GPU", "CPU"):
        needed, found = config.replicas * sum(bundle.get(name, 0) for bundle in bundles(config)), there.get(name, 0)
        if needed > found:
            short.append(f"{needed:g} {name}s where there are {found:g}")
    if not short:
        return ""
    return f"replicas = {config.replicas}, tensor_parallel = {config.engine.tensor_parallel} take {', '.join(short)}"


def build_application(config: ServeConfig, engine_class: type = replica_class) -> serve.Application:
    """The application for `serve.run`."""
    config = config.model_copy(update={"gpus_per_rank": gpus_per_rank(config)})
    logging = LoggingConfig(encoding="JSON", log_level=config.log.level, enable_access_log=False)
    options: dict[str, Any] = {
        "num_replicas": config.replicas,
        "max_ongoing_requests": ONGOING_REQUESTS,
        "ray_actor_options": {"num_cpus": config.cpus_per_process},
        "placement_group_bundles": bundles(config),
        "placement_group_strategy": "PACK",
        "health_check_period_s": config.health.period_s,
        "health_check_timeout_s": config.health.timeout_s,
        "max_constructor_retry_count": config.health.start_attempts,
        "graceful_shutdown_timeout_s": config.drain.deregister_s + config.drain.timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "logging_config": logging,
        "request_router_config": RequestRouterConfig(
            request_router_class=LoadRouter,
            request_router_kwargs={"row_tokens": config.routing.row_tokens},
            request_routing_stats_period_s=config.routing.stats_period_s,
            request_routing_stats_timeout_s=max(5.0, 5 * config.routing.stats_period_s),
        ),
    }
    engine = serve.deployment(engine_class, name=ENGINE, **options).bind(config)
    if running_ingress(config) == "proxy":
        return engine
    router = serve.deployment(
        picker_class,
        name=ROUTER,
        max_ongoing_requests=ONGOING_REQUESTS,
        max_surge_percent=100,  # it takes no resources: the next one starts before the last one ends
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=config.drain.deregister_s + 5.0,
        health_check_period_s=config.health.period_s,
        logging_config=logging,
    )
    return engine._with_ingress_request_router(router.bind(engine, config))


__all__ = ["ENGINE", "ROUTER", "EngineReplica", "build_application", "bundles", "running_ingress", "shortage"]
