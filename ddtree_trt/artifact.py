"""The engine directory and its manifest: all that passes from `build` to `runtime`.

`build` writes it; `runtime` reads it through `load_manifest` and `verify_files` before it opens anything else in it.
The records here are the manifest: what they hold is what the JSON holds, plus a digest over the whole.

Dimension letters used across the project:
N sequences (slots in one call), T tree tokens (1 + B), B tree budget, L draft positions (block size − 1), K top-k
candidates, H hidden size, Hq / Hkv query and key-value heads, D head size, S cache capacity, V vocabulary, M tapped
target layers, C context rows handed to the drafter, R rows whose logits are computed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from ddtree_trt.errors import ArtifactError

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
TARGET_GRAPH = "target.onnx"
DRAFTER_GRAPH = "drafter.onnx"
WEIGHTS = "weights.bin"
TARGET_PLAN = "target.plan"
DRAFTER_PLAN = "drafter.plan"
SHARED_WEIGHTS = "shared.safetensors"  # the tables both plans read
TORCH_WEIGHTS = "weights.safetensors"
PROFILE = "profile.json"  # measured latencies; not in `files`, because another machine measures its own
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
OPTIONAL_TOKENIZER_FILES = ("chat_template.jinja", "special_tokens_map.json", "added_tokens.json")
ENGINES = Path("engines")  # where engines go, and are looked for, when no directory is named

LOCAL = "local"  # the revision of a checkpoint that came from a directory the user named
PACKAGED = "packaged"  # the revision of a checkpoint that ships with this package

_REQUIRED_FILES = {
    "onnxruntime": (TARGET_GRAPH, DRAFTER_GRAPH, WEIGHTS, *TOKENIZER_FILES),
    "torch": (TORCH_WEIGHTS, *TOKENIZER_FILES),
    "tensorrt": (TARGET_PLAN, DRAFTER_PLAN, SHARED_WEIGHTS, *TOKENIZER_FILES),
}
_HASH_BLOCK = 4 << 20
_CAUSAL_OPTION = (1, 30)  # the first ONNX Runtime whose attention kernel takes `causal=0`; Python 3.10 has none of them


class Progress(Protocol):
    """Told how far long work is. Called often and from the working thread: it must be cheap and must not raise."""

    def __call__(self, stage: str, done: int, total: int, /) -> None:
        """`done` of `total` bytes or steps of `stage` are finished; the stage's last call has `done == total`."""


def no_progress(stage: str, done: int, total: int, /) -> None:
    """The `Progress` of callers that do not care."""


@dataclass(frozen=True)
class TransformerDims:
    """Shape of a decoder-only transformer of the Qwen3 family."""

    vocab_size: int  # V
    hidden_size: int  # H
    num_layers: int
    num_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_dim: int  # D
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int  # positions the rotary embedding was made for


@dataclass(frozen=True)
class DrafterDims(TransformerDims):
    """A DFlash drafter: a block of `block_size` tokens is denoised in one pass over tapped target states."""

    block_size: int  # the bonus token and L = block_size − 1 masks
    mask_token_id: int
    tap_layers: tuple[int, ...]  # target layers whose output is tapped, M of them
    num_target_layers: int


@dataclass(frozen=True)
class Limits:
    """What an engine was built for. These are the only defaults; the command line reads them from here."""

    max_seq_len: int = 2048  # prompt and output tokens of one slot
    max_batch: int = 8  # slots
    max_tree_budget: int = 256  # B: tree nodes beside the root
    prefill_chunk: int = 256  # prompt tokens per target pass

    @property
    def max_tokens_per_pass(self) -> int:
        """Most tokens of one slot in one target pass."""
        return max(1 + self.max_tree_budget, self.prefill_chunk)

    @property
    def cache_rows(self) -> int:
        """S: rows of a slot's cache. One whole pass may be written past the last committed token."""
        return self.max_seq_len + self.max_tokens_per_pass


@dataclass(frozen=True)
class CheckpointIdentity:
    """Where a network's weights came from."""

    name: str  # hub repository or directory name
    revision: str  # hub commit, LOCAL or PACKAGED
    sha256: str  # over config.json and every weight file, in name order


@dataclass(frozen=True)
class FileEntry:
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything a runtime must know of an engine before it opens a file of it."""

    schema_version: int
    product_version: str
    backend: Literal["onnxruntime", "tensorrt", "torch"]
    precision: Literal["fp32", "fp16", "bf16", "int8"]
    name: str  # preset name or the checkpoint's directory name
    target: CheckpointIdentity
    drafter: CheckpointIdentity
    drafter_kind: Literal["dflash", "autoregressive"]
    target_dims: TransformerDims
    drafter_dims: TransformerDims  # DrafterDims when drafter_kind is dflash
    limits: Limits
    stop_token_ids: tuple[int, ...]
    chat_template_args: dict[str, Any]  # what the drafter was trained for, e.g. {"enable_thinking": false}
    toolchain: dict[str, str]  # versions of what compiled the graphs
    tensors: dict[str, dict[str, list[str]]]  # graph → inputs / outputs, in order
    files: dict[str, FileEntry]
    build_seconds: float
    plugin: dict[str, str] | None = None  # name, version, namespace, abi, sha256 for TensorRT
    golden_tau: dict[str, tuple[float, float]] = field(default_factory=dict)  # method → expected range

    @property
    def dflash(self) -> DrafterDims:
        """The drafter's dimensions; raises ArtifactError when the drafter is autoregressive."""
        if not isinstance(self.drafter_dims, DrafterDims):
            raise ArtifactError(f"engine {self.name!r} has an autoregressive drafter, not a DFlash drafter")
        return self.drafter_dims

    def to_json(self) -> str:
        """The manifest file's text: the record's fields and `digest`, the sha256 over them."""
        body = dataclasses.asdict(self)
        return json.dumps({**body, "digest": _body_digest(body)}, indent=1) + "\n"


def _body_digest(body: dict[str, Any]) -> str:
    """sha256 over a manifest's JSON, whatever its spacing and order of keys."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


_T = TypeVar("_T")


def _record(cls: type[_T], data: Any, where: str, **kinds: type) -> _T:
    """Read a frozen record from JSON data; `kinds` narrows a field's type. Raises ArtifactError naming the field."""
    if not isinstance(data, dict):
        raise ArtifactError(f"{where}: expected an object, found {data!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    optional = {
        n
        for n, f in fields.items()
        if f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
    }
    unknown, missing = sorted(data.keys() - fields.keys()), sorted(fields.keys() - data.keys() - optional)
    if unknown or missing:
        raise ArtifactError(f"{where}: unknown fields {unknown}, missing fields {missing}; rebuild the engine")
    hints = typing.get_type_hints(cls) | kinds
    return cls(**{name: _value(hints[name], value, f"{where}.{name}") for name, value in data.items()})


def _value(kind: Any, value: Any, where: str) -> Any:
    """Read one JSON value as the type `kind`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _record(kind, value, where)
    if origin is types.UnionType:  # only `X | None` is used
        return None if value is None else _value(args[0], value, where)
    if origin is dict and isinstance(value, dict):
        return {k: _value(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is list and isinstance(value, list):
        return [_value(args[0], v, f"{where}[{i}]") for i, v in enumerate(value)]
    if origin is tuple and isinstance(value, list) and (args[-1] is Ellipsis or len(args) == len(value)):
        items = [args[0]] * len(value) if args[-1] is Ellipsis else args
        return tuple(_value(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(items, value, strict=True)))
    if origin is Literal and value in args:
        return value
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind in (int, str) and type(value) is kind:
        return value
    expected = " | ".join(map(str, args)) if origin is Literal else getattr(kind, "__name__", str(kind))
    raise ArtifactError(f"{where}: expected {expected}, found {value!r}; rebuild the engine")


def parse_manifest(text: str, where: str) -> Manifest:
    """Turn manifest JSON into a `Manifest`. Raises ArtifactError that names the field at fault."""
    data = _json_object(text, where)
    if data["schema_version"] != SCHEMA_VERSION:
        raise ArtifactError(
            f"{where} has schema version {data['schema_version']}, this ddtree-trt reads version {SCHEMA_VERSION}; "
            f"rebuild with: ddtree-trt build --target {data.get('name', 'NAME')} --force"
        )
    data.pop("digest", None)  # compared by verify_files, after everything that can say more exactly what is wrong
    drafter = DrafterDims if data.get("drafter_kind") == "dflash" else TransformerDims
    return _record(Manifest, data, where, drafter_dims=drafter)


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ArtifactError(f"{where} is not valid JSON ({error}); rebuild the engine") from error
    if not isinstance(data, dict) or "schema_version" not in data:
        raise ArtifactError(f"{where} is not an engine manifest: no schema_version; rebuild the engine")
    return data


def _manifest_text(directory: Path) -> str:
    path = directory / MANIFEST
    if not directory.is_dir():
        raise ArtifactError(f"no engine at {directory}; build one with: ddtree-trt build --target tiny")
    if not path.is_file():
        raise ArtifactError(f"{directory} is not an engine directory: it has no {MANIFEST}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} cannot be read ({error}); rebuild the engine") from error


def load_manifest(directory: Path) -> Manifest:
    """Read the manifest of an engine directory. Raises ArtifactError when there is none or it cannot be used."""
    return parse_manifest(_manifest_text(directory), str(directory / MANIFEST))


def verify_files(directory: Path, manifest: Manifest, progress: Progress = no_progress) -> None:
    """Check the manifest's own digest, then size and digest of every file of the engine, before any is opened.

    Raises ArtifactError that names the file and the command that rebuilds the engine.
    """
    path = directory / MANIFEST
    rebuild = f"rebuild with: {rebuild_command(directory, manifest)}"
    body = _json_object(_manifest_text(directory), str(path))
    if body.pop("digest", None) != _body_digest(body):
        raise ArtifactError(f"{path} is damaged or was edited: its content differs from its digest; {rebuild}")
    for name in _REQUIRED_FILES.get(manifest.backend, ()):
        if name not in manifest.files:
            raise ArtifactError(f"{path} does not list {name}; {rebuild}")
    for name, entry in manifest.files.items():
        if Path(name).name != name:
            raise ArtifactError(f"{path}: file name {name!r} leaves the engine directory")
        size = _size(directory / name, rebuild)
        if size != entry.size:
            raise ArtifactError(f"{directory / name} has {size} bytes, the manifest says {entry.size}; {rebuild}")
    done, total = 0, sum(entry.size for entry in manifest.files.values())
    for name, entry in manifest.files.items():
        start = done

        def report(read: int, start: int = start) -> None:
            progress("verify files", start + read, total)

        try:
            digest = sha256_file(directory / name, report=report)
        except OSError as error:
            raise ArtifactError(f"{directory / name} cannot be read ({error.strerror}); {rebuild}") from error
        if digest != entry.sha256:
            raise ArtifactError(f"{directory / name} is damaged: its sha256 differs from the manifest's; {rebuild}")
        done += entry.size


def _size(path: Path, rebuild: str) -> int:
    if not path.is_file():
        raise ArtifactError(f"{path} is missing; {rebuild}")
    return path.stat().st_size


def sha256_file(*paths: Path, report: Callable[[int], None] = lambda read: None) -> str:
    """sha256, as hex, of a file or of several as if they were one; `report` is told the bytes read so far.

    Raises OSError.
    """
    digest, read = hashlib.sha256(), 0
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(_HASH_BLOCK):
                digest.update(block)
                read += len(block)
                report(read)
    return digest.hexdigest()


def installed_versions(*packages: str) -> dict[str, str]:
    """Versions of those of the packages that are installed, without importing any."""
    versions = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def always_causal(toolchain: Mapping[str, str]) -> bool:
    """Whether this toolchain's ONNX Runtime may be one whose attention kernel is always causal.

    A DFlash drafter compiled for such a kernel writes its block twice and runs everywhere. Compiled for the others it
    runs on those only.
    """
    version = toolchain.get("onnxruntime", "0.0")  # unknown where it was packaged under another name
    return tuple(int(part) for part in version.split(".")[:2]) < _CAUSAL_OPTION


def newest_engine() -> Path:
    """The most recently built engine under `engines/`. Raises ArtifactError with the command that builds one.

    Hidden directories are builds that run, or were killed.
    """
    found = (path for path in ENGINES.glob(f"*/{MANIFEST}") if not path.parent.name.startswith("."))
    manifests = sorted(found, key=lambda path: path.stat().st_mtime)
    if not manifests:
        raise ArtifactError(f"no engine under {ENGINES}/; build one with: ddtree-trt build --target tiny")
    return manifests[-1].parent


def rebuild_command(directory: Path, manifest: Manifest) -> str:
    """The command that builds this engine again."""
    command = f"ddtree-trt build --target {manifest.name}"
    for option, network in (("--checkpoint", manifest.target), ("--drafter", manifest.drafter)):
        command += f" {option} DIR" if network.revision == LOCAL else ""
    for name in ("max_seq_len", "max_tree_budget", "max_batch"):
        value = getattr(manifest.limits, name)
        command += f" --{name.replace('_', '-')} {value}" if value != getattr(Limits, name) else ""
    if (manifest.backend, manifest.precision) != ("onnxruntime", "fp32"):  # the defaults
        command += f" --backend {manifest.backend} --precision {manifest.precision}"
    if directory.absolute() != (ENGINES / manifest.name).absolute():
        command += f" --output {directory}"
    return f"{command} --force"
