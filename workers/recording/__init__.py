"""Recorded step plans: written by the scheduler's process, and run again on a rank."""
