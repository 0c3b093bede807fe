"""However files are cut into spans, and in whatever order these are written, the files and what the manifest says
about them are the same."""

from __future__ import annotations

import zlib

import cover
import pytest
import torch
from folders import write, write_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.convert import Options, open_checkpoint, smallest_mesh, to_hub, to_open, to_ranks
from megatron_rl.convert.spans import Written, cut, entry, whole_sources
from megatron_rl.convert.spans import write as write_span
from megatron_rl.convert.target import TargetTensor, blocks
from megatron_rl.convert.tensor_files import Maps

FORMS = {
    "open": lambda source: to_open(source),
    "hub": lambda source: to_hub(source, Options(max_file_bytes=3000)),
    "ranks": lambda source: to_ranks(source, smallest_mesh(2, 2, 1, pipeline=2), True),
    "bfloat16": lambda source: to_open(source, Options("bfloat16")),
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """A source with a manifest, so that what is read is compared with checksums."""
    root = tmp_path_factory.mktemp("spans")
    write(to_open(open_checkpoint(write_folder(root / "hub", "qwen3_moe", num_hidden_layers=2))), root / "open")
    return root / "open"


@pytest.mark.parametrize("form", cover.essential(FORMS, "ranks", "bfloat16"))
@settings(max_examples=cover.examples(24), deadline=None)
@given(data=st.data(), max_bytes=st.integers(1, 5000))
def test_the_cuts_and_their_order_change_nothing(checked, form, tmp_path_factory, data, max_bytes):
    """The expected bytes are those of all segments, one after the other."""
    source, path = open_checkpoint(checked), tmp_path_factory.mktemp("cut") / "file"
    files = [file for file in FORMS[form](source).files if list(file.tensors())]
    file = files[data.draw(st.integers(0, len(files) - 1))]
    spans, sources = cut(file, max_bytes), whole_sources(file)
    written: list[Written | None] = [None] * len(spans)
    for i in data.draw(st.permutations(range(len(spans)))):
        written[i] = write_span(path, file, spans[i], sources, Maps(source.checksums), lambda num_bytes: None)
    found = entry(file, written, Maps(source.checksums))
    assert path.read_bytes() == b"".join(map(content, file.segments))
    tensors = {
        tensor.name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "start": start,
            "bytes": tensor.num_bytes,
            "crc32": f"{zlib.crc32(content(tensor)):08x}",
        }
        for tensor, start in file.tensors()
    }
    frame = zlib.crc32(b"".join(segment for segment in file.segments if isinstance(segment, bytes)))
    assert found == {"bytes": path.stat().st_size, "crc32": f"{frame:08x}", "tensors": tensors}


def content(segment: bytes | TargetTensor) -> bytes:
    if isinstance(segment, bytes):
        return segment
    return b"".join(block.contiguous().view(torch.uint8).numpy().tobytes() for block in blocks(segment, Maps({})))
