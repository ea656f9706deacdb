"""A worker without a model, faithful in everything the scheduler can get wrong.

The model is a hash: the next token is a function of all tokens before it, of the seed and of how many were generated.
The cache remembers for every entry which tokens wrote it, as a digest of the whole prefix, in the target layers and in
the draft layer. Every attention checks each entry it reads against the row's own prefix, so a leaked, stale, shared or
missing page shows at once. Only what a plan says and what lives in slots is used, as on a device.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import dataclass, field

from kernels.page import NULL_PAGE, PAGE_TOKENS
from workers.protocol.messages import Request
from workers.protocol.plan import PrefillRow, SamplingParams, StepPlan, StepResult, TopLogprobs
from workers.protocol.scores import Scores
from workers.protocol.tiers import DiskMoves, DiskPage, Moves

VOCAB = 40
Content = tuple[int, int]
"""(digest of the prefix through a token, that token)."""
HostPage = tuple[list[Content | None], list[Content | None], list[bool]]
"""Of the target layers, of the draft layer, and which entries are no numbers."""


def digest(parent: int, token: int) -> int:
    return hash((parent, token, 0x5EED))


def next_token(prefix: int, sampling: SamplingParams, generated: int) -> int:
    """Return the model's token after a prefix; stop ids are masked before min_tokens."""
    token = hash((prefix, sampling.seed)) % VOCAB
    while generated < sampling.min_tokens and token in sampling.stop_ids:
        token = (token + 1) % VOCAB
    return token


def alone(request: Request, max_context: int) -> tuple[list[int], str]:
    """The tokens and the finish reason of a request that has everything to itself."""
    prefix, sampling = 0, request.sampling
    for token in request.prompt:
        prefix = digest(prefix, token)
    out: list[int] = []
    while True:
        token = next_token(prefix, sampling, len(out))
        out.append(token)
        prefix = digest(prefix, token)
        if token in sampling.stop_ids and len(out) > sampling.min_tokens:
            return out, "stop"
        if len(out) == sampling.max_tokens or len(request.prompt) + len(out) == max_context:
            return out, "length"


@dataclass
class Slot:
    """State of one slot on the device."""

    table: list[int]
    granted: int = 0
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=1))
    resumed: int = 0
    """Generated tokens that were part of the prefill."""
    history: tuple[int, ...] = ()
    prompt: int = -1
    """Tokens of the request's own prompt; known once the prefill is over."""
    row: list[Content] = field(default_factory=list)
    """The row's true content, all tokens that are certainly its own, the last one not fed yet when decoding."""
    decoding: bool = False
    drafts: tuple[int, ...] = ()
    drafted_at: int = 0

    @property
    def length(self) -> int:
        return len(self.row) - 1

    def prefix(self) -> int:
        return self.row[-1][0] if self.row else 0


class SimulatedWorker:
    """`agree(rng)` decides for each draft whether it is what the model would say."""

    def __init__(self, slots: int, pages: int, width: int, pages_per_row: int, agree: float, seed: int) -> None:
        self.width, self.pages = width, pages
        self.slots = [Slot([NULL_PAGE] * pages_per_row) for _ in range(slots)]
        self.target: list[Content | None] = [None] * (pages * PAGE_TOKENS)
        self.draft: list[Content | None] = [None] * (pages * PAGE_TOKENS)
        self.agree, self.rng = agree, random.Random(seed)
        self.poison: int | None = None
        """A token whose entries are no numbers, as are those of all that attend to one that is not."""
        self.mishap = 0.0
        """Probability that an entry of a prompt is no number, for no reason."""
        self.mishaps = 0
        self.broken = [False] * (pages * PAGE_TOKENS)
        self.host: dict[int, HostPage] = {}
        """By slot of host memory: a page of all caches."""
        self.loading: dict[int, list[tuple[int, int]]] = {}
        """By ticket: slots and pages."""
        self.pinned: int | None = None
        """Slots of host memory that all ranks can copy to and from, where they say so."""
        self.forgetful = False
        """A planted fault: the caches of the drafter are not copied."""
        self.late = False
        """A planted fault: pages are saved when the ranks answer, and not in order with the plans."""
        self.saving: dict[int, Moves] = {}
        self.disk: dict[int, tuple[DiskPage, HostPage]] = {}
        """By slot on disk: its header, and a page of all caches."""
        self.on_disk: dict[int, tuple[DiskMoves, list[HostPage]]] = {}
        """By ticket: what is copied, and what a save found in host memory when it began."""
        self.credulous = False
        """A planted fault: what comes from disk is not compared with its header."""
        self.step = 0
        self.highest_entry = 0

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step == self.step + 1
        self.step = plan.step
        assert 1 <= plan.width <= self.width
        assert 0 <= plan.drafts < self.width
        used = [*plan.decode_slots, *(row.slot for row in plan.prefill)]
        assert used
        assert len(set(used)) == len(used)
        assert list(plan.decode_slots) == sorted(plan.decode_slots)
        assert {grant.slot for grant in plan.grants} <= set(used), "pages for a row that is not run"
        self._zero_fill(plan)
        self._admit(plan)
        self._grant(plan)
        self._check_written_pages_are_exclusive(plan, used)

        # All rows write before any row reads, as the layers of one forward pass do.
        fed = [self._feed(self.slots[slot], slot, plan) for slot in plan.decode_slots]
        for row in plan.prefill:
            self._feed_prompt(self.slots[row.slot], row)
        tokens: list[tuple[int, ...]] = []
        for slot, drafts in zip(plan.decode_slots, fed, strict=True):
            tokens.append(self._verify(self.slots[slot], drafts))
        for row in plan.prefill:
            state = self.slots[row.slot]
            self._attend(self.target, state, state.row, first=0)
            if row.final:
                tokens.append(self._sample_first(state))
        if self.width > 1:
            for slot, drafts, gained in zip(plan.decode_slots, fed, tokens, strict=False):
                self._draft_rows(self.slots[slot], len(drafts) + 1, len(gained), plan)
            for row in plan.prefill:
                self._draft_prompt(self.slots[row.slot], row, plan)
        nonfinite = self._nonfinite_rows(plan, tokens)
        for index in nonfinite:
            tokens[index] = ()
        scores = tuple(scores_of(row) for row in plan.prefill if row.scored)
        return StepResult(plan.step, tuple(tokens), 0.001, self._logprobs(plan, tokens), nonfinite, scores=scores)

    def _nonfinite_rows(self, plan: StepPlan, tokens: list[tuple[int, ...]]) -> tuple[int, ...]:
        """Rows of which any entry behind a sampled token is no number."""
        sampled = [*plan.decode_slots, *(row.slot for row in plan.prefill if row.final)]
        if self.poison is None and not self.mishap:
            return ()
        states = [self.slots[slot] for slot in sampled]
        return tuple(i for i, state in enumerate(states) if self._is_broken(state, len(state.row) - 1))

    def _is_broken(self, state: Slot, end: int) -> bool:
        return any(self.broken[self._entry(state, position)] for position in range(end))

    def _is_mishap(self, position: int) -> bool:
        """Seldom at the beginning, where it would hit the replica's own canary request."""
        happens = self.rng.random() < (self.mishap if position else self.mishap**2)
        self.mishaps += happens
        return happens

    def _write(self, state: Slot, position: int, content: Content, broken: bool = False) -> None:
        """A target entry; no number if the one before it is none, which it attends to."""
        at = self._entry(state, position)
        self.target[at] = content
        before = position > 0 and self.broken[self._entry(state, position - 1)]
        self.broken[at] = before or broken or content[1] == self.poison

    def _zero_fill(self, plan: StepPlan) -> None:
        for page in plan.zero_fill:
            assert NULL_PAGE < page < self.pages
            entries = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
            self.target[entries] = self.draft[entries] = [None] * PAGE_TOKENS
            self.broken[entries] = [False] * PAGE_TOKENS

    def _logprobs(self, plan: StepPlan, tokens: list[tuple[int, ...]]) -> tuple[tuple[TopLogprobs, ...], ...]:
        """Return log-probabilities of the rows that asked, as many as the one that asked for most."""
        sampled = [*plan.decode_slots, *(row.slot for row in plan.prefill if row.final)]
        asked = [self.slots[slot].sampling.logprobs for slot in sampled]
        assert plan.logprobs == max(asked, default=-1)
        if plan.logprobs < 0:
            return ()
        return tuple(
            tuple(top_logprobs(token, plan.logprobs) for token in row) if own >= 0 else ()
            for row, own in zip(tokens, asked, strict=True)
        )

    # Host memory

    def move(self, moves: Moves) -> None:
        """Saves are done at once. Pages that are loaded hold nothing until all ranks have said that they are done."""
        for slot in [slot for _, slot in moves.saves] + [slot for slot, _ in moves.loads]:
            held = f"slot {slot} of host memory, of which a rank has {self.pinned}"
            assert self.pinned is None or slot < self.pinned, held
        if self.late and moves.saves:
            self.saving[moves.ticket] = moves
        else:
            self._save(moves)
        for _, page in moves.loads:
            assert NULL_PAGE < page < self.pages
            entries = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
            self.target[entries] = self.draft[entries] = [None] * PAGE_TOKENS
        self.loading[moves.ticket] = list(moves.loads)

    def _save(self, moves: Moves) -> None:
        for page, slot in moves.saves:
            entries = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
            assert NULL_PAGE < page < self.pages
            assert None not in self.target[entries], f"page {page} is saved and not complete"
            assert not any(self.broken[entries]), f"page {page} is saved and holds no numbers"
            draft: list[Content | None] = [None] * PAGE_TOKENS if self.forgetful else self.draft[entries]
            self.host[slot] = self.target[entries], draft, self.broken[entries]

    def loaded(self, ticket: int, *, lost: bool) -> None:
        """All ranks have answered. What is lost is garbage, not even numbers."""
        if ticket in self.saving:
            self._save(self.saving.pop(ticket))
        for slot, page in self.loading.pop(ticket):
            entries = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
            assert self.target[entries] == [None] * PAGE_TOKENS, f"page {page} was written while it was loaded"
            if lost:
                self.broken[entries] = [True] * PAGE_TOKENS
            else:
                self.target[entries], self.draft[entries], self.broken[entries] = self.host[slot]

    def breaks(self, slot: int) -> None:
        """What is in a slot of host memory is no numbers from now on."""
        target, draft, _ = self.host[slot]
        self.host[slot] = target, draft, [True] * PAGE_TOKENS

    # Disk

    def move_on_disk(self, moves: DiskMoves) -> None:
        """Begin copies between host memory and disk, of which nobody knows how far they are until all ranks have
        answered."""
        assert sum(map(bool, (moves.saves, moves.loads, moves.erased))) == 1
        busy = [slot for other, _ in self.on_disk.values() for slot in slots_of(other)]
        loads = [slot for other, _ in self.on_disk.values() if other.loads for slot in slots_of(other)]
        # Several may read a page; otherwise it is of one message.
        assert set(slots_of(moves)).isdisjoint(busy if not moves.loads else set(busy) - set(loads))
        for page in moves.loads:
            self.host[page.host] = ([None] * PAGE_TOKENS, [None] * PAGE_TOKENS, [True] * PAGE_TOKENS)
        self.on_disk[moves.ticket] = moves, [self.host[page.host] for page in moves.saves]

    def moved_on_disk(self, ticket: int, bad: set[int]) -> set[int]:
        """All ranks are done, but have failed with the `bad` slots. The slots of which they say so."""
        moves, found = self.on_disk.pop(ticket)
        for page, was in zip(moves.saves, found, strict=True):
            assert self.host[page.host] is was, f"slot {page.host} of host memory was written while it was saved"
            self.disk[page.slot] = page, was
            if page.slot in bad:
                del self.disk[page.slot]
        for slot in moves.erased:
            self.disk.pop(slot, None)
        for page in moves.loads:
            header, content = self.disk.get(page.slot, (None, None))
            if not self.credulous and (header is None or named(header) != named(page)):
                bad.add(page.slot)
            if page.slot not in bad:
                assert content is not None, f"slot {page.slot} of the disk was never written"
                self.host[page.host] = content
        return set() if self.credulous else bad

    # Plan to slots

    def _admit(self, plan: StepPlan) -> None:
        assert len({admission.slot for admission in plan.admissions}) == len(plan.admissions)
        for admission in plan.admissions:
            table = [NULL_PAGE] * len(self.slots[admission.slot].table)
            self.slots[admission.slot] = Slot(
                table, sampling=admission.sampling, resumed=admission.generated, history=admission.history
            )

    def _grant(self, plan: StepPlan) -> None:
        shared = {row.slot: row.write_from // PAGE_TOKENS for row in plan.prefill}
        for grant in plan.grants:
            state = self.slots[grant.slot]
            for page in grant.pages[0 if grant.first else shared.get(grant.slot, 0) :]:
                entries = self.broken[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]
                assert not any(entries), f"page {page} of a bad row is granted as it is"
            assert grant.first == state.granted, "grants append to the table"
            assert grant.pages
            for index, page in enumerate(grant.pages, start=grant.first):
                assert NULL_PAGE < page < self.pages
                state.table[index] = page  # IndexError: more pages than max_pages_per_row
            state.granted += len(grant.pages)
            assert len(set(state.table[: state.granted])) == state.granted

    def _check_written_pages_are_exclusive(self, plan: StepPlan, used: list[int]) -> None:
        tables = Counter(page for slot in used for page in self.slots[slot].table if page != NULL_PAGE)
        for slot in plan.decode_slots:
            for page in self.slots[slot].table[self.slots[slot].length // PAGE_TOKENS :]:
                assert tables[page] <= 1, f"decode row of slot {slot} writes page {page}, which another row has too"
        for row in plan.prefill:
            for page in self.slots[row.slot].table[max(row.start, row.write_from) // PAGE_TOKENS :]:
                assert tables[page] <= 1, (
                    f"prefill row of slot {row.slot} writes page {page}, which another row has too"
                )

    # Cache

    def _entry(self, state: Slot, position: int) -> int:
        page = state.table[position // PAGE_TOKENS]
        assert page != NULL_PAGE, f"position {position} has no page"
        self.highest_entry = max(self.highest_entry, position)
        return page * PAGE_TOKENS + position % PAGE_TOKENS

    def _attend(self, cache: list[Content | None], state: Slot, own: list[Content], first: int) -> None:
        for position in range(first, len(own)):
            found = cache[self._entry(state, position)]
            assert found == own[position], f"position {position} holds {found}, not the row's own {own[position]}"

    # Decode rows

    def _feed(self, state: Slot, slot: int, plan: StepPlan) -> tuple[int, ...]:
        """Write the target entries of the last token and of the drafts; returns the drafts that are fed."""
        assert state.decoding, f"slot {slot} is decoded before its prompt ended"
        drafts = state.drafts[: plan.width - 1]
        assert len(drafts) == plan.width - 1, f"slot {slot} lacks drafts"
        assert plan.width == 1 or state.drafted_at == plan.step - 1, "drafts of an older step"
        self._write(state, state.length, state.row[-1])
        prefix = state.prefix()
        for position, token in enumerate(drafts, start=len(state.row)):
            prefix = digest(prefix, token)
            self._write(state, position, (prefix, token))
        return drafts

    def _verify(self, state: Slot, drafts: tuple[int, ...]) -> tuple[int, ...]:
        gained: list[int] = []
        row = list(state.row)
        read = 0
        for draft in (*drafts, None):
            self._attend(self.target, state, row, first=read)
            read = len(row)
            token = next_token(row[-1][0], state.sampling, len(row) - state.prompt)
            gained.append(token)
            row.append((digest(row[-1][0], token), token))
            if token != draft:
                break
        state.row = row
        return tuple(gained)

    def _draft_rows(self, state: Slot, fed: int, gained: int, plan: StepPlan) -> None:
        """The draft layer's pass over the row's tokens, one position further, then the further drafts."""
        before = len(state.row) - gained - 1  # length when the step began
        for index in range(fed):
            position = before + index + 1
            own = state.row[position] if index < gained else (-1, -1)  # behind the accepted part: arbitrary
            self.draft[self._entry(state, position)] = own
        self._make_drafts(state, plan)

    def _make_drafts(self, state: Slot, plan: StepPlan) -> None:
        row, drafts = list(state.row), []
        self._attend(self.draft, state, row, first=1)
        for index in range(plan.drafts):
            token = next_token(row[-1][0], state.sampling, len(row) - state.prompt)
            if self.rng.random() >= self.agree:
                token = self.rng.randrange(VOCAB)
            drafts.append(token)
            row.append((digest(row[-1][0], token), token))
            if index + 1 < plan.drafts:
                self.draft[self._entry(state, len(row) - 1)] = row[-1]
        state.drafts, state.drafted_at = tuple(drafts), plan.step

    # Prefill rows

    def _feed_prompt(self, state: Slot, row: PrefillRow) -> None:
        assert not state.decoding, "a prompt chunk of a row that decodes"
        assert row.tokens
        if not state.row and row.start:
            # A prefix hit: the row trusts what its shared pages hold, but it must be one unbroken prefix.
            hit = [self.target[self._entry(state, position)] for position in range(row.start)]
            prefix = 0
            for position, content in enumerate(hit):
                assert content is not None, f"position {position} of a prefix hit was never written"
                prefix = digest(prefix, content[1])
                assert content[0] == prefix, f"position {position} of a prefix hit belongs to another prefix"
                state.row.append(content)
        assert row.start == len(state.row), "chunks follow each other"
        for token in row.tokens:
            position = len(state.row)
            state.row.append((digest(state.prefix(), token), token))
            if position >= row.write_from:
                self._write(state, position, state.row[-1], self.mishap > 0 and self._is_mishap(position))
        if row.final:
            assert row.next_token == -1
            state.decoding = True
            state.prompt = len(state.row) - state.resumed
            if state.sampling.has_penalties:
                assert state.history == tuple(token for _, token in state.row)

    def _sample_first(self, state: Slot) -> tuple[int, ...]:
        token = next_token(state.prefix(), state.sampling, len(state.row) - state.prompt)
        state.row.append((digest(state.prefix(), token), token))
        return (token,)

    def _draft_prompt(self, state: Slot, row: PrefillRow, plan: StepPlan) -> None:
        end = row.start + len(row.tokens)
        for position in range(row.start + 1, end):
            self.draft[self._entry(state, position)] = state.row[position]
        if row.final:
            self.draft[self._entry(state, end)] = state.row[end]
            self._make_drafts(state, plan)
        else:
            following = (digest(state.prefix(), row.next_token), row.next_token)
            self.draft[self._entry(state, end)] = following
            self._attend(self.draft, state, [*state.row, following], first=1)


def slots_of(moves: DiskMoves) -> list[int]:
    return [*moves.erased, *(page.slot for page in (*moves.saves, *moves.loads))]


def named(page: DiskPage) -> tuple[object, ...]:
    return page.key, page.parent, page.number, page.tokens


def scores_of(row: PrefillRow) -> Scores:
    """The rank is the place of the token that is scored, its log-probability minus the token itself."""
    following = (*row.tokens, row.next_token)[1:]
    places = range(row.score_from, row.score_to)
    assert all(following[place] >= 0 for place in places), "nothing follows a token that is scored"
    ranks = array("I", [row.start + place + 1 for place in places])
    tops = array("I", [0] * len(places) * row.score_top).tobytes()
    return Scores(
        row.score_top, array("f", [-following[place] for place in places]).tobytes(), ranks.tobytes(), tops, tops
    )


def top_logprobs(token: int, count: int) -> TopLogprobs:
    ids = tuple((token + i) % VOCAB for i in range(count))
    return TopLogprobs(-float(token), ids, tuple(-float(i) for i in ids))
