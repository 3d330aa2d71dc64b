"""The package as users get it: what is in the distributions, and a life of it from installation to removal."""

import json
import os
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.metadata import Metadata
from packaging.utils import parse_wheel_filename

from ddtree_trt.plugins import library

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.package
QUESTION = "There are 6 drawers, each with 32 cards. How many cards are there?"

CLIENT = """\
from ddtree_trt import LLM, RequestOutput, SamplingParams


def answer(llm: LLM, question: str) -> str:
    outputs: list[RequestOutput] = llm.generate([question], SamplingParams(max_tokens=8, temperature=0.0))
    reveal_type(outputs[0].outputs[0].token_ids)
    return outputs[0].outputs[0].text
"""


def tracked(*folders: str) -> set[str]:
    """Files of the tree: what git knows and what it does not ignore."""
    words = ["git", "ls-files", "-co", "--exclude-standard", "--", *folders]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name for name in listed if (ROOT / name).is_file()}


def wheel_test_commands(package: Path) -> list[str]:
    """What cibuildwheel runs after it has installed a wheel."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    return [command.format(package=package) for command in settings["test-command"]]


def test_the_source_distribution_is_the_tree(distributions: Any) -> None:
    with tarfile.open(distributions.source) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members if member.isfile()}
    assert names - {"PKG-INFO"} == tracked()
    assert all(member.isfile() or member.isdir() for member in members), "no links, no devices"


def test_the_wheel_has_the_package_and_nothing_else(distributions: Any) -> None:
    with zipfile.ZipFile(distributions.wheel) as wheel:
        assert wheel.testzip() is None
        names = {name for name in wheel.namelist() if not name.endswith("/")}
    package = tracked("ddtree_trt") | {f"ddtree_trt/{name}" for name in tracked("triton_repo")}
    others = {name for name in names - package if ".dist-info/" not in name}
    (native,) = others
    assert native.startswith("ddtree_trt/_native.") and native.endswith(".so")
    assert package - names == set()
    assert {"ddtree_trt/py.typed", "ddtree_trt/_native.pyi", "ddtree_trt/assets/tiny/target/model.safetensors"} <= names
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]


def test_the_metadata_is_what_an_index_takes(distributions: Any) -> None:
    name, version, _, tags = parse_wheel_filename(distributions.wheel.name)
    with zipfile.ZipFile(distributions.wheel) as wheel:
        info = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        text = wheel.read(info)
    metadata = Metadata.from_email(text, validate=True)  # every field in its form, none unknown
    assert (metadata.name, metadata.version, metadata.license_expression) == ("ddtree-trt", version, "Apache-2.0")
    assert name == "ddtree-trt" and metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text(encoding="utf-8")
    interpreters = {(tag.interpreter, tag.abi) for tag in tags}
    ours = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert interpreters == ({(ours, ours)} if sys.version_info < (3, 12) else {("cp312", "abi3")})


def test_installed_built_run_and_removed(installed: Any, tmp_path: Path) -> None:
    """In one test, in the order of a user's day: each step needs the one before."""

    def call(program: str, *arguments: object) -> str:
        result = installed.run(program, *arguments, cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        return str(result.stdout)

    call("python", "-m", "pip", "check")
    packages = {entry["name"] for entry in json.loads(call("python", "-m", "pip", "list", "--format", "json"))}
    assert "ddtree-trt" in packages and not {"pytest", "torch", "starlette"} & packages, "an environment of its own"
    where = Path(call("python", "-c", "import ddtree_trt; print(ddtree_trt.__file__)").strip())
    assert where.is_relative_to(installed.directory)
    for command in wheel_test_commands(tmp_path):
        program, *words = shlex.split(command)
        call(program, *words)
    words = ["run", "build/wheel-test", "--prompt", QUESTION, "--temperature", "0", "--max-tokens", "60"]
    assert "192" in call("ddtree-trt", *words, "--tree-budget", "8")

    client = tmp_path / "client.py"
    client.write_text(CLIENT)
    (tmp_path / "mypy.ini").touch()  # none of ours
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(installed.python), client.name],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert 'note: Revealed type is "' in checked.stdout and "Any" not in checked.stdout

    call("python", "-m", "pip", "uninstall", "--yes", "--quiet", "ddtree-trt")
    left = [path for path in installed.directory.rglob("*") if "ddtree" in path.name.lower()]
    assert left == []


# The wheel of the GPU libraries, by its script from the source distribution, beside the package: it needs nvcc,
# TensorRT's headers and a CUDA build of torch, but no GPU. DDTREE_WHEEL_PYTHON names the interpreter of the environment
# that docs/releasing.md makes


PYTHON = "DDTREE_WHEEL_PYTHON"
SECONDS = 1800  # a guard against hangs alone

FOUND = """\
from ddtree_trt.plugins import library
for name in library.NAMES:
    print(library.find(name))
"""


@pytest.fixture(scope="module")
def wheel(distributions: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = os.environ.get(PYTHON)
    if python is None:
        pytest.skip(f"{PYTHON} does not name the interpreter of an environment as docs/releasing.md makes it")
    out = tmp_path_factory.mktemp("gpu")
    with tarfile.open(distributions.source) as archive:
        archive.extractall(out, filter="data")
    (source,) = out.iterdir()
    headers = os.environ.get("DDTREE_TRT_INCLUDE_DIR") or str(ROOT / "build" / "tensorrt" / "include")
    programs = f"{Path(python).absolute().parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHON": python, "PATH": programs, "DDTREE_TRT_INCLUDE_DIR": headers}
    script = source / "cpp_plugins" / "wheel" / "build.sh"
    built = subprocess.run([str(script)], cwd=out, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert built.returncode == 0, built.stdout + built.stderr
    (found,) = (source / "dist").glob("*.whl")
    return found


def test_it_has_the_libraries_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        names = {name for name in archive.namelist() if not name.endswith("/") and ".dist-info/" not in name}
    assert names == {f"{library.WHEEL}/{name}" for name in (*library.NAMES, "__init__.py", "LICENSE")}
    assert wheel.name.startswith(f"{library.WHEEL}-") and "-py3-none-manylinux_" in wheel.name


def test_packages_find_libraries_until_removed(distributions: Any, wheel: Path, empty: Any, tmp_path: Path) -> None:
    def call(*words: object) -> Any:
        return empty.run("python", *words, cwd=tmp_path)

    empty.install("--no-deps", "--no-index", distributions.wheel, wheel)
    found = call("-c", FOUND)
    assert found.returncode == 0, found.stderr
    paths = found.stdout.split()
    assert [Path(path).name for path in paths] == list(library.NAMES)
    assert all(Path(path).parent.name == library.WHEEL for path in paths)
    assert all(Path(path).is_relative_to(empty.directory) for path in paths)
    assert call("-m", "pip", "uninstall", "--yes", "--quiet", "ddtree-trt-cuda13").returncode == 0
    assert "MissingDependency: native library libddtree_plugins.so is not built" in call("-c", FOUND).stderr
