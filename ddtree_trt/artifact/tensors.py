"""Names of the graphs' inputs and outputs: what `build` writes and `runtime` binds.

Shapes use the letters of `artifact`. Types are those of the ONNX Runtime graphs, where N is 1 and the T rows are those
of all sequences one after another; only the blocks of a block drafter are [N, 1 + L]. In TensorRT engines every integer
is int32, W the words of a mask row, and what is float32 [..., H] or in a cache is in the engine's precision; the last
group of names is theirs only. Which of them a graph has is said by the manifest: native attention has no slot ids.
"""

TOKEN_IDS = "token_ids"  # int64 [N, T]
SLOTS = "slots"  # int64 [N, 5]: of each sequence the slot, its committed rows, and rows: contexts, nodes done, nodes
PARENTS = "parents"  # int32 [P]: of all sequences' nodes, each counted from 0; −1 at a root
CACHE = "cache"  # uint8 [layers with attention, slots, Hkv, bytes], written in place: include/ddtree/cpu_attention.h
STATES = "states"  # float32 [delta-net layers, slots, values], of a hybrid: include/ddtree/cpu_delta.h
MOVES = "moves"  # float32 [delta-net layers, T, values]: what a commit needs of each row, written by the pass
ROWS = "rows"  # int64 [R]: flat rows of [N·T] whose logits are wanted

LOGITS = "logits"  # float32 [R, V]
TAPS = "taps"  # float32 [N, T, M·H]: outputs of the tapped layers; the drafter's input is [N, C, M·H]

FEATURES = "features"  # float32 [N, D, H]: outputs of an EAGLE-3 drafter, which it reads again; C + D = T
OUTPUTS = "outputs"  # float32 [R, H]: its outputs at the rows asked for

TOP_K = "top_k"  # int64 [1]: candidates per draft position
LOG_PROBS = "log_probs"  # float32 [N, L, K], falling; of an EAGLE-3 drafter [R, K]
CANDIDATES = "candidates"  # int64 [N, L, K], or [R, K]
# Of a drafter with a head for pairs, in place of log_probs; C is fixed, and there is no top_k.
UNARY = "unary"  # float32 [N, L, C], falling
LEFT = "left"  # float32 [N, L, C, r]: of each candidate of the position before; before the first, of the bonus token
RIGHT = "right"  # float32 [N, L, C, r]: of each candidate

CHOICES = "choices"  # int32 [R]: the target's most probable token
POSITIONS = "positions"  # int32 [N, T]; the drafter's are [N, C + 1 + L]
SLOT_IDS = "slot_ids"  # int32 [N]: the cache slot of each sequence
PAST_LEN = "past_len"  # int32 [N]: committed rows of each slot
KEEP = "keep"  # int32 [K]: rows behind the past that the compaction graph moves; see build/graph/compaction.py
TAKEN = "taken"  # int32 [K]: rows of the pass by which it advances a hybrid's states, then −1
BEFORE = "before"  # int32 [1]: the row of the path before these; −1: none
PAST_CACHE = "past_cache"  # [P, slots, Hkv, S, D]: the whole cache, input of our plugin's compaction graph
PRESENT_CACHE = "present_cache"  # its output, bound to the same buffer
TREE_MASK = "tree_mask"  # int32 [N, T, W]: bit j % 32 of word j / 32 of row i is set where i sees node j
EMBEDDING = "embedding"  # [V, H]: one copy on the device for both engines
HEAD = "lm_head"  # float32 [V, H], likewise; in shared.safetensors only where it is not the embedding
DRAFTER = "drafter."  # prefix of an autoregressive drafter's own tables in shared.safetensors


def cache_names(part: str, layer: int) -> tuple[str, str]:
    """The keys and values of a layer, [N, Hkv, S, D] each: inputs, `part` "past", or outputs "present"."""
    return f"{part}_key.{layer}", f"{part}_value.{layer}"


def state_names(part: str, layer: int) -> tuple[str, str]:
    """The state [N, Hv, Dk, Dv] of a hybrid's delta-net layer, counted among these, and the last inputs of its
    convolution [N, 1, taps − 1, C], float32: inputs, `part` "past", and outputs "present" of a commit."""
    return f"{part}_state.{layer}", f"{part}_inputs.{layer}"


def kept_name(layer: int) -> str:
    """What a commit needs of every row of a pass, output float32 [N, T, …], input [F, …]: build/graph/delta.py."""
    return f"kept.{layer}"


def plane_names(part: str, num_layers: int) -> list[str]:
    """`cache_names` of all layers in order; "present" outputs are bound to the buffers of "past" inputs."""
    return [name for layer in range(num_layers) for name in cache_names(part, layer)]
