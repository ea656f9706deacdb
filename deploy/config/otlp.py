"""The collector that spans of requests are sent to."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from urllib.parse import urlsplit

VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


def endpoint_problem(endpoint: str) -> str:
    """Return why spans cannot be sent to `endpoint`; "" if they can."""
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        return f"{endpoint!r} is not the URL of a collector, such as http://127.0.0.1:4318"
    if not _exporter_installed():
        return "spans need OpenTelemetry's packages: pip install 'latentserve[tracing]' on every node"
    return ""


def endpoint_of(environment: Mapping[str, str]) -> str | None:
    """Return the endpoint that OpenTelemetry's own variables give; None if they switch spans off or give none."""
    off = (
        environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none"
    )
    return None if off else environment.get(VARIABLE) or None


def _exporter_installed() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False
