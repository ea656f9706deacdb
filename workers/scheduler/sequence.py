"""The scheduler's state of one request, its tokens among it, and of one step in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from kernels.page import PAGE_TOKENS
from workers.protocol.messages import Request
from workers.protocol.plan import StepPlan
from workers.protocol.request import NO_ROOT, PAGE_BYTES, TOKEN_BYTES, Prompt, chain_keys, pack_tokens, unpack_tokens
from workers.protocol.scores import Scores
from workers.scheduler.pages import RowPages
from workers.scheduler.snapshots import Snapshot

Rank = tuple[int, float, int]
"""Priority; what its API key had paid when the request was first served, 0 without keys; arrival number
(`workers.scheduler.queue`)."""


@dataclass(slots=True, eq=False)
class Share:
    """Share of one key: the tokens that its requests have had."""

    name: str
    weight: float
    """Weight of the key. Keys that always wait are given tokens in proportion to it."""
    paid: float = 0.0
    """Tokens by weight; of use only in comparison with that of others."""
    charged: int = 0
    """Tokens that this replica computed for it."""
    told: int = 0
    """Tokens, among those charged, that other replicas were told of."""

    def charge(self, tokens: int) -> None:
        """Charge the key for tokens that were computed for it."""
        self.charged += tokens
        self.paid += tokens / self.weight


class Phase(Enum):
    """Phase of a request. Only PREFILL and DECODE own pages; in phases behind them a request may still own a slot."""

    COMPILING = auto()
    """Phase while its grammar is not ready."""
    WAITING = auto()
    LOADING = auto()
    """The head of its prompt is copied from host memory or disk; then it waits again, at its old place."""
    PREFILL = auto()
    """Phase with a slot and the pages of the whole prompt; chunks are left to plan."""
    DECODE = auto()
    """Phase once its final chunk is planned: every further step samples."""
    PREEMPTED = auto()
    """Lost its pages; goes back to the queue when its steps in flight are applied, because they still add tokens."""
    ENDED = auto()
    """Finished or cancelled; results of its steps in flight are dropped."""


class Tokens:
    """The prompt's tokens, then the generated ones. The prompt is never copied: the choices of a request share it.

    Plain attributes, which the scheduler keeps up to date itself: it looks at them for every row in every step.
    """

    __slots__ = ("generated", "length", "prompt", "root")

    def __init__(self, prompt: Prompt, done: bytes = b"", root: bytes = NO_ROOT) -> None:
        """`done`: what was generated before, as `pack_tokens` packs it. `root`: what the first page's key continues."""
        self.prompt, self.root = prompt, root
        self.generated = unpack_tokens(done)
        self.length = prompt.length + len(self.generated)
        """Tokens of the prompt and generated ones together."""

    def __getitem__(self, index: int) -> int:
        known = self.prompt.length
        return self.prompt[index] if index < known else self.generated[index - known]

    def span(self, begin: int, end: int) -> tuple[int, ...]:
        """Return the tokens from `begin` to `end` (exclusive)."""
        known = self.prompt.length
        if end <= known:
            return self.prompt[begin:end]
        return (*self.prompt[begin:known], *self.generated[max(begin - known, 0) : end - known])

    def packed(self) -> bytes:
        """Return all tokens as `pack_tokens` packs them."""
        return self.prompt.packed + pack_tokens(self.generated)

    def page(self, index: int) -> bytes:
        """Full page number `index`, packed as in `pack_tokens`."""
        begin = index * PAGE_TOKENS - self.prompt.length
        if begin >= 0:
            return pack_tokens(self.generated[begin : begin + PAGE_TOKENS])
        page = self.prompt.packed[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]
        return page if len(page) == PAGE_BYTES else page + pack_tokens(self.generated[: begin + PAGE_TOKENS])

    def key(self, index: int, page: bytes, parent: bytes) -> bytes:
        """Key of full page number `index`, of tokens `page`, which continues the page of key `parent`."""
        known = self.prompt.keys(self.root)
        return known[index] if index < len(known) else chain_keys(parent, page)[0]

    def keys(self) -> list[bytes]:
        """Keys of all full pages. Where nothing was generated they are the prompt's own list, which nobody may change;
        its pages are never hashed again."""
        known = self.prompt.keys(self.root)
        if self.length // PAGE_TOKENS == len(known):
            return known
        behind = self.prompt.packed[len(known) * PAGE_BYTES :] + pack_tokens(self.generated)
        assert len(behind) == (self.length - len(known) * PAGE_TOKENS) * TOKEN_BYTES
        return known + chain_keys(known[-1] if known else self.root, behind)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request. `tokens` are facts from applied results; `upper` and `promised` look ahead over steps in flight."""

    request: Request
    rank: Rank
    """The order of service. Never the request id."""
    limit: int
    """Tokens, prompt included, at which the request ends."""
    tokens: Tokens
    """Prompt and generated tokens. The newest generated one is not fed yet."""
    stop_ids: frozenset[int]
    min_total: int
    """Tokens, prompt included, before which no stop id counts."""
    logprobs: int
    """Number of log-probabilities, as in `SamplingParams`."""
    scores_from: int = 0
    """Prompt tokens that were scored when it got its slot: chunks go on from there."""
    scores: list[Scores] = field(default_factory=list)
    """Scores of the prompt so far; empty once an output went out with them."""
    scored: int = 0
    """Tokens that they are of."""
    share: Share | None = None
    """Share of its API key."""
    arrived: float = 0.0
    """Seconds, of the scheduler's clock."""
    queued: float = 0.0
    """Seconds that it waited before it was first admitted."""
    paid_to: int = 0
    """Tokens of the prompt that its key has been charged for, or that came from the prefix cache."""
    keys: list[bytes] = field(default_factory=list)
    """Page keys of `tokens` as they were when the request was queued; choices of one request have one list."""
    phase: Phase = Phase.WAITING
    slot: int = -1
    pages: RowPages = field(default_factory=RowPages)
    capacity: int = 0
    """Cache entries that `pages` hold."""
    goal: int = 0
    """Tokens to prefill: all that were known at admission."""
    cursor: int = 0
    """Prefill tokens planned so far."""
    write_from: int = 0
    """See `PrefillRow.write_from`."""
    saves: list[int] = field(default_factory=list)
    """Boundaries, in tokens, at which chunks that are still to be planned end, for snapshots of its rings."""
    snapshots: list[Snapshot] = field(default_factory=list)
    """Those that were in its rings since it has its slot: the one that it began with, and those it has made."""
    restore: int = -1
    """Number of the one that it begins with, until its first chunk is planned; -1: none."""
    upper: int = 0
    """Most cache entries the row can have once the steps in flight are done."""
    promised: int = 0
    """Steps in flight that sample for this row: it gains at least this many tokens."""
    in_flight: int = 0
    """Steps in flight that have a row of this request."""
    cached: int = -1
    """Prompt tokens that the prefix cache had at the first admission; -1 before it."""
    alone: bool = False
    """Computes every page by itself: it has read pages once that made it a non-finite row."""
    void: bool = False
    """Whether the results of its steps in flight are void: it starts again when they are applied."""
    given_up: tuple[int, ...] = ()
    """Pages that a preemption took, until its steps in flight are applied."""
    sound: bool = False
    """Whether it has sampled a token from finite logits since it has its slot."""
    drafts_tried: list[float] = field(default_factory=list)
    """Steps that had a draft at each position, older ones for less; empty before the first."""
    drafts_accepted_at: list[float] = field(default_factory=list)
    """Steps, among these, in which all drafts up to that position were accepted."""
    disk_asked: int = -1
    """When it was last seen what the disk has of its prompt, in changes of what it is busy with."""
    disk_ahead: int = -1
    """The same where no slot was free for it."""
    disk_left_s: float | None = None
    """Seconds that it may still wait for the disk; None where it never did."""
    disk_until: float = 0.0
    """Until when, while it does."""
    reported: bool = False
    """Whether an output went out, and with it the number of cached tokens."""
    grammar: int = 0
    """Id of its grammar (`workers.scheduler.grammars`), 0 without one."""

    def go_on(self) -> None:
        """Continue tokens that an engine before this one generated: that one counted, charged and scored its prompt,
        and its first output is out. Its key served it before, so it waits as one that was preempted."""
        self.cached, self.paid_to, self.reported = 0, self.tokens.prompt.length, True
        self.scored = self.tokens.prompt.length - 1
        if self.share is not None:
            self.rank = (self.rank[0], self.share.paid, self.rank[2])

    def pay(self, start: int) -> None:
        """Charge its key for the chunk from `start` to the cursor, but for what a preemption makes it compute again."""
        assert self.share is not None
        end = min(self.cursor, self.tokens.prompt.length)
        self.share.charge(max(end - max(start, self.paid_to), 0))
        self.paid_to = max(self.paid_to, end)

    @property
    def gains(self) -> bool:
        """Whether results of its steps in flight count."""
        return self.phase is not Phase.ENDED and not self.void

    @property
    def unscored(self) -> int:
        """Number of prompt tokens that are still to be scored, of those that will be."""
        if self.request.sampling.prompt_logprobs < 0:
            return 0
        return self.tokens.prompt.length - 1 - self.scored

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens.generated)


@dataclass(frozen=True, slots=True)
class Flight:
    """A step in flight: the plan, and whose its rows are. A slot's next request never mixes with its last one."""

    plan: StepPlan
    decode: list[Sequence]
    prefill: list[Sequence]
    """Parallel to the plan's prefill rows."""

    def sampled(self) -> list[Sequence]:
        """Return the requests of the sampled rows, in the order of the result."""
        return [*self.decode, *(s for s, row in zip(self.prefill, self.plan.prefill, strict=True) if row.final)]

    def logprobs_owed(self, tokens: tuple[tuple[int, ...], ...]) -> list[int]:
        """Return the number of log-probabilities that the result must have for each sampled row that gained these
        tokens."""
        return [len(gained) if s.logprobs >= 0 else 0 for s, gained in zip(self.sampled(), tokens, strict=True)]
