from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import setfold

PUBLIC = [
    "AttentionPool",
    "CancelledAttentionWarning",
    "ChunkAverage",
    "Composition",
    "DeepSets",
    "DescriptionError",
    "DistributedError",
    "EquivariantDeepSets",
    "EquivariantLayer",
    "FSPool",
    "FileError",
    "FullSetTransformer",
    "GatedAttentionPool",
    "HierarchicalSlotSetEncoder",
    "ISAB",
    "InputError",
    "JanossyPool",
    "Layer",
    "LayeredSetEncoder",
    "MAB",
    "Moments",
    "MultiPassSetEncoder",
    "NonFiniteError",
    "NotRemovableError",
    "PMA",
    "Pool",
    "PublishedSlotSetEncoder",
    "SAB",
    "SeedAttention",
    "SetEncoder",
    "SetNorm",
    "SetState",
    "SetTransformer",
    "SetfoldError",
    "SlotAttention",
    "SlotPool",
    "SlotSetEncoder",
    "StateMismatchError",
    "StreamingSetEncoder",
    "WholeSetEncoder",
    "__version__",
    "check",
    "check_all",
    "distributed",
    "encode_sets",
    "fold",
    "load",
    "merge_partials",
    "merge_states",
    "pack_partials",
    "partial_states",
    "read_partials",
    "readout_states",
    "save",
    "unpack_partials",
    "update_states",
]
ERRORS = {
    "InputError": ValueError,
    "NonFiniteError": setfold.InputError,
    "StateMismatchError": ValueError,
    "NotRemovableError": TypeError,
    "FileError": ValueError,
    "DescriptionError": ValueError,
    "DistributedError": RuntimeError,
}
MODULES = ["distributed"]


def values():
    inner = {*MODULES, "__version__"}
    return {name: getattr(setfold, name) for name in PUBLIC if name not in inner}


def is_problem(value):
    return isinstance(value, type) and issubclass(value, (Exception, Warning))


def test_these_are_the_public_names():
    assert setfold.__all__ == PUBLIC
    assert dir(setfold) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves(name):
    value = getattr(setfold, name)
    assert getattr(setfold, name) is value
    if name in MODULES:
        assert value is importlib.import_module(f"setfold.{name}")
    elif name != "__version__":
        home = importlib.import_module(setfold._HOME_OF[name])
        assert getattr(home, name) is value
        assert value.__module__ == home.__name__


def test_star_import_gives_the_public_names():
    namespace = {}
    exec("from setfold import *", namespace)
    assert set(PUBLIC) <= namespace.keys()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'setfold' has no attribute 'nothing'"):
        setfold.nothing  # noqa: B018
    assert not hasattr(setfold, "torch")


def test_type_checkers_see_what_is_imported_when_it_is_used():
    tree = ast.parse(Path(setfold.__file__).read_text())
    guards = [n for n in tree.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    (guard,) = guards
    seen = {}
    for statement in guard.body:
        assert isinstance(statement, ast.ImportFrom)
        for alias in statement.names:
            assert alias.asname == alias.name  # an explicit re-export
            seen.setdefault(statement.module, []).append(alias.name)
    assert seen.pop("setfold") == MODULES
    assert seen == {home: list(names) for home, names in setfold._HOMES.items()}


def test_importing_setfold_does_not_import_torch():
    script = "import sys, setfold; setfold.__version__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "False")


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "__version__"])
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
