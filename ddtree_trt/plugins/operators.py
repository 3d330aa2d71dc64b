"""The torch operators of `libddtree_torch.so`: names and schemas, as `cpp_plugins/torch/ops.cpp` registers them.

Their namespace is `torch.ops.ddtree`. Letters in brackets name the tensors an operator writes to.
"""

from __future__ import annotations

SCHEMAS = (
    "attention_workspace_bytes(Tensor q, Tensor cache_k, int mask_words, int mask_mode, float scale, int splits=0) "
    "-> int",
    "tree_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) cache_k, Tensor(b!) cache_v, Tensor slot_ids, "
    "Tensor past_len, Tensor? tree_mask, int mask_mode, float scale, Tensor(c!) out, Tensor(d!) workspace, "
    "int splits=0) -> ()",
    "build_tree(Tensor log_probs, Tensor candidates, Tensor root_tokens, Tensor? budgets, Tensor? past_len, "
    "Tensor(a!) token_ids, Tensor(b!) parents, Tensor(c!) depths, Tensor(d!)? positions, Tensor(e!)? log_weights, "
    "Tensor(f!) counts) -> ()",
    "packed_mask(Tensor parents, Tensor(a!) mask) -> ()",
    "walk(Tensor parents, Tensor token_ids, Tensor choices, Tensor? counts, Tensor? past_len, Tensor(a!) path, "
    "Tensor(b!) lengths, Tensor(c!) next_tokens, Tensor(d!)? next_past_len) -> ()",
    "compact(Tensor(a!) cache, Tensor slot_ids, Tensor past_len, Tensor keep, Tensor keep_count) -> ()",
    "add_rms_norm(Tensor x, Tensor? update, Tensor weight, float epsilon, Tensor(a!)? sum, Tensor(b!) normed) -> ()",
    "split_qkv(Tensor qkv, Tensor q_norm, Tensor k_norm, Tensor tables, Tensor positions, float epsilon, "
    "Tensor(a!) q, Tensor(b!) k, Tensor(c!) v) -> ()",
    "swiglu(Tensor gate_up, Tensor(a!) out) -> ()",
)
OPERATORS = tuple(schema.partition("(")[0] for schema in SCHEMAS)
