"""What a model is, read from the `config.json` of a Hugging Face checkpoint. Nothing from the checkpoint is executed.

Every value that would change the computation is either understood or refused with an error that names it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from workers.fit import quantization, unsupported_quantization

if TYPE_CHECKING:
    from kernels.moe import Scoring

ModelType = Literal["deepseek_v2", "deepseek_v3"]

MODEL_TYPES: Final[dict[str, ModelType]] = {
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",  # the same architecture under a name of its own
}


class ConfigError(ValueError):
    """The checkpoint's config.json is unreadable, incomplete or asks for something that is not supported."""


@dataclass(frozen=True)
class Yarn:
    """Context extension by interpolating slow frequencies (Peng et al., "YaRN", 2023)."""

    factor: float
    original_positions: int
    """Context the model was trained on before the extension."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """Rotations over the original context above which a frequency is kept, and below which it is interpolated."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    """Strengths of the two attention-temperature corrections; 0 means not given."""
    attention_factor: float | None = None
    """Scale of cosines and sines, when the config states it instead of leaving it to the formula."""
    truncate: bool = True
    """Round the bounds of the interpolated band to whole dimensions."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding."""

    theta: float
    interleaved: bool
    """Pairs are features (2i, 2i + 1) in the checkpoint's weights; else (i, i + half)."""
    yarn: Yarn | None = None


@dataclass(frozen=True)
class Routing:
    """How tokens choose experts; the field meanings are those of `kernels.moe.route`."""

    experts: int
    experts_per_token: int
    shared_experts: int
    scoring: Scoring
    bias: bool
    groups: int
    top_groups: int
    normalize: bool
    scale: float

    def __post_init__(self) -> None:
        if self.experts % self.groups:
            raise ConfigError(f"n_routed_experts = {self.experts} is not divisible by n_group = {self.groups}")
        if not 1 <= self.top_groups <= self.groups:
            raise ConfigError(f"topk_group = {self.top_groups} must lie between 1 and n_group = {self.groups}")
        size = self.experts // self.groups
        if self.groups > 1 and self.bias and size < 2:
            raise ConfigError(
                f"n_group = {self.groups} leaves {size} expert a group; groups are ranked by their two best"
            )
        if not 1 <= self.experts_per_token <= size * self.top_groups:
            raise ConfigError(
                f"num_experts_per_tok = {self.experts_per_token} must lie between 1 and the {size * self.top_groups} "
                "experts of the chosen groups"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and choices of one DeepSeek-family model. Counts are of the whole model, not of a rank's share."""

    model_type: ModelType
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of the dense layers."""
    moe_intermediate_size: int
    """Of one expert."""
    num_layers: int
    num_dense_layers: int
    """The first layers, which have no experts."""
    draft_layers: int
    """Multi-token-prediction layers the config declares (0 or 1); the checkpoint may lack them all the same."""
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    routing: Routing
    rope: Rope
    rms_norm_eps: float
    max_positions: int
    tied_embeddings: bool
    eos_ids: tuple[int, ...]
    """End-of-sequence ids: of generation_config.json where that names some."""

    @property
    def qk_head_dim(self) -> int:
        """Features of one head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Features cached a token and layer: the latent and the roped key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def is_dense(self, layer: int) -> bool:
        """Whether a layer's feed-forward part has no experts."""
        return layer < self.num_dense_layers

    @staticmethod
    def load(folder: str | Path) -> ModelConfig:
        """Read `folder`/config.json, and end-of-sequence ids from a generation_config.json beside it; `ConfigError`
        says what is wrong with them."""
        path, generation = Path(folder) / "config.json", Path(folder) / "generation_config.json"
        if not path.exists():
            raise ConfigError(f"there is no config.json in {folder}: give the folder of a Hugging Face checkpoint")
        values = _json_object(path)
        if generation.exists() and (ids := _json_object(generation).get("eos_token_id")) is not None:
            values["eos_token_id"] = ids
        return ModelConfig.parse(values)

    @staticmethod
    def parse(values: dict[str, Any]) -> ModelConfig:
        """Read the values of a config.json; `ConfigError` names the field at fault."""
        fields = _Fields(values)
        name = fields.text("model_type")
        if name not in MODEL_TYPES:
            raise _unsupported("model_type", name, MODEL_TYPES)
        model_type = MODEL_TYPES[name]
        _refuse_unsupported(fields)
        rope_dim = fields.count("qk_rope_head_dim")
        for even in ("qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank", "q_lora_rank"):
            if fields.values.get(even) is not None and fields.count(even) % 2:
                raise ConfigError(f"config.json: {even} = {fields.values[even]} is not supported; it must be even")
        draft_layers = fields.count("num_nextn_predict_layers", fields.count("num_mtp_layers", 0, least=0), least=0)
        if draft_layers > 1:
            raise _unsupported("num_nextn_predict_layers", draft_layers, (0, 1))
        if draft_layers and model_type != "deepseek_v3":
            raise ConfigError(f"num_nextn_predict_layers = {draft_layers} is not supported for model_type {name!r}")
        vocab_size = fields.count("vocab_size")
        return ModelConfig(
            model_type=model_type,
            vocab_size=vocab_size,
            hidden_size=fields.count("hidden_size"),
            intermediate_size=fields.count("intermediate_size"),
            moe_intermediate_size=fields.count("moe_intermediate_size"),
            num_layers=fields.count("num_hidden_layers"),
            num_dense_layers=min(fields.count("first_k_dense_replace", 0, least=0), fields.count("num_hidden_layers")),
            draft_layers=draft_layers,
            num_heads=fields.count("num_attention_heads"),
            q_lora_rank=fields.count("q_lora_rank") if values.get("q_lora_rank") is not None else None,
            kv_lora_rank=fields.count("kv_lora_rank"),
            qk_nope_head_dim=fields.count("qk_nope_head_dim"),
            qk_rope_head_dim=rope_dim,
            v_head_dim=fields.count("v_head_dim"),
            routing=_routing(fields, model_type),
            rope=_rope(fields, model_type),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            max_positions=fields.count("max_position_embeddings"),
            tied_embeddings=fields.flag("tie_word_embeddings", False),
            eos_ids=fields.token_ids("eos_token_id", vocab_size),
        )


def _json_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return values


class _Fields:
    """Typed access to the values of a config.json, with errors that name the field."""

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"config.json lacks {self.prefix}{name}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise ConfigError(f"config.json: {self.prefix}{name} must be a string, not {value!r}")
        return value

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"config.json: {self.prefix}{name} must be an integer of at least {least}, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"config.json: {self.prefix}{name} must be a number, not {value!r}")
        return float(value)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One id, a list of them, or none."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            raise ConfigError(
                f"{self.prefix}{name} must be token ids below vocab_size = {vocab_size}, not {value!r} (in "
                "config.json, or generation_config.json where that has it)"
            )
        return tuple(ids)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {self.prefix}{name} must be true or false, not {value!r}")
        return value


def _unsupported(field: str, value: object, supported: Any) -> ConfigError:
    return ConfigError(
        f"config.json: {field} = {value!r} is not supported; supported: {', '.join(map(repr, supported))}"
    )


def _refuse_unsupported(fields: _Fields) -> None:
    if kind := quantization(fields.values):
        raise ConfigError(f"config.json: quantization_config: {unsupported_quantization(kind)}")
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name, False):
            raise _unsupported(name, True, (False,))
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise _unsupported("hidden_act", activation, ("silu",))
    if (every := fields.count("moe_layer_freq", 1)) != 1:
        raise _unsupported("moe_layer_freq", every, (1,))


def _routing(fields: _Fields, model_type: ModelType) -> Routing:
    v3 = model_type == "deepseek_v3"
    method = fields.text("topk_method", "noaux_tc" if v3 else "greedy")
    methods = ("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")
    if method not in methods:
        raise _unsupported(f"topk_method ({model_type})", method, methods)
    scoring: Scoring = "sigmoid" if v3 else "softmax"
    if (given := fields.text("scoring_func", scoring)) != scoring:
        raise _unsupported(f"scoring_func ({model_type})", given, (scoring,))
    normalize = fields.flag("norm_topk_prob", v3)
    if normalize and not v3:
        # The published V2 code then drops routed_scaling_factor, others normalize and scale, others ignore the field.
        raise _unsupported("norm_topk_prob (deepseek_v2)", True, (False,))
    grouped = method != "greedy"
    return Routing(
        experts=fields.count("n_routed_experts"),
        experts_per_token=fields.count("num_experts_per_tok"),
        shared_experts=fields.count("n_shared_experts", 0, least=0),
        scoring=scoring,
        bias=v3,
        groups=fields.count("n_group", 1) if grouped else 1,
        top_groups=fields.count("topk_group", 1) if grouped else 1,
        normalize=normalize,
        scale=fields.number("routed_scaling_factor", 1.0),
    )


def _rope(fields: _Fields, model_type: ModelType) -> Rope:
    given = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"config.json: rope_scaling must be an object, not {given!r}")
    rope = _Fields(given, "rope_scaling.")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported("rope_scaling.partial_rotary_factor", given["partial_rotary_factor"], (1.0,))
    # V2's published code knows interleaved pairs only; for V3 transformers lets the config say otherwise.
    interleaved = model_type == "deepseek_v2" or fields.flag("rope_interleave", True)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return Rope(theta, interleaved)
    if kind != "yarn":
        raise _unsupported("rope_scaling.type", kind, ("default", "yarn"))
    limit = fields.count("max_position_embeddings")
    original = fields.count("original_max_position_embeddings", rope.count("original_max_position_embeddings", limit))
    yarn = Yarn(
        factor=rope.number("factor"),
        original_positions=original,
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        mscale=rope.number("mscale", 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
        attention_factor=rope.number("attention_factor") if given.get("attention_factor") is not None else None,
        truncate=rope.flag("truncate", True),
    )
    return Rope(theta, interleaved, yarn)
