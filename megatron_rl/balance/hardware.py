"""What an H100 SXM can do by NVIDIA's data sheet."""

from __future__ import annotations

PEAK_FLOPS = 989e12
"""Dense bf16 operations per second."""
BANDWIDTH = 3.35e12
"""Bytes per second of the memory."""
