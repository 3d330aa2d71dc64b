"""Commands for Python processes that use this process's packages, and nothing of their directory or variables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ddtree_trt.errors import EngineError

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
_PACKAGES = str(Path(__file__).resolve().parent.parent)


def isolated(code: str, *arguments: str) -> list[str]:
    """The command that runs `code` with `arguments` as `sys.argv[1:]`. Raises EngineError where Python's own program is
    not known."""
    if not sys.executable:
        raise EngineError("sys.executable is not set, so no process of this Python can be started")
    # '' is the working directory. Isolation drops import hooks of the user's site, one of which may have found us.
    path = [entry for entry in sys.path if isinstance(entry, str) and entry]
    return [sys.executable, "-I", "-c", _BOOT + code, json.dumps([*path, _PACKAGES]), *arguments]
