"""Builds for TensorRT on a pretended machine: a fake of the GPU, and as TensorRT the real builder of TensorRT for RTX,
which needs none, or a recording fake where plugin layers are wanted."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_cuda import FakeCuda
from fake_tensorrt import FakeTensorRt
from real_tensorrt import real_tensorrt

from ddtree_trt.artifact.manifest import Manifest, load_manifest
from ddtree_trt.artifact.verify import verify_files
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.errors import DDTreeError
from ddtree_trt.plugins import ABI, library

VERSION = "11.4.0.106"
DIMS: dict[str, Any] = {"head_dim": 64, "num_heads": 2, "num_kv_heads": 1, "max_positions": 512}


class RecordedTensorRt:
    """The real module under TensorRT's name. `networks`, `configs` and `profiles` are what its builders made."""

    def __init__(self, version: str = VERSION) -> None:
        self.real = real = real_tensorrt()
        self.networks: list[Any] = []
        self.configs: list[Any] = []
        self.profiles: list[Any] = []

        def recording(method: str, made: list[Any]) -> Any:
            def create(builder: Any, *arguments: Any) -> Any:
                made.append(getattr(real.Builder, method)(builder, *arguments))
                return made[-1]

            return create

        made = {"network": self.networks, "builder_config": self.configs, "optimization_profile": self.profiles}
        methods = {f"create_{kind}": recording(f"create_{kind}", things) for kind, things in made.items()}
        builder = type("Builder", (real.Builder,), methods)
        self.module: Any = ModuleType("tensorrt")
        stand_in = {"__getattr__": lambda name: getattr(real, name), "__version__": version, "Builder": builder}
        vars(self.module).update(stand_in)

    def shapes(self, network: int, profile: int) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Input → (smallest, tuned for, largest) in a profile, by its number among all of the build."""
        made = self.networks[network]
        inputs = (made.get_input(i) for i in range(made.num_inputs))
        dynamic = [tensor.name for tensor in inputs if -1 in tuple(tensor.shape)]
        return {name: tuple(tuple(dims) for dims in self.profiles[profile].get_shape(name)) for name in dynamic}


class Machine:
    """What the build finds on this machine; change it before building. `module` stands for the package `tensorrt`."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *, plugins: bool = False) -> None:
        """With `plugins` the plugin library is built, and TensorRT is a fake."""
        self.fake = FakeTensorRt() if plugins else None
        self.recorded = None if plugins else RecordedTensorRt()
        tensorrt = self.fake or self.recorded
        assert tensorrt is not None
        self.module = tensorrt.module
        folder.mkdir()
        self.plugins = folder / library.PLUGINS
        if plugins:
            self.plugins.write_bytes(b"\x7fELF ddtree-plugin-abi=%d; and code" % ABI)
        self.cuda = FakeCuda()
        self.cuda.name, self.cuda.driver = "NVIDIA H100 80GB HBM3\0\0", 13010
        patch.setattr(library.find, "__defaults__", (folder,))
        patch.setitem(sys.modules, "tensorrt", self.module)
        for name in ("cuda", "cuda.bindings", "cuda.bindings.runtime"):
            patch.setitem(sys.modules, name, self.cuda)


def build(
    output: Path,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    notice: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> Manifest:
    request = BuildRequest(**{"target": "tiny", "backend": "tensorrt", "output": output, **options})
    manifest = compile_engine(request, progress, notice)
    assert load_manifest(output) == manifest
    verify_files(output, manifest)
    return manifest


def refused(tmp_path: Path, error: type[DDTreeError], *words: str, **options: Any) -> None:
    """The build is refused with these words, an engine that was there is untouched, and nothing else is left."""
    engine = tmp_path / "engines" / "e"
    engine.mkdir(parents=True)
    (engine / "manifest.json").write_text("old")
    with pytest.raises(error) as caught:
        build(engine, force=True, **options)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [p.name for p in engine.iterdir()] == ["manifest.json"]
    assert [p.name for p in engine.parent.iterdir()] == ["e"]
