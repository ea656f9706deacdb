"""The OpenAPI description of bodies that FastAPI does not parse itself: its answers to bad ones have another shape."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from deploy.api.protocol import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeChatBody, TokenizeTextBody

_BODIES = (CompletionBody, ChatBody, TokenizeTextBody, TokenizeChatBody, DetokenizeBody)
_REF = "#/components/schemas/{model}"


def body_schema(*bodies: type[Body]) -> dict[str, Any]:
    """What a route takes: one of `bodies`."""
    refs = [{"$ref": _REF.format(model=body.__name__)} for body in bodies]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install_schemas(app: FastAPI) -> None:
    """Have /openapi.json define all bodies."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        description = plain()
        _, definitions = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_REF)
        description.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return description

    app.openapi = openapi  # type: ignore[method-assign]
