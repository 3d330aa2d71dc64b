"""The common part of the two TensorRT lowerings, which differ in attention: `PluginGraph` and `NativeGraph`.

Networks are strongly typed: matrix products run in the engine's precision, long sums and rotary embedding in float32
between casts, which TensorRT fuses away. Ids, positions and row numbers are int32. The embedding and
the head are inputs, so that both engines read one copy.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddtree_trt import plugins
from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.graph import delta
from ddtree_trt.build.graph.ops import Attention, Delta, Graph, Shape, Sink, Table
from ddtree_trt.models.decoder import BlockMask, TransformerDims
from ddtree_trt.plugins import MaskMode

# Most candidates per position. A tree of B nodes never looks past rank B, and beyond this rank a node is worth nothing;
# TensorRT's own limit is 3840.
MAX_CANDIDATES = 256
_WORD = 32  # bits of a mask's word


class TensorRtGraph(Graph):
    """`Graph` of operators that TensorRT's parser reads. The lowering of attention is a subclass's."""

    integers = "int32"
    opset, ir_version = 24, 11
    by_slot_id = False  # whether a call names the cache slot of each sequence; else it gets their parts of a cache

    def __init__(self, name: str, sink: Sink, floats: str, shared: str | None = None) -> None:
        """`floats` is the network's precision: bfloat16 or float16 (float32 has no attention kernel); `shared` that of
        embeddings and tapped states, by default the same."""
        super().__init__(name, sink)
        self.floats = floats
        self.shared = shared or floats
        self._tables: set[str] = set()
        self._mask = ""

    def table(self, table: Table) -> str:
        return self._table(table.name, self.shared, table.shape)

    def _table(self, name: str, dtype: str, shape: Shape) -> str:
        if name not in self._tables:
            self._tables.add(self.input(name, dtype, shape))
        return name

    def embed(self, table: Table, token_ids: str, out: str) -> str:
        if self.shared == self.floats:
            return super().embed(table, token_ids, out)
        return self.cast(super().embed(table, token_ids, f"{out}.shared"), self.floats, out)

    def states(self, name: str, shape: Shape) -> str:
        if self.shared == self.floats:
            return super().states(name, shape)
        return self.cast(self.input(name, self.shared, shape), self.floats, f"{name}.own")

    def row_inputs(self, tokens: str, max_tokens: int, *, masked: bool) -> None:
        self.input(names.POSITIONS, "int32", ["N", tokens])
        self.input(names.PAST_LEN, "int32", ["N"])
        self._most, self._words = max_tokens, -(-max_tokens // _WORD)
        if masked:
            self._mask = self.input(names.TREE_MASK, "int32", ["N", tokens, self._words])
        if self.by_slot_id:
            self.input(names.SLOT_IDS, "int32", ["N"])

    def cache(self, dims: TransformerDims, limits: Limits) -> None:
        """Keys and values [slots, Hkv, S, D] of each layer, as inputs and, the same buffers, as outputs."""
        slots: int | str = limits.max_batch if self.by_slot_id else "N"
        shape = [slots, dims.num_kv_heads, limits.cache_rows, dims.head_dim]
        layers = len(dims.attention_layers)
        for name in names.plane_names("past", layers):
            self.input(name, self.floats, shape)
        for name in names.plane_names("present", layers):
            self.output(name, self.floats, shape)

    def head(self, x: str, table: Table, out: str) -> str:
        """A product of float32, also where the rest is in halves: a strongly typed product of halves gives halves, in
        which large logits of different tokens are equal. The table comes in float32, an input of its own even where
        the head is the embedding: a cast in the graph would write it anew in every pass."""
        weight = self._table(names.HEAD, "float32", table.shape)
        return self.op("Gemm", [self._single(x), weight], [out], transB=1)

    def choices(self, logits: str) -> None:
        wide = self.op("ArgMax", [logits], [f"{names.CHOICES}.wide"], axis=1, keepdims=0)
        self.cast(wide, "int32", names.CHOICES)
        self.output(names.CHOICES, self.integers, ["R"])

    def most_probable(self, logits: str, candidates: int, outputs: tuple[str, str]) -> int:
        """The K best logits less the logarithm of the sum: TensorRT's LogSoftmax would take the logarithm of
        probabilities rounded to 0, and TopK would sort a second array of V columns."""
        k = min(candidates, MAX_CANDIDATES)
        log_probs, token_ids = outputs
        best, wide = f"{log_probs}.logits", f"{token_ids}.wide"
        self.op("TopK", [logits, self.number([k])], [best, wide], axis=-1)
        self.cast(wide, "int32", token_ids)
        axis = self.number([-1])
        top = self.op("ReduceMax", [logits, axis], [f"{logits}.max"], keepdims=1)
        weights = self.op("Exp", [self.op("Sub", [logits, top], [f"{logits}.shifted"])], [f"{logits}.weights"])
        total = self.op("Log", [self.op("ReduceSum", [weights, axis], [f"{logits}.sum"])], [f"{logits}.log_sum"])
        self.op("Sub", [self.op("Sub", [best, top], [f"{log_probs}.shifted"]), total], [log_probs])
        return k

    def rms_norm(self, x: str, weight: str, out: str, eps: float) -> str:
        return self._rounded("RMSNormalization", [self._single(x), weight], out, axis=-1, epsilon=eps)

    def swiglu(self, gate: str, up: str, out: str) -> str:
        silu = self.op("Swish", [self._single(gate)], [f"{out}.silu"])
        return self._rounded("Mul", [silu, self._single(up)], out)

    def add_rms_norm(self, x: str, residual: str, weight: str, out: str, eps: float) -> tuple[str, str]:
        total = self.op("Add", [x, residual], [f"{out}.sum"])
        return self.rms_norm(total, weight, out, eps), total

    def _angles(self, table: str, positions: str = names.POSITIONS) -> str:
        """The rows of a rotary table [S, D/2] that positions [N, T] name: [N, T, D/2]."""
        return self.op("Gather", [table, positions], [f"{table}.{positions}"], axis=0)

    def _single(self, x: str) -> str:
        """x in float32."""
        return self.cast(x, "float32", f"{x}.single")

    def _rounded(self, kind: str, inputs: Sequence[str], out: str, **attrs: Any) -> str:
        """The result, in the engine's precision, of a node over float32 values."""
        return self.cast(self.op(kind, inputs, [f"{out}.exact"], **attrs), self.floats, out)


class PluginGraph(TensorRtGraph):
    """`TensorRtGraph` with one plugin node per attention."""

    domains = (plugins.NAMESPACE,)
    by_slot_id = True

    def attention(self, qkv: tuple[str, str, str], at: Attention, out: str) -> str:
        return self._attention(qkv, at, MaskMode.TREE, self._mask, out)

    def block_attention(self, qkv: tuple[str, str, str], at: Attention, block: int, mask: BlockMask, out: str) -> str:
        # The plugin requires a mask of rank 3 in every mode and reads it in mode TREE only.
        unread = self.reshape(names.SLOT_IDS, [-1, 1, 1], "no_mask")
        assert not mask.window, "the plugin has no windows; the backend's `check` refuses such drafters before"
        mode = MaskMode.CAUSAL if mask.causal else MaskMode.NONE
        return self.rows_from(self._attention(qkv, at, mode, unread, f"{out}.rows"), -block, out)

    def _attention(self, qkv: tuple[str, str, str], at: Attention, mode: MaskMode, mask: str, out: str) -> str:
        (query_heads, kv_heads), size = at.heads, at.head_dim
        query, key = (self._rotate(x, heads, at) for x, heads in zip(qkv[:2], at.heads, strict=True))
        value = self.reshape(qkv[2], [0, 0, kv_heads, size], f"{qkv[2]}.by_head")
        attrs = {
            plugins.NUM_Q_HEADS: query_heads,
            plugins.NUM_KV_HEADS: kv_heads,
            plugins.HEAD_DIM: size,
            plugins.MAX_TREE: self._most,
            plugins.SCALE: size**-0.5,
            plugins.MASK_MODE: int(mode),
            # By these TensorRT's parser finds the plugin.
            "plugin_namespace": plugins.NAMESPACE,
            "plugin_version": plugins.VERSION,
        }
        past, present = names.cache_names("past", at.layer), names.cache_names("present", at.layer)
        inputs = [query, key, value, *past, names.SLOT_IDS, names.PAST_LEN, mask]
        seen = f"{out}.by_head"
        self.op(plugins.ATTENTION, inputs, [seen, *present], domain=plugins.NAMESPACE, **attrs)
        return self.reshape(seen, [0, 0, query_heads * size], out)

    def _rotate(self, x: str, heads: int, at: Attention) -> str:
        """Rotary embedding of x [N, T, heads · D]: [N, T, heads, D]."""
        cos, sin = (self._angles(table) for table in at.rotary)
        rotated = self._rounded("RotaryEmbedding", [self._single(x), cos, sin], f"{x}.rotated", num_heads=heads)
        return self.reshape(rotated, [0, 0, heads, at.head_dim], f"{x}.by_head")


KEY_LENGTHS = "key_lengths"  # int32 [N], computed in the graph: rows of each cache that hold keys, the call's included
ATTENTION = "Attention"


class NativeGraph(TensorRtGraph):
    """`TensorRtGraph` of ONNX's own attention over caches that are updated in place."""

    def cache(self, dims: TransformerDims, limits: Limits) -> None:
        """Of a hybrid also states, which a pass leaves as they are, what it keeps for a commit, and the rows' parents
        int32 [N, T], −1 for roots and padding."""
        self._capacity = limits.cache_rows
        super().cache(dims, limits)
        if (net := dims.delta) is None:
            return
        shapes = [net.value_heads, net.key_dim, net.value_dim], [1, net.taps - 1, net.channels]
        for layer in range(len(dims.delta_layers)):
            for name, shape in zip(names.state_names("past", layer), shapes, strict=True):
                self.input(name, "float32", ["N", *shape])
            self.output(names.kept_name(layer), "float32", ["N", "T", sum(delta.kept_widths(net))])
        self.input(names.PARENTS, "int32", ["N", "T"])

    def attention(self, qkv: tuple[str, str, str], at: Attention, out: str) -> str:
        angles = self._query_angles(at, names.POSITIONS)
        return self._attention(qkv, at, angles, self._tree_visible(), out)

    def delta_net(self, projected: str, at: Delta, out: str) -> str:
        state, inputs = names.state_names("past", at.layer)
        past = self.reshape(inputs, [0, -1, at.net.channels], f"{inputs}.rows")
        trees, kept = self._trees(at.net.taps), names.kept_name(at.layer)
        return delta.delta_net(self, projected, at, trees, (state, past), out, kept)

    def _trees(self, taps: int) -> delta.Tree:
        """The call's trees, from their mask and their rows' parents."""
        by_bit = self.op("Transpose", [self._bits()], ["tree_bits.rows"], perm=[0, 2, 1])
        zero, two = self.number([0]), self.number([2])
        count = self.op("Shape", [names.PARENTS], ["parents.count"], start=1, end=2)
        seen = self.op("Slice", [by_bit, zero, count, two], ["seen"])
        above = self.op("Add", [names.PARENTS, self.number(taps - 1, np.int32)], ["parents.place"])
        above = self.cast(above, "int64", "parents.wide")
        # Of the past's rows too, as far as a row asks for it.
        earlier = self.constant("earlier", np.maximum(np.arange(taps - 1) - 1, 0)[None].astype(np.int64))
        roots = self.op("Mul", [self.rows_between(above, 0, 1, "roots"), zero], ["roots.none"])
        every = self.concat([self.op("Add", [roots, earlier], ["earlier.each"]), above], "parents.every", axis=1)
        numbers = self.constant("numbers", np.arange(taps - 1, taps - 1 + self._most, dtype=np.int64)[None])
        own = self.op("Slice", [numbers, zero, count, self.number([1])], ["rows.own"])
        sources = [self.op("Add", [self.op("Mul", [above, zero], ["rows.none"]), own], ["sources.0"])]
        for step in range(1, taps):
            sources.append(above)
            index = self.op("Unsqueeze", [above, two], [f"sources.{step}.index"])
            above = self.op("GatherND", [every, index], [f"sources.{step}"], batch_dims=1)
        columns = [self.op("Unsqueeze", [x, two], [f"{x}.column"]) for x in reversed(sources)]
        return delta.Tree(self.concat(columns, "sources", axis=2), seen, self._most)

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
        (query_heads, kv_heads), size, by_head = at.heads, at.head_dim, []  # [N, heads, T, D] each
        for x, heads in zip(qkv, (query_heads, kv_heads, kv_heads), strict=True):
            rows = self.reshape(x, [0, 0, heads, size], f"{x}.by_row")
            by_head.append(self.op("Transpose", [rows], [f"{x}.by_head"], perm=[0, 2, 1, 3]))
        query, key, value = by_head
        cos, sin = (self._angles(table) for table in at.rotary)
        first = self.cast(names.PAST_LEN, "int64", f"{names.PAST_LEN}.wide")
        new = self._rotated(key, cos, sin, at), value
        places = (names.cache_names(part, at.layer) for part in ("past", "present"))
        keys, values = (
            self.op("TensorScatter", [past, rows, first], [present], axis=2)
            for rows, past, present in zip(new, *places, strict=True)
        )
        lengths = self.cast(self._key_lengths(), "int64", f"{KEY_LENGTHS}.wide")
        inputs = [self._rotated(query, *query_angles, at, scaled=True), keys, values, visible, "", "", lengths]
        seen = self.op(ATTENTION, inputs, [f"{out}.by_head"], scale=1.0)
        rows = self.op("Transpose", [seen], [f"{out}.by_row"], perm=[0, 2, 1, 3])
        return self.reshape(rows, [0, 0, query_heads * size], out)

    def _rotated(self, x: str, cos: str, sin: str, at: Attention, *, scaled: bool = False) -> str:
        """Rotary embedding of x [N, heads, T, D], of its first elements where not all are rotated, by angles [N, T,
        rotated / 2]. With `scaled` it is times the scale of attention, which the angles of whole heads have."""
        single, attrs = self._single(x), {}
        if at.rotated != at.head_dim:
            attrs["rotary_embedding_dim"] = at.rotated
            if scaled:
                single = self.op("Mul", [single, self.number(at.head_dim**-0.5)], [f"{x}.scaled"])
        return self._rounded("RotaryEmbedding", [single, cos, sin], f"{x}.rotated", **attrs)

    def _query_angles(self, at: Attention, positions: str) -> tuple[str, str]:
        """Cosine and sine of positions [N, T], where all of a head is rotated times the scale of attention: [N, T,
        rotated / 2] each."""
        if at.rotated != at.head_dim:
            cos, sin = (self._angles(t, positions) for t in at.rotary)
            return cos, sin
        scale = self.number(at.head_dim**-0.5)
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
        """bool [N, 1, block, S]: what has been written, as far as `mask` allows by the distance of each column from a
        row's own position."""
        ends = self.reshape(self._key_lengths(), [-1, 1, 1, 1], "ends")
        written = self.op("Less", [self._columns(), ends], ["is_written"])
        if mask == BlockMask():
            return self.op("Expand", [written, self.number([1, 1, block, 1])], ["visible"])
        name = f"visible.{mask.window}.{'causal' if mask.causal else 'all'}"
        behind = self.constant("block.behind", np.arange(-block, 0, dtype=np.int32).reshape(1, 1, block, 1))
        own = self.op("Add", [ends, behind], ["block.positions"])  # [N, 1, block, 1]
        distance = self.op("Sub", [self._columns(), own], ["block.distances"])  # [N, 1, block, S]
        last = self.number(1 if mask.causal else mask.window, np.int32)
        visible = self.op("Less", [distance, last], [f"{name}.before"])
        if not mask.causal:  # rows behind the block's last one have not been written
            visible = self.op("And", [written, visible], [f"{name}.written"])
        if mask.window:
            after = self.op("Greater", [distance, self.number(-mask.window, np.int32)], [f"{name}.after"])
            visible = self.op("And", [visible, after], [f"{name}.both"])
        return visible

    def _tree_visible(self) -> str:
        """bool [N, 1, T, S]: the past, and those rows of the call whose bit is set. Its last operator is no reshape:
        with one slot, the builder failed on a mask that several attentions reshape."""
        starts = self.reshape(names.PAST_LEN, [-1, 1], "starts")
        row = self.op("Sub", [self._columns(), starts], ["column_row"])  # int32 [N, S]: of the call, in each column
        zero, largest = self.number(0, np.int32), self.number(self._words * _WORD - 1, np.int32)
        bit = self.op("Min", [self.op("Max", [row, zero], ["column_row.low"]), largest], ["column_bit"])
        wide = self.cast(bit, "int64", "column_bit.wide")
        index = self.op("Unsqueeze", [wide, self.number([2])], ["column_bit.index"])
        of_columns = self.op("GatherND", [self._bits(), index], ["tree_bits.columns"], batch_dims=1)
        by_column = self.op("Unsqueeze", [of_columns, self.number([1])], ["tree_bits.by_column"])
        by_row = self.op("Transpose", [by_column], ["tree_bits.by_row"], perm=[0, 1, 3, 2])
        past, written = (
            self.op("Unsqueeze", [self.op("Less", [row, end], [name]), self.number([1, 2])], [f"{name}.for_rows"])
            for name, end in (("in_past", zero), ("is_written", self._rows_of_call()))
        )
        return self.op("Or", [past, self.op("And", [by_row, written], ["in_tree"])], ["visible"])

    def _bits(self) -> str:
        """The packed mask [N, T, W] as bool [N, 32 · W, T]. The parser has no operators on bits, so words are divided
        by powers of two, in int64, where those with bit 31 are positive."""
        words = self.cast(self._mask, "int64", "words.signed")
        negative = self.op("Less", [words, self.number(0)], ["words.negative"])
        wrapped = self.op("Add", [words, self.number(1 << _WORD)], ["words.wrapped"])
        words = self.op("Where", [negative, wrapped, words], ["words"])
        powers = self.constant("powers", np.int64(1) << np.arange(_WORD, dtype=np.int64))
        each = self.op("Unsqueeze", [words, self.number([3])], ["words.each"])
        shifted = self.op("Div", [each, powers], ["words.shifted"])
        odd = self.op("Mod", [shifted, self.number(2)], ["words.bits"])
        flat = self.reshape(self.cast(odd, "bool", "words.set"), [0, 0, self._words * _WORD], "tree_bits")
        return self.op("Transpose", [flat], ["tree_bits.by_bit"], perm=[0, 2, 1])

    def _columns(self) -> str:
        return self.constant("columns", np.arange(self._capacity, dtype=np.int32))
