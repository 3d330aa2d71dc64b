"""A rank other than 0: a process that executes rank 0's calls on its part of the network."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.parallel.control import (
    ROWS,
    Call,
    Int32,
    calls_of,
    drafts_of,
    record_size,
    verifications_of,
)
from ddtree_trt.runtime.engines.torch.parallel.group import Group, Meeting
from ddtree_trt.runtime.engines.torch.parallel.part import open_part, whole_rows

HERE, READY = "here", "ready"  # what a follower reports in this order; anything else is the text of its error


@dataclass(frozen=True)
class Post:
    """What a follower must know."""

    rank: int
    meeting: Meeting
    directory: Path
    manifest: Manifest  # of the whole engine
    device: str
    threads: int  # of a CPU


def follow(post: Post, rank_0: Connection) -> None:
    """Run a follower until rank 0 closes the engine or its process ends.

    `rank_0` takes HERE, READY and the text of an error, which ends this process, and has a message before each record.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which closes the engine
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    try:
        _serve(post, rank_0)
    except BaseException as error:
        rank_0.send(f"{type(error).__name__}: {error}".partition("\n")[0])
        raise SystemExit(1) from error


def _end_with_rank_0() -> None:
    """End this process, whatever it waits for, when rank 0's has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "rank 0 starts followers"
    parent.join()
    os._exit(1)


def _serve(post: Post, rank_0: Connection) -> None:
    device = torch.device(post.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(post.threads)
    rank_0.send(HERE)
    group = Group(post.meeting, post.rank, device, record_size(post.manifest.limits))
    engine = open_part(post.directory, post.manifest, device, group)
    rank_0.send(READY)
    obey(engine, group, rank_0)
    group.leave()


def obey(engine: TorchEngine, group: Group, rank_0: Connection) -> None:
    """Execute rank 0's calls until it closes the engine, and close this part of it."""
    while True:
        rank_0.recv_bytes()  # without a time limit: rank 0 may be idle
        for call, values in calls_of(group.receive()):
            if call is Call.CLOSE:
                engine.close()
                return
            execute(engine, call, values)


def execute(engine: TorchEngine, call: Call, values: Int32) -> None:
    """Do this rank's part of a call."""
    if call is Call.TRUNCATE:
        slot, length = values.tolist()
        engine.truncate(slot, length)
    elif call is Call.COMMIT:
        engine.commit(int(values[0]), values[2:], taps=bool(values[1]))
    elif call is Call.PREFILL:
        slot, rows, taps = values[:3].tolist()
        engine.prefill(slot, values[3:].astype(np.int64), rows=ROWS[rows], taps=bool(taps))
    elif call is Call.DRAFT:
        engine.draft(drafts_of(values))
    elif call is Call.VERIFY:
        engine.verify(verifications_of(values))
    elif call is Call.READ:
        whole_rows(engine, int(values[0]))
