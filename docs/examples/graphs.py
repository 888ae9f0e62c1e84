"""Classify graphs by a rare motif: PyTorch Geometric with poolings of its own and of setfold.

    python docs/examples/graphs.py [GRAPHS [EPOCHS]]

In every graph a tenth of the nodes are marked, and some marked nodes are joined in pairs. In half
of the graphs, one marked node is joined to two others. To count marked neighbours is easy for a
convolution; to find the one node that has two of them is the task of the pooling. It needs
`pip install torch_geometric`.
"""

import sys

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import MaxAggregation, MeanAggregation, SAGEConv, SumAggregation

import setfold
from setfold.pyg import SetAggregation

WIDTH = 16


def draw_graph(label: int) -> Data:
    """One graph of 100 to 300 nodes, four edges each, of which none joins two marked nodes."""
    nodes = int(torch.randint(100, 300, ()))
    marked = nodes // 10
    ends = torch.randint(nodes, (2, 2 * nodes))
    ends = ends[:, (ends >= marked).any(0)]
    pairs = torch.arange(2 * (marked // 3)).view(-1, 2).T
    if label:  # the first node of the first pair joins the second pair, whose second node leaves
        pairs = torch.cat([pairs[:, :1], torch.tensor([[0], [2]]), pairs[:, 2:]], 1)
    edges = torch.cat([ends, pairs], 1)
    x = (torch.arange(nodes) < marked).float().unsqueeze(1)
    return Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], 1), y=label)


class Network(nn.Module):
    """Two convolutions, a pooling of the nodes, and a classifier of its result."""

    def __init__(self, pool: nn.Module, width: int) -> None:
        super().__init__()
        self.near = SAGEConv(1, WIDTH, aggr="sum")
        # any encoder aggregates the neighbours of a node, too
        self.far = SAGEConv(WIDTH, WIDTH, aggr=SetAggregation(setfold.Pool(WIDTH, "mean")))
        self.pool = pool
        self.head = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, graphs: Batch) -> Tensor:
        """From B graphs to logits (B, 2)."""
        near = self.near(graphs.x, graphs.edge_index).relu()
        nodes = near + self.far(near, graphs.edge_index).relu()
        return self.head(self.pool(nodes, graphs.batch, dim_size=graphs.num_graphs))


def accuracy(model: Network, graphs: list[Data], epochs: int) -> float:
    """Train on four fifths of the graphs; the accuracy on the others."""
    cut = len(graphs) * 4 // 5
    test = Batch.from_data_list(graphs[cut:])
    batches = [Batch.from_data_list(graphs[first : first + 40]) for first in range(0, cut, 40)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        for number in torch.randperm(len(batches)).tolist():
            loss = nn.functional.cross_entropy(model(batches[number]), batches[number].y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return (model.eval()(test).argmax(1) == test.y).float().mean().item()


def poolings() -> dict[str, tuple[nn.Module, int]]:
    """Poolings, and the widths of their results."""
    attention = setfold.GatedAttentionPool(WIDTH, WIDTH)
    both = setfold.Concat([setfold.AttentionPool(WIDTH, 2, 8), setfold.Pool(WIDTH, "max")])
    return {
        "mean": (MeanAggregation(), WIDTH),
        "sum": (SumAggregation(), WIDTH),
        "max": (MaxAggregation(), WIDTH),
        "setfold GatedAttentionPool": (SetAggregation(attention), WIDTH),
        "setfold AttentionPool + max": (SetAggregation(both), 2 * WIDTH),
    }


def main(number: int = 500, epochs: int = 15) -> None:
    """Print the accuracy of each pooling, and of the more frequent class."""
    torch.manual_seed(0)
    graphs = [draw_graph(int(torch.randint(2, ()))) for _ in range(number)]
    share = sum(graph.y for graph in graphs[number * 4 // 5 :]) / (number - number * 4 // 5)
    print(f"the more frequent class      {max(share, 1 - share):.2f}")
    for name, (pool, width) in poolings().items():
        torch.manual_seed(1)
        print(f"{name:28s} {accuracy(Network(pool, width), graphs, epochs):.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
