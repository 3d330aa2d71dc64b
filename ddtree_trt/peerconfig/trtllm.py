"""TensorRT-LLM: the file of `trtllm-serve --config`, whose keys are fields of its `TorchLlmArgs`."""

from __future__ import annotations

from ddtree_trt.peerconfig.pair import ServedPair
from ddtree_trt.peerconfig.peer import Peer, Settings

SPECULATIVE = "speculative_config"


def _settings(pair: ServedPair) -> Settings:
    return {
        **pair.target.pinned(),
        "dtype": pair.dtype,
        "max_seq_len": pair.max_seq_len,
        "max_batch_size": pair.max_batch,
        SPECULATIVE: {
            "decoding_type": "DFlash",
            "max_draft_len": pair.draft_length,
            "speculative_model": pair.drafter.name,
        },
    }


def _command(pair: ServedPair) -> tuple[str, ...]:
    return ("trtllm-serve", pair.target.name)


def _notes(pair: ServedPair) -> tuple[str, ...]:
    notes = ("DFlash is in its PyTorch backend, as far as its documents say in 1.3.0rc27 and later pre-releases.",)
    if pair.drafter.revision is None:
        return notes
    return (
        *notes,
        f"It takes the drafter's newest revision. The engine was built from {pair.drafter.revision}: to run that one, "
        f"`hf download {pair.drafter.name} --revision {pair.drafter.revision} --local-dir drafter`, and set "
        "`speculative_model` to that directory.",
    )


TRTLLM = Peer(
    name="trtllm",
    title="TensorRT-LLM",
    release="1.4.0rc1",
    features=frozenset(),
    settings=_settings,
    speculative=(SPECULATIVE,),
    command=_command,
    notes=_notes,
    in_process=True,
)
