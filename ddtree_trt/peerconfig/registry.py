"""The engines that a pair can be exported to."""

from ddtree_trt.peerconfig.sglang import SGLANG
from ddtree_trt.peerconfig.trtllm import TRTLLM
from ddtree_trt.peerconfig.vllm import VLLM

PEERS = (TRTLLM, VLLM, SGLANG)
