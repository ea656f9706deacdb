"""Settings of the scheduler, how many cache entries a row can touch under them, and which requests they can serve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kernels.page import PAGE_TOKENS, Shards, pages_for
from workers.protocol.messages import Request
from workers.protocol.plan import MAX_LOGIT_BIAS, MAX_LOGPROB_TOKEN_IDS, MAX_STOP_IDS, SamplingParams
from workers.protocol.report import StepTime
from workers.protocol.request import NO_ROOT, TABLE, TOKEN_BYTES, Prompt, unpack_tokens

PIPELINE = 2
"""Plans in flight: one that runs and one that waits behind it, so that the device never waits for the host."""
MAX_BIAS: Final = 1e4
"""Greatest magnitude of a logit bias."""


def max_entries_per_row(max_context: int, width: int, pipeline: int = PIPELINE) -> int:
    """Cache entries (tokens) a row may touch, overshoot included: what a page table and rope tables must cover.

    A row is planned while it may still need a token: at most max_context - 1 tokens are then known or promised, one for
    each of up to pipeline - 1 steps in flight. Its newest token is not fed yet, and each step in flight may have
    accepted width - 1 drafts on top: its length is at most max_context - 2 + (pipeline - 1) * (width - 1). The step
    writes `width` entries from there, and its draft passes another width - 1.
    """
    return max_context - 1 + (pipeline + 1) * (width - 1)


def max_pages_per_row(max_context: int, width: int, pipeline: int = PIPELINE) -> int:
    """Page-table entries of a row: pages of the longest request and of the steps that may overshoot its end."""
    return pages_for(max_entries_per_row(max_context, width, pipeline))


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one replica: how much it can hold and do at once."""

    slots: int
    """Requests on the device at once, decoding or prefilling."""
    pages: int
    """Pages of latent cache, the null page included; where ranks share it out, of all shards together."""
    max_context: int
    """Tokens a request may have, prompt and output together."""
    token_budget: int
    """Most tokens one step feeds. What decode rows leave over goes to prefill. It must exceed slots * width: the
    difference is open to prefill in every step, so decoding never starves it."""
    width: int
    """Most tokens a decode row feeds: 1 + drafts."""
    queue_limit: int
    """Requests that may wait beyond the slots: one more than `slots` + `queue_limit` is refused."""
    vocab_size: int = 2**32
    """Token ids are below this."""
    prefix_cache: bool = True
    """Share the pages of equal prompt prefixes."""
    pipeline: int = PIPELINE
    """Plans made before the first of their results is back."""
    adaptive: bool = False
    """Let each step feed as many tokens per row as pays, `width` at the most; otherwise each feeds `width`."""
    step_times: tuple[StepTime, ...] = ()
    """Times of steps, measured at the start."""
    token_buckets: tuple[int, ...] = ()
    """Numbers of tokens to which mixed steps are padded, in order; none: they are not."""
    mixed_step_target_s: float | None = None
    """Seconds that a step with decode rows and prompts is to take; None: twice what its decode rows alone take, or
    longer where that leaves little for tokens of prompts, where `step_times` says it. 0: any; prompts get all of the
    budget that decode rows leave."""
    draft_cache: bool = True
    """Whether the drafter, where there is one, has a cache of its own."""
    reads_tokens: bool = False
    """Whether the drafter reads rows' tokens on the device: a newcomer brings all that it has."""
    prefix_sample: int = 1024
    """Most prefix-cache keys that the statistics name, of 8 bytes each."""
    tier_sample: int = 4096
    """The same of pages in host memory, and of those on disk, which hold more sessions."""
    snapshots: int = 0
    """Snapshots of rings that the ranks have memory for; without any pages alone are shared (`Ready`)."""
    snapshot_tokens: int = PAGE_TOKENS
    """Multiples of so many tokens at which they may be made."""
    root: bytes = NO_ROOT
    """What the keys of pages are rooted in: it names what the ranks compute (`workers.rank.root`)."""
    grammar_timeout_s: float = 10.0
    """Seconds that a grammar may take to compile."""
    host_pages: int = 0
    """Pages that host memory holds behind those of the device; 0: there is none."""
    pins_pages: bool = False
    """Whether these are of use only as far as ranks say that they are pinned (`Pinned`)."""
    cache_shards: int = 1
    """Ranks that share out the pages: each of a row's pages lies on the neighbour of the one before, where it can."""
    in_pieces: bool = False
    """Whether rows' pieces (`kernels.page.PIECE_PAGES`) go round those ranks without exceptions: in invariant mode."""
    ranks: int = 1
    """Ranks that copy pages to host memory and back."""
    save_batch: int = 16
    """Pages that each rank copies to host memory at once: as many as its staging memory holds."""
    savers: int = 1
    """Ranks among which the pages of a shard are shared out to be copied (`workers.protocol.tiers.saver_of`)."""
    load_least: int = 4
    """Pages that are worth a load from host memory, however fast prompts are computed; fewer are where that is slow."""
    disk_pages: int = 0
    """Pages that the disk holds behind host memory; 0: there is none."""
    disk_least: int = 8
    """Pages that are worth a load from the disk."""
    disk_writes_per_s: float = math.inf
    """Pages that may be written to the disk, in the long run."""
    disk_writes_saved_up: float = math.inf
    """Pages that may be written at once where none were for long."""
    disk_page_s: float = 0.003
    """Seconds that reading a page from the disk takes, for how many are read at once before any was measured."""
    disk_serial: int = 0
    """Serial number of the next page that is saved to disk."""
    portions: tuple[tuple[int, int], ...] = ()
    """Graphs that ranks are still to capture, in portions: how many pages the proof of each takes, and the fewest that
    will do."""

    def __post_init__(self) -> None:
        for name in (
            "slots",
            "width",
            "vocab_size",
            "pipeline",
            "cache_shards",
            "ranks",
            "save_batch",
            "savers",
            "load_least",
            "disk_least",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("queue_limit", "prefix_sample", "tier_sample", "host_pages", "disk_pages", "snapshots"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")
        if self.pages < 2:
            raise ValueError(
                f"pages = {self.pages}: one of them is the null page, which holds nothing; give at least 2"
            )
        if self.snapshot_tokens < 1 or self.snapshot_tokens % PAGE_TOKENS:
            raise ValueError(f"snapshot_tokens = {self.snapshot_tokens} is no multiple of a page's {PAGE_TOKENS}")
        if self.snapshots and self.host_pages:
            raise ValueError("host_pages keeps no snapshots, behind which alone these prompts can begin: give 0 of one")
        if self.disk_pages and not self.host_pages:
            raise ValueError("disk_pages lie behind host memory, and host_pages is 0: give some, or no disk")
        if (self.pages - 1) % self.cache_shards:
            raise ValueError(
                f"pages = {self.pages}: all but the null page are shared out evenly over {self.cache_shards} ranks"
            )
        if self.max_context < 2:
            raise ValueError(f"max_context = {self.max_context} has no room for a prompt and an output token")
        if self.token_budget <= self.slots * self.width:
            raise ValueError(
                f"token_budget = {self.token_budget} lets {self.slots} decode rows of width {self.width} starve "
                f"prefill: give at least {self.slots * self.width + 1}, or fewer slots"
            )

    @property
    def drafting(self) -> bool:
        """Whether there is a drafter with cache entries of its own."""
        return self.width > 1 and self.draft_cache

    @property
    def draft_margin(self) -> int:
        """Cache entries past a step's tokens that its draft passes write: the draft layer runs one token ahead of the
        target, and each further draft one more. Reserved even while fewer tokens are drafted, so that the draft layer's
        cache stays complete."""
        return self.width - 1 if self.draft_cache else 0

    @property
    def most_pages(self) -> int:
        """Pages that one row may have, when there is no other."""
        pages = self.pages - 1
        return Shards(self.cache_shards).most_of_a_row(pages) if self.in_pieces else pages

    def pages_at_most(self, tokens: int) -> int:
        """Pages that a request of `tokens` tokens, prompt and output, may need alone, overshoot included."""
        return max_pages_per_row(tokens, self.width, self.pipeline)


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
