"""The arena that weights lie in."""

import torch

from headrace.kernels.huge_pages import WeightArena


def test_tensors_are_apart_aligned_and_keep_what_is_written() -> None:
    arena = WeightArena()
    counts = [1, 17, 5_000_000, 100, 9_000_000, 3, 3_000_000]  # the second and fifth need blocks of their own
    tensors = [arena.floats(count) for count in counts]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    for value, (count, tensor) in enumerate(zip(counts, tensors, strict=True)):
        assert tensor.shape == (count,)
        assert tensor.data_ptr() % 64 == 0
        assert bool((tensor == value).all())


def test_a_tensor_outlives_the_arena() -> None:
    tensor = WeightArena().floats(1000)
    tensor.copy_(torch.arange(1000))
    WeightArena().floats(1000).zero_()
    assert tensor.sum() == 999 * 500


def test_a_block_begun_in_inference_mode_can_be_written_outside_it() -> None:
    arena = WeightArena()
    with torch.inference_mode():
        arena.floats(10).zero_()
    arena.floats(10).zero_()
