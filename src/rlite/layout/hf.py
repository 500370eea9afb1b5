"""Where a Hugging Face checkpoint keeps the model: every tensor whole, under its canonical name."""

from collections.abc import Iterable

from rlite.layout.boxes import Box, LocalLayout, LocalTensor
from rlite.layout.catalogue import CanonicalTensor


def hf_boxes(tensors: Iterable[CanonicalTensor], *, dtype: str = "bfloat16") -> LocalLayout:
    """One full box for each of `tensors`."""
    local, boxes = [], []
    for tensor in tensors:
        origin = (0,) * len(tensor.shape)
        local.append(LocalTensor(tensor.name, tensor.shape, tensor.dtype or dtype))
        boxes.append(Box(tensor.name, origin, tensor.shape, tensor.name, origin))
    return LocalLayout(tuple(local), tuple(boxes))
