"""Automata of regular expressions, over the bytes of UTF-8, and whether two match the same texts.

The subset construction is that of Rabin and Scott (1959), and states that no text tells apart become one by Moore's
algorithm (1956). It is Python, which other threads have to wait for, now and then for 5 ms; so what takes long can be
done in a process of its own: `python -m workers.grammar.automaton`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count, pairwise
from typing import Final

import msgspec

from workers.grammar.regex import Chars, Either, Node, Ranges, Repeat, Run, of_text, rules

__all__ = ["Automaton", "Branching", "automaton_of", "same_texts", "same_texts_beside", "work"]

Edge = tuple[int, int, int]
"""Edge of an automaton: from a byte to another, both included, and the state that they lead to."""


@dataclass(frozen=True)
class Automaton:
    """A deterministic one, whose state 0 is the first."""

    edges: tuple[tuple[Edge, ...], ...]
    """Edges of each state, in the order of the bytes."""
    ends: frozenset[int]

    def next(self, state: int, byte: int) -> int:
        """The state behind a byte; `NOWHERE` if there is none."""
        if state != NOWHERE:
            for low, high, target in self.edges[state]:
                if low <= byte <= high:
                    return target
        return NOWHERE

    def bounds(self, state: int) -> Iterator[int]:
        """The bytes with which the next state may become another one."""
        if state != NOWHERE:
            for low, high, _ in self.edges[state]:
                yield from (low, high + 1)


NOWHERE: Final = -1


@dataclass(frozen=True)
class Branching:
    """An automaton that may be in several states at once."""

    edges: Sequence[Sequence[Edge]]
    """Edges of each state."""
    free: Sequence[Sequence[int]]
    """States that each state leads to without a byte."""
    first: int
    ends: Sequence[int]

    def closed(self, states: Iterable[int]) -> frozenset[int]:
        """Return the states with all those that they lead to without a byte."""
        found, left = set(states), list(states)
        while left:
            for state in self.free[left.pop()]:
                if state not in found:
                    found.add(state)
                    left.append(state)
        return frozenset(state for state in found if self.edges[state] or state in self.ends)


def work(node: Node) -> int:
    """Ranges of characters in an expression, repetitions written out, and four at least for each character: what an
    automaton costs grows with it."""
    match node:
        case Chars(ranges):
            return max(len(ranges), 4)
        case Run(parts) | Either(parts):
            return sum(map(work, parts))
        case Repeat(part, least, most):
            return work(part) * max(least, most or 0, 1)
    return 1


def automaton_of(node: Node, most_states: int) -> Automaton | None:
    """The smallest one; None where it has more states, or four times as many on the way there."""
    made = _determined(_Writer(node).done(), 4 * most_states)
    if made is None:
        return None
    smallest = _smallest(made)
    return smallest if len(smallest.edges) <= most_states else None


def same_texts(node: Node, other: Branching, most_states: int) -> bool:
    """Whether an expression and an automaton match the same texts. False, too, where the expression has no automaton of
    so many states, and where the other one has states from which no text is completed."""
    automaton = automaton_of(node, most_states)
    if automaton is None:
        return False
    first = 0, other.closed([other.first])
    seen, left = {first}, [first]
    while left:
        mine, theirs = left.pop()
        if (mine in automaton.ends) == theirs.isdisjoint(other.ends):
            return False
        edges = [edge for state in theirs for edge in other.edges[state]]
        bounds = {bound for low, high, _ in edges for bound in (low, high + 1)}
        for byte in bounds.union(automaton.bounds(mine)):
            reached = other.closed({target for low, high, target in edges if low <= byte <= high})
            state = automaton.next(mine, byte), reached
            if (state[0] == NOWHERE) != (not reached):  # from every state of ours a text can be completed
                return False
            if reached and state not in seen:
                seen.add(state)
                left.append(state)
    return True


def same_texts_beside(node: Node, other: Branching, most_states: int) -> bool:
    """Compare as `same_texts` does, while other threads run. RuntimeError when the other process fails."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    asked = rules(node), other.edges, other.free, other.first, other.ends, most_states
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        input=msgspec.json.encode(asked),
        capture_output=True,
    )
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()[-1000:]
        raise RuntimeError(f"an expression could not be looked at: exit status {done.returncode}: {said}")
    return bool(msgspec.json.decode(done.stdout))


# From an expression to an automaton that branches, from that to one that does not


class _Writer:
    """Makes an automaton that branches of an expression (Thompson, 1968)."""

    def __init__(self, node: Node) -> None:
        self.edges: list[list[Edge]] = []
        self.free: list[list[int]] = []
        self.first = self._state()
        self.last = self._behind(node, self.first)

    def done(self) -> Branching:
        """Return the automaton that was built."""
        return Branching(self.edges, self.free, self.first, (self.last,))

    def _state(self) -> int:
        self.edges.append([])
        self.free.append([])
        return len(self.edges) - 1

    def _behind(self, node: Node, begin: int) -> int:
        """The state behind a node that begins at a state. Nothing leads back to that state, and nothing on from the
        other."""
        match node:
            case Chars(ranges):
                end = self._state()
                states = {0: begin, -1: end}
                for source, low, high, target in _steps(ranges):
                    for state in (source, target):
                        if state not in states:
                            states[state] = self._state()
                    self.edges[states[source]].append((low, high, states[target]))
                return end
            case Run(parts):
                for part in parts:
                    begin = self._behind(part, begin)
                return begin
            case Either(options):
                end = self._state()
                for option in options:
                    self.free[self._behind(option, self._free(begin))].append(end)
                return end
            case Repeat(part, least, most):
                for _ in range(least):
                    begin = self._behind(part, begin)
                end = self._state()
                self.free[begin].append(end)
                if most is None:
                    around = self._free(begin)
                    behind = self._behind(part, self._free(around))
                    self.free[behind] += (around, end)
                else:
                    for _ in range(most - least):
                        begin = self._behind(part, self._free(begin))
                        self.free[begin].append(end)
                return end
        raise AssertionError(f"{node} has no place in an automaton")

    def _free(self, begin: int) -> int:
        state = self._state()
        self.free[begin].append(state)
        return state


def _determined(branching: Branching, most: int) -> Automaton | None:
    """Make the automaton deterministic; None if it then has more than `most` states."""
    first = branching.closed([branching.first])
    number, left = {first: 0}, [first]
    edges: list[tuple[Edge, ...]] = []
    for states in left:  # grows meanwhile
        if len(number) > most:
            return None
        out = []
        for low, high, targets in _apart([edge for state in states for edge in branching.edges[state]]):
            reached = branching.closed(targets)
            if reached not in number:
                number[reached] = len(number)
                left.append(reached)
            out.append((low, high, number[reached]))
        edges.append(tuple(out))
    return Automaton(
        tuple(edges), frozenset(n for states, n in number.items() if not states.isdisjoint(branching.ends))
    )


def _apart(edges: list[Edge]) -> Iterator[tuple[int, int, frozenset[int]]]:
    """Edges that overlap, cut into such as do not."""
    bounds = sorted({bound for low, high, _ in edges for bound in (low, high + 1)})
    for low, behind in pairwise(bounds):
        targets = frozenset(target for first, last, target in edges if first <= low <= last)
        if targets:
            yield low, behind - 1, targets


def _smallest(automaton: Automaton) -> Automaton:
    """States that no text tells apart become one."""
    group = [int(state in automaton.ends) for state in range(len(automaton.edges))]
    while True:
        number: dict[object, int] = {}
        finer = []
        for state, edges in enumerate(automaton.edges):
            sign = group[state], tuple(_joined((low, high, group[target]) for low, high, target in edges))
            finer.append(number.setdefault(sign, len(number)))
        same = len(number) == len(set(group))
        group = finer
        if same:
            break
    edges_of = {group[state]: edges for state, edges in enumerate(automaton.edges)}
    joined = [
        _joined((low, high, group[target]) for low, high, target in edges_of[state]) for state in sorted(edges_of)
    ]
    return Automaton(tuple(map(tuple, joined)), frozenset(group[state] for state in automaton.ends))


def _joined(edges: Iterable[Edge]) -> list[Edge]:
    """Sort edges by their bytes, and join those side by side that lead to the same state."""
    joined: list[Edge] = []
    for low, high, target in sorted(edges):
        if joined and joined[-1][1] == low - 1 and joined[-1][2] == target:
            joined[-1] = joined[-1][0], high, target
        else:
            joined.append((low, high, target))
    return joined


# Characters as bytes

_LENGTHS: Final = ((0x7F, 1), (0x7FF, 2), (0xFFFF, 3), (0x10FFFF, 4))
"""The last code point that UTF-8 writes in so many bytes."""


@cache
def _steps(ranges: Ranges) -> tuple[tuple[int, int, int, int], ...]:
    """An automaton of the bytes of one character: from which state, by which bytes, to which. 0 is the first, -1 is
    behind the character. What follows is shared."""
    after: dict[tuple[tuple[int, int], ...], int] = {}
    steps: dict[tuple[int, int, int, int], None] = {}
    number = count(1)
    for sequence in (sequence for low, high in ranges for sequence in _sequences(low, high)):
        source = 0
        for place, (low, high) in enumerate(sequence):
            rest = sequence[place + 1 :]
            if rest and rest not in after:
                after[rest] = next(number)
            target = after[rest] if rest else -1
            steps[source, low, high, target] = None
            source = target
    return tuple(steps)


def _sequences(low: int, high: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Ranges of bytes, one behind the other, that together write exactly these code points; none are surrogates."""
    for last, length in _LENGTHS:
        if low <= min(high, last):
            yield from _of_length(low, min(high, last), length - 1)
            low = last + 1


def _of_length(low: int, high: int, places: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the byte ranges of code points that all have `places` bytes after the first."""
    for place in range(1, places + 1):
        size = 1 << 6 * place
        # From a code point that is not at the beginning of a block, to the block's end; the rest likewise.
        if low // size != high // size:
            if low % size:
                yield from _of_length(low, low | size - 1, places)
                yield from _of_length((low | size - 1) + 1, high, places)
                return
            if high % size != size - 1:
                yield from _of_length(low, high // size * size - 1, places)
                yield from _of_length(high // size * size, high, places)
                return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))


if __name__ == "__main__":
    _expression, _edges, _free, _first, _ends, _most = msgspec.json.decode(sys.stdin.buffer.read())
    _same = same_texts(of_text(_expression), Branching(_edges, _free, _first, _ends), _most)
    sys.stdout.buffer.write(msgspec.json.encode(_same))
