"""The trainer: Megatron-Core, split by tensor, pipeline, context, expert, sequence and data parallelism."""

from __future__ import annotations

import warnings

# At import Megatron warns about every optional package that is missing. The actor logs which layers it runs, so the
# warnings are not needed. This filter must come before the first import of Megatron.
warnings.filterwarnings("ignore", module=r"megatron\.core")
