"""Lets code that computes in float32 compute in float64, so that its rounding can be measured.

transformers is no such measure: its norms and rotary angles are float32 for any dtype of the model, and over 30 layers
they cost 1e-5 of a gradient. Invariant (tests/ranks): the trainer's gradient in float64 equals the gradient of a model
without any float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]


class Float32MeansFloat64(TorchFunctionMode):
    """The block where float32 means float64, in this thread: tensors are made and converted in float64, and say that
    they are float32, so that Megatron takes them. Tensors of NumPy's arrays keep their float32 numbers, and what is
    computed from them and others is float64. The CUDA path has not been run."""

    def __enter__(self) -> Float32MeansFloat64:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]  # it has no types
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # it has no types
        torch.set_default_dtype(self._default)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DTYPE:
            dtype = func(*args)
            return torch.float32 if dtype == torch.float64 else dtype
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(_widened(value) for value in args)
        result = func(*args, **{name: _widened(value) for name, value in (kwargs or {}).items()})
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("Double", "Float")
        return result


def _widened(value: object) -> object:
    return torch.float64 if value is torch.float32 else value
