"""A rank's end of the channel to its scheduler and front. It takes what the rank has to say before anybody has told
where these are: a rank may begin before its scheduler does."""

from __future__ import annotations

import threading

from workers.channel.heartbeats import HeartbeatThread
from workers.channel.sockets import Addresses, Receiver, Sender, connect_receiver, connect_sender
from workers.config import EngineConfig
from workers.protocol.grammar import GrammarProgress, GrammarReady
from workers.protocol.messages import Fault, FromWorker, ToWorker
from workers.protocol.tiers import DiskMoved, Moved, Pinned


class Link:
    """Sockets and heartbeats of one rank, from `connect` on. Messages that are sent before leave then, in order."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        """Nothing is connected yet."""
        self._config, self._rank = config, rank
        self._changed = threading.Condition()
        self._early: list[FromWorker] = []
        self._addresses: Addresses | None = None
        self._results: Sender | None = None
        self._plans: Receiver | None = None
        self._heartbeat: HeartbeatThread | None = None
        self._promised = self._over = False
        self.news = News(self)
        """Where threads of the rank tell what they find."""

    def connect(self, addresses: Addresses) -> None:
        """Connect, and send what was said so far. Any thread may call it, once."""
        results = connect_sender(addresses.results, addresses.keys)
        plans = connect_receiver(addresses.plans[self._rank], ToWorker, addresses.keys)
        heartbeat = HeartbeatThread(addresses, self._rank, silence_s=2 * self._config.heartbeat_timeout_s)
        with self._changed:
            for message in self._early:
                results.send(message)
            self._early.clear()
            self._addresses = addresses
            self._results, self._plans, self._heartbeat = results, plans, heartbeat
            self._changed.notify_all()

    @property
    def connected(self) -> bool:
        """Whether it is."""
        return self._results is not None

    @property
    def results(self) -> Sender:
        """To the scheduler, for the thread that runs the rank, once it is connected."""
        assert self._results is not None, "wait comes first"
        return self._results

    @property
    def plans(self) -> Receiver:
        """From the scheduler, for the same thread."""
        assert self._plans is not None, "wait comes first"
        return self._plans

    @property
    def heartbeat(self) -> HeartbeatThread:
        """Signs of life, once it is connected."""
        assert self._heartbeat is not None, "wait comes first"
        return self._heartbeat

    def send(self, message: FromWorker) -> None:
        """Send a message now, or as soon as it is connected. PeerGone."""
        with self._changed:
            if self._results is None:
                self._early.append(message)
            else:
                self._results.send(message)

    def sent_later(self, message: FromWorker) -> Addresses | None:
        """Send a message as soon as it is connected. Where it is already, do nothing, and return the addresses."""
        with self._changed:
            if self._addresses is None:
                self._early.append(message)
            return self._addresses

    def promise(self) -> bool:
        """Note that somebody is about to `connect`. Return False where that is in vain, as the rank has failed or was
        given up."""
        with self._changed:
            self._promised = self._promised or not self._over
            return not self._over

    def give_up(self) -> bool:
        """Note that nobody is going to `connect`. Return False where somebody has promised to."""
        with self._changed:
            self._over = self._over or not self._promised
            return not self._promised

    def wait(self) -> None:
        """Wait until it is connected."""
        with self._changed:
            self._changed.wait_for(lambda: self._results is not None)

    def fail(self) -> bool:
        """Note that the rank has failed; where somebody has promised to connect, wait until that is done. Return
        whether it is connected: then what was said is heard."""
        with self._changed:
            self._over = True
            self._changed.wait_for(lambda: self._results is not None or not self._promised)
            return self._results is not None

    def hang_up(self) -> None:
        """Close what is connected; messages on their way still leave. Harmless where nothing is."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        self.news.close()
        if self._results is not None:
            self._results.close()
        if self._plans is not None:
            self._plans.close()


class News:
    """Tells the scheduler what other threads find: which grammars are ready, how long others have been worked on, and
    which pages are copied."""

    def __init__(self, link: Link) -> None:
        self._link, self._lock = link, threading.Lock()
        self._sender: Sender | None = None
        self._closed = False

    def __call__(self, grammar_id: int, error: str) -> None:
        """A grammar is ready, or has the error."""
        self._send(GrammarReady(grammar_id, error))

    def progress(self, grammar_id: int, seconds: float) -> None:
        """Tell how long a grammar has been worked on."""
        self._send(GrammarProgress(grammar_id, seconds))

    def moved(self, message: Moved | DiskMoved) -> None:
        """Pages are copied."""
        self._send(message)

    def of_tiers(self, message: Pinned | Fault) -> None:
        """Host memory is pinned, or a thread that copies pages has failed."""
        self._send(message)

    def _send(self, message: GrammarReady | GrammarProgress | Moved | DiskMoved | Pinned | Fault) -> None:
        with self._lock:
            if self._closed:
                return
            if self._sender is None:
                addresses = self._link.sent_later(message)
                if addresses is None:
                    return
                self._sender = connect_sender(addresses.results, addresses.keys)
            self._sender.send(message)

    def close(self) -> None:
        """Tell no more."""
        with self._lock:
            self._closed = True
            if self._sender is not None:
                self._sender.close(linger_ms=0)
