"""The command that builds an engine again, for error messages."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.artifact.files import ENGINES
from ddtree_trt.artifact.manifest import LOCAL, PACKAGED, Limits, Manifest
from ddtree_trt.reading import printable


def rebuild_command(directory: Path, manifest: Manifest, *gpus: str) -> str:
    """The command that builds this engine again, quoted for a shell; plans of TensorRT for RTX for these kinds of GPU
    too."""
    words = ["ddtree-trt", "build", "--target", manifest.name]
    for option, network in (("--checkpoint", manifest.target), ("--drafter", manifest.drafter)):
        if network.revision == LOCAL:
            words += [option, "FILE.gguf" if network.name.endswith(".gguf") else "DIR"]
        elif network.revision != PACKAGED:
            words += [option, f"{network.name}@{network.revision}"]
    for name in ("max_seq_len", "max_tree_budget", "max_batch"):
        value = getattr(manifest.limits, name)
        words += [f"--{name.replace('_', '-')}", str(value)] if value != getattr(Limits, name) else []
    for name, value in manifest.chat_template_args.items():
        words += ["--chat-template-arg", f"{name}={json.dumps(value)}"]
    # Always named: what a build takes by itself depends on the machine.
    words += ["--backend", manifest.backend, "--precision", manifest.precision]
    words += _plan_options(manifest, gpus)
    if directory.absolute() != (ENGINES / manifest.name).absolute():
        words += ["--output", str(directory)]
    return printable(shlex.join([*words, "--force"]))


def _plan_options(manifest: Manifest, gpus: tuple[str, ...]) -> list[str]:
    """Options of the builders of plans, where they are not the defaults of the machine the engine was built on."""
    words = []
    backend = BACKENDS[manifest.backend]
    if backend.portable:
        for kind in dict.fromkeys([*manifest.toolchain.get("gpus", "").split(), *gpus]):
            words += ["--gpu", kind]
    if len(backend.attentions) > 1 and manifest.attention == "native":
        words += ["--attention", "native"]
    return words
