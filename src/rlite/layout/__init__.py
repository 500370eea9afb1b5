"""Who holds which part of which weight, in training, in generation and on disk. Integers only: no tensors, no groups."""

from rlite.layout.architecture import Architecture
from rlite.layout.boxes import Box, LocalLayout, LocalTensor, Region
from rlite.layout.catalogue import CanonicalTensor, catalogue
from rlite.layout.hf import hf_boxes
from rlite.layout.megatron import MegatronPlacement, megatron_boxes
from rlite.layout.parallel import EngineLayout, ParallelLayout
from rlite.layout.placement import ExplicitPlacement, Placement
from rlite.layout.vllm import VLLMPlacement, vllm_boxes

__all__ = [
    "Architecture",
    "Box",
    "CanonicalTensor",
    "EngineLayout",
    "ExplicitPlacement",
    "LocalLayout",
    "LocalTensor",
    "MegatronPlacement",
    "ParallelLayout",
    "Placement",
    "Region",
    "VLLMPlacement",
    "catalogue",
    "hf_boxes",
    "megatron_boxes",
    "vllm_boxes",
]
