"""SGLang: the file of `sglang.launch_server --config`, whose keys are the server's options."""

from __future__ import annotations

from ddtree_trt.peerconfig.pair import ServedPair
from ddtree_trt.peerconfig.peer import Peer, Settings

ALGORITHM, DRAFTER = "speculative-algorithm", "speculative-draft-model-path"
DRAFTER_REVISION, DRAFT_TOKENS = "speculative-draft-model-revision", "speculative-num-draft-tokens"


def _settings(pair: ServedPair) -> Settings:
    return {
        "model-path": pair.target.name,
        **pair.target.pinned(),
        "dtype": pair.dtype,
        "context-length": pair.max_seq_len,
        "max-running-requests": pair.max_batch,
        ALGORITHM: "DFLASH",
        DRAFTER: pair.drafter.name,
        **pair.drafter.pinned(DRAFTER_REVISION),
        DRAFT_TOKENS: pair.draft_length + 1,  # it counts the bonus token too: the block
    }


SGLANG = Peer(
    name="sglang",
    title="SGLang",
    release="0.5.23",
    features=frozenset(("windows", "causal", "selector", "convolution")),
    settings=_settings,
    speculative=(ALGORITHM, DRAFTER, DRAFTER_REVISION, DRAFT_TOKENS),
    command=lambda pair: ("python3", "-m", "sglang.launch_server"),
    notes=lambda pair: (),
)
