"""What encoders without parameters have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from setfold.core.arguments import check_sizes
from setfold.core.encoder import StreamingSetEncoder


class ParameterFreeEncoder(StreamingSetEncoder):
    """A streaming encoder that reads statistics of the elements and has nothing to train.

    Args:
        dim_in: width d of the elements.
    """

    dim_in: int
    like: Tensor  # empty; it keeps the device and the dtype

    def __init__(self, dim_in: int) -> None:
        super().__init__()
        check_sizes(dim_in=dim_in)
        self.dim_in = dim_in
        self.register_buffer("like", torch.empty(0), persistent=False)

    def extra_repr(self) -> str:
        return f"dim_in={self.dim_in}"
