"""The exchanges in Triton. A thread has whole pieces of 16 bytes, from its own rank's part to the result.

A rank's inbox is [half, slot, lane, bytes of a lane]: a slot for each other shard. What comes from the shard that
follows this one is in slot 0, from the next in slot 1, and so on round. Behind the last piece there are pieces of
zeros, so that a program's threads all do the same; their results alone are not stored.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.one_shot.words import EMPTY_WORD, SEND, numbers, packed, read_words, sendable, store_words
from kernels.strands import pair_sum, pair_weights

_LN2 = tl.constexpr(0.6931471805599453)
# The library's logarithm branches, and threads would come to the barrier behind it apart. That of `kernels.strands`
# does not.
_LOG2 = tl.constexpr("lg2.approx.f32 $0, $1;")
# As `SEND`, of one word, where the second operand is not 0. The three behind it stay empty: of four that are sent at
# once, those might come after the first was taken.
_SEND_SOME = tl.constexpr(
    """
    {
    .reg .pred sent;
    setp.ne.s32 sent, $2, 0;
    @sent st.relaxed.sys.global.b32 [$1], $3;
    mov.b32 $0, 0;
    }
    """
)
# Waits for one word that has arrived, and leaves it there: all threads of an item read it, and Triton may have a thread
# do so twice.
_AWAIT = tl.constexpr(
    f"""
    {{
    .reg .pred missing;
    AGAIN:
    ld.relaxed.sys.global.b32 $0, [$1];
    setp.eq.s32 missing, $0, {EMPTY_WORD.value};
    @missing bra AGAIN;
    }}
    """
)


@triton.jit
def _peers(addresses, shard, SHARDS: tl.constexpr):
    """The inboxes of the other shards, from the one that follows on."""
    inboxes = ()
    for other in tl.static_range(1, SHARDS):
        inboxes = inboxes + (tl.load(addresses + (shard + other) % SHARDS),)  # noqa: RUF005 - Triton knows no stars
    return inboxes


@triton.jit
def _send(to, a, b, c, d):
    """Four words to another rank's memory."""
    tl.inline_asm_elementwise(SEND, "=r,l,r,r,r,r", [to, a, b, c, d], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["pieces", "steps", "shard"])
def gather_shards(
    part,
    inbox,
    addresses,
    turns,
    out,
    pieces,
    steps,
    shard,
    SHARDS: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    LANE_BYTES: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    TAKE: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out = every shard's part, with those of a row of ROW pieces side by side. Grid: lanes."""
    lane = tl.program_id(0)
    thread = tl.arange(0, BLOCK)
    peers = _peers(addresses, shard, SHARDS)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()  # after the wait: kernels after this may read before theirs what precedes this one
    turn = tl.load(turns + lane, cache_modifier=".cg")
    half = (turn & 1).to(tl.int64) * ((SHARDS - 1) * SLOT_BYTES) + lane * LANE_BYTES
    place = half + thread * 16
    for step in range(steps):
        piece = (step * tl.num_programs(0) + lane) * BLOCK + thread
        inside = piece < pieces
        a, b, c, d = read_words(part.to(tl.int64) + tl.minimum(piece, pieces - 1).to(tl.int64) * 16)
        own = (piece // ROW * SHARDS + shard) * ROW + piece % ROW
        store_words(out.to(tl.int64) + own.to(tl.int64) * 16, inside, a, b, c, d)
        a = sendable(a, inside)
        b = sendable(b, inside)
        c = sendable(c, inside)
        d = sendable(d, inside)
        for other in tl.static_range(1, SHARDS):
            _send(peers[other - 1] + (SHARDS - 1 - other) * SLOT_BYTES + place + step * (BLOCK * 16), a, b, c, d)
    for step in range(steps):
        piece = (step * tl.num_programs(0) + lane) * BLOCK + thread
        inside = piece < pieces
        arrived = inbox.to(tl.int64) + place + step * (BLOCK * 16)
        words = tl.inline_asm_elementwise(
            TAKE, CONSTRAINTS, [arrived, EMPTY_WORD], dtype=(tl.int32,) * (4 * (SHARDS - 1)), is_pure=False, pack=1
        )
        for slot in tl.static_range(SHARDS - 1):
            source = (shard + 1 + slot) % SHARDS
            at = (piece // ROW * SHARDS + source) * ROW + piece % ROW
            store_words(
                out.to(tl.int64) + at.to(tl.int64) * 16,
                inside,
                words[4 * slot],
                words[4 * slot + 1],
                words[4 * slot + 2],
                words[4 * slot + 3],
            )
    tl.debug_barrier()  # all threads have read whose turn it is
    tl.store(turns + lane, turn + 1)


@triton.jit
def _weighted(word, weight, FP32: tl.constexpr):
    """The numbers of a word times their weight. NaN stays, though its weight be 0: attention leaves a log-sum-exp of
    -inf where all entries that a shard has of a row lie beside a NaN."""
    low, high = numbers(word, FP32)
    return low * weight, high * weight


@triton.jit
def _merged(word, weight, words, WORD: tl.constexpr, weights, divisor, SHARDS: tl.constexpr, FP32: tl.constexpr):
    """One word of the result, of this shard's own and of what has arrived."""
    low, high = _weighted(word, weight, FP32)
    for slot in tl.static_range(SHARDS - 1):
        more, more_high = _weighted(words[4 * slot + WORD], weights[slot], FP32)
        low += more
        high += more_high
    return packed(low / divisor, high / divisor, FP32)


@triton.jit
def _tree_of(logs, SHARDS: tl.constexpr):
    """What `kernels.strands.pair_weights` says of every pair of the tree, and the log2-sum-exp2 of all."""
    pairs = ()
    for level in tl.static_range(3):
        for index in tl.static_range(SHARDS >> (level + 1)):
            first, weight, total, log = pair_weights(logs[index], logs[index + (SHARDS >> (level + 1))])
            pairs = pairs + ((first, weight, total),)  # noqa: RUF005 - Triton knows no stars
            logs = logs + (log,)  # noqa: RUF005
        logs = logs[SHARDS >> level :] if SHARDS >> level > 1 else logs
    return pairs, logs[0]


@triton.jit
def _tree_sum(word, words, WORD: tl.constexpr, pairs, SHARDS: tl.constexpr):
    """One word of the result, of this shard's own and of what has arrived, merged as the tree has it."""
    sums = (word.to(tl.float32, bitcast=True),)
    for slot in tl.static_range(SHARDS - 1):
        sums = sums + (words[4 * slot + WORD].to(tl.float32, bitcast=True),)  # noqa: RUF005
    for level in tl.static_range(3):
        for index in tl.static_range(SHARDS >> (level + 1)):
            first, weight, total = pairs[SHARDS - (SHARDS >> level) + index]
            found = pair_sum(sums[index], sums[index + (SHARDS >> (level + 1))], first, weight, total)
            sums = sums + (found,)  # noqa: RUF005
        sums = sums[SHARDS >> level :] if SHARDS >> level > 1 else sums
    return sums[0].to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["items", "steps", "heads", "shard"])
def merge_shards(
    part,
    lse,
    inbox,
    addresses,
    turns,
    out,
    out_lse,
    items,
    steps,
    heads,
    shard,
    SHARDS: tl.constexpr,
    PIECES: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    LANE_BYTES: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    TAKE: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    FP32: tl.constexpr,
    TREE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out, out_lse = attention of this shard's heads to the entries of all shards, and its log-sum-exp.

    An item is a token and one of the `heads` of a shard, PIECES pieces and a piece of its log-sum-exp; PIECES are
    padded to PLACES threads. `part` [tokens, SHARDS, heads, PIECES] and `lse` [tokens, SHARDS, heads]: of all heads, to
    this shard's entries. In a lane lie, step by step, the pieces of some items and then their log-sum-exps. Grid:
    lanes. TREE: parts are those of `kernels.strands`, and merged so."""
    ITEMS: tl.constexpr = BLOCK // PLACES
    lane = tl.program_id(0)
    thread = tl.arange(0, BLOCK)
    column = thread % PLACES
    peers = _peers(addresses, shard, SHARDS)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    turn = tl.load(turns + lane, cache_modifier=".cg")
    half = (turn & 1).to(tl.int64) * ((SHARDS - 1) * SLOT_BYTES) + lane * LANE_BYTES
    STEP_BYTES: tl.constexpr = (BLOCK + ITEMS) * 16
    place = half + thread * 16
    lse_place = half + BLOCK * 16 + thread // PLACES * 16
    first = (column == 0).to(tl.int32)
    for step in range(steps):
        item = (step * tl.num_programs(0) + lane) * ITEMS + thread // PLACES
        inside = (item < items) & (column < PIECES)
        kept = tl.minimum(item, items - 1)
        for other in tl.static_range(1, SHARDS):
            vector = (kept // heads * SHARDS + (shard + other) % SHARDS) * heads + kept % heads
            at = part.to(tl.int64) + (vector.to(tl.int64) * PIECES + tl.minimum(column, PIECES - 1)) * 16
            a, b, c, d = read_words(at)
            log = tl.load(lse + vector, cache_modifier=".cg").to(tl.int32, bitcast=True)
            slot = peers[other - 1] + (SHARDS - 1 - other) * SLOT_BYTES + step * STEP_BYTES
            _send(slot + place, sendable(a, inside), sendable(b, inside), sendable(c, inside), sendable(d, inside))
            tl.inline_asm_elementwise(
                _SEND_SOME,
                "=r,l,r,r",
                [slot + lse_place, first, sendable(log, item < items)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
    for step in range(steps):
        item = (step * tl.num_programs(0) + lane) * ITEMS + thread // PLACES
        inside = (item < items) & (column < PIECES)
        kept = tl.minimum(item, items - 1)
        # This shard's own, read while the others' arrive.
        vector = (kept // heads * SHARDS + shard) * heads + kept % heads
        at = part.to(tl.int64) + (vector.to(tl.int64) * PIECES + tl.minimum(column, PIECES - 1)) * 16
        a, b, c, d = read_words(at)
        own_log = tl.load(lse + vector, cache_modifier=".cg")
        arrived = inbox.to(tl.int64) + step * STEP_BYTES
        words = tl.inline_asm_elementwise(
            TAKE,
            CONSTRAINTS,
            [arrived + place, EMPTY_WORD],
            dtype=(tl.int32,) * (4 * (SHARDS - 1)),
            is_pure=False,
            pack=1,
        )
        top = own_log
        logs = ()
        for slot in tl.static_range(SHARDS - 1):
            at_log = arrived + lse_place + slot * SLOT_BYTES
            log = tl.inline_asm_elementwise(_AWAIT, "=&r,l", [at_log], dtype=tl.int32, is_pure=False, pack=1)
            log = log.to(tl.float32, bitcast=True)
            logs = logs + (log,)  # noqa: RUF005 - Triton knows no stars
            top = tl.maximum(top, log)
        if TREE:
            # From this shard on, round. Whoever begins, the same two are merged.
            pairs, tree_log = _tree_of((own_log,) + logs, SHARDS)  # noqa: RUF005
            tl.store(out_lse + kept, tree_log * _LN2, mask=(column == 0) & (item < items))
            a = _tree_sum(a, words, 0, pairs, SHARDS)
            b = _tree_sum(b, words, 1, pairs, SHARDS)
            c = _tree_sum(c, words, 2, pairs, SHARDS)
            d = _tree_sum(d, words, 3, pairs, SHARDS)
        else:
            # A finite shift: exp(-inf - 0) is the 0 that is wanted, and -inf - -inf is NaN.
            top = tl.where(top == float("-inf"), 0.0, top)
            weight = tl.exp(own_log - top)
            total = weight
            weights = ()
            for slot in tl.static_range(SHARDS - 1):
                more = tl.exp(logs[slot] - top)
                weights = weights + (more,)  # noqa: RUF005
                total += more
            log2_total = tl.inline_asm_elementwise(_LOG2, "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1)
            tl.store(out_lse + kept, top + log2_total * _LN2, mask=(column == 0) & (item < items))
            divisor = tl.where(total == 0, 1.0, total)
            a = _merged(a, weight, words, 0, weights, divisor, SHARDS, FP32)
            b = _merged(b, weight, words, 1, weights, divisor, SHARDS, FP32)
            c = _merged(c, weight, words, 2, weights, divisor, SHARDS, FP32)
            d = _merged(d, weight, words, 3, weights, divisor, SHARDS, FP32)
        store_words(out.to(tl.int64) + (kept.to(tl.int64) * PIECES + column) * 16, inside, a, b, c, d)
        tl.debug_barrier()  # all threads of an item have read its log-sum-exps
        for slot in tl.static_range(SHARDS - 1):
            at_log = arrived + lse_place + slot * SLOT_BYTES
            tl.inline_asm_elementwise(
                _SEND_SOME, "=r,l,r,r", [at_log, first, EMPTY_WORD], dtype=tl.int32, is_pure=False, pack=1
            )
    tl.debug_barrier()  # all threads have read whose turn it is
    tl.store(turns + lane, turn + 1)
