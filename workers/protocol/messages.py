"""What passes between a replica's front, its scheduler and its workers. msgpack on the wire; no code ever travels.

front -> scheduler: `Requests`, `Cancel`, `Charges`, `TakeOver`, `Shutdown`.
scheduler -> front: `Outputs`, `EngineStats`, `Charges`, `Fault`, `Ready`.
scheduler -> worker: `StepPlan`, `Moves`, `DiskMoves`, `CapturePortion`, `TakeOver`, `Shutdown`; rank 0 also
`CompileGrammar`, `ForgetGrammar`.
worker -> scheduler: `StepResult`, `GrammarReady`, `GrammarProgress` and `DiskFound` (rank 0), `Moved`, `DiskMoved`,
`PortionCaptured`, `Heartbeat`, `Ready`, `Fault`.
While a replica starts, and until all of its graphs are captured, `Progress` (every rank) and `SelfTestReport` (rank 0)
travel from the workers to the front.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from workers.protocol.captures import CapturePortion, PortionCaptured
from workers.protocol.grammar import CompileGrammar, ForgetGrammar, GrammarProgress, GrammarReady
from workers.protocol.plan import SamplingParams, StepPlan, StepResult, TopLogprobs
from workers.protocol.report import SelfTestReport, StepTime
from workers.protocol.request import NO_ROOT, Prompt
from workers.protocol.scores import Scores
from workers.protocol.tiers import DiskFound, DiskMoved, DiskMoves, Moved, Moves, Pinned

FinishReason = Literal["stop", "length", "cancelled"]


class Request(msgspec.Struct, frozen=True):
    """One sequence to generate. `n` choices of one HTTP request are `n` of these, which share one prompt; they travel
    as one `Requests`."""

    request_id: str
    prompt: Sequence[int]
    """Token ids; where many share them, a `workers.protocol.request.Prompt`."""
    sampling: SamplingParams
    priority: int = 0
    """Lower runs first; ties fairly among keys, and by arrival where there are none."""
    key: str = ""
    """Name of the API key that it came with, never the key itself; empty where no key has a name."""
    weight: float = 1.0
    """Weight of that key, in shares among keys; positive."""
    done: bytes = b""
    """Tokens that an engine before this one generated for the request and that were delivered, as
    `workers.protocol.request.pack_tokens` packs them. The request goes on behind them as after a preemption: prompt and
    sampling are those with which it began."""
    salt: bytes = b""
    """Of the keys of its pages: they are shared only with requests of the same salt (`salted_root`). A digest, never
    the API key or what its client sent."""
    age_s: float | None = None
    """Seconds since it arrived, where an engine before this one had it: its place in the queue follows from that, and
    it waits however long the queue is. None: it arrives now."""


class Requests(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Sequences that continue one prompt and differ in their seeds alone: what they share travels once."""

    prompt: bytes
    """Prompt as packed by `workers.protocol.request.pack_tokens`."""
    sampling: SamplingParams
    """Sampling parameters of the first request, which are those of all but for the seed."""
    choices: tuple[tuple[str, int], ...]
    """Request id and seed of each."""
    priority: int = 0
    """Priority as in `Request`. It holds for each request, like the next two fields and `salt`."""
    key: str = ""
    weight: float = 1.0
    continued: tuple[tuple[bytes, float], ...] = ()
    """`Request.done` and `Request.age_s` of each; empty where all of them arrive now."""
    salt: bytes = b""

    @staticmethod
    def of(requests: Sequence[Request]) -> Requests:
        """Pack requests that differ only in their ids, their seeds and the part that is done; all of them arrive now,
        or none does. OverflowError for a token id outside 0 ... 2^32 - 1."""
        first = requests[0]
        choices = tuple((request.request_id, request.sampling.seed) for request in requests)
        packed = Prompt.of(first.prompt).packed
        continued = tuple((request.done, request.age_s) for request in requests if request.age_s is not None)
        shared = (first.priority, first.key, first.weight)
        return Requests(packed, first.sampling, choices, *shared, continued, first.salt)

    def unpack(self) -> tuple[Request, ...]:
        """The requests, which share one `Prompt`."""
        prompt, replace = Prompt(self.prompt), msgspec.structs.replace
        shared = (self.priority, self.key, self.weight)
        continued = self.continued or ((b"", None),) * len(self.choices)
        return tuple(
            Request(name, prompt, replace(self.sampling, seed=seed), *shared, done, self.salt, age_s)
            for (name, seed), (done, age_s) in zip(self.choices, continued, strict=True)
        )


class Cancel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The front no longer wants this request; unknown or finished ids are ignored."""

    request_id: str


class Charge(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that were computed for an API key, prompt tokens and generated ones."""

    key: str
    """Name of the key."""
    weight: float
    tokens: int


class Charges(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Tokens that keys were given since the last such message: to the front by this replica, to the scheduler by
    others."""

    items: tuple[Charge, ...]


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """Tokens a request gained in one step."""

    request_id: str
    tokens: tuple[int, ...]
    """May be empty when only the end is reported. A stop id is included as the last token."""
    finish: FinishReason | None = None
    logprobs: tuple[TopLogprobs, ...] = ()
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache (given with the first output)."""
    refused: str = ""
    """Reason why the scheduler did not take the request (then nothing else is set)."""
    overloaded: bool = False
    """Whether it was refused only because too many wait already."""
    failed: str = ""
    """Reason why the request ends without an answer, or in the middle of one, though the replica goes on."""
    dead_end: bool = False
    """Whether it failed because its own grammar allowed no token."""
    unavailable: bool = False
    """Whether it was refused because this replica cannot do for now what others may do."""
    accepted: tuple[bool, ...] = ()
    """Whether each token was a draft that was accepted, where outputs were merged or taken apart; empty: all but the
    last."""
    prompt: Scores | None = None
    """Log-probabilities of the prompt's tokens from the second on. They come with the first output, where they are
    asked for."""

    queued: float = 0.0
    """Seconds that the request waited in the scheduler for its slot and pages (given with the first output)."""
    offered: int = 0
    """Drafts that the step verified for the request, whether they stood or not."""
    at: int = 0
    """Index of the first of `tokens` among all that are generated for the request."""

    @property
    def drafts(self) -> tuple[bool, ...]:
        """Whether each token was a draft that was accepted. A step ends with a token of the model's own; where the end
        of the sequence cut it off, the last one that is left counts as that."""
        return self.accepted or tuple(place < len(self.tokens) - 1 for place in range(len(self.tokens)))


class Outputs(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Outputs of one step, all in one message."""

    items: tuple[RequestOutput, ...]


Figures = dict[str, dict[str, float]]
"""Figures of a worker: by name, then by label ("" where the name has none). What they are says
`deploy.observability.front_metrics`."""


class Distribution(msgspec.Struct, frozen=True, array_like=True):
    """Histogram: the number of values that fell into each bucket."""

    counts: tuple[int, ...] = ()
    """One for each upper bound (inclusive) of the buckets, the last for what lies above; not cumulative."""
    total: float = 0.0
    """Sum of the values."""

    @property
    def count(self) -> int:
        """Values counted."""
        return sum(self.counts)


STEP_BUCKETS: Final = {
    "step_seconds": (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0),
    "step_decode_rows": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    "step_context": (256, 1024, 4096, 16384, 65536, 262144, 1048576),
    "step_prefill_tokens": (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
}
"""Upper bounds of the buckets, by field of `EngineStats`."""


class EngineStats(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Gauges (now) and counters (since start) of one replica, sent by the scheduler several times a second."""

    running: int = 0
    waiting: int = 0
    prefill_backlog: int = 0
    """Prompt tokens queued or partly prefilled that are still to be computed."""
    pages_total: int = 0
    pages_free: int = 0
    """Free pages, those that only the prefix cache holds included."""
    cache_shards: int = 1
    """Ranks that share out the pages."""
    slots: int = 0
    queue_limit: int = 0
    """Requests that may wait beyond the slots."""
    step_seconds: dict[str, Distribution] = {}
    """Times of steps on rank 0, in seconds, by kind of step: decode (rows alone), prefill (rows alone), mixed."""
    step_decode_rows: dict[str, Distribution] = {}
    """Decode rows of the steps that have any, by kind."""
    step_prefill_tokens: dict[str, Distribution] = {}
    """Prompt tokens of the steps that have any, by kind."""
    step_context: dict[str, Distribution] = {}
    """Tokens that each token of a step had before it, on average, by kind of step."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens served from the prefix cache."""
    drafts_offered: int = 0
    drafts_accepted: int = 0
    decode_fed: int = 0
    """Tokens that steps of decode rows alone fed, drafts included."""
    decode_context: int = 0
    """Tokens that their rows had before them, summed over steps."""
    preemptions: int = 0
    bad_rows: int = 0
    """Rows whose logits were not finite: their requests failed, or were computed again without pages of others."""
    width: int = 1
    """Tokens that a decode row feeds in one step, as it pays at present."""
    acceptance: tuple[float, ...] = ()
    """Probability, by draft position, that a draft is accepted if those before it are."""
    acceptance_falls: int = 0
    """Number of times that acceptance fell to half of what it was."""
    worker: Figures = {}
    """Figures of rank 0, half a second old at the most."""
    prefix_keys: bytes = b""
    """Keys of pages in the prefix cache, for routing, as `pack_keys` packs them: a bounded choice
    (`SchedulerConfig.prefix_sample`), of which each vouches for all pages before it."""
    host_keys: bytes = b""
    """Keys of pages in host memory, as many as `SchedulerConfig.tier_sample` says."""
    key_root: bytes = b""
    """What both are rooted in (`workers.protocol.request`)."""
    host_pages_total: int = 0
    """Pages that host memory holds behind those of the device; on a GPU as far as it is pinned."""
    host_pages: int = 0
    """Of these, pages in use."""
    host_saved_pages: int = 0
    """Copied to host memory."""
    host_loaded_pages: int = 0
    """Copied back."""
    host_load_seconds: float = 0.0
    """Time that these copies took, each as long as on the slowest rank."""
    host_dropped_pages: int = 0
    """Left the device and were never saved: they, or what they continue, left it too soon, or all of host memory was in
    use. Each is counted once, as it leaves."""
    host_lost_pages: int = 0
    """Forgotten because a copy of them failed."""
    disk_keys: bytes = b""
    """Keys of pages on disk, likewise."""
    disk_pages_total: int = 0
    """Pages that the disk holds behind host memory; 0 where there is none, or where it has failed."""
    disk_pages: int = 0
    """Of these, pages in use."""
    disk_saved_pages: int = 0
    """Copied from host memory to the disk."""
    disk_loaded_pages: int = 0
    """Copied back to host memory."""
    disk_load_seconds: float = 0.0
    """Time that these copies took, each as long as on the slowest rank."""
    disk_dropped_pages: int = 0
    """Left host memory and were never saved: there was no leave to write them before, or no room could be made. Each is
    counted once, as it leaves."""
    disk_lost_pages: int = 0
    """Forgotten because they could not be written, or were not read as they had been written."""
    disk_late_loads: int = 0
    """Prompts that were computed because the disk took longer than that."""

    @property
    def steps(self) -> int:
        """Steps since start whose results came back. Every one of them took some request further, be it a chunk of a
        prompt or a token."""
        return sum(part.count for part in self.step_seconds.values())

    @property
    def prefill_backlog_seconds(self) -> float:
        """Seconds that `prefill_backlog` takes at the pace of all steps with prompt tokens so far; 0 before the first
        one."""
        tokens = sum(part.total for part in self.step_prefill_tokens.values())
        seconds = sum(part.total for kind, part in self.step_seconds.items() if kind in self.step_prefill_tokens)
        return self.prefill_backlog * seconds / tokens if tokens > 0 else 0.0


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A process finished starting."""

    rank: int
    """-1 for the scheduler."""
    pages: int = 0
    """Pages of latent cache, the null page included; all ranks agree on it."""
    max_context: int = 0
    """Tokens a request may have, prompt and output together."""
    vocab_size: int = 0
    width: int = 1
    """Most tokens a decode row feeds: 1 + drafts; 1 without a drafter."""
    eos_ids: tuple[int, ...] = ()
    step_times: tuple[StepTime, ...] = ()
    """Step times of rank 0; empty where nothing was proven."""
    draft_cache: bool = True
    """Whether the drafter has a cache of its own."""
    reads_tokens: bool = False
    """Whether the drafter reads rows' tokens on the device."""
    host_pages: int = 0
    """Pages of host memory behind those of the device; all ranks agree on it."""
    pins_pages: bool = False
    """Whether these are of use only as far as ranks say that they are pinned (`workers.protocol.tiers.Pinned`)."""
    save_batch: int = 1
    """Pages that a rank copies to host memory at once; all ranks agree on it."""
    disk_pages: int = 0
    """Pages on disk behind host memory; all ranks agree on it."""
    record_bytes: int = 0
    """Bytes of a page of all caches of a rank."""
    disk_serial: int = 0
    """Serial number of the next page that is saved to disk (`DiskPage.serial`)."""
    root: bytes = NO_ROOT
    """Root of the keys of pages: a hash of all that decides what is cached (`workers.rank.root`); all ranks agree on
    it."""
    cache_shards: int = 1
    """Ranks that share out the pages; all agree on it."""
    portions: tuple[tuple[int, int], ...] = ()
    """Graphs that are still to be captured, as `SchedulerConfig.portions` has it; all ranks agree on it."""
    shares_prefixes: bool = True
    """Whether prompts can begin with pages that others have computed. They cannot where layers keep something of each
    row beside its pages and there is no memory for snapshots of that."""
    snapshots: int = 0
    """Snapshots of rings that the ranks have memory for; 0 where there are no rings."""
    snapshot_tokens: int = 0
    """Multiples of so many tokens at which they may be made."""
    savers: int = 1
    """Ranks that share the copying of a page to host memory (`saver_of`); all ranks agree on it."""
    start_s: dict[str, float] = {}
    """Seconds of the parts of its start, by their names, in order; of rank 0 where the scheduler says it."""


class Progress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A line about start-up for the user: what is being loaded and how far it is."""

    rank: int
    """-1 for the scheduler."""
    text: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Heartbeat of a process, sent a few times a second: by a rank from a thread of its own."""

    rank: int
    figures: Figures = {}
    """Figures of rank 0."""


class Fault(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first cause of the end of a replica."""

    cause: str
    rank: int = -1
    secondary: bool = False
    """A collective failed, which most often means that another rank died first: its own report is the first cause."""
    lasting: bool = False
    """Whether the cause is in the model, the settings or the machine: another start would end the same."""
    in_step: bool = False
    """An error in a step, or a step that never ends: what was asked of the replica may have caused it."""


class TakeOver(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To an engine that stands by: the one that served has ended, take its place. Every rank answers with a second
    `Ready`, and so does the scheduler then. What was asked of it before is forgotten."""


class Shutdown(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End in order: graphs, process group, process."""


ToScheduler = Requests | Cancel | Charges | TakeOver | Shutdown
ToFront = Outputs | EngineStats | Charges | Fault | Ready | Progress | SelfTestReport
ToWorker = StepPlan | Moves | DiskMoves | CapturePortion | CompileGrammar | ForgetGrammar | TakeOver | Shutdown
FromWorker = (
    StepResult
    | Moved
    | Pinned
    | DiskMoved
    | DiskFound
    | PortionCaptured
    | GrammarReady
    | GrammarProgress
    | Heartbeat
    | Ready
    | Fault
    | Progress
    | SelfTestReport
)
