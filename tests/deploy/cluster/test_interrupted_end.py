"""An application that drains on a Ray that was joined: a second signal, and a Ray that somebody ends meanwhile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, RpcError
from ray.serve.exceptions import RayServeException

from deploy.config.application import ServeConfig
from deploy.serve import app


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch):
    """An application that serves, what it asks of Serve, and how Serve answers: each time with the next of them."""

    def begin(*answers: BaseException | None, own: bool = False) -> tuple[app.Running, list[str]]:
        asked: list[str] = []
        left = list(answers)

        def status() -> SimpleNamespace:
            assert "left" not in asked, "Ray Serve would join or start another Ray"
            asked.append("status")
            answer = left.pop(0) if left else None
            if answer is not None:
                raise answer
            return SimpleNamespace(applications=[app.APPLICATION])

        def delete(application: str, **options: object) -> None:
            assert "left" not in asked, "Ray Serve would join or start another Ray"
            asked.append(f"delete {application}")

        monkeypatch.setattr("ray.serve.status", status)
        monkeypatch.setattr("ray.serve.delete", delete)
        running = object.__new__(app.Running)
        running.config = ServeConfig.model_validate({"engine": {"model": "demo"}})
        running._connection = SimpleNamespace(own=own, close=lambda: asked.append("left"))
        running._to_delete = True
        return running, asked

    return begin


@pytest.mark.parametrize("own", [False, True])
def test_a_second_signal_asks_nothing_of_serve_once_we_have_left(serving, own: bool) -> None:
    running, asked = serving(None, KeyboardInterrupt(), own=own)
    lines: list[str] = []
    running.stop(lines.append)
    running.abandon(lines.append)  # a third one
    assert asked[:3] == [f"delete {app.APPLICATION}", "status", "status"]
    assert set(asked[3:]) == {"left"}
    [line] = lines
    assert ("and not them" in line) == (not own)


def test_a_second_signal_before_serve_has_heard_of_the_end_tells_it_once_more(serving) -> None:
    running, asked = serving(KeyboardInterrupt())
    running.stop()
    assert asked[:4] == [f"delete {app.APPLICATION}", "status"] * 2
    assert asked[4] == "left"


@pytest.mark.parametrize(
    "error",
    [ActorDiedError(), RpcError("failed to connect"), RayServeException("There is no Serve instance running.")],
)
@pytest.mark.parametrize("answered", [0, 1, 2])
def test_a_ray_that_somebody_ended_is_one_line(serving, error: Exception, answered: int) -> None:
    running, asked = serving(*[None] * answered, error)
    lines: list[str] = []
    running.stop(lines.append)
    assert asked[-1] == "left"
    draining, line = lines
    assert draining.startswith("draining")
    assert line.startswith("stopped; Ray Serve was ended by somebody else, so streams that still ran were broken off: ")
    assert "\n" not in line


def test_a_ray_that_ended_before_the_second_signal_is_one_line(serving) -> None:
    running, asked = serving(KeyboardInterrupt(), RayServeException("There is no Serve instance running."))
    lines: list[str] = []
    running.stop(lines.append)
    running.abandon(lines.append)
    assert "left" in asked
    assert [line.split(":")[0] for line in lines[1:]] == [
        "stopped; Ray Serve was ended by somebody else, so streams that still ran were broken off"
    ]
