"""What routers are told of pages on disk."""

from __future__ import annotations

import pytest
from disk_replica import filled, tiered
from workload import tokens

from kernels.page import PAGE_TOKENS
from workers.protocol.request import page_keys, unpack_keys
from workers.scheduler.disk_index import DiskIndex

pytestmark = pytest.mark.usefixtures("short_prompts_are_worth_a_load")


def test_the_report_names_what_is_on_disk() -> None:
    replica = tiered(tier_sample=4, host_pages=10)
    asked = filled(replica)
    keys = set(unpack_keys(replica.scheduler.stats().disk_keys))
    assert {page_keys(prompt)[8][:8] for prompt in asked[2:]} <= keys
    assert len(keys) <= 4


def test_an_index_reports_ends_and_a_grid_and_no_more_than_it_may() -> None:
    index = DiskIndex(200, reported=8)
    assert [index.settle(150), index.settle(150)] == [False, True]
    chains = [page_keys(tokens(40 * PAGE_TOKENS, seed=seed)) for seed in range(4)]
    for keys in chains:
        parent = -1
        for number, key in enumerate(keys, 1):
            slot = index.take()
            index.put(slot, key, parent, number, 0, complete=True)
            parent = slot
        index.use_ends([parent])
    report = index.report()
    assert len(report) == len(set(report)) == 8
    assert {keys[-1] for keys in chains} <= set(report)
    assert {keys[number - 1] for keys in chains[2:] for number in (16, 32)} <= set(report)


def test_sessions_on_disk_are_all_reported_before_any_of_the_grid() -> None:
    """Where a session has ended matters most: half of a report was for the grid, however many sessions there were."""
    index = DiskIndex(1000, reported=8)
    assert index.settle()
    ends = []
    for number in range(10):
        parent = -1
        for page, key in enumerate(page_keys(tokens(20 * PAGE_TOKENS, seed=number)), 1):
            slot = index.take()
            index.put(slot, key, parent, page, 0, complete=True)
            parent = slot
        index.use_ends([parent])
        ends.append(key)
    assert index.report() == ends[:1:-1]
    index.use(index.slot(ends[0]))
    assert index.report() == [ends[0], *ends[:2:-1]]
