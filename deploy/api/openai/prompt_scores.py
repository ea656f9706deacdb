"""Log-probabilities of a prompt in the answer of a completion: in OpenAI's form, as `echo` with `logprobs` asks for,
and in vLLM's, as `prompt_logprobs` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from deploy.api.job.job import Job
from workers.protocol.plan import TopLogprobs
from workers.protocol.scores import Scores

ENTRY_BYTES: Final = 64
"""About what an entry of an answer takes while it is written."""


def size_of(job: Job) -> int:
    """About how many bytes of answers the log-probabilities of a job's prompts make."""
    if job.prompt_logprobs < 0:
        return 0
    places = sum(len(job.prompts[branch.prompt].ids) for branch in job.sequences)
    return places * (2 + job.prompt_logprobs) * ENTRY_BYTES


def echoed(ids: Sequence[int], scores: Scores, top: int) -> Iterator[tuple[int, TopLogprobs | None]]:
    """The tokens of a prompt with their log-probabilities and those of the `top` most probable ones; the first token
    has none."""
    yield ids[0], None
    for token, (chosen, _, best, values) in zip(ids[1:], scores.entries(), strict=True):
        yield token, TopLogprobs(chosen, best[:top], values[:top])


def as_vllm(
    ids: Sequence[int], scores: Scores, top: int, text: Callable[[int], str], finite: Callable[[float], float]
) -> list[dict[str, dict[str, Any]] | None]:
    """Of every token of a prompt but the first the most probable ids and its own: log-probability, rank and text."""
    places: list[dict[str, dict[str, Any]] | None] = [None]
    for token, (chosen, rank, best, values) in zip(ids[1:], scores.entries(), strict=True):
        entries = {token: (chosen, rank)}
        entries |= {
            other: (value, place) for place, (other, value) in enumerate(zip(best[:top], values, strict=False), 1)
        }
        places.append(
            {
                str(other): {"logprob": finite(value), "rank": place, "decoded_token": text(other)}
                for other, (value, place) in entries.items()
            }
        )
    return places
