"""The files of an engine of plans: its networks compiled one by one, each for ranges of shapes, and the tables both
read."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ddtree_trt import plugins
from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import AttentionName, Limits
from ddtree_trt.artifact.precisions import PRECISIONS, PrecisionName, block_drafter_precision
from ddtree_trt.artifact.progress import Progress
from ddtree_trt.artifact.tensor_files import encode, safetensors_header
from ddtree_trt.build.backends.base import Inputs
from ddtree_trt.build.backends.tensorrt.plan import EngineBuilder, Profile, mend_attentions
from ddtree_trt.build.graph.compaction import PLANES, Advanced, compaction_graph, window_rows
from ddtree_trt.build.graph.lowering_tensorrt import ATTENTION, NativeGraph, PluginGraph
from ddtree_trt.build.graph.networks import build_target_graph
from ddtree_trt.build.graph.weights import WeightFile
from ddtree_trt.device.buffers import CacheShape, pass_rows
from ddtree_trt.drafters.kind import EMBEDDING, HEAD
from ddtree_trt.errors import BuildError

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

    from ddtree_trt.build.checkpoint.reader import Checkpoint
    from ddtree_trt.build.graph.ops import Sink


Range = tuple[int, int, int]  # smallest, tuned for, largest
_TUNED_TREE = 64  # tokens: where automatic budgets end up when verifying costs what reading the weights costs


def target_sizes(limits: Limits) -> dict[str, Range]:
    """Dimension → range, tuned for a decoding round. A prefill asks for the last row's logits only."""
    slots, longest = limits.max_batch, limits.max_tokens_per_pass
    tuned = min(_TUNED_TREE, 1 + limits.max_tree_budget)
    return {"N": (1, 1, slots), "T": (1, tuned, longest), "R": (1, tuned, slots * longest)}


def drafter_sizes(limits: Limits, block: int | None) -> dict[str, Range]:
    """Dimension → range, likewise: a round has at most a block of context rows. A drafter without a block is a language
    model and has the target's sizes."""
    if block is None:
        return target_sizes(limits)
    # With the block behind them they must fit a cache, which may be shorter than a chunk.
    round_, chunk = (min(rows, limits.max_seq_len) for rows in (block, max(limits.prefill_chunk, block)))
    tuned = -(-round_ // 2)
    return {"N": (1, 1, limits.max_batch), "C": (1, tuned, chunk), "C+block": (1 + block, tuned + block, chunk + block)}


def profile(inputs: Iterable[ValueInfoProto], sizes: Mapping[str, Range]) -> Profile:
    """The shapes of every input with named dimensions, all of which are in `sizes`."""
    shapes = {}
    for value in inputs:
        dims = value.type.tensor_type.shape.dim
        if any(dim.dim_param for dim in dims):
            ranges = [sizes[dim.dim_param] if dim.dim_param else (dim.dim_value,) * 3 for dim in dims]
            smallest, tuned, largest = zip(*ranges, strict=True)
            shapes[value.name] = (smallest, tuned, largest)
    return shapes


_TABLES = {EMBEDDING: names.EMBEDDING, HEAD: names.HEAD}  # a part's name → the table's


class Network(NamedTuple):
    name: str
    plan: str  # its file
    make: Callable[[Sink], ModelProto]
    sizes: Mapping[str, Range]  # ranges of the named dimensions
    weight_bytes: int  # about
    # TF32 holds what heads multiply, bf16 or fp16, exactly, and sums in float32. What a hybrid's delta nets multiply it
    # rounds to 10 bits, in passes; commits add to their states, and round nothing again.
    tf32: bool = True


def write_engine(
    directory: Path, inputs: Inputs, attention: AttentionName, builder: EngineBuilder, progress: Progress
) -> dict[str, dict[str, list[str]]]:
    """Write every plan and the tables into `directory`, and return the names of each plan's inputs and outputs. Raises
    BuildError."""
    tensors = {}
    for network in networks(inputs, attention):
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            path = Path(folder) / f"{network.name}.onnx"
            weights = path.with_name(artifact.WEIGHTS)
            with WeightFile(weights, expected_bytes=network.weight_bytes, progress=progress) as sink:
                graph = network.make(sink)
            path.write_bytes(graph.SerializeToString())
            shapes = profile(graph.graph.input, network.sizes)
            finish = attention_check(attention, network.name, graph)
            tensors[network.name] = builder.build(
                network.name, path, directory / network.plan, shapes, finish, tf32=network.tf32
            )
    write_shared(directory / artifact.SHARED_WEIGHTS, inputs.target, inputs.drafter, inputs.precision, progress)
    return tensors


def networks(inputs: Inputs, attention: AttentionName) -> list[Network]:
    target, drafter, limits, precision = inputs.target, inputs.drafter, inputs.limits, PRECISIONS[inputs.precision]
    floats, cache = precision.dtype, CacheShape.of(target.dims, limits, precision.value_bytes)
    lowering = NativeGraph if attention == "native" else PluginGraph
    taps, tied = drafter.kind.tap_layers, target.tie_word_embeddings

    def target_graph(sink: Sink) -> ModelProto:
        g, given = lowering("target", sink, floats), (target.dims, target.tensor)
        return build_target_graph(g, *given, tap_layers=taps, limits=limits, tied=tied, quantized=target)

    def drafter_graph(sink: Sink) -> ModelProto:
        own = block_drafter_precision(inputs.precision) if drafter.kind.block_size else inputs.precision
        g = lowering("drafter", sink, PRECISIONS[own].dtype, floats)
        graph: ModelProto = drafter.kind.load("graph")(g, drafter, target, limits)
        return graph

    def compaction(sink: Sink) -> ModelProto:
        rows, net = pass_rows(limits, limits.max_batch), target.dims.delta
        states = Advanced(net, len(target.dims.delta_layers), rows) if net else None
        return compaction_graph(sink, cache, floats, window_rows(drafter.dims), attention, states)

    sizes, drafts = target_sizes(limits), drafter_sizes(limits, drafter.kind.block_size)
    moved = {} if attention == "native" else {PLANES: (1, 1, cache.planes)}
    return [
        Network("target", artifact.TARGET_PLAN, target_graph, sizes, target.stored_bytes(2)),
        Network("drafter", artifact.DRAFTER_PLAN, drafter_graph, drafts, 2 * drafter.num_values),
        Network("compaction", artifact.COMPACTION_PLAN, compaction, moved, 0, tf32=False),
    ]


def attention_check(attention: AttentionName, name: str, graph: ModelProto) -> Callable[[Any, Any], None]:
    """What is to be done with a network that was parsed from the graph, where this computes its attention."""
    if attention == "native":
        nodes = [node.name for node in graph.graph.node if node.op_type == ATTENTION]
        return partial(mend_attentions, name=name, attentions=nodes) if nodes else lambda trt, network: None
    wanted = [node.op_type for node in graph.graph.node if node.domain == plugins.NAMESPACE]
    return partial(_check_plugins, name=name, nodes=wanted)


def _check_plugins(trt: Any, network: Any, *, name: str, nodes: Sequence[str]) -> None:
    """Raises BuildError unless there are as many plugin layers as `nodes`, which are of one kind: TensorRT may silently
    replace a node whose plugin it does not find by another operator of the same name."""
    kinds = [network.get_layer(i).type for i in range(network.num_layers)]
    found = kinds.count(trt.LayerType.PLUGIN_V3)
    if found != len(nodes):
        raise BuildError(
            f"the {name} has {len(nodes)} {nodes[0]} nodes, TensorRT made {found} plugin layers of them; "
            "is another library's operator of that name loaded?"
        )


def write_shared(
    path: Path, target: Checkpoint, drafter: Checkpoint, precision: PrecisionName, progress: Progress
) -> None:
    """Write the tables that both plans read, [V, H] each: the embedding and, unless tied to it, the language-model
    head, of the target and of a drafter as far as it has its own."""
    tables: dict[str, tuple[Checkpoint, str]] = {}
    for prefix, network in {"": target, names.DRAFTER: drafter}.items():
        kind = network.kind
        for part in kind.own_tables:
            if part.name != HEAD or not (kind.drafts == "tokens" and network.tie_word_embeddings):
                (source,) = part.sources
                tables[prefix + _TABLES[part.name]] = network, source
    shapes = {name: network.shapes[source] for name, (network, source) in tables.items()}
    stored = PRECISIONS[precision]
    with path.open("xb") as file:
        file.write(safetensors_header({name: (stored.safetensors, shape) for name, shape in shapes.items()}))
        for done, (network, source) in enumerate(tables.values()):
            progress("write shared tables", done, len(tables))
            file.write(encode(network.tensor(source), stored.dtype, source).data)
    progress("write shared tables", len(tables), len(tables))
