"""The Ray Serve application: the engine deployment, and the router HAProxy asks in front of it.

Written for Ray 2.60.0, where whether HAProxy stands in front, and the router that it asks, are private. Without them a
line is logged; the environment then tells of the one, and HAProxy does without the other.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Final

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from deploy.config.application import Ingress, ServeConfig
from deploy.config.otlp import VARIABLE, endpoint_of, endpoint_problem
from deploy.routing.router import ASKED_BY_HAPROXY, LoadRouter, ingress_router_class
from deploy.serve import autoscaling
from deploy.serve.replica import replica_class
from kernels.private_api import PrivateApi
from workers.environment import EnvironmentProblem

_HA_PROXY: Final = PrivateApi(
    "ray",
    ("ray.serve._private.constants.RAY_SERVE_ENABLE_HA_PROXY",),
    "whether HAProxy stands in front is taken from this process's environment",
)

log = logging.getLogger("latentserve.application")

ENGINE = "engine"
ROUTER = "router"
ONGOING_REQUESTS = 1 << 20
"""Serve's own limit, out of the way: the front counts sequences and answers 429 with Retry-After by itself."""


def running_ingress(config: ServeConfig) -> Ingress:
    """Return the ingress that this cluster's processes were started for; EnvironmentProblem if the settings ask for
    another."""
    direct = _has_ha_proxy()
    if config.ingress == "direct" and not direct:
        raise EnvironmentProblem(
            "ingress = direct, but Ray was started without RAY_SERVE_ENABLE_HA_PROXY=1: evaluate "
            '`eval "$(python -m deploy.cluster.environment)"` before `ray start` on every node, or set ingress to proxy'
        )
    if config.ingress == "proxy" and direct:
        raise EnvironmentProblem(
            "ingress = proxy, but Ray was started with RAY_SERVE_ENABLE_HA_PROXY=1; use auto or direct"
        )
    return "direct" if direct else "proxy"


def _has_ha_proxy() -> bool:
    if not _HA_PROXY.there():
        return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
    from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY

    return bool(RAY_SERVE_ENABLE_HA_PROXY)


def settled(config: ServeConfig) -> ServeConfig:
    """`config` with `gpus_per_rank` decided for the nodes of this Ray (`ServeConfig.settled`); EnvironmentProblem where
    it cannot be yet."""
    asks = config.gpus_per_rank is None and config.engine.device == "auto"
    return config.settled(gpus_there=asks and _has_gpus())


def _has_gpus() -> bool:
    there = ray.cluster_resources()
    if not there.get("GPU") and not there.get("CPU"):
        raise EnvironmentProblem(
            "device = auto, but this cluster has no node yet that ranks could run on, so nobody knows whether they get "
            "GPUs; set device to cuda or cpu"
        )
    return bool(there.get("GPU"))


def with_collector(config: ServeConfig, environment: Mapping[str, str]) -> ServeConfig:
    """`config` with the collector for spans that OpenTelemetry's own variables name, where it names none itself. A line
    is logged where spans cannot be sent there: those variables may be meant for others."""
    endpoint = endpoint_of(environment)
    if config.api.otlp_endpoint is not None or endpoint is None:
        return config
    if problem := endpoint_problem(endpoint):
        log.warning("no spans, though %s is set: %s", VARIABLE, problem)
        return config
    return config.model_copy(update={"api": config.api.model_copy(update={"otlp_endpoint": endpoint})})


def bundles(config: ServeConfig) -> list[dict[str, float]]:
    """Placement-group bundles of one replica of `settled` settings: front and scheduler, then one per rank."""
    cpus, gpus = config.cpus_per_process, config.gpus_per_rank
    rank = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
    return [{"CPU": 2 * cpus}, *({**rank} for _ in range(config.engine.mesh().world.size))]


def replica_count(config: ServeConfig) -> dict[str, Any]:
    """Options of the engine deployment that say how many replicas there are."""
    if config.autoscaling.max_replicas is None:
        return {"num_replicas": config.replicas}
    return autoscaling.serve_options(config.autoscaling)


def build_application(config: ServeConfig, engine_class: type = replica_class) -> serve.Application:
    """The application for `serve.run`."""
    config = with_collector(settled(config), os.environ)
    serve_logging = LoggingConfig(encoding="JSON", log_level=config.log.level, enable_access_log=False)
    options: dict[str, Any] = {
        **replica_count(config),
        "max_ongoing_requests": ONGOING_REQUESTS,
        "ray_actor_options": {"num_cpus": config.cpus_per_process},
        "placement_group_bundles": bundles(config),
        "placement_group_strategy": "PACK",
        "health_check_period_s": config.health.period_s,
        "health_check_timeout_s": config.health.timeout_s,
        "max_constructor_retry_count": config.health.start_attempts,
        "graceful_shutdown_timeout_s": config.drain.deregister_s + config.drain.timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "logging_config": serve_logging,
        "request_router_config": RequestRouterConfig(
            request_router_class=LoadRouter,
            request_router_kwargs={"row_tokens": config.routing.row_tokens},
            request_routing_stats_period_s=config.routing.stats_period_s,
            request_routing_stats_timeout_s=max(5.0, 5 * config.routing.stats_period_s),
        ),
    }
    direct = running_ingress(config) == "direct"
    routed = direct and ASKED_BY_HAPROXY.there()
    if direct and not routed:
        del options["request_router_config"]  # Serve refuses one that HAProxy would never ask
    engine = serve.deployment(engine_class, name=ENGINE, **options).bind(config)
    if not routed:
        return engine
    router = serve.deployment(
        ingress_router_class,
        name=ROUTER,
        max_ongoing_requests=ONGOING_REQUESTS,
        max_surge_percent=100,  # it takes no resources: the next one starts before the last one ends
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=config.drain.deregister_s + 5.0,
        health_check_period_s=config.health.period_s,
        logging_config=serve_logging,
    )
    return engine._with_ingress_request_router(router.bind(engine, config))
