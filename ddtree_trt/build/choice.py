"""The backend and the precision of a build; `auto` means the best that this machine can build, and run, a pair with."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ddtree_trt.artifact import backends
from ddtree_trt.artifact.backends import BACKENDS, BEST_ON_GPUS, ONNXRUNTIME, Backend, BackendName
from ddtree_trt.artifact.precisions import PrecisionName
from ddtree_trt.build.backends.base import BackendBuild, BuilderOptions, lacking
from ddtree_trt.build.backends.tensorrt.backend import sm_for_values
from ddtree_trt.build.pair import Pair
from ddtree_trt.device.survey import CUDA, DRIVER, Survey
from ddtree_trt.errors import UsageError, install_with
from ddtree_trt.plugins import HEAD_DIMS, LOWEST_SM, library
from ddtree_trt.records import misplaced_option

Wanted = Literal["auto", PrecisionName]

# From here on a CPU engine in float32 is slow, and 8-bit weights are worth a word.
LARGE_BYTES = 4 * 10**9


@dataclass(frozen=True)
class Choice:
    """A backend, and why it is that one: a line for the user."""

    backend: BackendName
    reason: str


@dataclass(frozen=True)
class Obstacle:
    text: str
    removable: bool = False  # by installing something


def choose_backend(survey: Survey, pair: Pair | None = None, precision: Wanted = "auto") -> Choice:
    """TensorRT where there is a GPU for it, else TensorRT for RTX, else PyTorch, else ONNX Runtime on the CPU. A
    backend that lacks anything on this machine, or that would refuse the pair or the precision, is left out. The reason
    names the best one that was left out, and what it lacks."""
    lacking = {b: found for b in BEST_ON_GPUS if (found := next(_obstacles(b, survey, pair, precision), None))}
    backend = next((b for b in BEST_ON_GPUS if b not in lacking), ONNXRUNTIME)
    if survey.gpu is None:
        why = f"{survey.no_gpu}; an engine for a GPU needs one, and its driver {DRIVER} or newer (docs/gpu.md)"
    elif backend.on_cpu:
        why = f"nothing that computes on the {survey.gpu} is ready"
    else:
        why = f"{backend.title} {survey.version(backend.modules[0])} and the {survey.gpu}"
    # The backend to advise: the one made for this GPU, if something can be done for it, else one that can be had.
    best = BEST_ON_GPUS[0]
    made_for_it = next((b for b in BEST_ON_GPUS if survey.gpu and survey.gpu.sm in b.sms), best)
    others = [b for b in (made_for_it, *lacking) if b in lacking and b != backend]
    if survey.gpu and backend not in (made_for_it, best):
        better = next((b for b in others if lacking[b].removable), others[0])
        why += f"; for {better.name}: {lacking[better].text}"
    size = pair.weights_bytes(ONNXRUNTIME.name, "fp32") if pair and backend.on_cpu else 0
    if pair and size >= LARGE_BYTES and precision in ("auto", "fp32"):
        memory = f" of this machine's {survey.host_bytes / 1e9:.1f} GB of memory" if survey.host_bytes else ""
        small = f"--precision int8 makes that {pair.weights_bytes(ONNXRUNTIME.name, 'int8') / 1e9:.1f} GB"
        why += f"; in fp32 its weights take {size / 1e9:.1f} GB{memory}: {small}"
    return Choice(backend.name, f"backend {backend.name}: {why}")


def backend_build(name: BackendName, options: BuilderOptions, *, dry_run: bool = False) -> BackendBuild:
    """The named backend's part of a build. For a dry run any machine will do. Raises MissingDependency where its
    packages are not installed, BuildError where this machine cannot build it, and UsageError for options that are not
    for it."""
    if misplaced := misplaced_option(BuilderOptions, options, name):
        flag, served = misplaced
        raise UsageError(f"{flag} is for --backend {served}, not for {name}; leave it out")
    build: BackendBuild = backends.load(BACKENDS[name].builder)(options)
    if not dry_run:
        build.check_machine()
    return build


def resolve_precision(build: BackendBuild, wanted: Wanted) -> PrecisionName:
    """The precision to compute in. Raises UsageError when the backend does not have it."""
    if wanted == "auto":
        return build.precisions[0]
    if wanted not in build.precisions:
        raise UsageError(
            f"precision {wanted!r} is not available: the {build.backend.name} backend computes in "
            f"{', '.join(build.precisions)}; use --precision {build.precisions[0]}"
        )
    return wanted


def _obstacles(backend: Backend, survey: Survey, pair: Pair | None, wanted: Wanted) -> Iterator[Obstacle]:
    """What a backend for GPUs lacks, what can be installed last."""
    gpu = survey.gpu
    if gpu is None:
        yield Obstacle(survey.no_gpu)
        return
    if pair and (what := lacking(backend, (pair.target.dims, pair.drafter.dims))):
        yield Obstacle(f"{what} are not implemented for it")
    if wanted != "auto" and wanted not in backend.builds:
        yield Obstacle(f"the precision must be one of {', '.join(backend.builds)}, not {wanted}")
        return
    precision = "bf16" if wanted == "auto" else wanted
    needed, available = pair.weights_bytes(backend.name, precision) if pair else 0, gpu.memory_bytes
    if available is not None and needed > available:
        yield Obstacle(
            f"the GPU must hold {needed / 1e9:.1f} GB of weights in {precision}, and it has {available / 1e9:.1f} GB"
        )

    heads = {pair.target.dims.head_dim, pair.drafter.dims.head_dim} if pair else {*HEAD_DIMS}
    # Else its passes are the library's alone.
    kernels = backend.kernels and wanted != "fp32" and bool(heads & {*HEAD_DIMS})
    if kernels or backend.plans:
        if gpu.sm is None:
            yield Obstacle("the GPU's compute capability must be known: install nvidia-smi", removable=True)
            return
        if backend.sms and gpu.sm not in backend.sms:
            served = ", ".join(str(sm / 10) for sm in backend.sms)
            yield Obstacle(f"the GPU's compute capability must be one of {served}, not {gpu.sm / 10}")
        if gpu.sm < LOWEST_SM:
            yield Obstacle(f"the GPU's compute capability must be {LOWEST_SM / 10} or newer, not {gpu.sm / 10}")
        lowest = sm_for_values(pair.target.quantization) if pair and backend.plans else 0
        if gpu.sm < lowest:
            yield Obstacle(f"a target in FP8 needs compute capability {lowest / 10}, not {gpu.sm / 10}")

    cuda = survey.torch_cuda if survey.torch_cuda and backend.kernels and not kernels else f"{CUDA}.0"
    if not survey.driver_runs(cuda):
        found = f"this one is for CUDA {survey.driver_cuda}" if survey.driver_cuda else "libcuda.so.1 is not found"
        driver = f"must be {DRIVER} or newer" if cuda.startswith(f"{CUDA}.") else f"must be for CUDA {cuda}"
        yield Obstacle(f"NVIDIA's driver {driver}, and {found}", removable=True)
    install = install_with(backend.extra)
    for module in backend.modules:
        if not survey.version(module):
            yield Obstacle(f"{module} is not installed; {install}", removable=True)
        if fault := survey.fault(module):
            yield Obstacle(fault, removable=True)
    version = survey.version(backend.modules[0]) or ""
    if not backend.serves_release(version):
        yield Obstacle(f"{backend.title} must be {backend.releases_text}, not {version}; {install}", removable=True)
    if kernels and library.TORCH not in survey.libraries:
        yield Obstacle(f"{library.TORCH} is not built; {library.BUILD_HINT}", removable=True)
