"""Sizes of the tiles of `w4a8`."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

STEP = gl.constexpr(128)
"""Input features of a stage, and of a scale of the inputs."""
CHUNK = gl.constexpr(64)
"""Pairs of a product, and rows of weights that come at a time."""
CHUNKS = gl.constexpr(4)
"""Chunks of a tile."""
BLOCK = gl.constexpr(128)
"""Weight rows of a product."""
