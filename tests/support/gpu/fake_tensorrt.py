"""TensorRT's builder as a recording fake over the real bindings, for what the builder of TensorRT for RTX lacks: plugin
layers. Everything else is tested with that one.

Enums, base classes and callbacks are the real ones. The objects a builder would hand out are stand-ins that know their
real class: an attribute it does not have raises AttributeError, a call its signature does not take raises WrongCall, so
that nothing but the shipping API can be used. The parser reads the ONNX file.
"""

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
from onnx import TensorProto
from real_tensorrt import check_call, real_tensorrt

from ddtree_trt.plugins import NAMES, NAMESPACE, VERSION, library

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
        self.module: Any = ModuleType("tensorrt")
        stand_in = {
            "__getattr__": lambda name: getattr(self.real, name),
            "__version__": version,
            "Builder": self._builder,
            "OnnxParser": self._parser,
            "get_plugin_registry": self._registry,
        }
        vars(self.module).update(stand_in)

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
        identity: dict[str, Any] = {"plugin_version": VERSION, "plugin_namespace": NAMESPACE}
        self.creators += [self._stand("IPluginCreatorV3One", name=name, **identity) for name in NAMES]
        return object()

    def _builder(self, logger: Any) -> Stand:
        assert isinstance(logger, self.real.ILogger)

        def build(network: Stand, config: Stand) -> bytes:
            return b"plan of " + network.inputs[0].name.encode() + os.urandom(4)

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

        config = self._stand(
            "IBuilderConfig",
            {"add_optimization_profile": add, "set_flag": lambda flag: None, "clear_flag": lambda flag: None},
        )
        config.__dict__["profiles"] = profiles
        return config

    def _parser(self, network: Stand, logger: Any) -> Stand:
        def parse(path: str) -> bool:
            self._read(network, path)
            return True

        return self._stand("OnnxParser", {"parse_from_file": parse})

    def _read(self, network: Stand, path: str) -> None:
        """Fill a network from an ONNX file, as TensorRT's parser would as far as the build can see."""
        model = onnx.load(path, load_external_data=False)
        onnx.checker.check_model(path)
        layers = []
        for node in model.graph.node:
            kind = self.real.LayerType.ELEMENTWISE
            if node.domain:
                attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
                wanted = (node.op_type, attributes["plugin_version"].decode(), attributes["plugin_namespace"].decode())
                assert wanted in {(c.name, c.plugin_version, c.plugin_namespace) for c in self.creators}
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

    def _tensor(self, value: onnx.ValueInfoProto) -> Stand:
        shape = [d.dim_value if d.HasField("dim_value") else -1 for d in value.type.tensor_type.shape.dim]
        dtype = getattr(self.real.DataType, _TYPES[value.type.tensor_type.elem_type])
        return self._stand("ITensor", name=value.name, shape=tuple(shape), dtype=dtype)
