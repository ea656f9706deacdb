"""What holds for requests that do not say it: what the model's generation_config.json has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from deploy.api.http.body import validate
from deploy.api.http.errors import ApiError
from deploy.api.job.bodies import GenerationBody
from workers.protocol.request import TABLE

FIELDS: Final = tuple(row.name for row in TABLE if row.parameter.in_generation_config)
"""The fields of generation_config.json that are taken as they are; requests have them under the same names."""
SamplingDefaults = Mapping[str, Any]
"""Fields of a request's body by name. `max_tokens` bounds answers where the context has room for them."""

_OTHERWISE_NAMED: Final = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_strings": "stop"}
"""Fields of a request's body by the fields of generation_config.json that mean the same."""
_NEVER: Final = ("suppress_tokens", "bad_words_ids")
_NEVER_BIAS: Final = -100.0
_READ_OTHERWISE: Final = ("do_sample", "eos_token_id", "bos_token_id", "pad_token_id", *_NEVER)
_SAYS_NOTHING: Final = frozenset(
    (
        "transformers_version",
        "use_cache",
        "return_dict_in_generate",
        "compile_config",
        "disable_compile",
        "continuous_batching_config",
        "prefill_chunk_size",
        "low_memory",
        "max_time",
    )
)
"""Fields about how transformers computes or returns, whose answers are the same."""
_BEGINS_SAYS_NOTHING: Final = ("_", "cache_", "max_cache_", "output_", "assistant_", "num_assistant_", "prompt_lookup_")
_CHANGES_NOTHING: Final[Mapping[str, float]] = {
    "typical_p": 1,
    "top_h": 1,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "length_penalty": 1,
    "encoder_repetition_penalty": 1,
    "guidance_scale": 1,
}
"""Values of fields that are not taken with which nothing changes. Of every field null, false, 0 and what is empty are
such, too."""


def read_defaults(folder: Path) -> SamplingDefaults:
    """Read the fields of the generation_config.json in a model folder as those of a request's body, without those that
    are missing or null; empty where there is no such file. ValueError for values that no request could have.

    `do_sample: false` is a temperature of 0. Tokens that are never to come have a bias of -100.
    """
    values = {name: _whole(value) for name, value in _values(folder).items()}
    found = {name: values[name] for name in FIELDS if values.get(name) is not None}
    if values.get("do_sample") is False:
        found["temperature"] = 0.0
    if isinstance(stop := values.get("stop_strings"), str | list):
        values["stop_strings"] = [text for text in ([stop] if isinstance(stop, str) else stop) if text != ""]
    for name, field in _OTHERWISE_NAMED.items():
        if values.get(name):
            found[field] = values[name]
    if never := _never(values, folder):
        found["logit_bias"] = {str(token): _NEVER_BIAS for token in never}
    try:
        validate(GenerationBody, {"model": "", **found})
    except ApiError as error:
        own = {field: name for name, field in _OTHERWISE_NAMED.items()}
        field, colon, why = str(error).partition(":")
        raise ValueError(_wrong(folder, f"{own.get(field, field)}{colon}{why}")) from None
    return found


def not_taken(folder: Path) -> list[str]:
    """The fields of the generation_config.json in a model folder that would change answers, and that nothing here does.
    ValueError for a file that cannot be read."""
    values = _values(folder)
    known = {*FIELDS, *_OTHERWISE_NAMED, *_READ_OTHERWISE, *_SAYS_NOTHING}
    beyond = [
        name
        for name, value in values.items()
        if name not in known
        and not name.startswith(_BEGINS_SAYS_NOTHING)
        and value
        and _CHANGES_NOTHING.get(name) != value
    ]
    if any(len(words) > 1 for words in _lists(values.get("bad_words_ids"))):
        beyond.append("bad_words_ids of several tokens")
    return sorted(beyond)


def _values(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return values


def _whole(value: Any) -> Any:
    """A number as a request has it: files that programs write have whole ones with a point, as `50.0`."""
    return int(value) if type(value) is float and value.is_integer() else value


def _never(values: Mapping[str, Any], folder: Path) -> list[int]:
    """The ids that are never to come."""
    words = _lists(values.get("bad_words_ids"))
    suppressed = values.get("suppress_tokens") or []
    ids = [
        *(suppressed if isinstance(suppressed, list) else [suppressed]),
        *(i for [i] in (w for w in words if len(w) == 1)),
    ]
    if any(type(token) is not int or token < 0 for token in ids):
        raise ValueError(_wrong(folder, f"{' and '.join(_NEVER)}: token ids are expected"))
    return list(dict.fromkeys(ids))


def _lists(value: Any) -> list[list[Any]]:
    return [words for words in value if isinstance(words, list)] if isinstance(value, list) else []


def _wrong(folder: Path, why: str) -> str:
    path = folder / "generation_config.json"
    return f"{path}: {why}; correct it, or start with --generation-config none, which leaves it out"
