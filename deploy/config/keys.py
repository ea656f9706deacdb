"""API keys with names, and what each of them may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

UNNAMED = "default"
"""Name of all keys that have none of their own, where others have one."""


class ApiKey(BaseModel):
    """API key with its limits. A limit that is None is none."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    key: str = Field(min_length=1, repr=False)
    """Secret that clients send."""
    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the key in metrics, logs and traces."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Lower runs first, and before all that has a higher number. A request may raise its own number, never lower it."""
    weight: float = Field(default=1.0, ge=0.001, le=1000)
    """Share of the tokens among keys of its priority whose requests wait."""
    requests_per_minute: int | None = Field(default=None, gt=0)
    """Requests to endpoints that generate."""
    tokens_per_minute: int | None = Field(default=None, gt=0)
    """Prompt tokens and generated ones together."""
    max_sequences: int | None = Field(default=None, gt=0)
    """Sequences that run or wait at one time: prompts times `n` of each request."""

    @property
    def limited(self) -> bool:
        """Whether there is anything to count."""
        return (self.requests_per_minute or self.tokens_per_minute or self.max_sequences) is not None


PLAIN_KEY, NAMED_KEY = "[plain]", "[named]"
"""Kinds of keys; `deploy.mistakes` leaves these out of what it tells."""


def _kind(value: Any) -> str:
    return NAMED_KEY if isinstance(value, (dict, ApiKey)) else PLAIN_KEY


AnyKey = Annotated[Annotated[str, Tag(PLAIN_KEY)] | Annotated[ApiKey, Tag(NAMED_KEY)], Discriminator(_kind)]
"""A key as it may be given. By its kind, so that a mistake is told once, of the kind that was meant."""


def with_file(data: Any) -> Any:
    """The settings of the front as they were given, with the keys of `api_keys_file` among `api_keys`. ValueError for a
    file that holds no list; its text is never quoted."""
    path = data.get("api_keys_file") if isinstance(data, dict) else None
    if not isinstance(path, (str, Path)):
        return data  # none, or a mistake that is told by its type
    try:
        held = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ValueError(f"api_keys_file: cannot read {path}: {reason}") from None
    except yaml.YAMLError:
        raise ValueError(f"api_keys_file: {path} is not YAML") from None
    if not isinstance(held, list):
        raise ValueError(f"api_keys_file: {path} must hold a list of keys, each with `key` and `name`")
    given = data.get("api_keys") or ()
    if not isinstance(given, (list, tuple)):
        return data  # whose mistake is told by its type
    known = {_secret(key) for key in given}  # settings that another process reads hold them already
    return {**data, "api_keys": (*given, *(key for key in held if _secret(key) not in known))}


def _secret(key: Any) -> Any:
    return key.key if isinstance(key, ApiKey) else str(key.get("key")) if isinstance(key, dict) else str(key)


def check_distinct(keys: Sequence[str | ApiKey]) -> None:
    """ValueError for a key or a name that is there twice."""
    secrets = [key if isinstance(key, str) else key.key for key in keys]
    names = [key.name for key in keys if isinstance(key, ApiKey)]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two API keys have the name {doubled}")
    if UNNAMED in names and len(names) < len(keys):
        raise ValueError(f"the name {UNNAMED} is that of API keys without a name: give the key another one")
    if len({*secrets}) < len(secrets):
        raise ValueError("an API key is listed twice")
