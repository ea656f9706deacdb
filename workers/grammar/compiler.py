"""Compiles grammars beside the steps, in threads of its own: xgrammar lets the interpreter go while it works."""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from workers.grammar.surrogates import SplitSurrogates
from workers.protocol.grammar import COMPILED_AT_ONCE, CompileGrammar, ForgetGrammar, Grammar, Kind
from workers.vocabulary.beside import text_of_tokens_beside

logger = logging.getLogger(__name__)

CACHE_BYTES: Final = 1 << 28
"""Of compiled grammars that nobody uses now."""
TRIAL_TOKENS: Final = 48
"""Tokens of a text that is written on trial: some grammars compile at once and then take for ever."""


class Compiled:
    """A grammar that is ready: matchers of it can be made."""

    def __init__(self, grammar: Grammar, handle: object, split: SplitSurrogates | None = None) -> None:
        """`split`: of the vocabulary, where it may have any."""
        self.grammar, self.handle, self.split = grammar, handle, split


class NotCompiled(ValueError):
    """Why a grammar cannot be used, for whoever sent it."""


class Compiler:
    """The grammars of a replica, on rank 0."""

    def __init__(
        self, folder: Path, vocab: int, eos_ids: tuple[int, ...], on_ready: Callable[[int, str], None]
    ) -> None:
        """`folder`: of the model, for its tokenizer. `on_ready` is told, in some other thread, of every ticket, and why
        its grammar cannot be used, if it cannot. Nothing is read, and no thread begun, before it is needed."""
        self._folder, self._vocab, self._eos_ids, self._on_ready = folder, vocab, eos_ids, on_ready
        self._asked: queue.SimpleQueue[tuple[int, Grammar] | None] = queue.SimpleQueue()
        self._ready: dict[int, Compiled] = {}
        self._forgotten: set[int] = set()
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._threads: list[threading.Thread] = []

    def prepare(self) -> None:
        """Begin to read the vocabulary now, beside whatever happens."""
        threading.Thread(target=self._open, name="grammar-vocabulary", daemon=True).start()

    def heed(self, message: CompileGrammar | ForgetGrammar) -> None:
        """Do what the scheduler says."""
        if isinstance(message, CompileGrammar):
            self.ask(message.ticket, message.grammar)
        else:
            self.forget(message.ticket)

    def ask(self, ticket: int, grammar: Grammar) -> None:
        """Have a grammar compiled."""
        if not self._threads:
            # Daemons: a compilation cannot be ended, and must not keep the process from ending.
            self._threads = [
                threading.Thread(target=self._work, name="grammar", daemon=True) for _ in range(COMPILED_AT_ONCE)
            ]
            for thread in self._threads:
                thread.start()
        self._asked.put((ticket, grammar))

    def forget(self, ticket: int) -> None:
        """Nobody will ask for it any more, ready or not."""
        with self._lock:
            if self._ready.pop(ticket, None) is None:
                self._forgotten.add(ticket)

    def ready(self, ticket: int) -> Compiled:
        """A grammar that is ready; KeyError for another one."""
        return self._ready[ticket]

    def close(self) -> None:
        """Compile no more; what is under way goes on until the process ends."""
        for _ in self._threads:
            self._asked.put(None)

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile a grammar here and now. NotCompiled."""
        from workers.grammar.build import GrammarError, build

        try:
            *compilers, split = self._open()
            compiler = compilers[grammar.kind in ("json", "json_schema")]
            compiled = Compiled(grammar, compiler.compile_grammar(build(grammar)), split)
            self._try(compiled)
        except GrammarError as error:
            raise NotCompiled(str(error)) from None
        return compiled

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            ticket, grammar = asked
            with self._lock:
                if ticket in self._forgotten:
                    self._forgotten.discard(ticket)
                    continue
            error = ""
            try:
                compiled = self.compile(grammar)
            except NotCompiled as wrong:
                error = str(wrong)
            except Exception as wrong:  # of whatever kind: it must not end the thread, and the request must hear
                logger.exception("a grammar cannot be compiled")
                error = f"it cannot be compiled: {wrong}"
            else:
                with self._lock:
                    if ticket not in self._forgotten:
                        self._ready[ticket] = compiled
            with self._lock:
                self._forgotten.discard(ticket)
            self._on_ready(ticket, error)

    def _open(self) -> tuple[Any, Any, SplitSurrogates]:
        with self._opening:
            return self._compilers

    @cached_property
    def _compilers(self) -> tuple[Any, Any, SplitSurrogates]:
        """For text, and for JSON; and what neither may write."""
        from workers.grammar.build import vocabulary_for
        from workers.grammar.library import xgr

        if not self._eos_ids:
            raise NotCompiled("this model has no end-of-sequence id, without which no text can be ended")
        table = text_of_tokens_beside(self._folder)
        if table is None:
            raise NotCompiled("this model has no tokenizer whose tokens are bytes of text")
        # Ids behind the tokenizer's, with which models pad their vocabulary, are no text either.
        table = (table + [b""] * (self._vocab - len(table)))[: self._vocab]

        def compiler(kind: Kind) -> Any:
            own = vocabulary_for(kind, table)
            info = xgr.TokenizerInfo(own, vocab_size=self._vocab, stop_token_ids=list(self._eos_ids))
            return xgr.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES // 2)

        return compiler("regex"), compiler("json"), SplitSurrogates(table, self._vocab)

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
