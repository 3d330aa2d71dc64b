"""Check that an engine's files are those that were built.

The digests of a large engine take ten seconds and more, too long for every opening, so what was checked is recorded. A
file is taken for the one that was checked while device, inode, size and both times are as they were and the manifest
names the same digest: whatever rewrites a file moves its ctime, which no program can set, and a copy has another inode.
Bits that decay on a disk are found by `verify_files`, which `ddtree-trt inspect` calls.
"""

import json
import shlex
from contextlib import suppress
from pathlib import Path

from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.artifact.files import ENGINES, MANIFEST, TOKENIZER_FILES, VERIFIED, sha256_files, write_atomically
from ddtree_trt.artifact.manifest import LOCAL, PACKAGED, Manifest, digest_holds
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.errors import ArtifactError
from ddtree_trt.reading import printable


def rebuild_command(directory: Path, manifest: Manifest, *gpus: str) -> str:
    """The command that builds this engine again, quoted for a shell; plans of TensorRT for RTX for `gpus`, too."""
    words = ["ddtree-trt", "build", "--target", manifest.name]
    for option, network in (("--checkpoint", manifest.target), ("--drafter", manifest.drafter)):
        if network.revision == LOCAL:
            words += [option, "FILE.gguf" if network.name.endswith(".gguf") else "DIR"]
        elif network.revision != PACKAGED:
            words += [option, f"{network.name}@{network.revision}"]
    for name in ("max_seq_len", "max_tree_budget", "max_batch", "snapshot_every"):  # presets differ in the first three
        value = getattr(manifest.limits, name)
        words += [f"--{name.replace('_', '-')}", str(value)] if value else []
    for name, value in manifest.chat_template_args.items():
        words += ["--chat-template-arg", f"{name}={json.dumps(value)}"]
    # Always named: what a build takes by itself depends on the machine.
    backend = BACKENDS[manifest.backend]
    words += ["--backend", backend.name, "--precision", manifest.precision]
    if backend.portable:
        for kind in dict.fromkeys([*manifest.toolchain.get("gpus", "").split(), *gpus]):
            words += ["--gpu", kind]
    if len(backend.attentions) > 1 and manifest.attention == "native":
        words += ["--attention", "native"]
    if directory.absolute() != (ENGINES / manifest.name).absolute():
        words += ["--output", str(directory)]
    return printable(shlex.join([*words, "--force"]))


def verify_files(directory: Path, manifest: Manifest, progress: Progress = no_progress) -> None:
    """Check the manifest's own digest, then size and digest of every file of the engine, before any is opened. Raises
    ArtifactError that names the file and the command that rebuilds the engine."""
    rebuild = _check_listed(directory, manifest)
    try:
        for path, _, digest in sha256_files("verify files", [directory / name for name in manifest.files], progress):
            if digest != manifest.files[path.name].sha256:
                raise ArtifactError(f"{path} is damaged: its sha256 differs from the manifest's; {rebuild}")
    except OSError as error:
        raise ArtifactError(f"{error.filename} cannot be read ({error.strerror}); {rebuild}") from error


def verify_for_opening(directory: Path, manifest: Manifest, progress: Progress = no_progress) -> None:
    """`verify_files`, which reads nothing where the files were checked before and have not changed since."""
    _check_listed(directory, manifest)
    # Before they are read: what changes meanwhile is another file than the record's.
    states = {name: ((directory / name).stat(), entry.sha256) for name, entry in manifest.files.items()}
    files = {n: [sha, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for n, (s, sha) in states.items()}
    with suppress(OSError, ValueError, RecursionError):  # no record, or none of ours
        if json.loads((directory / VERIFIED).read_bytes()) == files:
            return
    verify_files(directory, manifest, progress)
    with suppress(OSError):  # a read-only directory: its files are read at every opening
        write_atomically(directory / VERIFIED, json.dumps(files, indent=1) + "\n")


def _check_listed(directory: Path, manifest: Manifest) -> str:
    """Check the manifest's own digest, and that the engine's files are listed, exist and have their sizes; returns the
    advice for errors about them. Raises ArtifactError."""
    path = directory / MANIFEST
    rebuild = f"rebuild with: {rebuild_command(directory, manifest)}"
    if not digest_holds(directory):
        raise ArtifactError(f"{path} is damaged or was edited: its content differs from its digest; {rebuild}")
    for name in (*BACKENDS[manifest.backend].files, *TOKENIZER_FILES):
        if name not in manifest.files:
            raise ArtifactError(f"{path} does not list {name}; {rebuild}")
    for name, entry in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise ArtifactError(f"{path} is missing; {rebuild}")
        if (size := path.stat().st_size) != entry.size:
            raise ArtifactError(f"{path} has {size} bytes, the manifest says {entry.size}; {rebuild}")
    return rebuild
