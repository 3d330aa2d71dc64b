"""The files of an engine directory: their names, their digests, where engines are found, and writing files whole or not
at all."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ddtree_trt.artifact.progress import Progress
from ddtree_trt.errors import ArtifactError
from ddtree_trt.reading import Pattern

MANIFEST = "manifest.json"
TARGET_GRAPH = "target.onnx"
DRAFTER_GRAPH = "drafter.onnx"
WEIGHTS = "weights.bin"
TARGET_PLAN = "target.plan"
DRAFTER_PLAN = "drafter.plan"
COMPACTION_PLAN = "compaction.plan"
SHARED_WEIGHTS = "shared.safetensors"  # the tables both plans read
TORCH_WEIGHTS = "weights.safetensors"
KERNEL_CACHE = "kernels.cache"  # compiled by TensorRT for RTX
EXAMPLES = "examples.json"  # prompts that the engine answers well; not every engine has them
PROFILE = "profile.json"  # measured latencies
EXPORT = "export.json"  # of a model that export-triton wrote, two folders above its engine
VERIFIED = "verified.json"  # that the files were checked, and what they were then
# Added when an engine is opened; not in a manifest's `files`: another machine has its own.
OF_THIS_MACHINE = (KERNEL_CACHE, PROFILE, VERIFIED)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
CHAT_TEMPLATE = "chat_template.jinja"
OPTIONAL_TOKENIZER_FILES = (CHAT_TEMPLATE, "special_tokens_map.json", "added_tokens.json")
ENGINES = Path("engines")  # where engines go, and are looked for, when no directory is named
_HASH_BLOCK = 4 << 20
# Names of engines and of their files: none leaves a directory, looks like an option, or means anything to a shell.
NAME = Pattern("[A-Za-z0-9][A-Za-z0-9._-]{0,199}", "a name of letters, digits, '.', '_' and '-'")

# A repository of the Hugging Face hub, with a revision if wanted.
HUB_ID = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)


def sha256_file(*paths: Path, report: Callable[[int], None] = lambda read: None) -> str:
    """sha256, as hex, of a file or several as if one; `report` gets the bytes read so far. Raises OSError."""
    digest, read = hashlib.sha256(), 0
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(_HASH_BLOCK):
                digest.update(block)
                read += len(block)
                report(read)
    return digest.hexdigest()


def sha256_files(stage: str, paths: Sequence[Path], progress: Progress) -> Iterator[tuple[Path, int, str]]:
    """Each file with its size and its sha256, as hex. Raises OSError."""
    sizes = [path.stat().st_size for path in paths]
    total, done = sum(sizes), 0
    for path, size in zip(paths, sizes, strict=True):

        def report(read: int, done: int = done) -> None:
            progress(stage, done + read, total)

        yield path, size, sha256_file(path, report=report)
        done += size


def newest_engine() -> Path:
    """The most recently built engine under `engines/`. Raises ArtifactError with the command that builds one. Hidden
    directories are left out: they are builds in progress, or killed ones."""
    found = (path for path in ENGINES.glob(f"*/{MANIFEST}") if not path.parent.name.startswith("."))
    manifests = sorted(found, key=lambda path: path.stat().st_mtime)
    if not manifests:
        raise ArtifactError(f"no engine under {ENGINES}/; build one with: ddtree-trt build --target tiny")
    return manifests[-1].parent


def temporary_sibling(path: Path) -> Path:
    """A new hidden name in the directory of `path`, with the process id: `.NAME.tmp-PID-RANDOM`."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}-{os.urandom(4).hex()}")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file, text in UTF-8, with the permissions of the umask; it replaces an existing one. Raises OSError; then
    an existing file is unchanged, and no temporary file is left."""
    temporary = temporary_sibling(path)
    try:
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
