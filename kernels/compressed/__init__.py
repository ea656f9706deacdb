"""What attention of DeepSeek V4 (2026, section 2.3) needs beside products and selection: entries of tokens and entries
that stand for several tokens, where they are kept, queries, and attention to both kinds of entries.

A call takes the tokens of decode rows, of which each row has as many, or those of chunks of prompts (`TokenRows`). All
that a step changes is read from tensors on the device, grids follow from the shapes of tensors alone, and nothing
allocates device memory or waits: calls may be captured in a graph and replayed for other rows. Before the first layer
`begin` looks up what tokens and positions say, and `lay_out_rows` says where the tokens of decode rows belong. In the
order in which a layer makes them:

1. `rope_store`: queries, and the entry of each token; of decode rows into the ring of the row's slot.
2. `compress`, for the compressor and for that of the indexer: entries that end at the step's tokens, and what entries
   to come are made of. An indexer's queries are turned by `rope_queries`; then `kernels.sparse.index_scores` and
   `kernels.sparse.select_positions` select numbers of entries.
3. `attend`: the output of all heads, turned back at the query's position.
4. `keep_entries`, of chunks alone: the newest tokens' entries into the ring, from which step 3 has read older ones.

The ring of a slot keeps what belongs to the token at position p at p modulo its length (`L` below), in place slot + 1
of its tensor; place 0 is nobody's. Where the ring holds what the first token of a decode row needs and the row's tokens
beside it, drafts that are rejected have overwritten nothing that is needed: `compress` and `rope_store` refuse a
shorter one. Entry w of a row stands for the tokens from w * ratio to w * ratio + ratio - 1 and lies on the page of the
last of them, at [page_RP[row, last // 64], last % 64 // ratio].

Rows, slots, positions and pages that lie outside what they point into are never followed, count as absent, and each
adds 1 to `fault_1`. A token of nobody (row -1, or a row whose slot is -1) is written nowhere and gets output 0. Numbers
that are not finite stay in the row that has them.

Shape legend: T tokens, R rows, P pages (of a cache, or of a row's table), K entries per page, X slots and one, L tokens
of a ring, D features of an entry, C features that a compressor makes of a token (D, or 2 D where it overlaps), F = 2 C,
A tokens of an entry, O rope features, Y positions, H heads, S selected entries, G parts.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from kernels.compressed import attention_launch, launch, reference
from kernels.compressed.attention_launch import AttendWorkspace
from kernels.compressed.rows import TokenRows, contiguous, room, rotations, rows_of_features, told
from kernels.page import PAGE_TOKENS
from kernels.residual_streams import StreamMemory

__all__ = [
    "AttendWorkspace",
    "TokenRows",
    "attend",
    "begin",
    "compress",
    "keep_entries",
    "lay_out_rows",
    "rope_queries",
    "rope_store",
]

_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)


def begin(
    token_T: Tensor,
    position_T: Tensor,
    embedding_YE: Tensor,
    rotations_YO: tuple[Tensor, Tensor],
    token_out_T: Tensor,
    rotations_TO: tuple[Tensor, Tensor],
    out_TE: Tensor,
    residual_TSE: Tensor,
    memory: StreamMemory,
    *,
    dependent: bool = False,
) -> None:
    """Look up the embeddings of tokens and the rotations of their positions, and make streams of zeros, to which
    `kernels.residual_streams.add_to_streams` then adds the embedding, in every one, whatever mixes them.

    - `token_T`, `position_T`: int64. `embedding_YE`: rows may be strided; Y here counts ids, or positions.
    - `rotations_YO`, `rotations_TO`: fp32, contiguous: two kinds of rotations by position, and those of the tokens.
    - `token_out_T`: receives the tokens. `out_TE`: receives their embeddings; rows may be strided.
    - `residual_TSE`: contiguous. `memory`: its gates of what is added become 1, its mixing matrix 0.
    - `dependent`: programmatic dependent launch (compute capability 9.0 and above).

    One launch. ValueError for tensors that do not fit.
    """
    (tokens, streams, features), (turn_YO, compressed_YO) = residual_TSE.shape, rotations_YO
    contiguous("token_T", token_T, (tokens,), torch.int64)
    contiguous("position_T", position_T, (tokens,), torch.int64)
    contiguous("token_out_T", token_out_T, (tokens,), torch.int64)
    contiguous("residual_TSE", residual_TSE, (tokens, streams, features), residual_TSE.dtype)
    rows_of_features("embedding_YE", embedding_YE, (len(embedding_YE), features))
    rows_of_features("out_TE", out_TE, (tokens, features))
    if memory.mix_TSS is None:
        raise ValueError("streams of such a model are mixed")
    contiguous("open_TS", memory.open_TS, (tokens, streams), torch.float32)
    contiguous("mix_TSS", memory.mix_TSS, (tokens, streams, streams), torch.float32)
    for table_YO, own_TO in ((turn_YO, rotations_TO[0]), (compressed_YO, rotations_TO[1])):
        contiguous("rotations_YO", table_YO, (len(table_YO), turn_YO.shape[1]), torch.float32)
        contiguous("rotations_TO", own_TO, (tokens, turn_YO.shape[1]), torch.float32)
    tensors = (token_T, position_T, embedding_YE, rotations_YO, token_out_T, rotations_TO, out_TE, residual_TSE)
    if token_T.is_cuda:
        launch.begin(*tensors, memory, dependent=dependent)
    else:
        reference.begin(*tensors, memory)


def lay_out_rows(
    position_T: Tensor,
    length_R: Tensor,
    wanted_R: Tensor | None,
    row_T: Tensor,
    bound_T: Tensor,
    ratio: int,
    *,
    dependent: bool = False,
) -> None:
    """Say of the tokens of decode rows, of which each row has as many, whose they are, and how many entries they see.

    - `position_T`: int64, arbitrary where a row is padding. `length_R`: int32, 0 of padding.
    - `wanted_R`: int64: of each row's tokens the first so many are its own, the others nobody's; None: all are.
    - `row_T`: int32, receives the row of each token, -1 of those of nobody.
    - `bound_T`: int32, receives the compressed entries, of `ratio` tokens each, that a token may see; 0 of tokens of
      nobody and of padding.
    - `dependent`: as of `begin`.

    One launch. ValueError for tensors that do not fit.
    """
    tokens, rows = len(position_T), len(length_R)
    contiguous("position_T", position_T, (tokens,), torch.int64)
    contiguous("length_R", length_R, (rows,), torch.int32)
    contiguous("row_T", row_T, (tokens,), torch.int32)
    contiguous("bound_T", bound_T, (tokens,), torch.int32)
    if wanted_R is not None:
        contiguous("wanted_R", wanted_R, (rows,), torch.int64)
    if ratio < 1 or (tokens % rows if rows else tokens):
        raise ValueError(f"{rows} rows with entries of {ratio} tokens do not have {tokens} tokens, equally many each")
    tensors = (position_T, length_R, wanted_R, row_T, bound_T, ratio)
    if position_T.is_cuda:
        launch.lay_out_rows(*tensors, dependent=dependent)
    else:
        reference.lay_out_rows(*tensors)


def rope_store(
    q_THD: Tensor,
    kv_TD: Tensor,
    norm_D: Tensor,
    rotation_TO: Tensor,
    entry_TD: Tensor,
    ring_XLD: Tensor,
    rows: TokenRows,
    *,
    window: int,
    eps: float,
    dependent: bool = False,
) -> None:
    """q = rope(q / rms(q)) for each head, in place; entry = rope(rms_norm(kv)), of decode rows into the ring, too.

    - `q_THD`: bf16, fp16 or fp32; a token's heads are contiguous, tokens may be strided. There may be none
      (H = 0), where entries alone are wanted.
    - `kv_TD`: any such dtype, rows may be strided. `norm_D`: weight of the norm, any floating dtype.
    - `rotation_TO`: fp32, (cos, sin) of the i-th angle of each token at (2i, 2i + 1). Rope turns the last O features,
      in pairs (2i, 2i + 1).
    - `entry_TD`: receives the entries, contiguous, in the ring's dtype.
    - `ring_XLD`: contiguous. With `rows.width` the entries are written to it, and `window` + width - 1 tokens at least
      must have room; without it nothing is (see `keep_entries`).
    - `window`: newest tokens that a token attends to, itself included.
    - `dependent`: as of `begin`.

    All is computed in fp32 and rounded once. ValueError for tensors that do not fit.
    """
    rows.check(len(q_THD))
    tokens, _, features = q_THD.shape
    length = ring_XLD.shape[1]
    _heads(q_THD, rotation_TO)
    rows_of_features("kv_TD", kv_TD, (tokens, features), _DTYPES)
    rows_of_features("norm_D", norm_D, (features,))
    contiguous("entry_TD", entry_TD, (tokens, features), ring_XLD.dtype)
    contiguous("ring_XLD", ring_XLD, (len(ring_XLD), length, features), ring_XLD.dtype)
    room("ring_XLD", length, window, rows.width)
    tensors = (q_THD, kv_TD, norm_D, rotation_TO, entry_TD, ring_XLD, rows, eps)
    if q_THD.is_cuda:
        launch.rope_store(*tensors, dependent=dependent)
    else:
        reference.rope_store(*tensors)


def keep_entries(entry_TD: Tensor, ring_XLD: Tensor, rows: TokenRows) -> None:
    """Write the entries of chunks to the rings of their rows' slots: of each row the newest L tokens.

    `entry_TD`, `ring_XLD`: as `rope_store` leaves them."""
    rows.check(len(entry_TD))
    features = entry_TD.shape[1]
    contiguous("entry_TD", entry_TD, (len(entry_TD), features), ring_XLD.dtype)
    contiguous("ring_XLD", ring_XLD, (*ring_XLD.shape[:2], features), ring_XLD.dtype)
    (launch if entry_TD.is_cuda else reference).keep_entries(entry_TD, ring_XLD, rows)


def rope_queries(q_THD: Tensor, rotation_TO: Tensor, *, dependent: bool = False) -> None:
    """Turn the last O features of every head, in place, as an indexer's queries are turned. Arguments as of
    `rope_store`."""
    _heads(q_THD, rotation_TO)
    if q_THD.is_cuda:
        launch.rope_queries(q_THD, rotation_TO, dependent=dependent)
    else:
        reference.rope_queries(q_THD, rotation_TO)


def compress(
    made_TF: Tensor,
    bias_AC: Tensor,
    norm_D: Tensor,
    rotation_YO: Tensor,
    state_XLF: Tensor,
    entry_PKD: Tensor,
    rows: TokenRows,
    *,
    eps: float,
    dependent: bool = False,
) -> None:
    """Write the compressed entries whose last token is among the step's, and keep what later ones are made of.

    entry = rope(rms_norm(sum over its tokens of softmax(logit) * value)), a softmax for each feature. Where a
    compressor overlaps (C = 2 D) the A tokens before take part with their first D features, and the entry's own with
    their last D; of entry 0 there are none before. Rope is that of the entry's first token.

    - `made_TF`: what the compressor's product has made of each token: C values, then C logits without bias. fp32 or the
      model's dtype, rows may be strided.
    - `bias_AC`: fp32, added to the logits of tokens at positions p with p modulo A = its row.
    - `norm_D`: weight of the norm. `rotation_YO`: fp32, rotations by position, as of `rope_store`.
    - `state_XLF`: fp32, contiguous: the ring of values and logits, bias included. Of decode rows it has room for the
      tokens that an entry is made of (A, or 2 A) and width - 1 more.
    - `entry_PKD`: contiguous pages of max(1, 64 // A) entries each, in the dtype of the cache.
    - `dependent`: as of `begin`.

    One launch for decode rows, two for chunks. All is computed in fp32 and rounded once. ValueError for tensors that do
    not fit.
    """
    rows.check(len(made_TF))
    (ratio, made), features = bias_AC.shape, norm_D.shape[0]
    if made not in (features, 2 * features):
        raise ValueError(f"a compressor makes {features} features of a token, or twice as many, not {made}")
    if PAGE_TOKENS % ratio and ratio % PAGE_TOKENS:
        raise ValueError(f"entries of {ratio} tokens do not fit pages of {PAGE_TOKENS}")
    rows_of_features("made_TF", made_TF, (len(made_TF), 2 * made), _DTYPES)
    contiguous("bias_AC", bias_AC, (ratio, made), torch.float32)
    rows_of_features("norm_D", norm_D, (features,))
    rotations("rotation_YO", rotation_YO, None, features)
    contiguous("state_XLF", state_XLF, (*state_XLF.shape[:2], 2 * made), torch.float32)
    contiguous("entry_PKD", entry_PKD, (len(entry_PKD), max(1, PAGE_TOKENS // ratio), features), entry_PKD.dtype)
    room("state_XLF", state_XLF.shape[1], ratio * made // features, rows.width)
    tensors = (made_TF, bias_AC, norm_D, rotation_YO, state_XLF, entry_PKD, rows, eps)
    if made_TF.is_cuda:
        launch.compress(*tensors, dependent=dependent)
    else:
        reference.compress(*tensors)


def attend(
    q_THD: Tensor,
    ring_XLD: Tensor,
    entry_TD: Tensor | None,
    entry_PKD: Tensor | None,
    selected_TS: Tensor | None,
    sink_H: Tensor,
    rotation_TO: Tensor,
    out_THD: Tensor,
    rows: TokenRows,
    workspace: AttendWorkspace | None = None,
    *,
    window: int,
    ratio: int,
    scale: float,
    first: int = 0,
    block: int = 0,
    dependent: bool = False,
) -> None:
    """out = rope back (softmax(scale * q · entries, sink) · entries), over the window of each token and its compressed
    entries.

    - `q_THD`, `rotation_TO`: as `rope_store` leaves and takes them; `q_THD` contiguous.
    - `ring_XLD`: entries by position, in the dtype of the queries. Those of the step's own tokens are in it where
      `entry_TD` is None; else these are in `entry_TD`, and the ring has those before them alone.
    - `entry_PKD`: pages of compressed entries; None, and `ratio` 0, of layers without such.
    - `ratio`: tokens of a compressed entry. Token p may see the first (p + 1) // ratio entries of its row.
    - `selected_TS`: int32: numbers of the entries that a token attends to, in rising order and -1 behind them, as
      `kernels.sparse.select_positions` leaves them; None: all that it may see.
    - `sink_H`: fp32 logit of each head that takes part in the denominator alone.
    - `out_THD`: contiguous, receives the output, turned back at the query's position.
    - `first`: before this position there are no tokens. With `first` > 0 entries of the window that are not finite are
      missing: what a layer that drafts has not made (`workers.cache.rings`).
    - `block`: where it is not 0, each row has so many tokens, all of which see what the last of them does, so each of
      them all others. Their entries are in `entry_TD`, and there are none of several tokens.
    - `dependent`: as of `begin`. Hopper's own kernel, which takes many tokens, is launched plainly in any case.

    Computed in fp32 from what is stored, but for weights that are rounded to the queries' dtype before they are
    multiplied with entries. One launch, or two where several programs share a token. ValueError for tensors that do not
    fit, and on a GPU for a rope of more than 128 features, where D is a larger multiple of 128.
    """
    rows.check(len(q_THD))
    (tokens, heads, features), dtype = q_THD.shape, q_THD.dtype
    _heads(q_THD, rotation_TO)
    contiguous("q_THD", q_THD, q_THD.shape, dtype)
    contiguous("out_THD", out_THD, q_THD.shape, dtype)
    contiguous("ring_XLD", ring_XLD, (*ring_XLD.shape[:2], features), dtype)
    contiguous("sink_H", sink_H, (heads,), torch.float32)
    if (entry_PKD is None) != (ratio == 0) or (selected_TS is not None and entry_PKD is None):
        raise ValueError("a layer has pages of compressed entries and their ratio, or neither and no selection")
    if entry_TD is not None:
        contiguous("entry_TD", entry_TD, (tokens, features), dtype)
    if block and (entry_TD is None or entry_PKD is not None or tokens % block or window <= block):
        raise ValueError(f"{tokens} tokens in blocks of {block} have entries of their own, and a window before them")
    room("ring_XLD", ring_XLD.shape[1], window - block, rows.width or 1)
    if entry_PKD is not None:
        contiguous("entry_PKD", entry_PKD, (len(entry_PKD), max(1, PAGE_TOKENS // ratio), features), dtype)
    if selected_TS is not None:
        contiguous("selected_TS", selected_TS, (tokens, selected_TS.shape[1]), torch.int32)
    tensors = (q_THD, ring_XLD, entry_TD, entry_PKD, selected_TS, sink_H, rotation_TO, out_THD, rows)
    if not q_THD.is_cuda:
        reference.attend(*tensors, window, ratio, scale, first, block)
    elif workspace is None:
        raise ValueError("attention on a GPU needs a workspace: AttendWorkspace.allocate")
    else:
        sizes: dict[str, Any] = {"window": window, "ratio": ratio, "first": first, "block": block}
        attention_launch.attend(*tensors, workspace, scale=scale, **sizes, dependent=dependent)


def _heads(q_THD: Tensor, rotation_TO: Tensor) -> None:
    """ValueError where queries and rotations do not fit each other."""
    tokens, heads, features = q_THD.shape
    rows_of_features("q_THD", q_THD, (tokens, heads, features), _DTYPES)
    if q_THD.stride(1) != features and heads > 1:
        raise ValueError(f"the heads of a token lie side by side, not {told(q_THD)}")
    rotations("rotation_TO", rotation_TO, tokens, features)
