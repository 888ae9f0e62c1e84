"""Set encoders as aggregations of PyTorch Geometric (extra `pyg`)."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor
from torch_geometric.nn.aggr import Aggregation

from setfold.core.encoder import StreamingSetEncoder
from setfold.core.weights import first_tensor
from setfold.core.whole import WholeSetEncoder
from setfold.errors import InputError
from setfold.kernels.modes import autocasts


class SetAggregation(Aggregation):
    """A set encoder as an aggregation: each group of rows is a set.

    It takes the place of PyG's own aggregations: as `aggr` of a convolution, instead of
    `global_mean_pool`, or in a `MultiAggregation`. The index may have any order, and groups are not
    padded to the size of the largest. A group without rows is an empty set.

    The output is two-dimensional, as convolutions expect: a readout (K, d_out) of a group becomes
    one row of width K * d_out. A convolution that adds the row to the node's own features, as
    GINConv does, needs an encoder whose rows are as wide as those features; a `Composition` with a
    linear head has any width. SAGEConv takes a pair, (width of the rows, width of the node), as
    `in_channels`; a single number is both.

    An encoder with random slots draws them once per call, for all groups.

    Args:
        encoder: any set encoder of setfold. Those that need whole sets compute groups of equal size
            together.

    >>> from setfold import AttentionPool
    >>> from torch_geometric.nn import SAGEConv
    >>> aggregation = SetAggregation(AttentionPool(dim_in=16, num_queries=4, dim_out=8))
    >>> rows, group = torch.randn(6, 16), torch.tensor([2, 0, 0, 2, 2, 0])
    >>> aggregation(rows, group).shape  # like global_mean_pool(rows, group)
    torch.Size([3, 32])
    >>> conv = SAGEConv((32, 16), 24, aggr=aggregation)  # rows of width 32, nodes of width 16
    >>> conv(rows, torch.tensor([[0, 1, 2, 3], [1, 1, 0, 4]])).shape
    torch.Size([6, 24])
    """

    def __init__(self, encoder: StreamingSetEncoder | WholeSetEncoder) -> None:
        super().__init__()
        if not isinstance(encoder, StreamingSetEncoder | WholeSetEncoder):
            raise InputError(
                "encoder must be a set encoder of setfold, such as setfold.AttentionPool; got "
                f"{type(encoder).__name__}."
            )
        self.encoder = encoder
        self._initial = deepcopy(encoder.state_dict())

    def reset_parameters(self) -> None:
        """Restore the weights that the encoder had when it was passed to the constructor.

        Convolutions call this when they are constructed, so it must not discard trained weights.
        """
        self.encoder.load_state_dict(self._initial)

    def forward(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
    ) -> Tensor:
        """Encode each group.

        Args:
            x: (..., n, ..., d); the rows of a group lie along `dim`, their features come last. With
                further dimensions, such as the heads of GATConv, each of their places has sets of
                its own.
            index: (n,), the group of each row, in any order.
            ptr: (G + 1,), where each group begins, instead of an index.
            dim_size: the number of groups; by default the largest index plus 1.
            dim: the dimension of the rows; not the last.

        Returns:
            (..., G, ..., width), with the groups along `dim`.

        Raises:
            InputError: shapes, dtypes, devices or the index do not fit.
            NonFiniteError: an element is NaN or infinite, or layers of the encoder overflow.
        """
        axis = dim % x.dim()
        if axis == x.dim() - 1:
            raise InputError(
                f"features come last, so rows must lie along another dimension; got dim={dim} for "
                f"{tuple(x.shape)}. Pass x.unsqueeze(-1) if each row is one number."
            )
        rows = x.movedim(axis, 0)
        groups = _groups(rows, index, ptr)
        if dim_size is None:
            dim_size = int(groups.max()) + 1 if groups.numel() else 0
        beside = rows.shape[1:-1]
        places = beside.numel()
        if places != 1:
            groups = (groups.unsqueeze(1) * places + torch.arange(places, device=x.device)).ravel()
        weight = first_tensor((self.encoder,))
        if weight is not None and autocasts(x.device):
            rows = rows.to(weight.dtype)
        encoding = self.encoder(
            rows.reshape(-1, x.shape[-1]), index=groups, batch_size=dim_size * places
        )
        found = encoding.unsqueeze(-1).flatten(1)
        return found.reshape(dim_size, *beside, found.shape[1]).movedim(0, axis)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.encoder).__name__})"


def _groups(rows: Tensor, index: Tensor | None, ptr: Tensor | None) -> Tensor:
    """The group of each row (n, ...), as PyG understands its arguments: (n,)."""
    for name, given in (("index", index), ("ptr", ptr)):
        if given is not None and (given.is_floating_point() or given.dtype == torch.bool):
            raise InputError(f"{name} must be integers, as torch.long; got {given.dtype}.")
    if index is not None:
        return index.long()
    if ptr is None:
        return torch.zeros(len(rows), dtype=torch.long, device=rows.device)
    ends = [*ptr[:1].tolist(), *ptr[-1:].tolist()]
    if ends != [0, len(rows)] or bool((ptr.diff() < 0).any()):
        raise InputError(
            f"ptr must ascend from 0 to {len(rows)}, the number of rows; got {ptr.tolist()}."
        )
    numbers = torch.arange(len(ptr) - 1, device=ptr.device)
    return torch.repeat_interleave(numbers, ptr.diff())
