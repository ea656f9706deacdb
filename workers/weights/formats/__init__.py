"""Storage formats of weight matrices: a file for each format, and the registry of those that a checkpoint may have.

Nothing here imports torch but inside of methods: reading a config.json must not.
"""

from workers.weights.formats.fp8_blocks import FP8_BLOCKS
from workers.weights.formats.int4_groups import INT4_GROUPS
from workers.weights.formats.mxfp4 import MXFP4
from workers.weights.formats.mxfp8 import MXFP8
from workers.weights.formats.plain import PLAIN
from workers.weights.formats.registry import FORMATS

__all__ = ["FORMATS", "FP8_BLOCKS", "INT4_GROUPS", "MXFP4", "MXFP8", "PLAIN"]
