"""What a failed build must say, and an engine that it must leave as it was."""

import hashlib
import re
from pathlib import Path

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.verify import verify_files


def build_args(pair: tuple[Path, Path], engine: Path, *more: object) -> list[object]:
    return ["build", "--target", "mine", "--checkpoint", pair[0], "--drafter", pair[1], "--output", engine, *more]


def fingerprint(engine: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(engine.iterdir())}


def assert_refused(result: tuple[int, str, str], code: int, *words: str) -> None:
    """One `error: …` line with these words, behind the line on backend `auto` if any; nothing on stdout, this exit
    code."""
    status, out, err = result
    assert (status, out) == (code, ""), err
    assert re.fullmatch(r"(backend [^\n]+\n)?error: [^\n]+\n", err), err
    for word in words:
        assert word in err


class OldEngine:
    """An engine that is there before the fault, and must be there unchanged after it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.before = fingerprint(path)

    def assert_untouched(self) -> None:
        assert fingerprint(self.path) == self.before
        verify_files(self.path, load_manifest(self.path))
        assert [p.name for p in self.path.parent.iterdir()] == [self.path.name]
