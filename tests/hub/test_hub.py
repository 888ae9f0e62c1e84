"""Models in folders and in the cache of the Hub. Nothing is sent anywhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import (
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from torch import nn

import setfold
from setfold.hub import api, from_pretrained, push_to_hub, save_pretrained
from setfold.learning.report import write_report
from setfold.learning.train import train_sets
from tests.learning.data import make_table

NAME = "someone/points"
COMMITS = {"main": "b" * 40, "v1": "a" * 40}


class Doubled(nn.Module):
    """A class of a user."""

    def __init__(self, dim_in: int = 3) -> None:
        super().__init__()
        self.dim_in = dim_in

    def forward(self, elements: torch.Tensor) -> torch.Tensor:
        return 2 * elements


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever asks the Hub fails."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a test used the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.create_connection", refuse)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that setfold train made, and its report."""
    folder = tmp_path_factory.mktemp("trained")
    rows, labels = make_table()
    pq.write_table(rows.rename_columns(["id", *rows.column_names[1:]]), folder / "rows.parquet")
    pq.write_table(labels.rename_columns({"user": "id"}), folder / "labels.parquet")
    options = {"encoder": "statistics", "epochs": 1, "folds": 1}
    chosen = setfold.TrainOptions(
        target="wild", set="id", labels=folder / "labels.parquet", **options
    )
    result = train_sets(folder / "rows.parquet", folder / "model.safetensors", chosen)
    write_report(result, folder / "model.html")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with two revisions of a repository, as the Hub's client keeps them."""
    folder = tmp_path / "cache" / f"models--{NAME.replace('/', '--')}"
    for number, (revision, commit) in enumerate(COMMITS.items()):
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text("{}")
        setfold.save(setfold.Pool(3 + number), folder / "snapshots" / commit / "model.safetensors")
        (folder / "refs" / revision).write_text(commit)
    return tmp_path / "cache"


def code_of(card: str) -> str:
    (found,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    return found


MODELS = {
    "one pass": lambda: setfold.SlotSetEncoder(3, 4, 8, 8),
    "several passes": lambda: setfold.EquivariantDeepSets(3, [4, 4]),
    "whole sets": lambda: setfold.FSPool(3),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name]().eval()
    save_pretrained(model, tmp_path / "points", license="mit")
    assert {path.name for path in (tmp_path / "points").iterdir()} == {
        "model.safetensors",
        "config.json",
        "README.md",
    }
    loaded, elements = from_pretrained(tmp_path / "points"), torch.randn(2, 5, 3)
    assert not loaded.training
    assert torch.equal(loaded(elements), model(elements))

    card = ModelCard.load(tmp_path / "points" / "README.md")
    assert (card.data.library_name, card.data.license) == ("setfold", "mit")
    assert setfold.check(model, processes=False).verdict in card.text
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert f"| parameters | {numbers:,} |" in card.text
    passes = getattr(model, "passes", None) or "needs whole sets"
    assert f"| passes over a set | {passes} |" in card.text
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(code_of(card.text), found)
    assert ("state" in found) == isinstance(model, setfold.StreamingSetEncoder)


def test_a_trained_model(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, report = setfold.load(trained / "model.safetensors"), trained / "model.json"
    save_pretrained(model, tmp_path / "wild", report=report)
    facts = json.loads(report.read_text())
    card = (tmp_path / "wild" / "README.md").read_text()
    assert facts["verdict"] in card
    assert "license" not in ModelCard(card).data.to_dict()
    for row in (*facts["candidates"], *facts["baselines"]):
        assert f"| {row['name']} | {row['accuracy']:.4g} |" in card

    shutil.copy(trained / "rows.parquet", tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(code_of(card), {})
    found = pq.read_table("predictions.parquet")
    assert set(found["prediction"].to_pylist()) <= {"calm", "wild"}


def test_examples_of_the_training_sets_are_not_published(trained: Path, tmp_path: Path) -> None:
    facts = json.loads((trained / "model.json").read_text())
    assert facts["influence"][0]["set"].startswith("u")
    model = setfold.load(trained / "model.safetensors")
    save_pretrained(model, tmp_path, report=trained / "model.json")
    published = json.loads((tmp_path / "report.json").read_text())
    assert published == {name: value for name, value in facts.items() if name != "influence"}


def test_a_report_does_not_lose_its_examples(trained: Path, tmp_path: Path) -> None:
    """Nor does a link in the folder lead to a file that is written to."""
    model, report = setfold.load(trained / "model.safetensors"), tmp_path / "report.json"
    shutil.copy(trained / "model.json", report)
    with pytest.raises(setfold.InputError, match="without its examples"):
        save_pretrained(model, tmp_path, report=report)
    assert report.read_bytes() == (trained / "model.json").read_bytes()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.json").symlink_to(tmp_path / "other")
    (tmp_path / "other").write_text("mine")
    for source in (report, tmp_path / "out" / "report.json"):  # the second has no examples
        save_pretrained(model, tmp_path / "out", report=source)
    assert "verdict" in json.loads((tmp_path / "out" / "report.json").read_text())
    assert (tmp_path / "other").read_text() == "mine"


def test_what_is_not_a_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"verdict": 1}')
    for name in ("absent.json", "other.json"):
        with pytest.raises(setfold.InputError, match="not the report of a training"):
            save_pretrained(setfold.Pool(3), tmp_path / "m", report=tmp_path / name)
    assert not (tmp_path / "m" / "model.safetensors").exists()


def test_a_card_of_the_user_is_kept(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("my own")
    save_pretrained(setfold.Pool(3), tmp_path)
    assert (tmp_path / "README.md").read_text() == "my own"


def test_push(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, Any] = {}

    class Repository:
        repo_id = NAME

    def create_repo(self: HfApi, repo_id: str, **options: Any) -> Repository:
        sent.update(options, created=repo_id)
        return Repository()

    def upload_folder(self: HfApi, *, folder_path: Path, **options: Any) -> str:
        sent.update(options, card=(folder_path / "README.md").read_text())
        sent["model"] = setfold.load(folder_path / "model.safetensors")
        return "https://the.commit"

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    model = setfold.SlotSetEncoder(3, 4, 8, 8).eval()
    address = push_to_hub(model, NAME, private=True, branch="v2")
    assert address == "https://the.commit"
    assert (sent["created"], sent["private"], sent["revision"]) == (NAME, True, "v2")
    assert f'from_pretrained("{NAME}")' in sent["card"]
    assert str(sent["model"]) == str(model)


@pytest.mark.parametrize(
    ("revision", "width"), [(None, 3), ("main", 3), ("v1", 4), (COMMITS["v1"], 4)]
)
def test_revisions_without_a_connection(cache: Path, revision: str | None, width: int) -> None:
    model = from_pretrained(NAME, revision=revision, cache_dir=cache, local_files_only=True)
    assert model.dim_in == width


@pytest.mark.parametrize("config", ["", "null", "[]", "[" * 100_000])
def test_loading_does_not_read_the_config(config: str, cache: Path) -> None:
    folder = cache / "models--someone--points" / "snapshots" / COMMITS["main"]
    (folder / "config.json").write_text(config)
    assert from_pretrained(NAME, cache_dir=cache, local_files_only=True).dim_in == 3
    assert from_pretrained(folder).dim_in == 3


def test_options_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    save_pretrained(setfold.Pool(3), tmp_path)
    with pytest.raises(setfold.InputError, match="no revisions"):
        from_pretrained(tmp_path, revision="v1")
    with pytest.raises(TypeError, match="revison"):
        from_pretrained(tmp_path, revison="v1")  # type: ignore[call-arg]


def test_what_is_not_in_the_cache(cache: Path) -> None:
    for name, revision in ((NAME, "v3"), ("someone/else", None)):
        with pytest.raises(setfold.FileError, match=f"{name} is not in the cache"):
            from_pretrained(name, revision=revision, cache_dir=cache, local_files_only=True)
    (cache / "models--someone--points" / "snapshots" / COMMITS["v1"] / "model.safetensors").unlink()
    with pytest.raises(setfold.FileError, match="is not in the cache"):
        from_pretrained(NAME, revision="v1", cache_dir=cache, local_files_only=True)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (RepositoryNotFoundError, "there is no repository someone/points"),
        (RevisionNotFoundError, "no such revision"),
        (RemoteEntryNotFoundError, r"no file model\.safetensors"),
        (HfHubHTTPError, "the Hub refused"),
    ],
)
def test_answers_of_the_hub(
    kind: type[HfHubHTTPError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*args: Any, **kwargs: Any) -> str:
        raise kind("404", response=SimpleNamespace(headers={}, request=None))  # type: ignore[arg-type]

    monkeypatch.setattr(api, "hf_hub_download", answer)
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", answer)
    with pytest.raises(setfold.FileError, match=message):
        from_pretrained(NAME)


def test_what_is_neither_a_folder_nor_a_repository(tmp_path: Path) -> None:
    with pytest.raises(setfold.InputError, match="expected a folder that exists, or a repository"):
        from_pretrained(tmp_path / "absent")
    with pytest.raises(setfold.FileError, match=r"model\.safetensors does not exist"):
        from_pretrained(tmp_path)


def test_only_the_caller_allows_classes(tmp_path: Path) -> None:
    """A file of the repository cannot."""
    name = f"{Doubled.__module__}.Doubled"
    save_pretrained(Doubled(), tmp_path)
    assert f"allow=['{name}']" in (tmp_path / "README.md").read_text()
    for config in ({"allow": [name]}, {"model": "x", "name": "y", "allow": [name]}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(setfold.DescriptionError, match="Doubled"):
            from_pretrained(tmp_path)
    assert isinstance(from_pretrained(tmp_path, allow=[name]), Doubled)


def test_a_pickle_is_not_loaded(tmp_path: Path) -> None:
    save_pretrained(setfold.Pool(3), tmp_path)
    torch.save({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(setfold.FileError):
        from_pretrained(tmp_path)


def test_the_library_does_not_need_the_package() -> None:
    code = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "import setfold; setfold.Pool(3)\n"
        "try:\n    import setfold.hub\n"
        "except ImportError as error:\n    print(error)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install huggingface_hub" in found.stdout
