"""Messages, and the end, while an application comes up that does not get there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import ray
from ray.exceptions import RayError
from ray.serve._private.client import ServeControllerClient

from deploy.config.application import ServeConfig
from deploy.serve import app
from deploy.serve.app import APPLICATION, StartFailed
from deploy.serve.entrance import Proxies
from workers.config import DEMO_MODEL
from workers.fit.settings import Unfit


class Pretended:
    """An application of which nobody reports anything."""

    def __init__(self, host: str = "127.0.0.1", waits_for: str = "", start_timeout_s: float = 60.0) -> None:
        engine = {"model": "demo", "start_timeout_s": start_timeout_s}
        self.config = ServeConfig.model_validate({"engine": engine, "host": host})
        self.url, self.waits_for = "http://10.0.0.1:8000", waits_for
        self.proxies = Proxies()
        self._reader = SimpleNamespace(new_lines=list)
        self._waiting = self._connection = SimpleNamespace(news=list)

    def news(self) -> list[str]:
        return app.Running.news(self)  # type: ignore[arg-type]

    def failures(self) -> list[str]:
        return []

    def lasting_failure(self) -> str:
        return ""


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch):
    """Says how Ray Serve counts the application, and what /health answers each time; None: nobody listens."""

    def state(status: str, deployment: str, *answers: int | None) -> None:
        left = list(answers)

        def get(url: str, **options: object) -> SimpleNamespace:
            if (code := left.pop(0) if len(left) > 1 else left[0]) is None:
                raise httpx.ConnectError("refused")
            return SimpleNamespace(status_code=code)

        found = SimpleNamespace(status=status, deployments={"engine": SimpleNamespace(status=deployment)}, message="")
        applications = {APPLICATION: found} if status else {}
        monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications=applications))
        monkeypatch.setattr(httpx, "get", get)
        monkeypatch.setattr(app, "POLL_S", 0.001)
        monkeypatch.setattr(app, "ANSWER_PATIENCE_S", 0.0)

    return state


@pytest.mark.parametrize(("host", "hint"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_replicas_that_serve_behind_an_entrance_that_does_not(serve, host: str, hint: bool) -> None:
    serve("RUNNING", "HEALTHY", 503, 503, 503, 200)
    lines: list[str] = []
    app._wait(Pretended(host), lines.append)
    [line] = lines  # once
    assert line.startswith("all replicas serve, but http://10.0.0.1:8000/health does not answer well: HTTP status 503")
    assert ("--host 0.0.0.0" in line) == hint


@pytest.mark.parametrize(
    ("state", "waits_for", "cause"),
    [
        (("DEPLOYING", "UPDATING"), "1 of 1 replicas wait for room", "1 of 1 replicas wait for room"),
        (("DEPLOYING", "UPDATING"), "", "replicas still start"),
        (("RUNNING", "HEALTHY", None), "", "no answer: refused"),
    ],
)
def test_when_time_is_over_the_error_says_what_was_missing(serve, state: tuple, waits_for: str, cause: str) -> None:
    serve(*state)
    with pytest.raises(StartFailed, match=f"not ready within 0 s: {cause}"):
        app._wait(Pretended(waits_for=waits_for, start_timeout_s=0.02), lambda line: None)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fills with the proxies that have come up or failed; `broken` fails."""
    found: list[str] = []

    def wait(refs: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        return [ref for ref in refs if ref in found], [ref for ref in refs if ref not in found]

    def get(ref: str) -> None:
        if ref == "broken":
            raise RayError("Traceback\n[ALERT] (1) : cannot bind socket\nsee above")

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    return found


def test_a_proxy_that_cannot_start_ends_the_start_as_soon_as_that_is_known(serve, there: list[str]) -> None:
    """Proxies come up beside the replicas, and say last why they do not."""
    serve("DEPLOYING", "UPDATING")
    application, lines = Pretended(), []
    application.proxies = Proxies(["slow", "well", "broken"])
    there.append("well")
    assert (application.news(), application.proxies.starting) == ([], True)
    there.append("broken")
    with pytest.raises(StartFailed, match=r"^Ray Serve does not start: \[ALERT\] \(1\) : cannot bind socket$"):
        app._wait(application, lines.append)
    assert lines == []  # the error says it


def test_proxies_that_still_start_when_the_application_answers_are_looked_at_later(serve, there: list[str]) -> None:
    serve("RUNNING", "HEALTHY", 200)
    application = Pretended()
    application.proxies = Proxies(["slow", "broken"])
    app._wait(application, lambda line: None)
    assert application.news() == []
    there += ["slow", "broken"]
    assert application.news() == ["a proxy of Ray Serve does not start: [ALERT] (1) : cannot bind socket"]
    assert (application.news(), application.proxies.starting) == ([], False)


def test_an_entrance_that_still_starts_is_not_blamed_for_its_silence(serve, there: list[str]) -> None:
    """Replicas may be there before it."""
    serve("RUNNING", "HEALTHY", None, None, None, 200)
    application, lines = Pretended(), []
    application.proxies = Proxies(["slow"])
    app._wait(application, lines.append)
    assert lines == []
    serve("RUNNING", "HEALTHY", None, None, None, 200)
    there.append("slow")
    app._wait(application, lines.append)
    assert len(lines) == 1


def test_proxies_that_serve_waits_for_in_vain_are_an_error_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**options: object) -> None:
        raise TimeoutError("HTTP proxies not available after 60s.")

    monkeypatch.setattr("ray.serve.start", start)
    with pytest.raises(StartFailed, match=r"^Ray Serve does not start: HTTP proxies not available after 60s\.$"):
        app._enter(Pretended(), beside=False)


@pytest.mark.parametrize("waits", [False, True])
def test_proxies_are_not_waited_for_by_whichever_client_hands_the_application_over(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Serve takes another client than that of the start when its controller was busy. A Serve that waits all the same,
    and gives up, is an error of the start."""
    asked: list[object] = []

    def run_many(*_: object, **options: object) -> None:
        client = ServeControllerClient.__new__(ServeControllerClient)
        client._shutdown, client._controller = False, SimpleNamespace()  # whoever asks it for proxies fails
        client.wait_for_proxies_serving(wait_for_applications_running=False)
        asked.append(client)
        if waits:
            raise TimeoutError("Proxies not available after 60s.")

    monkeypatch.setattr("ray.serve.run_many", run_many)
    monkeypatch.setattr("deploy.serve.progress.clear", lambda application: None)
    monkeypatch.setattr(app, "build_app", lambda *_: None)
    kept = ServeControllerClient.wait_for_proxies_serving
    if waits:
        with pytest.raises(StartFailed, match=r"^Ray Serve does not start: Proxies not available after 60s\.$"):
            app._deploy(Pretended(), None)
    else:
        app._deploy(Pretended(), None)
    assert len(asked) == 1
    assert ServeControllerClient.wait_for_proxies_serving is kept


def test_an_application_that_somebody_deletes(serve) -> None:
    serve("", "")
    with pytest.raises(StartFailed, match="somebody else deleted"):
        app._wait(Pretended(), lambda line: None)


@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        ({}, {"tensor_parallel": 3}, "values that work: 1, 2, 4"),
        ({}, {"max_context": 10**6}, "or less"),
        ({"model_type": "llama"}, {}, "model_type = 'llama' is not supported; supported: '"),
        ({"quantization_config": {"quant_method": "awq"}}, {}, "docs/models.md"),
    ],
)
def test_nothing_is_started_for_a_model_that_cannot_be_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict, settings: dict, said: str
) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    monkeypatch.setattr(app, "RayConnection", lambda *_: pytest.fail("Ray was started"))
    monkeypatch.setattr(app, "build_app", lambda *_: pytest.fail("an application was built"))
    arguments = {"engine": {"model": str(tmp_path), **settings}, "port": 0}
    with pytest.raises(Unfit, match=re.escape(said)):
        app.launch(ServeConfig.model_validate(arguments), lambda line: None)
    with pytest.raises(Unfit, match=re.escape(said)):
        app.build(arguments)


@pytest.mark.parametrize(("address", "gpus"), [("local", 0), ("local", 1), ("10.0.0.1:6379", 0)])
def test_a_cache_that_needs_gpus_is_refused_where_a_ray_of_our_own_would_have_none(
    monkeypatch: pytest.MonkeyPatch, address: str, gpus: int
) -> None:
    class Started(Exception):
        pass

    def start(*_: object) -> None:
        raise Started

    monkeypatch.setattr(app, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(app, "RayConnection", start)
    arguments = {"engine": {"model": "demo", "kv_cache_dtype": "bf16"}, "port": 0, "ray_address": address}
    refused = address == "local" and gpus == 0
    with pytest.raises(Unfit if refused else Started, match="--kv-cache-dtype" if refused else None):
        app.launch(ServeConfig.model_validate(arguments), lambda line: None)


def test_mistakes_in_the_args_of_a_serve_config_file_are_said_plainly() -> None:
    with pytest.raises(ValueError, match=r"unknown setting engin in args, did you mean engine\?$") as error:
        app.build({"engin": {"model": "demo"}})
    assert "ServeConfig" not in str(error.value)
