"""Who shares cached pages with whom, by what routers and fronts make of settings, keys and bodies."""

from __future__ import annotations

import re
from hashlib import sha256
from itertools import combinations
from typing import Any

import pytest
from pydantic import ValidationError

from deploy.config.api import ApiConfig
from deploy.config.cache_salts import SHARED, CacheSalts
from deploy.config.keys import ApiKey

ONE, TWO = ApiKey(key="sk-one", name="one"), ApiKey(key="sk-two", name="two")
ASKED = (None, "a", "b", "A", "a ", "\ud83d", "東京")


def salts(keys: tuple[Any, ...] = (), **settings: Any) -> CacheSalts:
    return CacheSalts.of_settings(ApiConfig(api_keys=keys, **settings))


def digest(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()


def test_every_key_and_every_salt_of_a_body_is_alone() -> None:
    made = salts((ONE, TWO, "sk-plain"))
    found = {(name, asked): made.salt(name, asked) for name in ("one", "two", "default") for asked in ASKED}
    assert all(first != second for first, second in combinations(found.values(), 2))
    assert {len(salt) for salt in found.values()} == {16}
    again = salts((TWO, "sk-plain", ONE))
    assert all(again.salt(*asked) == salt for asked, salt in found.items()), "the order of keys is nothing"


def test_what_a_key_asks_for_never_gives_it_the_pages_of_another() -> None:
    """The body's salt comes on top of the key's, and whoever has one of the keys does not know the other's salt."""
    made = salts((ONE, TWO))
    other = made.salt("two", None)
    for asked in ("two", "sk-two", other.hex(), digest("sk-two")):
        assert made.salt("one", asked) not in (other, made.salt("two", asked))


def test_a_salt_depends_on_secrets_that_no_single_key_has() -> None:
    changed = salts((ONE, ApiKey(key="sk-another", name="two")))
    for asked in ASKED:
        assert salts((ONE, TWO)).salt("one", asked) != changed.salt("one", asked)


@pytest.mark.parametrize(
    ("keys", "settings"), [((), {}), (("sk-plain",), {}), ((ONE, TWO), {"cache_isolation": "shared"})]
)
def test_where_pages_are_shared_a_body_may_still_keep_its_own(keys: tuple[Any, ...], settings: dict[str, Any]) -> None:
    made = salts(keys, **settings)
    assert {made.salt(name, None) for name in ("", "one", "two")} == {b""}
    found = {asked: {made.salt(name, asked) for name in ("", "one", "two")} for asked in ASKED[1:]}
    assert all(len(same) == 1 for same in found.values())
    assert len(set.union(*found.values())) == len(found)
    assert b"" not in set.union(*found.values())
    assert SHARED.salt("", None) == b""


def test_keys_with_names_isolate_unless_the_settings_share() -> None:
    assert not ApiConfig().isolates_caches
    assert not ApiConfig(api_keys=("sk-plain",)).isolates_caches
    assert ApiConfig(api_keys=(ONE, "sk-plain")).isolates_caches
    assert ApiConfig(api_keys=(ONE,), cache_isolation="key").isolates_caches
    assert not ApiConfig(api_keys=(ONE,), cache_isolation="shared").isolates_caches
    for keys in ((), ("sk-plain",)):
        with pytest.raises(ValidationError, match="tells API keys apart by their names, and none has one"):
            ApiConfig(api_keys=keys, cache_isolation="key")


def test_routers_know_a_key_by_its_digest() -> None:
    made = salts((ONE, "sk-plain", TWO))
    assert made.name_of(digest("sk-one")) == "one"
    assert made.name_of(digest("sk-two").upper()) == "two"
    assert made.name_of(digest("sk-plain")) == "default"
    assert made.name_of(f"{digest('sk-two')} {digest('sk-one')}") == "one", "as a front, which goes by the settings"
    assert made.name_of(f" {digest('sk-two')}") == "two"
    for unknown in ("", " ", "sk-one", digest("sk-none"), digest("sk-one")[1:], "ü"):
        assert made.name_of(unknown) == ""
    assert SHARED.name_of(digest("sk-one")) == ""


def test_nothing_that_is_kept_or_made_is_a_secret() -> None:
    made = salts((ONE, TWO))
    assert not re.search("sk-(one|two)", repr(vars(made)))
