"""`ddtree-trt export-trtllm`, `export-vllm`, `export-sglang`: what another engine needs to run the same pair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ddtree_trt.commands.options.common import EngineDirectory
from ddtree_trt.peerconfig.peer import Peer

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it; made if missing.")]
Checkpoint = Annotated[
    str | None,
    typer.Option(metavar="DIR|ID", help="The target's checkpoint, if the engine was built from a local one."),
]
Drafter = Annotated[str | None, typer.Option(metavar="DIR|ID", help="The drafter's, likewise.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an earlier export.")]


def export_command(peer: Peer) -> Callable[..., None]:
    """The command that exports to one engine."""

    def export(
        engine_dir: EngineDirectory,
        directory: Directory,
        checkpoint: Checkpoint = None,
        drafter: Drafter = None,
        force: Force = False,
    ) -> None:
        from ddtree_trt.peerconfig.export import README, export_pair

        export_pair(peer, engine_dir, directory, checkpoint=checkpoint, drafter=drafter, force=force)
        print(f"exported {directory}: DFlash for {peer.title} {peer.release}")
        print(f"next: see {directory / README}")

    export.__doc__ = f"Export an engine's pair for {peer.title}'s own DFlash."
    return export
