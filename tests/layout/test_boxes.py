import pytest
import torch

from rlite.layout.boxes import Box, LocalLayout, LocalTensor, Region, check_local, intersect, volume


def test_intersection_of_two_boxes():
    assert intersect((0, 0), (4, 8), (2, 4), (9, 9)) == ((2, 4), (4, 8))
    assert intersect((0, 0), (4, 8), (4, 0), (9, 9)) is None
    assert volume((2, 4), (4, 8)) == 8


def test_local_index_of_a_part_of_a_stacked_box():
    # Rows 10..14 of the canonical tensor are rows 3..7 of slice 2 of the local one.
    box = Box("t", (10, 0), (14, 5), "stack", (2, 3, 0))
    local = torch.arange(3 * 9 * 5).reshape(3, 9, 5)
    assert box.local_stop == (3, 7, 5)
    assert torch.equal(local[box.local_index((11, 1), (13, 4))], local[2, 4:6, 1:4])


def _layout(*boxes: Box, padding: tuple[Region, ...] = ()) -> LocalLayout:
    return LocalLayout((LocalTensor("w", (4, 2), "float32"),), boxes, padding)


def test_boxes_and_padding_that_tile_a_tensor_pass():
    padding = (Region("a", "w", (3, 0), (4, 2)),)
    check_local(_layout(Box("a", (0, 0), (2, 2), "w", (0, 0)), Box("b", (5, 0), (6, 2), "w", (2, 0)), padding=padding))


def test_elements_without_a_box_are_found():
    with pytest.raises(ValueError, match=r"w: boxes cover 4 of the 8 elements"):
        check_local(_layout(Box("a", (0, 0), (2, 2), "w", (0, 0))))


def test_overlapping_boxes_are_found():
    with pytest.raises(ValueError, match=r"w: boxes .* overlap"):
        check_local(_layout(Box("a", (0, 0), (3, 2), "w", (0, 0)), Box("b", (0, 0), (2, 2), "w", (2, 0))))


def test_box_outside_its_tensor_is_found():
    with pytest.raises(ValueError, match=r"w: box .* leaves the tensor's shape"):
        check_local(_layout(Box("a", (0, 0), (5, 2), "w", (0, 0))))


def test_box_of_an_unknown_local_tensor_is_found():
    with pytest.raises(ValueError, match=r"do not exist: \['x'\]"):
        check_local(_layout(Box("a", (0, 0), (4, 2), "x", (0, 0))))
