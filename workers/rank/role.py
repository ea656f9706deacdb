"""What an engine is to others of the same replica."""

from __future__ import annotations

from typing import Literal

Role = Literal["alone", "primary", "standby"]
"""primary: it serves, and another engine may stand by for it. standby: it stands by, until it takes the place of the
one that serves. alone: neither."""
