"""Stop strings found in text that arrives piece by piece.

One Aho-Corasick automaton (Aho and Corasick, 1975) holds all stop strings of a request. Its state after a character is
the longest suffix of the text that begins a stop string: exactly what must be held back. The result depends on the text
alone, never on how it was cut: the stop string that *ends* first wins, among those that end together the longest.
"""

from __future__ import annotations

import re
from array import array
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class _Automaton:
    """A trie of the stop strings, whose states have numbers in the order of their making. Nearly all of its edges lead
    to the next number, and are kept as no more than a character: requests may bring thousands of them."""

    chain: list[str]
    """Characters that lead from each state to the next number; "" if none does."""
    branches: dict[int, dict[str, int]]
    """States that other characters lead to, by state."""
    fail: array[int]
    depth: array[int]
    match: array[int]
    """Length of the longest stop string that ends in this state, 0 for none."""
    first: re.Pattern[str] = field(repr=False)
    """Finds a character that begins a stop string."""

    def follow(self, state: int, char: str) -> int:
        """The state that `char` leads to, 0 for none."""
        if self.chain[state] == char:
            return state + 1
        branches = self.branches.get(state)
        return branches.get(char, 0) if branches is not None else 0

    def onward(self, state: int, char: str) -> int:
        """The state after `char`: where the longest suffix that goes on with it leads."""
        while not (after := self.follow(state, char)) and state:
            state = self.fail[state]
        return after


@lru_cache(maxsize=256)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    chain = [""]
    branches: dict[int, dict[str, int]] = {}
    fail, depth, match = array("I", [0]), array("I", [0]), array("I", [0])
    first = re.compile("[" + "".join(re.escape(char) for char in sorted({stop[0] for stop in stops})) + "]")
    machine = _Automaton(chain, branches, fail, depth, match, first)
    same: dict[str, str] = {}
    for stop in stops:
        state = 0
        for char in stop:
            after = machine.follow(state, char)
            if not after:
                after = len(chain)
                if after == state + 1:
                    chain[state] = same.setdefault(char, char)
                else:
                    branches.setdefault(state, {})[char] = after
                chain.append("")
                fail.append(0)
                depth.append(depth[state] + 1)
                match.append(0)
            state = after
        match[state] = len(stop)
    queue = deque([0])
    while queue:  # breadth first: a state's fail link is shallower, so it is complete
        state = queue.popleft()
        edges = [*branches.get(state, {}).items()]
        if chain[state]:
            edges.append((chain[state], state + 1))
        for char, child in edges:
            if state:
                fail[child] = machine.onward(fail[state], char)
            # The path spells the longest match if it is a stop string itself.
            match[child] = match[child] or match[fail[child]]
            queue.append(child)
    return machine


class StopMatcher:
    """Passes text on, less what may be or is a stop string."""

    __slots__ = ("_automaton", "_held", "_include", "_state", "matched")

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        """`stops` are not empty, none of them an empty string. With `include` the text ends with the stop string."""
        if not stops or not all(stops):
            raise ValueError("stop strings must not be empty")
        self._automaton = _automaton(stops)
        self._include = include
        self._held = ""
        self._state = 0
        self.matched: str | None = None
        """The stop string that was found; nothing may be fed after it."""

    def feed(self, text: str) -> str:
        """Add `text`; returns what may be shown now. Sets `matched` and drops what follows when a stop string ends."""
        machine, chain, state, begin = self._automaton, self._automaton.chain, self._state, 0
        if not state:
            start = machine.first.search(text)
            if start is None:
                return text
            begin = start.start()
        buffer = self._held + text
        offset = len(self._held)
        for index in range(begin, len(text)):
            char = text[index]
            state = state + 1 if chain[state] == char else machine.onward(state, char)
            if length := machine.match[state]:
                end = offset + index + 1
                self.matched = buffer[end - length : end]
                self._held, self._state = "", 0
                return buffer[: end if self._include else end - length]
        self._state = state
        hold = machine.depth[state]
        cut = len(buffer) - hold
        self._held = buffer[cut:]
        return buffer[:cut]

    def flush(self) -> str:
        """The text has ended: what was held back is no stop string after all."""
        held, self._held, self._state = self._held, "", 0
        return held
