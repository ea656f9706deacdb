"""The clock of those who watch whether others live."""

from workers.channel.heartbeats import MOST_BETWEEN_LOOKS_S, AwakeClock


def test_what_passes_between_two_looks_counts_up_to_a_bound() -> None:
    now = 100.0
    clock = AwakeClock(lambda: now)
    assert clock.look() == clock.time == 0.0
    now += MOST_BETWEEN_LOOKS_S / 2
    assert clock.look() == MOST_BETWEEN_LOOKS_S / 2
    now += 3600.0  # this process, and with it those that it watches, did not run
    assert clock.look() == clock.time == MOST_BETWEEN_LOOKS_S * 1.5
    for _ in range(10):
        now += MOST_BETWEEN_LOOKS_S
        clock.look()
    assert clock.time == MOST_BETWEEN_LOOKS_S * 11.5
