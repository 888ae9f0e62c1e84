import pytest
import torch

from experiments.data import digit_elements, mnist

DIGITS = mnist.load(made_up=True)
FOUND = digit_elements.load(3, made_up=True)


def moved(image: torch.Tensor, down: int, right: int) -> torch.Tensor:
    """Move a digit; what leaves the image is lost."""
    found = torch.zeros_like(image)
    for row, column in torch.nonzero(image).tolist():
        if 0 <= row + down < len(image) and 0 <= column + right < len(image):
            found[row + down, column + right] = image[row, column]
    return found


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_elements_are_the_digits_of_their_split_in_nine_places_needles_last(split):
    mean, basis = digit_elements._components(DIGITS.images["train"])
    images, labels = DIGITS.images[split], DIGITS.labels[split]
    expected: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    places = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    for image, label in list(zip(images, labels, strict=True))[:20]:
        for place in places:
            element = (moved(image, *place).float().flatten() - mean) @ basis
            expected[label.item() == 3].append(element)
    features, others = FOUND.features[split], FOUND.others[split]
    assert len(features) == 9 * len(images)
    assert others == 9 * int((labels != 3).sum())
    for is_needle, rows in ((False, features[:others]), (True, features[others:])):
        nearest = torch.cdist(torch.stack(expected[is_needle]), rows).amin(1)
        assert nearest.max() < 1e-2


def test_components_are_those_of_the_training_images_with_variance_one_on_average():
    mean, basis = digit_elements._components(DIGITS.images["train"])
    flat = DIGITS.images["train"].flatten(1).double()
    components = (flat - flat.mean(0)) @ basis.double()
    assert torch.allclose(mean.double(), flat.mean(0), atol=1e-3)
    covariance = components.T @ components / len(flat)
    variances = covariance.diagonal()
    assert variances.mean() == pytest.approx(1, rel=1e-3)
    assert (covariance - variances.diag()).abs().max() < 1e-3  # uncorrelated
    total = (flat - flat.mean(0)).square().sum() / len(flat)
    kept = components.square().sum() / len(flat) / basis.double().square().sum(0).mean()
    largest = torch.linalg.svdvals(flat - flat.mean(0)).square()[: digit_elements.DIM].sum()
    assert kept / total == pytest.approx(float(largest / len(flat) / total), rel=1e-3)


def test_what_leaves_an_image_does_not_come_back():
    image = torch.zeros(1, 28, 28, dtype=torch.uint8)
    image[0, 0, 5] = image[0, 9, 27] = 255
    flat = torch.cat(list(digit_elements._projected(image, torch.zeros(784), torch.eye(784))))
    expected = [moved(image[0], -down, -right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    assert torch.equal(flat.view(9, 28, 28), torch.stack(expected).float())
