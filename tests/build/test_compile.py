"""What a build writes: the manifest's facts, weights stored once and exactly, the same bytes every time."""

import itertools
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from checkpoints import BY_SWITCHES, STOP_TOKEN, TARGET_DIMS, make_drafter, make_pair, make_target, random_weights
from safetensors.torch import load_file

from ddtree_trt import __version__
from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.manifest import LOCAL, SCHEMA_VERSION, Limits, Manifest, load_manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.artifact.verify import verify_files
from ddtree_trt.artifact.weight_layout import DRAFTER, stored_weights
from ddtree_trt.build.backends.base import BuilderOptions
from ddtree_trt.build.backends.torch import backend as torch_build
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.build.choice import resolve_precision
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.build.graph.weights import ALIGNMENT, WeightFile
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.drafters.registry import checkpoint_shapes
from ddtree_trt.errors import BuildError
from ddtree_trt.models.decoder import EMBEDDING
from ddtree_trt.runtime.engines.onnxruntime.network import session_options
from ddtree_trt.runtime.text.codec import TextCodec


def build(pair: tuple[Path, Path], engine: Path, progress: Progress = no_progress, **options: Any) -> Manifest:
    request = BuildRequest(target="mine", checkpoint=pair[0], drafter=pair[1], output=engine, **options)
    manifest = compile_engine(request, progress)
    assert load_manifest(engine) == manifest
    verify_files(engine, manifest)
    return manifest


def initialisers(graph: Path) -> dict[str, tuple[dict[str, str], onnx.TensorProto]]:
    """External initialisers of a graph by name, with where they are."""
    model = onnx.load(str(graph), load_external_data=False)
    external = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    return {t.name: ({e.key: e.value for e in t.external_data}, t) for t in external}


def test_manifest_of_a_pair(tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "pair", dtype="bf16")
    calls: list[tuple[str, int, int]] = []
    engine = tmp_path / "engine"
    manifest = build(pair, engine, lambda *call: calls.append(call), max_batch=2)
    assert (manifest.name, manifest.backend, manifest.precision) == ("mine", "onnxruntime", "fp32")
    assert (manifest.product_version, manifest.schema_version) == (__version__, SCHEMA_VERSION)
    assert manifest.target == load_checkpoint(pair[0]).identify()
    assert manifest.drafter == load_checkpoint(pair[1]).identify()
    assert (manifest.target.name, manifest.target.revision) == ("target", LOCAL)
    assert manifest.target_dims == TARGET_DIMS and isinstance(manifest.drafting.dims, DFlashDims)
    assert manifest.limits == Limits(max_seq_len=TARGET_DIMS.max_positions, max_batch=2)  # cut to the positions
    assert manifest.stop_token_ids == (STOP_TOKEN,)
    assert set(manifest.toolchain) == {"python", "numpy", "onnx", "onnxruntime"}
    assert manifest.tensors["target"]["outputs"][-2:] == ["taps", "logits"]
    assert "taps" in manifest.tensors["drafter"]["inputs"]
    assert list(manifest.files) == sorted(p.name for p in engine.iterdir() if p.name != artifact.MANIFEST)
    stages = dict.fromkeys(stage for stage, _, _ in calls)
    assert list(stages) == ["write weights", "identify target", "identify drafter", "digest files"]
    for stage in stages:
        done = [d for s, d, _ in calls if s == stage]
        last = next(call for call in reversed(calls) if call[0] == stage)
        assert done == sorted(done) and last[1] == last[2]


@pytest.mark.parametrize(("tied", "dtype"), [(True, "fp32"), (False, "bf16")])
def test_weights_are_stored_once_and_exactly(tmp_path: Path, tied: bool, dtype: str) -> None:
    pair = make_pair(tmp_path / "pair", tied=tied, dtype=dtype)
    build(pair, tmp_path / "engine")
    target, drafter = (initialisers(tmp_path / "engine" / g) for g in (artifact.TARGET_GRAPH, artifact.DRAFTER_GRAPH))
    shared = [EMBEDDING] if tied else [EMBEDDING, "lm_head"]
    assert sorted(target.keys() & drafter.keys()) == sorted(shared)
    data = (tmp_path / "engine" / artifact.WEIGHTS).read_bytes()
    places = {}
    for name, (where, tensor) in (target | drafter).items():
        assert where["location"] == artifact.WEIGHTS and int(where["offset"]) % ALIGNMENT == 0
        assert int(where["length"]) == 4 * np.prod(tensor.dims)
        places[name] = (int(where["offset"]), int(where["length"]))
    for name in shared:
        assert target[name][0] == drafter[name][0]
    ordered = sorted(places.values())
    assert all(a + length <= b for (a, length), (b, _) in itertools.pairwise(ordered))
    offset, length = places[EMBEDDING]
    stored = np.frombuffer(data[offset : offset + length], np.float32).reshape(TARGET_DIMS.vocab_size, -1)
    np.testing.assert_array_equal(stored, load_checkpoint(pair[0]).tensor(EMBEDDING))
    if dtype == "fp32":
        written = random_weights(checkpoint_shapes(TARGET_DIMS, tied=tied), seed=0)[EMBEDDING]
        np.testing.assert_array_equal(stored, written)
    for graph in (artifact.TARGET_GRAPH, artifact.DRAFTER_GRAPH):
        ort.InferenceSession(tmp_path / "engine" / graph, session_options(1), providers=["CPUExecutionProvider"])


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    """Sharded or not, the engine's files are equal byte for byte: digests identify a build."""
    whole = make_pair(tmp_path / "whole", dtype="fp16")
    sharded = (
        make_target(tmp_path / "sharded" / "target", dtype="fp16", shards=3),
        make_drafter(tmp_path / "sharded" / "drafter", dtype="fp16", shards=2),
    )
    first, again, third = (build(pair, tmp_path / str(i)) for i, pair in enumerate((whole, whole, sharded)))
    assert first.files == again.files == third.files
    assert first.target == again.target


def test_tokenizer_files(tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "pair")
    (pair[0] / "chat_template.jinja").write_text("{{ messages }}")
    (pair[0] / "README.md").write_text("not copied")
    engine = tmp_path / "engine"
    build(pair, engine)
    assert (engine / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (engine / "README.md").exists()
    assert json.loads((engine / "generation_config.json").read_text()) == {"eos_token_id": [STOP_TOKEN]}
    (pair[0] / "generation_config.json").write_text('{"eos_token_id": 5, "temperature": 0.6}')
    assert build(pair, engine, force=True).stop_token_ids == (5,)
    assert json.loads((engine / "generation_config.json").read_text())["temperature"] == 0.6
    (pair[0] / "additional_chat_templates").mkdir()
    (pair[0] / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    build(pair, engine, force=True)
    assert TextCodec(engine, {}).tokenizer.chat_template == {"tool_use": "{{ tools }}", "default": "{{ messages }}"}


def test_weight_file(tmp_path: Path) -> None:
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    empty = np.zeros((0, 4), np.float32)
    arrays = {"matrix": matrix, "transposed": matrix.T, "scalar": np.array(3, np.float32), "empty": empty}
    with WeightFile(tmp_path / "weights.bin") as sink:
        tensors = {name: sink.add(name, partial(np.array, array)) for name, array in arrays.items()}
        again = sink.add("matrix", lambda: pytest.fail("it was made again"))
        assert again == tensors["matrix"] and again is not tensors["matrix"]
        with pytest.raises(BuildError, match=r"big has weights up to 70000, which fp16 cannot hold; use .* bf16"):
            sink.add("big", lambda: np.array([7e4], np.float32), "float16")
    for name, tensor in tensors.items():
        got = onnx.numpy_helper.to_array(tensor, base_dir=str(tmp_path))
        np.testing.assert_array_equal(got, arrays[name])
        assert got.dtype == arrays[name].dtype and got.shape == arrays[name].shape
    with pytest.raises(FileExistsError):
        WeightFile(tmp_path / "weights.bin")


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        *(("dflash", precision) for precision in DTYPES),
        *((kind, "fp16") for kind in ("dflash-untied", "autoregressive", *BY_SWITCHES)),
    ],
)
def test_weights_are_the_checkpoints(tmp_path: Path, kind: str, precision: Any) -> None:
    """Every tensor of both checkpoints, once, in the engine's precision, joined where the layout joins; a block
    drafter's in bf16 where that is fp16."""
    if kind in BY_SWITCHES:
        pair = make_pair(tmp_path, family=BY_SWITCHES[kind])
    elif kind == "autoregressive":
        pair = make_target(tmp_path / "t"), make_target(tmp_path / "d", tied=False, num_layers=1, tokenizer=False)
    else:
        pair = make_pair(tmp_path, tied=kind == "dflash")
    manifest = build(pair, tmp_path / "engine", backend="torch", precision=precision)
    assert (manifest.backend, manifest.precision, manifest.tensors) == ("torch", precision, {})
    stored = load_file(tmp_path / "engine" / artifact.TORCH_WEIGHTS)
    target, drafter = checkpoints = [load_checkpoint(path) for path in pair]
    layout = stored_weights(
        manifest.target_dims,
        manifest.drafter_dims,
        target_tied=target.tie_word_embeddings,
        drafter_tied=drafter.tie_word_embeddings,
    )
    assert sorted(stored) == sorted(w.name for w in layout)
    used = Counter((w.name.startswith(DRAFTER), s) for w in layout for s in w.sources)
    assert used == Counter((bool(i), s) for i, c in enumerate(checkpoints) for s in c.tensors)
    for weight in layout:
        of_drafter = weight.name.startswith(DRAFTER)
        parts = [torch.tensor(checkpoints[of_drafter].tensor(s)) for s in weight.sources]
        in_bf16 = precision == "fp16" and of_drafter and kind != "autoregressive"
        expected = torch.cat(parts).view(weight.shape).to(torch.bfloat16 if in_bf16 else DTYPES[precision])
        assert torch.equal(stored[weight.name], expected), weight.name


def test_auto_is_bf16_where_there_is_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for there, precision in ((False, "fp32"), (True, "bf16")):
        control = tmp_path / f"nvidiactl-{there}"
        if there:
            control.touch()
        monkeypatch.setattr(torch_build, "_GPU_CONTROL", control)
        assert resolve_precision(torch_build.TorchBuild(BuilderOptions()), "auto") == precision
