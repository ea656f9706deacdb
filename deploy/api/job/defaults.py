"""Default sampling parameters, for requests that give none: those of the model's generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from deploy.api.http.body import validate
from deploy.api.http.errors import ApiError
from deploy.api.job.bodies import GenerationBody
from workers.protocol.sampling import TABLE

FIELDS: Final = tuple(row.name for row in TABLE if row.parameter.in_generation_config)
"""The fields of generation_config.json that are taken; requests have them under the same names."""
SamplingDefaults = Mapping[str, float]
Asked = TypeVar("Asked", bound=GenerationBody)


def read_defaults(folder: Path) -> SamplingDefaults:
    """Read the sampling parameters of the generation_config.json in a model folder, without those that are missing or
    null; empty where there is no such file. ValueError for values that no request could have."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    found = {name: values[name] for name in FIELDS if values.get(name) is not None}
    try:
        validate(GenerationBody, {"model": "", **found})
    except ApiError as error:
        raise ValueError(
            f"{path}: {error}; correct it, or start with --generation-config none, which leaves it out"
        ) from None
    return found


def with_defaults(body: Asked, defaults: SamplingDefaults) -> Asked:
    """`body` with the defaults of the fields that its client left out."""
    missing = {name: value for name, value in defaults.items() if name not in body.model_fields_set}
    return body.model_copy(update=missing) if missing else body
