"""Models on the Hugging Face Hub, with the conventions of its PyTorch models.

    save_pretrained   a model, and what the Hub shows about it, in a folder
    push_to_hub       the same in a repository
    from_pretrained   the model in a folder or a repository

A repository has these files:

    model.safetensors   the model, as `setfold.save` writes it
    config.json         its classes and their arguments, for readers; loading does not use it
    README.md           the model card
    report.json         the report of `setfold train`, if it was passed, without its examples of sets

Neither pickle nor code is stored. Loading is `setfold.load`: only classes of setfold and torch.nn are
constructed, and those that the caller allows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from setfold.core.models import load, save
from setfold.core.persist import write_atomically
from setfold.core.structure import describe
from setfold.errors import FileError, InputError
from setfold.hub.card import REPORT_KEYS, Card, card_of

try:
    from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
except ImportError as missing:
    raise ImportError("setfold.hub needs a package. Run: pip install huggingface_hub") from missing

MODEL, CONFIG, REPORT = "model.safetensors", "config.json", "report.json"
EXAMPLES = "influence"  # the part of a report that shows elements of some sets


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    report: str | Path | None = None,
    dim_in: int | None = None,
    license: str | None = None,
) -> None:
    """Save a model to a folder, with a model card that says what it is and how to use it.

    The card shows the architecture, the result of `setfold.check` and, if there is a report, how the
    model was trained. A README.md that exists is kept.

    Args:
        model: As for `setfold.save`.
        folder: The folder. It is created if it does not exist.
        report: The JSON file that `setfold train` wrote beside its report.
        dim_in: The width of the elements; not needed if the model knows it.
        license: The license of the model, such as "apache-2.0". The card names none otherwise.

    Raises:
        DescriptionError: The model cannot be rebuilt from its constructor arguments.
        InputError: The width of the elements is unknown, the report is not one, or it would be
            replaced by the one without examples.

    >>> import setfold, tempfile
    >>> encoder = setfold.Pool(3, "mean")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(encoder, folder)
    ...     from_pretrained(folder).dim_in
    3
    """
    name = Path(folder).resolve().name
    _Pretrained(model, name, report, dim_in, license).save_pretrained(folder)


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    *,
    report: str | Path | None = None,
    dim_in: int | None = None,
    license: str | None = None,
    **options: Any,
) -> str:
    """Save a model to a repository of the Hub, and create the repository if it does not exist.

    Each push replaces the model card; `ignore_patterns="README.md"` keeps the one that is there.

    Args:
        model: As for `setfold.save`.
        repo_id: The repository, such as "user/name".
        report: As for `save_pretrained`.
        dim_in: As for `save_pretrained`.
        license: As for `save_pretrained`.
        options: Those of `huggingface_hub.ModelHubMixin.push_to_hub`, such as private, branch,
            create_pr, commit_message and token.

    Returns:
        The address of the commit.

    Raises:
        DescriptionError: As for `save_pretrained`.
        InputError: As for `save_pretrained`, or the name is not one of a repository.
    """
    with _readable_errors(repo_id):
        return _Pretrained(model, repo_id, report, dim_in, license).push_to_hub(repo_id, **options)


def from_pretrained(
    name: str | Path,
    *,
    allow: Iterable[str] = (),
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    force_download: bool = False,
    local_files_only: bool = False,
    token: str | bool | None = None,
) -> nn.Module:
    """Load a model from a folder, or from a repository of the Hub, in evaluation mode.

    Args:
        name: A folder that `save_pretrained` wrote, or a repository such as "user/name".
        allow: Import paths of classes outside setfold and torch.nn, as for `setfold.load`. Loading
            imports these modules and calls the classes with arguments from the file.
        revision: A branch, a tag or a commit of the repository.
        cache_dir: The cache; by default that of huggingface_hub.
        force_download: Whether to download the model even if it is in the cache.
        local_files_only: Whether to use the cache without a connection.
        token: Of the Hub; by default that of the login.

    Raises:
        FileError: There is no such repository, revision or file, it is not in the cache and the Hub
            cannot be reached, or the file is not a model of setfold.
        InputError: It is neither a folder nor the name of a repository, or a folder with a revision.
        DescriptionError: The file contains a class that is not allowed.
    """
    if Path(name).is_dir():
        if revision is not None:
            raise InputError(f"{name} is a folder, which has no revisions: leave revision out.")
        return load(Path(name, MODEL), allow=allow)
    with _readable_errors(str(name)):
        path = hf_hub_download(
            str(name),
            MODEL,
            revision=revision,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
            token=token,
        )
    return load(path, allow=allow)


class _Pretrained(ModelHubMixin, library_name="setfold", tags=["setfold", "set-encoder"]):
    """A model as the Hub's mixin sees it, so that encoders need no base class of another package.

    Loading does without the mixin, which reads config.json.

    Args:
        model: The model.
        name: What `from_pretrained` takes to load it, for the card.
        report: As for `save_pretrained`.
        dim_in: As for `save_pretrained`.
        license: As for `save_pretrained`.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str = "",
        report: str | Path | None = None,
        dim_in: int | None = None,
        license: str | None = None,
    ) -> None:
        self.model, self.name, self.dim_in, self.license = model, name, dim_in, license
        self.facts = None if report is None else _read_report(Path(report))
        self.report = report

    def _save_pretrained(self, save_directory: Path) -> None:
        own = self.report is not None and Path(self.report).resolve()
        if own == (save_directory / REPORT).resolve() and EXAMPLES in (self.facts or {}):
            raise InputError(
                f"{self.report} would be replaced by a report without its examples of sets. Choose "
                "another folder, or rename the report."
            )
        self.card: Card = card_of(self.model, self.name, self.dim_in, self.facts)
        save(self.model, save_directory / MODEL)
        config = {"library_name": "setfold", "model": describe(self.model)}
        write_atomically(save_directory / CONFIG, json.dumps(config, indent=2).encode())
        if self.facts is not None:
            shown = {name: value for name, value in self.facts.items() if name != EXAMPLES}
            write_atomically(save_directory / REPORT, json.dumps(shown, indent=2).encode())

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """Return the card, without the template of the mixin, which needs Jinja."""
        known = self._hub_mixin_info.model_card_data.to_dict()
        data = ModelCardData(**known, license=self.license)
        return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{self.card}")


def _read_report(path: Path) -> dict[str, Any]:
    """Return the report of a training.

    Raises:
        InputError: It is not one.
    """
    try:
        facts = json.loads(path.read_bytes())
        if not {*facts} >= REPORT_KEYS:
            raise ValueError(f"it has no {', '.join(sorted(REPORT_KEYS - {*facts}))}")
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"{path} is not the report of a training ({error}). Pass the .json file that setfold "
            "train wrote beside the .html file."
        ) from error
    return facts


@contextmanager
def _readable_errors(name: str) -> Iterator[None]:
    """Raise errors of setfold for those of the Hub, which are about URLs."""
    try:
        yield
    except HFValidationError as error:
        raise InputError(
            f"expected a folder that exists, or a repository such as 'user/name'; got {name!r}."
        ) from error
    except RevisionNotFoundError as error:
        raise FileError(
            f"{name} has no such revision. Pass a branch, a tag or a commit that it has."
        ) from error
    except RepositoryNotFoundError as error:
        raise FileError(
            f"there is no repository {name}, or it is private. Check the name, or log in with "
            "'hf auth login'."
        ) from error
    except LocalEntryNotFoundError as error:
        raise FileError(
            f"{name} is not in the cache of the Hub, and the Hub was not asked or did not answer. "
            "Check the revision and the connection."
        ) from error
    except EntryNotFoundError as error:
        raise FileError(
            f"{name} has no file {MODEL}. Save the model with setfold.hub.push_to_hub."
        ) from error
    except HfHubHTTPError as error:
        raise FileError(f"the Hub refused the request about {name}: {error}") from error
