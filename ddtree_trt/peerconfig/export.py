"""Exports of an engine's pair to another inference engine: writing such a directory, and reading it for `bench`.

A directory has two configuration files, with and without speculation, the command that starts the other engine's
server, and a record of the pair. Files are for users to edit; an earlier export is replaced with `force` only.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from typing import Any

import yaml

from ddtree_trt import __version__
from ddtree_trt.artifact.manifest import Manifest, load_manifest
from ddtree_trt.build.directory import atomic_directory
from ddtree_trt.errors import UsageError
from ddtree_trt.peerconfig.finding import find_model
from ddtree_trt.peerconfig.pair import ServedPair, served_pair
from ddtree_trt.peerconfig.peer import CONFIG, PLAIN_CONFIG, PORT, Peer, Settings
from ddtree_trt.reading import Source, read_object, read_record

RECORD = "export.json"  # written last
START = "serve.sh"
README = "README.md"

_HEAD = """\
# $title, as `$command` of ddtree-trt $version wrote it for the engine $name.
# Names are those of $title $release. Not run by the authors of ddtree-trt.
"""
_START = """\
#!/bin/sh
# Starts $title with DFlash on port $port; `$start $plain` starts it without. Further options are passed on.
set -eu
cd "$$(dirname "$$0")"
config=$config
case "$${1:-}" in *.yaml) config=$$1; shift ;; esac
exec $line "$$@"
"""
_README = """\
# $name under $title

Written by ddtree-trt $version for the pair of the engine `$name`: `$config` runs the target with the drafter's chain
(DFlash), `$plain` the target alone. Names are those of $title $release; **the authors of ddtree-trt ran neither**.

| | |
| --- | --- |
| target | `$target` |
| drafter | `$drafter` |
| tokens a draft proposes | $draft_length |
| prompt and output tokens of a sequence | $max_seq_len |
| sequences at once | $max_batch |
| computes in | $dtype |

## Serve

```sh
sh $start                # $line
sh $start $plain     # without speculation
```

$notes## Compare

$compare
"""
_COMPARE_BY_URL = """\
With the server running:

```sh
ddtree-trt bench $engine --peer openai=http://localhost:$port
```

The same prompts, as token ids, the same limits and stop tokens. Measure `$plain` too: a speedup is over the same
engine's own single tokens."""
_COMPARE_HERE = """\
Where TensorRT-LLM is installed beside ddtree-trt, without a server:

```sh
ddtree-trt bench $engine --peer tensorrt-llm=$directory
```

It runs the target alone and with the drafter, from `$config`, one sequence at a time with cold caches."""


@dataclass(frozen=True)
class Record:
    """What `export.json` holds."""

    product_version: str
    peer: str
    release: str
    model: str  # the target by the name it is loaded by
    target_sha256: str
    drafter_sha256: str


@dataclass(frozen=True)
class ReadExport:
    """An export as `bench` runs it."""

    model: str
    settings: Settings
    plain: Settings


def export_pair(
    peer: Peer, engine_dir: Path, destination: Path, *, checkpoint: str | None, drafter: str | None, force: bool = False
) -> ServedPair:
    """Write the directory and return what it says. `checkpoint` and `drafter` are paths or ids of the hub.

    Raises UsageError for a pair that cannot be exported, ArtifactError for an engine that cannot be read, and
    BuildError where the directory must not be replaced or cannot be written.
    """
    manifest = load_manifest(engine_dir)
    target = find_model(manifest.target, checkpoint, "--checkpoint")
    pair = served_pair(manifest, target, find_model(manifest.drafter, drafter, "--drafter"))
    peer.check(pair)
    record = Record(__version__, peer.name, peer.release, target.name, manifest.target.sha256, manifest.drafter.sha256)
    files = _files(peer, pair, str(engine_dir), str(destination))
    with atomic_directory(destination, force=force, marker=RECORD) as directory:
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
        (directory / RECORD).write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
    return pair


def read_export(peer: Peer, directory: Path, manifest: Manifest) -> ReadExport:
    """Read an export of `peer` for the pair of an engine. Raises UsageError where it is none, or of another pair."""
    path = directory / RECORD
    command = f"ddtree-trt export-{peer.name}"
    if not path.is_file():
        raise UsageError(f"{directory} has no {RECORD}; write it with: {command} ENGINE_DIR {directory}")
    source = Source(str(path), UsageError, f"write it again with: {command} ENGINE_DIR {directory} --force")
    record = read_record(Record, read_object(path, source), source)
    if record.peer != peer.name:
        raise UsageError(f"{directory} is an export for {record.peer}; give one that {command} wrote")
    for network, sha256 in (("target", record.target_sha256), ("drafter", record.drafter_sha256)):
        if sha256 != getattr(manifest, network).sha256:
            raise source.fault(f"it is of another {network} than that of the engine {manifest.name!r}")
    return ReadExport(record.model, _read_settings(directory / CONFIG), _read_settings(directory / PLAIN_CONFIG))


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise UsageError(f"{path} must have one setting a line, NAME: VALUE")
    return settings


def _files(peer: Peer, pair: ServedPair, engine: str, destination: str) -> Mapping[str, str]:
    settings = peer.settings(pair)
    values = {
        **{field: str(value) for field, value in asdict(pair).items()},
        "target": _shown(pair.target.name, pair.target.revision),
        "drafter": _shown(pair.drafter.name, pair.drafter.revision),
        "dtype": "the type the checkpoint is stored in" if pair.dtype == "auto" else pair.dtype,
        **{"title": peer.title, "release": peer.release, "version": __version__, "port": str(PORT)},
        **{
            "config": CONFIG,
            "plain": PLAIN_CONFIG,
            "start": START,
            "directory": shlex.quote(destination),
            "engine": shlex.quote(engine),
        },
        "command": f"ddtree-trt export-{peer.name}",
        "line": peer.command_line(pair, CONFIG),
        "notes": "".join(f"{note}\n\n" for note in (*peer.notes(pair), *_template_note(pair))),
    }
    compare = Template(_COMPARE_HERE if peer.in_process else _COMPARE_BY_URL).substitute(values)
    head = Template(_HEAD).substitute(values)
    return {
        CONFIG: head + _yaml(settings),
        PLAIN_CONFIG: head + _yaml(peer.plain(settings)),
        START: Template(_START).substitute({**values, "line": peer.command_line(pair, '"$config"')}),
        README: Template(_README).substitute({**values, "compare": compare}),
    }


def _yaml(settings: Settings) -> str:
    return yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)


def _shown(name: str, revision: str | None) -> str:
    return name if revision is None else f"{name}@{revision}"


def _template_note(pair: ServedPair) -> tuple[str, ...]:
    if not pair.chat_template_args:
        return ()
    arguments = json.dumps(dict(pair.chat_template_args))
    return (
        f"The drafter was trained with the chat template's arguments `{arguments}`: send them with every chat, as "
        f'`"chat_template_kwargs": {arguments}`.',
    )
