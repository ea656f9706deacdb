"""The scanner counts what the parser would have built, however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploy.api.http.body import SLICE, JsonScanner
from deploy.api.http.errors import ApiError
from deploy.config.api import ApiConfig

WIDE = ApiConfig(max_json_keys=10**6, max_json_items=10**6, max_json_values=10**7)
text = st.text(
    st.sampled_from('ab"\\[]{},:\n\u00e9\u6771\u0000') | st.characters(exclude_categories=["Cs"]), max_size=8
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
)


def scan(raw: bytes, limits: ApiConfig = WIDE, cuts: list[int] | None = None) -> JsonScanner:
    scanner = JsonScanner(limits)
    ends = sorted(cut % (len(raw) + 1) for cut in cuts or [])
    for begin, end in zip([0, *ends], [*ends, len(raw)], strict=True):
        for at in range(begin, end, SLICE):
            scanner.feed(raw[at : min(at + SLICE, end)])
    return scanner


def values_of(value: Any, depth: int = 1) -> Iterator[tuple[Any, int]]:
    """Every value in `value`, itself included, and how many arrays and objects are around what is in it."""
    yield value, depth
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from values_of(inner, depth + 1)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values, st.booleans(), st.sampled_from([(",", ":"), (" , ", "\n:\t")]), st.lists(st.integers(0, 10**6)))
def test_counts_are_those_of_what_is_parsed(
    value: Any, ascii_only: bool, separators: tuple[str, str], cuts: list[int]
) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only, separators=separators).encode()
    found = list(values_of(value))
    keys = sum(len(inner) for inner, _ in found if isinstance(inner, dict))
    items = sum(isinstance(inner, str | list | dict) for inner, _ in found)
    empty = sum(inner in ([], {}) for inner, _ in found)
    scanner = scan(raw, cuts=cuts)
    assert (scanner.keys, scanner.items, scanner.depth) == (keys, items, 0)
    assert len(found) <= scanner.values <= len(found) + empty
    deepest = max((depth for inner, depth in found if isinstance(inner, list | dict)), default=0)
    if deepest:
        scan(raw, WIDE.model_copy(update={"max_json_depth": deepest}), cuts)
        with pytest.raises(ApiError, match=f"at most {deepest - 1} "):
            scan(raw, WIDE.model_copy(update={"max_json_depth": deepest - 1}), cuts)


@settings(deadline=None)
@given(st.lists(st.sampled_from([*b'[]{}",:\\ a1']), max_size=60), st.lists(st.integers(0, 60)))
def test_text_that_is_no_json_is_counted_somehow(raw: list[int], cuts: list[int]) -> None:
    scan(bytes(raw), cuts=cuts)


LIMITS = ApiConfig(max_json_depth=10, max_json_keys=10, max_json_items=20, max_json_values=40)
FULL: dict[str, Any] = {
    "max_json_depth": b"[" * 10 + b"]" * 10,
    "max_json_keys": json.dumps({str(number): 1 for number in range(10)}).encode(),
    "max_json_items": json.dumps(["a"] * 9 + [[]] * 10).encode(),
    "max_json_values": json.dumps([1] * 39).encode(),
}


@pytest.mark.parametrize("setting", FULL)
def test_a_full_body_passes_and_one_more_is_named(setting: str) -> None:
    raw = FULL[setting]
    scan(raw, LIMITS)
    with pytest.raises(ApiError, match=rf"more than|nested too deep.*\({setting}\)") as found:
        scan(raw, LIMITS.model_copy(update={setting: getattr(LIMITS, setting) - 1}))
    assert found.value.status == 400
    assert setting in found.value.message


def test_what_strings_hold_is_not_counted() -> None:
    assert scan(json.dumps('[{":,\\"' * 50_000).encode(), LIMITS).items == 1


def test_limits_are_found_before_the_rest_has_come() -> None:
    scanner, part, keys = JsonScanner(ApiConfig()), b'{"a":1,"b":1},' * (SLICE // 16), SLICE // 8
    while scanner.keys + keys <= ApiConfig().max_json_keys:
        scanner.feed(part)
    with pytest.raises(ApiError, match="max_json_keys"):
        scanner.feed(part)
