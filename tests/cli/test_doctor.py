"""What `doctor` says of a GPU's software, on machines that have none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddtree_trt import doctor
from ddtree_trt.artifact.toolchain import installed_versions
from ddtree_trt.doctor import Check, diagnose


def check(name: str) -> Check:
    (found,) = (c for c in diagnose().checks if c.name == name)
    return found


@pytest.mark.parametrize(("cuda", "found"), [("13.0", True), ("14.1", True), ("12.9", False), ("11.8", False)])
def test_a_driver_older_than_the_kernels_runtime(cuda: str, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels link CUDA 13 statically: a torch for CUDA 12 does not help."""
    monkeypatch.setattr(doctor, "cuda_of_driver", lambda: cuda)
    driver = check("CUDA driver")
    assert driver.found is found
    assert f"for CUDA up to {cuda}" in driver.detail
    assert ("needs driver 580 or newer, also beside a torch for CUDA 12" in driver.detail) is not found


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cuda_of_driver", lambda: None)
    assert check("CUDA driver") == Check("CUDA driver", False, "no libcuda.so.1", "running anything on the GPU")


def test_flash_attention_is_not_installed() -> None:
    assert (check("flash-attn").found, check("flash-attn").detail) == (False, "not installed, and not needed")


@pytest.mark.parametrize(
    ("source", "found", "words"),
    [
        ("def flash_attn_with_kvcache(): pass", True, "flash-attn 2.8.3"),
        (
            "raise ImportError('undefined symbol: _ZN3c10')",
            False,
            "(ImportError: undefined symbol: _ZN3c10): it is",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", False, "(exit status -11): it is left out"),
        ("", False, "cannot import name 'flash_attn_with_kvcache'"),
    ],
)
def test_what_was_found_of_flash_attention(
    source: str, found: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is imported elsewhere: a wheel that ends its process does not end ours."""
    (tmp_path / "flash_attn.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    pretend_flash_attention(monkeypatch)
    flash = check("flash-attn")
    assert flash.found is found and words in flash.detail and "2.8.3" in flash.detail
    assert "flash_attn" not in sys.modules


def pretend_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = installed_versions

    def pretended(*names: str) -> dict[str, str]:
        return {"flash-attn": "2.8.3"} if names == ("flash-attn",) else versions(*names)

    monkeypatch.setattr(doctor, "installed_versions", pretended)


def test_nothing_of_the_working_directory_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "flash_attn.py").write_text(f"open({str(ran)!r}, 'w'); flash_attn_with_kvcache = None")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    pretend_flash_attention(monkeypatch)
    assert "No module named 'flash_attn'" in check("flash-attn").detail
    assert not ran.exists()


def test_without_a_known_python(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_flash_attention(monkeypatch)
    monkeypatch.setattr(sys, "executable", "")
    assert "sys.executable is not set" in check("flash-attn").detail
