"""The device of the PyTorch engine, checks of its precision, and loading of the weights."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ddtree_trt.artifact.backends import TORCH
from ddtree_trt.artifact.files import TORCH_WEIGHTS
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.precisions import PRECISIONS, block_drafter_precision
from ddtree_trt.artifact.verify import rebuild_command
from ddtree_trt.artifact.weight_layout import DRAFTER, TARGET, stored_weights
from ddtree_trt.errors import ArtifactError, UsageError
from ddtree_trt.plugins import LOWEST_SM
from ddtree_trt.runtime.engines.torch.parallel.split import ALONE, Shard, cut_of
from ddtree_trt.runtime.engines.torch.products import Scaled
from ddtree_trt.runtime.options import Fp8

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, PRECISIONS[name].dtype) for name in TORCH.precisions}


def choose_device() -> torch.device:
    """The first GPU of this process, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def device_name(device: torch.device) -> str:
    """The GPU's name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def use_float32_sums() -> None:
    """Set PyTorch, for the whole process, to sum matrix products on GPUs in float32 for inputs of all types. By default
    cuBLAS may add parts of a sum in bf16 or fp16, and splits by the number of rows; TF32 would round inputs to 10 bits.
    """
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
    products.allow_fp16_accumulation = False
    products.allow_tf32 = False


def check_device(directory: Path, manifest: Manifest, device: torch.device) -> None:
    """Raises ArtifactError when the device does not compute in the engine's precision."""
    precision, problem = manifest.precision, ""
    if device.type == "cpu" and precision == "fp16":
        problem = "is for GPUs, and no GPU was found"
    elif device.type == "cuda" and precision != "fp32":
        major, minor = torch.cuda.get_device_capability(device)
        if 10 * major + minor < LOWEST_SM:
            found = f"{device_name(device)} (sm_{major}{minor})"
            problem = f"the kernels compute on sm_{LOWEST_SM} and later; found {found}"
    if problem:
        rebuild = rebuild_command(directory, manifest).replace(f"--precision {precision}", "--precision fp32")
        raise ArtifactError(f"{directory} was built in {precision}, which {problem}; rebuild with: {rebuild}")


def read_weights(directory: Path, manifest: Manifest, device: torch.device, shard: Shard = ALONE) -> dict[str, Tensor]:
    """A rank's tensors of the weight file, on the device. Raises ArtifactError where it is not the manifest's."""
    path, dtype = directory / TORCH_WEIGHTS, DTYPES[manifest.precision]
    rebuild = f"rebuild with: {rebuild_command(directory, manifest)}"
    weights: dict[str, Tensor] = {}
    drafter_dtype = DTYPES[block_drafter_precision(manifest.precision)] if manifest.drafting.block_size else dtype
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            names, networks = set(file.keys()), (manifest.target_dims, manifest.drafter_dims)
            # A network without a head in the file has a tied one.
            target_tied, drafter_tied = (f"{network}head" not in names for network in (TARGET, DRAFTER))
            expected = stored_weights(*networks, target_tied=target_tied, drafter_tied=drafter_tied)
            if missing := sorted({w.name for w in expected} ^ names):
                raise ArtifactError(f"{path}: {missing[0]} is missing or superfluous; {rebuild}")
            for weight in expected:
                cut, stored = cut_of(weight, manifest.target_dims, shard), file.get_slice(weight.name)
                tensor = file.get_tensor(weight.name) if cut is None else cut.read(stored, torch.cat)
                shape = tuple(stored.get_shape())
                wanted = drafter_dtype if weight.name.startswith(DRAFTER) else dtype
                wanted = getattr(torch, weight.dtype) if weight.dtype else wanted
                if shape != weight.shape or tensor.dtype != wanted:
                    raise ArtifactError(
                        f"{path}: {weight.name} should be {wanted} {list(weight.shape)}, found "
                        f"{tensor.dtype} {list(shape)}; {rebuild}"
                    )
                weights[weight.name] = tensor
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{path} cannot be read ({error}); {rebuild}") from error
    return weights


def quantise(weights: dict[str, Any], manifest: Manifest, networks: Fp8) -> None:
    """Put matrices in FP8 in the place of a DFlash drafter's, with its head, and of the target's layers if `networks`
    is `on`; what a drafter computes of its context stays. Raises UsageError where that cannot be done."""
    if networks == "drafter" and manifest.drafting.block_size is None:
        raise UsageError(f"fp8 'drafter' is for engines with a drafter of blocks, not an {manifest.drafting.title}")
    if networks == "on" and (manifest.target_dims.experts or manifest.target_dims.delta):
        raise UsageError("fp8 'on' is for targets of attention and dense layers alone; use 'drafter' or 'off'")
    if manifest.drafting.block_size:  # its own copy: the target's head stays as it is, see docs/gpu.md
        weights.setdefault(f"{DRAFTER}head", weights.get(f"{TARGET}head", weights[f"{TARGET}embedding"]))
    wanted = {TARGET: {"qkv", "o", "gate_up", "down"} if networks == "on" else set()}
    wanted[DRAFTER] = {"o", "gate_up", "down", "fc", "head"} if manifest.drafting.block_size else set()
    for network, parts in wanted.items():
        for name in [n for n in weights if n.startswith(network) and n.rpartition(".")[2] in parts]:
            weights[name] = Scaled.of(weights[name])
