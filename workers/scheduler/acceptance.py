"""Watches how many drafts stand, and turns drafting off while they cost more than they give."""

from __future__ import annotations

import logging

from workers.scheduler.config import SchedulerConfig

logger = logging.getLogger(__name__)


class AcceptanceWatch:
    """Decides width and drafts of the next plan.

    Drafts that a step makes are verified in the next one, so turning drafting on takes two plans: the first drafts
    without verifying. Widths are the same for all rows of a step.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._most = config.width - 1
        self._floor = config.acceptance_floor
        self._window = config.acceptance_window
        self._retry = config.acceptance_retry
        self._drafts = self._most
        self._made = self._most
        self._offered = 0
        self._accepted = 0
        self._idle_steps = 0
        self._warned = False

    @property
    def given_up(self) -> bool:
        """Whether drafting is off because too few drafts stood."""
        return self._drafts < self._most

    @property
    def width(self) -> int:
        """Width of the next plan: what the last one made drafts for, or 1 while drafting is off."""
        return 1 + min(self._made, self._drafts)

    @property
    def drafts(self) -> int:
        """Drafts that the next plan makes."""
        return self._drafts

    def planned(self) -> None:
        """The next plan was made, with `width` and `drafts`."""
        self._made = self._drafts
        if self.given_up and self._retry:
            self._idle_steps += 1
            if self._idle_steps >= self._retry:
                self._drafts, self._idle_steps = self._most, 0

    def observe(self, offered: int, accepted: int) -> None:
        """Figures of an applied step. What was on its way when drafts were given up is no part of the next window."""
        if not offered or self.given_up:
            return
        self._offered += offered
        self._accepted += accepted
        if self._offered < self._window:
            return
        share = self._accepted / self._offered
        if share < self._floor:
            logger.log(
                logging.INFO if self._warned else logging.WARNING,
                "drafting is off: %.1f%% of the last %d drafts were accepted, below the floor of %.1f%%",
                100 * share,
                self._offered,
                100 * self._floor,
            )
            self._drafts, self._warned = 0, True
        self._offered = self._accepted = 0
