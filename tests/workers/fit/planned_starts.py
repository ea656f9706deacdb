"""Small models with the published models' heads, whose starts are planned without a GPU, and measured on one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quantized_checkpoints import FP8_NAMES, quantize, quantize_headers
from tiny_models import write_tiny, write_tiny_headers

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 65536,
    "num_hidden_layers": 8,
    "num_key_value_heads": 16,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
INDEXER: Final = {"q_lora_rank": 256, "index_n_heads": 16, "index_head_dim": 128, "index_topk": 2048}


@dataclass(frozen=True)
class PlannedStart:
    """Planned start of a model of `kind`, with weights in `form` if there is one."""

    kind: str
    form: str
    settings: dict[str, Any]
    measured: int
    """Bytes that graphs were found to need on an H200 (`Warmed.bytes`)."""

    def write(self, folder: Path, *, headers: bool = False) -> dict[str, Any]:
        """The checkpoint, in `folder`; the settings of an `EngineConfig` that starts it. `headers`: without numbers."""
        write, quantize_written = (write_tiny_headers, quantize_headers) if headers else (write_tiny, quantize)
        write(folder, self.kind, **SIZES, **(INDEXER if self.kind == "v32" else {}))
        if self.form:
            quantize_written(folder, self.form, FP8_NAMES)
        return {"model": str(folder), "max_rows": 512, "token_budget": 2048, "selftest": False, **self.settings}


STARTS: Final = {
    "bf16": PlannedStart("v2", "", {"width": 1}, 559752192),
    "fp8": PlannedStart("v3", "fp8", {"kv_cache_dtype": "fp8"}, 763610368),
    "sparse": PlannedStart("v32", "fp8", {"kv_cache_dtype": "fp8", "width": 2}, 1119796992),
}
