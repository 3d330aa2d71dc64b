"""Compile a network of a published shape, with random weights and native attention, by TensorRT for RTX. No GPU needed.

Prints one line of JSON: times, sizes and the peak memory of this process, weights' making included.

    python -m workbench native-plan qwen3-0.6b
    python -m workbench native-plan qwen3-8b --network drafter --layers 2
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

import numpy as np
import typer
from numpy.typing import NDArray
from onnx import ModelProto

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.artifact.progress import no_progress
from ddtree_trt.build.backends.tensorrt.plan import EngineBuilder
from ddtree_trt.build.backends.tensorrt.plans import attention_check, drafter_sizes, profile, target_sizes
from ddtree_trt.build.graph.lowering_tensorrt import NativeGraph
from ddtree_trt.build.graph.networks import build_target_graph
from ddtree_trt.build.graph.ops import Sink
from ddtree_trt.build.graph.weights import WeightFile
from ddtree_trt.device.gpus import KINDS
from ddtree_trt.device.libraries import import_tensorrt
from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.models.decoder import language_model_shapes
from workbench.random_pair import PairShape, find_shape

LIMITS = Limits(max_seq_len=4096, max_batch=4, max_tree_budget=256, prefill_chunk=512)


def lowered(sink: Sink, network: str, shape: PairShape, layers: int | None, floats: str) -> ModelProto:
    """The graph, its weights written to `sink`."""
    graph, tied, taps = NativeGraph(network, sink, floats), shape.tied, shape.drafter.tap_layers
    values = np.random.default_rng(0).standard_normal(1_000_003, np.float32) * np.float32(0.02)

    def weights_of(shapes: dict[str, tuple[int, ...]]) -> Callable[[str], NDArray[np.float32]]:
        # Repeated: drawing all of them would take minutes. No two tensors are alike: a plan stores equal ones once.
        return lambda name: np.resize(np.roll(values, zlib.crc32(name.encode()) % values.size), shapes[name])

    if network == "drafter":
        drafter = shape.drafter if layers is None else replace(shape.drafter, num_layers=layers)
        kind = kind_of(drafter)
        checkpoint = SimpleNamespace(kind=kind, dims=drafter, tensor=weights_of(kind.shapes(tied=tied)))
        tables = SimpleNamespace(tensor=None, tie_word_embeddings=tied)  # the target's, which are inputs
        model: ModelProto = kind.load("graph")(graph, checkpoint, tables, LIMITS)
        return model
    target = shape.target if layers is None else replace(shape.target, num_layers=layers)
    own = weights_of(language_model_shapes(target, tied=tied))
    return build_target_graph(graph, target, own, tap_layers=taps, limits=LIMITS, tied=tied)


def compiled(path: Path, model: ModelProto, drafter: PairShape | None) -> int:
    """Bytes of the plan, as `build --backend tensorrt-rtx` compiles it for every kind of GPU. Raises BuildError with
    the builder's reasons."""
    trt = import_tensorrt(rtx=True)
    builder = EngineBuilder(trt, f"TensorRT for RTX {trt.__version__}", no_progress, gpus=[*KINDS])
    sizes = drafter_sizes(LIMITS, drafter.block_size) if drafter else target_sizes(LIMITS)
    plan, finish = path.with_suffix(".plan"), attention_check("native", path.stem, model)
    builder.build(path.stem, path, plan, profile(model.graph.input, sizes), finish)
    return plan.stat().st_size


def main(
    shape: str,
    network: Literal["target", "drafter"] = "target",
    layers: Annotated[int | None, typer.Option(help="of the network; default: all")] = None,
    precision: Literal["bfloat16", "float16"] = "bfloat16",
) -> None:
    pair = find_shape(shape)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{network}.onnx"
        started = time.perf_counter()
        with WeightFile(path.with_name("weights.bin")) as sink:
            model = lowered(sink, network, pair, layers, precision)
        path.write_bytes(model.SerializeToString())
        written, spent = time.perf_counter(), time.process_time()
        plan_bytes = compiled(path, model, pair if network == "drafter" else None)
        built = time.perf_counter()
    result = {
        **{"shape": shape, "network": network, "layers": layers, "precision": precision},
        "weight_bytes": sink.size,
        "plan_bytes": plan_bytes,
        "write_s": round(written - started, 1),
        "build_s": round(built - written, 1),
        "build_cpu_s": round(time.process_time() - spent, 1),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(result))
