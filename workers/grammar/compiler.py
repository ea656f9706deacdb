"""Compiles grammars beside the steps, in threads of its own: xgrammar lets the interpreter go while it works."""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from workers.grammar.surrogates import SplitSurrogates
from workers.protocol.grammar import COMPILED_AT_ONCE, CompileGrammar, ForgetGrammar, Grammar, Kind
from workers.vocabulary.beside import text_of_tokens_beside

logger = logging.getLogger(__name__)

CACHE_BYTES: Final = 1 << 28
"""Most bytes of compiled grammars that are not in use."""
MOST_COMPILERS: Final = 4
"""One for text, one for JSON, and those for calls of tools, whose markers may be special tokens."""
_KINDS: Final[tuple[Kind, ...]] = ("regex", "json")
PROGRESS_PERIOD_S: Final = 0.5
"""Time between two reports of how long a grammar has been worked on, in seconds."""
_PREPARING_S: Final = 60.0
"""A start waits no longer for the compilers of ordinary grammars."""
_ORDINARY: Final = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "string"}}}')
TRIAL_TOKENS: Final = 48
"""Tokens of a text that is written on trial: some grammars compile at once and then take for ever."""


class _Vocabulary(NamedTuple):
    """Bytes of the tokens of a vocabulary."""

    table: list[bytes]
    special: frozenset[int]
    """Ids that are no text, whatever they spell."""
    split: SplitSurrogates


class _Compilers(NamedTuple):
    """xgrammar's compilers for a vocabulary."""

    cached: Any
    """Keeps what it compiled."""
    plain: Any
    """Compiles each grammar anew."""


class Compiled:
    """A grammar that is ready: matchers of it can be made."""

    def __init__(self, grammar: Grammar, handle: object, split: SplitSurrogates | None = None) -> None:
        """`split`: of the vocabulary, where it may have any."""
        self.grammar, self.handle, self.split = grammar, handle, split


class NotCompiled(ValueError):
    """Reason why a grammar cannot be used, for whoever sent it."""


class Compiler:
    """The grammars of a replica, on rank 0."""

    def __init__(
        self,
        folder: Path,
        vocab: int,
        eos_ids: tuple[int, ...],
        on_ready: Callable[[int, str], None],
        on_progress: Callable[[int, float], None] = lambda grammar_id, seconds: None,
    ) -> None:
        """`folder`: of the model, for its tokenizer. `on_ready` is told, mostly in some other thread, of every grammar
        id, and why its grammar cannot be used, if it cannot; `on_progress` of every grammar that takes a while, again
        and again, for how many seconds a processor has worked on it. Nothing is read, and no thread begun, before it is
        needed."""
        self._on_progress = on_progress
        self._folder, self._vocab, self._eos_ids, self._on_ready = folder, vocab, eos_ids, on_ready
        self._asked: queue.SimpleQueue[tuple[int, Grammar] | None] = queue.SimpleQueue()
        self._ready: dict[int, Compiled] = {}
        self._forgotten: set[int] = set()
        self._compilers: dict[tuple[bool, tuple[int, ...]], _Compilers] = {}
        """Compilers by whether they are for JSON, and by the special tokens that write text."""
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self._preparing: threading.Thread | None = None
        self._under_way: dict[int, tuple[int, float]] = {}
        """Grammars that are being compiled, by grammar id: the clock of the compiling thread, and its time at the
        beginning."""

    def prepare(self) -> None:
        """Begin to read the vocabulary now, beside whatever happens."""
        self._preparing = threading.Thread(target=self._open, name="grammar-vocabulary", daemon=True)
        self._preparing.start()

    def finish_preparing(self) -> None:
        """Wait for what `prepare` has begun: the first request shall not."""
        if self._preparing is not None:
            self._preparing.join(_PREPARING_S)
            if self._preparing.is_alive():
                logger.warning("grammars: the vocabulary is not read after %g s; first requests may wait", _PREPARING_S)

    def heed(self, message: CompileGrammar | ForgetGrammar) -> None:
        """Do what the scheduler says."""
        if isinstance(message, CompileGrammar):
            self.ask(message.grammar_id, message.grammar)
        else:
            self.forget(message.grammar_id)

    def ask(self, grammar_id: int, grammar: Grammar) -> None:
        """Let a grammar be compiled; one of any text is ready at once."""
        if grammar.kind == "free":
            self._ready[grammar_id] = Compiled(grammar, None)
            self._on_ready(grammar_id, "")
            return
        if not self._threads:
            # Daemons: a compilation cannot be ended, and must not keep the process from ending.
            self._threads = [
                threading.Thread(target=self._work, name="grammar", daemon=True) for _ in range(COMPILED_AT_ONCE)
            ]
            self._threads.append(threading.Thread(target=self._report, name="grammar-progress", daemon=True))
            for thread in self._threads:
                thread.start()
        self._asked.put((grammar_id, grammar))

    def forget(self, grammar_id: int) -> None:
        """Drop a grammar, ready or not: it will not be asked for again."""
        with self._lock:
            if self._ready.pop(grammar_id, None) is None:
                self._forgotten.add(grammar_id)

    def ready(self, grammar_id: int) -> Compiled:
        """A grammar that is ready; KeyError for another one."""
        return self._ready[grammar_id]

    def close(self) -> None:
        """Compile no more; what is under way goes on until the process ends."""
        self._closed.set()
        for _ in self._threads:
            self._asked.put(None)

    def compile(self, grammar: Grammar, begun: Callable[[], None] = lambda: None) -> Compiled:
        """Compile a grammar here and now. `begun` is called once the vocabulary is read. NotCompiled."""
        from workers.grammar.build import GrammarError, build, same_if_written

        try:
            compilers = self._compilers_of(grammar)
            begun()
            built = build(grammar, quick=True)
            compiler = compilers.cached if same_if_written(grammar.text, built) else compilers.plain
            handle = compiler.compile_grammar(built)
            compiled = Compiled(grammar, handle, self._vocabulary.split)
            self._try(compiled)
        except GrammarError as error:
            raise NotCompiled(str(error)) from None
        return compiled

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            grammar_id, grammar = asked
            with self._lock:
                if grammar_id in self._forgotten:
                    self._forgotten.discard(grammar_id)
                    continue
            error = ""
            try:
                compiled = self.compile(grammar, partial(self._begun, grammar_id))
            except NotCompiled as wrong:
                error = str(wrong)
            except Exception as wrong:  # of whatever kind: it must not end the thread, and the request must hear
                logger.exception("a grammar cannot be compiled")
                error = f"it cannot be compiled: {wrong}"
            else:
                with self._lock:
                    if grammar_id not in self._forgotten:
                        self._ready[grammar_id] = compiled
            with self._lock:
                self._forgotten.discard(grammar_id)
                self._under_way.pop(grammar_id, None)
            self._on_ready(grammar_id, error)

    def _begun(self, grammar_id: int) -> None:
        clock = time.pthread_getcpuclockid(threading.get_ident())
        with self._lock:
            self._under_way[grammar_id] = clock, time.clock_gettime(clock)

    def _report(self) -> None:
        """Say for how long each grammar has been worked on. Time of a processor, not of the clock: what a machine is
        busy with besides, and the reading of the vocabulary, is not the grammar's fault."""
        while not self._closed.wait(PROGRESS_PERIOD_S):
            with self._lock:
                under_way = [
                    (grammar_id, time.clock_gettime(clock) - begin)
                    for grammar_id, (clock, begin) in self._under_way.items()
                ]
            for grammar_id, seconds in under_way:
                self._on_progress(grammar_id, seconds)

    def _open(self) -> None:
        """Get the compilers of ordinary grammars ready: for text, and for JSON."""
        with suppress(NotCompiled):  # a request that asks for a grammar is told why it can have none
            for kind in _KINDS:
                self._compilers_of(Grammar(kind))
            self.compile(_ORDINARY)

    def _compilers_of(self, grammar: Grammar) -> _Compilers:
        """xgrammar's compilers for the vocabulary of a grammar."""
        from workers.grammar.build import vocabulary_for
        from workers.grammar.library import xgr

        key = grammar.kind in ("json", "json_schema"), grammar.spelled
        with self._opening:
            if key not in self._compilers:
                hidden = self._vocabulary.special.difference(grammar.spelled)
                shown = [b"" if index in hidden else raw for index, raw in enumerate(self._vocabulary.table)]
                own = vocabulary_for(grammar.kind, shown)
                info = xgr.TokenizerInfo(own, vocab_size=self._vocab, stop_token_ids=list(self._eos_ids))
                while len(self._compilers) >= MOST_COMPILERS:
                    self._compilers.pop(next(iter(self._compilers)))
                self._compilers[key] = _Compilers(
                    xgr.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES // MOST_COMPILERS),
                    xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False),
                )
            return self._compilers[key]

    @cached_property
    def _vocabulary(self) -> _Vocabulary:
        """NotCompiled where there is none to write texts with."""
        if not self._eos_ids:
            raise NotCompiled("this model has no end-of-sequence id, without which no text can be ended")
        read = text_of_tokens_beside(self._folder)
        if read is None:
            raise NotCompiled("this model has no tokenizer whose tokens are bytes of text")
        table, special = read
        # Ids behind the tokenizer's, with which models pad their vocabulary, are no text either.
        table = (table + [b""] * (self._vocab - len(table)))[: self._vocab]
        return _Vocabulary(table, special, SplitSurrogates(table, self._vocab))

    def _try(self, compiled: Compiled) -> None:
        """Write some text. One whose grammar needs for ever for that never becomes ready."""
        from workers.grammar.library import xgr

        matcher = xgr.GrammarMatcher(compiled.handle)  # type: ignore[arg-type]
        bits_1B = np.zeros((1, -(-self._vocab // 32)), dtype=np.int32)
        draw = random.Random(0)
        for written in range(TRIAL_TOKENS):
            matcher.fill_next_token_bitmask(bits_1B)
            allowed = np.flatnonzero(np.unpackbits(bits_1B.view(np.uint8), bitorder="little")[: self._vocab])
            if not len(allowed):
                if written:
                    return
                raise NotCompiled("it allows no text that this model can write")
            matcher.accept_token(int(allowed[draw.randrange(len(allowed))]))
            if matcher.is_terminated():
                return
