"""The kernels for 64-bit Arm, in an emulator, against those of this machine.

`make stress` runs this. On Debian: apt-get install qemu-user gcc-aarch64-linux-gnu.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from setfold.native import build, library

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
SYSTEM = "/usr/aarch64-linux-gnu"
SHAPES = [(1, 1, 1, 2), (3, 37, 5, 16), (2, 131, 17, 7), (1, 700, 64, 33)]
SIGMOID, SOFTMAX = 0, 1

pytestmark = [
    pytest.mark.skipif("SETFOLD_STRESS" not in os.environ, reason="set SETFOLD_STRESS=1"),
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
        reason="needs qemu-user and gcc-aarch64-linux-gnu",
    ),
]


@pytest.fixture(scope="module")
def arm(tmp_path_factory):
    """The library for Arm, and a program that calls one of its functions."""
    folder = tmp_path_factory.mktemp("arm")
    build.compile_library([COMPILER], build.instruction_sets("aarch64"), folder / "kernels.so")
    source = Path(__file__).parent / "driver.c"
    subprocess.run([COMPILER, "-O1", str(source), "-o", str(folder / "driver"), "-ldl"], check=True)
    return folder


@pytest.fixture(scope="module")
def here():
    path = build.library_in_place()
    if not path.exists():
        pytest.skip("no compiled kernels: make native")
    return ctypes.CDLL(str(path))


def call_arm(arm, name, arguments):
    """Call in the emulator; arrays are changed in place."""
    packed = b""
    for argument in arguments:
        if argument is None:
            packed += b"n" + struct.pack("<q", 0)
        elif isinstance(argument, float):
            packed += b"f" + struct.pack("<fi", argument, 0)
        elif isinstance(argument, int):
            packed += b"i" + struct.pack("<q", argument)
        else:
            packed += b"b" + struct.pack("<q", argument.nbytes) + argument.tobytes()
    file = arm / "arguments"
    file.write_bytes(packed)
    command = [EMULATOR, "-L", SYSTEM, "driver", "./kernels.so", f"setfold_{name}_neon", str(file)]
    done = subprocess.run(command, cwd=arm, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
    content = file.read_bytes()
    for array in [argument for argument in arguments if isinstance(argument, np.ndarray)]:
        array[...] = np.frombuffer(content[: array.nbytes], array.dtype).reshape(array.shape)
        content = content[array.nbytes :]
    assert content == b""


def call_here(here, name, arguments):
    function = getattr(here, f"setfold_{name}_base")
    function.argtypes = library.SIGNATURES[name]
    passed = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
    assert function(*passed) == 0


def assert_same(arm, here, name, arguments, outputs):
    """The outputs, the last so many arrays among the arguments, are the same on both machines."""
    copies = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
    call_arm(arm, name, arguments)
    call_here(here, name, copies)
    arrays = [(a, b) for a, b in zip(arguments, copies, strict=True) if isinstance(a, np.ndarray)]
    for found, expected in arrays[-outputs:]:
        assert np.isfinite(expected).all()
        assert np.abs(expected).max() > 0
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found / scale, expected / scale, rtol=0, atol=1e-5)


def batch(shape):
    """The arguments that most kernels begin with, with a mask."""
    sets, length, width, slots = shape
    random = np.random.default_rng(length)
    elements = random.standard_normal((sets, length, width), dtype=np.float32)
    mask = (random.random((sets, length)) < 0.8).astype(np.uint8)
    mask[:, 0] = 1
    matrix = random.standard_normal((width + 1, slots), dtype=np.float32) / width**0.5
    first = [elements, length * width, mask, length, sets, length, width]
    return random, first, [matrix.astype(np.float32), slots]


@pytest.mark.parametrize("attention", [SIGMOID, SOFTMAX])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums(arm, here, shape, attention):
    sets, _, width, slots = shape
    _, first, (matrix, _) = batch(shape)
    sums = np.zeros((sets, slots, width + 1))
    assert_same(arm, here, "sums", [*first, matrix, slots, attention, sums], 1)
    padded = np.concatenate([first[0], np.ones_like(first[0][..., :1])], -1).astype(float)
    logits = padded @ matrix
    weights = np.exp(logits) if attention == SOFTMAX else 1 / (1 + np.exp(-logits)) + 1e-8
    weights = weights / weights.sum(-1, keepdims=True) * first[2][..., None]
    np.testing.assert_allclose(sums, weights.swapaxes(1, 2) @ padded, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", [SIGMOID, SOFTMAX])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(arm, here, shape, attention):
    sets, length, width, slots = shape
    random, first, scores = batch(shape)
    upstream = random.standard_normal((sets, slots, width + 1), dtype=np.float32)
    outputs = [np.zeros((width + 1, slots)), np.zeros_like(first[0])]
    rest = [attention, None, upstream, *outputs, length * width]
    assert_same(arm, here, "gradients", [*first, *scores, *rest], 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_over_elements(arm, here, shape):
    sets, _, width, slots = shape
    _, first, scores = batch(shape)
    outputs = [np.zeros((sets, slots)), np.zeros((sets, slots, width + 1))]
    assert_same(arm, here, "softmax", [*first, *scores, *outputs], 2)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_extrema(arm, here, shape, sign):
    sets, _, width, slots = shape
    random, first, scores = batch(shape)
    values = random.standard_normal((width + 1, 9), dtype=np.float32)
    best = np.zeros((sets, slots, 9), np.float32)
    winners = None  # those of equal values may differ
    rest = [SIGMOID, values, 9, sign, best, winners]
    assert_same(arm, here, "extrema", [*first, *scores, *rest], 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_sums_and_one_set(arm, here, shape):
    _, length, width, slots = shape
    random, first, scores = batch(shape)
    rows = first[0][0].copy()
    index = random.integers(0, 3, length)
    sums = np.zeros((3, slots, width + 1))
    arguments = [rows, index, length, width, 3, *scores, SIGMOID, sums]
    assert_same(arm, here, "ragged_sums", arguments, 1)
    values = random.standard_normal((width + 1, 9), dtype=np.float32)
    encoding = np.zeros((slots, 9), np.float32)
    arguments = [rows, length, width, *scores, SIGMOID, values, 9, 2.0, encoding]
    assert_same(arm, here, "encode", arguments, 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_totals(arm, here, shape):
    sets, _, width, _ = shape
    _, first, _ = batch(shape)
    assert_same(arm, here, "totals", [*first, np.zeros((sets, width))], 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_pools(arm, here, shape):
    _, length, width, _ = shape
    random, first, _ = batch(shape)
    rows, index = first[0][0].copy(), random.integers(0, 3, length)
    arguments = [rows, index, length, width, 3]
    assert_same(arm, here, "ragged_totals", [*arguments, np.zeros((3, width))], 1)
    for largest in (0, 1):
        best = np.zeros((3, width), np.float32)
        assert_same(arm, here, "ragged_extremes", [*arguments, largest, best], 1)
