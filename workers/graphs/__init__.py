"""CUDA graphs of steps.

Decode steps, and what mixed steps have of graphs (`segments`), are run first so that nothing is left to compile
(`mixed_warm_up`), then captured (`capture`, by `record`, under `guard`); `stats` counts their use. The proof that a
replay computes what eager computes is in `workers.proof`."""
