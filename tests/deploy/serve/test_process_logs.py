import io
import json
import logging

import pytest

from deploy.config.application import LogConfig
from deploy.observability import logs


@pytest.fixture
def stream():
    kept = {
        name: (logger.handlers[:], logger.level, logger.propagate)
        for name in (*logs.LOGGERS, "latentserve.access")
        if (logger := logging.getLogger(name))
    }
    yield io.StringIO()
    for name, (handlers, level, propagate) in kept.items():
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def lines(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_every_line_says_which_process_wrote_it(stream: io.StringIO) -> None:
    logs.configure(LogConfig(), stream, application="a", replica="r", process="rank 1")
    logging.getLogger("workers.rank.worker_process").warning("slow: %d", 3)
    logging.getLogger("latentserve.api").info("request", extra={logs.FIELDS: {"request_id": "x-1"}})
    first, second = lines(stream)
    assert first["message"] == "slow: 3"
    assert first["level"] == "warning"
    assert all(line["application"] == "a" and line["process"] == "rank 1" for line in (first, second))
    assert second["request_id"] == "x-1"


def test_levels_and_access_lines_are_settings(stream: io.StringIO) -> None:
    access = logging.getLogger("latentserve.access")
    logs.configure(LogConfig(), stream)
    access.info("request")
    logging.getLogger("deploy.x").debug("detail")
    assert not lines(stream)
    logs.configure(LogConfig(level="DEBUG", access=True), stream)
    access.info("request")
    logging.getLogger("deploy.x").debug("detail")
    assert [line["message"] for line in lines(stream)] == ["request", "detail"]


def test_configuring_twice_writes_once(stream: io.StringIO) -> None:
    for _ in range(2):
        logs.configure(LogConfig(), stream)
    logging.getLogger("latentserve.replica").error("once")
    assert len(lines(stream)) == 1
