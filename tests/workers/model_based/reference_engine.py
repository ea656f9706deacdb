"""The reference: what a request's answer is, by definition.

One request at a time. The whole sequence goes through transformers' model in fp32 for every token: no pages, no cache,
no batch, no drafts. The next token is chosen from the last position's logits, in NumPy, step by step as the docstrings
of `SamplingParams` say it. Nothing is taken from the engine but the noise, which is part of what a seed means
(`kernels.sampling.reference`) and has a test of its own.

How equality is decided. The engine adds numbers up in another order than transformers, so logits differ by rounding,
and where two tokens come within that distance of one another either is right. `Choice` therefore says which tokens are
right at a place: the best one, and those within `MARGIN` of it; where a filter's edge lies within the margin of a
token's value, both that it is kept and that it is not. All but one place in some thousands have one right token alone,
which `Reference.judge` counts. From a place on where the engine took another right one, its own tokens are what is
continued. Where experts of a layer come as near to one another, the other choice of experts is right as well
(`routing`).

Shape legend: T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np
import torch

from kernels.sampling.reference import gumbel_noise
from tests.workers.model_based.grammars import allowed
from tests.workers.model_based.routing import routed_otherwise
from tests.workers.models.oracle import load_oracle, oracle_logits
from workers.protocol.plan import SamplingParams, TopLogprobs
from workers.protocol.scores import Scores

MARGIN = 2e-4
"""Margin of logits, which are about 2 in size: a hundred times what rounding was seen to change, and of everything
behind."""

NO_CAUSE = "it failed without a cause"


@dataclass(frozen=True)
class Answer:
    """Tokens and how they end: `stop`, `length` or, where the logits were no finite numbers, `failed`."""

    tokens: tuple[int, ...]
    finish: str


@dataclass(frozen=True)
class Choice:
    """The token at one place of a sequence."""

    best: int
    right: frozenset[int]
    """Every token that rounding may make the best, that one among them."""


class Reference:
    """The model of a checkpoint folder, and what it answers."""

    def __init__(self, folder: Path, max_context: int) -> None:
        self._model, self._max_context = load_oracle(folder), max_context
        self.seen: Counter[str] = Counter()
        self.logits_of = lru_cache(maxsize=512)(self._logits_of)

    def _logits_of(self, tokens: tuple[int, ...]) -> np.ndarray:
        """float32 [T, V]: the model over the whole sequence. From a token on whose embedding is no number all are NaN,
        and nothing before it: transformers itself multiplies what a position must not see by zero, which NaN stays."""
        return self._computed(tokens, self._sound(tokens))

    def _sound(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens before the first one whose embedding is no number."""
        numbers_T = self._model.get_input_embeddings().weight.isfinite().all(1)[list(tokens)].tolist()
        return numbers_T.index(False) if False in numbers_T else len(tokens)

    def _computed(self, tokens: Sequence[int], sound: int) -> np.ndarray:
        logits_TV = np.full((len(tokens), self._model.config.vocab_size), np.nan, dtype=np.float32)
        if sound:
            logits_TV[:sound] = oracle_logits(self._model, list(tokens[:sound])).float().numpy()
        return logits_TV

    def _wrong_however_routed(self, tokens: tuple[int, ...], judged: Callable[[np.ndarray], str]) -> str:
        """Return what `judged` finds wrong by the logits of these tokens; empty if it finds nothing by those that
        follow from another choice of experts that are nearly equal."""
        wrong, sound = judged(self.logits_of(tokens)), self._sound(tokens)
        if wrong and sound:
            for _ in routed_otherwise(self._model, list(tokens[:sound])):
                if not judged(self._computed(tokens, sound)):
                    self.seen["routed otherwise"] += 1
                    return ""
        return wrong

    def answer(self, prompt: Sequence[int], sampling: SamplingParams) -> Answer:
        """The definition: one token after the other."""
        generated: list[int] = []
        while not (finish := self.finish(prompt, generated, sampling)):
            logits_V = self.logits_of((*prompt, *generated))[-1]
            if not np.isfinite(logits_V).all():
                return Answer(tuple(generated), "failed")
            generated.append(choose(logits_V, prompt, generated, sampling).best)
        return Answer(tuple(generated), finish)

    def judge_scores(self, prompt: Sequence[int], sampling: SamplingParams, scores: Scores | None) -> str:
        """Return what is wrong with the log-probabilities of the tokens of a prompt; empty if nothing is."""
        if sampling.prompt_logprobs < 0 or scores is None:
            return "" if (sampling.prompt_logprobs < 0) == (scores is None) else "scores and nobody asked, or none"
        if scores.count != len(prompt) - 1:
            return f"{scores.count} tokens of a prompt of {len(prompt)} are scored"
        return self._wrong_however_routed(
            tuple(prompt), lambda logits_TV: self._wrong_scores(prompt, sampling, scores, logits_TV)
        )

    def _wrong_scores(
        self, prompt: Sequence[int], sampling: SamplingParams, scores: Scores, logits_TV: np.ndarray
    ) -> str:
        asked = msgspec.structs.replace(sampling, logprobs=sampling.prompt_logprobs)
        for place, (chosen, rank, ids, values) in enumerate(scores.entries(), start=1):
            logits_V = logits_TV[place - 1]
            if wrong := wrong_logprobs(logits_V, prompt[place], TopLogprobs(chosen, ids, values), asked):
                return f"token {place} of the prompt: {wrong}"
            above = [int((logits_V > logits_V[prompt[place]] + slack).sum()) for slack in (MARGIN, -MARGIN)]
            if not above[0] + 1 <= rank <= above[1] + 1:
                return f"token {place} of the prompt: rank {rank}"
        return ""

    def finish(self, prompt: Sequence[int], generated: Sequence[int], sampling: SamplingParams) -> str:
        """Return why nothing follows these tokens; empty if something does."""
        early = len(generated) <= sampling.min_tokens and sampling.grammar is None  # else its masks say so
        if generated and generated[-1] in sampling.stop_ids and not early:
            return "stop"
        full = len(prompt) + len(generated) >= self._max_context
        return "length" if full or len(generated) >= sampling.max_tokens else ""

    def judge(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        tokens: Sequence[int],
        finish: str | None,
        logprobs: Sequence[TopLogprobs] = (),
    ) -> str:
        """Return what is wrong with an engine's answer; empty if nothing is. `finish` is None, or `cancelled`, where
        the answer may be the beginning of one. `answer` is the same loop; here one pass over the engine's tokens gives
        the logits of all their beginnings, since no position sees what is behind it."""
        return self._wrong_however_routed(
            (*prompt, *tokens),
            lambda logits_TV: self._wrong_answer(prompt, sampling, tokens, finish, logprobs, logits_TV),
        )

    def _wrong_answer(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        tokens: Sequence[int],
        finish: str | None,
        logprobs: Sequence[TopLogprobs],
        logits_TV: np.ndarray,
    ) -> str:
        for index, token in enumerate(tokens):
            generated = tokens[:index]
            if ended := self.finish(prompt, generated, sampling):
                return f"token {index} follows the end of the answer, which is {ended}"
            logits_V = logits_TV[len(prompt) + index - 1]
            if not np.isfinite(logits_V).all():
                return f"token {index} comes from logits that are no finite numbers"
            choice = choose(logits_V, prompt, generated, sampling)
            self.seen["tokens"] += 1
            self.seen["near ties"] += len(choice.right) > 1
            if token not in choice.right:
                return f"token {index} is {token} instead of {choice.best}"
            if sampling.logprobs >= 0 and (wrong := wrong_logprobs(logits_V, token, logprobs[index], sampling)):
                return f"token {index}: {wrong}"
        if sampling.logprobs < 0 and logprobs:
            return "log-probabilities that nobody asked for"
        return self._wrong_end(prompt, sampling, tokens, finish, bool(np.isfinite(logits_TV[-1]).all()))

    def _wrong_end(
        self, prompt: Sequence[int], sampling: SamplingParams, tokens: Sequence[int], finish: str | None, sound: bool
    ) -> str:
        ended = self.finish(prompt, tokens, sampling)
        if finish in (None, "cancelled"):
            return ""
        if finish == "failed":
            return NO_CAUSE if ended or sound else ""
        if not ended and not sound:
            return f"it ends by {finish} where the logits are no finite numbers"
        return "" if finish == ended else f"it ends by {finish or 'nothing'} instead of {ended or 'going on'}"


def choose(logits_V: np.ndarray, prompt: Sequence[int], generated: Sequence[int], sampling: SamplingParams) -> Choice:
    """The token behind `prompt` and `generated`."""
    x_V = adjusted(logits_V, prompt, generated, sampling)
    scaled_V, certain_V, possible_V = filtered(x_V, sampling) if sampling.temperature else (x_V, *[x_V > -np.inf] * 2)
    if sampling.temperature:
        scaled_V = scaled_V + noise(sampling.seed, len(prompt) + len(generated), len(x_V))
    margin = MARGIN / min(1.0, sampling.temperature or 1.0)
    kept_V = np.where(certain_V, scaled_V, -np.inf)
    best = int(kept_V.argmax())
    return Choice(best, frozenset({best, *np.flatnonzero(possible_V & (scaled_V >= kept_V[best] - margin)).tolist()}))


def adjusted(
    logits_V: np.ndarray, prompt: Sequence[int], generated: Sequence[int], sampling: SamplingParams
) -> np.ndarray:
    """Penalties, then biases, then what a grammar forbids, or stop ids that come too early."""
    x_V = logits_V.astype(np.float64)
    if sampling.has_penalties:
        for token in {*prompt, *generated}:
            x_V[token] *= 1 / sampling.repetition_penalty if x_V[token] > 0 else sampling.repetition_penalty
        for token, times in Counter(generated).items():
            x_V[token] -= times * sampling.frequency_penalty + sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        x_V[token] += bias
    if sampling.grammar is not None:
        x_V[~allowed(generated, sampling, len(x_V))] = -np.inf
    elif len(generated) < sampling.min_tokens:
        x_V[list(sampling.stop_ids)] = -np.inf
    return x_V


def filtered(x_V: np.ndarray, sampling: SamplingParams) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits through the temperature, the largest being 0; which ids min_p, top_k and top_p certainly keep, and which
    they keep if rounding wills it."""
    scaled_V = (x_V - x_V.max()) / sampling.temperature
    margin = MARGIN / min(1.0, sampling.temperature)
    # Of each id, which others are more probable: if rounding wills it, and certainly.
    above_VV = [scaled_V > scaled_V[:, None] + slack for slack in (-margin, margin)]
    np.fill_diagonal(above_VV[0], False)
    kept = [scaled_V >= np.log(sampling.min_p or 1e-300) - slack for slack in (-margin, margin)]
    if sampling.top_k:
        kept = [keep_V & (above.sum(1) < sampling.top_k) for keep_V, above in zip(kept, above_VV, strict=True)]
    if sampling.top_p < 1:
        # An id stays if the more probable ones have less than top_p of what the filters before have left.
        least_V, most_V = (np.where(keep_V, np.exp(scaled_V), 0.0) for keep_V in kept)
        edge = sampling.top_p * least_V.sum() * (1 - margin), sampling.top_p * most_V.sum() * (1 + margin)
        kept = [kept[0] & (above_VV[0] @ most_V < edge[0]), kept[1] & (above_VV[1] @ least_V < edge[1])]
    for keep_V in kept:
        keep_V[x_V.argmax()] = True
    return scaled_V, kept[0], kept[1]


@lru_cache(maxsize=50_000)
def noise(seed: int, position: int, vocab: int) -> np.ndarray:
    """float32 [V]: a function of the seed, the place in the sequence and the token."""
    signed = seed - 2**64 if seed >= 2**63 else seed
    noise_1V: np.ndarray = gumbel_noise(torch.tensor([signed]), torch.tensor([position]), vocab).numpy()
    return noise_1V[0]


def wrong_logprobs(logits_V: np.ndarray, token: int, entry: TopLogprobs, sampling: SamplingParams) -> str:
    """Return what is wrong with the log-probabilities at one place, which are those of the model, whatever was
    sampled."""
    x_V = logits_V.astype(np.float64)
    logprob_V = x_V - x_V.max() - np.log(np.exp(x_V - x_V.max()).sum())
    if abs(entry.chosen - logprob_V[token]) > MARGIN:
        return f"its log-probability is {entry.chosen} instead of {logprob_V[token]}"
    top = np.sort(logprob_V)[::-1][: sampling.logprobs]
    if len(entry.ids) != len(top) or len(set(entry.ids)) != len(top):
        return f"{len(entry.ids)} most probable tokens instead of {len(top)}"
    for token_id, value, expected in zip(entry.ids, entry.logprobs, top, strict=True):
        if max(abs(value - expected), abs(logprob_V[token_id] - expected)) > MARGIN:
            return f"token {token_id} among the most probable, with {value}, where {expected} belongs"
    return ""
