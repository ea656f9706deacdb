"""The requests that can be served at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from workers.protocol.messages import Request
from workers.protocol.plan import MAX_LOGIT_BIAS, MAX_LOGPROB_TOKEN_IDS, MAX_STOP_IDS, SamplingParams
from workers.protocol.prompt import TOKEN_BYTES, Prompt, unpack_tokens
from workers.protocol.sampling import TABLE
from workers.scheduler.config import SchedulerConfig

MAX_BIAS: Final = 1e4
"""Greatest magnitude of a logit bias."""


def why_impossible(request: Request, config: SchedulerConfig) -> str:
    """Return why this replica can never serve the request, "" if it can. The front checks most of this too. Here it is
    certain, for every way a request may come, that no worker is given anything that would end the replica."""
    prompt, sampling = request.prompt, request.sampling
    if not prompt:
        return "the prompt is empty"
    if len(prompt) >= config.max_context:
        return f"prompt of {len(prompt)} tokens leaves no room for output in a context of {config.max_context}"
    if sampling.max_tokens < 1:
        return f"max_tokens must be at least 1, not {sampling.max_tokens}"
    if not 0 <= sampling.min_tokens <= config.max_context:
        return f"min_tokens must be between 0 and the context of {config.max_context}, not {sampling.min_tokens}"
    if sampling.min_tokens and len(set(sampling.stop_ids)) > MAX_STOP_IDS:
        return f"{len(set(sampling.stop_ids))} stop ids: together with min_tokens at most {MAX_STOP_IDS} are supported"
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        return f"logit_bias names {len(sampling.logit_bias)} tokens: at most {MAX_LOGIT_BIAS} are supported"
    if not -1 <= sampling.logprobs <= config.vocab_size:
        return f"logprobs must be between -1 and the {config.vocab_size} tokens there are, not {sampling.logprobs}"
    if not -1 <= sampling.prompt_logprobs <= config.vocab_size:
        return f"prompt_logprobs must be between -1 and the {config.vocab_size} tokens there are"
    if (named := len(sampling.logprob_token_ids)) > MAX_LOGPROB_TOKEN_IDS or (named and sampling.logprobs < 0):
        return f"{named} logprob_token_ids: with logprobs at most {MAX_LOGPROB_TOKEN_IDS}, without them none"
    if wrong := _out_of_range(sampling):
        return wrong
    if wrong := _outside(prompt, config.vocab_size):
        return f"the prompt has a token id outside 0 ... {config.vocab_size - 1}: {wrong}"
    if wrong := _outside([token for token, _ in sampling.logit_bias], config.vocab_size):
        return f"logit_bias names a token id outside 0 ... {config.vocab_size - 1}: {wrong}"
    if wrong := _outside(sampling.logprob_token_ids, config.vocab_size):
        return f"logprob_token_ids has a token id outside 0 ... {config.vocab_size - 1}: {wrong}"
    limit = min(len(prompt) + sampling.max_tokens, config.max_context)
    if request.done:
        if len(request.done) % TOKEN_BYTES:
            return f"{len(request.done)} bytes of tokens that were generated before are no whole number of ids"
        done = unpack_tokens(request.done)
        if len(prompt) + len(done) >= limit:
            return f"of {limit - len(prompt)} tokens to generate all were generated before: nothing is left to do"
        if wrong := _outside(done, config.vocab_size):
            return f"a token that was generated before has an id outside 0 ... {config.vocab_size - 1}: {wrong}"
    needed, pages = config.pages_at_most(limit), config.most_pages
    if needed > pages:
        return (
            f"{len(prompt)} prompt tokens and {limit - len(prompt)} to generate need {needed} pages of cache, "
            f"and there are {pages}: ask for fewer tokens"
        )
    return ""


def _out_of_range(sampling: SamplingParams) -> str:
    """Return which parameter is too large, too small or no number, as text; empty if none is."""
    for row in TABLE:
        if wrong := row.out_of_range(getattr(sampling, row.name)):
            return wrong
    for token, bias in sampling.logit_bias:
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            return f"logit_bias of token {token} must be between {-MAX_BIAS:g} and {MAX_BIAS:g}, not {bias:g}"
    return ""


def _outside(tokens: Sequence[int], vocab_size: int) -> str:
    """The first id that is none, as text."""
    if isinstance(tokens, Prompt):
        if tokens.highest < vocab_size:  # found out once for all who share it
            return ""
    elif not tokens or 0 <= min(tokens) <= max(tokens) < vocab_size:
        return ""
    return str(next(token for token in tokens if not 0 <= token < vocab_size))
