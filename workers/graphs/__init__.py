"""CUDA graphs of steps, and the proof that a replay computes what eager computes.

Which graphs there are: `ladder`. Decode steps, and what mixed steps have of graphs (`segments`), are run first so that
nothing is left to compile (`rehearsal`), then captured (`capture`, by `record`, under `guard`); `stats` counts their
use. The proof: `selftest` for decode steps, on the ground that `scene` prepares, `segment_proof` and `ending_proof` for
mixed steps; `proof` for a whole replica, and `report` is what it says."""
