"""Rank: what it holds, how it runs step plans, and the process it lives in."""
