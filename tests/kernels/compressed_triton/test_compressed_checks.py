"""Tensors that do not fit are refused, with what was expected; what fits goes to the references on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from compressed_case import rotations

from kernels.compressed import (
    AttendWorkspace,
    TokenRows,
    attend,
    attention_launch,
    compress,
    keep_entries,
    rope_queries,
    rope_store,
)

TOKENS, HEADS, FEATURES, ROPE, WINDOW = 4, 3, 16, 8, 6


def token_rows(width: int = 2) -> TokenRows:
    return TokenRows(
        torch.tensor([3, 4, 7, 8]),
        torch.tensor([0, 0, 1, 1], dtype=torch.int32),
        torch.tensor([1, 0]),
        torch.ones(2, 1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        width,
    )


def stored(**given: Any) -> dict[str, Any]:
    """Arguments of `rope_store`."""
    return {
        "q_THD": torch.randn(TOKENS, HEADS, FEATURES),
        "kv_TD": torch.randn(TOKENS, FEATURES),
        "norm_D": torch.ones(FEATURES),
        "rotation_TO": rotations(TOKENS, ROPE),
        "entry_TD": torch.empty(TOKENS, FEATURES),
        "ring_XLD": torch.zeros(3, WINDOW + 1, FEATURES),
        "rows": token_rows(),
        "window": WINDOW,
        "eps": 1e-6,
    } | given


def compressed(**given: Any) -> dict[str, Any]:
    """Arguments of `compress`."""
    return {
        "made_TF": torch.randn(TOKENS, 4 * FEATURES),
        "bias_AC": torch.randn(4, 2 * FEATURES),
        "norm_D": torch.ones(FEATURES),
        "rotation_YO": rotations(9, ROPE),
        "state_XLF": torch.zeros(3, 9, 4 * FEATURES),
        "entry_PKD": torch.zeros(2, 16, FEATURES),
        "rows": token_rows(),
        "eps": 1e-6,
    } | given


def attended(**given: Any) -> dict[str, Any]:
    """Arguments of `attend`."""
    return {
        "q_THD": torch.randn(TOKENS, HEADS, FEATURES),
        "ring_XLD": torch.zeros(3, WINDOW + 1, FEATURES),
        "entry_TD": None,
        "entry_PKD": torch.zeros(2, 16, FEATURES),
        "selected_TS": torch.zeros(TOKENS, 5, dtype=torch.int32),
        "sink_H": torch.zeros(HEADS),
        "rotation_TO": rotations(TOKENS, ROPE),
        "out_THD": torch.empty(TOKENS, HEADS, FEATURES),
        "rows": token_rows(),
        "window": WINDOW,
        "ratio": 4,
        "scale": 0.1,
    } | given


CASES = [
    (rope_store, stored, {"q_THD": torch.empty(TOKENS, FEATURES, HEADS).transpose(1, 2)}, "q_THD must be"),
    (rope_store, stored, {"q_THD": torch.empty(HEADS, TOKENS, FEATURES).transpose(0, 1)}, "lie side by side"),
    (rope_store, stored, {"kv_TD": torch.empty(3, FEATURES)}, "kv_TD must be"),
    (rope_store, stored, {"rotation_TO": torch.empty(TOKENS, 7)}, "come in pairs"),
    (rope_store, stored, {"rotation_TO": torch.empty(TOKENS, ROPE).half()}, "rotation_TO must be fp32"),
    (rope_store, stored, {"entry_TD": torch.empty(TOKENS, FEATURES).half()}, "entry_TD must be contiguous"),
    (rope_store, stored, {"ring_XLD": torch.empty(3, WINDOW, FEATURES)}, "holds 6 tokens: rows of 2 .* need 7"),
    (rope_store, stored, {"rows": token_rows(3)}, "are not 4 tokens"),
    (rope_store, stored, {"rows": replace(token_rows(), row_T=torch.zeros(TOKENS))}, "row_T must be contiguous"),
    (rope_store, stored, {"rows": replace(token_rows(), page_RP=torch.zeros(2, 1))}, "page_RP must be int32"),
    (compress, compressed, {"bias_AC": torch.empty(4, 3 * FEATURES)}, "or twice as many, not 48"),
    (compress, compressed, {"bias_AC": torch.empty(5, 2 * FEATURES)}, "entries of 5 tokens"),
    (compress, compressed, {"made_TF": torch.empty(TOKENS, 3)}, "made_TF must be"),
    (compress, compressed, {"state_XLF": torch.empty(3, 8, 4 * FEATURES)}, "holds 8 tokens: rows of 2 .* need 9"),
    (compress, compressed, {"entry_PKD": torch.empty(2, 64, FEATURES)}, "entry_PKD must be"),
    (attend, attended, {"ratio": 0}, "or neither and no selection"),
    (attend, attended, {"entry_PKD": None, "ratio": 0}, "or neither and no selection"),
    (attend, attended, {"sink_H": torch.empty(2)}, "sink_H must be"),
    (attend, attended, {"entry_TD": torch.empty(TOKENS, 2)}, "entry_TD must be"),
    (attend, attended, {"selected_TS": torch.empty(TOKENS, 5)}, "selected_TS must be"),
    (attend, attended, {"ring_XLD": torch.empty(3, WINDOW, FEATURES)}, "need 7"),
    (attend, attended, {"block": 2}, "tokens in blocks of 2 have entries of their own"),
]


@pytest.mark.parametrize(("function", "arguments", "wrong", "match"), CASES)
def test_what_does_not_fit_is_refused(function: Any, arguments: Any, wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        function(**arguments(**wrong))


def test_what_fits_is_computed() -> None:
    given = stored()
    rope_store(**given)
    assert given["ring_XLD"].flatten(1).any(1).tolist() == [False, True, True]
    keep_entries(given["entry_TD"], given["ring_XLD"].zero_(), token_rows(0))
    assert given["ring_XLD"].flatten(1).any(1).tolist() == [False, True, True]
    rope_queries(given["q_THD"], given["rotation_TO"])
    given = compressed()
    compress(**given)
    assert given["entry_PKD"].any(2).nonzero().tolist() == [[1, 0], [1, 1]]
    given = attended()
    attend(**given)
    assert bool(given["out_THD"].isfinite().all())


def test_a_workspace_of_another_call_is_refused() -> None:
    given = attended(first=0)
    for sizes, dtype in (((TOKENS + 1, HEADS), torch.float32), ((TOKENS, HEADS), torch.bfloat16)):
        workspace = AttendWorkspace.allocate(*sizes, FEATURES, 11, torch.empty, dtype=dtype)
        with pytest.raises(ValueError, match="serves no call"):
            attention_launch.attend(**given, workspace=workspace)


def test_more_roped_features_than_are_turned_back_are_refused() -> None:
    roped, features = 130, 256
    drawn = {name: torch.empty(TOKENS, HEADS, features) for name in ("q_THD", "out_THD")}
    ring_XLD, entry_PKD = torch.empty(3, WINDOW + 1, features), torch.empty(2, 16, features)
    given = attended(**drawn, ring_XLD=ring_XLD, entry_PKD=entry_PKD, rotation_TO=rotations(TOKENS, roped), first=0)
    workspace = AttendWorkspace.allocate(TOKENS, HEADS, features, 11, torch.empty, dtype=torch.float32)
    with pytest.raises(ValueError, match="130 roped features of 256: the last 128"):
        attention_launch.attend(**given, workspace=workspace)


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_an_entry_that_is_not_finite_leaves_no_number(number: float) -> None:
    """Of those that see it, also where its score says that it weighs nothing."""
    ring, out = torch.zeros(2, 8, 4), torch.zeros(2, 1, 4)
    ring[1, 1] = torch.tensor([number, 0.0, 0.0, 0.0])
    of_row = torch.zeros(2, dtype=torch.int32), torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32)
    rows = TokenRows(torch.tensor([0, 1]), *of_row, torch.zeros(1, dtype=torch.int64), 2)
    given = torch.ones(2, 1, 4), ring, None, None, None, torch.zeros(1), torch.tensor([[1.0, 0.0]] * 2), out, rows
    attend(*given, window=4, ratio=0, scale=0.5)
    assert bool(out[0].isfinite().all())
    assert bool(out[1].isnan().all())


def test_a_token_before_the_first_position_sees_no_window() -> None:
    out, of_row = torch.ones(2, 1, 4), (torch.zeros(2, dtype=torch.int32), torch.tensor([0]))
    pages = torch.zeros(1, 1, dtype=torch.int32)
    rows = TokenRows(torch.tensor([0, 1]), *of_row, pages, torch.zeros(1, dtype=torch.int64))
    own = torch.ones(2, 4), None, None, torch.zeros(1), torch.tensor([[1.0, 0.0]] * 2)
    attend(torch.ones(2, 1, 4), torch.zeros(2, 8, 4), *own, out, rows, window=4, ratio=0, scale=0.5, first=1)
    assert not bool(out[0].any())
    assert bool((out[1] > 0).all())
