"""Usage of a rank's captured graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from workers.protocol.messages import Figures


@dataclass
class GraphStats:
    """Counters since start, and what the capture cost."""

    replays: int = 0
    """Steps that were one replay, or two with masks filled between."""
    rows: int = 0
    """Decode rows of the replayed steps."""
    padded_rows: int = 0
    """Rows that filled their buckets up."""
    mixed_steps: int = 0
    """Steps with prefill rows whose segments were replayed."""
    tokens: int = 0
    """Tokens of the mixed steps."""
    padded_tokens: int = 0
    """Tokens that filled their buckets up."""
    eager: Counter[str] = field(default_factory=Counter)
    """Steps of which nothing was replayed, by reason."""
    portions_left: int = 0
    """Portions of graphs that are still to be captured and proven."""
    capture_seconds: float = 0.0
    bytes: int = 0
    """Device memory that the graphs and their scratch took."""
    step_reads: Mapping[str, float] = field(default_factory=dict)
    """Least bytes that a decode step reads; see `workers.rank.step_reads`."""

    def figures(self) -> Figures:
        """Return the figures for the scheduler; another thread than the one that counts may call it."""
        return {
            "graph_replays": {"": self.replays},
            "graph_rows": {"": self.rows},
            "graph_padded_rows": {"": self.padded_rows},
            "graph_mixed_steps": {"": self.mixed_steps},
            "graph_tokens": {"": self.tokens},
            "graph_padded_tokens": {"": self.padded_tokens},
            "graph_eager_steps": dict(self.eager),
            "graph_portions_left": {"": self.portions_left},
            "graph_capture_seconds": {"": self.capture_seconds},
            "graph_bytes": {"": self.bytes},
            **{name: {"": value} for name, value in self.step_reads.items()},
        }
