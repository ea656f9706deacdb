"""Snapshots of rings beside entries of the prefix cache: which are found, and which make room."""

from __future__ import annotations

import pytest
from workload import config

from workers.scheduler.prefix_summary import Entry
from workers.scheduler.snapshots import Snapshots


def chain(pages: int) -> list[Entry]:
    entries: list[Entry] = []
    for page in range(1, pages + 1):
        entries.append(Entry(bytes([page]), b"", entries[-1] if entries else None, page))
    return entries


def made(snapshots: Snapshots, entry: Entry) -> int:
    snapshot = snapshots.take()
    assert snapshot is not None
    snapshots.attach(snapshot, entry)
    return snapshot.number


def test_a_prompt_begins_behind_the_last_snapshot() -> None:
    snapshots, found = Snapshots(4, 128), chain(7)
    assert snapshots.usable(found) == 0
    made(snapshots, found[1])
    made(snapshots, found[3])
    assert [snapshots.usable(found[:pages]) for pages in range(8)] == [0, 0, 2, 2, 4, 4, 4, 4]
    assert [snapshots.boundary(tokens) for tokens in (127, 128, 300)] == [0, 128, 256]


def test_the_least_recently_used_makes_room() -> None:
    snapshots, found = Snapshots(2, 64), chain(3)
    first, second = made(snapshots, found[0]), made(snapshots, found[1])
    assert snapshots.use(found[0]).number == first
    assert made(snapshots, found[2]) == second
    assert [snapshots.usable([entry]) for entry in found] == [1, 0, 1]


def test_none_is_taken_while_all_are_being_written() -> None:
    snapshots, (entry, other) = Snapshots(1, 64), chain(2)
    snapshot = snapshots.take()
    assert snapshot is not None
    assert snapshots.take() is None
    snapshots.attach(snapshot, None)  # its pages are not cached
    assert (snapshot.number, snapshots.held) == (-1, 0)
    made(snapshots, entry)
    late = snapshots.take()
    assert late is not None
    assert snapshots.held == 0
    snapshots.attach(late, other)
    snapshots.forget([entry, other])
    snapshots.drop(late)  # it is gone already, and its memory is given back once
    assert snapshots.take() is not None
    assert snapshots.take() is None


def test_the_first_of_two_stays() -> None:
    snapshots, (entry,) = Snapshots(2, 64), chain(1)
    first = made(snapshots, entry)
    assert made(snapshots, entry) == -1
    assert snapshots.use(entry).number == first
    assert snapshots.take() is not None


def test_host_memory_keeps_no_snapshots() -> None:
    """Pages would be loaded for prompts that cannot begin with them."""
    with pytest.raises(ValueError, match="host_pages keeps no snapshots"):
        config(snapshots=2, host_pages=8)
