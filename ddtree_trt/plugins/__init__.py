"""The interface of the TensorRT plugins as data: names, attributes and the ABI, which changes with them.

`build` writes nodes with these, the runtime binds their tensors, and `cpp_plugins/` implements them. Letters: N
sequences, T new tokens, Hq/Hkv heads, D head size, S cache capacity of a slot, W mask words.
"""

from enum import IntEnum

ABI = 6  # DDTREE_ABI in cpp_plugins/include/ddtree/abi.h
VERSION = "1"
NAMESPACE = "ddtree"

ATTENTION = "DDTreeAttention"
COMPACT = "DDTreeKVCompact"
DELTA_NET, PRODUCT = "DDTreeDeltaNet", "DDTreeProduct"  # on a CPU only
NAMES = (ATTENTION, COMPACT)

# What a manifest records of the plugins an engine was built with; the library it runs with must have the same. The ABI
# stands for both plugins.
IDENTITY = {"name": ATTENTION, "version": VERSION, "namespace": NAMESPACE, "abi": str(ABI)}


class MaskMode(IntEnum):
    """Which of the T new tokens a token sees; the committed past is always visible."""

    TREE = 0  # ancestors and itself, by the packed mask
    CAUSAL = 1  # earlier tokens and itself: prefill
    NONE = 2  # every one of the T: the drafter's block


# Attributes of a DDTreeAttention node.
NUM_Q_HEADS = "num_q_heads"  # int
NUM_KV_HEADS = "num_kv_heads"  # int, divides num_q_heads
HEAD_DIM = "head_dim"  # int, 64 or 128
MAX_TREE = "max_tree"  # int, the largest T of any profile; W is at least ceil(max_tree / 32) in mode TREE
SCALE = "scale"  # float, of q·k
MASK_MODE = "mask_mode"  # int, a MaskMode
ATTENTION_ATTRIBUTES = (NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, MAX_TREE, SCALE, MASK_MODE)

HEAD_DIMS = (64, 128)
DELTA_TOKENS, DELTA_KEY_DIM = 512, 128  # most rows, and largest Dk, of the delta nets' kernel over trees
LOWEST_SM = 80  # the first GPUs with bfloat16, and the oldest the kernels are compiled for
MAX_DEVICE_BUDGET = 1024  # largest tree the device builds, root not counted
