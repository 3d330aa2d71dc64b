"""One TensorRT engine: contexts, bindings, and passes captured as CUDA graphs.

All contexts share one workspace, since passes follow each other on one stream. There is one for passes that are not
captured, and one per captured graph, because a change of a context's shapes changes state that its graph reads
(TensorRT's guide, on CUDA graphs; github.com/NVIDIA/TensorRT/issues/3798). So the number of graphs is bounded.
"""

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact import tensors as names
from ddtree_trt.device.buffers import MOST_CAPTURED, CacheShape
from ddtree_trt.device.cuda_device import Upload
from ddtree_trt.device.libraries import io_tensors
from ddtree_trt.errors import EngineError
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.runtime.engines.tensorrt.opening import Loaded

Shape = tuple[int, ...]


class TrtNetwork:
    """Runs passes. The caller gives the addresses of inputs and outputs, equal ones for equal keys."""

    def __init__(
        self, name: str, engine: Any, shared: Loaded, tables: Mapping[str, int], dims: TransformerDims,
        cache: CacheShape, cache_address: int, states: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """`engine` is an ICudaEngine, `tables` the addresses of its tables by input, `cache` the shape of its cache at
        `cache_address`. `states`: tensors of a hybrid → the address of the first slot's, and bytes of each."""
        self.name = name
        self.engine = engine
        self.shared = shared
        existing = io_tensors(engine)
        # Without slot ids, row n of a pass is row n of what is bound as its cache.
        self.neighbours = names.SLOT_IDS not in existing
        self._cache, self._cache_address = cache, cache_address
        # Inputs and outputs that are the cache: the whole of it, or one pair for each plane.
        self._whole = names.PAST_CACHE in existing
        layers = len(dims.attention_layers)
        pasts, presents = (names.plane_names(part, layers) for part in ("past", "present"))
        pairs = list(zip(pasts, presents, strict=True))
        self._planes = [(names.PAST_CACHE, names.PRESENT_CACHE)] if self._whole else pairs
        self._states = {tensor: place for tensor, place in states.items() if tensor in existing}
        self._fixed = {tensor: address for tensor, address in tables.items() if tensor in existing}
        self._growing = engine.get_tensor_shape(self._planes[0][0])[0] == -1
        self._plain: Any = None  # the context of passes that are not captured
        # Graph, and the context it was captured from, which must live as long; the one used last is the last.
        self._captured: dict[Hashable, tuple[Any, Any]] = {}

    def run(
        self, slots: Sequence[int], upload: Upload, control: Mapping[str, NDArray[np.int32]],
        others: Mapping[str, int] = MappingProxyType({}), varying: Mapping[str, Shape] = MappingProxyType({}), *,
        key: Hashable | None = None,
    ) -> None:  # fmt: skip
        """Put one pass on the stream. `slots` of its rows: neighbours where `neighbours` is set. `control` data goes up
        with it. `others`: addresses of all tensors but that data, tables and cache, and shapes of those `varying`.

        With a `key` the pass is captured at its first use and launched as a graph later: equal keys have equal shapes
        and addresses, and slots may differ. Of more than MOST_CAPTURED graphs, the pass unused longest is captured anew
        when it comes again. Raises EngineError with TensorRT's error text.
        """
        if not self.neighbours:
            control = {**control, names.SLOT_IDS: np.array(slots, np.int32)}
        addresses = {**upload.send(control), **others}
        shapes = {name: array.shape for name, array in control.items()} | dict(varying)
        first = slots[0] if self.neighbours else 0
        if key is None:
            self._plain = self._plain or self._context(captured=False)
            self._enqueue(self._plain, first, len(slots), shapes, addresses)
            return
        key = (first, key)
        captured = self._captured.pop(key, None)
        if captured is not None:
            self._captured[key] = captured
            self.shared.device.launch(captured[0])
            return
        if len(self._captured) == MOST_CAPTURED:
            self.shared.device.forget(self._captured.pop(next(iter(self._captured)))[0])
        context = self._context(captured=True)
        # TensorRT initialises itself in the first pass of these shapes, which cannot be captured. It gives the results.
        self._enqueue(context, first, len(slots), shapes, addresses)
        graph = self.shared.device.capture(lambda: self._execute(context))
        self._captured[key] = graph, context

    def _context(self, *, captured: bool) -> Any:
        device = self.shared.device
        self.shared.log.clear()
        context = self.shared.make_context(self.engine, captured)
        if context is None:
            raise self._error("no execution context")
        self._check(context.set_optimization_profile_async(0, device.stream), "the plan's profile")
        context.set_device_memory(*self.shared.workspace)
        self._bind(context, self._fixed)
        if not self.neighbours:
            self._bind(context, self._cache_from(0))
        return context

    def _bind(self, context: Any, addresses: Mapping[str, int]) -> None:
        for tensor, address in addresses.items():
            self._check(context.set_tensor_address(tensor, address), f"an address for {tensor}")

    def _cache_from(self, first: int) -> dict[str, int]:
        """Addresses of the cache from slot `first` on. Past and present are one, which the plugin checks."""
        start, size = self._cache_address + first * self._cache.slot_bytes, self._cache.plane_bytes
        planes = {tensor: start + n * size for n, plane in enumerate(self._planes) for tensor in plane}
        return planes | {tensor: start + first * size for tensor, (start, size) in self._states.items()}

    def _enqueue(
        self, context: Any, first: int, rows: int, shapes: Mapping[str, Shape], addresses: Mapping[str, int]
    ) -> None:
        for tensor, shape in shapes.items():
            self._set_shape(context, tensor, shape)
        self._bind(context, addresses)
        if self.neighbours:
            self._bind(context, self._cache_from(first))
        if self._growing:
            cache = self._cache
            leading = (cache.planes, cache.stored_slots) if self._whole else (rows,)
            for past, _ in self._planes:
                self._set_shape(context, past, (*leading, *cache.slot_shape))
            for tensor in self._states:
                shape = tuple(self.engine.get_tensor_shape(tensor))
                if shape[0] == -1:
                    self._set_shape(context, tensor, (rows, *shape[1:]))
        if unset := context.infer_shapes():
            raise self._error(f"no shape or address for {', '.join(unset)}")
        self._execute(context)

    def _set_shape(self, context: Any, tensor: str, shape: Shape) -> None:
        self._check(context.set_input_shape(tensor, shape), f"shape {list(shape)} for {tensor}")

    def _execute(self, context: Any) -> None:
        self._check(context.execute_async_v3(self.shared.device.stream), "the pass")

    def _check(self, accepted: bool, what: str) -> None:
        if not accepted:
            raise self._error(f"TensorRT refuses {what}")

    def _error(self, what: str) -> EngineError:
        return EngineError(f"the {self.name} cannot run: {what}; {self.shared.log.words()}".rstrip("; "))

    def close(self) -> None:
        """Release contexts and engine. The device owns the graphs and must have released them before."""
        self._captured.clear()
        self._plain = None
        self.engine = None
