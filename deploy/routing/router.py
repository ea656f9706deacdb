"""The choice of the replica that serves a request: the policy Ray Serve asks (`LoadRouter`), and the deployment HAProxy
asks (`IngressRouter`).

All arithmetic is in `deploy.routing.policy`.

Written for Ray 2.60.0, where what HAProxy asks is private. Without it a line is logged, and HAProxy shares requests
among replicas by itself.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import time
import uuid
from dataclasses import replace
from typing import Any, Final

import msgspec
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.types import Receive, Scope, Send

from deploy.cluster.haproxy import key_header
from deploy.cluster.replica_ports import listen_at_home
from deploy.config.application import ServeConfig
from deploy.config.cache_salts import CacheSalts
from deploy.routing.arrivals import ROUTING_HEADER, RoutingRecord, load_from_report
from deploy.routing.policy import FORGET_S, InFlightAccounting, Load, RequestFeatures, choose
from deploy.routing.request_features import BYTES_PER_TOKEN, FeatureReader
from deploy.text.handed import EncodedPrompt
from deploy.text.tokenizer import Tokenizer
from kernels.private_api import PrivateApi

ASKED_BY_HAPROXY: Final = PrivateApi(
    "ray",
    (
        "ray.serve.Application._with_ingress_request_router",
        "ray.serve.handle.DeploymentHandle._init",
        "ray.serve.handle.DeploymentHandle.choose_replica",
        "ray.serve._private.request_router.replica_wrapper.ReplicaSelection(_replica)",
        "ray.serve.request_router.ReplicaID.to_full_id_str",
    ),
    "HAProxy shares requests among replicas without a look at their load, nor at whose pages hold a prompt's beginning",
)
"""Private API that an `IngressRouter` needs, and that which attaches it."""

PICK_TIMEOUT_S = 0.5
"""Seconds to wait for a replica where there is none; HAProxy would wait longer, and the client with it."""


HAND_OVER_TIMEOUT_S = 0.25
"""Seconds that a request waits at most for its prompt to be at its replica before it; it could be encoded again in as
much."""
TAKE_PROMPT = "take_prompt"
"""The replica's method to which prompts are handed, with the replica's id as `to`."""

logger = logging.getLogger("latentserve.router")


class LoadRouter(RequestRouter):  # type: ignore[misc]  # Ray ships no types
    """Ranks replicas by `deploy.routing.policy`. Runs where requests are handed out: a `IngressRouter`, or Serve's
    proxy."""

    def initialize_state(self, row_tokens: float) -> None:
        """Prepare the router's state. Serve calls this with the `request_router_kwargs`."""
        self.accounting: InFlightAccounting[ReplicaID] = InFlightAccounting(uuid.uuid4().hex[:12], row_tokens)
        self._reports: dict[ReplicaID, tuple[dict[str, Any], Load]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Choose one replica per rank: within a rank Serve would go by its own count of requests."""
        features = _features_of(pending_request)
        now = time.monotonic()
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        to = None if pending_request is None else pending_request.kwargs.get("to")
        if to is not None:  # no request of its own, but what belongs to one that was sent there
            return [[replicas[to]]] if to in replicas else [[replica] for replica in candidate_replicas]
        self.accounting.keep(list(replicas))
        self._reports = {key: value for key, value in self._reports.items() if key in replicas}
        loads = {key: self._load(key, replica.routing_stats or {}, now) for key, replica in replicas.items()}
        order = choose(self.accounting, loads, features, now)
        if order and pending_request is not None:
            # What was sent counts at once: a burst arrives faster than any report.
            number, tokens = self.accounting.record(order[0], loads[order[0]], features, now)
            receipt = pending_request.kwargs.get("receipt")
            if isinstance(receipt, dict):
                receipt["routing_record"] = RoutingRecord(
                    self.accounting.router, number, tokens, features.rows
                ).header()
        return [[replicas[key]] for key in order]

    def _load(self, key: ReplicaID, report: dict[str, Any], now: float) -> Load:
        known = self._reports.get(key)
        if known is None or known[0] is not report:
            load = load_from_report(report)
            # By this process's own clock, which never jumps. A replica's may, and be another node's: a report counts as
            # no older than what was sent is remembered.
            age = min(max(time.time() - load.at, 0.0), FORGET_S)
            known = self._reports[key] = (report, replace(load, at=now - age))
        return known[1]


def _features_of(pending: PendingRequest | None) -> RequestFeatures:
    """The `features` a `IngressRouter` gives; behind Serve's proxy only the length of the body is known."""
    if pending is None:
        return RequestFeatures(0)
    features = pending.kwargs.get("features")
    if isinstance(features, RequestFeatures):
        return features
    for argument in pending.args:
        scope = getattr(argument, "asgi_scope", None)
        for name, value in (scope or {}).get("headers", ()):
            if bytes(name).lower() == b"content-length" and (length := _length(bytes(value))) is not None:
                return RequestFeatures(length // BYTES_PER_TOKEN)
    return RequestFeatures(0)


class IngressRouter:
    """The deployment HAProxy asks for every POST: `/internal/route` names the replica that gets it."""

    def __init__(self, engine: DeploymentHandle, config: ServeConfig) -> None:
        listen_at_home()
        tokenizer = Tokenizer.load(config.engine.folder)
        self._salts = CacheSalts.of_settings(config.api)
        self._reader = FeatureReader(
            tokenizer, config.api.chat_template, config.api.control_tokens_in_text, self._salts
        )
        self._key_header = key_header().encode()
        self._engine = engine
        self._engine._init()
        self._prompts = engine.options(method_name=TAKE_PROMPT)
        self._handing = True
        # As in a replica: the collector need not look again and again through what stays.
        gc.collect()
        gc.freeze()

    def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI application that Serve mounts."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await _live(receive, send)
            elif scope["type"] == "http":
                await self._answer(scope, receive, send)

        return app

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/internal/route" or scope["method"] != "POST":
            await _reply(send, 404, b"{}")
            return
        body = await _body(receive)
        key = self._salts.name_of(_header(scope, self._key_header))
        features, prompt = await self._reader.read_prompt(body, _full_length(scope), key)
        receipt: dict[str, str] = {}
        picking = self._engine.choose_replica(features=features, receipt=receipt, _reserve=False)
        try:
            async with asyncio.timeout(PICK_TIMEOUT_S), picking as selection:
                replica = selection._replica.replica_id
        except (TimeoutError, DeploymentUnavailableError):
            await _reply(send, 503, b"{}")  # HAProxy has its own words for this
            return
        header = receipt.get("routing_record", "")
        if prompt is not None and (record := RoutingRecord.parse(header)) is not None:
            await self._hand_over(prompt, record.ticket, replica)
        payload = {"replica_id": replica.to_full_id_str(), "request_headers": {ROUTING_HEADER: header}}
        await _reply(send, 200, msgspec.json.encode(payload))

    async def _hand_over(self, prompt: EncodedPrompt, ticket: str, replica: ReplicaID) -> None:
        """Have the prompt at its replica before its request. Where that fails the replica encodes it again."""
        try:
            async with asyncio.timeout(HAND_OVER_TIMEOUT_S):
                await self._prompts.remote(ticket, prompt.digest, prompt.packed, to=replica)
        except Exception as error:  # of Serve, of Ray, of a replica of an earlier version
            if self._handing:
                self._handing = False
                logger.warning("a prompt was not handed to its replica, which encodes it again: %r", error)


def _full_length(scope: Scope) -> int | None:
    """Return the full length of a body that HAProxy cut, from its header `sent/whole`."""
    return _length(_header(scope, b"x-body-truncated").partition("/")[2].encode("latin-1"))


def _header(scope: Scope, wanted: bytes) -> str:
    """Return the header of this name; empty where there is none."""
    return next((bytes(value).decode("latin-1") for name, value in scope["headers"] if name == wanted), "")


def _length(value: bytes) -> int | None:
    """Bytes of a body, as a header says; None where it does not, or names more than there can be."""
    return int(value) if re.fullmatch(rb"[0-9]{1,12}", value) else None


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _live(receive: Receive, send: Send) -> None:
    """Answer the server's start and stop, at which there is nothing to do."""
    for stage in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{stage}.complete"})


async def _reply(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


ingress_router_class = serve.ingress()(IngressRouter)
"""`IngressRouter` as Serve deploys it."""
