"""The kernels behind the C interface of `cpp_plugins/emulator/c_api.cpp`, by ctypes."""

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_trt.errors import EngineError


def _arguments(*fields: tuple[Any, str]) -> type[ctypes.Structure]:
    """A struct whose fields are the names in each text, of the type beside it."""
    names = [(name, kind) for kind, text in fields for name in text.split()]
    return type("Arguments", (ctypes.Structure,), {"_fields_": names})


_POINTER, _INT = ctypes.c_void_p, ctypes.c_int32
# Function of the library → the structure it takes; headers of include/ddtree say what the fields mean.
CALLS: dict[str, type[ctypes.Structure]] = {
    "tree_attention": _arguments(
        (_POINTER, "q k v past_k past_v present_k present_v slot_ids past_len tree_mask out workspace"),
        (ctypes.c_size_t, "workspace_bytes"),
        (_INT, "sequences tokens q_heads kv_heads head_dim slots capacity mask_words type mask_mode"),
        (ctypes.c_float, "scale"),
        (_INT, "splits"),
    ),
    "draft_top": _arguments((_POINTER, "logits best ids"), (_INT, "rows vocabulary candidates_k normalised")),
    "build_tree": _arguments(
        (_POINTER, "log_probs candidates root_tokens budgets past_len token_ids parents depths positions counts"),
        (_POINTER, "log_weights outlook_depths"),
        (_INT, "sequences positions_l candidates_k tokens outlook"),
    ),
    "packed_mask": _arguments((_POINTER, "parents mask"), (_INT, "sequences tokens mask_words")),
    "choose": _arguments(
        (_POINTER, "logits positions temperatures seeds choices"), (_INT, "sequences tokens vocabulary")
    ),
    "commit": _arguments(
        (_POINTER, "parents token_ids choices counts log_weights outlook_depths"),
        (_POINTER, "slot_ids holds active before tapped cache waiting states result"),
        (_INT, "sequences tokens longest outlook planes slots kv_heads capacity waiting_rows row_bytes state_bytes"),
    ),
    "compact": _arguments(
        (_POINTER, "cache slot_ids past_len keep keep_count"),
        (_INT, "sequences planes slots kv_heads capacity max_keep row_bytes"),
    ),
    "delta_tree": _arguments(
        (_POINTER, "mixed log_decays steps parents states slot_ids out keys updates decays"),
        (_INT, "sequences tokens slots key_heads value_heads key_dim value_dim"),
    ),
    "delta_commit": _arguments(
        (_POINTER, "states past keys updates decays inputs path"),
        (_INT, "first path_rows slot slots layers rows key_heads value_heads key_dim value_dim past_rows single type"),
    ),
}

# Index = ddtree::Status of include/ddtree/launch.h.
STATUS = (
    "ok",
    "a pointer that must not be null is",
    "a negative or impossible extent",
    "a head size, element type or mode that has no kernel",
    "an address that is not a multiple of 16 bytes",
    "a workspace smaller than attention_workspace_bytes says",
    "a launch that CUDA refused",
)


class KernelLibrary:
    """The launchers. A pointer is an array, an address as int, or None for null."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.ddtree_abi.restype = ctypes.c_int32
        self._library.ddtree_attention_workspace_bytes.restype = ctypes.c_uint64

    @property
    def abi(self) -> int:
        """The ABI number compiled into the library."""
        return int(self._library.ddtree_abi())

    def emulate_multiprocessors(self, count: int) -> None:
        """The size of the GPU that is pretended."""
        self._library.ddtree_emulate_multiprocessors(ctypes.c_int32(count))

    def attention_workspace_bytes(self, **fields: object) -> int:
        """Bytes of scratch a `tree_attention` call of these extents needs; 0 when it needs none."""
        return int(self._library.ddtree_attention_workspace_bytes(self._arguments("tree_attention", fields)))

    def launch(self, call: str, **fields: object) -> None:
        """Run one of `CALLS`; fields left out are null or 0. Raises EngineError when it is refused."""
        status = getattr(self._library, f"ddtree_{call}")(self._arguments(call, fields), ctypes.c_void_p())
        if status:
            raise EngineError(f"ddtree kernel {call!r} refused its arguments: {STATUS[status]} (status {status})")

    def _arguments(self, call: str, fields: Mapping[str, object]) -> Any:
        given = {name: v.ctypes.data if isinstance(v, np.ndarray) else v for name, v in fields.items()}
        return ctypes.byref(CALLS[call](**given))
