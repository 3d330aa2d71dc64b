"""The files of an engine of plans: its networks compiled one by one, each for ranges of shapes, with the builder of
TensorRT or of TensorRT for RTX, and the tables both read."""

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
from ddtree_trt.build.graph.compaction import PLANES, compaction_graph, window_rows
from ddtree_trt.build.graph.lowering_tensorrt import ATTENTION, KEY_LENGTHS, NativeGraph, PluginGraph
from ddtree_trt.build.graph.networks import build_target_graph
from ddtree_trt.build.graph.weights import WeightFile
from ddtree_trt.device.libraries import load_plugins, make_log
from ddtree_trt.drafters.kind import EMBEDDING, HEAD
from ddtree_trt.errors import BuildError

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

    from ddtree_trt.build.checkpoint.reader import Checkpoint
    from ddtree_trt.build.graph.ops import Sink


def make_monitor(trt: Any, stage: str, progress: Progress) -> Any:
    """An `IProgressMonitor` that reports the steps of TensorRT's outermost phases. `raise_stopping_error()` raises what
    `progress` raised, or a Ctrl-C, which must not pass through TensorRT; the build has then ended early."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._steps: dict[str, int] = {}  # of each outermost phase
            self._stopped: BaseException | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self._steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            """False ends the build."""
            try:
                if phase_name in self._steps:
                    progress(f"{stage}: {phase_name}", step + 1, self._steps[phase_name])
            except BaseException as error:
                self._stopped = error
            return self._stopped is None

        def phase_finish(self, phase_name: str) -> None:
            self.step_complete(phase_name, self._steps.get(phase_name, 1) - 1)

        def raise_stopping_error(self) -> None:
            if self._stopped is not None:
                raise self._stopped

    return Monitor()


def mend_attentions(trt: Any, network: Any, name: str, attentions: Sequence[str]) -> None:
    """Set what the parser cannot say, on every attention of the parsed INetworkDefinition of the `name`.

    `attentions` are the graph's attention nodes. Each reads its cache as far as it is written (`key_value_lengths`),
    reads it as it is, without the parser's product with a scale of 1, and may not be decomposed into other layers.
    Raises BuildError with the name of a node that did not become an attention over an updated cache.
    """
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    makers = {layer.get_output(i).name: layer for layer in layers for i in range(layer.num_outputs)}
    lengths = makers[KEY_LENGTHS].get_output(0)
    found = {}
    for layer in (layer for layer in layers if layer.type == trt.LayerType.ATTENTION_INPUT):
        layer.__class__ = trt.IAttentionInputLayer  # the bindings return the base class
        found[layer.attention.name] = layer.attention
    for node in attentions:
        attention = found.pop(node, None)
        if attention is None:
            raise BuildError(f"TensorRT made no attention layer of the {name}'s node {node!r}")
        for index in (0, 1):
            maker = makers.get(attention.get_input(index).name)
            if maker is not None and maker.type == trt.LayerType.ELEMENTWISE:  # the product with the scale
                attention.set_input(index, maker.get_input(0))
        for index in (1, 2):
            maker = makers.get(attention.get_input(index).name)
            if maker is None or maker.type != trt.LayerType.KV_CACHE_UPDATE:
                raise BuildError(f"TensorRT's attention {node!r} of the {name} does not read the cache it updates")
        attention.key_value_lengths = lengths
        attention.decomposable = False
    if found:
        raise BuildError(f"TensorRT made an attention of the {name} that its graph does not have: {min(found)!r}")


Profile = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]  # input → shapes: least, tuned, most
Finish = Callable[[Any, Any], None]  # gets the product's module and a parsed network
_SHOWN_ERRORS = 5  # of the parser's, in one error of ours


class EngineBuilder:
    """The builder of one product for the networks of one engine directory."""

    def __init__(
        self, trt: Any, title: str, progress: Progress, *, plugin_library: Path | None = None, gpus: Sequence[str] = ()
    ) -> None:
        """`trt` is the product's module and `title` its name and version; `gpus` are the kinds to compile for, none of
        them meaning the GPU of this machine. Raises BuildError when the product does not start or does not take the
        plugin library."""
        self._trt = trt
        self._title = title
        self._progress = progress
        self._gpus = gpus
        self._log = make_log(trt)
        try:
            self._builder = trt.Builder(self._log)
        except (TypeError, RuntimeError) as error:  # the binding raises them for a null builder
            raise BuildError(f"{title}: the builder does not start: {self._log.words() or error}") from error
        if plugin_library is not None:
            load_plugins(trt, self._log, plugin_library, BuildError)

    def build(
        self, name: str, graph: Path, plan: Path, shapes: Profile, finish: Finish, *, tf32: bool = True
    ) -> dict[str, list[str]]:
        """Compile `graph` into `plan` and return the names of its inputs and outputs, in order. `finish` is called with
        the product's module and the parsed network, which it checks or changes. `tf32`: whether products of float32 may
        round what they multiply to TF32. Raises BuildError with the product's reasons, and what `finish` raises."""
        self._log.clear()
        network = self._parse(name, graph)
        finish(self._trt, network)
        inputs = [network.get_input(i) for i in range(network.num_inputs)]
        outputs = [network.get_output(i) for i in range(network.num_outputs)]
        for tensor in (*inputs, *outputs):
            tensor.allowed_formats = 1 << int(self._trt.TensorFormat.LINEAR)
        monitor = make_monitor(self._trt, f"build {name}", self._progress)
        config = self._config(name, shapes, monitor)
        if tf32:
            config.set_flag(self._trt.BuilderFlag.TF32)
        else:
            config.clear_flag(self._trt.BuilderFlag.TF32)
        serialized = self._builder.build_serialized_network(network, config)
        monitor.raise_stopping_error()
        if serialized is None:
            raise BuildError(f"{self._title} cannot build the {name}: {self._log.words()}")
        with plan.open("xb") as file:
            file.write(serialized)
        return {"inputs": [t.name for t in inputs], "outputs": [t.name for t in outputs]}

    def _parse(self, name: str, graph: Path) -> Any:
        network = self._builder.create_network(0)  # strongly typed, the only kind from TensorRT 11 on
        parser = self._trt.OnnxParser(network, self._log)
        if not parser.parse_from_file(str(graph)):
            errors = [parser.get_error(i) for i in range(min(parser.num_errors, _SHOWN_ERRORS))]
            # Nodes by the names that `ops.Graph` gave them.
            words = (f"node {e.node_name()!r} ({e.node_operator()}): {e.desc()} [{e.code()}]" for e in errors)
            reasons = "; ".join(words) or self._log.words()
            raise BuildError(f"{self._title} cannot parse the {name}: {reasons}")
        return network

    def _config(self, name: str, shapes: Profile, monitor: Any) -> Any:
        trt, config = self._trt, self._builder.create_builder_config()
        config.max_aux_streams = 0  # the runtime captures a pass on one stream
        # A row's result has the same bits wherever it stands in a batch.
        config.set_flag(trt.BuilderFlag.DISTRIBUTIVE_INDEPENDENCE)
        if self._gpus:
            # Memory that the runtime would allocate within a pass would keep it from being captured.
            config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
            config.num_compute_capabilities = len(self._gpus)
            for index, gpu in enumerate(self._gpus):
                if not config.set_compute_capability(getattr(trt.ComputeCapability, gpu.upper()), index):
                    raise BuildError(f"{self._title} does not compile for {gpu}: {self._log.words()}")
        if shapes:
            profile = self._builder.create_optimization_profile()
            for tensor, (smallest, tuned, largest) in shapes.items():
                profile.set_shape(tensor, smallest, tuned, largest)
            if config.add_optimization_profile(profile) != 0:
                raise BuildError(f"{self._title} refuses the shapes of the {name}: {self._log.words()}")
        config.progress_monitor = monitor
        return config


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
    """Write every plan and the tables into `directory`: names of each plan's inputs and outputs. Raises BuildError."""
    tensors = {}
    for network in networks(inputs, attention):
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            path = Path(folder) / f"{network.name}.onnx"
            weights = path.with_name(artifact.WEIGHTS)
            with WeightFile(weights, expected_bytes=network.weight_bytes, progress=progress) as sink:
                graph = network.make(sink)
            path.write_bytes(graph.SerializeToString())
            shapes = profile(graph.graph.input, network.sizes)
            finish = partial(check_attention, name=network.name, attention=attention, graph=graph)
            tensors[network.name] = builder.build(
                network.name, path, directory / network.plan, shapes, finish, tf32=network.tf32
            )
    write_shared(directory / artifact.SHARED_WEIGHTS, inputs.target, inputs.drafter, inputs.precision, progress)
    return tensors


def networks(inputs: Inputs, attention: AttentionName) -> list[Network]:
    target, drafter, limits, floats = inputs.target, inputs.drafter, inputs.limits, PRECISIONS[inputs.precision].dtype
    lowering = NativeGraph if attention == "native" else PluginGraph

    def target_graph(sink: Sink) -> ModelProto:
        g = lowering("target", sink, floats)
        return build_target_graph(g, target, limits, drafter.kind.tap_layers, quantized=True)

    def drafter_graph(sink: Sink) -> ModelProto:
        own = block_drafter_precision(inputs.precision) if drafter.kind.block_size else inputs.precision
        g = lowering("drafter", sink, PRECISIONS[own].dtype, floats)
        graph: ModelProto = drafter.kind.load("graph")(g, drafter, target, limits)
        return graph

    def compaction(sink: Sink) -> ModelProto:
        window = window_rows(drafter.dims)
        return compaction_graph(sink, target.dims, limits, inputs.precision, window, attention)

    sizes, drafts = target_sizes(limits), drafter_sizes(limits, drafter.kind.block_size)
    moved = {} if attention == "native" else {PLANES: (1, 1, 2 * len(target.dims.attention_layers))}
    return [
        Network("target", artifact.TARGET_PLAN, target_graph, sizes, target.stored_bytes(2)),
        Network("drafter", artifact.DRAFTER_PLAN, drafter_graph, drafts, 2 * drafter.num_values),
        Network("compaction", artifact.COMPACTION_PLAN, compaction, moved, 0, tf32=False),
    ]


def check_attention(trt: Any, network: Any, *, name: str, attention: AttentionName, graph: ModelProto) -> None:
    """Finish a network that was parsed from the graph, where this computes its attention. Raises BuildError unless
    there are as many plugin layers as nodes of them: TensorRT may silently replace a node whose plugin it does not find
    by another operator of the same name."""
    if attention == "native":
        if nodes := [node.name for node in graph.graph.node if node.op_type == ATTENTION]:
            mend_attentions(trt, network, name, nodes)
        return
    wanted = [node.op_type for node in graph.graph.node if node.domain == plugins.NAMESPACE]
    found = [network.get_layer(i).type for i in range(network.num_layers)].count(trt.LayerType.PLUGIN_V3)
    if found != len(wanted):
        raise BuildError(
            f"the {name} has {len(wanted)} {wanted[0]} nodes, TensorRT made {found} plugin layers of them; "
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
