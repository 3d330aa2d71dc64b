"""The engine directory: all that passes from `build` to `runtime`.

`build` writes it; `runtime` reads it through `manifest.load_manifest` and `verify.verify_files` before it opens
anything else in it.

Dimension letters used across the project:
N sequences (slots in one call), T tree tokens (1 + B), B tree budget, L draft positions (block size − 1), K top-k
candidates, H hidden size, Hq / Hkv query and key-value heads, D head size, S cache capacity, V vocabulary, M tapped
target layers, C context rows handed to the drafter, R rows whose logits are computed.
"""
