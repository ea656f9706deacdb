"""Jobs: the sequences that the engine is asked for, made of a body. Everything that depends on the model or the
settings is checked here, before anything is queued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from deploy.api.http.body import Incoming, parse_object, validate
from deploy.api.http.draws import Draws
from deploy.api.http.errors import invalid
from deploy.api.job.bodies import CompletionBody, GenerationBody, StreamOptions
from deploy.api.job.chat_bodies import ChatBody
from deploy.api.job.constraint import UNCONSTRAINED, requested_grammar
from deploy.api.job.defaults import SamplingDefaults
from deploy.api.job.model import Reading, ServedModel, too_long
from deploy.api.job.unsupported import Endpoint, reject_unsupported
from deploy.api.limits.admission import Admission
from deploy.config.api import ApiConfig
from deploy.text.tokenizer import Tokenizer
from workers.protocol.front import ModelInfo
from workers.protocol.grammar import Grammar
from workers.protocol.request import TABLE, SamplingParams, sequence_seeds

Asked = TypeVar("Asked", bound=GenerationBody)

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing logits by it would overflow."""
DEFAULT_COMPLETION_TOKENS = 16
NO_STREAM_OPTIONS = StreamOptions()
"""Options of a request that names none."""


@dataclass(frozen=True)
class Prompt:
    """Prompt of a request."""

    ids: Sequence[int]
    text: str | None
    """Text as the client wrote it; None for a prompt of ids."""


@dataclass(frozen=True)
class Branch:
    """Sequence to generate: choice `index` of the answer."""

    index: int
    prompt: int
    """Index into the job's prompts."""
    sampling: SamplingParams


@dataclass(frozen=True)
class Job:
    """Job of one HTTP request: all that it asks of the engine, and how its answer is to be written."""

    model: str
    """The name that the answer carries."""
    prompts: tuple[Prompt, ...]
    sequences: tuple[Branch, ...]
    priority: int
    cache_salt: str | None
    """As in the body."""
    stops: tuple[str, ...]
    stop_token_ids: frozenset[int]
    """The stop ids that the request itself named."""
    include_stop: bool
    """Leave the stop string or stop id in the text."""
    skip_special_tokens: bool
    logprobs: int
    """Number of log-probabilities per generated token; see `SamplingParams`."""
    stream: bool
    include_usage: bool
    counts_in_events: bool
    """Whether every event of a stream has the token counts so far."""
    echo: bool
    token_ids: bool
    accepted_drafts: bool
    named: tuple[int, ...] = ()
    """Ids whose log-probabilities are told at each generated token."""
    tokens_as_ids: bool = False
    """Write tokens in log-probabilities as `token_id:` and the id."""
    prompt_logprobs: int = -1
    """Number of log-probabilities per prompt token; see `SamplingParams`."""
    own_prompt_logprobs: int = -1
    """Number of prompt log-probabilities that the answer shows in the field of that name."""
    silent: bool = False
    """Whether nothing is to be generated. The engine is asked for one token, which nobody sees."""
    not_enforced: tuple[str, ...] = ()
    """Parts of the tools' schemas that are left to the model, each as a path and a keyword."""
    reading: Reading | None = None
    """Rules for telling reasoning and tool calls from content; None: all is content."""
    draws: Draws = field(default_factory=Draws)
    """What the request draws."""

    @property
    def kept(self) -> frozenset[int]:
        """Special tokens that stand in the text in any case."""
        return frozenset() if self.reading is None else self.reading.kept


def with_defaults(body: Asked, defaults: SamplingDefaults, vocab_size: int) -> Asked:
    """`body` with the defaults of the fields that its client left out, but for `max_tokens`, which bounds
    answers where the context has room for them (`build_job`)."""
    missing = {
        name: value for name, value in defaults.items() if name not in body.model_fields_set and name != "max_tokens"
    }
    if "logit_bias" in defaults:
        biases = {token: bias for token, bias in defaults["logit_bias"].items() if int(token) < vocab_size}
        missing["logit_bias"] = {**body.logit_bias, **biases}
    made = body.model_copy(update=missing) if missing else body
    if "min_tokens" in missing:
        made.model_fields_set.discard("min_tokens")  # `build_job` keeps to what may be generated: nobody asked for more
    return made


def most_asked(body: GenerationBody) -> int | None:
    """The most tokens that a request asks for; None if it does not say."""
    return (body.max_completion_tokens or body.max_tokens) if isinstance(body, ChatBody) else body.max_tokens


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """400 for an id outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise invalid(f"{param}: token id {wrong} is outside the vocabulary of {vocab_size} ids", param)


def sampling_params(
    body: GenerationBody, logprobs: int, info: ModelInfo, grammar: Grammar | None = None
) -> SamplingParams:
    """Build the sampling parameters that all sequences of the request share; `max_tokens` and `seed` are still to be
    set for each."""
    biases: dict[int, float] = {}
    for key, bias in body.logit_bias.items():
        # At most as many digits as any vocabulary needs, and only ASCII ones: int() takes far more.
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise invalid(f"logit_bias: {key[:32]!r} is not a token id", "logit_bias")
        if not -100.0 <= bias <= 100.0:
            raise invalid(f"logit_bias: the bias {bias} of token {key} is not in -100 ... 100", "logit_bias")
        biases[int(key)] = bias
    check_ids(list(biases), info.vocab_size, "logit_bias")
    check_ids(body.stop_token_ids, info.vocab_size, "stop_token_ids")
    # A text that is all its grammar asks for has to end.
    eos = () if body.ignore_eos and (grammar is None or grammar.kind == "free") else info.eos_ids
    numbers: dict[str, Any] = {row.name: getattr(body, row.name) for row in TABLE}
    if numbers["temperature"] < GREEDY_BELOW:
        numbers["temperature"] = 0.0
    numbers["top_k"] = min(max(numbers["top_k"], 0), info.vocab_size)
    return SamplingParams(
        max_tokens=1,
        **numbers,
        logit_bias=tuple(sorted(biases.items())),
        stop_ids=tuple(dict.fromkeys((*eos, *body.stop_token_ids))),
        min_tokens=body.min_tokens,
        logprobs=logprobs,
        grammar=grammar,
    )


def check_limits(body: GenerationBody, tokenizer: Tokenizer | None, config: ApiConfig) -> None:
    """400 for what the settings do not allow."""
    if body.n > config.max_n:
        raise invalid(f"n: must be at most {config.max_n}, not {body.n}", "n")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options: only allowed when stream is true", "stream_options")
    if len(body.stop) > config.max_stop_strings:
        raise invalid(f"stop: at most {config.max_stop_strings} strings are allowed, not {len(body.stop)}", "stop")
    if not all(body.stop):
        raise invalid("stop: must not hold an empty string", "stop")
    if any(len(stop) > config.max_stop_chars for stop in body.stop):
        raise invalid(f"stop: a string is longer than {config.max_stop_chars} characters", "stop")
    if body.stop and tokenizer is None:
        raise invalid("stop: this model has no tokenizer; use stop_token_ids", "stop")


def requested_logprobs(body: CompletionBody | ChatBody, config: ApiConfig) -> int:
    """`SamplingParams.logprobs` of a request; 400 when out of range."""
    if isinstance(body, CompletionBody):
        field, wanted = "logprobs", -1 if body.logprobs is None else body.logprobs
    else:
        field, wanted = "top_logprobs", body.top_logprobs if body.logprobs else -1
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs: only allowed when logprobs is true", "top_logprobs")
    if wanted > config.max_logprobs:
        raise invalid(f"{field}: must be at most {config.max_logprobs}, not {wanted}", field)
    if body.logprob_token_ids and wanted < 0:
        raise invalid("logprob_token_ids: only allowed together with logprobs", "logprob_token_ids")
    return wanted


def check_scores(body: CompletionBody, most: int) -> None:
    """400 for what a completion cannot ask about its prompt, of which at most `most` ids per place are told."""
    asked = body.prompt_logprobs
    if asked is not None and asked > most:
        raise invalid(f"prompt_logprobs: must be at most {most}, not {asked}", "prompt_logprobs")
    if asked is not None and body.stream:
        raise invalid(
            "prompt_logprobs: not available when stream is true; ask for echo with logprobs, or do not stream",
            "prompt_logprobs",
            "conflicting_parameters",
        )
    if body.max_tokens == 0 and not body.echo and asked is None:
        raise invalid(
            "max_tokens: 0 generates nothing, which is only of use with echo or prompt_logprobs; give at least 1",
            "max_tokens",
        )


def asked_of_prompt(body: CompletionBody) -> int:
    """`SamplingParams.prompt_logprobs` of a request."""
    echoed = -1 if body.logprobs is None or not body.echo else body.logprobs
    return max(echoed, -1 if body.prompt_logprobs is None else body.prompt_logprobs)


def build_job(
    body: CompletionBody | ChatBody,
    prompts: Sequence[Prompt],
    info: ModelInfo,
    tokenizer: Tokenizer | None,
    config: ApiConfig,
    grammar: Grammar | None = None,
    most: int | None = None,
    draws: Draws | None = None,
) -> Job:
    """The sequences of a request, all under one `grammar`; 400 for what the model or the settings do not allow. `most`:
    the most tokens of an answer, where neither the request nor the settings say it. `draws`: what the request draws."""
    draws, options = draws or Draws(), body.stream_options or NO_STREAM_OPTIONS
    chat = isinstance(body, ChatBody)
    param = "messages" if chat else "prompt"
    wanted = most_asked(body)
    default = config.default_max_tokens or most or (None if chat else DEFAULT_COMPLETION_TOKENS)
    logprobs = requested_logprobs(body, config)
    sampling = sampling_params(body, logprobs, info, grammar)
    check_ids(body.logprob_token_ids, info.vocab_size, "logprob_token_ids")
    named = tuple(dict.fromkeys(body.logprob_token_ids))
    sampling = msgspec.structs.replace(sampling, logprob_token_ids=named)
    asked = -1
    if isinstance(body, CompletionBody):
        check_scores(body, config.max_logprobs)
        asked = asked_of_prompt(body)
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=asked)
    sequences: list[Branch] = []
    for number, prompt in enumerate(prompts):
        # A tokenizer gives its own ids, and to look at all of a long text takes a tenth of the time to encode it. Those
        # that a router handed over the scheduler looks at once more.
        if prompt.text is None or tokenizer is None or tokenizer.size > info.vocab_size:
            check_ids(prompt.ids, info.vocab_size, param)
        left = info.max_context - len(prompt.ids)
        if left < (wanted or 1):
            raise too_long(len(prompt.ids), wanted or 1, info, param)
        max_tokens = 1 if wanted == 0 else wanted or min(default or left, left)
        least, most = body.min_tokens, 0 if wanted == 0 else max_tokens
        if "min_tokens" not in body.model_fields_set:
            least = min(least, most)
        if least > most:
            raise invalid(f"min_tokens: {body.min_tokens} is more than the {most} to generate", "min_tokens")
        # Equal prompts of a request without a seed must not give equal samples; with a seed they must.
        if body.seed is None:
            seeds = [draws.seed(number * body.n + choice) for choice in range(body.n)]
        else:
            seeds = sequence_seeds(body.seed, prompt.ids, body.n)
        for index, seed in enumerate(seeds, number * body.n):
            own = msgspec.structs.replace(sampling, max_tokens=max_tokens, min_tokens=least, seed=seed)
            sequences.append(Branch(index, number, own))
    return Job(
        model=(config.served_model_names or (info.name,))[0],
        prompts=tuple(prompts),
        sequences=tuple(sequences),
        priority=body.priority,
        cache_salt=body.cache_salt,
        stops=tuple(dict.fromkeys(body.stop)),
        stop_token_ids=frozenset(body.stop_token_ids),
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        logprobs=logprobs,
        stream=body.stream,
        include_usage=options.include_usage,
        counts_in_events=options.include_usage and options.continuous_usage_stats,
        echo=body.echo if isinstance(body, CompletionBody) else False,
        token_ids=body.return_token_ids or tokenizer is None,
        accepted_drafts=body.return_accepted_drafts,
        named=named,
        tokens_as_ids=body.return_tokens_as_token_ids,
        prompt_logprobs=asked,
        own_prompt_logprobs=-1 if isinstance(body, ChatBody) or body.prompt_logprobs is None else body.prompt_logprobs,
        silent=wanted == 0,
        draws=draws,
    )


def parse_generation(raw: bytes, kind: type[Asked]) -> Asked:
    """The body of a generating endpoint; 400 for what is wrong with it."""
    value = parse_object(raw)
    body = validate(kind, value)
    if not value.keys() <= kind.model_fields.keys():
        endpoint: Endpoint = "chat" if issubclass(kind, ChatBody) else "completions"
        reject_unsupported(value, endpoint, kind.model_fields)
    return body


async def chat_job(body: ChatBody, incoming: Incoming, model: ServedModel, admission: Admission) -> Job:
    """Make the job of a chat. 400 for impossible requests, 429 where there is no room. Endpoints of other shapes make a
    chat of their bodies first."""
    info, tokenizer, config = model.info(), model.tokenizer, model.config
    check_limits(body, tokenizer, config)  # of what the request asks: the model's own defaults are no fault of it
    body = with_defaults(body, model.sampling_defaults, info.vocab_size)
    admission.check_size(1, body.n)
    admission.check_capacity(1)  # before the work of tokenizing; counted exactly when the job starts
    text = await incoming.work(model.render, body)
    [ids] = await model.encode([text], body.add_special_tokens, "messages")
    reading = model.reader.reading(body, text)
    constraint = await requested_grammar(body, tokenizer, info, reading) if body.constrained else UNCONSTRAINED
    most = model.sampling_defaults.get("max_tokens")
    known = (info, tokenizer, config, constraint.grammar, most, incoming.draws)
    job = await incoming.work(build_job, body, [Prompt(ids, text)], *known)
    return replace(job, reading=reading, not_enforced=constraint.not_enforced)
