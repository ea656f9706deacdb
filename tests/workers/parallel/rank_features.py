"""Features that several ranks have to compute bit for bit as one rank does: formats of weights and caches, sparse
attention, and drafters with masks. Invariant mode, so that log-probabilities can be compared, too."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.quantized_checkpoints import FP8_NAMES, INT4_NAMES
from tests.quantized_checkpoints import quantize as quantize_tiny
from tests.tiny_models import VOCAB, write_tiny
from tests.workers.crowd import Job
from tests.workers.harness import InlineEngine
from workers.config import DEMO_MODEL, EngineConfig
from workers.processes.client import EngineClient
from workers.processes.launch import local_engine
from workers.protocol.grammar import Grammar
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams, TopLogprobs

sys.path.insert(0, str(DEMO_MODEL.parent))  # as `python assets/quantize_demo.py` finds the script's own modules

from training.quantize import quantize

DEMO_VOCAB, EOS = 4000, 1
Outcome = tuple[list[int], list[TopLogprobs], str | None]
GRAMMARS = (
    Grammar("regex", r"def [a-z_]{3,12}\([a-z]{1,6}(, [a-z]{1,6}){0,3}\):"),
    Grammar("choice", json.dumps(["return None", "return True", "raise ValueError", "return"])),
    Grammar(
        "json_schema",
        json.dumps({
            "type": "object",
            "properties": {"name": {"enum": ["os", "sys", "re"]}, "line": {"type": "integer"}},
            "required": ["name", "line"],
            "additionalProperties": False,
        }),
    ),
)  # fmt: skip


def free(count: int, vocab: int, seed: int) -> list[Job]:
    """Greedy and sampled, of a few tokens and of several pages, some of which begin alike."""
    rng = random.Random(seed)
    shared = [rng.randrange(10, vocab) for _ in range(130)]
    jobs = []
    for index in range(count):
        prompt = [rng.randrange(10, vocab) for _ in range((1, 63, 90, 140)[index % 4])]
        sampling = SamplingParams(12 + index, temperature=0.8 * (index % 2), seed=index, logprobs=3)
        jobs.append((shared + prompt[:9] if index % 3 == 2 else prompt, sampling))
    return jobs


def constrained(count: int, vocab: int, seed: int) -> list[Job]:
    """`free`, every second with a grammar."""
    jobs = free(count, vocab, seed)
    for index in range(1, count, 2):
        prompt, own = jobs[index]
        grammar = GRAMMARS[index // 2 % len(GRAMMARS)]
        sampling = SamplingParams(
            24, temperature=own.temperature, seed=own.seed, stop_ids=(EOS,), grammar=grammar, logprobs=3
        )
        jobs[index] = (prompt, sampling)
    return jobs


def demo(folder: Path) -> Path:
    """Return the demo model as it is."""
    return DEMO_MODEL


def quantized(form: str) -> Callable[[Path], Path]:
    """The demo model with weights in this format."""

    def write(folder: Path) -> Path:
        quantize(DEMO_MODEL, folder, form)
        return folder

    return write


def tiny(kind: str) -> Callable[[Path], Path]:
    """A random model of this kind, whose experts are wide enough for a GPU that has a quarter of each."""
    return lambda folder: write_tiny(folder, kind, seed=3, moe_intermediate_size=64)


def wide(form: str) -> Callable[[Path], Path]:
    """A random model in this format, of whose experts eight ranks can share what is quantized."""

    def write(folder: Path) -> Path:
        write_tiny(folder, "v3", seed=3, hidden_size=64, moe_intermediate_size=512)
        quantize_tiny(folder, form, FP8_NAMES if form == "fp8" else INT4_NAMES)
        return folder

    return write


@dataclass(frozen=True)
class Feature:
    """A model, how it is served, and what it is asked."""

    model: Callable[[Path], Path]
    jobs: Callable[[int, int, int], list[Job]] = free
    vocab: int = DEMO_VOCAB
    settings: dict[str, Any] = field(default_factory=dict)


FEATURES: dict[str, Feature] = {
    "FP8 weights": Feature(quantized("fp8")),
    "FP8 weights, wide experts": Feature(wide("fp8"), vocab=VOCAB),
    "INT4 experts": Feature(quantized("int4")),
    "INT4, wide experts": Feature(wide("int4"), vocab=VOCAB),
    "FP8 weights and cache": Feature(quantized("fp8"), settings={"kv_cache_dtype": "fp8"}),
    "V3.2": Feature(tiny("v32"), vocab=VOCAB),
    "V3.2, FP8 cache": Feature(tiny("v32"), vocab=VOCAB, settings={"kv_cache_dtype": "fp8"}),
    "GLM-5": Feature(tiny("glm5"), vocab=VOCAB),
    "masks, MTP": Feature(demo, constrained, settings={"width": 3}),
    "masks, EAGLE-3": Feature(demo, constrained, settings={"width": 4, "draft_model": "demo-eagle3"}),
    "masks, look-up": Feature(demo, constrained, settings={"width": 3, "drafter": "ngram"}),
    "masks, no drafts": Feature(demo, constrained, settings={"width": 1}),
}


def config(folder: Path, feature: Feature, device: str, **settings: Any) -> EngineConfig:
    """Return the settings of this feature; `settings` say on how many ranks, and whether in graphs."""
    common = {"max_rows": 6, "token_budget": 96, "cache_pages": 60, "max_context": 400, "width": 3}
    common |= {"dtype": "float32", "selftest": False, "invariant": True, "device": device}
    # Other tests may have all processors compile kernels.
    common |= {"grammar_compile_timeout_s": 120.0, "heartbeat_timeout_s": 60.0}
    return EngineConfig.model_validate({"model": str(folder), **common, **feature.settings, **settings})


@cache
def written(name: str, root: Path) -> Path:
    """The folder of the feature's model."""
    return FEATURES[name].model(root / name.replace(" ", "-"))


@cache
def alone(name: str, root: Path, device: str) -> list[Outcome]:
    """Every request by itself on one rank, step by step and without a draft."""
    feature = FEATURES[name]
    how = {"width": 1, "drafter": "none", "draft_model": None, "prefix_cache": False, "graphs": False}
    settings = config(written(name, root), feature, device, token_budget=400, **how)
    run = InlineEngine(settings, torch.device(device))
    outcomes = []
    for index, (prompt, sampling) in enumerate(feature.jobs(8, feature.vocab, 5)):
        run.add(f"alone-{index}", prompt, sampling)
        record = run.run()[f"alone-{index}"]
        outcomes.append((record.tokens, [e for out in record.outputs for e in out.logprobs], record.finish))
    return outcomes


async def _one(client: EngineClient, name: str, job: Job) -> Outcome:
    prompt, sampling = job
    outputs = [output async for output in client.generate(Request(name, tuple(prompt), sampling))]
    return [t for o in outputs for t in o.tokens], [e for o in outputs for e in o.logprobs], outputs[-1].finish


async def _together(settings: EngineConfig, jobs: list[Job]) -> tuple[list[Outcome], int]:
    async with local_engine(settings, print) as client:
        outcomes = await asyncio.gather(*(_one(client, f"r{index}", job) for index, job in enumerate(jobs)))
        return list(outcomes), client.stats.drafts_accepted


def together(name: str, root: Path, device: str, **settings: Any) -> tuple[list[Outcome], int]:
    """All requests at once, in processes of their own; and how many drafts were accepted."""
    feature = FEATURES[name]
    own = config(written(name, root), feature, device, **settings)
    return asyncio.run(_together(own, feature.jobs(8, feature.vocab, 5)))
