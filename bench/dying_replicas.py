"""Streams of all APIs under kills: what their clients have, compared with what they have when nobody dies.

    python bench/dying_replicas.py --answers 300 --kills 12
    python bench/dying_replicas.py --answers 500 --kills 10 --parts 20 --json kills.json     # and again, to go on

Two replicas of the demo model run on this machine's CPU without Ray: each has a front, a scheduler and a rank, and the
two find each other as they do under Ray Serve. Clients ask for streams and whole answers of four APIs, with seeds, one
after the other. Meanwhile a front, a scheduler or a rank is ended by SIGKILL, as soon as both replicas serve. Prints
how many answers were lost, were different, or had tokens twice, and the longest gap between two pieces of the streams
that ran when something died. A client whose connection ends before a byte of the answer came asks the other replica, as
HAProxy does. Exits with 1 if an answer is not what it should be. With `--together N` each Nth time that a front is to
die both die, and their answers wait for the one that comes first.

With `--parts` that is done so many times, with fresh replicas and another seed each time. `--json` keeps what every
part found. Who starts the program again with the same file goes on with the parts that are missing there, so a long
run may be broken off at any time; what is printed in the end is of all parts in the file. Of each stream that stood
still for more than a second while something died it prints, and keeps, what happened meanwhile: what was killed, and
what the replicas said of it, with the seconds since the stream stood still.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

NAMES = ("first", "second")
START_S = 300.0
LOSSES_S = 65.0
ANSWER_S = 180.0
PATIENCE_S = 120.0
LONG_S = 1.0
"""Gap of a stream of which is kept what happened in it."""


def replica(name: str, folder: Path) -> None:
    """Be a replica until the end of the process."""
    import uvicorn

    from deploy.api.app import create_app
    from deploy.api.http.errors import FAILURES, engine_down
    from deploy.config.application import ServeConfig
    from deploy.routing.arrivals import Arrivals
    from deploy.serve import neighbor_store, progress
    from deploy.serve.front_silence import BEAT_S
    from deploy.serve.heir import Heir
    from deploy.serve.journals import Journals
    from deploy.serve.neighbor_store import NeighborStore, Place
    from deploy.serve.stream_watchdog import StreamWatchdog
    from deploy.serve.under_serve import UnderServe
    from deploy.text.tokenizer import Tokenizer
    from workers.memory.keeper import WeightKeeper
    from workers.processes.client import EngineClient
    from workers.processes.failover import FailoverEngine
    from workers.processes.launch import LocalReplica

    def store(verb: str, key: bytes, value: bytes = b"", **options: Any) -> Any:
        """Files in place of Ray's store."""
        file = folder / key.hex()
        if verb == "list":
            return [bytes.fromhex(one.name) for one in folder.iterdir() if one.name.startswith(key.hex())]
        if verb == "get":
            return file.read_bytes() if file.exists() else None
        if verb == "del":
            return file.unlink(missing_ok=True)
        fresh = file.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(value)
        return fresh.replace(file)

    progress.store = neighbor_store.store = store
    engine_settings = {
        "model": "demo", "device": "cpu", "max_rows": 16, "token_budget": 128, "invariant": True, "selftest": False,
    }  # fmt: skip
    config = ServeConfig.model_validate({"engine": engine_settings, "replicas": 2})
    telling = logging.FileHandler(folder / f"{name}.log")
    telling.addFilter(lambda record: bool(setattr(record, "now", time.monotonic())) or True)
    telling.setFormatter(logging.Formatter(f"%(now).3f {name}: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[telling])
    logging.getLogger("latentserve.access").setLevel(logging.WARNING)
    keeper = WeightKeeper() if config.engine.keep_weights else None
    told = folder / f"{name}.json"
    current: list[LocalReplica] = []
    watching: list[asyncio.Task[None]] = []

    def tell(**more: Any) -> None:
        pids = [process.pid for process in current[0].processes] if current else []
        fresh = told.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps({"pid": os.getpid(), "engine": pids, **more}))
        fresh.replace(told)

    async def start() -> EngineClient:
        if current:
            watching[0].cancel()
            current[0].kill()
        current[:] = [LocalReplica(config.engine, None if keeper is None else keeper.path())]
        client = EngineClient(config.engine, await asyncio.to_thread(current[0].connect), "demo")

        async def watch(own: LocalReplica) -> None:
            while not (dead := own.dead()):
                await asyncio.sleep(0.05)
            client.fail(dead)

        watching[:] = [asyncio.create_task(watch(current[0]))]
        await client.ready(START_S)
        await client.health_check()
        return client

    async def main() -> None:
        neighbors = NeighborStore("bench", f"{name}-{os.getpid()}", config, Place("node", "127.0.0.1"))
        engine = FailoverEngine(await start(), start, PATIENCE_S, neighbors=neighbors.neighbors)
        words = [engine_down("the replica's front died").event(path) for path in FAILURES]
        shared, arrivals = folder / "fronts", Arrivals()
        watchdog = StreamWatchdog(words, silence_s=10.0, shared=shared, patience_s=PATIENCE_S)
        app = create_app(engine, Tokenizer.load(config.engine.folder), config.api)
        neighbors.open(engine, watchdog)
        header = b"x-latentserve-replica", name.encode()
        heir = Heir(app, watchdog, neighbors.answers_as, header, arrivals, shared)
        neighbors.heir = heir.path
        layer = UnderServe(
            app, name, arrivals, watchdog, journals=Journals(watchdog, neighbors.answers_as)
        )  # fmt: skip

        class Wrapped:
            """Object in which Ray Serve hands a request on."""

            def __init__(self, receive: Any) -> None:
                self._receive = receive

            async def __call__(self) -> Any:
                return await self._receive()

        async def under_serve(scope: Any, receive: Any, send: Any) -> None:
            await layer(scope, Wrapped(receive), send)

        async def beat() -> None:
            while True:
                watchdog.beat(neighbors.heirs(), neighbors.elsewhere())
                both = bool(neighbors.heirs()) and bool(neighbors.neighbors()) and not engine.down
                tell(port=port, serves=both, down=bool(engine.down))
                if engine.over:
                    os._exit(1)
                await asyncio.sleep(BEAT_S)

        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        settings = uvicorn.Config(
            under_serve, loop="none", http="httptools", access_log=False, lifespan="off", log_level="warning"
        )
        beating = asyncio.create_task(beat())
        try:
            await uvicorn.Server(settings).serve(sockets=[listener])
        finally:
            beating.cancel()

    with suppress(KeyboardInterrupt):
        asyncio.run(main())


class Replicas:
    """The replicas, which are started again when their fronts die."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes = {name: self._start(name) for name in NAMES}

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        (self._folder / f"{name}.json").unlink(missing_ok=True)
        return subprocess.Popen([sys.executable, __file__, "--replica", name, str(self._folder)], cwd=ROOT)

    def told(self, name: str) -> dict[str, Any]:
        """What a replica says of itself; empty until it does."""
        process, file = self._processes[name], self._folder / f"{name}.json"
        if process.poll() is not None:
            if not file.exists():
                raise SystemExit(f"the {name} replica ended while it started, with exit code {process.returncode}")
            for pid in json.loads(file.read_text())["engine"] if file.exists() else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # as Ray ends the processes of a front that died
            self._processes[name] = self._start(name)
        with suppress(FileNotFoundError, json.JSONDecodeError):
            found: dict[str, Any] = json.loads(file.read_text())
            return found
        return {}

    async def serving(self) -> None:
        """Wait until both serve and know each other."""
        deadline = time.monotonic() + START_S
        while not all(self.told(name).get("serves") for name in NAMES):
            if time.monotonic() > deadline:
                raise SystemExit("the replicas do not serve")
            await asyncio.sleep(0.2)

    def end(self) -> None:
        """End them all."""
        for name, process in self._processes.items():
            pids = self.told(name).get("engine", []) if process.poll() is None else []
            process.kill()
            process.wait()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@dataclass
class Answer:
    """What a client has."""

    raw: bytes = b""
    pieces: list[float] = field(default_factory=list)
    """When something came."""
    replica: str = ""


async def ask(replicas: Replicas, which: str, path: str, body: dict[str, Any]) -> Answer:
    """Ask a replica, or the other one if nothing comes of it."""
    raw = json.dumps({"model": "demo", **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    names, deadline = [which, *(name for name in NAMES if name != which)], time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        for name in names:
            if (told := replicas.told(name)).get("down", True):
                continue
            answer = Answer(replica=name)
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", told["port"])
                writer.write(head.encode() + raw)
                answer.pieces.append(time.monotonic())
                async with asyncio.timeout_at(deadline - time.monotonic() + asyncio.get_running_loop().time()):
                    while not complete(answer.raw) and (part := await reader.read(65536)):
                        answer.raw += part
                        answer.pieces.append(time.monotonic())
                writer.close()
            except (OSError, TimeoutError):
                pass
            if answer.raw:
                return answer
        await asyncio.sleep(0.1)
    return Answer()


def complete(data: bytes) -> bool:
    """Whether an answer is there to its end."""
    head, _, rest = data.partition(b"\r\n\r\n")
    if length := re.search(rb"content-length: (\d+)", head):
        return len(rest) >= int(length[1])
    return rest.endswith(b"\r\n0\r\n\r\n")


_DRAWN = re.compile(rb'(chatcmpl-|cmpl-|msg_|resp_|call_|rs_|fc_|ctc_)[0-9a-f]+|"created(_at)?":\d+')


def said(answer: Answer) -> tuple[int, bytes]:
    """Status, and the text of an answer without what is drawn: all deltas of a stream in order, or the whole."""
    head, _, rest = answer.raw.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1]) if head else 0
    if b"text/event-stream" not in head:
        return status, _DRAWN.sub(b"", rest)
    body = re.sub(rb"(?:^|(?<=\r\n))[0-9a-f]+\r\n|\r\n", b"", rest)
    found: list[str] = []
    for line in body.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("error") or event.get("type") == "error":
            found.append(f"ERROR {event}")
        for choice in event.get("choices", ()):
            found.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
            found.append(f"<{choice['finish_reason']}>" if choice["finish_reason"] else "")
        delta = event.get("delta")
        found.append(delta if isinstance(delta, str) else (delta or {}).get("text", ""))
        if event.get("type") in ("message_stop", "response.completed", "response.incomplete"):
            found.append(f"<{event['type']}>")
        if event.get("usage"):
            found.append(str({key: event["usage"][key] for key in event["usage"] if key.endswith("_tokens")}))
    return status, "".join(found).encode() + (b"" if complete(answer.raw) else b"BROKEN")


def requests(count: int, tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Requests of four APIs, streamed and whole, sampled in various ways."""
    made: list[tuple[str, dict[str, Any]]] = []
    words = ["def read(path):", "class Stack:", "import os", "for line in lines:", "def test(", "try:"]
    for number in range(count):
        text, stream = words[number % len(words)] + " " * (number // len(words)), number % 3 != 2
        sampling = {"temperature": 0.0 if number % 4 == 0 else 1.0, "top_p": 0.9, "stream": stream}
        chat = [{"role": "user", "content": text}]
        seeded = {"seed": number, "ignore_eos": True, "max_tokens": tokens}
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        made.append(
            [
                ("/v1/completions", {"prompt": text, **sampling, **seeded, **usage}),
                ("/v1/chat/completions", {"messages": chat, "frequency_penalty": 0.3, **sampling, **seeded, **usage}),
                ("/v1/messages", {"messages": chat, **sampling, "temperature": 0.0, "max_tokens": tokens}),
                ("/v1/responses", {"input": text, **sampling, "temperature": 0.0, "max_output_tokens": tokens}),
            ][number % 4]
        )
    return made


def verdict(found: tuple[int, bytes], expected: tuple[int, bytes]) -> str:
    """Name what is wrong with an answer; empty if nothing is."""
    if found == expected:
        return ""
    if found[0] != expected[0] or b"BROKEN" in found[1] or b"ERROR" in found[1]:
        return "lost"
    return "tokens twice" if len(found[1]) > len(expected[1]) else "different"


@dataclass
class Found:
    """What came of a part, or of several."""

    answers: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    gaps: dict[str, list[float]] = field(default_factory=lambda: {"front": [], "rank": [], "scheduler": []})
    """Longest gap, in seconds, of each stream that ran at a replica of which something died, by what did."""
    usual: list[float] = field(default_factory=list)
    """The same of streams in whose time nothing died."""
    long: list[list[str]] = field(default_factory=list)
    """Of each stream that stood still for more than `LONG_S` while something died: for how long, and what happened."""

    def __add__(self, other: Found) -> Found:
        gaps = {kind: [*self.gaps[kind], *other.gaps[kind]] for kind in self.gaps}
        counts = self.answers + other.answers, self.wrong + other.wrong, self.kills + other.kills
        return Found(*counts, gaps, [*self.usual, *other.usual], [*self.long, *other.long])

    @staticmethod
    def of(kept: dict[str, Any]) -> Found:
        """Return what a file says of a part."""
        wrong, kills = Counter(kept["wrong"]), Counter(kept["kills"])
        return Found(kept["answers"], wrong, kills, kept["gaps"], kept["usual"], kept.get("long", []))

    def to_json(self) -> dict[str, Any]:
        """Return what `of` reads."""
        return {**vars(self), "wrong": dict(self.wrong), "kills": dict(self.kills)}

    def show(self) -> None:
        """Print it."""
        kinds = ", ".join(f"{number} {kind}s" for kind, number in self.kills.items())
        print(f"{self.answers} answers, {self.kills.total()} kills ({kinds}):")
        print(", ".join(f"{self.wrong[problem]} {problem}" for problem in ("lost", "different", "tokens twice")))
        if self.usual:
            usual = sorted(self.usual)
            print(f"{len(usual)} streams in whose time nothing died: ", end="")
            print(f"longest gap p50 {usual[len(usual) // 2]:.2f} s, p99 {usual[int(len(usual) * 0.99)]:.2f} s")
        every = [gap for some in self.gaps.values() for gap in some]
        for kind, some in {**self.gaps, "front, rank or scheduler": every}.items():
            if some:
                gaps = sorted(some)
                p50, p99 = gaps[len(gaps) // 2], gaps[min(int(len(gaps) * 0.99), len(gaps) - 1)]
                print(f"{len(gaps)} streams ran at a replica whose {kind} died: longest gap p50 {p50:.2f} s, ", end="")
                print(f"p99 {p99:.2f} s, longest {gaps[-1]:.2f} s")
        for lines in self.long:
            print("\n    ".join(lines))


def history(folder: Path, begin: float, end: float, deaths: list[tuple[float, str, str]]) -> list[str]:
    """What happened from a moment to another one, in order."""
    found = [(died, f"{kind} of the {victim} replica killed") for died, kind, victim in deaths]
    for file in folder.glob("*.log"):
        for line in file.read_text(errors="replace").splitlines():
            at, _, said = line.partition(" ")
            with suppress(ValueError):  # a line of a traceback
                found.append((float(at), said))
    return [f"{at - begin:.2f} s: {said}" for at, said in sorted(found) if begin <= at <= end]


async def run(options: argparse.Namespace, seed: int) -> Found:
    """Run one part."""
    chance, found = random.Random(seed), Found(options.answers)
    with tempfile.TemporaryDirectory(prefix="ls-") as place:
        replicas = Replicas(Path(place))
        try:
            await replicas.serving()
            asked = requests(24, options.tokens)
            expected = []
            for path, body in asked:
                answers = [await ask(replicas, name, path, body) for name in NAMES]
                told = [said(answer) for answer in answers]
                if told[0] != told[1] or told[0][0] != 200:
                    raise SystemExit(f"undisturbed answers differ: {path} {body} {told}")
                expected.append(told[0])
            deaths: list[tuple[float, str, str]] = []
            left, done = iter(range(options.answers)), 0

            async def client() -> None:
                nonlocal done
                for number in left:
                    path, body = asked[number % len(asked)]
                    answer = await ask(replicas, NAMES[number % 2], path, body)
                    if problem := verdict(said(answer), expected[number % len(asked)]):
                        found.wrong[problem] += 1
                        print(f"{problem}: {path} {said(answer)} in place of {expected[number % len(asked)]}")
                    done += 1
                    times = answer.pieces
                    if body["stream"] and not any(times[0] < died < times[-1] for died, _, _ in deaths if times):
                        found.usual.append(max(after - before for before, after in pairwise(times)))
                    for died, kind, victim in deaths:
                        if victim == answer.replica and body["stream"] and times[0] < died < times[-1]:
                            found.gaps[kind].append(max(after - before for before, after in pairwise(times)))
                    for before, after in pairwise(times if body["stream"] else ()):
                        if after - before > LONG_S and any(before <= died <= after for died, _, _ in deaths):
                            which = f"{path} at the {answer.replica} replica stood still for {after - before:.2f} s"
                            found.long.append([which, *history(Path(place), before, after, deaths)])
                            print("\n    ".join(found.long[-1]), flush=True)

            async def kill() -> None:
                for number in range(options.kills):
                    await replicas.serving()
                    await asyncio.sleep(chance.uniform(0.2, 1.5))
                    name, kind = chance.choice(NAMES), ("front", "rank", "front", "scheduler")[number % 4]
                    lately = [at for at, what, who in deaths if what != "front" and who == name]
                    if kind != "front" and len(lately) > 1 and time.monotonic() - lately[-2] < LOSSES_S:
                        kind = "front"  # the third such death within a minute is meant to end a replica
                    fronts = found.kills["front"] + 1
                    both = kind == "front" and options.together and fronts % options.together == 0
                    told = {victim: replicas.told(victim) for victim in (NAMES if both else (name,))}
                    for victim, one in told.items():
                        with suppress(ProcessLookupError):
                            os.kill(one["pid"] if kind == "front" else one["engine"][kind == "rank"], signal.SIGKILL)
                        deaths.append((time.monotonic(), kind, victim))
                    found.kills[kind] += 1
                    victims = " and ".join(told)
                    print(f"{number + 1}: {kind} of the {victims} replica killed, {done} answers so far", flush=True)
                    await asyncio.sleep(1.0)

            killing = asyncio.create_task(kill())
            clients = [asyncio.create_task(client()) for _ in range(options.clients)]
            await asyncio.gather(*clients)
            killing.cancel()
        finally:
            replicas.end()
    return found


def main(options: argparse.Namespace) -> int:
    """Run the parts that are missing; return the exit code."""
    asked = {name: getattr(options, name) for name in ("answers", "kills", "clients", "tokens")}
    asked |= {"together": options.together} if options.together else {}
    kept: dict[str, Any] = {"asked": asked, "parts": {}}
    if options.json is not None and options.json.exists():
        kept = json.loads(options.json.read_text())
        if kept["asked"] != asked:
            raise SystemExit(f"{options.json} is of {kept['asked']}, not of {asked}: give the same, or another file")
    for part in range(options.parts):
        seed = options.seed + part
        if str(seed) in kept["parts"]:
            continue
        if options.parts > 1:
            print(f"part {part + 1} of {options.parts}, seed {seed}", flush=True)
        kept["parts"][str(seed)] = asyncio.run(run(options, seed)).to_json()
        if options.json is not None:
            fresh = options.json.with_suffix(".fresh")
            fresh.write_text(json.dumps(kept))
            fresh.replace(options.json)
    found = sum(map(Found.of, kept["parts"].values()), Found())
    found.show()
    return bool(found.wrong)


def arguments() -> argparse.ArgumentParser:
    """Return what the program can be asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=300)
    parser.add_argument("--kills", type=int, default=12, help="at most; there are fewer if the answers end before")
    parser.add_argument("--clients", type=int, default=8, help="clients that ask at one time")
    parser.add_argument("--tokens", type=int, default=60, help="tokens of each answer")
    parser.add_argument("--together", type=int, default=0, metavar="N", help="kill both fronts each Nth time; 0: never")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1, help="how often all of that is done, with seeds that follow")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep what each part found, and go on from there")
    parser.add_argument("--replica", nargs=2, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    chosen = arguments().parse_args()
    if chosen.replica:
        replica(chosen.replica[0], Path(chosen.replica[1]))
    else:
        sys.exit(main(chosen))
