"""Compile ONNX graphs to plans, with the builder of TensorRT or of TensorRT for RTX: parser, profiles, timing cache,
errors that name the node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddtree_trt.artifact.files import write_atomically
from ddtree_trt.artifact.progress import Progress
from ddtree_trt.build.graph.lowering_tensorrt import KEY_LENGTHS
from ddtree_trt.device.libraries import load_plugins, make_log
from ddtree_trt.errors import BuildError


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
_SHOWN_ERRORS = 5  # of the parser's, in one error of ours


class EngineBuilder:
    """The builder of one product for the networks of one engine directory."""

    def __init__(
        self,
        trt: Any,
        title: str,
        progress: Progress,
        *,
        plugin_library: Path | None = None,
        timing_cache: Path | None = None,
        gpus: Sequence[str] = (),
    ) -> None:
        """`trt` is the product's module and `title` its name and version. `timing_cache` is a file that later builds
        use too; `gpus` are the kinds to compile for, none of them meaning the GPU of this machine.

        Raises BuildError when the product does not start or does not take the plugin library.
        """
        self._trt = trt
        self._title = title
        self._progress = progress
        self._timing_cache = timing_cache
        self._gpus = gpus
        self._log = make_log(trt)
        try:
            self._builder = trt.Builder(self._log)
        except (TypeError, RuntimeError) as error:  # the binding raises them for a null builder
            raise BuildError(f"{title}: the builder does not start: {self._log.words() or error}") from error
        if plugin_library is not None:
            load_plugins(trt, self._log, plugin_library, BuildError)

    def build(
        self,
        name: str,
        graph: Path,
        plan: Path,
        shapes: Profile,
        finish: Callable[[Any, Any], None] = lambda trt, network: None,
        *,
        tf32: bool = True,
    ) -> dict[str, list[str]]:
        """Compile `graph` into `plan` and return the names of its inputs and outputs, in order.

        `finish` is called with the product's module and the parsed network, which it checks or changes. `tf32`: whether
        products of float32 may round what they multiply to TF32. Raises BuildError with the product's reasons, and what
        `finish` raises.
        """
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
        if self._timing_cache is not None:
            write_atomically(self._timing_cache, bytes(config.get_timing_cache().serialize()))
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
        if (path := self._timing_cache) is not None:
            cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
            if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
                raise BuildError(f"{self._title} refuses the timing cache {path}: {self._log.words()}; delete the file")
        config.progress_monitor = monitor
        return config
