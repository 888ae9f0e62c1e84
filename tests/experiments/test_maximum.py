import pytest
import torch
from torch import nn

from experiments.pools import PMA, DeepSets, Pool, Slots
from experiments.tasks.maximum import Maximum, Numbers, draw_numbers

POOLS = [DeepSets("max"), DeepSets("sum"), PMA(), Slots(4, aggregate="max")]


def ragged(numbers: Numbers) -> list[list[float]]:
    pairs = zip(numbers.values.squeeze(-1), numbers.mask, strict=True)
    return [values[shown].tolist() for values, shown in pairs]


def test_the_maximum_is_that_of_what_is_shown() -> None:
    numbers = draw_numbers(200, most=10)
    assert numbers.maximum().tolist() == [max(values) for values in ragged(numbers)]


def test_sets_have_every_length_and_numbers_fill_the_range() -> None:
    numbers = draw_numbers(5000, most=10, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([len(values) for values in ragged(numbers)])
    shares = lengths.bincount(minlength=11)[1:] / 5000
    assert (shares - 0.1).abs().max() < 0.02
    assert numbers.values.min() < 0.1
    assert 99.9 < numbers.values.max() < 100


@pytest.mark.parametrize("pool", POOLS, ids=repr)
def test_padding_is_not_seen(pool: Pool) -> None:
    model = Maximum(pool, layers=2, width=8).build().eval()
    numbers = draw_numbers(20, most=6)
    alone = [model(_whole(values)) for values in ragged(numbers)]
    assert torch.allclose(model(numbers), torch.cat(alone), atol=1e-3)
    other = Numbers(numbers.values.masked_fill(~numbers.mask.unsqueeze(-1), 77.0), numbers.mask)
    assert torch.equal(model(other), model(numbers))


def _whole(values: list[float]) -> Numbers:
    return Numbers(torch.tensor(values).view(1, -1, 1), torch.ones(1, len(values)).bool())


class Guess(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(50.0))

    def forward(self, numbers: Numbers) -> torch.Tensor:
        return self.value.expand(len(numbers.values))


def test_the_loss_and_the_metric_are_mean_absolute_errors() -> None:
    task = Maximum(DeepSets())
    numbers = draw_numbers(50, most=10)
    expected = sum(abs(50.0 - max(values)) for values in ragged(numbers)) / 50
    assert task.loss(Guess(), numbers).item() == pytest.approx(expected, rel=1e-5)
    # the mean over n = 1..10 of E|50 - max of n|, each 50 (n-1)/(n+1) + 100 2^-n/(n+1)
    each = [50 * (n - 1) / (n + 1) + 100 * 0.5**n / (n + 1) for n in range(1, 11)]
    error = task.evaluate(Guess(), "validation")["error"]
    assert error == pytest.approx(sum(each) / 10, abs=0.5)


def test_evaluation_is_the_same_every_time_and_another_for_each_split() -> None:
    task = Maximum(DeepSets("max"), layers=2, width=8, tested=100)
    model = task.build().eval()
    found = [task.evaluate(model, split) for split in ("test", "test", "validation")]
    assert found[0] == found[1] != found[2]


def test_it_learns() -> None:
    torch.manual_seed(0)
    task = Maximum(DeepSets("max"), layers=2, width=32, tested=500)
    model = task.build()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        task.loss(model, task.batch(torch.arange(32))).backward()
        optimizer.step()
    error = task.evaluate(model.eval(), "validation")["error"]
    assert isinstance(error, float)
    assert error < 8  # guessing the median is off by 17
