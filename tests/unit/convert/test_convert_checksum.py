from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.convert.checksum import joined


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_joined_checksums_are_those_of_the_joined_bytes(a, b):
    assert joined(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


def test_long_parts():
    zeros, ones = bytes(2**22), b"\xff" * (2**22 + 1)
    assert joined(zlib.crc32(zeros), zlib.crc32(ones), len(ones)) == zlib.crc32(zeros + ones)
