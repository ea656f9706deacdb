"""The bodies of requests that generate: OpenAI's fields, and vLLM's extensions to them. Bodies of other APIs become
chats.

Types are strict (no "5" for 5, no 1 for true; 5.0 is 5), null means that a field was not given, and unknown fields are
ignored as OpenAI's own servers and clients expect; only fields that would change the answer and are not supported are
rejected (`deploy.api.job.unsupported`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    GetJsonSchemaHandler,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from typing_extensions import override

from deploy.api.http.errors import unsupported
from deploy.api.job.unsupported import reject_stream_options
from workers.protocol.plan import MAX_ASKED_LOGIT_BIAS, MAX_LOGPROB_TOKEN_IDS
from workers.protocol.request import LEAST_SEED, MOST_SEED, NO_SEED, TABLE

FORMS: Final = (
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structural_tag",
    "structured_outputs",
)
"""Fields that say what an answer must look like, of which a request has one at most."""
MOST_CACHE_SALT: Final = 256
"""Characters of a `cache_salt`."""
_EXACT: Final = 2.0**53


class Body(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: whole(item) for name, item in value.items() if item is not None}
        return value

    @override
    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Every field that may be left out may be null, too."""
        schema = handler(core)
        described = handler.resolve_ref_schema(schema)
        for name, field in described["properties"].items():
            if name not in described.get("required", ()):
                described["properties"][name] = or_null(field)
        return schema


def whole(value: Any) -> Any:
    """A number without a fraction as an integer: JSON has one kind of numbers, and some clients write all of them with
    a fraction, as 16.0. Larger ones may have lost digits, and stay what they are."""
    return int(value) if type(value) is float and value.is_integer() and abs(value) < _EXACT else value


def or_null(field: JsonSchemaValue) -> JsonSchemaValue:
    """The schema of a field that may be null as well."""
    outside: JsonSchemaValue = {name: field[name] for name in ("title", "description", "default") if name in field}
    inside = {name: value for name, value in field.items() if name not in outside}
    options = inside["anyOf"] if set(inside) == {"anyOf"} else [inside]
    null = {"type": "null"}
    return {**outside, "anyOf": [*options, *([] if null in options else [null])]}


def at_most(most: int, what: str) -> Callable[[Any], Any]:
    """A check that comes before every entry is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"at most {most} {what} are allowed, not {len(value)}")
        return value

    return check


def _one_or_many(value: Any) -> list[str]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError("input should be a string or a list of strings")
    return items


def _object_or_text(value: Any) -> Any:
    if not isinstance(value, (dict, str)):
        raise ValueError("input should be an object or a string")
    return value


_NOT_IN_FORMS: Final = ("disable_any_whitespace", "whitespace_pattern")
"""What vLLM's `structured_outputs` may say besides, and what is not supported. Nothing falls back to another library
here, and objects have no properties but those that a schema names, so `disable_fallback` and
`disable_additional_properties` say what holds anyway."""


class StructuredOutputs(Body):
    """What the answer must look like, as vLLM's clients say it: one of these."""

    json_: Annotated[dict[str, Any] | str | None, BeforeValidator(_object_or_text)] = Field(default=None, alias="json")
    """As `guided_json`."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    """true: a JSON object."""
    structural_tag: Annotated[dict[str, Any] | str | None, BeforeValidator(_object_or_text)] = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_there(cls, value: Any) -> Any:
        for name in _NOT_IN_FORMS if isinstance(value, Mapping) else ():
            if value.get(name) not in (None, False, ""):
                raise unsupported(f"structured_outputs.{name}", "structured_outputs")
        return value

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if len(self.given()) > 1:
            raise ValueError(f"{' and '.join(self.given())}: only one of them can be given")
        return self

    def given(self) -> list[str]:
        """Those that say something, by their names in requests."""
        named = {field.alias or name: getattr(self, name) for name, field in type(self).model_fields.items()}
        return [name for name, value in named.items() if value is not None and value is not False]


class StreamOptions(Body):
    """OpenAI's `stream_options`."""

    include_usage: bool = False
    """Send one more event with the token counts at the end."""
    continuous_usage_stats: bool = False
    """With `include_usage`, have the counts so far in every event, too. As in vLLM."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_no_stream_has(cls, value: Any) -> Any:
        reject_stream_options(value)
        return value


_RESPONSE_FORMAT: Final = {
    "type": "object",
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"], "type": "string"},
        "schema": {"type": "object"},
        "json_schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "schema": {"type": "object"},
                "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            },
            "required": ["schema"],
        },
    },
    "required": ["type"],
}


def parameter(name: str) -> Any:
    """The field of a sampling parameter, with the default, the range and the meaning that its row states."""
    (row,) = (row for row in TABLE if row.name == name)
    least, most = row.parameter.asked
    return Field(default=row.default, ge=least, le=most, description=row.parameter.meaning)


def _fields() -> dict[str, Any]:
    return {row.name: (row.kind, parameter(row.name)) for row in TABLE}


if TYPE_CHECKING:
    _Sampled = Body
else:
    # The model comes first: the first wrong field is the one that an answer names.
    _Sampled = create_model("_Sampled", __base__=Body, model=(str, ...), **_fields())


def _asked_seed(seed: int | None) -> int | None:
    return None if seed == NO_SEED else seed


class SamplingFields(_Sampled):
    """Fields of all endpoints that generate, under the same names everywhere: how tokens are chosen, where an answer
    ends, and what it must look like. Bodies that become chats hand them on as they are. Ranges that depend on the model
    or the settings are checked later."""

    model: str
    seed: Annotated[int | None, AfterValidator(_asked_seed)] = Field(default=None, ge=LEAST_SEED, le=MOST_SEED)
    """-1 is as none."""
    logit_bias: Annotated[dict[str, float], BeforeValidator(at_most(MAX_ASKED_LOGIT_BIAS, "token ids"))] = Field(
        default_factory=dict
    )
    """Token id (as a string) to bias, -100 ... 100."""

    # Extensions, as in vLLM.
    min_tokens: int = Field(default=0, ge=0)
    stop_token_ids: Annotated[list[int], FailFast()] = Field(default_factory=list, max_length=256)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    """Lower runs first."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MOST_CACHE_SALT)
    """Share cached pages of the prompt only with requests of the same salt, and, as far as API keys share them at all,
    of the same key."""
    return_accepted_drafts: bool = False
    """Say of every token whether it was a draft that was accepted, as `accepted_drafts`, and in `usage` how many were
    accepted and how many were not."""

    # What the answer must look like; one of these and `response_format` at most (`deploy.api.job.constraint`).
    guided_json: Annotated[dict[str, Any] | str | None, BeforeValidator(_object_or_text)] = None
    """A JSON schema that the answer is valid for."""
    guided_regex: str | None = None
    """A regular expression that the whole answer matches."""
    guided_choice: list[str] | None = None
    """Strings of which the answer is one."""
    guided_grammar: str | None = None
    """A grammar in EBNF whose rule `root` the answer follows, or in Lark's syntax whose rule `start` it follows."""
    structural_tag: Annotated[dict[str, Any] | str | None, BeforeValidator(_object_or_text)] = None
    """xgrammar's structural tag: text that is free but for what stands between certain tags."""
    structured_outputs: StructuredOutputs | None = None
    """The same as vLLM's clients say it: {"json"}, {"regex"}, {"choice"}, {"grammar"}, {"json_object"} or
    {"structural_tag"}."""
    guided_begin_after: str | None = None
    """A token, such as </think>, up to which the answer is free."""

    def shared(self) -> dict[str, Any]:
        """Return those of these fields that the client gave. The others stay out, because the model has defaults of its
        own."""
        return {name: getattr(self, name) for name in SHARED if name in self.model_fields_set}


SHARED: Final = tuple(name for name in SamplingFields.model_fields if name != "model")
StopStrings = Annotated[list[str], BeforeValidator(_one_or_many, json_schema_input_type=str | list[str])]


class GenerationBody(SamplingFields):
    """Fields of both of OpenAI's older endpoints."""

    max_tokens: int | None = Field(default=None, ge=1)
    n: int = Field(default=1, ge=1)
    stop: StopStrings = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """Give every choice the ids it generated, as `token_ids`. Streams give them as they come, with the text that is
    certain by then; where log-probabilities are asked for too, with the text they belong to."""
    return_tokens_as_token_ids: bool = False
    """Write tokens in log-probabilities as `token_id:` and the id, so that different tokens never look the same. As in
    vLLM."""
    logprob_token_ids: Annotated[list[int], FailFast()] = Field(default_factory=list, max_length=MAX_LOGPROB_TOKEN_IDS)
    """Ids whose own log-probabilities are told at each generated token, too, behind the most probable ones, where
    log-probabilities are asked for. As in vLLM."""
    response_format: Annotated[dict[str, Any] | None, WithJsonSchema(_RESPONSE_FORMAT)] = None
    """{"type": "json_object"}, with a `schema` or without, or {"type": "json_schema", "json_schema": {"name", "schema",
    "strict"}}."""

    @property
    def forms(self) -> list[str]:
        """The `FORMS` that are given and say something."""
        given = [name for name in FORMS if getattr(self, name) is not None]
        silent = {"response_format"} if self.response_format == {"type": "text"} else set()
        if self.structured_outputs is not None and not self.structured_outputs.given():
            silent.add("structured_outputs")
        return [name for name in given if name not in silent]

    @property
    def formed(self) -> bool:
        """Whether the answer must look like something."""
        return bool(self.forms)

    @property
    def constrained(self) -> bool:
        """Whether there is anything that may constrain the answer."""
        return any(getattr(self, name) is not None for name in (*FORMS, "guided_begin_after"))


_IDS: Final = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT: Final = {"type": "string", "minLength": 1}
_LISTS: Final = [{"type": "array", "items": item, "minItems": 1} for item in (_TEXT, _IDS)]
_PROMPT: Final = {"anyOf": [_TEXT, _IDS, *_LISTS]}


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    """A string, token ids, or a list of either."""
    max_tokens: int | None = Field(default=None, ge=0)
    """0, with echo or prompt_logprobs: only tell of the prompt."""
    echo: bool = False
    """Put the prompt before the text; with logprobs its tokens, too."""
    logprobs: int | None = Field(default=None, ge=0)
    prompt_logprobs: int | None = Field(default=None, ge=0)
    """Tell how probable each token of the prompt was, and the so many most probable ones. As in vLLM."""
    add_special_tokens: bool = True
