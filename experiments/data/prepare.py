"""The data sets of `python -m experiments prepare`."""

from __future__ import annotations

from functools import partial

from experiments.data import celeba, features, mnist, modelnet40, tiny_imagenet
from experiments.data.store import DataSet

DATASETS = {
    data.name: data
    for data in (
        DataSet("modelnet40", modelnet40.HELP, modelnet40.prepare),
        DataSet("celeba", celeba.HELP, celeba.prepare),
        DataSet("mnist", mnist.HELP, mnist.prepare),
        DataSet("tiny_imagenet", tiny_imagenet.HELP, tiny_imagenet.prepare),
    )
}


def with_module(extraction: features.Extraction) -> DataSet:
    """Return the data set Tiny ImageNet (or other pictures) with features of a given module."""
    prepare = partial(features.prepare, extraction=extraction)
    return DataSet("tiny_imagenet", tiny_imagenet.HELP, prepare)
