"""Ranks that start ahead of Ray, on a Ray of our own.

A rank needs nothing of Ray until it serves, and takes longest of all to start. So `latentserve serve` starts the ranks
of its first engines before anything else, as plain processes (`prestarted_rank`): they import, load, compile, capture
and prove, and wait for the addresses of their scheduler. The actor that Ray starts for a rank then gives it these, and
stands for it from there on: it ends as the rank does, and the rank ends with it.

An engine takes all of its ranks in this way or none. Its front asks for them (`claim`), with all that decides what a
rank does; where anything is otherwise, or one of them has failed, they are ended, and the actors become the ranks.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from deploy.cluster.environment import PROCESS_ENVIRONMENT
from deploy.cluster.sessions import Sessions
from deploy.config.application import LogConfig, ServeConfig
from deploy.serve import early_imports
from deploy.serve.ended_processes import runs
from workers.channel.ports import free_ports, socket_folder
from workers.channel.sockets import Addresses
from workers.memory.keeper_process import receive, send
from workers.protocol.captures import FIRST_ENGINE
from workers.rank.role import Role

logger = logging.getLogger("latentserve.prestarted")

SWITCH: Final = "LATENTSERVE_PRESTARTED_RANKS"
"""Environment variable: 0 has no rank start ahead of Ray, 1 has them do so on however few cores."""
FOLDER: Final = "LATENTSERVE_PRESTARTED_RANKS_IN"
"""Environment variable of all processes of a Ray with such ranks: the folder of their sockets, their user's alone."""
MODULE: Final = "deploy.serve.prestarted_rank"
NOBODY: Final = b"over\n"
"""Tells a rank that nobody is going to ask for it any more."""
ANSWER_S: Final = 20.0
"""Seconds within which a rank answers: it may be in the middle of an import."""
ENDED_S: Final = 30.0
"""Seconds in which a rank that was killed gives back its memory: the driver needs some for a full GPU."""
RAYS_NICE: Final = 15
"""What Ray adds to the nice value of its workers, of which the ranks' actors are, where NICENESS says nothing else."""
NICENESS: Final = "RAY_worker_niceness"
RAYS_OOM_SCORE: Final = 1000
"""What Ray sets as the `oom_score_adj` of its workers. A rank with less would outlive all others of them where a node
runs out of memory, though it has most of it."""
RAYS_FILES: Final = 65536
"""Files to which Ray raises the soft limit of this process, and so of its workers, where the hard one allows it."""
CLOSED_S: Final = 5.0
"""Seconds for which the command waits for the end of ranks that it killed."""
_LIST: Final = "ranks.json"


def terms(config: ServeConfig, rank: int, device: int) -> dict[str, Any]:
    """Return all that decides what a rank of a replica's first engine does, of `settled` settings: it is that rank
    where these are equal. `device`: its index among the visible ones, -1 without one."""
    role: Role = "primary" if config.health.standby == "hot" else "alone"
    return {
        "engine": config.engine.model_dump_json(),
        "role": role,
        "waiting": FIRST_ENGINE[config.engine.graphs_at_start],
        "keeps": config.keeps_weights,
        "rank": rank,
        "device": device,
    }


class PrestartedRanks:
    """The ranks that a command has started, in the command."""

    def __init__(self, config: ServeConfig, sessions: Sessions) -> None:
        """Start those of all replicas that a start brings up: `config` is `settled`, and the devices are taken in their
        order. OSError where one cannot be started. Where this process is killed, what `sessions` has for that ends
        them, if they do not end by themselves."""
        self._folder = socket_folder(below=len("/12345-12345"))
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            ranks = config.engine.mesh().world.size
            engines: list[list[_Member]] = []
            for replica, port in enumerate(free_ports("127.0.0.1", config.least_replicas)):
                rendezvous = f"tcp://127.0.0.1:{port}"
                engines.append([])
                for rank in range(ranks):
                    device = replica * ranks + rank if config.gpus_per_rank else -1
                    path = self._folder / f"{replica}-{rank}"
                    log = config.log.model_dump(mode="json")
                    begin = {**terms(config, rank, device), "rendezvous": rendezvous, "log": log}
                    pid = self._start(path, begin, sessions)
                    engines[-1].append(_Member(device, str(path), pid, _began(pid)))
            (self._folder / _LIST).write_bytes(msgspec.json.encode(engines))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._processes)

    def _start(self, path: Path, begin: dict[str, Any], sessions: Sessions) -> int:
        settings = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, **PROCESS_ENVIRONMENT}
        settings["TOKENIZERS_PARALLELISM"] = "false"
        settings["TMPDIR"] = str(self._folder)  # what it leaves, should it be killed, goes with the folder
        # It imports what this process would: its own folder is not looked through for modules.
        imports = {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        said = os.memfd_create("what a prestarted rank says")  # until an actor has a log for it
        try:
            # Listened at from here: who asks before the process runs waits for it, and who asks after it has not.
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(str(path))
                listener.listen(16)
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", MODULE, str(self._folder), str(listener.fileno())],
                    stdin=subprocess.PIPE,
                    stdout=said,
                    stderr=said,
                    pass_fds=(listener.fileno(),),
                    env={**settings, **imports},
                    start_new_session=True,  # a signal to our group ends no stream
                )
        finally:
            os.close(said)
        # Nobody waits for it before `close`: until then its id names no other process, whose session would be ended.
        self._processes.append(process)
        sessions.add(process.pid, self._folder)
        _let_be_as_rays(process.pid)
        _tell(process, json.dumps(begin).encode() + b"\n")
        return process.pid

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which the processes of our Ray find them."""
        return {FOLDER: str(self._folder)}

    def served(self) -> None:
        """Note that the application serves: ranks that no engine has taken end, and none is taken any more."""
        with suppress(OSError):
            (self._folder / _LIST).unlink()
        for process in self._processes:
            _tell(process, NOBODY)

    def close(self) -> None:
        """End all that still run, and wait a little for their end."""
        for process in self._processes:
            process.kill()
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
        deadline = time.monotonic() + CLOSED_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
        shutil.rmtree(self._folder, ignore_errors=True)


def begin(config: ServeConfig, cores: int, gpus: int, sessions: Sessions) -> PrestartedRanks | None:
    """Start the ranks of a Ray of our own, on a node of so many cores and visible GPUs, before that starts. None where
    the cores are not `early_imports.enough`, nor the GPUs, where GPUs are shared, where `SWITCH` is against it, and
    where they cannot be started."""
    switch, config = os.environ.get(SWITCH), config.settled(gpus_there=gpus > 0)
    if switch == "0" or not (switch == "1" or early_imports.enough(cores, config)):
        return None
    ranks = config.least_replicas * config.engine.mesh().world.size
    if config.gpus_per_rank not in (0, 1) or config.gpus_per_rank * ranks > gpus:
        return None
    try:
        return PrestartedRanks(config, sessions)
    except OSError as error:
        logger.warning("no rank starts ahead of Ray: %s", error)
        return None


def _let_be_as_rays(pid: int) -> None:
    """Give a process what Ray gives its workers, as far as this one may."""
    with suppress(OSError, ValueError):  # where cores are few, Ray goes first
        more = int(os.environ.get(NICENESS, RAYS_NICE))
        os.setpriority(os.PRIO_PROCESS, pid, min(os.getpriority(os.PRIO_PROCESS, 0) + more, 19))
    with suppress(OSError, ValueError):
        score = int(os.environ.get("RAY_worker_oom_score_adjustment", RAYS_OOM_SCORE))  # noqa: SIM112 - Ray's own name
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(min(max(score, 0), 1000)))
    with suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (max(soft, min(hard, RAYS_FILES)), hard))


def _tell(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    with suppress(OSError, ValueError):  # it has ended
        process.stdin.write(line)
        process.stdin.flush()


def folder() -> Path | None:
    """Folder of the ranks that started ahead of the Ray of this process; None where there are none."""
    given = os.environ.get(FOLDER)
    return Path(given) if given and (Path(given) / _LIST).exists() else None


class _Member(msgspec.Struct, frozen=True):
    """A rank of the list."""

    device: int
    path: str
    """Its socket."""
    pid: int
    began: int
    """When the process began, as /proc has it: by this its id names no other."""

    def there(self) -> bool:
        """Whether the process has not ended."""
        return _began(self.pid) == self.began and runs(self.pid)

    def kill(self) -> None:
        """SIGKILL, if the process id still names it."""
        if _began(self.pid) == self.began:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Claimed:
    """A rank that started ahead, in the front that has asked for it."""

    path: Path
    """Its socket, for the actor that stands for it."""
    pid: int
    _member: _Member
    _channel: socket.socket

    def kill(self) -> None:
        """End it at once, however busy it is; harmless when repeated."""
        self._member.kill()
        self._channel.close()


class NotClaimed(RuntimeError):
    """Error where an engine cannot have ranks that started ahead; the message says why. None is in its way any more."""


def claim(place: Path, config: ServeConfig, devices: Sequence[int]) -> list[Claimed]:
    """Ask the ranks in folder `place` for those of one engine, in rank order, which use these devices: all of them.
    `config` is `settled`. NotClaimed. Takes a moment, or `ENDED_S` where ranks have to be ended."""
    try:
        engines = msgspec.json.decode((place / _LIST).read_bytes(), type=list[list[_Member]])
    except (OSError, msgspec.MsgspecError) as error:
        raise NotClaimed(f"nobody knows of any: {error}") from None
    why = "none has its devices"
    in_the_way: list[_Member] = []
    for engine in engines:
        taken = False
        if [member.device for member in engine] == list(devices):
            claimed, refusal, taken = _claim_engine(engine, config)
            if claimed:
                return claimed
            why = refusal
        # Of those without a device one that is taken may well serve another replica.
        in_the_way += [each for each in engine if (each.device in devices if each.device >= 0 else not taken)]
    _end(in_the_way)
    raise NotClaimed(why)


def _claim_engine(engine: Sequence[_Member], config: ServeConfig) -> tuple[list[Claimed], str, bool]:
    """Ask all ranks of one engine. Return them; or why they cannot be had, and whether another front has them."""
    claimed: list[Claimed] = []
    for rank, member in enumerate(engine):
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        channel.settimeout(ANSWER_S)
        try:
            channel.connect(member.path)
            send(channel, {"kind": "claim", **terms(config, rank, member.device)})
            answer, _ = receive(channel)
            refusal, taken = str(answer["refusal"]), bool(answer["taken"])
        except (OSError, ValueError, KeyError) as error:
            refusal, taken = f"it does not answer: {error}", False
        if not refusal:
            channel.settimeout(None)
            claimed.append(Claimed(Path(member.path), member.pid, member, channel))
            continue
        channel.close()
        for each in claimed:
            each.kill()
        return [], f"rank {rank}: {_last_words(Path(member.path)) or refusal}", taken and not claimed
    return claimed, "", False


def failure_file(path: Path) -> Path:
    """File in which a rank says why it failed, by the path of its socket."""
    return path.with_name(f"{path.name}.failed")


def _last_words(path: Path) -> str:
    try:
        return failure_file(path).read_text()
    except OSError:
        return ""


def _end(members: Sequence[_Member]) -> None:
    """Kill ranks, and wait until they have given back their memory."""
    deadline = time.monotonic() + ENDED_S
    for member in members:
        member.kill()
    while any(member.there() for member in members) and time.monotonic() < deadline:
        time.sleep(0.01)


def _began(pid: int) -> int:
    """When a process began, in ticks of the system's clock; 0 where there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


class RankFailed(RuntimeError):
    """What a rank raised, in the actor that stands for it."""


def stand_for(path: Path, addresses: Addresses, keeper: Path | None, log: LogConfig, labels: dict[str, Any]) -> None:
    """Set a rank that was claimed to work, in the actor that Ray has started for it, and stand for it: return or raise
    as it does. Where it dies, so does this process, which is how others know."""
    message = {
        "kind": "run",
        "addresses": msgspec.to_builtins(addresses),
        "keeper": None if keeper is None else str(keeper),
        "log": log.model_dump(mode="json"),
        "labels": labels,
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        try:
            channel.connect(str(path))
            send(channel, message, [1, 2])  # its output goes where that of this process does
            answer, _ = receive(channel)
            error = answer["error"]
        except (OSError, ValueError, KeyError):
            logger.error("the rank that started ahead of Ray has died")
            os.kill(os.getpid(), signal.SIGKILL)
            raise
    if error is not None:
        raise RankFailed(error)
