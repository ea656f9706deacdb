"""Captured decode steps: which there are (`ladder`), how they are captured safely (`capture`), and the proof that a
replay computes what eager computes (`selftest`)."""
