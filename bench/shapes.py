"""Common parts of the benchmarks of whole steps: published shapes with random weights, rows to run, and the least that
a step must read and compute."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from family_shapes import AXK1_SLICE, AXK2_LIGHT, AXK2_SLICE, HY4_SLICE, SARVAM, SARVAM_SLICE, YOUTU
from torch import Tensor

from kernels import few_experts, moe
from workers.cache.paged import PagedCache
from workers.families.registry import FAMILIES, parse_config
from workers.memory.scratch import Scratch
from workers.models.attention.sparse import SparseAttention
from workers.models.deepseek_v4_model import CompressedModel
from workers.models.feed_forward import MixtureOfExperts
from workers.models.model import Model
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.protocol.plan import BatchLayout
from workers.rank.runner import Runner
from workers.step.decode import DecodeStep
from workers.weights.formats import FP8_BLOCKS, INT4_GROUPS, MXFP8, PLAIN
from workers.weights.formats.format import Format
from workers.weights.part import Part
from workers.weights.source import WeightSource
from workers.weights.weight import Weight

BANDWIDTH = 4.2e9
"""Bytes a millisecond: what reading a large tensor reaches on an H200."""
OPERATIONS = 790e9
"""A millisecond: what large products in bf16 reach there; a multiplication and an addition are two."""
INPUT, ATTENTION, HEAD = "attention's input side", "attention", "head"
DENSE, EXPERTS = "output + dense", "output + experts"
"""Parts of a pass; the last two are attention's last product and the feed-forward, each with the norm behind it."""
V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "max_position_embeddings": 16384,
}


V3_SLICE: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 6,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 16384,
}
"""DeepSeek-V3 with one dense layer and five of experts, and its draft layer."""
V3: dict[str, Any] = {
    **V3_SLICE,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 163840,
}
"""DeepSeek-V3, whole: 671 billion parameters, and its draft layer."""
GLM_FLASH: dict[str, Any] = {
    "model_type": "glm4_moe_lite",
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "max_position_embeddings": 16384,
}
"""GLM-4.7-Flash, whole."""
K2_SLICE: dict[str, Any] = {
    **V3_SLICE,
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "num_hidden_layers": 5,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
}
"""Kimi K2 with one dense layer and four of experts."""
V32_SLICE: dict[str, Any] = {
    **V3_SLICE,
    "model_type": "deepseek_v32",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "max_position_embeddings": 163840,
}
"""Slice of DeepSeek-V3.2 that is equal to V3's but for attention: every layer has an indexer."""
GLM52_SLICE: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 5,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "indexer_types": ["full", "shared", "shared", "shared", "full"],
    "index_share_for_mtp_iteration": True,
    "max_position_embeddings": 202752,
}
"""GLM-5.2's layers 2 to 6, the last dense one and four of experts, three of which attend to what the dense one has
selected; and its draft layer."""
SMALL4: dict[str, Any] = {
    "model_type": "mistral4",
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 36,
    "first_k_dense_replace": 0,
    "num_attention_heads": 32,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000,
        "factor": 128,
        "original_max_position_embeddings": 8192,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
    "max_position_embeddings": 32768,
}
"""Mistral Small 4, whole: 119 billion parameters."""
SMALL4_SLICE: dict[str, Any] = {**SMALL4, "num_hidden_layers": 6}
"""Six of its layers."""
V4_FLASH: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "num_hash_layers": 3,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
"""DeepSeek V4 Flash, whole: 284 billion parameters, and its draft layer; experts in MXFP4, attention in FP8."""
SHAPES = {
    "v2-lite": (V2_LITE, PLAIN),
    "v3-slice": (V3_SLICE, FP8_BLOCKS),
    "small4": (SMALL4, FP8_BLOCKS),
    "small4-slice": (SMALL4_SLICE, FP8_BLOCKS),
    "v32-slice": (V32_SLICE, FP8_BLOCKS),
    "glm52-slice": (GLM52_SLICE, FP8_BLOCKS),
    "k2-slice": (K2_SLICE, INT4_GROUPS),
    "glm-flash": (GLM_FLASH, PLAIN),
    "hy4-slice": (HY4_SLICE, MXFP8),
    "glm52-mxfp8-slice": (GLM52_SLICE, MXFP8),
    "sarvam": (SARVAM, PLAIN),
    "sarvam-fp8": (SARVAM, FP8_BLOCKS),
    "sarvam-slice": (SARVAM_SLICE, PLAIN),
    "axk1-slice": (AXK1_SLICE, PLAIN),
    "axk2-light": (AXK2_LIGHT, FP8_BLOCKS),
    "axk2-slice": (AXK2_SLICE, FP8_BLOCKS),
    "youtu": (YOUTU, PLAIN),
}
"""Shapes by name, with the format in which their matrices are published: in INT4 those of routed experts alone.
GLM-5.2 is published in FP8, too; in MXFP8 it has the experts of Hy4, whose steps are measured beside it."""
MXFP8_EXPONENT = 115
"""The lesser of the two scales in E8M0 that are drawn, 2 ** -12 and 2 ** -11, for numbers normal(0, 64): matrices then
have a deviation of 0.025."""
_AT_ONCE = 1 << 28
"""Numbers that are drawn at once."""
_PAGES_AT_ONCE = 4096
"""Pages of FP8 entries that are drawn at once."""


class RandomWeights(WeightSource):
    """Norms of 1, everything else normal(0, 0.02), or uniform with that deviation in INT4; matrices of layers in
    `form`, if that is INT4 those of routed experts."""

    def __init__(self, device: torch.device, dtype: torch.dtype, form: Format = PLAIN) -> None:
        super().__init__(Mesh(), dtype, device)
        self.form = form

    def stored_format(self, name: str) -> Format:
        """Return the published format of a matrix: routers, embeddings and heads are plain."""
        if self.form is INT4_GROUPS:
            return self.form if ".experts." in name else PLAIN
        return self.form if self.form.publishes(name) else PLAIN

    def fill_matrix(self, into: Weight, part: Part) -> None:
        """Random numbers for `into`."""
        if into.format is PLAIN:
            super().fill_matrix(into, part)
            return
        assert into.scales is not None
        if into.format is INT4_GROUPS:
            into.data.random_(0, 256)
            into.scales.uniform_(0.5 * 0.02 / 4.6, 1.5 * 0.02 / 4.6)
            return
        numbers = into.data.view(-1)
        for some in torch.split(numbers, _AT_ONCE):
            some.copy_(torch.randn(some.shape, device=some.device) * 64)
        if into.format is MXFP8:
            into.scales.random_(MXFP8_EXPONENT, MXFP8_EXPONENT + 2)
            return
        into.scales.uniform_(0.5 * 0.02 / 64, 1.5 * 0.02 / 64)

    def fill_part(self, into: Tensor, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> None:
        """Random numbers for `into`."""
        if "norm" in name:
            into.fill_(0.0 if name.endswith(".bias") else 1.0)
        else:
            into.normal_(0, 0.02)

    def lossless(self, name: str) -> torch.dtype:
        """Return the dtype in which published checkpoints store it."""
        return self.dtype

    def progress(self, text: str) -> None:
        """Report nothing."""


def model_of(
    values: dict[str, Any],
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    form: Format = PLAIN,
    *,
    fp8_cache: bool = False,
) -> Model:
    """A random model of these config values, with a draft layer if rows feed more than one token."""
    torch.manual_seed(0)
    source, config = RandomWeights(device, dtype, form), parse_config(values)
    family = FAMILIES[config.model_type]
    return family.model(
        source,
        config,
        Group(),
        max_positions=config.max_positions,
        draft_layer=width > 1,
        invariant=False,
        quantize_activations=True,
        fp8_cache=fp8_cache,
    )


def scattered_pages(rows: int, pages: int, shards: int, device: torch.device) -> tuple[Tensor, int]:
    """Page tables of rows whose pages go round `shards` ranks and lie anywhere on them, int32 global ids [rows, pages];
    and the pages that each rank then has, the null page included."""
    owner_RP = (torch.arange(rows, device=device).unsqueeze(1) + torch.arange(pages, device=device)) % shards
    page_RP, most = torch.zeros(rows, pages, dtype=torch.int32, device=device), 0
    for owner in range(shards):
        own_RP = owner_RP == owner
        count = int(own_RP.sum())
        page_RP[own_RP] = (torch.randperm(count, device=device) * shards + owner + 1).int()
        most = max(most, count)
    return page_RP, most + 1


class Case:
    """`rows` rows of `width` tokens over `context` cached tokens each, with pages for `room` more, in a runner."""

    def __init__(self, model: Model, rows: int, width: int, context: int, room: int, budget: int = 0) -> None:
        """`budget`: the most tokens a step of the runner feeds; those of the rows are always allowed."""
        self.model, self.rows, self.width, self.context = model, rows, width, context
        self.device = device = model.norm_E.device
        torch.manual_seed(rows)
        pages = -(-(context + room) // 64)
        page_RP, own = scattered_pages(rows, pages, model.group.mesh.shards.count, device)
        cache = PagedCache.allocate(model.caches, own, device, model.group.mesh.shards)
        _fill(cache)
        self.runner = Runner(model, cache, rows, width, pages, max(budget, rows * width), model.group)
        self.parts, self.state = self.runner.parts, self.runner.parts.state
        if self.parts.sampling is not None:  # which one rank of several has
            self.parts.sampling.reserve()
        tensors = self.state.tensors
        tensors.page_SP[:rows] = page_RP
        for ids in (tensors.last_S, tensors.draft_SK):
            ids.copy_(torch.randint(0, model.config.vocab_size, ids.shape, device=device))
        self.rewind()

    def rewind(self) -> None:
        """Let the rows have `context` tokens again."""
        self.state.tensors.length_S[: self.rows] = self.context - self.width

    def step(self, scratch: Scratch) -> DecodeStep:
        """The step of all rows, as a replica runs it."""
        dense = self.parts.all_short(range(self.rows))
        key = BatchLayout(self.width, self.rows).graph_key(self.rows, self.width - 1, dense=dense)
        step = DecodeStep(self.parts, key, scratch)
        step.slot_R.copy_(torch.arange(self.rows))
        return step


def _fill(cache: PagedCache) -> None:
    """Random entries everywhere."""
    for spec, layer in zip(cache.specs, cache.layers, strict=True):
        if layer.is_floating_point():
            layer.normal_()
            continue
        random = torch.Generator(layer.device).manual_seed(0)
        for some in torch.split(layer, _PAGES_AT_ONCE):
            some.copy_(spec.random(len(some), layer.device, random))


@contextmanager
def choices() -> Iterator[list[Tensor]]:
    """Note the choices of every layer's tokens within this context, bool [T, X]."""
    noted: list[Tensor] = []
    choose, route = few_experts.choose, moe.route

    def choosing(logit_TX: Tensor, bias_X: Tensor | None, length_R: Tensor, choice: Any, *args: Any, **kw: Any) -> None:
        choose(logit_TX, bias_X, length_R, choice, *args, **kw)
        noted.append(choice.place_TX >= 0)

    def routing(logit: Tensor, bias_X: Tensor | None, id_TK: Tensor, weight_TK: Tensor, *args: Any, **kw: Any) -> None:
        route(logit, bias_X, id_TK, weight_TK, *args, **kw)
        expert_X = torch.arange(logit.shape[-1], device=logit.device)
        noted.append((id_TK.unsqueeze(2) == expert_X).any(1))

    few_experts.choose, moe.route = choosing, routing
    try:
        yield noted
    finally:
        few_experts.choose, moe.route = choose, route


@dataclass(frozen=True)
class Work:
    """Bytes that must be read, weights and cached context, and operations of products and attention."""

    bytes: float = 0.0
    operations: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.operations + other.operations)

    @property
    def ms(self) -> float:
        """The time of whichever takes longer."""
        return max(self.bytes / BANDWIDTH, self.operations / OPERATIONS)


@dataclass(frozen=True)
class Tokens:
    """Tokens that a pass computes."""

    count: int
    logits: int
    """Rows of logits."""
    experts: float
    """Routed experts that some token chose, in each layer that has them."""
    cached: int = 0
    """Entries of cached context, read once each."""
    absorbed: int = 0
    """(Query, key) pairs of decode rows' attention."""
    expanded: int = 0
    """Pairs of prefill rows' attention."""
    prefilled: int = 0
    """Tokens of prefill rows, whose latents are expanded to keys and values."""
    recalled: int = 0
    """Cached entries of theirs that are expanded again."""

    @staticmethod
    def decode(rows: int, width: int, context: int, experts: float) -> Tokens:
        """Count the tokens of decode rows."""
        tokens = rows * width
        return Tokens(tokens, tokens, experts, rows * context, tokens * context)

    @staticmethod
    def prefill(rows: int, length: int, experts: float) -> Tokens:
        """Count the tokens of whole prompts, each token of which attends to itself and those before it."""
        return Tokens(rows * length, rows, experts, expanded=rows * length * (length + 1) // 2, prefilled=rows * length)

    @staticmethod
    def mixed(rows: int, width: int, context: int, length: int, start: int, experts: float) -> Tokens:
        """Count the tokens of decode rows and the last `length` tokens of one prompt, `start` of which are cached."""
        tokens = rows * width
        pairs = length * start + length * (length + 1) // 2
        cached = rows * context + start
        return Tokens(tokens + length, tokens + 1, experts, cached, tokens * context, pairs, length, start)


def weight_bytes(model: CompressedModel, experts: float) -> float:
    """Bytes of weights that a step of a DeepSeek V4 reads, whose tokens choose so many of a layer's routed experts."""

    def of(thing: Any) -> float:
        if isinstance(thing, Weight | Tensor):
            return thing.nbytes
        return sum(of(value) for value in vars(thing).values()) if is_dataclass(thing) else 0.0

    total = of(model.head_YE) + of(model.streams)
    for block in model.blocks:
        mixture = block.experts
        routed = of(mixture.gate_up_XFE) + of(mixture.down_XEI)
        table = 0.0 if mixture.expert_YK is None else of(mixture.expert_YK)
        twice = of(block.attention.made_FE)  # its rows are the compressors', too
        total += of(block) - table - twice - routed * (1 - experts / mixture.gate_up_XFE.shape[0])
    return total


def woken(model: Model, tokens: int) -> float:
    """Experts of a layer that some of so many tokens choose, expected if all are equally likely."""
    routing = model.config.routing
    if routing is None:
        return 0.0
    return routing.experts * (1 - (1 - routing.experts_per_token / routing.experts) ** tokens)


def _attended(model: Model, tokens: Tokens) -> float:
    """The share of their context that decode rows attend to."""
    indexing, decoded = model.config.indexing, tokens.count - tokens.prefilled
    if indexing is None or not tokens.absorbed:
        return 1.0
    return min(1.0, indexing.top_k * decoded / tokens.absorbed)


def target_work(model: Model, tokens: Tokens) -> dict[str, Work]:
    """Return the least work of the target's pass, by part."""
    count = tokens.count
    parts = dict.fromkeys((INPUT, ATTENTION, DENSE, EXPERTS), Work())

    def product(*weights: Weight | None) -> Work:
        """Every token with these matrices."""
        matrices = [weight for weight in weights if weight is not None]
        numbers = sum(math.prod(weight.shape) for weight in matrices)
        return Work(sum(weight.nbytes for weight in matrices), 2 * count * numbers)

    for layer in model.layers:
        count = tokens.count
        attention, network = layer.attention, layer.feed_forward
        heads = attention.heads
        latent, rope = heads.latent, heads.rope
        share, indexer = _attended(model, tokens), attention.indexer if isinstance(attention, SparseAttention) else None
        products = share * tokens.absorbed * (2 * latent + rope)
        products += tokens.expanded * (heads.nope + rope + heads.value)
        products *= heads.count
        up = heads.up_HFL
        products += (count - tokens.prefilled + tokens.recalled) * up.numel()
        parts[INPUT] += product(attention.down_FE, attention.q_up_QA, attention.gate_FE)
        parts[INPUT] += Work(0, 2 * tokens.prefilled * up.numel())
        for gate in (layer.attention_gate, layer.feed_forward_gate):
            parts[INPUT] += Work() if gate is None else product(gate.down_RE, gate.up_ER)
        for streams in (layer.attention_streams, layer.feed_forward_streams):
            parts[INPUT] += Work() if streams is None else product(Weight(streams.weight_MF))
        parts[ATTENTION] += Work(share * tokens.cached * attention.cache.entry_bytes, 2 * products)
        if indexer is not None:
            parts[INPUT] += product(indexer.q_FA, indexer.both_XE)
            keys = tokens.absorbed * indexer.q_FA.shape[0]
            parts[ATTENTION] += Work(tokens.cached * indexer.cache.entry_bytes, 2 * keys)
        # Read once, whichever part does it first.
        parts[INPUT if tokens.prefilled else ATTENTION] += Work(up.nbytes)
        woken_here = tokens.experts
        if layer is model.layers[-1] and not model.drafter and tokens.logits < count:
            # Behind its attention nobody wants the others.
            count, woken_here = tokens.logits, woken(model, tokens.logits)
        if isinstance(network, MixtureOfExperts):
            routing, router = network.mixture.routing, network.mixture.router_XE
            expert = product(network.mixture.gate_up_XFE[0], network.mixture.down_XEI[0])
            parts[EXPERTS] += product(attention.out_EF) + product(router)
            # The shared experts are read whatever is chosen, and every token has them.
            read, seen = woken_here + routing.shared_experts, routing.experts_per_token + routing.shared_experts
            parts[EXPERTS] += Work(read * expert.bytes, seen * expert.operations)
            if (shared := network.mixture.shared) is not None:
                parts[EXPERTS] += product(shared.gate_up_FE, shared.down_EI)
        else:
            parts[DENSE] += product(attention.out_EF, network.gate_up_FE, network.down_EI)
    head = model.head_YE
    return parts | {HEAD: Work(head.nbytes, 2 * tokens.logits * math.prod(head.shape))}
