"""`check`: tests any model against the laws, streaming or not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn

from setfold.core.arguments import check_flags, check_positive, check_sizes
from setfold.errors import DescriptionError, InputError
from setfold.laws.consistency import CONSISTENCY
from setfold.laws.law import Case, Law, streams
from setfold.laws.laws import LAWS
from setfold.laws.reasons import likely_reason
from setfold.laws.report import FAILS, HOLDS, NOT_APPLICABLE, Finding
from setfold.laws.report import Report as Report
from setfold.laws.survey import Survey as Survey
from setfold.laws.survey import compare

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
SIZES = ((1, 1), (1, 2), (1, 3), (2, 4), (1, 7), (3, 11), (2, 40))  # (B, n), smallest first
SCALES = (1.0, 10.0, 0.01)  # sizes of the elements, in turn


def check(
    model: nn.Module,
    dim_in: int | None = None,
    *,
    tolerances: dict[torch.dtype, float] | None = None,
    processes: bool = True,
    seed: int = 0,
) -> Report:
    """Test a model against every law of a fold that applies to it.

    A copy of the model is tested, in its current mode. For a model without `initial_state`,
    `update` and `readout`, the laws of any set encoder are tested, and whether the encodings of
    chunks combine to the encoding of the whole set.

    Args:
        model: a streaming encoder, or any module that maps (B, n, d) to (B, ...).
        dim_in: the width d of the elements; not needed if the model has an attribute dim_in.
        tolerances: by dtype, the largest relative error. The default is 1e-12 for float64 and 1e-5
            for float32.
        processes: whether to test the law that starts another process, which takes a few seconds.
        seed: the seed of the random cases.

    Returns:
        A report that prints as a table; `report.passed` is the verdict.

    Raises:
        InputError: the model is not a module, or the width of its elements is unknown.

    >>> import setfold
    >>> encoder = setfold.SlotSetEncoder(dim_in=3, num_slots=4, dim_slot=8, dim_out=8).eval()
    >>> report = check(encoder, processes=False)
    >>> report.passed
    True
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"check takes a torch.nn.Module; got {type(model).__name__}.")
    check_flags(processes=processes)
    _check_seed(seed)
    tolerances = TOLERANCES if tolerances is None else tolerances
    _check_tolerances(tolerances)
    if dim_in is not None:
        check_sizes(dim_in=dim_in)
    own = getattr(model, "dim_in", None)
    width = own if dim_in is None else dim_in
    if width is None:
        missing = f"{type(model).__name__} has no dim_in: pass the width of the elements, "
        raise InputError(
            f"{missing}setfold.check(model, dim_in=...).", command=f"{missing}--dim-in."
        )
    if own not in (None, width):
        raise InputError(
            f"dim_in must be {own}, the dim_in of the model; got {dim_in}. Leave dim_in out.",
            command=f"--dim-in must be {own}, as the model says; got {dim_in}. Omit it.",
        )
    not_streaming = streams(model)
    findings = []
    with _single_thread(), torch.random.fork_rng(devices=[]):
        for law in [*LAWS, CONSISTENCY] if not_streaming else LAWS:
            torch.manual_seed(seed)
            obstacle = law.obstacle(model)
            if not_streaming and obstacle == not_streaming:
                continue  # the verdict says so
            if law.once and not processes:
                obstacle = "skipped (processes=False)"
            if obstacle is not None:
                findings.append(
                    Finding(law.name, law.statement, NOT_APPLICABLE, {}, reason=obstacle)
                )
            else:
                findings.append(_test_law(law, model, width, tolerances, seed))
    return Report(type(model).__name__, tuple(findings), getattr(model, "passes", None))


def check_all(
    *,
    processes: bool = True,
    seed: int = 0,
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> Survey:
    """Check a small instance of every encoder: which fold, in how many passes, and which cannot.

    Args:
        processes: whether to test the law that starts another process, a few seconds per encoder.
        seed: the seed of the random cases.
        progress: a callback, called with the number of encoders done, the total number, and the
            name of the next one.

    Returns:
        A survey that prints as a table; `survey.passed` is True if all behave as expected.

    >>> survey = check_all(processes=False)  # doctest: +SKIP
    >>> survey["SlotSetEncoder, mean"].verdict  # doctest: +SKIP
    'folds in one pass'
    >>> survey["SetTransformer, ISAB"].verdict  # doctest: +SKIP
    'folds in 3 passes'
    >>> survey["FSPool"].verdict  # doctest: +SKIP
    'cannot be folded'
    """
    check_flags(processes=processes)
    _check_seed(seed)
    return compare(check, progress, processes=processes, seed=seed)


def _check_seed(seed: object) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise InputError(f"seed must be an integer; got {seed!r}.")


def _check_tolerances(tolerances: object) -> None:
    if not isinstance(tolerances, dict) or not tolerances:
        raise InputError(
            "tolerances must be a dict of dtypes and relative errors, such as {torch.float64: "
            f"1e-12}}; got {tolerances!r}."
        )
    for dtype, tolerance in tolerances.items():
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InputError(f"tolerances must be by floating-point dtype; got {dtype!r}.")
        check_positive(tolerance=tolerance)


def _test_law(
    law: Law, model: nn.Module, dim_in: int, tolerances: dict[torch.dtype, float], seed: int
) -> Finding:
    """Test a law on all cases, smallest first, until one breaks it."""
    errors: dict[str, float] = {}
    for dtype, tolerance in tolerances.items():
        name = str(dtype).removeprefix("torch.")
        device = _device_of(model)
        if device.type == "mps" and dtype == torch.float64:
            continue  # MPS has no float64
        subject = copy.deepcopy(model).to(dtype)
        for case in cases(dim_in, dtype, seed, once=law.once, device=device):
            try:
                with torch.no_grad():
                    error = law.error(subject, case)
            except DescriptionError as obstacle:  # the law "two processes" saves the model
                return Finding(law.name, law.statement, NOT_APPLICABLE, {}, reason=str(obstacle))
            except Exception as raised:  # any exception breaks the law
                known = likely_reason(subject, case.elements, law.name)
                reason = known or f"{type(raised).__name__}: {raised}"
                return Finding(law.name, law.statement, FAILS, errors, case.describe(), reason)
            errors[name] = max(errors.get(name, 0.0), error)
            if not error <= law.slack * tolerance:
                reason = likely_reason(subject, case.elements, law.name) or ""
                return Finding(law.name, law.statement, FAILS, errors, case.describe(), reason)
    return Finding(law.name, law.statement, HOLDS, errors)


@contextmanager
def _single_thread() -> Iterator[None]:
    """Use one thread in the block: the cases are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _device_of(model: nn.Module) -> torch.device:
    tensors = (*model.parameters(), *model.buffers())
    return tensors[0].device if tensors else torch.device("cpu")


def cases(
    dim_in: int,
    dtype: torch.dtype,
    seed: int,
    *,
    once: bool = False,
    device: torch.device | None = None,
) -> Iterator[Case]:
    """Random cases, from one element to several dozen, of several sizes; some elements are equal."""
    draw = torch.Generator().manual_seed(seed)
    for number, (batch, length) in enumerate(SIZES[-2:-1] if once else SIZES):
        elements = torch.randn(batch, length, dim_in, generator=draw, dtype=torch.float64)
        elements *= SCALES[number % len(SCALES)]
        elements[:, 2::3] = elements[:, :1]  # ties, within chunks and between them
        lengths = _random_lengths(length, draw)
        yield Case(
            elements=elements.to(dtype).to(device),
            lengths=lengths,
            chunk_order=tuple(torch.randperm(len(lengths), generator=draw).tolist()),
            permutation=torch.randperm(length, generator=draw).to(device),
            mask=(torch.rand(batch, length, generator=draw) < 0.7).to(device),
            seed=int(torch.randint(2**31, (), generator=draw)),
        )


def _random_lengths(length: int, draw: torch.Generator) -> tuple[int, ...]:
    """Split a length at random places. Places may be equal, which gives empty chunks."""
    number = min(length, 4)
    cuts: Tensor = torch.randint(length + 1, (number,), generator=draw).sort().values
    edges = [0, *cuts.tolist(), length]
    return tuple(stop - start for start, stop in pairwise(edges))
