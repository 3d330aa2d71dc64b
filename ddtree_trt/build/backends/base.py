"""Interface of a backend's part of a build, called by `compile.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ddtree_trt.artifact.backends import TENSORRT, TENSORRT_RTX, Backend
from ddtree_trt.artifact.manifest import AttentionName, Limits
from ddtree_trt.artifact.precisions import PrecisionName
from ddtree_trt.artifact.progress import Progress
from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.records import option

if TYPE_CHECKING:
    from ddtree_trt.build.checkpoint.reader import Checkpoint

Attention = Literal["auto", "plugin", "native"]


@dataclass(frozen=True, kw_only=True)
class BuilderOptions:
    """Options of the builders of plans; no other backend has any."""

    gpus: tuple[str, ...] = option(
        (),
        "TensorRT for RTX: a kind of GPU to compile for, as in sm89. May be repeated. Default: every kind.",
        "smNN",
        flag="--gpu",
        only=(TENSORRT_RTX.name,),
    )
    attention: Attention = option(
        "auto",
        "TensorRT: our plugin, or its own layers, which need no `make plugins`. auto: the plugin where it is built.",
        "auto|plugin|native",
        only=(TENSORRT.name,),
    )


@dataclass(frozen=True)
class Inputs:
    target: Checkpoint
    drafter: Checkpoint
    limits: Limits
    precision: PrecisionName

    @property
    def networks(self) -> tuple[TransformerDims, TransformerDims]:
        return self.target.dims, self.drafter.dims


@dataclass(frozen=True)
class Written:
    """The manifest's fields that a backend fills when it has written its files."""

    tensors: dict[str, dict[str, list[str]]]  # graph → inputs / outputs, in order
    toolchain: dict[str, str]
    plugin: dict[str, str] | None = None
    notes: tuple[str, ...] = ()  # lines for the user


def lacking(backend: Backend, networks: Iterable[TransformerDims]) -> str | None:
    """What of these networks a backend does not compute in any precision; None where there is nothing."""
    networks = tuple(networks)
    if kind := next((kind for kind in map(kind_of, networks) if not kind.has(backend.half)), None):
        return f"{kind.title}s"
    return "mixtures of experts" if not backend.experts and any(dims.experts for dims in networks) else None


class BackendBuild(ABC):
    """A backend's part of a build, made by `choice.backend_build`. Unless it says otherwise it builds on any machine,
    every network, and no plans."""

    backend: Backend

    def __init__(self, options: BuilderOptions) -> None:
        self.options = options

    @property
    def precisions(self) -> tuple[PrecisionName, ...]:
        """Those it builds in; the first is what `auto` means."""
        return self.backend.builds

    def check_machine(self) -> None:
        """Raises MissingDependency or BuildError where this machine cannot build."""
        return

    def check(self, networks: Iterable[TransformerDims], precision: PrecisionName) -> None:
        """Raises UsageError for networks that it does not compute in that precision, before any work."""
        return

    def attention(self, networks: Iterable[TransformerDims]) -> AttentionName | None:
        """What computes the attention of their plans; None for a backend without plans."""
        return None

    @abstractmethod
    def write(self, directory: Path, inputs: Inputs, progress: Progress) -> Written:
        """Write the backend's files into `directory`. Raises BuildError, or OSError when the disk is full."""
