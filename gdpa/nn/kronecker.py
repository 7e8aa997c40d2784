"""A linear map over tokens and features at once, as a sum of Kronecker products."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from gdpa.errors import GdpaError
from gdpa.nn.sequences import check_like, check_size


class SumKronLinear(nn.Module):
    """Y = sum over i of A_i^T Z W_i: Z (in_tokens, in_width) -> Y (out_tokens, out_width).

    A full linear map from the flattened Z to the flattened Y would have in_tokens * in_width * out_tokens * out_width weights;
    `terms` products have terms * (in_tokens * out_tokens + in_width * out_width). Computed as two matrix products: all A_i at once,
    then all W_i with the sum over i inside. No bias.

    Args:
        in_tokens, out_tokens: the tokens of Z and of Y.
        in_width: the features of a token of Z.
        out_width: those of Y; None means in_width.
        terms: how many products are summed.

    Attributes:
        token_weight: (out_tokens, terms, in_tokens); A_i^T is token_weight[:, i].
        feature_weight: (terms, in_width, out_width); W_i is feature_weight[i].
        Both start normal, with variances 1 / in_tokens and 1 / (terms * in_width), so that Y has the variance of Z.

    Forward:
        z: (..., in_tokens, in_width) -> (..., out_tokens, out_width).

    Example:
        >>> SumKronLinear(256, 32, 384, terms=8)(torch.randn(2, 256, 384)).shape
        torch.Size([2, 32, 384])
    """

    def __init__(
        self,
        in_tokens: int,
        out_tokens: int,
        in_width: int,
        out_width: int | None = None,
        *,
        terms: int = 8,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.in_tokens = check_size("in_tokens", in_tokens)
        self.out_tokens = check_size("out_tokens", out_tokens)
        self.in_width = check_size("in_width", in_width)
        self.out_width = in_width if out_width is None else check_size("out_width", out_width)
        self.terms = check_size("terms", terms)
        self.token_weight = nn.Parameter(torch.empty(out_tokens, terms, in_tokens, device=device, dtype=dtype))
        self.feature_weight = nn.Parameter(torch.empty(terms, in_width, self.out_width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.token_weight, std=1 / math.sqrt(self.in_tokens))
        nn.init.normal_(self.feature_weight, std=1 / math.sqrt(self.terms * self.in_width))

    def forward(self, z: Tensor) -> Tensor:
        if not isinstance(z, Tensor):
            raise GdpaError(f"z: expected a torch.Tensor, got {type(z).__name__}")
        if z.is_nested or z.dim() < 2 or z.shape[-2:] != (self.in_tokens, self.in_width):
            raise GdpaError(f"z: expected (..., {self.in_tokens}, {self.in_width}), got shape {tuple(z.shape)}")
        check_like("z", z, self.token_weight)
        # One product per sample: torch.matmul would bring a whole batch into one product, with copies of z and of the result.
        samples = z.reshape(-1, self.in_tokens, self.in_width)
        mixed = torch.bmm(self.token_weight.flatten(0, 1).expand(samples.shape[0], -1, -1), samples)
        # The terms of one output token lie side by side: reading them as one row of terms * in_width sums over i in the product.
        mixed = mixed.reshape(*z.shape[:-2], self.out_tokens, self.terms * self.in_width)
        return mixed @ self.feature_weight.flatten(0, 1)

    def extra_repr(self) -> str:
        return (
            f"in_tokens={self.in_tokens}, out_tokens={self.out_tokens}, in_width={self.in_width}, out_width={self.out_width}, "
            f"terms={self.terms}"
        )
