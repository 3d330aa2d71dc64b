"""Objects keep what is theirs: no private attribute and no attribute's attribute is touched from outside."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ddtree_trt

PACKAGE = Path(ddtree_trt.__file__).parent
ROOMS = (PACKAGE / "runtime" / "engines", PACKAGE / "bench", PACKAGE.parent / "tools")
FILES = [path for room in ROOMS for path in sorted(room.rglob("*.py"))]
ALLOWED = {"_from_config"}  # of transformers, which has no public name for a model of a configuration and a dtype


def trespasses(source: str) -> list[str]:
    """Private attributes of other objects, and assignments to what an attribute of `self` holds."""
    tree = ast.parse(source)
    modules = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            private = node.attr.startswith("_") and not node.attr.startswith("__") and node.attr not in ALLOWED
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if private and owner not in {"self", "cls"} | modules:
                found.append(ast.unparse(node))
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = [part for target in targets for part in getattr(target, "elts", [target])]
            found += [ast.unparse(part) for part in parts if _is_anothers(part)]
    return found


def _is_anothers(target: ast.expr) -> bool:
    """Whether it is `self.other.attribute`, or an item of it."""
    while isinstance(target, ast.Subscript):
        target = target.value
    holder = target.value if isinstance(target, ast.Attribute) else None
    return isinstance(holder, ast.Attribute) and isinstance(holder.value, ast.Name) and holder.value.id == "self"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE.parent).as_posix())
def test_objects_keep_what_is_theirs(path: Path) -> None:
    assert trespasses(path.read_text(encoding="utf-8")) == []


def test_trespasses_are_found() -> None:
    own = "import torch\nself._a = self._b[0] = cls._c\nself.d[0][1] = 1\nrecord.field += 1\ntorch._foreach_copy_(a, b)"
    assert trespasses(own) == []
    assert trespasses("x = other._a") == ["other._a"]
    assert trespasses("self.other._a.b()") == ["self.other._a"]
    assert trespasses("self.a.b += 1") == ["self.a.b"]
    assert trespasses("self.a.b[0], x = 1, 2") == ["self.a.b[0]"]
