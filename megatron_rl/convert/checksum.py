"""The crc32 of bytes from the crc32 of their parts. A conversion sums each byte once and uses the result twice: for the
tensor that the byte is read from and for the tensor that it is written to.

Invariant (tests/unit/convert): `joined` of the crc32s of a and b is the crc32 of a + b.
"""

from __future__ import annotations

from functools import cache

_POLYNOMIAL = 0xEDB88320
"""zlib's polynomial. Bit 0 is the coefficient of x^31, bit 31 the coefficient of x^0."""


def joined(first: int, second: int, second_bytes: int) -> int:
    """The crc32 of `first`'s bytes followed by `second`'s: first x^(8 n) + second, modulo the polynomial."""
    return _multiply(_power(second_bytes), first) ^ second


def _multiply(a: int, b: int) -> int:
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@cache
def _power(num_bytes: int) -> int:
    """Returns x^(8 num_bytes) modulo the polynomial."""
    power, square = 0x80000000, 0x00800000  # 1, x^8
    while num_bytes:
        if num_bytes & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        num_bytes >>= 1
    return power
