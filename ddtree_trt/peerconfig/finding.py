"""Where another engine finds the checkpoints that an engine was built from."""

from __future__ import annotations

from ddtree_trt.artifact.manifest import LOCAL, PACKAGED, CheckpointIdentity
from ddtree_trt.bench.pairs.checkpoints import check_same
from ddtree_trt.build.checkpoint.paths import GGUF, is_gguf
from ddtree_trt.build.sources import PackagedSource, locate, named_source
from ddtree_trt.errors import UsageError
from ddtree_trt.peerconfig.pair import Model


def find_model(identity: CheckpointIdentity, given: str | None, option: str) -> Model:
    """Where another engine finds a checkpoint: at `given`, the value of `option`, else where the manifest says.

    Raises UsageError where neither says it, for a GGUF file, and where `given` is not what the engine was built from.
    """
    if given is not None:
        found = locate(named_source(given), option)
        if is_gguf(found.path):
            raise _gguf(str(found.path), option)
        check_same(found.path, identity, option)
        return Model(str(found.path.resolve())) if found.revision == LOCAL else Model(found.name, found.revision)
    if identity.name.endswith(GGUF):
        raise _gguf(identity.name, option)
    if identity.revision == LOCAL:
        raise UsageError(
            f"this engine was built from a local directory called {identity.name!r}, and an engine keeps no copy of "
            f"it; give it as {option} DIR"
        )
    if identity.revision != PACKAGED:
        return Model(identity.name, identity.revision)
    directory = PackagedSource(identity.name).directory
    if not directory.is_dir():
        raise UsageError(f"{identity.name} is not in this installation of ddtree-trt; give a copy as {option} DIR")
    return Model(str(directory.resolve()))


def _gguf(name: str, option: str) -> UsageError:
    return UsageError(
        f"{name} is a GGUF file, which the other engines do not run beside a drafter; build the engine from a "
        f"checkpoint in Hugging Face's layout (ddtree-trt build {option} DIR) and export that one"
    )
