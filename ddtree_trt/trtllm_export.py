"""What TensorRT-LLM needs to run an engine's pair with its own DFlash: `ddtree-trt export-trtllm`.

It is a file for `trtllm-serve --config`, whose keys are fields of TensorRT-LLM's `TorchLlmArgs`.
"""

import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ddtree_trt import __version__
from ddtree_trt.artifact.manifest import LOCAL, PACKAGED, CheckpointIdentity, Manifest, load_manifest
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.build.sources import GGUF, PackagedSource, is_gguf, locate, named_source
from ddtree_trt.errors import UsageError

RELEASE = "1.4.0rc1"  # whose sources the names are from
SPECULATIVE = "speculative_config"

_HEAD = """\
# Written by ddtree-trt {version} for the pair of the engine {name}: the target with the drafter's chain (DFlash). Names
# are those of TensorRT-LLM {release}; the authors of ddtree-trt did not run it. DFlash is in its PyTorch backend, as
# far as its documents say in 1.3.0rc27 and later pre-releases. Without its last field the target runs alone:
#   trtllm-serve {target} --config THIS_FILE --port 8000
"""
_REVISION = """\
# It takes the drafter's newest revision. The engine was built from {revision}; to run that one:
#   hf download {name} --revision {revision} --local-dir drafter
# and set speculative_model to that directory.
"""
_TEMPLATE = """\
# The drafter was trained with these arguments of the chat template; send them with every chat:
#   "chat_template_kwargs": {arguments}
"""


class Model(NamedTuple):
    """A checkpoint by the name that TensorRT-LLM loads it by."""

    name: str  # an absolute path, or a repository of the Hugging Face hub
    revision: str | None = None  # a commit of the hub's repository; None for a path


def export_pair(engine_dir: Path, *, checkpoint: str | None = None, drafter: str | None = None) -> str:
    """The file's text. `checkpoint` and `drafter` are paths or ids of the hub. Raises UsageError for a pair that cannot
    be exported, and ArtifactError for an engine that cannot be read."""
    manifest = load_manifest(engine_dir)
    target = _find_model(manifest.target, checkpoint, "--checkpoint")
    draft = _find_model(manifest.drafter, drafter, "--drafter")
    config = settings(manifest, target, draft)
    head = _HEAD.format(version=__version__, release=RELEASE, name=manifest.name, target=shlex.quote(target.name))
    if draft.revision is not None:
        head += _REVISION.format(name=draft.name, revision=draft.revision)
    if manifest.chat_template_args:
        head += _TEMPLATE.format(arguments=json.dumps(dict(manifest.chat_template_args)))
    return head + yaml.safe_dump(config, sort_keys=False)


def settings(manifest: Manifest, target: Model, drafter: Model) -> dict[str, Any]:
    """The configuration. Raises UsageError for a drafter that DFlash of TensorRT-LLM does not compute."""
    if manifest.drafter_kind != "dflash":
        raise UsageError(
            f"engine {manifest.name!r} has an {manifest.drafting.title}; exports are for DFlash drafters, whose chain "
            "TensorRT-LLM then runs"
        )
    if features := manifest.drafting.dims.features():
        raise UsageError(
            f"the drafter of {manifest.name!r} has {', '.join(features)}, which DFlash of TensorRT-LLM {RELEASE} is "
            "not known to compute: its tokens could be accepted less often without an error; no export is written"
        )
    precision, limits = PRECISIONS[manifest.precision], manifest.limits
    return {
        **({} if target.revision is None else {"revision": target.revision}),
        # The engine's type if it has 16 bits, else the one that the checkpoint is stored in.
        "dtype": precision.dtype if precision.half else "auto",
        "max_seq_len": limits.max_seq_len,
        "max_batch_size": limits.max_batch,
        SPECULATIVE: {
            "decoding_type": "DFlash",
            "max_draft_len": manifest.drafting.dims.draft_length,
            "speculative_model": drafter.name,
        },
    }


def check_same(directory: Path, expected: CheckpointIdentity, option: str) -> None:
    """Raises UsageError where the checkpoint is not the one the engine was built from."""
    found = load_checkpoint(directory).identify().sha256
    if found != expected.sha256:
        raise UsageError(
            f"{option} {directory} is not what the engine was built from: its sha256 begins with {found[:12]}, the "
            f"engine's {expected.name} with {expected.sha256[:12] or 'nothing'}; give the same checkpoint"
        )


def _find_model(identity: CheckpointIdentity, given: str | None, option: str) -> Model:
    """Where TensorRT-LLM finds a checkpoint: at `given`, the value of `option`, else where the manifest says."""
    found = None if given is None else locate(named_source(given), option)
    if identity.name.endswith(GGUF) if found is None else is_gguf(found.path):
        raise UsageError(
            f"{identity.name if found is None else found.path} is a GGUF file, which TensorRT-LLM does not run beside "
            f"a drafter; build the engine from a checkpoint in Hugging Face's layout (ddtree-trt build {option} DIR)"
        )
    if found is not None:
        check_same(found.path, identity, option)
        return Model(str(found.path.resolve())) if found.revision == LOCAL else Model(found.name, found.revision)
    if identity.revision == LOCAL:
        raise UsageError(
            f"this engine was built from a local directory called {identity.name!r}, and an engine keeps no copy of "
            f"it; give it as {option} DIR"
        )
    if identity.revision == PACKAGED:
        return Model(str(PackagedSource(identity.name).directory.resolve()))
    return Model(identity.name, identity.revision)
