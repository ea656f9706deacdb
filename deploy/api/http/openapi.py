"""The OpenAPI description of the API. FastAPI parses no bodies and writes no answers here, so it knows neither."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deploy.api.openai.answers import Answer, ErrorAnswer
from deploy.api.other_answers import MessageError

_REF = "#/components/schemas/{model}"
ERRORS = {
    400: "The request asks for what cannot be, or is no JSON object.",
    401: "An API key is needed.",
    404: "There is no such model, or no such thing.",
    408: "The request took longer than it was given, or did not arrive in time.",
    413: "The body is larger than it may be.",
    415: "The body is not said to be JSON, or is compressed.",
    429: "Too many sequences wait already, or a limit of the API key is used up; Retry-After says when to come back.",
    500: "A defect of the server.",
    503: "The engine starts or is down, or large requests take all the memory; the message has the cause.",
}
"""What an error status means."""
GENERATING, BODY, PLAIN = tuple(ERRORS), (400, 401, 404, 408, 413, 415, 500, 503), (400, 401, 404, 408, 500, 503)
"""The statuses of endpoints that generate, of others with a body, and of those without one."""
SECURITY = "api_key"


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}


def _one_of(models: tuple[type[BaseModel], ...]) -> dict[str, Any]:
    return _ref(models[0]) if len(models) == 1 else {"anyOf": [_ref(model) for model in models]}


class Description:
    """What the routes of an application take and give. It collects their bodies and answers as the routes are added,
    and has /openapi.json define them."""

    def __init__(self) -> None:
        self._bodies: list[type[BaseModel]] = []
        self._answers: list[type[BaseModel]] = [ErrorAnswer, MessageError]

    def operation(
        self,
        bodies: tuple[type[BaseModel], ...],
        answer: type[BaseModel] | None,
        event: type[Answer] | None,
        errors: tuple[int, ...],
        guarded: bool,
        error: type[BaseModel] = ErrorAnswer,
    ) -> dict[str, Any]:
        """What a route takes (one of `bodies`, or nothing) and gives: `answer` as JSON (None: plain text), with `event`
        also a stream of server-sent events, or an error as `error` has it. `guarded`: it asks for the API key."""
        self._bodies += bodies
        self._answers += [kind for kind in (answer, event) if kind is not None]
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
        if answer is not None:
            content = {"application/json": {"schema": _ref(answer)}}
        if event is not None:
            name = event.__name__
            failure = f"{name} of type error" if event.own_failure else error.__name__
            last = "" if event.own_ending else ", then `data: [DONE]`"
            what = f"Events `data: ` with a {name} each{last}; a {failure} ends a stream that failed."
            content["text/event-stream"] = {
                "schema": {"type": "string", "description": what, "x-event-schema": _ref(event)}
            }
        envelope = {"application/json": {"schema": _ref(error)}}
        responses: dict[str, Any] = {"200": {"description": "It worked.", "content": content}}
        for status in errors:
            responses[str(status)] = {"description": ERRORS[status], "content": envelope}
        described: dict[str, Any] = {"responses": responses}
        if bodies:
            described["requestBody"] = {"required": True, "content": {"application/json": {"schema": _one_of(bodies)}}}
        if guarded:
            described["security"] = [{SECURITY: []}]
        return described

    def install(self, app: FastAPI) -> None:
        """Have /openapi.json define all bodies and answers of the routes."""
        plain = app.openapi

        def openapi() -> dict[str, Any]:
            description = plain()
            for operations in description["paths"].values():
                for described in operations.values():
                    described["responses"].pop("422", None)  # FastAPI's own answer to bad parameters: here it is 400
            _, bodies = models_json_schema([(body, "validation") for body in self._bodies], ref_template=_REF)
            _, answers = models_json_schema([(answer, "serialization") for answer in self._answers], ref_template=_REF)
            components = description.setdefault("components", {})
            components["schemas"] = bodies["$defs"] | answers["$defs"]
            components["securitySchemes"] = {SECURITY: {"type": "http", "scheme": "bearer"}}
            return description

        app.openapi = openapi  # type: ignore[method-assign]
