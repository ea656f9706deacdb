"""Whether a draft model fits the model that it drafts for, by what their config.json say: before anything is loaded."""

from __future__ import annotations

from typing import Any, Final

from workers.parallel.mesh import AxisName, Mesh

GROUPED: Final[dict[str, AxisName]] = {
    "num_attention_heads": "heads",
    "num_key_value_heads": "heads",
    "intermediate_size": "experts",
}
LATENT: Final[dict[str, AxisName]] = {"num_attention_heads": "heads", "intermediate_size": "experts"}
"""Counts of a layer with latent attention that the ranks divide among themselves, with the mesh axis of each."""


def flattened(draft: dict[str, Any]) -> dict[str, Any]:
    """A draft model's config.json with all fields at the top. Those of speculators (vLLM's project) have the layer's in
    `transformer_layer_config`, and the normed hidden state begins the residual stream unless they say otherwise."""
    layer = draft.get("transformer_layer_config")
    if not isinstance(layer, dict):
        return draft
    own = {name: value for name, value in draft.items() if value is not None and name != "transformer_layer_config"}
    return {"norm_before_residual": True, **layer, **own}


def aux_hidden_state_layers_of(draft: dict[str, Any], layers: int) -> tuple[int, ...]:
    """The layers of the model whose input, the residual stream in front of them, the draft model reads.

    `eagle_config` (SpecForge, SGLang) names layers by whose output is read; `eagle_aux_hidden_state_layer_ids` beside
    it (vLLM, speculators) those by whose input. Where neither is there it is the input of the layers 2, half of all
    and the last but two, as in the paper's code (EAGLE-3, arXiv:2503.01840). ValueError for what is no list of layers.
    """
    given, behind = draft.get("eagle_aux_hidden_state_layer_ids"), 0
    inner = draft.get("eagle_config")
    if isinstance(inner, dict) and inner.get("eagle_aux_hidden_state_layer_ids"):
        given, behind = inner["eagle_aux_hidden_state_layer_ids"], 1
    if not given:
        return 2, layers // 2, layers - 3
    if not isinstance(given, list) or not all(type(layer) is int for layer in given):
        raise ValueError(f"eagle_aux_hidden_state_layer_ids = {given!r} must be a list of layers")
    return tuple(layer + behind for layer in given)


def misfits(draft: dict[str, Any], target: dict[str, Any], mesh: Mesh, *, host_memory: bool = False) -> list[str]:
    """Return why a draft model cannot draft, a line per cause. `target`: hidden_size, vocab_size,
    num_hidden_layers and, of a model with several residual streams, hc_mult. `host_memory`: whether pages of the cache
    are kept there, of which one rank writes what all of them load."""
    draft, found = flattened(draft), []
    if target.get("hc_mult"):
        found.append(f"the model has {target['hc_mult']} residual streams (hc_mult), and a draft model reads one")
    for name in ("hidden_size", "vocab_size"):
        if draft.get(name) != target.get(name):
            found.append(f"{name} = {draft.get(name)} of the draft model, but {target.get(name)} of the model")
    within, layers = draft.get("draft_vocab_size") or draft.get("vocab_size"), target.get("num_hidden_layers")
    if type(within) is not int or not 1 <= within <= (draft.get("vocab_size") or 0):
        found.append(f"draft_vocab_size = {within!r} must lie between 1 and vocab_size")
    if draft.get("num_hidden_layers", 1) != 1:
        found.append(f"num_hidden_layers = {draft['num_hidden_layers']} of the draft model; supported: 1")
    if type(layers) is int:
        try:
            aux_hidden_state_layers = aux_hidden_state_layers_of(draft, layers)
        except ValueError as error:
            found.append(str(error))
        else:
            if len(aux_hidden_state_layers) != 3 or not all(0 <= layer < layers for layer in aux_hidden_state_layers):
                found.append(
                    f"its hidden states come from the inputs of layers {', '.join(map(str, aux_hidden_state_layers))} "
                    f"(eagle_aux_hidden_state_layer_ids), which must be three of 0 to {layers - 1}"
                )
    for name, axis in (GROUPED if draft.get("kv_lora_rank") is None else LATENT).items():
        count, ranks = draft.get(name), mesh.axis(axis).size
        if type(count) is int and count % ranks:
            found.append(f"{name} = {count} of the draft model cannot be divided by {ranks} ranks (--tensor-parallel)")
    if host_memory and mesh.heads.size > 1 and draft.get("kv_lora_rank") is None:
        found.append(
            f"it has grouped-query attention, so each of {mesh.heads.size} ranks has the keys and values of its own "
            "heads alone, and a page in host memory holds what one rank has: give --host-cache-bytes 0, a draft model "
            "with latent attention, or another drafter"
        )
    return found
