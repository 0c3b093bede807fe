"""The trainer: Megatron-Core, split by tensor, pipeline and data parallelism."""

from __future__ import annotations

import warnings

# Megatron warns at import of every optional package that it lacks; the actor logs which layers it runs. Here,
# because it must come before the first import of Megatron.
warnings.filterwarnings("ignore", module=r"megatron\.core")
