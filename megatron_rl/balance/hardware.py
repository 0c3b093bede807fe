"""What an H100 SXM does, for estimates: NVIDIA's data sheet, and the shares of it that are taken to be reached."""

from __future__ import annotations

PEAK_FLOPS = 989e12
"""Dense bf16 operations per second."""
TRAINING_SHARE = 0.4
"""The share of the peak that training is taken to reach."""
BANDWIDTH = 3.35e12
"""Bytes per second of the memory."""
HOST_LINK = 50e9
"""Bytes per second that the GPU and the memory of its node are taken to exchange, in each direction at the same time;
PCIe 5.0 x16 has 63e9."""
DECODING_SHARE = 0.6
"""The share of the bandwidth that decoding is taken to reach."""
