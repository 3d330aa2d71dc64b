"""The checkpoints an engine was built from, for peers that load them themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.bench.settings import BenchSettings
from ddtree_trt.build.checkpoint.paths import is_gguf
from ddtree_trt.build.presets import PRESETS
from ddtree_trt.build.sources import Source, locate, named_source
from ddtree_trt.errors import UsageError
from ddtree_trt.trtllm_export import check_same


@dataclass(frozen=True)
class Checkpoints:
    """Directories in Hugging Face format, or GGUF files."""

    target: Path
    drafter: Path
    assistant: Path | None  # an autoregressive drafter, for assisted generation


def find_checkpoints(manifest: Manifest, settings: BenchSettings) -> Checkpoints:
    """The engine's checkpoints: those the settings name, else its preset's.

    Raises UsageError when there are none, or when they are not the ones the engine was built from.
    """
    preset = PRESETS.get(manifest.name)
    target = _locate(settings.checkpoint, preset.target if preset else None, "--checkpoint")
    drafter = _locate(settings.drafter, preset.drafter if preset else None, "--drafter")
    check_same(target, manifest.target, "--checkpoint")
    check_same(drafter, manifest.drafter, "--drafter")
    assistant = Path(settings.assistant) if settings.assistant else None
    if assistant is None and manifest.drafting.drafts == "tokens":
        assistant = drafter
    return Checkpoints(target, drafter, assistant)


def _locate(given: str | None, source: Source | None, option: str) -> Path:
    """What the user named, else the preset's, downloaded if need be. Raises UsageError where there is neither."""
    if given is not None:
        source = named_source(given)
    if source is None:
        raise UsageError(f"peers need the checkpoint this engine was built from; give it as {option} PATH")
    return locate(source, option).path


def pretrained(path: Path) -> dict[str, str]:
    """What transformers' `from_pretrained` is given to load a checkpoint."""
    names = {"pretrained_model_name_or_path": str(path)}
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name} if is_gguf(path) else names
