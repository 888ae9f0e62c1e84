import pytest

from experiments.data import store
from tests.experiments.data.making import LOADERS


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of prepared files, empty; loaders read from it."""
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "data"))
    for load in LOADERS.values():
        load.cache_clear()
    yield tmp_path / "data"
    for load in LOADERS.values():
        load.cache_clear()


@pytest.fixture
def seen():
    return []


@pytest.fixture
def progress(seen):
    return lambda done, total: seen.append((done, total))
