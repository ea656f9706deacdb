"""Stop strings found in text that arrives piece by piece.

One Aho-Corasick automaton (Aho and Corasick, 1975) holds all stop strings of a request. Its state after a character is
the longest suffix of the text that begins a stop string: exactly what must be held back. The result depends on the text
alone, never on how it was cut: the stop string that *ends* first wins, among those that end together the longest.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class _Automaton:
    stops: tuple[str, ...]
    step: list[dict[str, int]]
    fail: list[int]
    depth: list[int]
    match: list[int]
    """Length of the longest stop string that ends in this state, 0 for none."""
    first: re.Pattern[str] = field(repr=False)
    """Finds a character that begins a stop string."""


@lru_cache(maxsize=256)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    step: list[dict[str, int]] = [{}]
    fail, depth, match = [0], [0], [0]
    for stop in stops:
        state = 0
        for char in stop:
            if char not in step[state]:
                step[state][char] = len(step)
                step.append({})
                fail.append(0)
                depth.append(depth[state] + 1)
                match.append(0)
            state = step[state][char]
        match[state] = len(stop)
    queue = deque(step[0].values())
    while queue:  # breadth first: a state's fail link is shallower, so it is complete
        state = queue.popleft()
        for char, child in step[state].items():
            back = fail[state]
            while back and char not in step[back]:
                back = fail[back]
            fail[child] = step[back].get(char, 0)
            # The path spells the longest match if it is a stop string itself.
            match[child] = match[child] or match[fail[child]]
            queue.append(child)
    first = re.compile("[" + "".join(re.escape(char) for char in sorted(step[0])) + "]")
    return _Automaton(stops, step, fail, depth, match, first)


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
        machine, state, begin = self._automaton, self._state, 0
        if not state:
            start = machine.first.search(text)
            if start is None:
                return text
            begin = start.start()
        step, fail = machine.step, machine.fail
        buffer = self._held + text
        offset = len(self._held)
        for index in range(begin, len(text)):
            char = text[index]
            while state and char not in step[state]:
                state = fail[state]
            state = step[state].get(char, 0)
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
