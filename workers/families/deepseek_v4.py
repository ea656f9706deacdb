"""DeepSeek V4 (2026), Flash and Pro: one entry of a token is key and value of all heads, attention to the newest tokens
and to compressed entries, residual streams that are mixed, experts by a token's id in the first layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from kernels.page import PAGE_TOKENS
from kernels.routing_rule import RoutingRule
from workers.families.family import Family
from workers.models.config import (
    CompressedLayer,
    Compression,
    ConfigError,
    Dspark,
    ModelConfig,
    ResidualStreams,
    Rope,
    Routing,
)
from workers.models.fields import Fields, read_rope
from workers.quantization import unsupported_quantization
from workers.weights.wanted import FP8_DTYPE, FP8_SCALES, MX_SCALES

if TYPE_CHECKING:
    from workers.models.model import Model
    from workers.parallel.group import Group
    from workers.weights.source import WeightSource

_WINDOW: Final = CompressedLayer(0)
_KINDS: Final = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""Kinds of layers as transformers calls them, by what `compress_ratios` says of them: it is a name where
`compress_rates` gives other numbers."""
_NAMES: Final = {
    r"^model\.embed_tokens\.": "embed.",
    r"^model\.norm\.": "norm.",
    r"^lm_head\.": "head.",
    r"^model\.layers\.\d+\.": "mtp.0.",
}
"""Beginnings of names in DeepSeek V3's checkpoints, and of those here. Of its layers only that which drafts is asked
for by such a name."""
_EXPERTS: Final = r"\.experts\.\d+\.w[123]\.weight$"
_FP8: Final = (
    r"\.attn\.w\w+\.weight$|\.indexer\.wq_b\.weight$|\.shared_experts\.w[123]\.weight$|"
    r"^mtp\.\d+\.([eh]|main)_proj\.weight$"
)
_WIDE: Final = {r"(^|\.)hc_\w+$|\.(ape|attn_sink|bias)$": "F32", r"\.tid2eid$": "I64"}
"""Names of tensors that are not stored in bf16, as patterns."""
_ONLY: Final[dict[str, tuple[Any, ...]]] = {
    "num_key_value_heads": (None, 1),
    "n_shared_experts": (None, 1),
    "scoring_func": (None, "sqrtsoftplus"),
    "topk_method": (None, "noaux_tc"),
    "norm_topk_prob": (None, True),
    "hidden_act": (None, "silu"),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "tie_word_embeddings": (None, False),
    "n_group": (None, 1),
    "topk_group": (None, 1),
    "expert_dtype": (None, "fp4", "fp8"),
    "attention_sink": (None, True),
}
"""Fields that have one meaning here, or none."""
_DSPARK: Final = ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank")
"""Fields of DSpark, which a config.json has all or none of."""
STAGES: Final = 3
"""Layers of DSpark: no field of config.json has their number in all published ones."""
MOST_BLOCK: Final = 16
"""Most tokens of a block of DSpark: there are rotations of so many positions behind the context
(`workers.models.rope.LOOKAHEAD`)."""
_READ: Final = {
    *("model_type", "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("head_dim", "qk_rope_head_dim", "partial_rotary_factor", "q_lora_rank", "o_groups", "o_lora_rank"),
    *("num_experts_per_tok", "n_routed_experts", "routed_scaling_factor", "swiglu_limit", "num_hash_layers"),
    *("mlp_layer_types", "layer_types", "compress_ratios", "compress_rates", "compress_rate_csa", "compress_rate_hca"),
    *("sliding_window", "index_n_heads", "index_head_dim", "index_topk", "hc_mult", "hc_sinkhorn_iters", "hc_eps"),
    *("rope_theta", "compress_rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps"),
    *("max_position_embeddings", "eos_token_id", "quantization_config", "num_nextn_predict_layers", *_DSPARK),
}
_WITHOUT_EFFECT: Final = {
    *("architectures", "auto_map", "bos_token_id", "pad_token_id", "torch_dtype", "dtype", "transformers_version"),
    *("use_cache", "initializer_range", "attention_dropout", "output_router_logits", "router_aux_loss_coef"),
    *("router_jitter_noise", "_name_or_path", "intermediate_size", "ep_size"),
    *("aux_loss_alpha", "seq_aux", "pretraining_tp", "max_window_layers", "id2label", "label2id", "return_dict"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "output_attentions", "output_hidden_states", "problem_type"),
    "use_return_dict",
}
"""Fields that say nothing of the model's forward pass: of training and of other programs."""


class DeepseekV4(Family):
    """Family of DeepSeek V4 Flash and Pro."""

    fp8_cache = False
    why_undeclared = "which its config.json does not declare (num_nextn_predict_layers, or dspark_*)"

    @override
    def read(self, fields: Fields) -> ModelConfig:
        if said := unsupported_quantization(fields.values):
            raise ConfigError(f"config.json: {said}")
        _refuse_others(fields)
        layers, vocab_size = fields.count("num_hidden_layers"), fields.count("vocab_size")
        entry = fields.count("head_dim", 512)
        roped = _roped(fields, entry)
        heads, groups = fields.count("num_attention_heads"), fields.count("o_groups", 8)
        if heads % groups:
            raise ConfigError(f"config.json: num_attention_heads = {heads} is not divisible by o_groups = {groups}")
        main, compressed = _ropes(fields, roped / entry)
        dspark = _dspark(fields, layers, vocab_size)
        compression = Compression(
            layers=_layers(fields, layers),
            window=fields.count("sliding_window", 128),
            rope=compressed,
            index_heads=fields.count("index_n_heads", 64),
            index_features=fields.count("index_head_dim", 128),
            top_k=fields.count("index_topk", 512),
            output_groups=groups,
            output_rank=fields.count("o_lora_rank", 1024),
        )
        if compression.index_features < roped:
            raise ConfigError(
                f"config.json: index_head_dim = {compression.index_features} is less than the {roped} features that "
                "are roped"
            )
        width = fields.count("moe_intermediate_size")
        return ModelConfig(
            model_type=fields.text("model_type"),
            vocab_size=vocab_size,
            hidden_size=fields.count("hidden_size"),
            intermediate_size=width,
            moe_intermediate_size=width,
            num_layers=layers,
            num_dense_layers=0,
            draft_layers=_draft_layers(fields, layers) if dspark is None else dspark.stages,
            num_heads=heads,
            q_lora_rank=fields.count("q_lora_rank"),
            kv_lora_rank=entry - roped,
            qk_nope_head_dim=entry - roped,
            qk_rope_head_dim=roped,
            v_head_dim=entry,
            routing=_routing(fields, layers),
            rope=main,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            max_positions=fields.count("max_position_embeddings"),
            tied_embeddings=False,
            eos_ids=fields.token_ids("eos_token_id", vocab_size),
            sinks=True,
            streams=ResidualStreams(
                fields.count("hc_mult", 4),
                magnitude=2.0,
                eps=fields.number("hc_eps", 1e-6),
                mixing_steps=fields.count("hc_sinkhorn_iters", 20),
            ),
            latent_norm_eps=fields.number("rms_norm_eps", 1e-6),
            compression=compression,
            dspark=dspark,
        )

    @override
    def model(
        self,
        source: WeightSource,
        config: ModelConfig,
        group: Group,
        *,
        max_positions: int,
        draft_layer: bool,
        invariant: bool,
        quantize_activations: bool = False,
        fp8_cache: bool = False,
    ) -> Model:
        """ConfigError for what its forward pass does not have."""
        from workers.drafters.compressed_mtp import CompressedMtp
        from workers.drafters.dspark import DsparkDrafter
        from workers.models.compressed_pass import CompressedPass
        from workers.models.deepseek_v4_model import CompressedModel
        from workers.models.execution_paths import ExecutionPaths

        for name, asked in {"invariant mode": invariant, "kv_cache_dtype fp8": fp8_cache}.items():
            if asked:
                raise ConfigError(f"{name} is not supported for model_type {config.model_type!r}")
        formats = source.formats
        paths = ExecutionPaths(config, group, formats, invariant=False, quantize_activations=quantize_activations)
        model = CompressedModel(source, config, paths, max_positions)
        model.segments = CompressedPass(model)
        if draft_layer:
            source.progress("draft layer" if config.dspark is None else "draft layers")
            model.drafter = (CompressedMtp if config.dspark is None else DsparkDrafter)(source, model)
        return model

    @override
    def tensor(self, name: str) -> str:
        """Its own constructors ask for its own names."""
        for pattern, ours in _NAMES.items():
            name = re.sub(pattern, ours, name)
        return name

    @override
    def dtypes(self, values: dict[str, Any]) -> Callable[[str], str | None]:
        """As published: experts in MXFP4, and attention's and the shared experts' matrices in FP8."""
        quantized, of_experts = values.get("quantization_config") is not None, FP8_DTYPE
        if values.get("expert_dtype") == "fp4":
            of_experts = "I8"

        @cache  # every format asks for every matrix
        def dtype_of(name: str) -> str | None:
            scales = next((suffix for suffix in (FP8_SCALES, MX_SCALES) if name.endswith(f".weight{suffix}")), "")
            of = name.removesuffix(scales)
            dtype = next((dtype for pattern, dtype in _WIDE.items() if re.search(pattern, of)), "BF16")
            if quantized and re.search(_FP8, of):
                dtype = FP8_DTYPE
            if quantized and re.search(_EXPERTS, of):
                dtype = of_experts
            if not scales:
                return dtype
            return "F8_E8M0" if scales == {FP8_DTYPE: FP8_SCALES, "I8": MX_SCALES}.get(dtype) else None

        return dtype_of

    @override
    def undeclared(self, config: ModelConfig, has_any: Callable[[str], bool]) -> list[str]:
        return ["mtp."] if not config.draft_layers and has_any("mtp.") else []

    @override
    def draft_prefixes(self, config: ModelConfig) -> list[str]:
        return [f"mtp.{stage}." for stage in range(1 if config.dspark is None else config.dspark.stages)]

    @override
    def ignored(self, config: ModelConfig) -> list[str]:
        others = r"^mtp\." if not config.draft_layers else r"^mtp\.[1-9]" if config.dspark is None else None
        return [*super().ignored(config), *(() if others is None else [others])]


def _refuse_others(fields: Fields) -> None:
    """`ConfigError` for a value that would change the computation, and for a field that nobody here knows."""
    for name, supported in _ONLY.items():
        value = fields.values.get(name)
        if not any(value == own and type(value) is type(own) for own in supported):
            raise fields.unsupported(name, value, [own for own in supported if own is not None])
    for name, value in fields.values.items():
        if name not in _READ and name not in _WITHOUT_EFFECT and name not in _ONLY and value is not None:
            raise ConfigError(
                f"config.json: {fields.prefix}{name} = {value!r} is not known of model_type 'deepseek_v4', and may "
                "change what the model computes"
            )


def _roped(fields: Fields, entry: int) -> int:
    """Features of an entry that are roped, its last ones."""
    part = fields.number("partial_rotary_factor", 64 / 512)
    roped = fields.count("qk_rope_head_dim", int(entry * part))
    if roped % 2 or roped > entry:
        raise ConfigError(f"config.json: qk_rope_head_dim = {roped} must be even, and at most head_dim = {entry}")
    if fields.values.get("partial_rotary_factor") is not None and int(entry * part) != roped:
        raise ConfigError(
            f"config.json: partial_rotary_factor = {part} of head_dim = {entry} and qk_rope_head_dim = {roped} differ"
        )
    return roped


def _ropes(fields: Fields, part: float) -> tuple[Rope, Rope]:
    """The rope of layers without compressed entries, which is plain, and that of the others."""
    given: Any = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"config.json: rope_scaling must be an object, not {given!r}")
    theta, far_theta = fields.number("rope_theta", 10000.0), fields.number("compress_rope_theta", 160000.0)
    nested = isinstance(given.get("main"), dict) and isinstance(given.get("compress"), dict)
    main, far = (given["main"], given["compress"]) if nested else ({}, given)
    found = []
    for own, base in ((main, theta), (far, far_theta)):
        values = {"rope_theta": base, **own} if nested else {**own, "rope_theta": base}
        if (said := values.pop("partial_rotary_factor", None)) is not None and said != part:
            raise fields.unsupported("rope_parameters.partial_rotary_factor", said, (part,))
        others = {name: value for name, value in fields.values.items() if name != "rope_scaling"}
        found.append(read_rope(Fields({**others, "rope_parameters": values}, fields.prefix), interleaved=True))
    rope, far_rope = found
    if rope.yarn is not None:
        raise fields.unsupported("rope_parameters.main.rope_type", "yarn", ("default",))
    if far_rope.yarn is not None and far_rope.yarn.attention_factor is None:
        # Its code has no correction of attention's temperature.
        far_rope = replace(far_rope, yarn=replace(far_rope.yarn, attention_factor=1.0))
    return rope, far_rope


def _layers(fields: Fields, count: int) -> tuple[CompressedLayer, ...]:
    """What each layer is. Behind the model's layers lists may have those that draft."""
    kinds: Any = fields.values.get("layer_types")
    name = "layer_types"
    if kinds is None:
        name, ratios = "compress_ratios", fields.values.get("compress_ratios")
        if not isinstance(ratios, list):
            raise ConfigError(
                f"config.json: compress_ratios must be a list with a number for each layer, not {ratios!r}"
            )
        names = {ratio: kind for kind, ratio in _KINDS.items()}
        kinds = [names.get(ratio, ratio) if type(ratio) is int else ratio for ratio in ratios]
    if not isinstance(kinds, list) or len(kinds) < count or any(kind not in _KINDS for kind in kinds[:count]):
        raise ConfigError(
            f"config.json: {fields.prefix}{name} must say of each of the {count} layers one of "
            f"{', '.join(map(repr, _KINDS if name == 'layer_types' else _KINDS.values()))}, not "
            f"{fields.values.get(name)!r}"
        )
    rates = fields.values.get("compress_rates") or {}
    if not isinstance(rates, dict):
        raise ConfigError(f"config.json: compress_rates must be an object, not {rates!r}")
    of_kinds = Fields(rates, "compress_rates.")
    sparse, heavy = (
        fields.count(old, of_kinds.count(kind, _KINDS[kind]))
        for kind, old in (
            ("compressed_sparse_attention", "compress_rate_csa"),
            ("heavily_compressed_attention", "compress_rate_hca"),
        )
    )
    for ratio in (sparse, heavy):
        if PAGE_TOKENS % ratio and ratio % PAGE_TOKENS:
            raise ConfigError(
                f"config.json: one compressed entry for {ratio} tokens is not supported: numbers that divide "
                f"{PAGE_TOKENS}, or that {PAGE_TOKENS} divides, are"
            )
    own = {
        "sliding_attention": _WINDOW,
        "compressed_sparse_attention": CompressedLayer(sparse, indexed=True),
        "heavily_compressed_attention": CompressedLayer(heavy),
    }
    return tuple(own[kind] for kind in kinds[:count])


def _draft_layers(fields: Fields, layers: int) -> int:
    """Layers for multi-token prediction, 0 or 1."""
    declared = fields.count("num_nextn_predict_layers", 0, least=0)
    if not declared:
        return 0
    if declared > 1:
        raise fields.unsupported("num_nextn_predict_layers without dspark_* fields", declared, (0, 1))
    ratios: Any = fields.values.get("compress_ratios")
    if isinstance(ratios, list) and ratios[layers:] not in ([], [0]):
        raise fields.unsupported("compress_ratios of the layer that drafts", ratios[layers:], ([0],))
    return 1


def _dspark(fields: Fields, layers: int, vocab_size: int) -> Dspark | None:
    """What config.json says of DSpark; None where it declares none. The layers of multi-token prediction have partly
    the same names, so fields that are missing or do not fit are no reason to take its layers for those."""
    given = [name for name in _DSPARK if fields.values.get(name) is not None]
    if not given:
        return None
    if lacking := [name for name in _DSPARK if name not in given]:
        raise ConfigError(
            f"config.json: {fields.prefix}{given[0]} declares DSpark, and {', '.join(lacking)} is missing: DSpark "
            f"needs all of {', '.join(_DSPARK)}"
        )
    declared = fields.count("num_nextn_predict_layers", STAGES, least=0)
    if declared == 0:
        return None
    if declared not in (1, STAGES):  # 1 in what was published first
        raise fields.unsupported("num_nextn_predict_layers beside dspark_* fields", declared, (0, 1, STAGES))
    ratios: Any = fields.values.get("compress_ratios")
    if isinstance(ratios, list) and ratios[layers:] not in ([], [0], [0] * STAGES):
        raise fields.unsupported("compress_ratios of the layers that draft", ratios[layers:], ([0] * STAGES,))
    block, noise = fields.count("dspark_block_size"), fields.count("dspark_noise_token_id", least=0)
    if block > MOST_BLOCK:
        raise ConfigError(f"config.json: dspark_block_size = {block} is more than the {MOST_BLOCK} that are supported")
    if noise >= vocab_size:
        raise ConfigError(f"config.json: dspark_noise_token_id = {noise} is outside the vocabulary of {vocab_size}")
    read: Any = fields.values["dspark_target_layer_ids"]
    fits = isinstance(read, list) and read and all(type(layer) is int and 0 <= layer < layers for layer in read)
    if not fits or read != sorted(set(read)):
        raise ConfigError(
            f"config.json: dspark_target_layer_ids = {read!r} must name different ones of the {layers} layers, from 0 "
            "on, in order"
        )
    return Dspark(STAGES, block, noise, tuple(read), fields.count("dspark_markov_rank"))


def _routing(fields: Fields, layers: int) -> Routing:
    kinds = fields.values.get("mlp_layer_types")
    hashed = fields.count("num_hash_layers", 3, least=0)
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) < layers:
            raise ConfigError(f"config.json: mlp_layer_types must have {layers} items, not {kinds!r}")
        hashed = kinds[:layers].count("hash_moe")
        if kinds[:layers] != ["hash_moe"] * hashed + ["moe"] * (layers - hashed):
            raise fields.unsupported("mlp_layer_types", kinds, ("hash_moe in the first layers, moe behind them",))
    if (limit := fields.number("swiglu_limit", 10.0)) <= 0:
        raise fields.unsupported("swiglu_limit", limit, (10.0,))
    return Routing(
        experts=fields.count("n_routed_experts"),
        experts_per_token=fields.count("num_experts_per_tok"),
        shared_experts=1,
        bias=True,
        rule=RoutingRule("sqrt_softplus", 1, 1, normalize=True, scale=fields.number("routed_scaling_factor", 1.5)),
        limit=limit,
        shared_limit=True,
        hash_layers=min(hashed, layers),
    )
