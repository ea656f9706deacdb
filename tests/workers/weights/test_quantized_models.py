"""Every tensor of a model loaded from a quantized checkpoint, against a plain checkpoint of the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import ALONE, CPU
from quantized_checkpoints import FP8_NAMES, INT4_NAMES, WRITERS, quantize
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny

from workers.families import load_model
from workers.models.feed_forward import MixtureOfExperts
from workers.models.model import Model
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.weights.checkpoint import WeightsError
from workers.weights.formats import FP8_BLOCKS, PLAIN
from workers.weights.weight import Weight

WIDTHS: dict[str, dict[str, int | None]] = {
    "ends inside of blocks": {
        "hidden_size": 160,
        "intermediate_size": 320,
        "moe_intermediate_size": 192,
        "n_shared_experts": 2,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "q_lora_rank": 96,
        "kv_lora_rank": 144,
    },
    "whole blocks": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
    },
    "hardly anything fits": {"q_lora_rank": None, "intermediate_size": 72, "moe_intermediate_size": 40},
}


SPARSE: dict[str, dict[str, Any]] = {
    "v32": {"n_group": 2, "topk_group": 2},
    # A head's rows of kv_b_proj are three and a half blocks.
    "glm5": {"num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 192, "v_head_dim": 256}
    | {"indexer_types": ["full", "shared"]},
}
INDEXER = {"index_head_dim": 128, "index_n_heads": 3, "qk_rope_head_dim": 64, "q_lora_rank": 96, "kv_lora_rank": 144}


def checkpoints(
    folder: Path, kind: str, names: str, model: str = "v3-one-group", **overrides: Any
) -> tuple[Path, Path]:
    """A quantized checkpoint, and a plain one of the same numbers."""
    overrides = {"num_hidden_layers": 2, "n_routed_experts": 4, **overrides}
    twin, quantized = (write_tiny(folder / name, model, seed=2, **overrides) for name in ("twin", kind))
    save_file(quantize(quantized, kind, names), twin / "model.safetensors")
    return quantized, twin


def load(folder: Path, group: Group, dtype: torch.dtype, device: torch.device = CPU) -> tuple[Model, int]:
    """One rank's model, without its neighbours, and the bytes that were asked for before it was loaded."""
    asked: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workers.families.loading.check_memory", lambda wanted, *_: asked.append(wanted))
        return load_model(folder, group=group, dtype=dtype, device=device, max_positions=8), asked[0]


def loaded(thing: object, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Weight | torch.Tensor]]:
    """Every weight and every other tensor of a model's layers, its drafter and itself, by name, what is shared once."""
    seen = set() if seen is None else seen
    if isinstance(thing, Weight | torch.Tensor):
        if id(thing) not in seen:
            seen.add(id(thing))
            yield path, thing
    elif isinstance(thing, list):
        for index, element in enumerate(thing):
            yield from loaded(element, f"{path}.{index}", seen)
    elif type(thing).__module__.startswith(("workers.models", "workers.drafters")) and id(thing) not in seen:
        seen.add(id(thing))
        for name, own in vars(thing).items():
            if name not in ("segments", "rotation_PO", "products"):
                yield from loaded(own, f"{path}.{name}", seen)


QUANTIZED = {"fp8": ("fp8", FP8_NAMES), "int4-experts": ("int4", INT4_NAMES), "fp8-experts": ("fp8", INT4_NAMES)}
EVERY = enumerate(product(WIDTHS, QUANTIZED, (torch.float32, torch.bfloat16), (1, 2, 4)))


@pytest.mark.parametrize(
    ("widths", "kind", "names", "dtype", "ranks"),
    [
        pytest.param(
            *(widths, *QUANTIZED[name], dtype, ranks),
            marks=() if number % 5 == 0 else pytest.mark.long,
            id=f"{widths}-{name}-{str(dtype).removeprefix('torch.')}-{ranks}",
        )
        for number, (widths, name, dtype, ranks) in EVERY
    ],
)
def test_every_tensor_is_that_of_the_plain_twin(
    widths: str, kind: str, names: str, dtype: torch.dtype, ranks: int, tmp_path: Path
) -> None:
    """Tensors are equal for every rank, bit for bit. The twin is held against transformers elsewhere."""
    overrides = WIDTHS[widths]
    if names == INT4_NAMES:  # then the shared experts are shared among ranks as one network, here as units of one
        overrides = overrides | {"n_shared_experts": 1}
    quantized, twin = checkpoints(tmp_path, kind, names, **overrides)
    for rank in range(ranks):
        group = Group(Mesh.of(rank, ranks))
        (model, asked), (plain, _) = load(quantized, group, dtype), load(twin, group, dtype)
        got, want = dict(loaded(model)), dict(loaded(plain))
        mixtures = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, MixtureOfExperts)]
        apart = any(part.mixture.shared is not None for part in mixtures)
        assert asked == sum(tensor.nbytes for tensor in got.values()), "counted bytes are not those that were taken"
        if widths != "hardly anything fits":
            assert all(part.mixture.gate_up_XFE.format is not PLAIN for part in mixtures)
            assert apart == (names == INT4_NAMES)
        if not apart:
            assert got.keys() == want.keys()
        for name, tensor in got.items():
            other = _shared_apart(name, want) if apart and "feed_forward" in name else want[name]
            other = other.plain if isinstance(other, Weight) else other
            if isinstance(tensor, Weight):
                tensor = tensor.dequantized(other.dtype)
            assert torch.equal(tensor, other), name


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", SPARSE)
def test_indexers_are_published_in_fp8_but_for_their_weights(kind: str, ranks: int, tmp_path: Path) -> None:
    """Rows of indexers change places within a block of FP8, and every rank has all of an indexer. Its keys are computed
    in one product with its weights."""
    quantized, twin = checkpoints(tmp_path, "fp8", FP8_NAMES, kind, **INDEXER, **SPARSE[kind])
    for rank in range(ranks):
        group = Group(Mesh.of(rank, ranks))
        (model, asked), (plain, _) = load(quantized, group, torch.float32), load(twin, group, torch.float32)
        got, want = dict(loaded(model)), dict(loaded(plain))
        assert asked == sum(tensor.nbytes for tensor in got.values())
        assert got.keys() == want.keys()
        for name, tensor in got.items():
            other = want[name].plain if isinstance(want[name], Weight) else want[name]
            own = tensor.dequantized(other.dtype) if isinstance(tensor, Weight) else tensor
            assert torch.equal(own, other), name
        indexer = model.layers[0].attention.indexer
        assert indexer.q_FA.format is FP8_BLOCKS
        assert indexer.both_XE.format is PLAIN
        assert indexer.q_FA.shape == (3 * 128, 96)


def _shared_apart(name: str, twin: dict[str, Any]) -> Any:
    """Return what the twin, which has the units of the shared experts behind the routed ones, has in that place."""
    layer, _, own = name.partition(".feed_forward.")
    gate_up, down = (twin.get(f"{layer}.feed_forward.mixture.{which}") for which in ("gate_up_XFE", "down_XEI"))
    if own == "mixture.gate_up_XFE":
        return gate_up.plain[:4]
    if own == "mixture.down_XEI":
        return down.plain[:4]
    if own == "mixture.shared.gate_up_FE":
        halves = gate_up.plain[4:].unflatten(1, (2, -1))
        return torch.cat([halves[:, half].flatten(0, 1) for half in range(2)])
    if own == "mixture.shared.down_EI":
        return torch.cat(list(down.plain[4:]), dim=1)
    return twin[name]


def test_norms_and_other_vectors_may_not_be_quantized(tmp_path: Path) -> None:
    """Vectors have no blocks, so nobody can say what such numbers mean."""
    folder, _ = checkpoints(tmp_path, "fp8", FP8_NAMES)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.q_a_layernorm.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"(?s)unsupported dtype.*{name} is F8_E4M3; supported: BF16, F16"):
        load(folder, Group(), torch.float32)


def test_all_matrices_may_be_quantized(tmp_path: Path) -> None:
    """Embedding, head, router and the draft layer's first product, too, which nobody publishes so."""
    quantized, twin = checkpoints(tmp_path, "fp8", r"\.weight$", **WIDTHS["whole blocks"])
    (model, _), (plain, _) = (load(folder, Group(), torch.float32) for folder in (quantized, twin))
    assert torch.equal(model.embedding_YE, plain.embedding_YE)
    assert torch.equal(model.head_YE.plain, plain.head_YE.plain)
    assert model.drafter.join_EF.format is FP8_BLOCKS
    assert torch.equal(model.drafter.join_EF.dequantized(torch.float32), plain.drafter.join_EF.plain)
    for layer, other in zip(model.layers[1:], plain.layers[1:], strict=True):
        assert torch.equal(layer.feed_forward.mixture.router_XE.plain, other.feed_forward.mixture.router_XE.plain)


@pytest.mark.parametrize("form", WRITERS)
def test_the_draft_layer_s_own_embedding_and_head_may_be_stored_in_any_way(form: str, tmp_path: Path) -> None:
    """The model beside it stores its own otherwise. What they take is asked for before anything is loaded."""
    folder, _ = checkpoints(tmp_path, "fp8", FP8_NAMES)
    tensors = load_file(folder / "model.safetensors")
    _, before = load(folder, Group(), torch.float32)
    meant = []
    for seed, name in enumerate(("embed_tokens", "shared_head.head")):
        written, numbers = WRITERS[form](f"model.layers.2.{name}.weight", 131, 48, seed)
        tensors |= written
        meant.append(torch.from_numpy(numbers))
    save_file(tensors, folder / "model.safetensors")
    for rank, size in ((0, 1), (1, 2)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Group, "minimum", lambda self, x: x)  # of ranks that see the same
            model, asked = load(folder, Group(Mesh.of(rank, size)), torch.float32)
        share = -(-131 // size)
        torch.testing.assert_close(model.drafter.embedding_YE, meant[0])
        torch.testing.assert_close(model.drafter.head_YE.plain[: 131 - rank * share], meant[1][rank * share :])
        if size == 1:
            assert asked == before + sum(table.numel() * 4 for table in meant)


def test_quantized_copies_are_left_on_the_disk(tmp_path: Path) -> None:
    """Copies have the model's numbers and scales; where only a scale is another one they are not left."""
    folder, _ = checkpoints(tmp_path, "fp8", r"\.weight$", **WIDTHS["whole blocks"])
    tensors = load_file(folder / "model.safetensors")
    for name, repeated in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        for part in ("", "_scale_inv"):
            tensors[f"model.layers.2.{name}.weight{part}"] = tensors[f"{repeated}.weight{part}"].clone()
    save_file(tensors, folder / "model.safetensors")
    model, _ = load(folder, Group(), torch.float32)
    assert model.drafter.embedding_YE is model.embedding_YE
    assert model.drafter.head_YE is model.head_YE
    tensors["model.layers.2.shared_head.head.weight_scale_inv"][-1, -1] *= 2
    save_file(tensors, folder / "model.safetensors")
    model, _ = load(folder, Group(), torch.float32)
    assert model.drafter.embedding_YE is model.embedding_YE
    assert model.drafter.head_YE is not model.head_YE


def test_parts_of_an_embedding_of_its_own_that_are_missing_are_named(tmp_path: Path) -> None:
    folder, _ = checkpoints(tmp_path, "fp8", FP8_NAMES)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.embed_tokens.weight"] = torch.zeros(131, 48).to(torch.float8_e4m3fn)
    tensors["model.layers.2.shared_head.head.weight"] = torch.zeros(7, 48)
    save_file(tensors, folder / "model.safetensors")
    problems = r"(?s)missing.*2\.embed_tokens\.weight_scale_inv.*head\.weight is \[7, 48\]"
    with pytest.raises(WeightsError, match=problems):
        load(folder, Group(), torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(("kind", "names"), [("fp8", FP8_NAMES), ("int4", INT4_NAMES)])
@pytest.mark.parametrize("widths", WIDTHS)
def test_a_gpu_gets_what_a_cpu_gets(widths: str, kind: str, names: str, ranks: int, tmp_path: Path) -> None:
    """Bit for bit, what is dequantized, or reordered, there included."""
    folder, _ = checkpoints(tmp_path, kind, names, **WIDTHS[widths])
    group = Group(Mesh.of(ranks - 1, ranks))
    (ours, _), (theirs, _) = (load(folder, group, torch.bfloat16, device) for device in (torch.device("cuda", 0), CPU))
    got, want = dict(loaded(ours)), dict(loaded(theirs))
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        other = want[name]
        if isinstance(tensor, Weight) and isinstance(other, Weight):
            assert (tensor.format, tensor.block) == (other.format, other.block)
            tensor, other = tensor.dequantized(torch.float32), other.dequantized(torch.float32)
        assert tensor.is_cuda
        assert torch.equal(tensor.cpu(), other), name


def test_experts_in_int4_of_a_model_that_clamps_them(tmp_path: Path) -> None:
    """They are kept as they are stored, and the mixture has its limit. Each expert has tensors of its own here, as INT4
    is published."""
    folder = write_tiny(tmp_path, "hyv4", seed=1, hidden_size=64, moe_intermediate_size=32)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        prefix, stack = name.rpartition(".")[0], tensors.pop(name)
        for expert, matrix in enumerate(stack):
            halves = {"gate": matrix[:32], "up": matrix[32:]} if "gate_up" in name else {"down": matrix}
            tensors |= {f"{prefix}.{expert}.{part}_proj.weight": own.contiguous() for part, own in halves.items()}
    save_file(tensors, folder / "model.safetensors")
    how: dict[str, Any] = {"group": ALONE, "dtype": torch.float32, "device": CPU, "max_positions": 64}
    plain = quantize(folder, "int4", INT4_NAMES)
    mixtures = [layer.feed_forward for layer in load_model(folder, **how).layers]
    found = [part.mixture for part in mixtures if isinstance(part, MixtureOfExperts)]
    assert found
    for mixture in found:
        assert (mixture.routing.limit, mixture.gate_up_XFE.format.name) == (0.5, "INT4 in groups")
        assert any(
            torch.equal(mixture.down_XEI.dequantized(torch.float32)[0], tensor.float())
            for name, tensor in plain.items()
            if name.endswith(".experts.0.down_proj.weight")
        )
