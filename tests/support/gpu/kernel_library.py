"""The kernels behind the C interface of `cpp_plugins/emulator/c_api.cpp`, by ctypes."""

import ctypes
from pathlib import Path

from ddtree_trt.errors import EngineError


class _TreeAttention(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "q k v past_k past_v present_k present_v".split()),
        *((name, ctypes.c_void_p) for name in "slot_ids past_len tree_mask out workspace".split()),
        ("workspace_bytes", ctypes.c_size_t),
        *((name, ctypes.c_int32) for name in "sequences tokens q_heads kv_heads head_dim slots capacity".split()),
        *((name, ctypes.c_int32) for name in "mask_words type mask_mode".split()),
        ("scale", ctypes.c_float),
        ("splits", ctypes.c_int32),
    ]


class _DraftTop(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "logits best ids".split()),
        *((name, ctypes.c_int32) for name in "rows vocabulary candidates_k normalised".split()),
    ]


class _TreeBuild(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "log_probs candidates root_tokens budgets past_len".split()),
        *((name, ctypes.c_void_p) for name in "token_ids parents depths positions counts".split()),
        *((name, ctypes.c_void_p) for name in "log_weights outlook_depths".split()),
        *((name, ctypes.c_int32) for name in "sequences positions_l candidates_k tokens outlook".split()),
    ]


class _PackedMask(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "parents mask".split()),
        *((name, ctypes.c_int32) for name in "sequences tokens mask_words".split()),
    ]


class _TokenChoice(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "logits positions temperatures seeds choices".split()),
        *((name, ctypes.c_int32) for name in "sequences tokens vocabulary".split()),
    ]


class _RoundCommit(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "parents token_ids choices counts log_weights outlook_depths".split()),
        *(
            (name, ctypes.c_void_p)
            for name in "slot_ids holds active before tapped cache waiting states result".split()
        ),
        *((name, ctypes.c_int32) for name in "sequences tokens longest outlook planes slots kv_heads".split()),
        *((name, ctypes.c_int32) for name in "capacity waiting_rows row_bytes state_bytes".split()),
    ]


class _KvCompact(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "cache slot_ids past_len keep keep_count".split()),
        *((name, ctypes.c_int32) for name in "sequences planes slots kv_heads capacity max_keep row_bytes".split()),
    ]


class _DeltaTree(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "mixed log_decays steps parents states slot_ids".split()),
        *((name, ctypes.c_void_p) for name in "out keys updates decays".split()),
        *((name, ctypes.c_int32) for name in "sequences tokens slots key_heads value_heads".split()),
        *((name, ctypes.c_int32) for name in "key_dim value_dim".split()),
    ]


class _DeltaCommit(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "states past keys updates decays inputs path".split()),
        *((name, ctypes.c_int32) for name in "first path_rows slot slots layers rows key_heads".split()),
        *((name, ctypes.c_int32) for name in "value_heads key_dim value_dim past_rows single type".split()),
    ]


# Function of the library → the structure it takes; headers of include/ddtree say what the fields mean.
CALLS: dict[str, type[ctypes.Structure]] = {
    "tree_attention": _TreeAttention,
    "draft_top": _DraftTop,
    "build_tree": _TreeBuild,
    "packed_mask": _PackedMask,
    "choose": _TokenChoice,
    "commit": _RoundCommit,
    "compact": _KvCompact,
    "delta_tree": _DeltaTree,
    "delta_commit": _DeltaCommit,
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
    """The launchers. Pointers are device addresses as int, None for null; `stream` is a cudaStream_t as int.

    Nothing is synchronised: the arrays a call names must outlive the work it puts on the stream.
    """

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
        return int(self._library.ddtree_attention_workspace_bytes(ctypes.byref(_TreeAttention(**fields))))

    def launch(self, call: str, stream: int | None = None, **fields: object) -> None:
        """Put one of `CALLS` on a stream; fields left out are null or 0. Raises EngineError when it is refused."""
        status = getattr(self._library, f"ddtree_{call}")(ctypes.byref(CALLS[call](**fields)), ctypes.c_void_p(stream))
        if status:
            raise EngineError(f"ddtree kernel {call!r} refused its arguments: {STATUS[status]} (status {status})")
