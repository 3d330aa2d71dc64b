"""What releases are made with: one version, the wheels' configuration, the workflow's steps."""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from cibuildwheel import __main__ as cibuildwheel
from packaging.requirements import Requirement

from ddtree_trt import __version__

ROOT = Path(__file__).resolve().parents[2]
GPU_WHEEL = ROOT / "cpp_plugins" / "wheel"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_is_one() -> None:
    package, gpu = project(ROOT)["project"], project(GPU_WHEEL)["project"]
    assert {package["version"], gpu["version"]} == {__version__}
    assert gpu["dependencies"] == [f"{package['name']}=={__version__}"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert citation["license"] == package["license"] == gpu["license"]


def test_the_operators_are_compiled_for_the_torch_that_the_wheel_names() -> None:
    (named,) = project(GPU_WHEEL)["project"]["optional-dependencies"]["torch"]
    tested = next(r for r in project(ROOT)["project"]["optional-dependencies"]["test"] if r.startswith("torch=="))
    files = [GPU_WHEEL / "build.sh", *WORKFLOWS, ROOT / "docs" / "releasing.md"]
    compiled = {v for file in files for v in re.findall(r"torch==([\d.]+\d)", file.read_text(encoding="utf-8"))}
    assert compiled == {tested.removeprefix("torch==")}
    assert all(Requirement(named).specifier.contains(version) for version in compiled)


@pytest.mark.parametrize("target", ["linux x86_64 manylinux", "linux aarch64 manylinux", "macos arm64 macosx"])
def test_cibuildwheel_reads_its_configuration(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    platform, architecture, tag = target.split()
    monkeypatch.setenv("CIBW_ARCHS", architecture)
    monkeypatch.setattr(sys, "argv", ["cibuildwheel", "--platform", platform, "--print-build-identifiers", str(ROOT)])
    with pytest.raises(SystemExit, match=r"^0$"):
        cibuildwheel.main()
    assert capsys.readouterr().out.split() == [f"cp{version}-{tag}_{architecture}" for version in (311, 312, 313)]
