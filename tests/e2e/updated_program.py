"""The program of test_rolling_update and test_many_updates: an application that is deployed again, with a change on
SIGUSR1, with one replica fewer on SIGUSR2."""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from deploy.config.application import ServeConfig
from deploy.serve.app import APPLICATION, POLL_S, launch, tell


def main() -> None:
    """Do what `serve deploy` of a changed file does: Serve builds the application anew, in a task of its own, and a
    change among the `args` replaces every replica and the router. A number of replicas beside the `args` replaces
    none."""
    # HAProxy checks replicas every 5 s, and only once in a while in the moment that matters: here more often.
    os.environ["RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER"] = "1s"
    config = ServeConfig.load(sys.argv[1])
    arguments = json.loads(Path(sys.argv[1]).read_text())
    replicas = config.replicas
    ended, changed, fewer = threading.Event(), threading.Event(), threading.Event()
    events = {signal.SIGUSR1: changed, signal.SIGUSR2: fewer}

    def on_signal(number: int, frame: FrameType | None) -> None:
        events.get(signal.Signals(number), ended).set()

    for number in (signal.SIGINT, signal.SIGTERM, *events):
        signal.signal(number, on_signal)
    running = launch(config)
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    from deploy.serve.application import ENGINE

    tell(f"serving {config.model_name} at {running.url}/v1")
    while not ended.wait(POLL_S):
        for line in running.news():
            tell(line)
        if changed.is_set() or fewer.is_set():
            if changed.is_set():
                arguments["engine"]["max_rows"] += 1
            else:
                replicas -= 1
            changed.clear()
            fewer.clear()
            engines = {"name": ENGINE, "num_replicas": replicas}
            file = {"name": APPLICATION, "import_path": "deploy.serve.app:build", "args": arguments}
            file |= {"deployments": [engines]}
            _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [file]}))
            ended.wait(2.0)  # until Serve has begun
            while serve.status().applications[APPLICATION].status != "RUNNING" and not ended.wait(POLL_S):
                pass
            tell("updated")
    running.stop(tell)


if __name__ == "__main__":
    main()
