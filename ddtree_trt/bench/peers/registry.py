"""The peers by name. Each is imported only when it is used."""

from __future__ import annotations

from collections.abc import Callable

from ddtree_trt.bench.contender import Contender
from ddtree_trt.bench.peers.base import PeerContext
from ddtree_trt.errors import UsageError

HELP = "hf, llama-cpp=FILE, ddtree-reference=PATH, tensorrt-llm[=DIR] or openai=URL"


def _hf(context: PeerContext, value: str) -> Contender:
    from ddtree_trt.bench.peers.hf import HuggingFacePeer

    return HuggingFacePeer(context)


def _llama_cpp(context: PeerContext, value: str) -> Contender:
    from ddtree_trt.bench.peers.llamacpp import LlamaCppPeer

    return LlamaCppPeer(context, value)


def _reference(context: PeerContext, value: str) -> Contender:
    from ddtree_trt.bench.peers.reference import ReferencePeer

    return ReferencePeer(context, value)


def _tensorrt_llm(context: PeerContext, value: str) -> Contender:
    from ddtree_trt.bench.peers.trtllm import TensorRTLLMPeer

    return TensorRTLLMPeer(context, value)


def _openai(context: PeerContext, value: str) -> Contender:
    from ddtree_trt.bench.peers.openai_server import OpenAIPeer

    return OpenAIPeer(context, value)


_PEERS: dict[str, tuple[str, Callable[[PeerContext, str], Contender]]] = {
    "hf": ("", _hf),
    "llama-cpp": ("MODEL.gguf[,DRAFT.gguf]", _llama_cpp),
    "ddtree-reference": ("PATH", _reference),
    "tensorrt-llm": ("[DIR]", _tensorrt_llm),
    "openai": ("URL", _openai),
}


def check_peer(spec: str) -> tuple[str, str]:
    """A peer's name and value. Raises UsageError for an unknown name, and for a missing or superfluous value."""
    name, _, value = spec.partition("=")
    if name not in _PEERS:
        raise UsageError(f"unknown peer {spec!r}; known are {HELP}")
    wanted = _PEERS[name][0]
    if not wanted.startswith("[") and bool(wanted) != bool(value):
        raise UsageError(f"--peer {name} takes {f'{name}={wanted}' if wanted else 'no value'}, not {spec!r}")
    return name, value


def open_peer(spec: str, context: PeerContext) -> Contender:
    """Load a peer. Raises UsageError, or MissingDependency that says what to install."""
    name, value = check_peer(spec)
    return _PEERS[name][1](context, value)
