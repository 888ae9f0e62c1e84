import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

import setfold
from experiments.pools import PMA, DeepSets, Pool, Slots, Transformer
from experiments.tasks.clustering import Clusterer, Clustering, Mixture, _points, draw_mixtures

POOLS = [
    DeepSets(),
    Slots(4, aggregate="weighted_mean", slots="learned", similarity="cosine"),
    PMA(num_seeds=4),
    Transformer(num_layers=1, num_inducing=4, dim=16, last=PMA(num_seeds=4)),
]


def small(pool: Pool) -> Clustering:
    return Clustering(pool, layers=2, width=16)


def test_the_likelihood_is_that_of_torch() -> None:
    weights = torch.rand(3, 4, dtype=torch.float64).log_softmax(1)
    means, scales = torch.randn(2, 3, 4, 2, dtype=torch.float64)
    mixture = Mixture(weights, means, scales.exp())
    points = torch.randn(3, 50, 2, dtype=torch.float64)
    for i in range(3):
        reference = MixtureSameFamily(
            Categorical(logits=weights[i]), Independent(Normal(means[i], scales[i].exp()), 1)
        )
        assert torch.allclose(mixture.log_likelihood(points)[i], reference.log_prob(points[i]))


def test_points_come_from_their_own_mixture() -> None:
    torch.manual_seed(0)
    log_weights = torch.tensor([[0.8, 0.2], [0.5, 0.5]]).log()
    means = torch.tensor([[[-3.0, 0.0], [3.0, 1.0]], [[0.0, -3.0], [2.0, 3.0]]])
    deviations = torch.tensor([[[0.1, 0.4], [0.2, 0.3]], [[0.3, 0.2], [0.4, 0.1]]])
    points = Mixture(log_weights, means, deviations).draw(4000)
    for i, axis in enumerate((0, 1)):  # the axis along which the two clusters part
        second = points[i, :, axis] > 0
        for k, cluster in enumerate((points[i, ~second], points[i, second])):
            assert len(cluster) / 4000 == pytest.approx(log_weights[i, k].exp().item(), abs=0.03)
            assert torch.allclose(cluster.mean(0), means[i, k], atol=0.03)
            assert torch.allclose(cluster.std(0), deviations[i, k], atol=0.03)


def test_mixtures_are_as_the_task_has_them() -> None:
    torch.manual_seed(0)
    mixtures = draw_mixtures(4000, 4)
    weights = mixtures.log_weights.exp()
    assert torch.allclose(weights.sum(1), torch.ones(4000))
    assert weights.var(0) == pytest.approx([3 / 80] * 4, abs=4e-3)  # of a flat Dirichlet
    assert mixtures.means.abs().max() < 4
    assert mixtures.means.std().item() == pytest.approx(8 / 12**0.5, abs=0.03)
    assert bool((mixtures.deviations == 0.3).all())


class Oracle(nn.Module):
    """Knows the mixtures of the collection that it is asked about, one batch after the other."""

    def __init__(self, task: Clustering) -> None:
        super().__init__()
        self.answers = [mixture for mixture, _ in task._fixed("test")]
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, points: torch.Tensor) -> Mixture:
        return self.answers.pop(0)


def test_the_true_parameters_reach_the_published_likelihood() -> None:
    task = Clustering(DeepSets())
    found = task.evaluate(Oracle(task), "test")
    assert found["log-likelihood"] == found["oracle"]
    assert found["oracle"] == pytest.approx(-1.4726, abs=0.02)


@pytest.mark.parametrize("pool", POOLS, ids=repr)
def test_folded_models_say_what_whole_ones_say(pool: Pool) -> None:
    task = small(pool)
    model = task.build().eval()
    found = task.streamed(model, mixtures={50: 5, 700: 3}, chunk=600)
    truth = draw_mixtures(5, 4, torch.Generator().manual_seed(0))
    for size, number, chunk in ((50, 5, 120), (700, 3, 200)):
        first = Mixture(*(part[:number] for part in truth))
        points = torch.cat(list(_points(first, size, chunk, torch.device("cpu"))), 1)
        assert points.shape == (number, size, 2)
        with torch.no_grad():
            scores = model(points).log_likelihood(points) - first.log_likelihood(points)
        expected = [row.mean().item() for row in scores]
        assert found[f"below oracle, {size} points"] == pytest.approx(expected, rel=1e-4)


def test_an_encoder_that_cannot_be_folded_is_refused() -> None:
    encoder = setfold.FullSetTransformer(2, 16, head=nn.Sequential(nn.Flatten(), nn.Linear(16, 64)))
    model = Clusterer(encoder, clusters=4, width=16, blocks=1).eval()
    with pytest.raises(setfold.InputError, match="cannot be folded"):
        small(DeepSets()).streamed(model, mixtures={10: 2})


def test_a_batch_has_sets_of_one_size_within_the_bounds() -> None:
    task = Clustering(DeepSets(), least=5, most=7)
    sizes = {task.batch(torch.arange(3)).shape for _ in range(50)}
    assert sizes == {(3, 5, 2), (3, 6, 2), (3, 7, 2)}


def test_it_learns() -> None:
    torch.manual_seed(0)
    task = Clustering(DeepSets(), layers=2, width=16, least=50, most=50, tested=5)
    model = task.build()
    before = task.evaluate(model.eval(), "validation")["log-likelihood"]
    optimizer = torch.optim.Adam(model.train().parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        task.loss(model, task.batch(torch.arange(10))).backward()
        optimizer.step()
    after = task.evaluate(model.eval(), "validation")["log-likelihood"]
    assert isinstance(before, float)
    assert isinstance(after, float)
    assert after > max(before, -4.6)  # the best single Gaussian has about -4.5
