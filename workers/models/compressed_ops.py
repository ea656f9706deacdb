"""The operations of attention that DeepSeek V4 has and no other model: what stands between the products of a layer.

A pass (`workers.models.compressed_pass`) asks one object for them and does not know what computes them. On a CPU that
is `compressed_torch.TorchOps`, on a GPU `compressed_kernels.KernelOps`. Each operation takes the tokens of decode rows,
or those of chunks of prompts; all that it must know of them is in tensors (`kernels.compressed.TokenRows`), and shapes
follow from shapes, so that it can be captured.

Of a row, what belongs to the token at position p lies in a ring of its slot at p modulo the ring's length, in place
slot + 1 of the ring's tensor; place 0 is nobody's. Entry w of several tokens lies on the page of the last of them. A
token of nobody (row -1, or a row whose slot is -1) is written nowhere and gets output 0.

Shape legend: T tokens, R rows, P pages (of a cache, or of a row's table), K entries per page, X slots and one, L tokens
of a ring, D features of an entry, C features that a compressor makes of a token, F = 2 C, A tokens of an entry, O rope
features, Y positions, H heads, S selected entries, J heads and I features of an indexer, G groups of heads, U features
of a group's projected output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from kernels.compressed import TokenRows
from workers.memory.scratch import Scratch
from workers.weights.weight import Weight


class CompressedOps(ABC):
    """See the head of this file. A layer calls the methods in their order."""

    @abstractmethod
    def rope_queries(self, q_TJI: Tensor, rotation_TO: Tensor) -> None:
        """Turn the last O features of each query of an indexer, in place, by `rotation_TO` (fp32): (cos, sin) of the
        i-th angle of each token at (2i, 2i + 1)."""

    @abstractmethod
    def rope_store(
        self,
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
    ) -> None:
        """q = rope(q / rms(q)) for each head, in place; entry = rope(rms_norm(kv)), of decode rows into the ring, too,
        which has room for `window` tokens and those of a decode row behind its first one."""

    @abstractmethod
    def compress(
        self,
        made_TF: Tensor,
        bias_AC: Tensor,
        norm_D: Tensor,
        rotation_YO: Tensor,
        state_XLF: Tensor,
        entry_PKD: Tensor,
        rows: TokenRows,
        *,
        eps: float,
    ) -> None:
        """Write the entries whose last token is among these, and keep in `state_XLF` (fp32) what later ones are made
        of. `made_TF` (fp32): of each token C values, then C logits, to which `bias_AC` is added by position modulo A.

        Entry = rope(rms_norm(sum over its tokens of softmax(logit) * value)), for each feature; by the rotation of
        its first token's position, of `rotation_YO`. Where C = 2 D, the A tokens before take part with their first D
        features, and the entry's own with their last D.
        """

    @abstractmethod
    def select(
        self,
        q_TJI: Tensor,
        weight_TJ: Tensor,
        key_PKI: Tensor,
        ratio: int,
        bound_T: Tensor,
        selected_TS: Tensor,
        rows: TokenRows,
        scratch: Scratch,
    ) -> None:
        """The entries s < `bound_T` (int32) of each token with the highest sum over j of weight[j] relu(q[j] · key[s]),
        of equal ones the first: their numbers, rising, -1 behind the last (int32)."""

    @abstractmethod
    def attend(
        self,
        q_THD: Tensor,
        ring_XLD: Tensor,
        entry_TD: Tensor | None,
        entry_PKD: Tensor | None,
        selected_TS: Tensor | None,
        sink_H: Tensor,
        rotation_TO: Tensor,
        out_THD: Tensor,
        rows: TokenRows,
        scratch: Scratch,
        *,
        window: int,
        ratio: int,
        scale: float,
        first: int = 0,
    ) -> None:
        """out = rope back(softmax(scale * q · entries, sink) · entries), over each token's window and compressed
        entries.

        Those of the tokens themselves are in the ring where `entry_TD` is None; else in `entry_TD`, and the ring has
        those before them alone. `entry_PKD`: pages of compressed entries, of which the token at position p may see the
        first (p + 1) // `ratio`, or of these the `selected_TS`; None and 0 where there are none. `first`: before this
        position there are no tokens; where it is above 0, entries of the window that are not finite are missing.
        """

    @abstractmethod
    def keep_entries(self, entry_TD: Tensor, ring_XLD: Tensor, rows: TokenRows) -> None:
        """Write the entries of chunks to the rings of their slots: of each row the newest L tokens."""

    @abstractmethod
    def group_linear(self, x_TGF: Tensor, weight_NF: Weight, out_TGU: Tensor, scratch: Scratch) -> None:
        """out[t, g] = weight[g] · x[t, g], with weight[g] the g-th of G equal groups of neighbouring rows."""
