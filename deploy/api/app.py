"""The application of one replica's front: the endpoints, the page at `/` and its files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import kernels
from deploy.api.anthropic.routes import add_messages
from deploy.api.generation.generate import NOT_ENFORCED, Generator
from deploy.api.generation.resumable import ResumableStream
from deploy.api.http import errors
from deploy.api.http.body import ClientDisconnected, Intake
from deploy.api.http.middleware import IGNORED_TOOLS, AccessLayer, DeadlineLayer
from deploy.api.http.openapi import Endpoints
from deploy.api.job.defaults import SamplingDefaults
from deploy.api.job.model import ServedModel
from deploy.api.limits.admission import Admission
from deploy.api.limits.keyed_admission import KeyedAdmission
from deploy.api.limits.keys import KeyRing
from deploy.api.openai.routes import add_generation, add_models, add_tokenization
from deploy.api.responses.routes import add_responses
from deploy.api.status import add_status
from deploy.config.api import ApiConfig
from deploy.config.cache_salts import CacheSalts
from deploy.observability.front_metrics import FrontMetrics
from deploy.observability.live import OwnReplica, Replicas
from deploy.page import INDEX, PageFile, page_files
from deploy.text.handed import HandedPrompts
from deploy.text.lane import Lanes
from deploy.text.tokenizer import Tokenizer
from workers.protocol.front import Engine

if TYPE_CHECKING:
    from deploy.observability.tracing import Tracing

POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Content security policy. It allows nothing inline, nothing from other servers, no other site's frame: what a model
says can never run."""
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # Browsers keep the files and ask each time whether they are still these, so an update shows at once.
    "cache-control": "no-cache",
}
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
    sampling_defaults: SamplingDefaults | None = None,
    handed: HandedPrompts | None = None,
) -> FastAPI:
    """The OpenAI-compatible application in front of `engine`.

    Without a `tokenizer` only prompts of token ids work, and answers carry token ids. `metrics` takes the measurements;
    a `FrontMetrics` of its own by default. `numerics`: the engine's settings that decide how it rounds, for the
    `system_fingerprint` of answers. `replicas`: what `/live` shows; by default this one alone. `keys`: those of the
    settings, which somebody tells what other replicas let them take.
    `tracing`: where spans of requests go; without it there are none. `sampling_defaults`: how requests are sampled that
    do not say so, where that is not OpenAI's way. `handed`: where a router leaves prompts that it has encoded.
    `app.state.model` is the `ServedModel`.
    """
    config = config or ApiConfig()
    metrics = metrics or FrontMetrics()
    metrics.watch_engine(lambda: engine.stats)
    keys = keys if keys is not None else KeyRing(config.api_keys)
    if keys:
        admission: Admission = (keyed := KeyedAdmission(engine, config.retry_after_s, keys, metrics))
        endpoints = Endpoints(keyed.authorize, keyed.enter)
    else:
        admission, endpoints = Admission(engine, config.retry_after_s), Endpoints()
    model = ServedModel(engine, tokenizer, config, numerics or {}, sampling_defaults or {}, handed)
    intake, generator = (
        Intake(config),
        Generator(engine, tokenizer, metrics, admission, Lanes(), CacheSalts.of_settings(config), ResumableStream),
    )
    app = FastAPI(
        title="latentserve",
        version=kernels.__version__,
        redirect_slashes=False,
        # FastAPI's own spans and histograms would wrap every streamed token as soon as the process has a meter provider
        # (Ray sets one); `FrontMetrics` measures what matters here.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.model = model
    add_generation(endpoints, intake, model, generator)
    add_messages(endpoints, intake, model, generator)
    add_responses(endpoints, intake, model, generator)
    add_models(endpoints, model)
    add_tokenization(endpoints, intake, model)
    add_status(endpoints, engine, model, metrics, replicas or OwnReplica(engine))
    endpoints.install(app)
    if config.ui:
        add_page(app)
    errors.install(app)
    app.add_exception_handler(ClientDisconnected, _gone)
    app.add_middleware(DeadlineLayer)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=(
                *("x-request-id", "request-id", "retry-after", "traceresponse"),
                *(IGNORED_TOOLS.decode(), NOT_ENFORCED.decode(), *RATE_HEADERS),
            ),
        )
    if tracing is not None:
        from deploy.api.http.tracing import TracingLayer

        app.add_middleware(TracingLayer, tracing=tracing)
    app.add_middleware(AccessLayer, metrics=metrics)  # the outermost: the last one added
    return app


async def _gone(request: HttpRequest, error: Exception) -> Response:
    """Clients that leave while their body is read are no error."""
    request.scope.get("latentserve.log", {})["disconnected"] = True
    return Response(status_code=errors.GONE)


def add_page(app: FastAPI) -> None:
    """Routes `/` and `/page/{name}`; neither asks for an API key, as a browser that opens a page has none to give."""
    files = page_files()

    async def index(request: HttpRequest) -> Response:
        """The page."""
        return _answer(request, files[INDEX])

    async def asset(request: HttpRequest, name: str) -> Response:
        """A file of the page."""
        if name not in files or name == INDEX:
            raise errors.ApiError(404, f"the page has no file {name[:64]!r}", code="unknown_url")
        return _answer(request, files[name])

    for path, route in (("/", index), ("/page/{name}", asset)):
        app.add_api_route(path, route, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)


def _answer(request: HttpRequest, file: PageFile) -> Response:
    headers = {**HEADERS, "etag": file.etag}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.content_type, headers=headers)
