"""A loss of the user's own, by its import path."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.losses.terms import Terms, TokenLoss
from megatron_rl.config.exception_text import place, said
from megatron_rl.config.function import load_function, short_path
from megatron_rl.config.losses import FunctionLoss


def function_loss(cfg: FunctionLoss) -> TokenLoss:
    """The function itself, with its errors and its results checked.

    Raises:
        ValueError: there is no such function. Later, when the loss is called: the function raised, or its result is not
            one number for each token and named columns of the same length.
    """
    function, key = load_function(cfg.path), f"algorithm.loss {short_path(cfg.path)}"

    def loss(terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        try:
            result = function(terms)
        except BaseException as error:
            raise ValueError(f"{key} raised {said(error)}{place(error)}") from error
        if not _is_well_formed(result, terms):
            raise ValueError(
                f"{key} must return (loss_T, columns): a tensor with one number for each of the "
                f"{len(terms.mask_T)} tokens, and a dictionary of such tensors, whose means become metrics"
            )
        return result[0], dict(result[1])

    return loss


def _is_well_formed(result: object, terms: Terms) -> bool:
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        return False
    tensors = [result[0], *result[1].values()]
    return all(isinstance(x, torch.Tensor) and x.shape == terms.mask_T.shape for x in tensors)
