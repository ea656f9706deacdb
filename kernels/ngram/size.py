"""How many tokens are looked for, and how many places a program looks at."""

from __future__ import annotations

from typing import Final

LEAST: Final = 2
"""Fewest newest tokens that are looked for: a single one stands nearly everywhere, and says little."""
MOST: Final = 4
"""Most of them."""
BLOCK: Final = 2048
"""Places that one program looks at."""
