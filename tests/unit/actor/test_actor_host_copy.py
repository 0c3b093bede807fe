"""A copy in the host's memory has the bytes of its storages, in chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.actor import host_copy
from megatron_rl.actor.host_copy import HostCopy


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    before, host_copy.CHUNK_BYTES = host_copy.CHUNK_BYTES, 8
    yield
    host_copy.CHUNK_BYTES = before


@given(sizes=st.lists(st.integers(0, 30), max_size=6))
def test_every_byte_comes_back_and_no_chunk_is_larger_than_its_power_of_two(sizes):
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    before = [tensor.clone() for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in tensors]
    copy = HostCopy(sum(sizes))
    chunks = [len(chunk) for chunk in copy._chunks]
    assert (
        sum(chunks) == sum(sizes) and all(size == 8 for size in chunks[:-1]) and all(0 < size <= 8 for size in chunks)
    )
    copy.store(storages)
    for storage in storages:
        storage.resize_(0)
    for storage, size in zip(storages, sizes, strict=True):
        storage.resize_(size)
    for tensor in tensors:
        tensor.zero_()
    copy.restore(storages)
    for tensor, kept in zip(tensors, before, strict=True):
        assert torch.equal(tensor, kept)


def test_a_storage_with_numbers_of_several_bytes_is_copied_whole():
    numbers = torch.arange(5, dtype=torch.float64)
    view = numbers[1:3]
    copy = HostCopy(40)
    copy.store([view.untyped_storage()])
    numbers.zero_()
    copy.restore([view.untyped_storage()])
    assert numbers.tolist() == [0, 1, 2, 3, 4]
