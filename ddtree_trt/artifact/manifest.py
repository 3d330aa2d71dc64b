"""An engine's manifest: the records its JSON is made of, reading it, and checking it.

The JSON also has `digest`, a sha256 over all its other fields.
"""

import dataclasses
import hashlib
import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from ddtree_trt.artifact.backends import BACKENDS, BackendName
from ddtree_trt.artifact.files import ENGINES, HUB_ID, MANIFEST, NAME
from ddtree_trt.artifact.precisions import PRECISIONS, PrecisionName
from ddtree_trt.drafters.kind import DrafterKind
from ddtree_trt.drafters.registry import KindName, dims_record, kind_of
from ddtree_trt.errors import ArtifactError
from ddtree_trt.models.decoder import POSITIONS, Token, TransformerDims
from ddtree_trt.reading import Between, Pattern, Source, parse_json, read_json, read_record, shown

SCHEMA_VERSION = 2
AttentionName = Literal["plugin", "native"]
LOCAL = "local"  # the revision of a checkpoint that came from a path the user named
PACKAGED = "packaged"  # the revision of a checkpoint inside a Python package, this one or one that a preset names

SLOTS = Between(1, 1024)
BUDGETS = Between(1, 4096)
CHUNK = Between(1, 1 << 16)
INTERVAL = Between(0, POSITIONS.highest)
CPU_CACHE_UNIT = 64  # UNIT of cpp_plugins/include/ddtree/cpu_attention.h
_SHA256 = Pattern("[0-9a-f]{64}", "a sha256 in lower-case hex")


@dataclass(frozen=True)
class Limits:
    """What an engine was built for. These are the only defaults; the command line reads them from here."""

    max_seq_len: Annotated[int, POSITIONS] = 2048  # prompt and output tokens of one slot
    max_batch: Annotated[int, SLOTS] = 8  # slots
    max_tree_budget: Annotated[int, BUDGETS] = 256  # B: tree nodes beside the root
    prefill_chunk: Annotated[int, CHUNK] = 256  # prompt tokens per target pass
    # Of a hybrid: tokens between the states that a slot keeps for later prompts; 0: that of the prompt's end only.
    snapshot_every: Annotated[int, INTERVAL] = 0

    @property
    def max_tokens_per_pass(self) -> int:
        """Most tokens of one slot in one target pass."""
        return max(1 + self.max_tree_budget, self.prefill_chunk)

    @property
    def snapshots(self) -> int:
        """Most states of a hybrid that a slot keeps beside its own."""
        return 1 + (self.max_seq_len // self.snapshot_every if self.snapshot_every else 0)

    @property
    def cache_rows(self) -> int:
        """S: rows of a slot's cache. One whole pass may be written past the last committed token."""
        return self.max_seq_len + self.max_tokens_per_pass


def cpu_cache_rows(limits: Limits) -> int:
    """Rows of a slot's cache on the CPU, which come in units of them."""
    return -(-limits.cache_rows // CPU_CACHE_UNIT) * CPU_CACHE_UNIT


def cpu_cache_bytes(head_dim: int, limits: Limits, precision: PrecisionName) -> int:
    """Bytes of a key head's cache of one layer and slot on the CPU: keys, whose elements fill words of 4 bytes, and
    values, whose rows are padded to 16."""
    size = PRECISIONS[precision].cache_bytes
    return cpu_cache_rows(limits) * (-(-head_dim * size // 4) * 4 + -(-head_dim // 16) * 16 * size)


@dataclass(frozen=True)
class CheckpointIdentity:
    """Where a network's weights came from."""

    name: str  # hub repository, directory name or file name
    revision: str  # hub commit, LOCAL or PACKAGED
    sha256: Annotated[str, _SHA256]  # over config.json and every weight file in name order, or over the GGUF file


@dataclass(frozen=True)
class FileEntry:
    size: Annotated[int, Between(0, 1 << 62)]
    sha256: Annotated[str, _SHA256]


_Tau = Annotated[float, Between(0, 1e6)]


@dataclass(frozen=True)
class Manifest:
    """Everything a runtime must know of an engine before it opens its other files."""

    schema_version: int
    product_version: str
    backend: BackendName
    precision: PrecisionName
    name: Annotated[str, NAME]  # preset name or the checkpoint's directory name
    target: CheckpointIdentity
    drafter: CheckpointIdentity
    drafter_kind: KindName
    target_dims: TransformerDims
    drafter_dims: TransformerDims  # of the record that drafter_kind has
    limits: Limits
    stop_token_ids: tuple[Token, ...]
    chat_template_args: dict[str, Any]  # what the drafter was trained for, e.g. {"enable_thinking": false}
    # Versions of what compiled the graphs, and what it was told: of plans, under the backend's name its
    # version; for TensorRT the machine ("cuda", "driver", "sm", "gpu"); for TensorRT for
    # RTX the kinds of GPU the plans are for ("gpus": "sm89 sm120").
    toolchain: dict[str, str]
    tensors: dict[str, dict[str, list[str]]]  # graph → inputs / outputs, in order
    files: dict[Annotated[str, NAME], FileEntry]
    build_seconds: Annotated[float, Between(0, 1e9)]
    plugin: dict[str, str] | None = None  # name, version, namespace, abi, sha256; None: no plan has a plugin layer
    golden_tau: dict[str, tuple[_Tau, _Tau]] = field(default_factory=dict)  # method → expected range

    @property
    def drafting(self) -> DrafterKind:
        return kind_of(self.drafter_dims)

    @property
    def attention(self) -> AttentionName | None:
        """What computes attention in the plans of a TensorRT or a TensorRT for RTX: our plugin, or layers of their own.
        None for the other backends. Every engine with a plan of before there was a choice names its plugin."""
        if not BACKENDS[self.backend].plans:
            return None
        return "native" if self.plugin is None else "plugin"

    def to_json(self) -> str:
        """The manifest file's text: the record's fields and `digest`, the sha256 over them."""
        dims = {"target_dims": self.target_dims.stated(), "drafter_dims": self.drafter_dims.stated()}
        body = {**dataclasses.asdict(self), **dims}
        return json.dumps({**body, "digest": _body_digest(body)}, indent=1) + "\n"


def _body_digest(body: dict[str, Any]) -> str:
    """sha256 over a manifest's JSON, whatever its spacing and order of keys."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def parse_manifest(text: str | Path, where: str = "") -> Manifest:
    """The `Manifest` in a JSON text, which messages call `where`, or in a file. Raises ArtifactError that names the
    wrong field."""
    body, source = _body(text, where)
    if (version := body["schema_version"]) != SCHEMA_VERSION:
        name = body.get("name")
        usable = isinstance(name, str) and re.fullmatch(NAME.expression, name)  # can be copied into a command
        raise ArtifactError(
            f"{source.where} has schema version {shown(version)}, this ddtree-trt reads version {SCHEMA_VERSION}; "
            f"rebuild with: ddtree-trt build --target {name if usable else 'NAME'} --force"
        )
    body.pop("digest", None)  # compared by verify_files, after everything that can say more exactly what is wrong
    manifest = read_record(Manifest, body, source, drafter_dims=dims_record(body.get("drafter_kind")))
    if (problem := _contradiction(manifest)) is not None:
        raise source.fault(problem)
    return manifest


def _body(given: str | Path, where: str = "") -> tuple[dict[str, Any], Source]:
    if isinstance(given, Path) and not given.is_file():
        raise ArtifactError(_no_engine(given.parent))
    source = Source(where or str(given), ArtifactError, "rebuild the engine")
    data = read_json(given, source) if isinstance(given, Path) else parse_json(given, source)
    if not isinstance(data, dict) or "schema_version" not in data:
        raise source.fault("it is not an engine manifest: no schema_version")
    return data, source


def _contradiction(m: Manifest) -> str | None:
    """The first contradiction between fields, each of which is within its own range; None where there is none."""
    backend = BACKENDS[m.backend]
    if m.precision not in backend.precisions:
        return f"precision is {m.precision}, which the {m.backend} backend does not compute in"
    if m.plugin is not None and "plugin" not in backend.attentions:
        return f"it names a plugin, and {backend.title} takes none"
    for name, dims in (("target_dims", m.target_dims), ("drafter_dims", m.drafter_dims)):
        if problem := dims.contradiction():
            return f"{name}.{problem}"
    if problem := m.drafting.contradiction():
        return f"drafter_dims: {problem}"
    if m.drafting.borrowed_rows:
        return "drafter_dims.draft_vocab_size needs own_head"
    if problem := m.drafting.misfit(m.target_dims):
        return f"the drafter does not fit the target: {problem}"
    if late := [token for token in m.stop_token_ids if token >= m.target_dims.vocab_size]:
        return f"stop_token_ids {late[:3]} are not below vocab_size {m.target_dims.vocab_size}"
    positions = min(m.target_dims.max_positions, m.drafter_dims.max_positions)
    if m.limits.max_seq_len > positions:
        return f"limits.max_seq_len {m.limits.max_seq_len} is more than the models' {positions} positions"
    return None


def _no_engine(given: Path) -> str:
    name = shlex.quote(str(given))
    build = f"ddtree-trt build --checkpoint {name} --drafter DRAFTER"
    if (given / "config.json").is_file() or (given.suffix == ".gguf" and given.is_file()):
        return f"{given} is a checkpoint, not an engine directory; build one of it with: {build}"
    if given.exists():
        return f"{given} is not an engine directory: it has no {MANIFEST}; give one that ddtree-trt build wrote"
    advice = f"one there with: ddtree-trt build --target tiny --output {name}"
    if given.parent == ENGINES and re.fullmatch(NAME.expression, given.name):
        advice = f"one with: ddtree-trt build --target {given.name}"
    elif HUB_ID.fullmatch(str(given)) and not given.parent.exists():
        advice = f"one of that model of the Hugging Face hub with: {build}"
    return f"no engine at {given}; build {advice}"


def load_manifest(directory: Path) -> Manifest:
    """Read the manifest of an engine directory. Raises ArtifactError when there is none or it cannot be used."""
    return parse_manifest(directory / MANIFEST)


def digest_holds(directory: Path) -> bool:
    """Whether a manifest file has the content its digest was made of. Raises ArtifactError when it cannot be read."""
    body, _ = _body(directory / MANIFEST)
    return bool(body.pop("digest", None) == _body_digest(body))
