"""Compile one ONNX graph to one TensorRT plan: parser, profiles, timing cache, progress, errors that name the node."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import tensorrt as trt

from ddtree_trt import plugins
from ddtree_trt.artifact.progress import Progress
from ddtree_trt.build.backends.base import BuilderOptions
from ddtree_trt.build.backends.tensorrt.profiles import Profile
from ddtree_trt.device.tensorrt_library import load_plugins, make_log
from ddtree_trt.errors import BuildError

_SHOWN_ERRORS = 5  # of the parser's, in one error of ours
_STEPS = 1000  # reported per phase, whatever TensorRT counts in


class EngineBuilder:
    """TensorRT's builder for the networks of one engine directory, which share a timing cache."""

    def __init__(self, plugin_library: Path, timing_cache: Path, options: BuilderOptions, progress: Progress) -> None:
        """Raises BuildError when TensorRT does not start or does not take the plugin library."""
        self._options = options
        self._timing_cache = timing_cache
        self._progress = progress
        self._log = make_log(trt)
        try:
            self._builder = trt.Builder(self._log)
        except (TypeError, RuntimeError) as error:  # the binding raises them for a null builder
            raise BuildError(f"TensorRT's builder does not start: {self._log.words() or error}") from error
        load_plugins(trt, self._log, plugin_library, BuildError)

    def build(
        self, name: str, graph: Path, plan: Path, profiles: Sequence[Profile], *, attentions: int
    ) -> dict[str, list[str]]:
        """Compile `graph` into `plan` and return the names of its inputs and outputs, in order.

        `attentions` is how many plugin layers there must be. Raises BuildError with TensorRT's reasons.
        """
        self._log.clear()
        network = self._parse(name, graph)
        self._check_plugins(name, network, attentions)
        inputs = [network.get_input(i) for i in range(network.num_inputs)]
        outputs = [network.get_output(i) for i in range(network.num_outputs)]
        for tensor in (*inputs, *outputs):
            tensor.allowed_formats = 1 << int(trt.TensorFormat.LINEAR)
        monitor = _Monitor(f"build {name}", self._progress)
        config = self._config(name, profiles, monitor)
        serialized = self._builder.build_serialized_network(network, config)
        monitor.raise_stopping_error()
        if serialized is None:
            raise BuildError(f"TensorRT {trt.__version__} cannot build the {name}: {self._log.words()}")
        self._save_timing_cache(config)
        with plan.open("xb") as file:
            file.write(serialized)
        if self._options.inspect:
            self._write_layers(name, serialized, plan.with_name(f"{name}.layers.json"))
        return {"inputs": [t.name for t in inputs], "outputs": [t.name for t in outputs]}

    def _parse(self, name: str, graph: Path) -> trt.INetworkDefinition:
        network = self._builder.create_network(0)  # strongly typed, the only kind from version 11 on
        parser = trt.OnnxParser(network, self._log)
        if not parser.parse_from_file(str(graph)):
            errors = [_described(parser.get_error(i)) for i in range(parser.num_errors)]
            reasons = "; ".join(errors[:_SHOWN_ERRORS]) or self._log.words()
            raise BuildError(f"TensorRT {trt.__version__} cannot parse the {name}: {reasons}")
        return network

    def _check_plugins(self, name: str, network: trt.INetworkDefinition, attentions: int) -> None:
        """Raises BuildError unless there are as many plugin layers as attentions: TensorRT may silently replace a node
        whose plugin it does not find by another operator of the same name."""
        kinds = [network.get_layer(i).type for i in range(network.num_layers)]
        found = kinds.count(trt.LayerType.PLUGIN_V3)
        if found != attentions:
            raise BuildError(
                f"the {name} has {attentions} {plugins.ATTENTION} nodes, TensorRT made {found} plugin layers of them; "
                "is another library's operator of that name loaded?"
            )

    def _config(self, name: str, profiles: Sequence[Profile], monitor: _Monitor) -> trt.IBuilderConfig:
        config = self._builder.create_builder_config()
        config.max_aux_streams = 0  # the runtime captures a pass on one stream
        # The one product of float32 is the head's, of values that are bf16 or fp16: TF32 holds them exactly, and sums
        # in float32.
        config.set_flag(trt.BuilderFlag.TF32)
        if self._options.optimization_level is not None:
            config.builder_optimization_level = self._options.optimization_level
        if self._options.workspace_mib is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, self._options.workspace_mib << 20)
        if self._options.inspect:
            config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        for index, shapes in enumerate(profiles):
            profile = self._builder.create_optimization_profile()
            for tensor, (smallest, tuned, largest) in shapes.items():
                profile.set_shape(tensor, smallest, tuned, largest)
            if config.add_optimization_profile(profile) != index:
                raise BuildError(f"TensorRT refuses optimisation profile {index} of the {name}: {self._log.words()}")
        known = self._timing_cache.read_bytes() if self._timing_cache.is_file() else b""
        cache = config.create_timing_cache(known)
        if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
            raise BuildError(
                f"TensorRT refuses the timing cache {self._timing_cache}: {self._log.words()}; delete the file"
            )
        config.progress_monitor = monitor
        return config

    def _save_timing_cache(self, config: trt.IBuilderConfig) -> None:
        """Write the cache beside the engines, whole or not at all, for later builds with this TensorRT and GPU."""
        partial = self._timing_cache.with_name(f".{self._timing_cache.name}.{os.getpid()}")
        partial.write_bytes(config.get_timing_cache().serialize())
        partial.replace(self._timing_cache)

    def _write_layers(self, name: str, serialized: trt.IHostMemory, path: Path) -> None:
        """Write the report of TensorRT's inspector on every layer, as JSON."""
        runtime = trt.Runtime(self._log)
        engine = runtime.deserialize_cuda_engine(serialized)
        if engine is None:
            raise BuildError(f"TensorRT {trt.__version__} cannot load the {name} it built: {self._log.words()}")
        layers = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
        path.write_text(layers, encoding="utf-8")


def _described(error: trt.ParserError) -> str:
    """One error of the parser: the node, by the name `ops.Graph` gave it, and the reason."""
    return f"node {error.node_name()!r} ({error.node_operator()}): {error.desc()} [{error.code()}]"


class _Monitor(trt.IProgressMonitor):  # type: ignore[misc]
    """TensorRT's phases, which nest, as one stage of ours per outermost phase. Called from several threads."""

    def __init__(self, stage: str, progress: Progress) -> None:
        super().__init__()
        self._stage = stage
        self._progress = progress
        self._lock = threading.Lock()
        self._phases: dict[str, tuple[str | None, int]] = {}  # name → the phase around it, steps
        self._done: dict[str, int] = {}  # name → steps finished
        self._stopped: BaseException | None = None

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        with self._lock:
            self._phases[phase_name] = (parent_phase, max(num_steps, 1))
            self._done[phase_name] = 0
            self._report(phase_name)

    def step_complete(self, phase_name: str, step: int) -> bool:
        """False ends the build."""
        with self._lock:
            self._done[phase_name] = step + 1
            self._report(phase_name)
            return self._stopped is None

    def phase_finish(self, phase_name: str) -> None:
        with self._lock:
            self._done[phase_name] = self._phases[phase_name][1]
            self._report(phase_name)

    def raise_stopping_error(self) -> None:
        """Raise what the caller's progress raised, such as a Ctrl-C, which must not pass through TensorRT."""
        if self._stopped is not None:
            raise self._stopped

    def _report(self, name: str) -> None:
        inside = 0.0  # how far the phase within the running step is
        while True:
            outer, steps = self._phases[name]
            inside = min((self._done[name] + inside) / steps, 1.0)
            if outer not in self._phases:
                break
            name = outer
        try:
            self._progress(f"{self._stage}: {name}", int(inside * _STEPS), _STEPS)
        except BaseException as error:
            self._stopped = error
