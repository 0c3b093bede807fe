"""Of the tiny models here."""

VOCAB_SIZE = 60
"""Not a multiple of 32: Megatron pads the vocabulary, and the padding must have no probability."""
