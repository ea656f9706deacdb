"""Serves the page at `/` and its files."""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from deploy.api.http.errors import ApiError
from deploy.page import INDEX, PageFile, page_files

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
"""Nothing inline, nothing of other servers, no other site's frame: what a model says can never run."""
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # Browsers keep the files and ask each time whether they are still these, so an update shows at once.
    "cache-control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Routes `/` and `/page/{name}`; neither asks for an API key, as a browser that opens a page has none to give."""
    files = page_files()

    async def index(request: HttpRequest) -> Response:
        """The page."""
        return _answer(request, files[INDEX])

    async def asset(request: HttpRequest, name: str) -> Response:
        """A file of the page."""
        if name not in files or name == INDEX:
            raise ApiError(404, f"the page has no file {name[:64]!r}", code="unknown_url")
        return _answer(request, files[name])

    for path, route in (("/", index), ("/page/{name}", asset)):
        app.add_api_route(path, route, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)


def _answer(request: HttpRequest, file: PageFile) -> Response:
    headers = {**HEADERS, "etag": file.etag}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.content_type, headers=headers)
