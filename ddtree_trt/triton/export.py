"""Export of an engine directory as a model of a Triton model repository.

The template is `triton_repo/` of the source tree, which the installed package has too. A model directory is written
like an engine directory: under another name, the marker last, then renamed.
"""

import json
import os
import re
import shlex
import shutil
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from ddtree_trt import __version__
from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.artifact.files import EXPORT, MANIFEST, PROFILE
from ddtree_trt.artifact.manifest import Manifest, load_manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.artifact.verify import verify_files
from ddtree_trt.build.directory import atomic_directory
from ddtree_trt.errors import MAX_COUNT, UsageError
from ddtree_trt.records import check, option, with_fields
from ddtree_trt.triton import ENGINE_FOLDER
from ddtree_trt.triton.layouts import LAYOUTS, LayoutName

VERSION_FOLDER = "1"
_MAX_INSTANCES, _MAX_GPUS = 64, 1024  # far above any use: a larger number is a typing error
# An example: a chat in the template of Qwen3, as JSON without apostrophes, because it is quoted by those in a shell.
_QUESTION = "There are 6 drawers, each with 32 cards. How many cards are there?"
_PROMPT = f"<|im_start|>user\\n{_QUESTION}<|im_end|>\\n<|im_start|>assistant\\n"
_QUESTIONS = {  # layout → body of the example request
    "trtllm": f'{{"text_input": "{_PROMPT}", "max_tokens": 64, "stream": %s}}',
    "vllm": f'{{"text_input": "{_PROMPT}", "parameters": {{"max_tokens": 64, "stream": %s}}}}',
}


@dataclass(frozen=True)
class ExportOptions:
    """How the model is run."""

    layout: LayoutName = option("trtllm", "Tensors as TensorRT-LLM's BLS model has them, or the vLLM backend.", "")
    instances: int = option(1, "Processes with an engine each; with --gpus, on each GPU.", within=(1, _MAX_INSTANCES))
    gpus: tuple[int, ...] = ()  # in the server's numbering; () is the CPU, or GPU 0 for an engine that needs one
    max_queue: int = option(256, "Sequences that may wait in one instance.", within=(0, MAX_COUNT))
    link: bool = option(False, "Link the engine by a relative path, or copy it.", flag="--link/--copy")
    force: bool = option(False, "Replace an earlier export.")

    def __post_init__(self) -> None:
        check(self)
        if any(not 0 <= gpu < _MAX_GPUS for gpu in self.gpus) or len(set(self.gpus)) != len(self.gpus):
            raise UsageError(f"gpus must be different numbers from 0, not {','.join(map(str, self.gpus))}")


def export_triton(
    engine_dir: Path,
    repository: Path,
    model_name: str | None = None,
    options: ExportOptions | None = None,
    *,
    progress: Progress = no_progress,
    **fields: Any,
) -> Path:
    """Write the model and return its directory, REPOSITORY/NAME.

    `model_name`: the engine's unless given; `fields`: of `ExportOptions`, over `options`.

    Raises UsageError for a wrong request, ArtifactError for an engine that cannot be used, and BuildError when the
    directory cannot be written or must not be replaced; it is not changed then.
    """
    options = with_fields(ExportOptions, options, fields)
    manifest = load_manifest(engine_dir)
    on_cpu = BACKENDS[manifest.backend].on_cpu
    if on_cpu and options.gpus:
        raise UsageError(f"--gpus is for engines that run on GPUs; one of {manifest.backend} runs on the CPU")
    gpus = options.gpus or (() if on_cpu else (0,))
    name = manifest.name if model_name is None else model_name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UsageError(f"{name!r} cannot name a model; use letters, digits, '.', '_' and '-' in --model-name")
    destination = repository.resolve() / name
    engine = engine_dir.resolve()
    if destination.is_relative_to(engine):
        raise UsageError(f"{destination} lies inside the engine directory; choose another repository")
    if engine.is_relative_to(destination):
        raise UsageError(f"the engine {engine} lies inside {destination}, which would be replaced; name another model")
    verify_files(engine_dir, manifest, progress)
    curl = f"curl -s localhost:8000/v2/models/{name}"
    extra = f"[{found}]" if (found := BACKENDS[manifest.backend].extra) else ""
    values = {
        "version": __version__,
        "model_name": name,
        "layout": options.layout,
        **LAYOUTS[options.layout].config(),
        "instances": options.instances,
        "kind": "KIND_GPU" if gpus else "KIND_CPU",
        "gpus": ", ".join(map(str, gpus)),
        "max_queue": options.max_queue,
        "engine_name": manifest.name,
        "backend": manifest.backend,
        "requirement": f"ddtree-trt{extra}=={__version__}",
        "extra": extra,
        "machine": f"Whether the engine can run there, or why not, `ddtree-trt inspect {name}/1/engine` says.",
        "precision": manifest.precision,
        "repository": shlex.quote(str(repository)),
        "curl_whole": f"{curl}/generate -d '{_QUESTIONS[options.layout] % 'false'}'",
        "curl_stream": f"{curl}/generate_stream -d '{_QUESTIONS[options.layout] % 'true'}'",
    }
    template = resources.files("ddtree_trt") / "triton_repo" / "model"
    with atomic_directory(destination, force=options.force, marker=EXPORT) as directory:
        version = directory / VERSION_FOLDER
        version.mkdir()
        (version / "model.py").write_bytes((template / VERSION_FOLDER / "model.py").read_bytes())
        for file in ("config.pbtxt", "README.md"):
            text = Template((template / file).read_text(encoding="utf-8")).substitute(values)
            (directory / file).write_text(text, encoding="utf-8")
        if options.link:  # relative to the final directory, not to the temporary one
            (version / ENGINE_FOLDER).symlink_to(os.path.relpath(engine, destination / VERSION_FOLDER))
        else:
            _copy_engine(engine, manifest, version / ENGINE_FOLDER, progress)
        record = {"product_version": __version__, "layout": options.layout}
        (directory / EXPORT).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return destination


def _copy_engine(source: Path, manifest: Manifest, destination: Path, progress: Progress) -> None:
    destination.mkdir()
    total, done = sum(entry.size for entry in manifest.files.values()), 0
    for name in (*manifest.files, MANIFEST):
        shutil.copyfile(source / name, destination / name)
        done += manifest.files[name].size if name in manifest.files else 0
        progress("copy engine", done, total)
    with suppress(FileNotFoundError, PermissionError):  # without one, the model measures latencies itself
        shutil.copyfile(source / PROFILE, destination / PROFILE)
