"""The proof that replayed tails compute what eager ones compute, each as large as it is: mixed steps of the self-test
(`SegmentProof`) end in the buckets of few rows alone.

Random residuals and outputs of attention, of as many tokens as the tail has, are gathered from where a stage would
have them. The ending runs eagerly in fresh memory, and as a replay in memory that was poison before. Both must agree
bit for bit; against a mistake that both share, they are compared with a logits-only tail without padding.

Shape legend: T tokens, N tokens that are wanted, padding included, E hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from workers.memory.bits import differ
from workers.memory.scratch import Scratch
from workers.models.choices import Recorded, Taken
from workers.models.layer import PassBuffers
from workers.proof.decode_steps import AGREED, ATTEMPTS, differences, quantizes_activations, shared, tolerance
from workers.proof.segments import POISON
from workers.protocol.report import BucketReport
from workers.step.mixed import Tail
from workers.step.parts import StepParts


@torch.inference_mode()
def prove_tails(
    parts: StepParts,
    tails: Sequence[Tail],
    progress: Callable[[str], None] | None = None,
    seed: int = 0,
) -> list[BucketReport]:
    """Prove the logits-only tails; returns one report for each, in order. All ranks do it together, from equal
    seeds."""
    host, noise = torch.Generator().manual_seed(seed), torch.Generator(parts.device).manual_seed(seed)
    reports: list[BucketReport] = []
    for tail in tails:
        reports.append(_proved(parts, tail, host, noise))
        if progress is not None and not reports[-1].passed:
            progress(f"self-test: {reports[-1]}: {'; '.join(reports[-1].problems)}")
    return reports


def _proved(parts: StepParts, tail: Tail, host: torch.Generator, noise: torch.Generator) -> BucketReport:
    begin, device, tokens = time.perf_counter(), parts.device, tail.tokens
    bound, least, most_agreed = tolerance(parts), torch.inf, 0.0
    problems: list[str] = []
    for _ in range(ATTEMPTS):
        # As many as the proof of segments leaves out of a bucket, for which other kernels need not be compiled.
        live = tokens - int(torch.randint(tokens // 16 + 1, (), generator=host))
        stage = Tail(parts, tokens, Scratch(device))
        for gathered in stage.buffers.finished:
            if gathered.is_floating_point():
                gathered.normal_(generator=noise)
            else:  # ids of tokens
                gathered.random_(parts.model.config.vocab_size, generator=noise)
        token_N = torch.randperm(tokens, generator=host).to(device)
        paths, recorded = parts.model.paths, Recorded()
        with paths.choosing(recorded):
            eager_NE = _tail_output(Tail(parts, tokens, Scratch(device)), stage.buffers, token_N)
        with paths.without_w8a8():
            padded_NE = eager_NE
            if quantizes_activations(parts, tokens):
                recorded = Recorded()
                with paths.choosing(recorded):
                    padded_NE = _tail_output(Tail(parts, tokens, Scratch(device)), stage.buffers, token_N)
            with paths.choosing(taken := Taken(recorded, layers=1)):
                exact_NE = _tail_output(Tail(parts, live, Scratch(device)), stage.buffers, token_N[:live])
        tail.fill(POISON)
        replayed_NE = _tail_output(tail, stage.buffers, token_N)
        if bool(differ(eager_NE, replayed_NE)):
            problems.append("hidden states differ")
        error_N = (padded_NE[:live] - exact_NE).norm(dim=-1) / exact_NE.norm(dim=-1)
        # Whether to try another state is one decision for all ranks. NaN must not pass for small.
        error = float(parts.group.broadcast(torch.nan_to_num(error_N, nan=torch.inf).median()))
        agreed = shared(parts, taken)
        least, most_agreed = min(least, error), max(most_agreed, agreed)
        if error <= bound and agreed >= AGREED:
            break
    else:
        problems += differences(least, most_agreed, bound, "hidden states", "an ending without padding")
    return BucketReport(
        kind="tail",
        bucket=f"{tokens} tokens",
        seconds=time.perf_counter() - begin,
        problems=tuple(dict.fromkeys(problems)),
        rows=live,
        logits_error=least,
    )


def _tail_output(tail: Tail, buffers: PassBuffers[Any], token_N: Tensor) -> Tensor:
    """Final hidden states fp32 [N, E]."""
    tail.gather(buffers, token_N)
    tail.run()
    return tail.out_NE.float()
