"""Random configurations of every streaming encoder against formulas; see tests/differential."""

from __future__ import annotations

import inspect
import os

import numpy as np
import pytest
import torch

import setfold
from tests.differential import compare, routes
from tests.differential.arithmetic import Arithmetic
from tests.differential.arithmetic import exact as bounded
from tests.differential.configurations import draw_configuration
from tests.differential.encoders import MAKERS

FEW, MANY, BLOCK = 300, 10_000, 500


@pytest.mark.parametrize("first", range(0, FEW, 50))
def test_the_answer_is_right_and_infinite_where_it_does_not_fit(first):
    for number in range(first, first + 50):
        compare.check(number)


@pytest.mark.skipif(
    not os.environ.get("SETFOLD_STRESS"), reason="takes minutes; set SETFOLD_STRESS=1 to run"
)
@pytest.mark.parametrize("first", range(FEW, FEW + MANY, BLOCK))
def test_many_answers_are_right(first):
    for number in range(first, first + BLOCK):
        compare.check(number)


def test_every_streaming_encoder_is_compared():
    public = [getattr(setfold, name) for name in setfold.__all__]
    kinds = [kind for kind in public if inspect.isclass(kind) and not inspect.isabstract(kind)]
    assert {kind for kind in kinds if issubclass(kind, setfold.StreamingSetEncoder)} == {*MAKERS}


@pytest.mark.parametrize(
    ("exact", "right", "wrong"),
    [
        (1.0, [1.0], [np.inf, np.nan, 2.0]),
        (-1e39, [-np.inf], [np.inf, np.nan, -3.4e38, 0.0]),
        (3e38, [3e38], [np.inf, np.nan]),
    ],
)
def test_infinity_is_right_only_where_the_number_does_not_fit(exact, right, wrong):
    arithmetic = Arithmetic(torch.float32)
    expected = arithmetic.stored(bounded(np.array([exact])))
    for number in right:
        compare.compare_numbers(np.array([number]), expected, arithmetic, "here")
    for number in wrong:
        with pytest.raises(AssertionError, match="1 of 1 numbers are wrong"):
            compare.compare_numbers(np.array([number]), expected, arithmetic, "here")


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
def test_a_small_error_is_noticed(monkeypatch, dtype, size):
    """The bounds are not so wide that everything is right."""
    original, noticed = routes.run, []

    def wrong(configuration):
        encoding, slots = original(configuration)
        return (encoding.double() * (1 + size)).to(encoding.dtype), slots

    for number in range(120):
        configuration = draw_configuration(number)
        shown = any(bool((rows != 0).any()) for rows in configuration.sets)
        if configuration.dtype != dtype or not shown or compare.check(number) != compare.RIGHT:
            continue
        with monkeypatch.context() as patch:
            patch.setattr(routes, "run", wrong)
            try:
                compare.check(number)
                noticed.append(False)
            except AssertionError:
                noticed.append(True)
    assert len(noticed) > 10
    assert np.mean(noticed) > 0.6, f"{np.mean(noticed):.0%} of the errors were noticed"
