"""Estimators: scikit-learn's own checks, and what sets add to them."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

import setfold
from setfold.sklearn import SetClassifier, SetRegressor, SetVectorizer
from tests.learning.data import make_table


def some_sets(number=60, seed=0):
    random = np.random.default_rng(seed)
    sets = [
        random.standard_normal((random.integers(5, 20), 2)) * (1 + i % 2) for i in range(number)
    ]
    return sets, np.array(["calm", "wild"] * (number // 2))


@pytest.mark.parametrize(
    "estimator",
    [SetVectorizer(), SetClassifier("statistics"), SetRegressor("statistics")],
    ids=lambda estimator: type(estimator).__name__,
)
def test_the_conventions_of_scikit_learn(estimator):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # skipped checks, and convergence on random labels
        check_estimator(estimator)


@pytest.mark.parametrize("encoder", ["statistics", "deep-sets", "slots", "attention"])
def test_every_encoder_learns_and_can_be_saved(tmp_path, encoder):
    sets, y = some_sets()
    model = SetClassifier(encoder, epochs=3).fit(sets, y)
    assert model.score(sets, y) > 0.8
    assert model.encoder_ == encoder
    again = pickle.loads(pickle.dumps(model))
    assert np.array_equal(again.predict_proba(sets), model.predict_proba(sets))
    setfold.save(model.model_, tmp_path / "model")
    assert setfold.load(tmp_path / "model").head[2].labels == ["calm", "wild"]


def test_the_same_seed_gives_the_same_model():
    sets, y = some_sets(30)
    first, second = (
        SetClassifier("slots", epochs=2).fit(sets, y).predict_proba(sets) for _ in range(2)
    )
    assert np.array_equal(first, second)


def test_forms_of_sets_are_equal():
    sets = [one[:5] for one in some_sets(20)[0]]
    objects = np.empty(len(sets), object)
    objects[:] = sets
    expected = SetVectorizer().fit_transform(sets)
    for form in (objects, np.stack(sets), torch.from_numpy(np.stack(sets)), tuple(sets)):
        np.testing.assert_array_equal(SetVectorizer().fit_transform(form), expected)


def test_pipelines_and_searches():
    sets, y = some_sets()
    pipeline = make_pipeline(SetVectorizer(), LogisticRegression())
    assert cross_val_score(pipeline, sets, y, cv=3).mean() > 0.8
    search = GridSearchCV(SetClassifier(epochs=2), {"encoder": ["statistics", "deep-sets"]}, cv=2)
    assert search.fit(sets, y).best_score_ > 0.8
    assert clone(SetClassifier("slots", epochs=7)).epochs == 7
    names = SetVectorizer().fit(sets).get_feature_names_out()
    assert len(names) == SetVectorizer().fit_transform(sets).shape[1]
    assert names[:2].tolist() == ["log count", "mean x0"]


FRAMES = {"arrow": lambda rows: rows, "pandas": pa.Table.to_pandas, "polars": pl.from_arrow}


@pytest.mark.parametrize("kind", FRAMES)
def test_frames(kind):
    rows, labels = make_table(missing=True)
    frame = FRAMES[kind](rows)
    by_set = dict(zip(labels["user"].to_pylist(), labels["wild"].to_pylist(), strict=True))
    model = SetClassifier("statistics", set="user").fit(frame, by_set)
    ordered = [by_set[name] for name in sorted(by_set)]
    assert np.mean(model.predict(frame) == ordered) > 0.8
    again = SetClassifier("statistics", set="user").fit(frame, ordered)
    assert np.array_equal(again.predict_proba(frame), model.predict_proba(frame))
    with pytest.raises(setfold.InputError, match="no label for the set"):
        SetClassifier("statistics", set="user").fit(frame, {"u0": "calm"})
    with pytest.raises(setfold.InputError, match="no column 'nobody'"):
        SetClassifier("statistics", set="nobody").fit(frame, by_set)


def test_a_pretrained_encoder_makes_vectors():
    sets, _ = some_sets(10)
    encoder = setfold.SlotSetEncoder(2, 4, 8, 8).eval()
    found = SetVectorizer(encoder, scale=None).fit_transform(sets)
    expected = encoder(torch.tensor(sets[3], dtype=torch.float32)[None]).flatten(1).detach()
    np.testing.assert_allclose(found[3:4], expected, rtol=1e-5, atol=1e-6)


def test_labels_of_a_series_are_in_the_order_of_the_sets():
    sets, y = some_sets()
    order = np.random.default_rng(0).permutation(len(sets))
    mixed, series = [sets[i] for i in order], pd.Series(y)[order]
    model = SetClassifier("statistics").fit(mixed, series)
    assert model.score(mixed, series) > 0.8
    objects = np.empty(len(sets), object)
    objects[:] = sets
    scores = cross_val_score(SetClassifier("statistics"), objects, pd.Series(y), cv=3)
    assert scores.mean() > 0.8


@pytest.mark.parametrize("missing", [None, float("nan"), pd.NA, pd.NaT], ids=str)
def test_a_missing_label_is_an_error(missing):
    sets, _ = some_sets(6)
    labels = np.array(["a", "b", "a", "b", "a", missing], object)
    with pytest.raises(setfold.InputError, match="no label for the set 5"):
        SetClassifier("statistics").fit(sets, labels)


def test_the_index_of_a_pandas_frame_is_no_feature():
    rows, labels = make_table()
    frame = rows.to_pandas()
    by_set = dict(zip(labels["user"].to_pylist(), labels["wild"].to_pylist(), strict=True))
    model = SetClassifier("statistics", set="user").fit(frame[frame.x > -9], by_set)
    assert model.columns_.names == ["x", "y", "kind"]
    assert model.predict(frame).shape == (60,)


def test_columns_have_the_types_of_fit():
    frame = pd.DataFrame({"user": [1, 1, 2, 3] * 3, "v": np.arange(12.0)})
    model = SetClassifier("statistics", set="user", validation=0.5)
    model.fit(frame, {1: "a", 2: "b", 3: "a"})
    with pytest.raises(setfold.InputError, match=r"'v' is .*string; expected numbers, as in fit"):
        model.predict(frame.astype({"v": str}))


def test_positions_and_instances():
    sets, labels = some_sets()
    model = SetClassifier("places", position=["x0", "x1"], epochs=1, folds=1).fit(sets, labels)
    assert model.encoder_ == "places"
    model = SetClassifier("instances", epochs=1, folds=1).fit(sets, labels)
    assert model.model_.has_weights


def test_sets_that_do_not_fit_are_named():
    sets, y = some_sets(20)
    for given, text in (
        ([np.zeros((0, 2)), *sets[1:]], r"set 0 of X has the shape \(0, 2\)"),
        ([*sets[:-1], np.ones((3, 3))], r"set 19 of X has the shape \(3, 3\)"),
        ([one[:, 0] for one in sets], r"pass arrays \(n, 1\)"),
        ([], "no sets"),
    ):
        with pytest.raises(setfold.InputError, match=text):
            SetClassifier("statistics").fit(given, y)
    labels = [*y[:-1].tolist(), None]
    with pytest.raises(setfold.InputError, match="no label for the set 19"):
        SetClassifier("statistics").fit(sets, np.array(labels, dtype=object))


@pytest.mark.parametrize(
    "wrong",
    [
        {"validation": 1.5},
        {"scale": "none"},
        {"folds": -1},
        {"position": "x0,x1"},
        {"encoder": "slot"},
    ],
)
def test_arguments_are_checked(wrong):
    with pytest.raises(setfold.InputError, match=next(iter(wrong))):
        SetClassifier(**wrong).fit(*some_sets(20))


def test_frames_that_do_not_fit_say_why():
    frame = pd.DataFrame({"u": [1, 1, 2, 2] * 5, "a": np.arange(20.0), "k": ["p", "q"] * 10})
    vectorizer = SetVectorizer(set="u").fit(frame)
    gap = frame.assign(a=frame.a.where(frame.a != 3))
    for call, text in (
        (lambda: vectorizer.transform(gap), "set 2 has a value of column 'a'"),
        (lambda: vectorizer.transform(frame.drop(columns="k")), "no column 'k'"),
        (lambda: vectorizer.fit(pd.concat([frame, frame[["a"]]], axis=1)), "several columns 'a'"),
        (lambda: vectorizer.fit(frame[["u"]]), "no column can be a feature"),
        (lambda: vectorizer.fit(frame[["u"]].assign(c="s")), "all values are equal"),
        (lambda: vectorizer.fit(frame.set_index("u")), "reset_index"),
        (lambda: SetVectorizer(set=["u", "k"]).fit(frame), "name of one column"),
        (lambda: SetVectorizer(set="u", scale=None).fit(frame), "scale=None"),
    ):
        with pytest.raises(setfold.InputError, match=text):
            call()


def test_vectors_of_a_model_have_names():
    sets, _ = some_sets(6)
    model = setfold.SlotSetEncoder(2, num_slots=2, dim_slot=4, dim_out=3).eval()
    found = SetVectorizer(model).set_output(transform="pandas").fit_transform(sets)
    assert list(found.columns) == [f"encoding {place}" for place in range(6)]
    for wrong in ("model", torch.nn.Linear(2, 2)):
        with pytest.raises(setfold.InputError, match="must be a set encoder"):
            SetVectorizer(wrong).fit(sets)
