"""The program of test_rolling_update: an application that is deployed again, with a change, on SIGUSR1."""

import os
import signal
import sys
import threading
from types import FrameType

from deploy.config.application import ServeConfig
from deploy.serve.app import APPLICATION, POLL_S, build_app, launch, tell


def main() -> None:
    """What `serve deploy` of a changed file does: a change among the `args` replaces every replica and the router."""
    # HAProxy checks replicas every 5 s, and only once in a while in the moment that matters: here more often.
    os.environ["RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER"] = "1s"
    config = ServeConfig.load(sys.argv[1])
    ended, changed = threading.Event(), threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        (changed if number == signal.SIGUSR1 else ended).set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, on_signal)
    running = launch(config)
    from ray import serve
    from ray.serve.api import RunTarget

    tell(f"serving {config.model_name} at {running.url}/v1")
    while not ended.wait(POLL_S):
        for line in running.news():
            tell(line)
        if changed.is_set():
            changed.clear()
            config = config.model_copy(update={"metrics_period_s": config.metrics_period_s + 1})
            target = RunTarget(build_app(config), name=APPLICATION, route_prefix="/")
            serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=True)
            tell("updated")
    running.stop(tell)


if __name__ == "__main__":
    main()
