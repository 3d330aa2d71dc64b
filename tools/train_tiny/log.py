"""A JSON line per event, in a file and on the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Log:
    """Appends to `path`; keeps a running mean of the loss."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a")
        self.loss: float | None = None

    def average(self, loss: float, keep: float = 0.97) -> None:
        self.loss = loss if self.loss is None else keep * self.loss + (1 - keep) * loss

    def write(self, **fields: Any) -> None:
        if self.loss is not None:
            fields.setdefault("loss", round(self.loss, 4))
        line = json.dumps(fields)
        self.file.write(line + "\n")
        self.file.flush()
        print(line, flush=True)
