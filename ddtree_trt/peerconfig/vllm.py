"""vLLM: the file of `vllm serve --config`, whose keys are the server's options and, in one, `SpeculativeConfig`'s."""

from __future__ import annotations

from ddtree_trt.peerconfig.pair import ServedPair
from ddtree_trt.peerconfig.peer import Peer, Settings

SPECULATIVE = "speculative-config"


def _settings(pair: ServedPair) -> Settings:
    return {
        "model": pair.target.name,
        **pair.target.pinned(),
        "dtype": pair.dtype,
        "max-model-len": pair.max_seq_len,
        "max-num-seqs": pair.max_batch,
        SPECULATIVE: {
            "method": "dflash",
            "model": pair.drafter.name,
            **pair.drafter.pinned(),
            "num_speculative_tokens": pair.draft_length,
        },
    }


VLLM = Peer(
    name="vllm",
    title="vLLM",
    release="0.33.0",
    features=frozenset(("windows", "causal", "selector", "convolution")),
    settings=_settings,
    speculative=(SPECULATIVE,),
    command=lambda pair: ("vllm", "serve"),
    notes=lambda pair: (),
)
