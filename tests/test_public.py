from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import setfold

PUBLIC = [name for name in setfold.__all__ if name != "__version__"]
ERRORS = {
    "InputError": ValueError,
    "NonFiniteError": setfold.InputError,
    "BatchConflictError": setfold.InputError,
    "StateMismatchError": ValueError,
    "NotRemovableError": TypeError,
    "FileError": ValueError,
    "StoreError": RuntimeError,
    "DescriptionError": ValueError,
    "DistributedError": RuntimeError,
    "DivergedError": ArithmeticError,
}


def values():
    return {name: getattr(setfold, name) for name in PUBLIC}


def is_problem(value):
    return isinstance(value, type) and issubclass(value, (Exception, Warning))


def test_the_names_are_those_of_the_stub():
    stub = ast.parse(Path(setfold.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    aliases = [alias for node in imports for alias in node.names]
    assert all(alias.asname == alias.name for alias in aliases)  # explicit re-exports
    assert sorted(alias.name for alias in aliases) == PUBLIC
    assert set(PUBLIC) <= set(dir(setfold))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves(name):
    value = getattr(setfold, name)
    assert getattr(setfold, name) is value
    if inspect.ismodule(value):
        assert importlib.import_module(f"setfold.{name}") is value
        return
    assert getattr(importlib.import_module(value.__module__), name) is value


def test_star_import_gives_the_public_names():
    namespace = {}
    exec("from setfold import *", namespace)
    assert set(PUBLIC) <= namespace.keys()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        setfold.nothing  # noqa: B018
    assert not hasattr(setfold, "torch")


def test_importing_setfold_does_not_import_torch():
    script = "import sys, setfold; setfold.__version__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "False")


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_explained(name):
    assert inspect.getdoc(getattr(setfold, name))
    assert getattr(setfold, name).__doc__ is not None


@pytest.mark.parametrize(
    "name",
    [n for n, v in values().items() if not is_problem(v) and not inspect.isabstract(v)],
)
def test_every_public_name_has_an_example(name):
    assert ">>>" in getattr(setfold, name).__doc__


@pytest.mark.parametrize("name", ["SetEncoder", "StreamingSetEncoder"])
def test_the_bases_are_abstract(name):
    assert inspect.isabstract(getattr(setfold, name))
    with pytest.raises(TypeError, match="abstract"):
        getattr(setfold, name)()


@pytest.mark.parametrize("name", ERRORS)
def test_errors_can_be_caught_by_those_who_do_not_know_setfold(name):
    assert issubclass(getattr(setfold, name), (setfold.SetfoldError))
    assert issubclass(getattr(setfold, name), ERRORS[name])


def test_every_error_is_in_the_tree():
    problems = {n for n, v in values().items() if is_problem(v)}
    assert problems == {*ERRORS, "SetfoldError", "CancelledAttentionWarning"}
    assert issubclass(setfold.CancelledAttentionWarning, UserWarning)


@pytest.mark.parametrize("name", [n for n, v in values().items() if inspect.isfunction(v)])
def test_every_argument_of_a_public_function_is_annotated(name):
    signature = inspect.signature(getattr(setfold, name))
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty
