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
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, cast

# The aliases export the names again: the records of a manifest are all found here.
from ddtree_trt.artifact.dimensions import DrafterDims as DrafterDims
from ddtree_trt.artifact.dimensions import Limits as Limits
from ddtree_trt.artifact.dimensions import Token
from ddtree_trt.artifact.dimensions import TransformerDims as TransformerDims
from ddtree_trt.errors import ArtifactError
from ddtree_trt.models.drafters.kinds import DrafterKind, KindName, dims_record, kind_of, misfit
from ddtree_trt.reading import Between, Pattern, Source, parse_json, printable, read_json, read_record, shown

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
# What each backend can compute in; what `build` offers may be less.
PRECISIONS = {
    "onnxruntime": ("fp32", "int8"),
    "torch": ("fp32", "bf16", "fp16"),
    "tensorrt": ("bf16", "fp16", "fp32"),
}
_CAUSAL_OPTION = (1, 30)  # the first ONNX Runtime whose attention kernel takes `causal=0`; Python 3.10 has none of them

_BYTES, _SECONDS, _TOKENS_PER_ROUND = Between(0, 1 << 62), Between(0, 1e9), Between(0, 1e6)
_SHA256 = Pattern("[0-9a-f]{64}", "a sha256 in lower-case hex")
# Of engines and of files in them: nothing that leaves a directory, looks like an option, or means anything to a shell.
NAME = Pattern("[A-Za-z0-9][A-Za-z0-9._-]{0,199}", "a name of letters, digits, '.', '_' and '-'")


class Progress(Protocol):
    """Told how far long work is. Called often and from the working thread: it must be cheap and must not raise."""

    def __call__(self, stage: str, done: int, total: int, /) -> None:
        """`done` of `total` bytes or steps of `stage` are finished; the stage's last call has `done == total`."""


def no_progress(stage: str, done: int, total: int, /) -> None:
    """The `Progress` of callers that do not care."""


@dataclass(frozen=True)
class CheckpointIdentity:
    """Where a network's weights came from."""

    name: str  # hub repository or directory name
    revision: str  # hub commit, LOCAL or PACKAGED
    sha256: Annotated[str, _SHA256]  # over config.json and every weight file, in name order


@dataclass(frozen=True)
class FileEntry:
    size: Annotated[int, _BYTES]
    sha256: Annotated[str, _SHA256]


_Tau = Annotated[float, _TOKENS_PER_ROUND]


@dataclass(frozen=True)
class Manifest:
    """Everything a runtime must know of an engine before it opens a file of it."""

    schema_version: int
    product_version: str
    backend: Literal["onnxruntime", "tensorrt", "torch"]
    precision: Literal["fp32", "fp16", "bf16", "int8"]
    name: Annotated[str, NAME]  # preset name or the checkpoint's directory name
    target: CheckpointIdentity
    drafter: CheckpointIdentity
    drafter_kind: KindName
    target_dims: TransformerDims
    drafter_dims: TransformerDims  # of the record that drafter_kind has
    limits: Limits
    stop_token_ids: tuple[Token, ...]
    chat_template_args: dict[str, Any]  # what the drafter was trained for, e.g. {"enable_thinking": false}
    toolchain: dict[str, str]  # versions of what compiled the graphs
    tensors: dict[str, dict[str, list[str]]]  # graph → inputs / outputs, in order
    files: dict[Annotated[str, NAME], FileEntry]
    build_seconds: Annotated[float, _SECONDS]
    plugin: dict[str, str] | None = None  # name, version, namespace, abi, sha256 for TensorRT
    golden_tau: dict[str, tuple[_Tau, _Tau]] = field(default_factory=dict)  # method → expected range

    @property
    def drafting(self) -> DrafterKind:
        """What the engine's drafter needs and offers."""
        return kind_of(self.drafter_dims)

    @property
    def dflash(self) -> DrafterDims:
        """The drafter's dimensions; raises ArtifactError when the drafter is autoregressive."""
        if self.drafter_kind != "dflash":
            raise ArtifactError(f"engine {self.name!r} has an {self.drafting.title}, not a DFlash drafter")
        return cast("DrafterDims", self.drafter_dims)

    def to_json(self) -> str:
        """The manifest file's text: the record's fields and `digest`, the sha256 over them."""
        body = dataclasses.asdict(self)
        return json.dumps({**body, "digest": _body_digest(body)}, indent=1) + "\n"


def _body_digest(body: dict[str, Any]) -> str:
    """sha256 over a manifest's JSON, whatever its spacing and order of keys."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def parse_manifest(text: str, where: str) -> Manifest:
    """Turn manifest JSON into a `Manifest`. Raises ArtifactError that names the field at fault."""
    source = _source(where)
    return _parse(parse_json(text, source), source)


def _source(where: str) -> Source:
    return Source(where, ArtifactError, "rebuild the engine")


def _parse(data: Any, source: Source) -> Manifest:
    body = _body(data, source)
    if body["schema_version"] != SCHEMA_VERSION:
        raise ArtifactError(
            f"{source.where} has schema version {shown(body['schema_version'])}, this ddtree-trt reads version "
            f"{SCHEMA_VERSION}; rebuild with: ddtree-trt build --target {_given_name(body)} --force"
        )
    body.pop("digest", None)  # compared by verify_files, after everything that can say more exactly what is wrong
    manifest = read_record(Manifest, body, source, drafter_dims=dims_record(body.get("drafter_kind")))
    if (problem := _contradiction(manifest)) is not None:
        raise source.fault(problem)
    return manifest


def _given_name(body: Mapping[str, Any]) -> str:
    """The name in a manifest of another version, if it can be copied into a command."""
    name = body.get("name")
    return name if isinstance(name, str) and re.fullmatch(NAME.expression, name) else "NAME"


def _body(data: Any, source: Source) -> dict[str, Any]:
    if not isinstance(data, dict) or "schema_version" not in data:
        raise source.fault("it is not an engine manifest: no schema_version")
    return dict(data)


def _contradiction(m: Manifest) -> str | None:
    """What in a manifest cannot be true together; each field is right by itself."""
    if m.precision not in PRECISIONS[m.backend]:
        return f"precision is {m.precision}, which the {m.backend} backend does not compute in"
    for name, dims in (("target_dims", m.target_dims), ("drafter_dims", m.drafter_dims)):
        if dims.num_heads % dims.num_kv_heads:
            return f"{name}.num_heads {dims.num_heads} is not a multiple of num_kv_heads {dims.num_kv_heads}"
    if problem := misfit(m.target_dims, m.drafter_dims):
        return f"the drafter does not fit the target: {problem}"
    if not (m.drafting.language_model or m.drafting.tap_layers):
        return "drafter_dims.tap_layers is empty"
    if late := [token for token in m.stop_token_ids if token >= m.target_dims.vocab_size]:
        return f"stop_token_ids {late[:3]} are not below vocab_size {m.target_dims.vocab_size}"
    positions = min(m.target_dims.max_positions, m.drafter_dims.max_positions)
    if m.limits.max_seq_len > positions:
        return f"limits.max_seq_len {m.limits.max_seq_len} is more than the models' {positions} positions"
    return None


def _read_manifest(directory: Path) -> Any:
    path = directory / MANIFEST
    if not directory.is_dir():
        raise ArtifactError(f"no engine at {directory}; build one with: ddtree-trt build --target tiny")
    if not path.is_file():
        raise ArtifactError(f"{directory} is not an engine directory: it has no {MANIFEST}")
    return read_json(path, _source(str(path)))


def load_manifest(directory: Path) -> Manifest:
    """Read the manifest of an engine directory. Raises ArtifactError when there is none or it cannot be used."""
    return _parse(_read_manifest(directory), _source(str(directory / MANIFEST)))


def verify_files(directory: Path, manifest: Manifest, progress: Progress = no_progress) -> None:
    """Check the manifest's own digest, then size and digest of every file of the engine, before any is opened.

    Raises ArtifactError that names the file and the command that rebuilds the engine.
    """
    path = directory / MANIFEST
    rebuild = f"rebuild with: {rebuild_command(directory, manifest)}"
    body = _body(_read_manifest(directory), _source(str(path)))
    if body.pop("digest", None) != _body_digest(body):
        raise ArtifactError(f"{path} is damaged or was edited: its content differs from its digest; {rebuild}")
    for name in _REQUIRED_FILES.get(manifest.backend, ()):
        if name not in manifest.files:
            raise ArtifactError(f"{path} does not list {name}; {rebuild}")
    for name, entry in manifest.files.items():
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
    found = re.match(r"(\d{1,9})\.(\d{1,9})", toolchain.get("onnxruntime", ""))
    # Unknown where it was packaged under another name.
    return found is None or (int(found[1]), int(found[2])) < _CAUSAL_OPTION


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
    """The command that builds this engine again, quoted for a shell."""
    words = ["ddtree-trt", "build", "--target", manifest.name]
    for option, network in (("--checkpoint", manifest.target), ("--drafter", manifest.drafter)):
        words += [option, "DIR"] if network.revision == LOCAL else []
    for name in ("max_seq_len", "max_tree_budget", "max_batch"):
        value = getattr(manifest.limits, name)
        words += [f"--{name.replace('_', '-')}", str(value)] if value != getattr(Limits, name) else []
    for name, value in manifest.chat_template_args.items():
        words += ["--chat-template-arg", f"{name}={json.dumps(value)}"]
    if (manifest.backend, manifest.precision) != ("onnxruntime", "fp32"):  # the defaults
        words += ["--backend", manifest.backend, "--precision", manifest.precision]
    if directory.absolute() != (ENGINES / manifest.name).absolute():
        words += ["--output", str(directory)]
    return printable(shlex.join([*words, "--force"]))
