"""What a kind of file is to the fuzzer, and what may happen when a damaged one is read."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import setfold

ANYTHING = object()  # expected of a file that is changed, but valid
RIGHT, OTHER, REFUSED = "right", "other", "refused"


class NotAllowedError(Exception):
    """What must not happen: a wrong answer, a foreign exception, memory without bounds."""


class Kind(ABC):
    """A kind of file.

    A damaged file must be refused with a SetfoldError, or give the right answer. Where a change
    cannot be told from other content, because the format has no checksum or the checksum was
    computed again, any answer will do.

    Attributes:
        name: on the command line.
        samples: a folder for intact files.
    """

    name: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        self.samples = folder / "samples"
        self.target = folder / "target"  # where damaged files go
        self.samples.mkdir(parents=True)
        self.make()

    @abstractmethod
    def make(self) -> None:
        """Write intact samples."""

    @abstractmethod
    def damage(self, random: Random) -> Any:
        """Write a damaged sample into the folder `target`, and return what to expect of it."""

    @abstractmethod
    def read(self) -> Any:
        """Read the damaged sample as a user would, all of it."""

    def attempt(self, number: int) -> str:
        """Damage, read and judge, as a number says.

        Raises:
            NotAllowedError: what happened must not.
        """
        shutil.rmtree(self.target, ignore_errors=True)
        self.target.mkdir()
        expected = self.damage(Random(f"{self.name} {number}"))
        try:
            found = self.read()
        except setfold.SetfoldError:
            return REFUSED
        except NotAllowedError:
            raise
        except BaseException as error:  # Rust raises panics that are no Exception
            raise NotAllowedError(
                f"{type(error).__module__}.{type(error).__name__}: {error}"
            ) from error
        if expected is ANYTHING:
            return OTHER
        if found != expected:
            raise NotAllowedError("accepted, and the answer is wrong")
        return RIGHT
