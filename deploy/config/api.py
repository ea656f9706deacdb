"""Settings of the HTTP front."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from deploy.config.keys import AnyKey, ApiKey, check_distinct, with_file
from deploy.config.otlp import endpoint_problem
from workers.config import Flag

ACCESS: Final = "Access"
"""A heading in the help of commands."""


class ApiConfig(BaseModel):
    """Settings of a replica's HTTP front: which requests it accepts, and how it answers."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True)

    served_model_names: Annotated[
        tuple[str, ...], Flag("--served-model-name", default="the folder's", panel=ACCESS)
    ] = ()
    """Name that clients ask for; further ones are aliases.

    The first is the one that answers carry. Empty: the model's own name."""
    ui: bool = True
    """Serve the page at /, where people try the model and watch it. Without it that is answered 404."""
    api_keys: Annotated[tuple[AnyKey, ...], Flag("--api-key", default="everybody is let in", panel=ACCESS)] = Field(
        default=(), repr=False
    )
    """Let in requests with this bearer token; may be repeated.

    Empty: everybody is let in. `/health`, `/metrics` and the page itself are always open. One with a name may have
    limits, a priority and a weight: docs/api-keys.md."""
    api_keys_file: Annotated[Path | None, Flag(default="none", panel=ACCESS)] = None
    """Keys with names, limits, priorities and weights as YAML (docs/api-keys.md).

    They come on top of `api_keys`. It is read where the application is started."""
    cache_isolation: Annotated[
        Literal["key", "shared"] | None, Flag(default="key if API keys have names, else shared", panel=ACCESS)
    ] = None
    """Who finds the cached beginnings of prompts. key: each API key's own requests. shared: all requests.

    With key nobody learns from times or from `cached_tokens` what another key has asked; keys without a name count as
    one. shared saves the computation of beginnings that keys have in common, such as system prompts."""
    otlp_endpoint: Annotated[str | None, Flag(metavar="URL", default="$OTEL_EXPORTER_OTLP_ENDPOINT", panel=ACCESS)] = (
        None
    )
    """OpenTelemetry collector for spans of requests, as http://127.0.0.1:4318 (docs/tracing.md).

    That variable is read where the application is started. Where neither says one there are no spans."""
    cors_origins: tuple[str, ...] = ()
    """Web pages that may call this server from a browser, as https://app.example.com; or "*". Empty: none."""
    max_body_bytes: int = Field(default=8 * 1024 * 1024, gt=0)
    """Largest request body; larger ones are answered 413 without being kept."""
    max_held_bytes: int = Field(default=256 * 1024 * 1024, gt=0)
    """Most of large request bodies (more than 64 KiB) that is held at one time, until their prompts are tokenized.

    What comes on top is answered 503. One of `max_body_bytes` always fits."""
    body_timeout_s: float = Field(default=60.0, gt=0)
    """A body that takes longer to arrive is answered 408, and what was held of it is given back."""
    max_json_depth: int = Field(default=1000, gt=0, le=1000)
    """Most arrays and objects of a body that lie in each other; more of this or of the next three is answered 400."""
    max_json_keys: int = Field(default=65_536, gt=0)
    """Most names of fields in all objects of a body."""
    max_json_items: int = Field(default=131_072, gt=0)
    """Most values of a body that are strings, arrays or objects."""
    max_json_values: int = Field(default=1_200_000, gt=0)
    """Most values of a body of any kind. They are mostly token ids: this is more than a context of a million."""
    default_max_tokens: int | None = Field(default=None, gt=0)
    """Tokens to generate where a request does not say.

    None: 16 for completions (as OpenAI), what is left of the context for chats."""
    retry_after_s: int = Field(default=1, gt=0)
    """Least that a 429 asks the client to wait until sequences have ended; more where they end slowly."""
    max_n: int = Field(default=128, gt=0)
    """Largest `n`."""
    max_logprobs: int = Field(default=20, ge=0)
    """Largest `logprobs` or `top_logprobs`."""
    max_stop_strings: int = Field(default=16, gt=0)
    """Most entries of `stop`."""
    max_stop_chars: int = Field(default=512, gt=0)
    """Most characters of one stop string."""
    chat_template: Annotated[str | None, Flag(metavar="PATH|TEXT", default="the model's own")] = None
    """A Jinja chat template to use instead of the model folder's: the text, or the path of a file that holds it.

    Where a model's makers publish none, what stands for it holds (docs/models.md)."""
    control_tokens_in_text: bool = False
    """Encode what messages spell like the chat template's control tokens, as <|user|>, as these; else as text.

    With these a message can forge turns."""
    generation_config: Annotated[Literal["auto", "none"], Flag(metavar="auto|none")] = "auto"
    """Source of the sampling parameters of requests that give none.

    auto: the sampling parameters in the folder's generation_config.json, as `/v1/models` tells. none: temperature 1
    and no filter."""
    tool_parser: Annotated[str, Flag(metavar="auto|none|NAME", default="as the chat template writes them")] = "auto"
    """Parser of tool calls: deepseek_v3, deepseek_v31, deepseek_v32, kimi_k2, glm, hermes, mistral or hy_v4.

    auto: as the chat template writes them. none: they stay text."""
    reasoning_parser: Annotated[str, Flag(metavar="auto|none|NAME", default="as the chat template writes it")] = "auto"
    """Parser of reasoning: deepseek_r1, deepseek_v3, kimi_k2, glm, mistral or hy_v4.

    auto: as the chat template writes it. none: it is content."""
    stop_in_reasoning: bool = False
    """Let the stop strings of a request end the reasoning before an answer and tool calls as well.

    They are meant for the answer's content. A model that thinks about them would end by them, and a call whose
    arguments hold one would be cut."""
    stored_responses: int = Field(default=0, ge=0)
    """Responses that each replica keeps for `previous_response_id` of /v1/responses, the newest ones; 0: none.

    A request is sure to find the one it goes on from only where there is one replica."""
    stored_response_bytes: int = Field(default=64 * 1024 * 1024, gt=0)
    """Most of conversations that are kept so."""
    stored_response_s: float = Field(default=3600.0, gt=0)
    """Time for which a response is kept."""
    probe_timeout_s: float = Field(default=5.0, gt=0)
    """Longest time that `/health` waits for its token, or for a step of others."""
    probe_ttl_s: float = Field(default=1.0, ge=0)
    """Time for which `/health` trusts the last good health check (a fault is reported at once all the same)."""

    @model_validator(mode="before")
    @classmethod
    def _read_keys(cls, data: Any) -> Any:
        return with_file(data)

    @model_validator(mode="after")
    def _keys_are_distinct(self) -> Self:
        check_distinct(self.api_keys)
        return self

    @model_validator(mode="after")
    def _isolated_keys_have_names(self) -> Self:
        if self.cache_isolation == "key" and not self._named:
            raise ValueError(
                "cache_isolation = key tells API keys apart by their names, and none has one: give names "
                "(api_keys_file), or leave cache_isolation out"
            )
        return self

    @property
    def _named(self) -> bool:
        return any(isinstance(key, ApiKey) for key in self.api_keys)

    @property
    def isolates_caches(self) -> bool:
        """Whether requests of different API keys share no cached pages."""
        return self.cache_isolation == "key" or (self.cache_isolation is None and self._named)

    @field_validator("served_model_names", "api_keys", "cors_origins")
    @classmethod
    def _no_empty(cls, values: tuple[Any, ...], info: ValidationInfo) -> tuple[Any, ...]:
        if not all(values):
            raise ValueError(f"{info.field_name} must not hold an empty string")
        return values

    @field_validator("otlp_endpoint")
    @classmethod
    def _reachable_collector(cls, value: str | None) -> str | None:
        if value is not None and (problem := endpoint_problem(value)):
            raise ValueError(f"otlp_endpoint: {problem}")
        return value

    @field_validator("tool_parser", "reasoning_parser")
    @classmethod
    def _known_parser(cls, value: str, info: ValidationInfo) -> str:
        from deploy.parsing.registry import REASONING_PARSERS, TOOL_PARSERS  # help needs no parsers

        names = ("auto", "none", *(TOOL_PARSERS if info.field_name == "tool_parser" else REASONING_PARSERS))
        if value not in names:
            raise ValueError(f"{info.field_name} must be one of {', '.join(names)}, not {value!r}")
        return value

    @field_validator("chat_template")
    @classmethod
    def _read_template(cls, value: str | None) -> str | None:
        # A template is never a single short line without Jinja's braces; a path never holds them.
        if value is None:
            return None
        if "{" not in value:
            path = Path(value)
            if not path.is_file():
                raise ValueError(f"chat_template is neither a Jinja template nor a file: {value!r}")
            value = path.read_text(encoding="utf-8")
        from deploy.text.template import syntax_problem  # most starts need no Jinja

        if problem := syntax_problem(value):
            raise ValueError(f"chat_template is not valid Jinja, {problem}")
        return value
