"""The TensorRT lowering whose attention is TensorRT's own: no plugin, no nvcc, plans for TensorRT and TensorRT for RTX.

Opset 24 has `TensorScatter`, which TensorRT's parser makes a `KV_CACHE_UPDATE` layer, and `Attention`, which becomes an
`ATTENTION` layer under a boolean mask. Two things the parser does are mended after it (`native_attention.py` of the
TensorRT backend): it multiplies queries and keys, the whole cache of them, by the root of the scale even where that is
1, and it ignores `nonpad_kv_seqlen`. The scale is therefore 1, and queries take theirs in float32 during rotary
embedding, from scaled angles.

Tensors are those of the plugin lowering except that there is no `slot_ids`, and that caches are [N, Hkv, S, D]: row n
of a call is row n of what is bound as its cache, so that a call serves neighbouring slots, bound at the first.

`RotaryEmbedding` becomes a layer of TensorRT's own. `RMSNormalization` and `Swish` become the very layers that the
plugin lowering spells out, in float32 as there. All three give the plain forms' numbers in ONNX Runtime.
"""

from __future__ import annotations

import numpy as np

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.graph.lowering_tensorrt import TensorRtGraph
from ddtree_trt.build.graph.ops import Attention
from ddtree_trt.models.decoder import BlockMask, TransformerDims

KEY_LENGTHS = "key_lengths"  # int32 [N], computed in the graph: rows of each cache that hold keys, the call's included
ATTENTION = "Attention"
_WORD = 32  # bits of a mask's word


class NativeGraph(TensorRtGraph):
    """`TensorRtGraph` of opset 24's attention over caches that are updated in place."""

    opset = 24
    ir_version = 11

    def cache(self, dims: TransformerDims, limits: Limits) -> list[tuple[tuple[str, str], tuple[str, str]]]:
        self._capacity = limits.cache_rows
        return super().cache(dims, limits)

    def slots(self, limits: Limits) -> str:
        return "N"

    def row_inputs(self, tokens: str, max_tokens: int, *, masked: bool) -> None:
        super().row_inputs(tokens, max_tokens, masked=masked)
        self._words = -(-max_tokens // _WORD)

    def rms_norm(self, x: str, weight: str, out: str, eps: float) -> str:
        return self._rounded("RMSNormalization", [self._single(x), weight], out, axis=-1, epsilon=eps)

    def swiglu(self, gate: str, up: str, out: str) -> str:
        silu = self.op("Swish", [self._single(gate)], [f"{out}.silu"])
        return self._rounded("Mul", [silu, self._single(up)], out)

    def attention(self, qkv: tuple[str, str, str], at: Attention, out: str) -> str:
        angles = self._query_angles(at, names.POSITIONS)
        return self._attention(qkv, at, angles, self._tree_visible(), out)

    def block_attention(self, qkv: tuple[str, str, str], at: Attention, block: int, mask: BlockMask, out: str) -> str:
        """Only the block's queries are computed."""
        query, key, value = qkv
        # Reshaped, because the parser knows the length of the sliced queries and wants to know this one.
        positions = self.rows_from(names.POSITIONS, -block, "positions.end")
        positions = self.reshape(positions, [0, block], "positions.block")
        query = self.rows_from(query, -block, f"{query}.block")
        angles = self._query_angles(at, positions)
        return self._attention((query, key, value), at, angles, self._block_visible(block, mask), out)

    def _attention(
        self, qkv: tuple[str, str, str], at: Attention, query_angles: tuple[str, str], visible: str, out: str
    ) -> str:
        """Attention of queries at their own angles; the mask `visible` is boolean [N, 1, T, S]."""
        (query_heads, kv_heads), size = at.heads, at.head_dim
        query, key, value = (
            self._by_head(x, heads, size) for x, heads in zip(qkv, (query_heads, kv_heads, kv_heads), strict=True)
        )
        cos, sin = (self._angles(table) for table in at.rotary)
        first = self.cast(names.PAST_LEN, "int64", f"{names.PAST_LEN}.wide")
        keys, values = (
            self.op("TensorScatter", [past, rows, first], [present], axis=2)
            for past, rows, present in zip(at.past, (self._rotated(key, cos, sin), value), at.present, strict=True)
        )
        lengths = self.cast(self._key_lengths(), "int64", f"{KEY_LENGTHS}.wide")
        inputs = [self._rotated(query, *query_angles), keys, values, visible, "", "", lengths]
        seen = self.op(ATTENTION, inputs, [f"{out}.by_head"], scale=1.0)
        rows = self.op("Transpose", [seen], [f"{out}.by_row"], perm=[0, 2, 1, 3])
        return self.reshape(rows, [0, 0, query_heads * size], out)

    def _by_head(self, x: str, heads: int, size: int) -> str:
        """x [N, T, heads · D] as [N, heads, T, D]."""
        rows = self.reshape(x, [0, 0, heads, size], f"{x}.by_row")
        return self.op("Transpose", [rows], [f"{x}.by_head"], perm=[0, 2, 1, 3])

    def _rotated(self, x: str, cos: str, sin: str) -> str:
        """Rotary embedding of x [N, heads, T, D] by angles [N, T, D/2]."""
        return self._rounded("RotaryEmbedding", [self._single(x), cos, sin], f"{x}.rotated")

    def _query_angles(self, at: Attention, positions: str) -> tuple[str, str]:
        """Cosine and sine of positions [N, T], times the scale of attention: [N, T, D/2] each."""
        scale = self.constant("scale", np.array(at.head_dim**-0.5, np.float32))
        cos, sin = (self.op("Mul", [self._angles(t, positions), scale], [f"{t}.scaled"]) for t in at.rotary)
        return cos, sin

    def _rows_of_call(self) -> str:
        """int32 [1]: T."""
        wide = self.op("Shape", [names.POSITIONS], ["rows_of_call.wide"], start=1, end=2)
        return self.cast(wide, "int32", "rows_of_call")

    def _key_lengths(self) -> str:
        return self.op("Add", [names.PAST_LEN, self._rows_of_call()], [KEY_LENGTHS])

    # Masks, made once per pass

    def _block_visible(self, block: int, mask: BlockMask) -> str:
        """bool [N, 1, block, S]: what has been written, as far as `mask` allows."""
        if mask != BlockMask():
            return self._within(block, mask)
        ends = self.reshape(self._key_lengths(), [-1, 1, 1, 1], "ends")
        written = self.op("Less", [self._columns(), ends], ["is_written"])
        shape = self.constant("block.shape", np.array([1, 1, block, 1], np.int64))
        return self.op("Expand", [written, shape], ["visible"])

    def _within(self, block: int, mask: BlockMask) -> str:
        """`_block_visible` by the distance of each column from a row's own position."""
        name = f"visible.{mask.window}.{'causal' if mask.causal else 'all'}"
        ends = self.reshape(self._key_lengths(), [-1, 1, 1, 1], "ends")
        behind = self.constant("block.behind", np.arange(-block, 0, dtype=np.int32).reshape(1, 1, block, 1))
        own = self.op("Add", [ends, behind], ["block.positions"])  # [N, 1, block, 1]
        distance = self.op("Sub", [self._columns(), own], ["block.distances"])  # [N, 1, block, S]
        # Rows behind the block's last one have not been written.
        bounds = [self.op("Less", [self._columns(), ends], ["is_written"])]
        if mask.causal:
            bounds = [self.op("Less", [distance, self._integer(1)], [f"{name}.before"])]
        elif mask.window:
            bounds.append(self.op("Less", [distance, self._integer(mask.window)], [f"{name}.before"]))
        if mask.window:
            bounds.append(self.op("Greater", [distance, self._integer(-mask.window)], [f"{name}.after"]))
        visible = bounds[0]
        for i, bound in enumerate(bounds[1:]):
            visible = self.op("And", [visible, bound], [f"{name}.{i}"])
        return visible

    def _integer(self, value: int) -> str:
        return self.constant(f"integer.{value}", np.array(value, np.int32))

    def _tree_visible(self) -> str:
        """bool [N, 1, T, S]: the past, and those rows of the call whose bit is set.

        Its last operator is no reshape: with one slot, the builder failed on a mask that several attentions reshape.
        """
        starts = self.reshape(names.PAST_LEN, [-1, 1], "starts")
        row = self.op("Sub", [self._columns(), starts], ["column_row"])  # int32 [N, S]: of the call, in each column
        zero = self.constant("zero", np.array(0, np.int32))
        largest = self.constant("last_bit", np.array(self._words * _WORD - 1, np.int32))
        bit = self.op("Min", [self.op("Max", [row, zero], ["column_row.low"]), largest], ["column_bit"])
        index = self.op("Unsqueeze", [self.cast(bit, "int64", "column_bit.wide"), self._axis(2)], ["column_bit.index"])
        of_columns = self.op("GatherND", [self._bits(), index], ["tree_bits.columns"], batch_dims=1)
        by_column = self.op("Unsqueeze", [of_columns, self._axis(1)], ["tree_bits.by_column"])
        by_row = self.op("Transpose", [by_column], ["tree_bits.by_row"], perm=[0, 1, 3, 2])
        past = self._for_rows(self.op("Less", [row, zero], ["in_past"]))
        written = self._for_rows(self.op("Less", [row, self._rows_of_call()], ["is_written"]))
        return self.op("Or", [past, self.op("And", [by_row, written], ["in_tree"])], ["visible"])

    def _for_rows(self, of_columns: str) -> str:
        """[N, S] as [N, 1, 1, S]."""
        axes = self.constant("axes.1.2", np.array([1, 2], np.int64))
        return self.op("Unsqueeze", [of_columns, axes], [f"{of_columns}.for_rows"])

    def _bits(self) -> str:
        """The packed mask [N, T, W] as bool [N, 32 · W, T]. The parser has no operators on bits, so words are divided
        by powers of two, in int64, where those with bit 31 are positive."""
        words = self.cast(self._mask, "int64", "words.signed")
        negative = self.op("Less", [words, self.constant("zero.wide", np.array(0, np.int64))], ["words.negative"])
        wrapped = self.op("Add", [words, self.constant("wrap", np.array(1 << _WORD, np.int64))], ["words.wrapped"])
        words = self.op("Where", [negative, wrapped, words], ["words"])
        powers = self.constant("powers", np.int64(1) << np.arange(_WORD, dtype=np.int64))
        each = self.op("Unsqueeze", [words, self._axis(3)], ["words.each"])
        shifted = self.op("Div", [each, powers], ["words.shifted"])
        odd = self.op("Mod", [shifted, self.constant("two", np.array(2, np.int64))], ["words.bits"])
        flat = self.reshape(self.cast(odd, "bool", "words.set"), [0, 0, self._words * _WORD], "tree_bits")
        return self.op("Transpose", [flat], ["tree_bits.by_bit"], perm=[0, 2, 1])

    def _columns(self) -> str:
        return self.constant("columns", np.arange(self._capacity, dtype=np.int32))
