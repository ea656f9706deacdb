"""Captured decode steps: which there are (`ladder`), how they are captured safely (`capture`), and the proof that a
replay computes what eager computes (`selftest`, on the ground that `scene` prepares; `proof` for a whole replica;
`report`: what it says)."""
