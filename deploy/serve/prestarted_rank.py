"""Process of a rank that starts ahead of Ray (`prestarted`): `python -m deploy.serve.prestarted_rank FOLDER SOCKET`.

Standard input is a pipe from the command that started it: a line of JSON says which rank it is, and at the pipe's end
this process ends. SOCKET is the descriptor that it listens at. A front connects and asks for the rank, which ends with
that connection from then on. The rank's actor connects, says where the scheduler is, and waits for the outcome: the
rank ends with that connection, too.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import shutil
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NoReturn

import msgspec
from typing_extensions import override

from deploy.config.application import LogConfig
from deploy.observability import logs
from deploy.serve.prestarted import NOBODY, failure_file
from workers.channel.sockets import Addresses, last_words_have_left
from workers.config import EngineConfig
from workers.memory.keeper import LaterKeeper
from workers.memory.keeper_process import Message, receive, send
from workers.rank.link import Link

logger = logging.getLogger("latentserve.prestarted")


class _Kept(logging.Handler):
    """Keeps log records until it is known where they go, and with which labels."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    @override
    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.records.append(record)


class PrestartedRank:
    """One rank, from its imports to its end."""

    def __init__(self, folder: Path, listener: socket.socket, begin: Message) -> None:
        """`begin`: what `prestarted.terms` has, and the `rendezvous` and the `log`."""
        self._folder, self._listener = folder, listener
        self._rendezvous, log = begin.pop("rendezvous"), LogConfig.model_validate(begin.pop("log"))
        self._terms = begin
        self._engine = EngineConfig.model_validate_json(begin["engine"])
        self._rank: int = begin["rank"]
        self._link = Link(self._engine, self._rank)
        self._keeper = LaterKeeper() if begin["keeps"] else None
        self._claiming, self._claimed = Lock(), False
        self._stand_in: socket.socket | None = None
        self._records = _Kept()
        for name in logs.LOGGERS:
            of_ours = logging.getLogger(name)
            of_ours.handlers[:] = [self._records]
            of_ours.setLevel(log.level)
            of_ours.propagate = False

    def run(self) -> NoReturn:
        """Start at once, serve when told where, and end."""
        Thread(target=self._heed_command, name="heed-command", daemon=True).start()
        Thread(target=self._listen, name="listen", daemon=True).start()
        begin, device = time.perf_counter(), self._terms["device"]
        try:
            try:
                from workers.rank.libraries import load_libraries

                load_libraries()
                from workers.rank.worker_process import run_linked
            except BaseException:
                self._link.fail()
                raise
            libraries_s = time.perf_counter() - begin
            run_linked(
                self._engine,
                self._rank,
                self._link,
                self._rendezvous,
                device if device >= 0 else None,
                self._keeper,
                self._terms["waiting"],
                self._terms["role"],
                libraries_s,
            )
        except BaseException as error:
            traceback.print_exc()
            self._end(str(error) or type(error).__name__)
        self._end(None)

    def _end(self, error: str | None) -> NoReturn:
        """End, and say to whoever stands for this rank how. Not in order: that could wait for a device, or a peer."""
        last_words_have_left()
        with suppress(OSError):
            if self._stand_in is not None:
                send(self._stand_in, {"error": error})
            elif error is not None:
                failure_file(Path(self._listener.getsockname())).write_text(error)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(0 if error is None else 1)

    def _heed_command(self) -> None:
        while line := sys.stdin.buffer.readline():
            if line == NOBODY and self._link.give_up():
                os._exit(0)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(1)

    def _listen(self) -> None:
        while True:
            try:
                channel, _ = self._listener.accept()
            except OSError:  # no descriptors are left, perhaps: not at once again
                time.sleep(0.1)
                continue
            Thread(target=self._answer, args=(channel,), name="answer", daemon=True).start()

    def _answer(self, channel: socket.socket) -> None:
        try:
            message, descriptors = receive(channel)
            kind = message.pop("kind")
        except (OSError, ValueError, KeyError):  # whoever it was has gone
            channel.close()
            return
        if kind == "claim":
            bound = self._give(channel, message)
        else:
            bound = True
            try:
                self._connect(channel, message, descriptors)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        if bound:
            with suppress(OSError):
                while channel.recv(1):
                    pass
            os._exit(1)  # who has asked for this rank, or stands for it, has ended
        channel.close()

    def _give(self, channel: socket.socket, asked: Message) -> bool:
        """A front asks for this rank; return whether it has it now."""
        with self._claiming:
            taken = self._claimed
            if taken:
                refusal = "another engine has it"
            elif other := [name for name, value in self._terms.items() if asked.get(name) != value]:
                refusal = f"it started with another {', '.join(other)}"
            else:
                self._claimed = self._link.promise()
                refusal = "" if self._claimed else "it has failed"
        try:
            send(channel, {"refusal": refusal, "taken": taken})
        except OSError:
            return not refusal  # and has gone
        return not refusal

    def _connect(self, channel: socket.socket, message: Message, descriptors: list[int]) -> None:
        """The actor of this rank says where its scheduler is."""
        _speak_to(*descriptors)
        for thread in os.listdir("/proc/self/task"):  # Linux knows the priority of threads alone
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread), message["nice"])
        logs.configure(LogConfig.model_validate(message["log"]), process=f"rank {self._rank}", **message["labels"])
        for record in self._records.records:
            logging.getLogger(record.name).handle(record)
        if self._keeper is not None:
            keeper = message["keeper"]
            try:
                self._keeper.hand_over(None if keeper is None else Path(keeper))
            except OSError as error:
                logger.warning("weights will not be kept for a restart: %s", error)
        self._stand_in = channel
        self._link.connect(msgspec.convert(message["addresses"], Addresses))


def _speak_to(out: int, error: int) -> None:
    """Let standard output and error go there, and what was said so far."""
    said = os.pread(2, os.fstat(2).st_size, 0)
    if said:
        os.write(error, said)
    os.dup2(out, 1)
    os.dup2(error, 2)
    os.close(out)
    os.close(error)


def main() -> None:
    """Be the rank that the first line of standard input names."""
    faulthandler.enable(all_threads=False)  # as in Ray's workers
    listener = socket.socket(fileno=int(sys.argv[2]))
    listener.set_inheritable(False)
    line = sys.stdin.buffer.readline()
    if not line:
        raise SystemExit(1)  # the command has ended
    begin: dict[str, Any] = json.loads(line)
    PrestartedRank(Path(sys.argv[1]), listener, begin).run()


if __name__ == "__main__":
    main()
