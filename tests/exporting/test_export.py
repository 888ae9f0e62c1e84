from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import setfold
from setfold.core.statistic import Field, Sum
from setfold.encoders.parameter_free import ParameterFreeEncoder
from setfold.exporting.graphs import graphs_of
from setfold.exporting.programs import trace
from tests.exporting.served import Served, arrays_of, distance, state_distance

WIDTH, TOLERANCE = 3, 1e-5
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "onnx_stream.py"


@pytest.fixture(scope="module")
def encoder():
    """Features, random slots, two statistics, and a head."""
    torch.manual_seed(0)
    slots = setfold.SlotSetEncoder(4, 3, 2, 2, ["weighted_mean", "max"], attention="softmax")
    features = nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU())
    head = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    encoder = setfold.Composition(slots, features, head).eval()
    return encoder.requires_grad_(False)


@pytest.fixture(scope="module")
def folder(encoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "onnx"
    setfold.export(encoder, folder, dim_in=WIDTH)
    return folder


@pytest.fixture(scope="module")
def served(folder):
    return Served(folder)


def draw(*shape):
    return torch.randn(*shape) * 2 + 1


def hidden(sets, length):
    """Elements with NaN in the padding, and a mask that hides the second set."""
    elements, mask = draw(sets, length, WIDTH), torch.rand(sets, length) < 0.7
    mask[1:2] = False
    return torch.where(mask.unsqueeze(2), elements, torch.nan), mask


@pytest.mark.parametrize(("sets", "length"), [(1, 0), (3, 1), (2, 5), (3, 2000)])
def test_forward(encoder, served, sets, length):
    elements, mask = hidden(sets, length)
    found = served.forward(elements.numpy(), mask.numpy())
    assert distance(found, encoder(elements, mask)) <= TOLERANCE


@pytest.mark.parametrize(("sets", "length"), [(1, 0), (3, 1), (2, 5), (1, 200_000)])
def test_a_stream(encoder, served, sets, length):
    state, expected = served.empty(sets), encoder.initial_state(sets)
    assert state_distance(state, expected) == 0
    for _ in range(2):
        elements, mask = hidden(sets, length)
        state = served.update(state, elements.numpy(), mask.numpy())
        expected = encoder.update(expected, elements, mask=mask)
        assert state_distance(state, expected) <= TOLERANCE
        assert distance(served.readout(state), encoder.readout(expected)) <= TOLERANCE


@pytest.mark.parametrize(("sets", "rows"), [(1, 0), (1, 1), (4, 3), (5, 3000), (2000, 20_000)])
def test_rows_of_sets_of_any_lengths(encoder, served, sets, rows):
    elements, index = draw(rows, WIDTH), torch.randint(sets, (rows,))
    index[: rows // 2] = sets // 2  # one set is larger
    begun = encoder.update(encoder.initial_state(sets), draw(sets, 2, WIDTH))
    found = served.update_rows(arrays_of(begun), elements.numpy(), index.numpy())
    assert state_distance(found, encoder.update(begun, elements, index=index)) <= TOLERANCE


def test_states_of_setfold_and_of_graphs_merge(encoder, served):
    empty = encoder.initial_state(3)
    one, two = (encoder.update(empty, draw(3, n, WIDTH)) for n in (4, 7))
    for left, right in ((one, two), (one, empty), (empty, two), (empty, empty)):
        found = served.merge(arrays_of(left), arrays_of(right))
        assert state_distance(found, left.merge(right)) <= 1e-12


def test_a_set_without_elements_reads_as_it_does_in_setfold(encoder, served):
    expected = encoder.readout(encoder.initial_state(2))
    assert distance(served.readout(served.empty(2)), expected) <= TOLERANCE


def test_nan_in_an_element_shows_in_the_readout(served):
    elements = draw(2, 5, WIDTH).numpy()
    elements[0, 3, 1] = np.nan
    state = served.update(served.empty(2), elements, np.ones((2, 5), bool))
    shown = np.isnan(served.readout(state)).any(1)
    assert shown.tolist() == [True, False]


@pytest.mark.parametrize("wrong", [-1, 2])
def test_a_row_of_no_set_is_refused(served, wrong):
    with pytest.raises(Exception, match=r"(?i)indice"):
        served.update_rows(served.empty(2), draw(3, WIDTH).numpy(), np.array([0, wrong, 1]))


def test_the_manifest_says_what_the_graphs_take(encoder, folder, served):
    state = encoder.initial_state(1)
    assert served.manifest["weights"] == state.describe()["digest"]
    assert served.manifest["files"] == sorted(
        path.name for path in folder.iterdir() if path.suffix == ".onnx"
    )
    for name, graph in served.manifest["graphs"].items():
        proto = onnx.load(folder / graph["file"]).graph
        for port, value in [
            *zip(graph["inputs"], proto.input, strict=True),
            *zip(graph["outputs"], proto.output, strict=True),
        ]:
            shape = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
            assert (port["name"], len(port["shape"])) == (value.name, len(shape)), name
            fixed = zip(port["shape"], shape, strict=True)
            assert all(a == b for a, b in fixed if isinstance(a, int) and isinstance(b, int))
    (slots,) = encoder.draw_frame(None, None)
    assert torch.tensor(served.manifest["slots"]).equal(slots)


def test_files_do_not_tell_where_they_were_written(folder):
    for path in folder.glob("*.onnx"):
        assert str(Path(setfold.__file__).parent).encode() not in path.read_bytes()


def test_the_example_needs_neither_torch_nor_setfold(folder):
    guard = "import sys; sys.modules |= dict.fromkeys(['torch', 'setfold']); import runpy; "
    guard += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-W", "error", "-c", guard, EXAMPLE, folder]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert re.fullmatch(r"\[1000 1000\] \(2, 5\) differ by at most (0e\+00|\de-0[6-9])\n", said)


# ---- programs of torch, and models without a state ---------------------------------------------


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    torch.manual_seed(0)
    encoder = setfold.SlotSetEncoder(WIDTH, 2, 2, 2).double().requires_grad_(False)
    encoder = setfold.Composition(encoder, head=nn.Dropout(0.9))
    folder = tmp_path_factory.mktemp("exported") / "torch"
    setfold.export(encoder, folder, "torch")
    assert encoder.training  # it is not changed, but exported in evaluation mode
    return encoder.eval(), Served(folder)


@pytest.mark.parametrize(("sets", "length"), [(1, 0), (1, 1), (3, 2000)])
def test_programs_in_float64(programs, sets, length):
    encoder, served = programs
    elements, mask = hidden(sets, length)
    elements, state = elements.double(), encoder.initial_state(sets)
    found = served.forward(elements.numpy(), mask.numpy())
    assert distance(found, encoder(elements, mask)) <= 1e-12
    state = encoder.update(state, elements, mask=mask)
    found = served.update(served.empty(sets), elements.numpy(), mask.numpy())
    assert state_distance(found, state) <= 1e-12
    rows, index = draw(length, WIDTH).double(), torch.randint(sets, (length,))
    found = served.update_rows(found, rows.numpy(), index.numpy())
    state = encoder.update(state, rows, index=index)
    assert state_distance(found, state) <= 1e-12
    assert state_distance(served.merge(found, arrays_of(state)), state.merge(state)) <= 1e-12
    assert distance(served.readout(found), encoder.readout(state)) <= 1e-12


@pytest.mark.parametrize(
    ("encoder", "reason"),
    [
        (setfold.EquivariantDeepSets(WIDTH, [4]), "folds in 2 passes"),
        (setfold.FSPool(WIDTH), "needs whole sets: "),
    ],
    ids=["several passes", "whole sets"],
)
def test_models_without_a_state_have_a_forward_graph_only(encoder, reason):
    graphs = graphs_of(encoder, (WIDTH,))
    assert [graph.name for graph in graphs.graphs] == ["forward"]
    assert [*graphs.missing] == ["update", "update_rows", "merge", "readout"]
    assert all(reason in text for text in graphs.missing.values())
    program = trace(graphs.graphs[0]).module()
    for sets, length in ((1, 0), (3, 6)):
        elements, mask = hidden(sets, length)
        assert distance(program(elements, mask).numpy(), encoder(elements, mask)) <= TOLERANCE


def test_a_model_of_tables_takes_what_its_columns_return(tmp_path):
    columns = setfold.Columns([setfold.NumberColumn("a", 1.0, 2.0), setfold.NumberColumn("b")])
    encoder = setfold.Composition(setfold.Pool(columns.dim_out), columns).eval()
    setfold.export(encoder, tmp_path / "out", "torch")
    served, elements = Served(tmp_path / "out"), draw(2, 4, columns.width)
    found = served.forward(elements.numpy(), np.ones((2, 4), bool))
    assert distance(found, encoder(elements)) <= TOLERANCE


def test_a_convolution_takes_elements_of_its_shape():
    features = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 4))
    encoder = setfold.DeepSets(features, 4).eval()
    graphs = {graph.name: graph for graph in graphs_of(encoder, (1, 4, 4)).graphs}
    elements, index = draw(6, 1, 4, 4), torch.tensor([1, 0, 1, 1, 1, 0])
    state = encoder.initial_state(2)
    found = trace(graphs["update_rows"]).module()(elements, index, *arrays_as_tensors(state))
    expected = encoder.update(state, elements, index=index)
    named = dict(zip(arrays_of(expected), (part.numpy() for part in found), strict=True))
    assert state_distance(named, expected) <= TOLERANCE


def arrays_as_tensors(state):
    return [torch.from_numpy(array) for array in arrays_of(state).values()]


# ---- what cannot be exported says why ----------------------------------------------------------


class Product(ParameterFreeEncoder):
    """Keeps a statistic that graphs do not know."""

    class Own(Sum):
        pass

    def fields(self, frame):
        return {"own": Field(Product.Own(), (WIDTH,))}

    def absorb(self, elements, mask, prepared):
        return {"own": Product.Own().absorb(elements, mask)}

    def finish(self, statistics, count, prepared):
        return statistics["own"][0]


class Branching(nn.Module):
    def forward(self, elements):
        return elements if bool((elements > 0).all()) else -elements


@pytest.mark.parametrize(
    ("encoder", "options", "message"),
    [
        (nn.Linear(3, 3), {}, "takes a set encoder; got Linear. .*Composition"),
        (setfold.DeepSets(nn.Linear(3, 3), 3), {}, r"Pass it: setfold.export\(.*dim_in"),
        (setfold.Pool(3), {"dim_in": 4}, "dim_in must be 3, as the model says; got 4"),
        (setfold.Pool(3), {"format": "tensorrt"}, 'onnx.*torch.*aoti.*"tensorrt"|tensorrt'),
        (setfold.Pool(3), {"format": 3}, "format must be str"),
        (Product(3), {}, "keeps Own: a graph must join any number"),
        (
            setfold.DeepSets(Branching(), 3),
            {"dim_in": 3, "format": "torch"},
            "cannot export 'forward': .*may depend on shapes only",
        ),
        (
            setfold.JanossyPool(nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), 3),
            {"format": "torch"},
            "a size within it depends on the values of its inputs",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_cannot_be_exported_says_why(tmp_path, capfd, encoder, options, message):
    with pytest.raises(setfold.InputError) as raised:
        setfold.export(encoder, tmp_path / "out", **options)
    assert re.search(message, str(raised.value), re.DOTALL)
    assert not any(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


def test_without_the_packages_of_onnx(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(setfold.InputError, match=re.escape("pip install 'setfold[onnx]'")):
        setfold.export(setfold.Pool(3), tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_the_command(tmp_path, monkeypatch, capsys):
    from setfold import cli

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["setfold", "export", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, capsys.readouterr()

    path, out = tmp_path / "model.safetensors", tmp_path / "programs"
    setfold.save(setfold.EquivariantDeepSets(WIDTH, [4]), path)
    code, said = run(path, "--torch", out)
    assert code == 0
    assert re.search(r"no update: +the model folds in 2 passes", said.out)
    assert json.loads((out / "export.json").read_text())["files"] == ["forward.pt2"]
    code, said = run(path, "--torch", out)
    assert (code, "--overwrite" in said.err) == (2, True)
    assert run(path)[0] == 2
    code, said = run(path, "--torch", out, "--dim-in", "a")
    assert (code, "--dim-in as a number" in said.err) == (2, True)
    code, said = run(path, "--torch", out, "--onnx", f"{out}/../programs", "--overwrite")
    assert (code, "a folder of its own" in said.err) == (2, True)
    assert json.loads((out / "export.json").read_text())["format"] == "torch"
    code, said = run(path, "--torch", out, "--onnx", tmp_path / "graphs", "--overwrite", "--json")
    assert [found["format"] for found in json.loads(said.out)] == ["onnx", "torch"]
