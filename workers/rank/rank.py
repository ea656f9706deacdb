"""One rank of a replica: its model, cache, runner and graphs, how it is built, and the size of its cache."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from msgspec.structs import replace

from kernels.page import PAGE_TOKENS, pages_for
from workers.cache.paged import PagedCache
from workers.cache.place import CachePlace
from workers.cache.snapshots import snapshot_bytes
from workers.cache.spec import page_bytes as bytes_of_page
from workers.config import EngineConfig
from workers.drafters.choice import choose_drafter
from workers.drafters.draft_model import load_draft_model
from workers.families import load_model
from workers.families.draft_models import read_draft_model
from workers.families.registry import load_config
from workers.fit.cache_budget import (
    fp8_cache,
    in_words,
    longest_request,
    refuse_rings,
    rows_at,
)
from workers.fit.standby import fewest_pages, standby_bytes
from workers.grammar.compiler import Compiler
from workers.grammar.rows import ConstrainedRows
from workers.memory.keeper import KeeperClient
from workers.models.model import Model
from workers.models.selecting import pages_to_select
from workers.parallel.group import Group
from workers.proof.prove import GraphProof, prove
from workers.protocol.captures import Waiting
from workers.protocol.messages import Fault, Ready
from workers.protocol.report import SelfTestReport
from workers.protocol.tiers import DiskMoved, Moved, Pinned
from workers.rank.cache_size import check_standby, own_pages, words_of_standby
from workers.rank.captures import Captures, Notes, bytes_of_copies, step_times, tell
from workers.rank.device import captures_steps, pick_dtype
from workers.rank.held_cache import CacheSize, HeldCache
from workers.rank.inherited_proof import InheritedProof, InheritedWarmUp, Measured
from workers.rank.proven_before import ProvenBefore
from workers.rank.role import Role
from workers.rank.root import cache_root, identities
from workers.rank.runner import Runner
from workers.rank.start_times import StartTimes
from workers.scheduler import max_entries_per_row, max_pages_per_row
from workers.step.masks import StepMasks
from workers.step.sampling import SamplingState
from workers.tiers.disk_files import DiskFailedError, DiskFiles
from workers.tiers.disk_mover import DiskMover
from workers.tiers.host_memory import HostMemory
from workers.tiers.mover import PageMover, Staging, batch_of, record_layout
from workers.weights.kept import KeptWeights

logger = logging.getLogger("latentserve.tiers")


def max_context(config: EngineConfig) -> int:
    """Tokens a request may have: what is asked for, at most what the model was made for."""
    made_for = load_config(config.folder).max_positions
    if config.max_context is not None and config.max_context > made_for:
        raise ValueError(f"max_context = {config.max_context}, but the model was made for {made_for} tokens")
    return config.max_context or made_for


class Rank:
    """Model, cache and runner of one rank."""

    def __init__(
        self,
        config: EngineConfig,
        group: Group,
        device: torch.device,
        progress: Callable[[str], None] | None = None,
        on_selftest: Callable[[SelfTestReport], None] | None = None,
        on_grammar: Callable[[int, str], None] = lambda grammar_id, error: None,
        on_grammar_progress: Callable[[int, float], None] = lambda grammar_id, seconds: None,
        on_moved: Callable[[Moved | DiskMoved], None] = lambda moved: None,
        on_tier_news: Callable[[Pinned | Fault], None] = lambda news: None,
        keeper: Path | KeeperClient | None = None,
        waiting: Waiting = None,
        times: StartTimes | None = None,
        role: Role = "alone",
    ) -> None:
        """Loads the model and allocates the cache. All ranks must do it together: they agree on the pages.

        `on_selftest` hears on rank 0 what the self-test found, before a failed one raises RuntimeError. `on_grammar`
        and `on_grammar_progress` hear there of every grammar that was asked for, see `Compiler`. `on_moved` hears of
        pages that were copied to host memory or disk or back, see `PageMover` and `DiskMover`, and `on_tier_news` of
        memory that was pinned for that, and of a thread of theirs that has failed. `keeper`: of weights, if
        the ranks have one, see `WeightKeeper.path`. `waiting`: number of rows that wait for an engine which is to serve
        as soon as possible; then `captures` has graphs that are still to be captured, and what `keeper` knows of an
        engine that had the same of everything is not measured again. None: all are captured at once. auto: see
        `Waiting`.
        `times`: of the start so far; None: it begins here. `role`: with another one than alone a `keeper` is given. A
        rank that stands by raises RuntimeError where what it would share with the one that serves is not there.
        """
        self.selftest: SelfTestReport | None = None
        """Report of the self-test on all ranks, of what was proven at the start; None if it did not run."""
        self.captures: Captures | None = None
        """Where there are graphs that are still to be captured."""
        standing_by = role == "standby"
        if standing_by and keeper is None:  # before anything is loaded, which would be there twice
            raise RuntimeError("an engine that stands by shares what a weight keeper has, and there is none")
        if config.cache_shards == "auto":
            config = config.shared_out(group.mesh.shards.count)
        config_of_model = load_config(config.folder)
        compressed = config_of_model.compression is not None
        refuse_rings(config, rings=compressed)
        times = StartTimes() if times is None else times
        weights = times.beside("identity of the weights", partial(identities, config))
        check_standby(config, role, device)
        dtype = pick_dtype(config, device)
        context = max_context(config)
        draft = read_draft_model(config, config_of_model, group.mesh)  # is refused before anything is loaded
        kept = None if keeper is None else KeptWeights(keeper, group, device, progress, required=standing_by)
        vocab, eos_ids = config_of_model.vocab_size, config_of_model.eos_ids
        self.grammars: Compiler | None = None
        """Compiler of grammars, on rank 0."""
        if group.mesh.heads.first:
            self.grammars = Compiler(config.folder, vocab, eos_ids, on_grammar, on_grammar_progress)
            if device.type == "cuda":
                self.grammars.prepare()  # beside the weights; on a CPU a start would take longer for it
        model = load_model(
            config.folder,
            group=group,
            dtype=dtype,
            device=device,
            max_positions=max_entries_per_row(context, config.most_width),
            draft_layer=config.wants_draft_layer,
            invariant=config.invariant,
            quantize_activations=config.activations == "auto",
            fp8_cache=fp8_cache(config, dtype, device),
            progress=progress,
            kept=kept,
        )
        if draft is not None:
            fp8 = fp8_cache(config, dtype, device)
            model.drafter = load_draft_model(draft, model, fp8_cache=fp8, progress=progress, kept=kept)
        times.end("weights")
        shards = group.mesh.shards
        self._held = None if kept is None or role == "alone" else HeldCache(kept, config, model.caches, shards)
        if self._held is not None and not standing_by:
            self._held.let_go()  # that of an engine before this one, which has ended
        if self._held is not None and kept is not None and not kept.shareable:
            self._held = None  # nothing can stand by without these weights, which was told
        serving = None
        if standing_by:  # before anything is done that takes long
            assert self._held is not None
            serving = self._held.serving()
        width = choose_drafter(model, config)
        page_bytes = bytes_of_page(model.caches, group.mesh.shards)
        rings = model.rings(width)
        snapshots = config.prefix_snapshots if rings and config.prefix_cache else 0
        ring_bytes = (config.max_rows + 1) * sum(ring.slot_bytes for ring in rings)
        ring_bytes += snapshots * snapshot_bytes(rings)
        wants_graphs = config.graphs and captures_steps(device)
        sampling = _sampling(config, model, width, group, device)
        masks = constrained = None
        if self.grammars is not None:
            masks = StepMasks(config.max_rows * width, vocab, device)
            constrained = ConstrainedRows(vocab, eos_ids, self.grammars.ready)

        def runner(pages: int, context: int, place: CachePlace | None = None) -> Runner:
            of_slots = rings, config.max_rows, snapshots
            cache = PagedCache.allocate(model.caches, pages, device, shards, *of_slots, place)
            # At the end of the context a step still looks up where the entry behind its own would lie.
            pages_per_row = max(max_pages_per_row(context, width), pages_for(context))
            sizes = config.max_rows, width, pages_per_row, config.token_budget
            adaptive = config.width == "auto"
            return Runner(
                model, cache, *sizes, group, sampling, adaptive=adaptive, masks=masks, constrained=constrained
            )

        record_bytes = record_layout(model.caches)[-1]
        memory, staging, batch = None, None, 1
        if config.host_cache_bytes:
            memory = HostMemory.shared(config.host_cache_bytes, record_bytes, group, device)
            batch = batch_of(record_bytes, config.token_budget, shards.count * memory.savers)
            staging = Staging.allocate(record_bytes, device, batch) if device.type == "cuda" else None
        warm_up = None if kept is None or not wants_graphs or memory is not None else InheritedWarmUp(kept, config)
        # Whoever is waited for does not run what is known beforehand: each graph is warmed up before it is captured.
        known = None if warm_up is None or not isinstance(waiting, int) else warm_up.recall()
        rows = waiting if isinstance(waiting, int) else None
        loaded: frozenset[str] = frozenset()
        graph_bytes, beside = 0, ring_bytes + (torch.cuda.memory_allocated(device) if device.type == "cuda" else 0)
        if wants_graphs:
            # How much the graphs take is measured on a pool of two pages; the cache gets what they leave.
            trial = runner(2, context)
            beside = torch.cuda.memory_allocated(device)
            times.end("buffers")
            loaded = _compile(trial, group, progress, proof=config.selftest, first=None if known is None else rows)
            times.end("kernels")
            graph_bytes = (trial.warm_up() if known is None else known.warmed).bytes
            if memory is None and config.selftest:
                graph_bytes += bytes_of_copies(trial)  # of this engine, or of one that takes its place
            del trial
            torch.cuda.empty_cache()
            times.end("warm-up")
        taken = graph_bytes + ring_bytes
        few = fewest_pages(config, shards, pages_to_select(model.config, width))
        if self._held is not None and not standing_by and device.type == "cuda":
            price = standby_bytes(beside + graph_bytes, few * page_bytes, len(model.caches))
            if progress and group.mesh.world.first:
                progress(words_of_standby(config, device, price, page_bytes, taken))
            taken += price
        if serving is not None:
            own, context = serving.pages, serving.context
        else:
            own = own_pages(config, group, device, page_bytes, context, width, taken)
            if known is not None:
                own = min(own, known.pages)  # kernels that are loaded later take memory, too
        pages = shards.pages(own)
        # A request as long as the context must fit, overshoot included.
        context = longest_request(pages, context, width, group.mesh.shards.count, in_pieces=config.invariant)
        if context < 2:
            raise RuntimeError(f"{pages} pages of latent cache are too few for any request; give more cache_pages")
        few = min(few, own)
        place = None
        if self._held is not None:
            shared = CacheSize(own, context)
            place = self._held.reserve(own, few) if standing_by else self._held.hand_over(shared)
        self.runner = runner(own, context, place)
        self.mover: PageMover | None = None
        """Where there is host memory behind the cache."""
        times.end("buffers")
        notes: list[Notes] = []
        # The note is of the engine that serves: one that stands by passes beside it whatever that one comes to.
        if wants_graphs and memory is None and config.selftest and not standing_by:
            identity = cache_root(config, model, dtype, device, weights.result())
            before = ProvenBefore(config, group, device, identity, context, progress)
            if before.take() and waiting == "auto":
                rows = 0
            notes.append(before)
        if wants_graphs:
            # Threads that copy pages to host memory would spoil a capture: there all come before.
            warmed = known.warmed if known is not None and known.context == context else None
            graphs = self.runner.capture(progress, waiting=rows if memory is None else None, warmed=warmed)
            times.end("graphs")
            if warm_up is not None and known is None:
                warm_up.note(Measured(graphs.warmed, own, context, tuple(sorted(loaded))))
        proof = None if kept is None or not config.selftest else InheritedProof(kept, config, context)
        granted = range(1, shards.pages(few)) if standing_by else None
        self._prove(config, group, progress, on_selftest, proof, notes, granted)
        if config.selftest:
            times.end("self-test")
        if memory is not None:  # now, as its threads would spoil a capture
            heard = on_moved, staging, on_tier_news
            self.mover = PageMover(self.runner.parts.cache, memory, group.mesh.world.rank, *heard)
        eos_ids, vocab, drafter = model.config.eos_ids, model.config.vocab_size, model.drafter
        kind = (bool(drafter.cache), drafter.reads_tokens) if drafter else (False, False)
        self.ready = Ready(
            group.mesh.world.rank, pages, context, vocab, width, eos_ids, step_times(self.selftest), *kind
        )
        root = cache_root(config, model, dtype, device, weights.result())
        self.ready = replace(self.ready, root=root, cache_shards=group.mesh.shards.count)
        if rings:
            shares = {"shares_prefixes": snapshots > 0, "snapshots": snapshots}
            self.ready = replace(self.ready, **shares, snapshot_tokens=model.snapshot_tokens)
        if self.captures is not None:
            self.ready = replace(self.ready, portions=self.captures.pages)
        times.end("identity")
        self.disk: DiskMover | None = None
        """Where there is a disk behind host memory."""
        if memory is not None:
            saving = {"save_batch": batch, "savers": memory.savers, "record_bytes": record_bytes}
            self.ready = replace(self.ready, host_pages=memory.slots, pins_pages=staging is not None, **saving)
        if memory is not None and config.disk_cache_dir is not None:
            base, size = Path(config.disk_cache_dir), config.disk_cache_bytes
            try:
                files = DiskFiles.open(base, size, record_bytes, root, group, device)
            except DiskFailedError as error:
                if group.mesh.world.first:
                    logger.warning("the disk of cached pages has failed, and is not used: %s", error)
            else:
                self.disk = DiskMover(files, memory, group.mesh.world.rank, on_moved)
                self.ready = replace(self.ready, disk_pages=files.slots, disk_serial=files.serial)
            times.end("disk")
        self.ready = replace(self.ready, start_s=times.parts)
        self._promoted = self.ready
        """What it is ready to do once it has taken the place of the rank that serves."""
        if standing_by:
            backed = shards.pages(few)
            longest = longest_request(backed, context, width, shards.count, in_pieces=config.invariant)
            self.ready = replace(self.ready, pages=backed, max_context=longest)
        self.model: Model = model
        if progress:
            progress(f"started in {times}")
            form = "FP8" if config.kv_cache_dtype == "fp8" else str(dtype).removeprefix("torch.")
            held = in_words(form, pages, rows_at(pages, config.max_rows, context, width), context)
            size = own * page_bytes
            told = f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
            progress(f"{'addresses of a ' if standing_by else ''}latent cache, {told} {held}")
            if memory is not None:
                tokens = memory.slots * PAGE_TOKENS
                progress(f"host memory behind it: {memory.slots:,} pages, {tokens:,} tokens")
            if self.disk is not None:
                progress(self.disk.files.summary())

    def take_over(self) -> Ready:
        """Take the place of the rank that served, which has ended: its cache, empty, and no row of any kind. Return
        what this rank is ready to do from now on. All ranks together."""
        assert self._held is not None
        self._held.take_over()
        self.runner.begin_anew()
        return self._promoted

    def _prove(
        self,
        config: EngineConfig,
        group: Group,
        progress: Callable[[str], None] | None,
        on_selftest: Callable[[SelfTestReport], None] | None,
        proof: InheritedProof | None,
        notes: Sequence[Notes],
        granted: Sequence[int] | None,
    ) -> None:
        """Rank 0 speaks for all: the other ranks found the same, and would only say it before it has."""
        speaks = progress if group.mesh.world.first else None
        inherited = None if proof is None else proof.recall()
        notes = notes if proof is None else [proof, *notes]
        parts, graphs, masks = self.runner.parts, self.runner.graphs, self.runner.masks
        if graphs is not None:
            of_graphs = GraphProof(parts, graphs, speaks, masks, inherited) if config.selftest else None
            if of_graphs is not None:
                of_graphs.prove(graphs.there, granted)
            captures = Captures(self.runner, group, of_graphs, notes, progress, on_selftest)
            self.selftest = captures.report()
            self.captures = captures if graphs.left else None
        elif config.selftest:
            every_bucket = config.selftest_buckets == "all"
            report = prove(parts, None, every_bucket, speaks, masks, inherited, granted)
            self.selftest = tell(report, group, notes, progress, on_selftest)


def _sampling(
    config: EngineConfig, model: Model, width: int, group: Group, device: torch.device
) -> SamplingState | None:
    """Make the sampling state of rank 0, with all of its memory: the cache gets what is left, and no request, whatever
    it asks for, needs more later. None on other ranks."""
    if not group.mesh.heads.first:
        return None
    sampling = SamplingState(config.max_rows, model.config.vocab_size, device)
    sampling.allocate(config.max_rows * width)
    return sampling


def _compile(
    runner: Runner, group: Group, progress: Callable[[str], None] | None, *, proof: bool, first: int | None
) -> frozenset[str]:
    """Compile kernels with all cores that this process may use and, most likely, shares with the other ranks. Return
    their folders of Triton's cache. `first`: rows that wait for an engine all of whose kernels are compiled; then those
    that it needs at once are loaded."""
    begin = time.perf_counter()
    threads = max(1, len(os.sched_getaffinity(0)) // group.mesh.world.size)
    compiled = runner.compile(threads, proof=proof) if first is None else runner.compile_first(threads, first)
    if progress:
        progress(f"{compiled.kernels} kernels compiled or loaded in {time.perf_counter() - begin:.1f} s")
    return frozenset(compiled.folders)
