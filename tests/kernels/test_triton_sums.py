"""The Triton kernels in Triton's interpreter, against the formula in float64. `make stress` runs it.

Needs the extra `gpu`. The interpreter is chosen by TRITON_INTERPRET=1 before triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from setfold.kernels import gpu

if "SETFOLD_STRESS" in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"

SHAPES = [  # sets, elements, width, slots
    (1, 1, 1, 2),
    (2, 70, 5, 16),
    (3, 129, 17, 3),
    (1, 4500, 16, 33),
    (2, 5000, 64, 32),
]


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from setfold.kernels import triton_sums

constants = {"D": 16, "K": 16, "R": triton_sums.BLOCK}
constants |= {"HAS_MASK": True, "SOFTMAX": False, "NEED_ELEMENTS": True}
types = {"mask_ptr": "*u8", "epsilon": "fp32"}
for kernel in (triton_sums._forward, triton_sums._backward):
    names = kernel.arg_names
    pointers = {name: "*fp32" for name in names if name.endswith("_ptr")}
    chosen = {name: constants[name] for name in names if name in constants}
    signature = {name: "i32" for name in names} | pointers
    signature |= {name: kind for name, kind in types.items() if name in names}
    signature |= dict.fromkeys(chosen, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=chosen)
    compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_stages": 1})
    assert compiled.asm["cubin"] and compiled.metadata.shared < 100_000
"""


@pytest.fixture(scope="module")
def kernels():
    if "SETFOLD_STRESS" not in os.environ:
        pytest.skip("set SETFOLD_STRESS=1")
    pytest.importorskip("triton")
    from setfold.kernels import triton_sums

    return triton_sums


def inputs(shape, masked):
    sets, length, width, slots = shape
    generator = torch.Generator().manual_seed(length)
    elements = torch.randn(sets, length, width, generator=generator)
    matrix = torch.randn(width + 1, slots, generator=generator) / width**0.5
    mask = torch.rand(sets, length, generator=generator) < 0.7 if masked else None
    return elements, mask, matrix


def formula(elements, mask, matrix, attention):
    padded = torch.nn.functional.pad(elements, (0, 1), value=1.0)
    logits = padded @ matrix
    weights = logits.softmax(-1) if attention == "softmax" else logits.sigmoid() + 1e-8
    weights = weights / weights.sum(-1, keepdim=True)
    if mask is not None:
        weights = weights * mask.unsqueeze(-1)
    return weights.mT @ padded


def assert_close(found, expected):
    scale = expected.abs().max().clamp_min(1e-6)
    assert float((found.double() - expected).abs().max() / scale) < 1e-5


@pytest.mark.parametrize("attention", ["sigmoid", "softmax"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_and_gradients(kernels, shape, masked, attention):
    elements, mask, matrix = inputs(shape, masked)
    precise = elements.double().requires_grad_(), matrix.double().requires_grad_()
    expected = formula(precise[0], mask, precise[1], attention)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    of_elements, of_matrix = torch.autograd.grad(expected, precise, upstream.double())

    found = kernels.sums(elements, mask, matrix, attention)
    assert found.dtype == torch.float64
    assert_close(found, expected.detach())
    arguments = elements, mask, matrix, attention, upstream
    found_elements, found_matrix = kernels.gradients(*arguments, need_elements=True)
    assert_close(found_elements, of_elements)
    assert_close(found_matrix, of_matrix)
    none, again = kernels.gradients(*arguments)
    assert none is None
    assert torch.equal(again, found_matrix)


def test_elements_in_other_layouts(kernels):
    elements, mask, matrix = inputs((2, 100, 5, 16), masked=True)
    turned = elements.transpose(1, 2).contiguous().transpose(1, 2)
    expected = kernels.sums(elements, mask, matrix, "sigmoid")
    assert torch.equal(kernels.sums(turned, mask, matrix.t().contiguous().t(), "sigmoid"), expected)


def test_nan_shows(kernels):
    elements, _, matrix = inputs((1, 100, 5, 16), masked=False)
    elements[0, 50, 2] = torch.nan
    assert bool(kernels.sums(elements, None, matrix, "sigmoid").isnan().any())


@pytest.mark.usefixtures("kernels")
def test_they_compile_for_a_gpu_without_one():
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_they_run_on_cuda_only():
    elements, mask, matrix = inputs((2, 70, 5, 16), masked=True)
    assert gpu.sums(elements, mask, matrix, "sigmoid") is None
    assert gpu.gradients(elements, mask, matrix, "sigmoid", torch.ones(2, 16, 6)) is None
