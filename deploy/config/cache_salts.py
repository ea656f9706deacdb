"""Salts of the keys of cached pages: who shares them with whom.

Fronts and routers make them alike, from the settings that both have. What travels from them to an engine is a digest,
which tells neither an API key nor what a client sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b, sha256
from typing import Final

from deploy.config.api import ApiConfig
from deploy.config.keys import UNNAMED, ApiKey

SALT_BYTES: Final = 16
_SECRET: Final = b"latentserve keys"
_SALT: Final = b"latentserve salt"
"""They keep these hashes apart from any other of the same input."""


class CacheSalts:
    """Makes the salts of an application's requests.

    With `isolated` the name of a request's API key counts, and with it a secret of the application: a hash of all of
    its API keys, which every process of it has and which no client knows, who has one of them. So whoever sees the keys
    of pages cannot tell by them what was asked.
    """

    def __init__(self, keys: Sequence[str | ApiKey] = (), *, isolated: bool = False) -> None:
        """`keys`: those of the settings. `isolated`: pages are not shared by keys of different names."""
        self._isolated = isolated
        known = [(key.key, key.name) if isinstance(key, ApiKey) else (key, UNNAMED) for key in keys]
        secrets = [sha256(secret.encode()) for secret, _ in known]
        self._name_of = {made.hexdigest(): name for made, (_, name) in zip(secrets, known, strict=True)}
        hashed = b"".join(sorted(made.digest() for made in secrets))
        self._secret = blake2b(hashed, digest_size=32, person=_SECRET).digest()

    @staticmethod
    def of_settings(config: ApiConfig) -> CacheSalts:
        """Those of an application with these settings."""
        return CacheSalts(config.api_keys, isolated=config.isolates_caches)

    def salt(self, name: str, asked: str | None) -> bytes:
        """Return the salt of a request of the API key with this name, whose body asks for the `cache_salt` `asked`: 16
        bytes, none where all requests share their pages. The body's salt comes on top of the key's."""
        found = self._hash(name.encode(), self._secret) if self._isolated else b""
        return found if asked is None else self._hash(asked.encode("utf-8", "surrogatepass"), found or self._secret)

    def name_of(self, digests: str) -> str:
        """Return the name of the API key among whose SHA-256 digests, in hexadecimal and with blanks between, that of a
        known one is; empty if there is none. As in `KeyRing.find` the first in the settings counts."""
        offered = digests.lower().split()
        return next((name for digest, name in self._name_of.items() if digest in offered), "")

    @staticmethod
    def _hash(text: bytes, key: bytes) -> bytes:
        return blake2b(text, digest_size=SALT_BYTES, key=key, person=_SALT).digest()


SHARED: Final = CacheSalts()
"""Where there are no API keys."""
