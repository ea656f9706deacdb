"""The application of one replica's front."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import kernels
from deploy.api.http import errors
from deploy.api.http.deadline import DeadlineLayer
from deploy.api.http.middleware import AccessLayer
from deploy.api.http.openapi import Description
from deploy.api.limits.front import Front
from deploy.api.limits.keys import KeyRing
from deploy.api.openai.routes import build_router, install_gone
from deploy.api.page import add_page
from deploy.api.status import Live
from deploy.config.api import ApiConfig
from deploy.observability.front_metrics import FrontMetrics
from deploy.observability.live import OwnReplica, Replicas
from deploy.text.tokenizer import Tokenizer
from workers.protocol.front import Engine

if TYPE_CHECKING:
    from deploy.observability.tracing import Tracing

RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")
)


def create_app(
    engine: Engine,
    tokenizer: Tokenizer | None,
    config: ApiConfig | None = None,
    metrics: FrontMetrics | None = None,
    numerics: Mapping[str, object] | None = None,
    replicas: Replicas | None = None,
    keys: KeyRing | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The OpenAI-compatible application in front of `engine`.

    Without a `tokenizer` only prompts of token ids work, and answers carry token ids. `metrics` takes the measurements;
    a `FrontMetrics` of its own by default. `numerics`: the engine's settings that decide how it rounds, for the
    `system_fingerprint` of answers. `replicas`: what `/live` shows; by default this one alone. `keys`: those of the
    settings, which somebody tells what other replicas let them take.
    `tracing`: where spans of requests go; without it there are none.
    `app.state.front` is the `Front`.
    """
    config = config or ApiConfig()
    metrics = metrics or FrontMetrics()
    metrics.watch_engine(lambda: engine.stats)
    front = Front(engine, tokenizer, config, metrics, numerics or {}, keys)
    app = FastAPI(
        title="latentserve",
        version=kernels.__version__,
        redirect_slashes=False,
        # FastAPI's own spans and histograms would wrap every streamed token as soon as the process has a meter provider
        # (Ray sets one); `FrontMetrics` measures what matters here.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.front = front
    description = Description()
    app.include_router(build_router(front, Live(front, replicas or OwnReplica(engine)), description))
    if config.ui:
        add_page(app)
    errors.install(app)
    install_gone(app)
    description.install(app)
    app.add_middleware(DeadlineLayer)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after", "traceresponse", *RATE_HEADERS),
        )
    if tracing is not None:
        from deploy.api.http.tracing import TracingLayer

        app.add_middleware(TracingLayer, tracing=tracing)
    app.add_middleware(AccessLayer, metrics=metrics)  # the outermost: the last one added
    return app
