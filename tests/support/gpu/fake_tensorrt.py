"""TensorRT's builder as a recording fake over the real bindings.

Enums, base classes and callbacks are the real ones. The objects a builder would hand out are stand-ins that know their
real class: an attribute it does not have raises AttributeError, a call its signature does not take raises WrongCall, so
that nothing but the shipping API can be used. The parser reads the ONNX file; the builder refuses what TensorRT would
refuse for missing shapes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import onnx
from onnx import TensorProto
from real_tensorrt import check_call, real_tensorrt

from ddtree_trt.plugins import ATTENTION, NAMESPACE, VERSION, library

_TYPES: dict[int, str] = {
    TensorProto.FLOAT: "FLOAT",
    TensorProto.FLOAT16: "HALF",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.INT32: "INT32",
    TensorProto.INT64: "INT64",
}


class Stand:
    """An object of a class of the bindings: `methods` and `values` are what the test gives it, the rest is refused."""

    def __init__(self, spec: type, calls: list[Any], methods: dict[str, Callable[..., Any]], **values: Any) -> None:
        self.__dict__.update(_spec=spec, _calls=calls, _methods=methods, spec_name=spec.__name__, **values)

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._spec, name)  # AttributeError for what the real class lacks
        assert name in self._methods, f"{self.spec_name}.{name} is real, but the fake has none"

        def call(*arguments: Any, **keywords: Any) -> Any:
            check_call(real, arguments, keywords)
            self._calls.append((f"{self.spec_name}.{name}", *arguments, *keywords.values()))
            return self._methods[name](*arguments, **keywords)

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        assert isinstance(getattr(self._spec, name), property), f"{self.spec_name}.{name} cannot be set"
        self._calls.append((f"{self.spec_name}.{name} =", value))
        self.__dict__[name] = value


class FakeTensorRt:
    """One TensorRT installation: `module` stands for the package, `calls` is what was asked of it, in order."""

    def __init__(self, version: str = "11.4.0.106") -> None:
        self.real = real_tensorrt()
        self.calls: list[Any] = []
        self.creators: list[Stand] = []  # in the registry
        self.substitutes = 0  # attention nodes that become something else
        self.parse_errors: list[tuple[str, str, str]] = []  # node, operator, reason
        self.build_error: str | None = None
        self.timing_cache: Literal["taken", "of another GPU", "damaged"] = "taken"
        self.module = ModuleType("tensorrt")
        self.module.__getattr__ = lambda name: getattr(self.real, name)  # type: ignore[method-assign]
        for name, value in {
            "__version__": version,
            "Builder": self._builder,
            "OnnxParser": self._parser,
            "Runtime": self._runtime,
            "get_plugin_registry": self._registry,
        }.items():
            setattr(self.module, name, value)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        """Arguments of every call of that name."""
        return [call[1:] for call in self.calls if call[0] == name]

    def _stand(self, spec: str, methods: dict[str, Callable[..., Any]] | None = None, **values: Any) -> Stand:
        return Stand(getattr(self.real, spec), self.calls, methods or {}, **values)

    def _registry(self) -> Stand:
        return self._stand("IPluginRegistry", {"load_library": self._load_library}, all_creators=self.creators)

    def _load_library(self, path: str) -> object | None:
        if library.abi_of(Path(path)) is None:
            return None
        creator = self._stand("IPluginCreatorV3One", name=ATTENTION, plugin_version=VERSION, plugin_namespace=NAMESPACE)
        self.creators.append(creator)
        return object()

    def _builder(self, logger: Any) -> Stand:
        assert isinstance(logger, self.real.ILogger)

        def build(network: Stand, config: Stand) -> bytes | None:
            return self._build(logger, network, config)

        return self._stand(
            "Builder",
            {
                "create_network": lambda flags=0: self._stand("INetworkDefinition", name="network"),
                "create_builder_config": self._config,
                "create_optimization_profile": self._profile,
                "build_serialized_network": build,
            },
        )

    def _profile(self) -> Stand:
        shapes: dict[str, Any] = {}
        profile = self._stand("IOptimizationProfile", {"set_shape": lambda name, *dims: shapes.update({name: dims})})
        profile.__dict__["shapes"] = shapes
        return profile

    def _config(self) -> Stand:
        profiles: list[Stand] = []

        def add(profile: Stand) -> int:
            profiles.append(profile)
            return len(profiles) - 1

        cache = self._stand("ITimingCache", {"serialize": lambda: b"learnt timings"})
        config = self._stand(
            "IBuilderConfig",
            {
                "add_optimization_profile": add,
                "create_timing_cache": lambda data: None if self.timing_cache == "damaged" else cache,
                "set_timing_cache": lambda cache, ignore_mismatch: self.timing_cache == "taken",
                "get_timing_cache": lambda: cache,
                "set_memory_pool_limit": lambda pool, size: None,
                "set_flag": lambda flag: None,
            },
        )
        config.__dict__["profiles"] = profiles
        return config

    def _parser(self, network: Stand, logger: Any) -> Stand:
        def parse(path: str) -> bool:
            errors = self.parse_errors or self._read(network, path)
            parser.__dict__.update(num_errors=len(errors), errors=errors)
            return not errors

        def error(index: int) -> Stand:
            node, kind, reason = parser.errors[index]
            code = self.real.ErrorCode.UNSUPPORTED_NODE
            values = {"node_name": node, "node_operator": kind, "desc": reason, "code": code}
            return self._stand("ParserError", {name: lambda value=value: value for name, value in values.items()})

        parser = self._stand("OnnxParser", {"parse_from_file": parse, "get_error": error})
        return parser

    def _read(self, network: Stand, path: str) -> list[tuple[str, str, str]]:
        """Fill a network from an ONNX file, as TensorRT's parser would as far as the build can see. Its errors."""
        model = onnx.load(path, load_external_data=False)
        onnx.checker.check_model(path)
        layers = []
        for node in model.graph.node:
            kind = self.real.LayerType.ELEMENTWISE
            if node.domain:
                attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
                wanted = (node.op_type, attributes["plugin_version"].decode(), attributes["plugin_namespace"].decode())
                if wanted not in {(c.name, c.plugin_version, c.plugin_namespace) for c in self.creators}:
                    return [(node.name, node.op_type, "Plugin not found")]
                kind = self.real.LayerType.PLUGIN_V3
            layers.append(self._stand("ILayer", name=node.name, type=kind))
        plugins = [layer for layer in layers if layer.type == self.real.LayerType.PLUGIN_V3]
        for layer in plugins[: self.substitutes]:
            layer.__dict__["type"] = self.real.LayerType.ELEMENTWISE
        inputs, outputs = ([self._tensor(v) for v in values] for values in (model.graph.input, model.graph.output))
        network.__dict__.update(num_layers=len(layers), num_inputs=len(inputs), num_outputs=len(outputs))
        methods = {"get_layer": layers, "get_input": inputs, "get_output": outputs}
        network._methods.update({name: values.__getitem__ for name, values in methods.items()})
        network.__dict__["inputs"] = inputs
        return []

    def _tensor(self, value: onnx.ValueInfoProto) -> Stand:
        shape = [d.dim_value if d.HasField("dim_value") else -1 for d in value.type.tensor_type.shape.dim]
        dtype = getattr(self.real.DataType, _TYPES[value.type.tensor_type.elem_type])
        return self._stand("ITensor", name=value.name, shape=tuple(shape), dtype=dtype)

    def _build(self, logger: Any, network: Stand, config: Stand) -> bytes | None:
        problem = self.build_error or self._shape_problem(network, config)
        if problem is not None:
            logger.log(self.real.ILogger.Severity.WARNING, "only a warning")
            logger.log(self.real.ILogger.Severity.ERROR, problem)
            return None
        if not self._phases(config.progress_monitor):
            logger.log(self.real.ILogger.Severity.ERROR, "build was cancelled")
            return None
        return b"plan of " + network.inputs[0].name.encode() + os.urandom(4)

    def _shape_problem(self, network: Stand, config: Stand) -> str | None:
        dynamic = {tensor.name: tensor.shape for tensor in network.inputs if -1 in tensor.shape}
        if not config.profiles and dynamic:
            return "Network has dynamic or shape inputs, but no optimization profile has been defined."
        for profile in config.profiles:
            for name, shape in dynamic.items():
                if name not in profile.shapes:
                    return f"Dynamic input {name} is missing dimensions in profile."
                for sizes in zip(shape, *profile.shapes[name], strict=True):
                    fixed, *ranges = sizes
                    if sorted(ranges) != ranges or (fixed != -1 and ranges != [fixed] * 3):
                        return f"Profile of {name} does not fit {shape}: {profile.shapes[name]}"
            if set(profile.shapes) - set(dynamic):
                return "Profile names inputs that are not dynamic."
        return None

    def _phases(self, monitor: Any) -> bool:
        """Report as TensorRT does: nested phases, from a thread of its own. False when the monitor ended the build."""
        assert isinstance(monitor, self.real.IProgressMonitor)
        answers: list[bool] = []

        def work() -> None:
            monitor.phase_start("Building Engine", None, 2)
            monitor.phase_start("Computing profiles", "Building Engine", 4)
            answers.extend(monitor.step_complete("Computing profiles", step) for step in range(4))
            monitor.phase_finish("Computing profiles")
            answers.extend(monitor.step_complete("Building Engine", step) for step in range(2))
            monitor.phase_finish("Building Engine")

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return all(answers)

    def _runtime(self, logger: Any) -> Stand:
        inspector = self._stand("EngineInspector", {"get_engine_information": lambda format: '{"Layers": []}'})
        engine = self._stand("ICudaEngine", {"create_engine_inspector": lambda: inspector})
        return self._stand("Runtime", {"deserialize_cuda_engine": lambda plan: engine})
