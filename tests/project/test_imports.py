"""The import law: who may import whom, and that the light entry points stay light."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ddtree_trt

PACKAGE = Path(ddtree_trt.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
NATIVE = "ddtree_trt._native"
HEAVY = {
    *("gguf", "llguidance", "onnx", "onnxruntime", "prompt_toolkit", "ray", "torch", "transformers", "triton"),
    *("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings"),
}
OF_SERVERS = {"starlette", "prometheus_client", "uvicorn"}

# The rooms that may import a runtime, at any depth: whole packages and single files.
OWNERS = {
    "onnxruntime": ("runtime/engines/onnxruntime/",),
    "torch": ("runtime/engines/torch/",),
    "triton": ("runtime/engines/torch/product_kernel.py",),
    "tensorrt": ("device/",),
    "tensorrt_rtx": ("device/",),
    "tensorrt_rtx_bindings": ("device/",),
    "cuda": ("device/",),
    "ray": ("replicas/",),
    "gguf": ("build/checkpoint/gguf/files.py",),
    "llguidance": ("runtime/structured/",),
}
BY_NAME = {"import_module", "import_package", "__import__"}  # functions that import what a text names

# A drafter kind's package has a half of each side; the rest of it is a leaf.
BUILD_HALF = ("dialects.py", "graph.py")
RUNTIME_HALF = ("drafter.py", "on_onnxruntime.py", "on_tensorrt.py", "on_torch.py")
KINDS = tuple(f"drafters/{path.name}/" for path in (PACKAGE / "drafters").iterdir() if path.is_dir())

# What `build` and `runtime` share. These import nothing of ours but each other.
LEAVES = ("artifact/", "device/", "models/", "plugins/", "errors.py", "reading.py", "records.py", "worker_process.py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(tree: ast.AST) -> set[str]:
    """Absolute names of every module imported below `tree`, `from x import y` as x and x.y; those named in a text.

    `import ddtree_trt` gives its `__init__`, whose every name is then within reach.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {f"{alias.name}.__init__" if alias.name == "ddtree_trt" else alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_NAME:
            first = [*node.args, *(k.value for k in node.keywords)][:1]
            found |= {each.value for each in first if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return found


def within(names: set[str], module: str) -> set[str]:
    return {name for name in names if name == module or name.startswith(f"{module}.")}


def our_files(names: set[str]) -> set[str]:
    """The files of ours behind imported names. A public name of the package is its `__init__.py`, which loads it; the
    version and the native module are nobody's file."""
    found = set()
    for name in within(names, "ddtree_trt") - {"ddtree_trt", "ddtree_trt.__version__"} - within(names, NATIVE):
        path = name.split(".", 1)[1].replace(".", "/")
        ways = [each + end for each in (path, path.rpartition("/")[0]) for end in (".py", "/__init__.py")]
        found.add(next((way for way in ways if (PACKAGE / way).is_file()), "__init__.py"))
    return found


def side(place: str) -> str:
    """ "leaf", "build" or "runtime"; of what is above these its room."""
    if place.startswith(KINDS):
        name = place.rpartition("/")[2]
        return "build" if name in BUILD_HALF else "runtime" if name in RUNTIME_HALF else "leaf"
    return "leaf" if place.startswith((*LEAVES, "drafters/")) else place.partition("/")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_import_law(path: Path) -> None:
    place = path.relative_to(PACKAGE).as_posix()
    tree = tree_of(path)
    names = imports(tree)
    files, own_side = our_files(names), side(place)
    if own_side in ("leaf", "build", "runtime"):
        assert {side(file) for file in files} <= {"leaf", own_side}, "its own side and leaves only"
    if own_side == "build":
        assert not within(names, NATIVE)
    # A kind is a package and its line in the registry; what measures makes drafters of its own.
    if not place.startswith(("drafters/", "bench/")):
        assert not {file for file in files if file.startswith(KINDS)}, "kinds are asked over their record"
    assert not within(names, "workbench"), "what measures is beside the package"
    for module, owners in OWNERS.items():
        own_half = place.startswith(KINDS) and place.endswith(f"/on_{module}.py")
        assert own_half or place.startswith(owners) or not within(names, module)
    if own_side != "build":
        assert not within(names, "onnx")


def test_no_import_circle() -> None:
    """Of whatever kind: imports inside functions and those for types count too."""
    graph = {}
    for path in FILES:
        place = path.relative_to(PACKAGE).as_posix()
        graph[place] = our_files(imports(tree_of(path))) - {place}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names one


LIGHT = """
import sys
import ddtree_trt.build.compile, ddtree_trt.build.checkpoint.reader
from ddtree_trt.cli import app
for words in (["--help"], ["build", "--help"], ["serve", "--help"], ["--version"], ["doctor"]):
    try:
        app(words)
    except SystemExit as end:
        assert not end.code, words
print("\\n" + " ".join(name for name in sys.modules if "." not in name))
"""


def test_light_entry_points_load_no_heavy_package() -> None:
    run = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert (HEAVY | OF_SERVERS).isdisjoint(run.stdout.splitlines()[-1].split())
