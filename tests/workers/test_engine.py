"""One replica in process, against transformers' generate and against itself without drafts, sharing or preemption."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import VOCAB, write_tiny
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.protocol.plan import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3"), "v3", seed=3)


def engine(folder: Path, **settings: Any) -> InlineEngine:
    defaults = {"width": 3, "max_rows": 8, "token_budget": 96, "cache_pages": 200, "device": "cpu"}
    return InlineEngine(EngineConfig(model=str(folder), **{**defaults, **settings}))


def random_prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@cache
def oracle(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(tokens, temperature=0.0)


def expected(folder: Path, prompt: list[int], tokens: int) -> list[int]:
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = oracle(folder).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 4])
def test_greedy_tokens_are_transformers_tokens_in_mixed_batches(folder: Path, width: int) -> None:
    prompts = random_prompts(12, 150, seed=width)
    tokens = engine(folder, width=width).generate(prompts, greedy(40))
    for prompt, got in zip(prompts, tokens, strict=True):
        assert got == expected(folder, prompt, 40)


QUICK = ((65, 60, 3), (66, 60, 2), (160, 3, 2))


@pytest.mark.parametrize(
    ("context", "pages", "width"),
    [
        pytest.param(*sizes, width, marks=() if (*sizes, width) in QUICK else pytest.mark.long)
        for sizes in [(64, 60), (65, 60), (66, 60), (128, 60), (129, 60), (160, 3)]
        for width in (1, 2, 3)
    ],
)
def test_requests_that_fill_the_context(folder: Path, width: int, context: int, pages: int) -> None:
    """Lengths are on every side of a page's end; the smallest pool shortens the context itself."""
    made = engine(folder, width=width, max_context=context, cache_pages=pages, max_rows=3, token_budget=200)
    most = made.scheduler.config.max_context
    prompts = [random_prompts(1, 1, seed)[0] * (most - count) for seed, count in enumerate((1, 2, 30))]
    for name, prompt in enumerate(prompts):
        made.add(str(name), prompt, greedy(most - len(prompt)))
    done = made.run()
    for name, prompt in enumerate(prompts):
        assert done[str(name)].tokens == expected(folder, prompt, most - len(prompt))


@pytest.mark.parametrize(
    "width", [pytest.param(w, marks=pytest.mark.long if w == 3 else pytest.mark.soak) for w in (2, 3, 4)]
)
def test_drafts_prefix_hits_and_preemptions_change_no_greedy_token(folder: Path, width: int) -> None:
    shared = random_prompts(1, 1, seed=8)[0] + random_prompts(1, 300, seed=9)[0][:140]
    prompts = [shared + tail if i % 3 == 0 else tail for i, tail in enumerate(random_prompts(100, 90, seed=10))]
    params = [greedy(150 if i % 25 in (1, 2, 4, 5) else 12) for i in range(100)]
    plain = engine(folder, width=1, prefix_cache=False).generate(prompts, params)
    crowded = engine(folder, width=width, cache_pages=12, max_context=450)
    assert crowded.generate(prompts, params) == plain
    stats = crowded.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.step_seconds["mixed"].count > 0
    assert stats.drafts_offered > stats.drafts_accepted > 0


@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.long), 3])
def test_choices_of_one_prompt_compute_it_once(folder: Path, width: int) -> None:
    prompt = random_prompts(1, 1, seed=11)[0] + [random.Random(12).randrange(VOCAB) for _ in range(149)]
    params = [SamplingParams(30, temperature=1.0, seed=seed) for seed in range(8)]
    together = engine(folder, width=width, token_budget=400)
    assert together.generate([prompt] * 8, params) == engine(folder, width=1, prefix_cache=False).generate(
        [prompt] * 8, params
    )
    prefilled = together.scheduler.stats().step_prefill_tokens.values()
    assert sum(part.total for part in prefilled) == 150 + 7 * (150 - 128 + (width > 1))


@pytest.mark.long
def test_a_seeded_request_gives_the_same_tokens_alone_and_in_any_batch(folder: Path) -> None:
    prompts = random_prompts(20, 80, seed=4)
    rng = random.Random(5)
    params = [
        SamplingParams(
            25,
            temperature=rng.choice([0.3, 0.8, 1.3]),
            top_k=rng.choice([0, 5, 40]),
            top_p=rng.choice([1.0, 0.9]),
            min_p=rng.choice([0.0, 0.05]),
            seed=rng.getrandbits(64),
            presence_penalty=rng.choice([0.0, 0.5]),
            frequency_penalty=rng.choice([0.0, 0.4]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            logit_bias=rng.choice([(), ((7, 2.0), (9, -100.0))]),
        )
        for _ in prompts
    ]
    together = engine(folder, width=3).generate(prompts, params)
    for index in (0, 7, 13):
        alone = engine(folder, width=1).generate([prompts[index]], [params[index]])
        assert alone == [together[index]]
    assert engine(folder, width=4, cache_pages=14, max_context=300).generate(prompts, params) == together


def test_stop_ids_end_a_request_inside_the_draft_window(folder: Path) -> None:
    prompts = random_prompts(10, 60, seed=21)
    free = engine(folder, width=1).generate(prompts, greedy(30))
    params = [SamplingParams(30, temperature=0.0, stop_ids=(tokens[10],)) for tokens in free]
    stopped = engine(folder, width=4)
    for tokens, param, got in zip(free, params, stopped.generate(prompts, params), strict=True):
        end = tokens.index(param.stop_ids[0]) + 1
        assert got == tokens[:end]
    assert {record.finish for record in stopped.finished.values()} == {"stop"}


@pytest.mark.parametrize(
    ("temperature", "penalty"),
    [
        (0.0, 0.01),
        pytest.param(0.0, 100.0, marks=pytest.mark.long),
        pytest.param(1e-45, 0.01, marks=pytest.mark.long),
        (1e-45, 100.0),
        pytest.param(1e-38, 0.01, marks=pytest.mark.long),
        pytest.param(1e-38, 100.0, marks=pytest.mark.long),
        (100.0, 0.01),
        pytest.param(100.0, 100.0, marks=pytest.mark.long),
    ],
)
def test_the_most_extreme_parameters_a_scheduler_takes_leave_logits_finite(
    folder: Path, penalty: float, temperature: float
) -> None:
    # A worker takes infinite logits for broken weights and ends the replica: no request may cause them.
    extreme = SamplingParams(
        20,
        temperature=temperature,
        top_p=0.0,
        min_p=1.0,
        presence_penalty=-100.0,
        frequency_penalty=-100.0,
        repetition_penalty=penalty,
        logit_bias=tuple((token, 1e4 if token % 2 else -1e4) for token in range(VOCAB)),
    )
    [tokens] = engine(folder).generate([[1, 2, 3]], extreme)
    assert len(tokens) == 20


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {
            "temperature": 1.7,
            "seed": 5,
            "top_p": 0.9,
            "min_p": 0.01,
            "top_k": 200,
            "repetition_penalty": 1.4,
            "presence_penalty": 0.5,
            "logit_bias": ((3, 2.0), (90, -7.0)),
            "logprob_token_ids": (90, 3, 3, 0),
        },
    ],
    ids=["greedy", "with every parameter"],
)
def test_logprobs_are_transformers_log_probabilities(folder: Path, sampling: dict[str, Any]) -> None:
    """Log-probabilities are of the model's own distribution, whatever the tokens are sampled with."""
    prompt = random_prompts(1, 50, seed=30)[0]
    run = engine(folder, width=3)
    [tokens] = run.generate([prompt], [SamplingParams(12, logprobs=4, **sampling)])
    entries = [entry for record in run.finished.values() for output in record.outputs for entry in output.logprobs]
    assert len(entries) == 12
    with torch.inference_mode():
        logits = oracle(folder)(torch.tensor([prompt + tokens])).logits[0].float()
    reference = torch.log_softmax(logits, dim=-1)
    for index, entry in enumerate(entries):
        row = reference[len(prompt) - 1 + index]
        assert entry.chosen == pytest.approx(row[tokens[index]].item(), abs=1e-4)
        top = row.topk(4)
        assert list(entry.ids) == top.indices.tolist()
        assert list(entry.logprobs) == pytest.approx(top.values.tolist(), abs=1e-4)
        named = list(sampling.get("logprob_token_ids", ()))
        assert list(entry.named) == pytest.approx(row[named].tolist(), abs=1e-4)


def test_a_prompt_fed_in_many_chunks_beside_decode_rows_gives_the_same_tokens(folder: Path) -> None:
    prompts = random_prompts(6, 60, seed=40) + random_prompts(3, 400, seed=41)
    whole = engine(folder, width=3, token_budget=4096, max_context=480).generate(prompts, greedy(20))
    pieces = engine(folder, width=3, token_budget=25, max_context=480)
    assert pieces.generate(prompts, greedy(20)) == whole
    assert max(plan.layout.tokens for plan in pieces.plans) <= 25
