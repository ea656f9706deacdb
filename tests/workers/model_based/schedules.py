"""Schedules: which requests come when, who leaves, and when the replica plans and gets results. Drawn at random, or
read from a file; a schedule says everything that a run depends on.

To extend what is drawn: a new sampling parameter is a line in `SAMPLERS`, a new drafter a value of `DRAFTERS`, a new
grammar one of `grammars.GRAMMARS`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from tests.workers.model_based.grammars import EOS, GRAMMARS, TAG
from workers.protocol.plan import SamplingParams

VOCAB = 64
POISON = VOCAB - 1
"""The model's embedding of it is no number."""
MAX_CONTEXT = 200
DRAFTERS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"drafter": "ngram"},
    {"draft_model": "gqa"},
    {"draft_model": "mla"},
)
"""Settings of the engine that choose what drafts, besides the width: the model's own layer, the prompt, or a draft
model that `drive.Bench` has by this name."""


class Add(msgspec.Struct, frozen=True, tag=True):
    """A request arrives."""

    name: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    done: bytes = b""
    """Tokens that are done, as in `Request`; so is the next field."""
    age_s: float | None = None


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """A client leaves; one that is served or unknown changes nothing."""

    name: str


class Plan(msgspec.Struct, frozen=True, tag=True):
    """A step is planned, if one can be."""


class Apply(msgspec.Struct, frozen=True, tag=True):
    """The oldest plan runs, and its result is taken in, if there is one."""


class Mishap(msgspec.Struct, frozen=True, tag=True):
    """Event like `Apply`, after which memory fails for a moment: an entry that the step wrote of an unfinished prompt
    is NaN."""


Event = Add | Cancel | Plan | Apply | Mishap


class Schedule(msgspec.Struct, frozen=True):
    """Afterwards the replica runs until all is done."""

    seed: int
    engine: dict[str, Any]
    """Settings of `EngineConfig`; `host_pages`, `disk_pages`, as many as host memory and disk are to hold; and
    `shards`, where it runs on several ranks: as many share out the cache, whose pages are those of all."""
    widths: bool
    """Whether every plan's width and drafts are drawn anew, from `seed`."""
    events: tuple[Event, ...]

    def to_json(self) -> bytes:
        """Return the schedule as a file has it."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @staticmethod
    def from_json(data: bytes) -> Schedule:
        """The other way round."""
        return msgspec.json.decode(data, type=Schedule)


def _ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.sample(range(POISON), count))


SAMPLERS: tuple[Callable[[random.Random], dict[str, Any]], ...] = (
    lambda rng: {"temperature": 0.0},
    lambda rng: {"temperature": 0.0},
    lambda rng: {"temperature": rng.choice([0.3, 1.0, 1.5])},
    lambda rng: {"temperature": 0.9, "top_p": rng.choice([0.4, 0.8, 0.95])},
    lambda rng: {"temperature": 1.0, "top_k": rng.choice([1, 3, 10]), "top_p": rng.choice([1.0, 0.7])},
    lambda rng: {"temperature": 1.2, "min_p": rng.choice([0.02, 0.2]), "top_k": rng.choice([0, 5])},
    lambda rng: {
        "temperature": rng.choice([0.0, 0.8]),
        "presence_penalty": rng.choice([0.0, 0.9, -0.5]),
        "frequency_penalty": rng.choice([0.0, 0.4]),
        "repetition_penalty": rng.choice([1.0, 1.3, 0.8]),
    },
    # Few tokens are left to choose from, so that many drafts are accepted.
    lambda rng: {"temperature": rng.choice([0.0, 1.0]), "logit_bias": tuple((token, 12.0) for token in _ids(rng, 2))},
    lambda rng: {
        "temperature": rng.choice([0.0, 1.0]),
        "logit_bias": tuple((token, 12.0) for token in _ids(rng, 3)),
        "frequency_penalty": 0.6,
    },
)


def random_sampling(rng: random.Random) -> SamplingParams:
    """One of `SAMPLERS`, with what may be combined with all of them."""
    chosen = rng.choice(SAMPLERS)(rng)
    if rng.random() < 0.5:
        chosen["logit_bias"] = (*chosen.get("logit_bias", ()), (POISON, -100.0))
    biased = [token for token, bias in chosen.get("logit_bias", ()) if bias > 0]
    stop = rng.choice([(), (), _ids(rng, 1), _ids(rng, 6), tuple(biased[:1])])
    return SamplingParams(
        max_tokens=rng.choice([1, 2, 3, 8, 20, 20, 40, 90]),
        seed=rng.getrandbits(64),
        stop_ids=stop,
        min_tokens=rng.choice([0, 0, 0, 3, 9, 30]),
        logprobs=rng.choice([-1, -1, -1, 0, 3]),
        **chosen,
    )


def with_grammar(sampling: SamplingParams, rng: random.Random) -> SamplingParams:
    """The same under a grammar, with what ends a text among its stop ids."""
    grammar, _ = rng.choice(GRAMMARS)
    # A model of random weights says the tag by itself once in a while.
    bias = ((TAG, rng.choice([2.0, 6.0])),) if grammar.begin_after and rng.random() < 0.8 else ()
    kept = tuple(pair for pair in sampling.logit_bias if pair[0] != TAG)
    stop = (EOS, *(token for token in sampling.stop_ids if token != EOS))
    most = max(sampling.max_tokens, rng.choice([3, 20, 40]))
    return msgspec.structs.replace(sampling, grammar=grammar, stop_ids=stop, max_tokens=most, logit_bias=(*kept, *bias))


def random_engine(rng: random.Random, tight: bool) -> dict[str, Any]:
    """Settings of a replica, some with few rows or hardly any budget left for prompts. `tight`: many rows and few
    pages."""
    width, rows = rng.choice([1, 2, 3, 3, 4, 4]), rng.choice([4, 6] if tight else [1, 3, 4, 6])
    return {
        "width": width,
        "max_rows": rows,
        "token_budget": rows * width + rng.choice([1, 8, 40, 90, 90, 90]),
        "cache_pages": rng.choice([5, 6] if tight else [5, 7, 9, 30]),
        "max_context": MAX_CONTEXT,
        "prefix_cache": rng.random() < 0.8,
        "invariant": rng.random() < 0.06,
    }


def widened(engine: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The same settings, some with steps of 5 to 8 tokens per row, whose budget leaves as many tokens for prompts."""
    if rng.random() >= 0.3:
        return engine
    width = rng.choice([5, 6, 7, 8])
    budget = engine["token_budget"] + engine["max_rows"] * (width - engine["width"])
    return {**engine, "width": width, "token_budget": budget}


def tiered(engine: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The same settings with host memory behind few pages, and mostly with a disk behind that."""
    host, disk = rng.choice([1, 2, 2, 3, 8]), rng.choice([0, 6, 100, 100, 100])
    few = {"prefix_cache": True, "cache_pages": min(engine["cache_pages"], 7)}
    return {**engine, **few, "host_pages": host, "disk_pages": disk}


def shared_out(engine: dict[str, Any], rng: random.Random, ranks: int) -> dict[str, Any]:
    """The same settings for so many ranks, mostly with several that share out the cache; more of these in invariant
    mode than of others, as rows get their pages in another way there."""
    shards = rng.choice([1, *(count for count in (2, 2, 4, 4, 8, 8) if ranks % count == 0)])
    return {**engine, "shards": shards, "invariant": engine["invariant"] or (shards > 1 and rng.random() < 0.2)}


def random_schedule(seed: int, requests: int = 14, *, behind: bool = False, ranks: int = 1) -> Schedule:
    """Draw a schedule of some hundred steps. In every third, prompts end shortly before a page does, so that all rows
    need a page at once, and somebody is preempted. `behind`: with host memory, and mostly a disk, behind the pages, and
    with prompts that return to them. `ranks`: that it runs on."""
    rng, further = random.Random(seed), random.Random(f"what came later {seed}")
    tight = rng.random() < 0.35
    # By a generator of its own, so that everything else of a schedule is what it was when no step was so wide.
    engine = widened(random_engine(rng, tight), random.Random(f"widths {seed}"))
    tiers = random.Random(f"tiers {seed}")
    engine = {**engine, **further.choice(DRAFTERS)}
    if behind:
        engine = tiered(engine, tiers)
    if ranks > 1:
        engine = shared_out(engine, random.Random(f"shards {seed}"), ranks)
    share = further.choice([0.0, 0.3, 0.7])
    streams = [[rng.randrange(POISON) for _ in range(150)] for _ in range(2)]
    # More than the device holds.
    returning = [[tiers.randrange(POISON) for _ in range(150)] for _ in range(3)] if behind else []
    events: list[Event] = []
    for number in range(requests):
        prompt = rng.choice(streams)[: rng.choice([0, 0, 0, 0, 1, 64, 65, 70, 128])]
        prompt = prompt + [rng.randrange(POISON) for _ in range(rng.choice([1, 1, 2, 17, 50, 57, 62, 64]))]
        if tight and rng.random() < 0.8:
            prompt = [rng.randrange(POISON) for _ in range(rng.randint(50, 62))]
        if returning and tiers.random() < 0.9:
            prompt = tiers.choice(returning)[: tiers.choice([65, 128, 128, 130])] + prompt[-20:]
        if rng.random() < 0.06:
            prompt[rng.choice([0, len(prompt) // 2, -1])] = POISON
        sampling, priority = random_sampling(rng), rng.choice([0, 0, 0, 0, 1, -1])
        if further.random() < share:
            sampling = with_grammar(sampling, further)
        scores = random.Random(f"scores {seed} {number}").choice([-1, -1, -1, -1, 0, 3])
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=scores)
        for choice in range(rng.choice([1, 1, 1, 1, 3])):
            each = msgspec.structs.replace(sampling, seed=(sampling.seed + choice) % 2**64)
            events.append(Add(f"{number}.{choice}", tuple(prompt), each, priority))
        if rng.random() < 0.12:
            events.append(Cancel(f"{rng.randint(0, number)}.0"))
        for _ in range(rng.choice([0, 0, 0, 2, 10])):
            events.append(Plan() if rng.random() < 0.5 else Mishap() if rng.random() < 0.02 else Apply())
    return Schedule(seed, engine, rng.random() < 0.4, tuple(events))
