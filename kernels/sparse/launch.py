"""Launches what comes before sparse attention: index keys, scores and selection. Allocates nothing and waits for
nothing, so it may be captured into a CUDA graph. Grids follow from the shapes of tensors alone.

`dependent` launches with programmatic dependent launch (compute capability 9.0 and above). It is safe where rows, page
tables, and bounds of what is scored were written before a plain launch; all else is read past L1.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
from torch import Tensor

from kernels.index_entry import features_of, is_int8, parts
from kernels.page import PAGE_TOKENS
from kernels.runtime.hopper import is_hopper, multiprocessors
from kernels.sparse import scores, select
from kernels.sparse.scores import Indexer, TokenTile
from kernels.sparse.scores_hopper import FEATURES, Groups
from kernels.sparse.select import Cut
from kernels.sparse.workspace import SelectWorkspace

_KEYS = 8
"""Keys a program writes."""
_COLUMNS = 256
"""(Token, head) pairs that a program scores at most, beside 64 keys."""
_FEW_COLUMNS = 128
"""The same where a row has tokens enough for `_MANY_TILES` tiles: less is left over, and more programs are resident."""
_MANY_TILES = 16
_WAVES = (5, 8)
"""Programs for every multiprocessor, where there are pages enough: of one token per row with INT8 entries, as many as
are resident and never more, because those that start late end late; and else."""
_PAGES = 4
"""Pages that a program scores at least, if the context is as long as it may be."""
_HEADS_OF_HOPPER = (16, 32, 64, 128)
"""Numbers of an indexer's heads that Hopper's own kernel takes."""
_GROUPS = (2, 3)
"""Groups of warps of Hopper's kernel: with half of `_FEW_COLUMNS` or fewer, where memory is what it waits for, and with
more, where it is the weighing."""
PAIRS: Final = True
"""Whether two groups that share pages begin the products of two pages at once (`Groups.pairs`), in place of three
groups that take one page at a time, where these fill their registers with products. Not timed yet."""
_STAGES = {2: 8, 3: 9}
"""Pages in its ring, for so many groups."""
_MOST_WAVES, _NEARLY = 4, 0.97
"""See `hopper_shares`."""
_LISTED = 1024
"""Positions that a program lists at a time."""
_MAXIMA = 512
"""Programs that look for maxima, where each has neither fewer nor more groups than the next line says."""
_COLUMNS_OF_MAXIMA = (128, 1024)
_CANDIDATE_WARPS = (16, 8)
"""Warps of programs that look for candidates: for few tokens, and for `_MANY_TOKENS` or more, where several programs
share a multiprocessor."""
_MANY_TOKENS = 8
_LIST_WARPS = (4, 8)
"""Warps of programs that list positions, likewise."""


def write_index_keys(key_TD: Tensor, slot_T: Tensor, index_PKE: Tensor, *, dependent: bool = False) -> None:
    tokens = key_TD.shape[0]
    if not tokens:
        return
    index, scale = _index(index_PKE)
    scores.write_keys[(triton.cdiv(tokens, _KEYS),)](
        key_TD,
        slot_T,
        index,
        scale,
        tokens,
        index_PKE.shape[0] * PAGE_TOKENS,
        KEY_STRIDE=key_TD.stride(0),
        INDEXER=_indexer(1, index_PKE),
        TOKENS=_KEYS,
        DEPENDENT=dependent,
        num_warps=2,
        **pdl(dependent),
    )


def index_scores(
    q_THD: Tensor,
    weight_TH: Tensor,
    index_PKE: Tensor,
    page_RP: Tensor,
    row_T: Tensor,
    bound_T: Tensor,
    score_TN: Tensor,
    fault_1: Tensor,
    *,
    width: int = 0,
    invariant: bool = False,
    dependent: bool = False,
    hopper: bool | None = None,
) -> None:
    """Launch `index_scores`. `hopper`: whether Hopper's own kernel may be taken; None asks the device."""
    tokens, heads, _ = q_THD.shape
    if not tokens:
        return
    if hopper is None:
        hopper = is_hopper(q_THD.device)
    if hopper and fits_hopper(q_THD, index_PKE):
        tensors = (q_THD, weight_TH, index_PKE, page_RP, row_T, bound_T, score_TN, fault_1)
        _scores_on_hopper(*tensors, width, invariant, dependent)
        return
    indexer = _indexer(heads, index_PKE)
    width = min(width or tokens, tokens)
    many = width * indexer.head_lanes >= _MANY_TILES * _COLUMNS
    most = _FEW_COLUMNS if many else _COLUMNS
    if index_PKE.itemsize == 4:
        most = min(most, _COLUMNS // 4)
    tile = _tile(width, 1 if invariant else max(1, most // indexer.head_lanes))
    per_row = triton.cdiv(width, tile.tokens)
    tiles = triton.cdiv(tokens, width) * per_row
    pages = score_TN.shape[1] // PAGE_TOKENS
    programs = multiprocessors(q_THD.device)
    if indexer.int8 and width == 1:
        wanted = max(1, _WAVES[0] * programs // tiles)
    else:
        wanted = triton.cdiv(_WAVES[1] * programs, tiles)
    index, scale = _index(index_PKE)
    columns = tile.lanes * indexer.head_lanes
    scores.score_pages[(max(1, min(wanted, triton.cdiv(pages, _PAGES))), tiles)](
        q_THD,
        weight_TH,
        index,
        scale,
        page_RP,
        row_T,
        bound_T,
        score_TN,
        fault_1,
        tokens,
        width,
        per_row,
        page_RP.shape[0],
        index_PKE.shape[0],
        score_TN.shape[1],
        page_RP.stride(0),
        score_TN.stride(0),
        weight_TH.stride(0),
        INDEXER=indexer,
        TILE=tile,
        DEPENDENT=dependent,
        num_warps=4 if columns <= 128 and index_PKE.itemsize < 4 else 8,
        num_stages=4 if indexer.int8 else 3 if index_PKE.itemsize == 2 else 2,
        **pdl(dependent),
    )


def fits_hopper(q_THD: Tensor, index_PKE: Tensor) -> bool:
    """Whether Hopper's own kernel has these sizes: keys of 128 features in INT8, and heads that make up its columns."""
    heads, features = q_THD.shape[1:]
    whole = heads in _HEADS_OF_HOPPER and features == FEATURES
    return whole and is_int8(index_PKE) and index_PKE.is_contiguous() and q_THD.is_contiguous()


def _scores_on_hopper(
    q_THD: Tensor,
    weight_TH: Tensor,
    index_PKE: Tensor,
    page_RP: Tensor,
    row_T: Tensor,
    bound_T: Tensor,
    score_TN: Tensor,
    fault_1: Tensor,
    width: int,
    invariant: bool,
    dependent: bool,
) -> None:
    from kernels.sparse.scores_hopper import boxes, score_pages_hopper

    (tokens, heads, _), programs = q_THD.shape, multiprocessors(q_THD.device)
    width = min(width or tokens, tokens)
    groups = hopper_groups(width, heads, invariant=invariant)
    per_row = triton.cdiv(width, groups.of_program)
    tiles = triton.cdiv(tokens, width) * per_row
    pages = score_TN.shape[1] // PAGE_TOKENS
    score_pages_hopper[(hopper_shares(tiles, pages, groups, programs), tiles)](
        *boxes(q_THD, index_PKE, groups.tokens * heads),
        weight_TH,
        page_RP,
        row_T,
        bound_T,
        score_TN,
        fault_1,
        tokens,
        width,
        per_row,
        page_RP.shape[0],
        index_PKE.shape[0],
        score_TN.shape[1],
        page_RP.stride(0),
        score_TN.stride(0),
        GROUPS=groups,
        DEPENDENT=dependent,
        num_warps=4,
        **pdl(dependent),
    )


def hopper_groups(width: int, heads: int, *, invariant: bool) -> Groups:
    """Return how Hopper's kernel divides the tokens of a row. In invariant mode a token's heads are added up in one
    way."""
    tokens = 1 if invariant else max(1, min(_FEW_COLUMNS // heads, triton.next_power_of_2(width)))
    groups = _GROUPS[0] if tokens * heads <= _FEW_COLUMNS // 2 else _GROUPS[1]
    shared = width > groups * tokens and not invariant
    if PAIRS and shared and tokens * heads == _FEW_COLUMNS:
        return Groups(heads=heads, tokens=tokens, groups=2, shared=True, stages=_STAGES[2], pairs=True)
    # A slot of the ring is one group's.
    assert _STAGES[groups] % groups == 0
    return Groups(heads=heads, tokens=tokens, groups=groups, shared=shared, stages=_STAGES[groups])


def hopper_shares(tiles: int, pages: int, groups: Groups, programs: int) -> int:
    """Into how many shares a row's pages are cut: so many that the multiprocessors, of `programs`, are about equally
    busy, and none has fewer pages than it takes at a time."""
    most = max(1, triton.cdiv(pages, groups.groups))

    def busy(shares: int) -> float:
        return tiles * shares / (-(-tiles * shares // programs) * programs)

    # Rows that share nothing wait for memory, which is busiest if all programs begin at once.
    waves = _MOST_WAVES if groups.shared else 1
    candidates = range(1, min(most, max(1, waves * programs // tiles)) + 1)
    # The fewest of those that are nearly as good as the best: each has queries to fetch, and a ring to fill.
    best = max(map(busy, candidates))
    return next(shares for shares in candidates if busy(shares) >= _NEARLY * best)


def select_positions(
    score_TN: Tensor,
    bound_T: Tensor,
    selected_TS: Tensor,
    fault_1: Tensor,
    workspace: SelectWorkspace,
    *,
    dependent: bool = False,
) -> None:
    tokens, selected = selected_TS.shape
    if not tokens:
        return
    if len(workspace.candidate) != tokens or workspace.most < selected:
        what = f"{len(workspace.candidate)} tokens and up to {workspace.most} positions"
        raise ValueError(f"a workspace of {what} serves no call of {tokens} tokens and {selected} positions")
    numbers = (score_TN.shape[1], score_TN.stride(0) // 16)
    if workspace.whole is not None:
        from kernels.sparse.select_whole import select_whole

        select_whole[(tokens,)](
            score_TN,
            bound_T,
            workspace.candidate.view(torch.float32),
            selected_TS,
            fault_1,
            *numbers,
            SELECTED=selected,
            SHAPE=workspace.whole,
            num_warps=workspace.whole.warps,
            DEPENDENT=dependent,
            **pdl(dependent),
        )
        return
    groups = workspace.best.shape[1]
    cut = Cut(
        selected=selected,
        columns=groups,
        slack=selected // 8,
        lanes=workspace.candidate.shape[1],
        block=workspace.block,
    )
    options: dict[str, Any] = {"CUT": cut, "DEPENDENT": dependent, **pdl(dependent)}
    columns = min(max(groups * tokens // _MAXIMA, _COLUMNS_OF_MAXIMA[0]), _COLUMNS_OF_MAXIMA[1])
    columns = triton.next_power_of_2(columns)
    select.find_maxima[(groups // columns, tokens)](
        score_TN,
        bound_T,
        workspace.best,
        workspace.taken,
        *numbers,
        ROWS=min(8, _COLUMNS_OF_MAXIMA[1] * 4 // columns),
        COLUMNS=columns,
        num_warps=4,
        **options,
    )
    memory = (workspace.taken, workspace.least, workspace.begins, workspace.candidate, workspace.position)
    select.keep_candidates[(workspace.parts, tokens)](
        score_TN,
        bound_T,
        workspace.best,
        *memory,
        *numbers,
        workspace.begins.shape[1],
        num_warps=_CANDIDATE_WARPS[0 if tokens < _MANY_TOKENS else 1],
        **options,
    )
    select.list_positions[(workspace.parts, tokens)](
        score_TN,
        bound_T,
        *memory,
        selected_TS,
        fault_1,
        *numbers,
        workspace.begins.shape[1],
        LANES=_LISTED,
        num_warps=_LIST_WARPS[0 if tokens < _MANY_TOKENS else 1],
        **options,
    )


def _indexer(heads: int, index_PKE: Tensor) -> Indexer:
    features, int8 = features_of(index_PKE), is_int8(index_PKE)
    return Indexer(
        heads=heads,
        head_lanes=max(16, triton.next_power_of_2(heads)),
        features=features,
        feature_lanes=max(32 if int8 else 16, triton.next_power_of_2(features)),
        int8=int8,
        page=index_PKE.stride(0),
        scale_page=index_PKE.stride(0) // 4,
        precision="tf32x3" if index_PKE.dtype == torch.float32 else "tf32",
        keys=index_PKE.shape[1],
    )


def _index(index_PKE: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales; of plain entries the keys in the place of both."""
    return parts(index_PKE) if is_int8(index_PKE) else (index_PKE, index_PKE)


def _tile(width: int, most: int) -> TokenTile:
    """Return the tile that takes as many of `width` tokens as fit, with about equal tiles."""
    tokens = triton.cdiv(width, triton.cdiv(width, most))
    return TokenTile(tokens=tokens, lanes=triton.next_power_of_2(tokens))


def pdl(dependent: bool) -> dict[str, bool]:
    """The launch attribute exists on CUDA only, and the interpreter knows none."""
    return {"launch_pdl": True} if dependent else {}
