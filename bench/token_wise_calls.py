"""The kernels between the large products of a step, each at one size: its tensors, its launch, its reference.

Shape legend: T tokens, R rows, W width, E hidden features, I intermediate features, H heads, N features of a head's
query without rope, O rope features, D = N + O, L latent features, C = L + O, V value features, X routed experts,
K experts per token (shared ones last), P parts of a sum, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from kernels import decode_state, few_experts, pending_norm
from kernels import pending_norm as pending_reference
from kernels.decode_state import accept_drafts_reference, launch_accept_drafts
from kernels.few_experts import ChosenExperts
from kernels.few_experts import launch as choice_launch
from kernels.few_experts import reference as choice_reference
from kernels.gather_context import gather_context_reference, launch_gather_context
from kernels.head_linear import launch as head_launch
from kernels.head_linear import rope_absorb_reference
from kernels.latent_entry import launch_rope_cache, rope_cache_reference
from kernels.linear import MOST_STREAMED
from kernels.linear.parts import MOST_TOKENS as MOST_IN_PARTS
from kernels.linear.parts import Cut
from kernels.merge_attention import launch_merge_attention, merge_attention_reference
from kernels.mla_decode import launch as attention_launch
from kernels.mla_decode.schedule import DecodeShape, Workspace, hopper_tiling, portable_tiling
from kernels.moe import launch as moe_launch
from kernels.moe import reference as moe_reference
from kernels.moe import schedule as moe_schedule
from kernels.ordered_sum import launch_ordered_sum, ordered_sum_reference
from kernels.page import PAGE_TOKENS
from kernels.pending_norm import PendingNorm
from kernels.residual_streams import StreamGates, StreamMemory, add_to_streams_reference
from kernels.residual_streams.launch import StreamLaunches
from kernels.rms_norm import AddNorm, add_rms_norm_reference, launch_add_rms_norm, launch_rms_norm, rms_norm_reference
from kernels.routing_rule import RoutingRule
from kernels.runtime.hopper import is_hopper, multiprocessors
from kernels.silu_mul import launch_silu_mul, silu_mul_reference
from workers.models.attention.decode_rows import MOST_MERGED
from workers.models.general import MOST_DEPENDENT, ROUTER_PARTS

EPS = 1e-6
STREAMS, MIXING_STEPS = 4, 20
"""Residual streams of DeepSeek V4, and steps by which the matrix is made that mixes them."""
CONTEXT_PAGES = 16
"""Pages of the rows whose attention is merged."""
MOST_LENGTH = 4096
"""Most tokens of a slot at first. Some thousand calls of `advance` add one each, and find it a page all the same."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Call:
    """Call of one kernel at one size."""

    name: str
    size: str
    """Tokens, or rows x width."""
    make: Callable[[], Tensors]
    """Random tensors for one call, on torch's default device."""
    run: Callable[[Tensors, bool], None]
    """Launches the kernel; the flag: dependently, as it is launched in a step."""
    reference: Callable[[Tensors], None]
    """Computes the same from the same tensors by torch."""
    moved: Sequence[str]
    """Tensors as large as what must be read and written, one for each time."""
    dependent: bool = False
    """Whether a step launches it dependently."""

    def bytes(self, tensors: Tensors) -> int:
        """Bytes that must be read and written."""
        return sum(tensors[name].nbytes for name in self.moved)

    def footprint(self, tensors: Tensors) -> int:
        """Bytes of the tensors it reads and writes."""
        return sum(tensors[name].nbytes for name in {*self.moved})


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model on one rank that the calls need."""

    hidden: int
    intermediate: int
    heads: int
    nope: int
    rope: int
    latent: int
    value: int
    experts: int
    chosen: int
    shared: int
    expert_intermediate: int
    vocab: int
    positions: int
    streamed: int = 4096
    """Features of each of four residual streams: as DeepSeek V4 Flash has them."""
    dtype: torch.dtype = torch.bfloat16

    @staticmethod
    def of(config: dict[str, Any]) -> Sizes:
        """Read the sizes of a model without a down-projection of the query."""
        return Sizes(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=config["num_attention_heads"],
            nope=config["qk_nope_head_dim"],
            rope=config["qk_rope_head_dim"],
            latent=config["kv_lora_rank"],
            value=config["v_head_dim"],
            experts=config["n_routed_experts"],
            chosen=config["num_experts_per_tok"],
            shared=config["n_shared_experts"],
            expert_intermediate=config["moe_intermediate_size"],
            vocab=config["vocab_size"],
            positions=config["max_position_embeddings"],
        )

    @property
    def query(self) -> int:
        """Query features of all heads."""
        return self.heads * (self.nope + self.rope)

    @property
    def width(self) -> int:
        """Features of a cache entry."""
        return self.latent + self.rope

    def normal(self, *shape: int) -> Tensor:
        """Random numbers."""
        return torch.randn(shape, dtype=self.dtype)

    def zeros(self, *shape: int) -> Tensor:
        """Memory for a result."""
        return torch.zeros(shape, dtype=self.dtype)


def calls(
    sizes: Sizes, tokens: Sequence[int], rows: Sequence[int], widths: Sequence[int], device: torch.device
) -> Iterator[Call]:
    """Every kernel at every number of tokens, or of rows and their width, at which a step has it."""
    for kernel in (embedding, enter, add_pending, norm, add_norm, add_norm_of_parts):
        yield from (call for count in tokens if (call := kernel(sizes, count, device)))
    for kernel in (rope_cache, absorb, absorb_parts, merge_up, merge_attention, gather_context):
        yield from (call for count in tokens if (call := kernel(sizes, count, device)))
    for kernel in (gate, choose, route, combine_norm, add_to_streams, add_to_streams_alone):
        yield from (call for count in tokens if (call := kernel(sizes, count, device)))
    for parts in (2, 4, 8):
        yield from (ordered_sum(sizes, count, parts) for count in tokens)
    for state in (feed, accept, advance, feed_draft):
        yield from (call for width in widths for count in rows if (call := state(sizes, count, width)))


@cache
def _table(vocab: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The embedding, one for all calls: they read other rows of it."""
    return torch.randn(vocab, hidden, dtype=dtype, device=device)


def embedding(sizes: Sizes, tokens: int, device: torch.device) -> Call:
    """Torch's own kernel, as steps of more than a few tokens begin."""

    def make() -> Tensors:
        table = _table(sizes.vocab, sizes.hidden, sizes.dtype, device)
        return {"table": table, "id": torch.randint(sizes.vocab, (tokens,)), "out": sizes.zeros(tokens, sizes.hidden)}

    def run(t: Tensors, dependent: bool) -> None:
        torch.index_select(t["table"], 0, t["id"], out=t["out"])

    def reference(t: Tensors) -> None:
        t["out"].copy_(t["table"][t["id"]])

    return Call("embedding (torch)", str(tokens), make, run, reference, ("id", "out", "out"))


def _pending(t: Tensors) -> PendingNorm:
    return PendingNorm(t["out"], t["square"], EPS)


def _stream(sizes: Sizes, tokens: int) -> Tensors:
    """The residual stream of a few tokens, and its pending norm."""
    square = torch.zeros(tokens, sizes.hidden // pending_norm.PIECE)
    residual, weight = torch.randn(tokens, sizes.hidden), sizes.normal(sizes.hidden)
    return {"residual": residual, "weight": weight, "out": sizes.zeros(tokens, sizes.hidden), "square": square}


def enter(sizes: Sizes, tokens: int, device: torch.device) -> Call | None:
    """The embedding of a few tokens, with the first norm."""
    if tokens > MOST_STREAMED:
        return None

    def make() -> Tensors:
        table = _table(sizes.vocab, sizes.hidden, sizes.dtype, device)
        return _stream(sizes, tokens) | {"table": table, "id": torch.randint(sizes.vocab, (tokens,))}

    def run(t: Tensors, dependent: bool) -> None:
        rest = (t["residual"], t["weight"], _pending(t))
        pending_norm.launch_enter(t["table"], t["id"], *rest, dependent=dependent)

    def reference(t: Tensors) -> None:
        t["residual"].copy_(t["table"][t["id"]])
        pending_reference.write(t["residual"], t["weight"], _pending(t))

    moved = ("id", "out", "weight", "residual", "out", "square")
    return Call("pending_norm.enter", str(tokens), make, run, reference, moved, dependent=True)


def add_pending(sizes: Sizes, tokens: int, device: torch.device) -> Call | None:
    """Call after an all-reduce of a few tokens."""
    if tokens > MOST_STREAMED:
        return None

    def make() -> Tensors:
        return _stream(sizes, tokens) | {"x": sizes.normal(tokens, sizes.hidden)}

    def run(t: Tensors, dependent: bool) -> None:
        pending_norm.launch_enter(t["x"], None, t["residual"], t["weight"], _pending(t), add=True)

    def reference(t: Tensors) -> None:
        t["residual"].add_(t["x"])
        pending_reference.write(t["residual"], t["weight"], _pending(t))

    moved = ("x", "residual", "weight", "residual", "out", "square")
    return Call("pending_norm.add", str(tokens), make, run, reference, moved)


def norm(sizes: Sizes, tokens: int, device: torch.device) -> Call:
    """A norm alone, as before the draft layer."""

    def make() -> Tensors:
        shape = (tokens, sizes.hidden)
        return {"x": sizes.normal(*shape), "weight": sizes.normal(sizes.hidden), "out": sizes.zeros(*shape)}

    def run(t: Tensors, dependent: bool) -> None:
        launch_rms_norm(t["x"], t["weight"], t["out"], EPS)

    def reference(t: Tensors) -> None:
        rms_norm_reference(t["x"], t["weight"], t["out"], EPS)

    return Call("rms_norm", str(tokens), make, run, reference, ("x", "weight", "out"))


def add_norm(sizes: Sizes, tokens: int, device: torch.device, parts: int = 0) -> Call:
    """Call after attention's last product, and after the dense feed-forward."""

    def make() -> Tensors:
        shape = (tokens, sizes.hidden)
        x = torch.randn(tokens, parts, sizes.hidden) if parts else sizes.normal(*shape)
        weight, residual = sizes.normal(sizes.hidden), sizes.normal(*shape)
        return {"x": x, "residual": residual, "weight": weight, "out": sizes.zeros(*shape)}

    def run(t: Tensors, dependent: bool) -> None:
        launch_add_rms_norm(t["x"], t["residual"], t["weight"], t["out"], EPS, dependent=dependent)

    def reference(t: Tensors) -> None:
        add_rms_norm_reference(t["x"], t["residual"], t["weight"], t["out"], EPS)

    moved = ("x", "residual", "weight", "residual", "out")
    name = f"add_rms_norm, {parts} parts" if parts else "add_rms_norm"
    return Call(name, str(tokens), make, run, reference, moved, dependent=tokens <= MOST_DEPENDENT)


def _parts(tokens: int, rows: int, features: int, device: torch.device) -> int:
    """Parts in which a product of so many tokens with such a matrix is left for the kernel behind, 0: in none."""
    if not MOST_STREAMED < tokens <= MOST_IN_PARTS:
        return 0
    cut = Cut.of(rows, features, multiprocessors(device))
    return 0 if cut is None else cut.parts


def add_norm_of_parts(sizes: Sizes, tokens: int, device: torch.device) -> Call | None:
    """Call after attention's last product of some decode rows, which leaves its sums in parts."""
    parts = _parts(tokens, sizes.hidden, sizes.heads * sizes.value, device)
    return add_norm(sizes, tokens, device, parts) if parts else None


def _rotation(count: int, rope: int) -> Tensor:
    angle = torch.rand(count, rope // 2) * 6
    return torch.stack([angle.cos(), angle.sin()], -1).flatten(1)


def _cache(sizes: Sizes, tokens: int) -> Tensors:
    """Pages for the tokens behind the null page, in any order."""
    pages = -(-tokens // PAGE_TOKENS)
    slot = torch.randperm(pages * PAGE_TOKENS)[:tokens] + PAGE_TOKENS
    return {"cache": sizes.zeros(pages + 1, PAGE_TOKENS, sizes.width), "slot": slot}


def rope_cache(sizes: Sizes, tokens: int, device: torch.device) -> Call:
    """Call of steps with prefill rows: the latents' norm, rope and the write to the cache."""

    def make() -> Tensors:
        return _cache(sizes, tokens) | {
            "down": sizes.normal(tokens, sizes.query + sizes.width),
            "weight": sizes.normal(sizes.latent),
            "rotation": _rotation(tokens, sizes.rope),
            "latent": sizes.zeros(tokens, sizes.width),
        }

    def arguments(t: Tensors) -> tuple[Tensor, ...]:
        q_THD = t["down"][:, : sizes.query].unflatten(1, (sizes.heads, -1))
        where = (t["weight"], t["rotation"], t["slot"], t["latent"], t["cache"])
        return q_THD[..., sizes.nope :], t["down"][:, sizes.query :], *where

    def run(t: Tensors, dependent: bool) -> None:
        launch_rope_cache(*arguments(t), EPS)

    def reference(t: Tensors) -> None:
        rope_cache_reference(*arguments(t), EPS)

    # Of a query the roped features alone, as wide as `rotation` in half the bytes, there and back.
    moved = (*["rotation"] * sizes.heads, "latent", "weight", "rotation", "slot", "latent", "latent")
    return Call("rope_cache", str(tokens), make, run, reference, moved)


def absorb(sizes: Sizes, tokens: int, device: torch.device, parts: int = 0) -> Call:
    """Call of decode rows alone: W_UK into the query, and the work of `rope_cache`."""

    def make() -> Tensors:
        features = sizes.query + sizes.width
        down = torch.randn(tokens, parts, features) if parts else sizes.normal(tokens, features)
        return _cache(sizes, tokens) | {
            "down": down,
            "key": sizes.normal(sizes.heads, sizes.nope, sizes.latent) * sizes.nope**-0.5,
            "weight": sizes.normal(sizes.latent),
            "rotation": _rotation(sizes.positions, sizes.rope),
            "position": torch.randint(sizes.positions, (tokens,)),
            "entry": sizes.zeros(tokens, sizes.width),
            "angles": torch.zeros(tokens, sizes.rope),
            "out": sizes.zeros(tokens, sizes.heads, sizes.width),
        }

    def arguments(t: Tensors) -> tuple[Tensor, ...]:
        q_THD = t["down"][..., : sizes.query].unflatten(-1, (sizes.heads, -1))
        where = (t["rotation"], t["position"], t["slot"], t["out"], t["cache"])
        return q_THD, t["down"][..., sizes.query :], t["key"], t["weight"], *where

    def run(t: Tensors, dependent: bool) -> None:
        head_launch.rope_absorb(*arguments(t), EPS, dependent=dependent)

    def reference(t: Tensors) -> None:
        rope_absorb_reference(*arguments(t), EPS)

    # `angles` are as large as the tokens' share of `rotation`, and `entry` as theirs of the cache.
    moved = ("down", "key", "weight", "angles", "position", "slot", "out", "entry")
    name = f"rope_absorb, {parts} parts" if parts else "rope_absorb"
    return Call(name, str(tokens), make, run, reference, moved, dependent=True)


def absorb_parts(sizes: Sizes, tokens: int, device: torch.device) -> Call | None:
    """Call after a product of some decode rows that leaves its sums in parts."""
    parts = _parts(tokens, sizes.query + sizes.width, sizes.hidden, device)
    return absorb(sizes, tokens, device, parts) if parts else None


def merge_up(sizes: Sizes, tokens: int, device: torch.device) -> Call | None:
    """Decode rows' pieces of attention and W_UV: rows of one token over 1,024. All have the same pages, which it does
    not read; what must move is counted as of one piece per row."""
    if tokens <= MOST_STREAMED and tokens * sizes.heads > MOST_MERGED:
        return None
    shape = DecodeShape(tokens, 1, sizes.heads, sizes.latent, sizes.rope, CONTEXT_PAGES)
    choose = hopper_tiling if is_hopper(device) else portable_tiling
    tiling, scale = choose(shape, multiprocessors(device)), sizes.width**-0.5

    def workspace(t: Tensors) -> Workspace:
        return Workspace.over(t["pieces"], shape, tiling, sizes.dtype)

    def make() -> Tensors:
        pages = (torch.randperm(CONTEXT_PAGES, dtype=torch.int32) + 1).repeat(tokens, 1)
        length = torch.full((tokens,), CONTEXT_PAGES * PAGE_TOKENS, dtype=torch.int32)
        t = {
            "q": sizes.normal(tokens, 1, sizes.heads, sizes.width),
            "cache": sizes.normal(CONTEXT_PAGES + 1, PAGE_TOKENS, sizes.width),
            "pieces": torch.zeros(Workspace.bytes(shape, tiling, sizes.dtype), dtype=torch.uint8),
            "attended": sizes.zeros(tokens, 1, sizes.heads, sizes.latent),
            "value": sizes.normal(sizes.heads, sizes.value, sizes.latent) * sizes.latent**-0.5,
            "out": sizes.zeros(tokens, sizes.heads, sizes.value),
        }
        lse = torch.zeros(tokens, 1, sizes.heads)
        attention_launch.schedule(length, pages, workspace(t))
        inputs = (t["q"], t["cache"], pages, length)
        attention_launch.attend(*inputs, t["attended"], lse, workspace(t), scale=scale)
        return t

    def run(t: Tensors, dependent: bool) -> None:
        head_launch.merge_up(t["attended"], workspace(t), t["value"], t["out"], dependent=dependent)

    def reference(t: Tensors) -> None:
        entry_NC = t["cache"][1:].flatten(0, 1).float()
        score_THN = t["q"].squeeze(1).float() @ entry_NC.t() * scale
        attended_THL = score_THN.softmax(-1) @ entry_NC[:, : sizes.latent]
        t["out"].copy_(torch.einsum("thl,hvl->thv", attended_THL, t["value"].float()))

    return Call("merge_up", str(tokens), make, run, reference, ("attended", "value", "out"), dependent=True)


def merge_attention(sizes: Sizes, tokens: int, device: torch.device) -> Call:
    """Call of prefill rows over cached context: its last piece is merged into sums that are still in fp32."""

    def make() -> Tensors:
        shape = (tokens, sizes.heads, sizes.value)
        logs = {name: torch.randn(shape[:2]) for name in ("a_lse", "b_lse")}
        return {"a": torch.randn(shape), "b": torch.randn(shape), "out": sizes.zeros(*shape)} | logs

    def run(t: Tensors, dependent: bool) -> None:
        launch_merge_attention(t["a"], t["a_lse"], t["b"], t["b_lse"], t["out"], t["a_lse"])

    def reference(t: Tensors) -> None:
        merge_attention_reference(t["a"], t["a_lse"], t["b"], t["b_lse"], t["out"], t["a_lse"])

    moved = ("a", "a_lse", "b", "b_lse", "out", "a_lse")
    return Call("merge_attention", str(tokens), make, run, reference, moved)


def gather_context(sizes: Sizes, entries: int, device: torch.device) -> Call:
    """Call of a prefill row, which gathers from pages all over the cache."""
    pages = -(-entries // PAGE_TOKENS)

    def make() -> Tensors:
        cache = sizes.normal(pages + 1, PAGE_TOKENS, sizes.width)
        table = (torch.randperm(pages) + 1).to(torch.int32).view(1, pages)
        cu = torch.tensor([0, entries], dtype=torch.int32)
        return {"cache": cache, "table": table, "cu": cu, "out": sizes.zeros(entries, cache.shape[2])}

    def run(t: Tensors, dependent: bool) -> None:
        launch_gather_context(t["cache"], t["table"], t["cu"], t["out"], 0)

    def reference(t: Tensors) -> None:
        gather_context_reference(t["cache"], t["table"], t["cu"], t["out"], 0)

    return Call("gather_context", str(entries), make, run, reference, ("out", "out"))


def gate(sizes: Sizes, tokens: int, device: torch.device) -> Call:
    """Call of the dense feed-forward."""

    def make() -> Tensors:
        gate_up = sizes.normal(tokens, 2 * sizes.intermediate)
        return {"gate_up": gate_up, "out": sizes.zeros(tokens, sizes.intermediate)}

    def run(t: Tensors, dependent: bool) -> None:
        launch_silu_mul(t["gate_up"], t["out"])

    def reference(t: Tensors) -> None:
        silu_mul_reference(t["gate_up"], t["out"])

    return Call("silu_mul", str(tokens), make, run, reference, ("gate_up", "out"))


def _logits(sizes: Sizes, tokens: int) -> Tensor:
    """Draw logits of which no two of a token are nearly the same, so that every rounding chooses the same experts."""
    return torch.rand(tokens, sizes.experts).argsort(-1) * (8 / sizes.experts)


def choose(sizes: Sizes, tokens: int, device: torch.device) -> Call | None:
    """Call that chooses the experts of a few tokens."""
    if tokens > MOST_STREAMED:
        return None
    routing = RoutingRule("softmax", 1, 1, False, 1.0)

    def choice(t: Tensors) -> ChosenExperts:
        return ChosenExperts(t["place"], t["weight"], t["slot"])

    def make() -> Tensors:
        made = few_experts.ChosenExperts.empty(tokens, sizes.experts, sizes.chosen, torch.zeros)
        memory = {"place": made.place_TX, "weight": made.weight_TK, "slot": made.slot_S}
        return memory | {"logit": _logits(sizes, tokens), "length": torch.ones(tokens, dtype=torch.int32)}

    def run(t: Tensors, dependent: bool) -> None:
        choice_launch.choose(t["logit"], None, t["length"], choice(t), routing, dependent=dependent)

    def reference(t: Tensors) -> None:
        on_host = {name: tensor.cpu() for name, tensor in t.items()}
        with torch.device("cpu"):
            choice_reference.choose(on_host["logit"], None, on_host["length"], choice(on_host), routing)
        for name, tensor in on_host.items():
            t[name].copy_(tensor)

    moved = ("logit", "length", "place", "weight", "slot")
    return Call("few_experts.choose", str(tokens), make, run, reference, moved, dependent=True)


def route(sizes: Sizes, tokens: int, device: torch.device) -> Call:
    """Call that chooses the experts of more tokens; for some numbers of tokens the router leaves its sums in parts."""
    parts = ROUTER_PARTS if MOST_STREAMED < tokens <= MOST_DEPENDENT else 0
    rule = RoutingRule("softmax", 1, 1, False, 1.0), sizes.shared

    def make() -> Tensors:
        logit, columns = _logits(sizes, tokens), sizes.chosen + sizes.shared
        if parts:
            logit = logit.unsqueeze(1) * torch.rand(parts).softmax(0).unsqueeze(1)
        return {"logit": logit, "id": torch.zeros(tokens, columns).long(), "weight": torch.zeros(tokens, columns)}

    def run(t: Tensors, dependent: bool) -> None:
        moe_launch.route(t["logit"], None, t["id"], t["weight"], *rule, dependent=dependent)

    def reference(t: Tensors) -> None:
        moe_reference.route(t["logit"], None, t["id"], t["weight"], *rule)

    name = f"moe.route, {parts} parts" if parts else "moe.route"
    moved, dependent = ("logit", "id", "weight"), tokens <= MOST_DEPENDENT
    return Call(name, str(tokens), make, run, reference, moved, dependent=dependent)


def combine_norm(sizes: Sizes, tokens: int, device: torch.device) -> Call | None:
    """Call after the experts: a token's results, weighed, onto the residual, and its norm."""
    columns, experts = sizes.chosen + sizes.shared, sizes.experts + sizes.shared
    hopper = multiprocessors(device) if is_hopper(device) else 0
    matrices = (columns, experts, sizes.hidden, sizes.expert_intermediate, sizes.dtype)
    shape = moe_schedule.ExpertsShape(tokens, *matrices, 0, sizes.shared, hopper)
    tiling = moe_schedule.tiling(shape)
    if not tiling.rows:
        return None

    def make() -> Tensors:
        routed = torch.rand(tokens, sizes.experts).argsort(-1)[:, : sizes.chosen]
        return {
            "partial": torch.randn(tokens * columns, 1, sizes.hidden).to(tiling.partial),
            "id": torch.cat([routed, torch.arange(sizes.experts, experts).expand(tokens, -1)], 1),
            "weight": torch.rand(tokens, columns),
            "residual": sizes.normal(tokens, sizes.hidden),
            "norm": sizes.normal(sizes.hidden),
            "out": sizes.zeros(tokens, sizes.hidden),
        }

    def run(t: Tensors, dependent: bool) -> None:
        # Nothing that it does not read has to be there.
        scratch = moe_schedule.Workspace(t["id"], t["id"], t["id"], t["partial"], t["partial"])
        tensors = (t["out"], t["id"], t["weight"], t["partial"], t["partial"], t["out"])
        add = AddNorm(t["residual"], t["norm"], EPS)
        moe_launch.ExpertLaunches(*tensors, scratch, shape, tiling, dependent).combine_norm(add)

    def reference(t: Tensors) -> None:
        sum_TE = (t["partial"].float().view(tokens, columns, -1) * t["weight"].unsqueeze(-1)).sum(1)
        add_rms_norm_reference(sum_TE.to(sizes.dtype), t["residual"], t["norm"], t["out"], EPS)

    moved = ("partial", "id", "weight", "residual", "norm", "residual", "out")
    return Call("moe.combine_norm", str(tokens), make, run, reference, moved, dependent=True)


def _streams(sizes: Sizes, tokens: int) -> Tensors:
    """Residual streams that are mixed, and what is read and written with them. Sums of a token stay as large however
    often something is added to them."""
    memory = StreamMemory.empty(tokens, STREAMS, sizes.streamed, torch.zeros, mixing=True)
    assert memory.mix_TSS is not None
    gates, features = (2 + STREAMS) * STREAMS, STREAMS * sizes.streamed
    return {
        "x": sizes.normal(tokens, sizes.streamed),
        "residual": sizes.normal(tokens, STREAMS, sizes.streamed),
        "open": torch.rand(memory.open_TS.shape),
        "mix": torch.rand(memory.mix_TSS.shape).softmax(1),
        "part": memory.part_TPX,
        "made": torch.randn(gates, features) * features**-0.5,
        "base": torch.randn(gates),
        "scale": torch.ones(3),
        "weight": sizes.normal(sizes.streamed),
        "out": sizes.zeros(tokens, sizes.streamed),
    }


def _stream_launches(t: Tensors, dependent: bool) -> StreamLaunches:
    gates = StreamGates(t["made"], t["base"], t["scale"], 2.0, EPS, EPS, MIXING_STEPS)
    memory = StreamMemory(t["open"], t["part"], t["mix"])
    return StreamLaunches(t["x"], t["residual"], memory, gates, t["weight"], t["out"], EPS, False, dependent)


def add_to_streams(sizes: Sizes, tokens: int, device: torch.device) -> Call:
    """Call behind attention, and behind experts, of a model with residual streams that are mixed: both kernels."""

    def run(t: Tensors, dependent: bool) -> None:
        launches = _stream_launches(t, dependent)
        launches.add()
        launches.read()

    def reference(t: Tensors) -> None:
        _add_parts(t)
        launches = _stream_launches(t, False)
        memory, gates = launches.memory, launches.gates
        assert memory.mix_TSS is not None
        assert gates is not None
        # Nothing more is added to the streams.
        memory.open_TS.zero_()
        memory.mix_TSS.copy_(torch.eye(STREAMS))
        add_to_streams_reference(t["x"], t["residual"], memory, gates, t["weight"], t["out"], EPS)

    moved = ("x", *["residual"] * 3, "made", "weight", "out")
    dependent = tokens <= MOST_DEPENDENT
    return Call("add_to_streams", str(tokens), partial(_streams, sizes, tokens), run, reference, moved, dependent)


def add_to_streams_alone(sizes: Sizes, tokens: int, device: torch.device) -> Call:
    """The first of its kernels, which leaves parts of the sums by which the other one reads."""

    def run(t: Tensors, dependent: bool) -> None:
        _stream_launches(t, dependent).add()

    moved, dependent = ("x", *["residual"] * 2, "made"), tokens <= MOST_DEPENDENT
    make = partial(_streams, sizes, tokens)
    return Call("add_to_streams, add", str(tokens), make, run, _add_parts, moved, dependent)


def _add_parts(t: Tensors) -> None:
    """What the first kernel does."""
    tokens, parts, gates = len(t["x"]), _stream_launches(t, False).parts, len(t["base"])
    mixed_TSE = torch.einsum("tjk,tje->tke", t["mix"], t["residual"].float())
    t["residual"].copy_(mixed_TSE + t["open"].unsqueeze(2) * t["x"].float().unsqueeze(1))
    value_TSPE = t["residual"].float().unflatten(2, (parts, -1))
    made_TPM = torch.einsum("tspe,mspe->tpm", value_TSPE, t["made"].view(gates, *value_TSPE.shape[1:]))
    size = t["part"].shape[2]
    part_TPX = t["part"].view(-1)[: tokens * parts * size].view(tokens, parts, size)
    part_TPX[:, :, :gates], part_TPX[:, :, gates] = made_TPM, value_TSPE.square().sum((1, 3))


def ordered_sum(sizes: Sizes, tokens: int, parts: int) -> Call:
    """Call of invariant mode: sums over a rank's groups, or over the ranks."""

    def make() -> Tensors:
        return {"part": torch.randn(tokens, parts, sizes.hidden), "out": sizes.zeros(tokens, sizes.hidden)}

    def run(t: Tensors, dependent: bool) -> None:
        launch_ordered_sum(t["part"].transpose(0, 1), t["out"])

    def reference(t: Tensors) -> None:
        ordered_sum_reference(t["part"].transpose(0, 1), t["out"])

    return Call(f"ordered_sum, {parts} parts", str(tokens), make, run, reference, ("part", "out"))


def _state(t: Tensors) -> decode_state.SlotTensors:
    names = ("length_S", "last_S", "draft_SK", "page_SP", "token_SX", "unlikely_S")
    return decode_state.SlotTensors(*(t[name] for name in names))


def _rows(sizes: Sizes, rows: int, width: int) -> Tensors:
    """The state of as many slots as rows, and what a step writes."""
    pages = sizes.positions // PAGE_TOKENS
    longest = min(MOST_LENGTH, sizes.positions // 4)
    numbers = {name: torch.zeros(rows, width).long() for name in ("token", "position", "cache_slot")}
    return numbers | {
        "length_S": torch.randint(longest, (rows + 1,)),
        "last_S": torch.randint(sizes.vocab, (rows + 1,)),
        "draft_SK": torch.randint(sizes.vocab, (rows + 1, max(width - 1, 1))),
        "page_SP": torch.randint(1, 1000, (rows + 1, pages), dtype=torch.int32),
        "token_SX": torch.zeros(rows + 1, 0, dtype=torch.int32),
        "unlikely_S": torch.zeros(rows + 1, dtype=torch.int64),
        "slot": torch.randperm(rows),
        "length": torch.zeros(rows, dtype=torch.int32),
        "page": torch.zeros(rows, pages, dtype=torch.int32),
        "newest": torch.zeros(rows).long(),
    }


def feed(sizes: Sizes, rows: int, width: int) -> Call:
    """Call at the beginning of a decode step."""

    def make() -> Tensors:
        return _rows(sizes, rows, width)

    def arguments(t: Tensors) -> tuple[Tensor, ...]:
        return t["slot"], t["token"], t["position"], t["cache_slot"], t["length"], t["page"]

    def run(t: Tensors, dependent: bool) -> None:
        decode_state.launch_feed(_state(t), *arguments(t))

    def reference(t: Tensors) -> None:
        decode_state.feed_reference(_state(t), *arguments(t))

    moved = ("slot", "length_S", "token", "page", "token", "position", "cache_slot", "length", "page")
    return Call("decode_state.feed", f"{rows} x {width}", make, run, reference, moved)


def advance(sizes: Sizes, rows: int, width: int) -> Call:
    """Call that leaves a decode step's state for the next one; no draft is accepted, so that rows move on by one token
    per call."""

    def make() -> Tensors:
        t = _rows(sizes, rows, width)
        position = t["length_S"][t["slot"]].unsqueeze(1) + torch.arange(width)
        length = (position[:, -1] + 1).to(torch.int32)
        return t | {"position": position, "length": length, "accepted": torch.zeros(rows).long()}

    def arguments(t: Tensors) -> tuple[Tensor, ...]:
        return t["slot"], t["token"], t["accepted"], t["position"], t["cache_slot"], t["length"], t["newest"]

    def run(t: Tensors, dependent: bool) -> None:
        decode_state.launch_advance(_state(t), *arguments(t))

    def reference(t: Tensors) -> None:
        decode_state.advance_reference(_state(t), *arguments(t))

    each = ("slot", "accepted", "newest", "newest", "newest", "length")  # the token and the state are 8 bytes, too
    return Call("decode_state.advance", f"{rows} x {width}", make, run, reference, (*each, "position", "cache_slot"))


def feed_draft(sizes: Sizes, rows: int, width: int) -> Call | None:
    """Call between the passes of the draft layer."""
    if width == 1:
        return None

    def make() -> Tensors:
        t = _rows(sizes, rows, width)
        return t | {name: torch.zeros(rows).long() for name in ("token", "position", "cache_slot")}

    def arguments(t: Tensors) -> tuple[Any, ...]:
        return t["slot"], t["token"], width - 2, t["position"], t["cache_slot"], t["length"]

    def run(t: Tensors, dependent: bool) -> None:
        decode_state.launch_feed_draft(_state(t), *arguments(t))

    def reference(t: Tensors) -> None:
        decode_state.feed_draft_reference(_state(t), *arguments(t))

    moved = ("slot", "token", "token", "slot", "position", "cache_slot", "length")
    return Call("decode_state.feed_draft", f"{rows} x {width}", make, run, reference, moved)


def accept(sizes: Sizes, rows: int, width: int) -> Call:
    """Call that counts the accepted drafts, between `feed` and `advance`."""

    def make() -> Tensors:
        target = torch.randint(sizes.vocab, (rows, width))
        accepted = torch.rand(rows, width) < 0.7
        fed = torch.where(accepted, target, torch.randint(sizes.vocab, (rows, width))).roll(1, 1)
        faults = {name: torch.zeros(1).long() for name in ("fault", "faults")}
        return faults | {"target": target, "fed": fed, "accepted": torch.zeros(rows).long()}

    def arguments(t: Tensors) -> tuple[Any, ...]:
        return t["target"], t["fed"][:, 1:], t["accepted"], sizes.vocab, t["fault"], t["faults"]

    def run(t: Tensors, dependent: bool) -> None:
        launch_accept_drafts(*arguments(t), dependent=dependent)

    def reference(t: Tensors) -> None:
        accept_drafts_reference(*arguments(t))

    name, moved = "decode_state.accept_drafts", ("target", "fed", "accepted")
    return Call(name, f"{rows} x {width}", make, run, reference, moved, dependent=True)
