"""One request on an engine, with what `generate` reports of it: tokens, text, usage, drafts and timings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.cli.local import settled_stats
from workers.protocol.front import Engine
from workers.protocol.messages import Request


@dataclass
class Generation:
    """Result of one request. Times in seconds."""

    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    cached_tokens: int = 0
    drafts_offered: int = 0
    drafts_accepted: int = 0
    load: float = 0.0
    """Seconds from the start of the processes until every rank was ready."""
    first: float = 0.0
    """Seconds from the request to its first token."""
    total: float = 0.0
    """Seconds from the request to its last token."""

    @property
    def tokens_per_s(self) -> float:
        """Speed after the first output: tokens that came later, over the time they took. 0 when there were none."""
        later = len(self.tokens) - 1
        return later / (self.total - self.first) if later > 0 and self.total > self.first else 0.0

    def report(self, model: str, seed: int, text: str | None) -> dict[str, Any]:
        """The JSON object that `generate --json` prints; `text` is left out where there is no tokenizer."""
        return {
            "model": model,
            "prompt_token_ids": list(self.prompt),
            "token_ids": self.tokens,
            **({} if text is None else {"text": text}),
            "finish_reason": self.finish,
            "seed": seed,
            "usage": {
                "prompt_tokens": len(self.prompt),
                "completion_tokens": len(self.tokens),
                "total_tokens": len(self.prompt) + len(self.tokens),
                "cached_tokens": self.cached_tokens,
            },
            "drafts": {"offered": self.drafts_offered, "accepted": self.drafts_accepted},
            "timings": {
                "load_s": round(self.load, 3),
                "first_token_s": round(self.first, 6),
                "total_s": round(self.total, 6),
                "tokens_per_s": round(self.tokens_per_s, 1),
            },
        }

    def summary(self) -> str:
        """Return one line for people."""
        drafts = ""
        if self.drafts_offered:
            share = self.drafts_accepted / self.drafts_offered
            drafts = f", {self.drafts_accepted} of {self.drafts_offered} drafts accepted ({share:.0%})"
        return (
            f"{len(self.prompt)} tokens in, {len(self.tokens)} out ({self.finish}); first token after "
            f"{self.first * 1e3:.1f} ms, then {self.tokens_per_s:.1f} tok/s{drafts}"
        )


async def run_generation(engine: Engine, request: Request, on_tokens: Callable[[tuple[int, ...]], None]) -> Generation:
    """Run `request` to its end, passing its tokens on as they come. Raises what `Engine.generate` raises."""
    result = Generation(request.prompt)
    before = engine.stats
    begin = time.perf_counter()
    async for output in engine.generate(request):
        now = time.perf_counter() - begin
        if output.tokens:
            result.first = result.first or now
            result.total = now
            result.tokens += output.tokens
            on_tokens(output.tokens)
        result.cached_tokens = max(result.cached_tokens, output.cached_tokens)
        result.finish = output.finish or result.finish
    after = await settled_stats(engine)
    result.drafts_offered = after.drafts_offered - before.drafts_offered
    result.drafts_accepted = after.drafts_accepted - before.drafts_accepted
    return result
