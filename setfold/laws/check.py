"""The laws, as a check that runs on any model: ours, yours, streaming or not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn

from setfold.errors import DescriptionError, InputError
from setfold.laws.consistency import CONSISTENCY
from setfold.laws.diagnosis import diagnose
from setfold.laws.law import Case, Law, streams
from setfold.laws.laws import LAWS
from setfold.laws.report import FAILS, HOLDS, NOT_APPLICABLE, Finding
from setfold.laws.report import Report as Report
from setfold.laws.survey import Survey as Survey
from setfold.laws.survey import compare

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}
SIZES = ((1, 1), (1, 2), (1, 3), (2, 4), (1, 7), (3, 11), (2, 40))  # sets and elements, growing


def check(
    model: nn.Module,
    dim_in: int | None = None,
    *,
    tolerances: dict[torch.dtype, float] | None = None,
    processes: bool = True,
    seed: int = 0,
) -> Report:
    """Put every law of a fold that applies to the test, on any model.

    The model is checked as it is, in the mode it is in, on a copy. A model without the verbs of
    a fold is checked for what can be asked of any set encoder, and whether its encodings of
    chunks could be combined into that of the whole set.

    Args:
        model: a streaming encoder, or any module that maps (B, n, d) to (B, ...).
        dim_in: the width d of its elements, where model.dim_in does not tell.
        tolerances: by dtype, the largest relative error; float64 1e-12 and float32 1e-6.
        processes: whether to merge with a state from another process, which takes seconds.
        seed: of the random cases.

    Returns:
        A report that prints as a table; `report.passed` is the verdict.

    >>> import setfold
    >>> encoder = setfold.SlotSetEncoder(dim_in=3, num_slots=4, dim_slot=8, dim_out=8).eval()
    >>> report = check(encoder, processes=False)
    >>> report.passed
    True
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"check takes a torch.nn.Module; got {type(model).__name__}.")
    own = getattr(model, "dim_in", None)
    width = own if dim_in is None else dim_in
    if width is None:
        raise InputError("say how wide the elements are: setfold.check(model, dim_in=...).")
    if own not in (None, width):
        raise InputError(f"the model takes elements of width {own}; dim_in says {dim_in}.")
    tolerances = TOLERANCES if tolerances is None else tolerances
    no_fold = streams(model)
    findings = []
    with _one_thread(), torch.random.fork_rng(devices=[]):  # what is drawn is drawn from the seed
        for law in [*LAWS, CONSISTENCY] if no_fold else LAWS:
            torch.manual_seed(seed)
            obstacle = law.obstacle(model)
            if no_fold and obstacle == no_fold:
                continue  # said once, by the verdict
            if law.once and not processes:
                obstacle = "left out on request"
            if obstacle is not None:
                findings.append(
                    Finding(law.name, law.statement, NOT_APPLICABLE, {}, reason=obstacle)
                )
            else:
                findings.append(_put_to_the_test(law, model, width, tolerances, seed))
    return Report(type(model).__name__, tuple(findings), getattr(model, "passes", None))


def check_all(
    *,
    processes: bool = True,
    seed: int = 0,
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> Survey:
    """Put a small instance of every encoder to the test: who folds, in how many passes, who cannot.

    Args:
        processes: whether to merge states from other processes, which takes seconds for each.
        seed: of the random cases.
        progress: called with how many encoders are done, of how many, and which is next.

    Returns:
        A survey that prints as a table; `survey.passed` tells whether all are what they claim.

    >>> survey = check_all(processes=False)
    >>> survey["SlotSetEncoder, mean"].verdict, survey["SetTransformer, ISAB"].verdict
    ('folds in one pass', 'folds in 3 passes')
    >>> survey["FSPool"].verdict
    'cannot be folded'
    """
    return compare(check, progress, processes=processes, seed=seed)


def _put_to_the_test(
    law: Law, model: nn.Module, dim_in: int, tolerances: dict[torch.dtype, float], seed: int
) -> Finding:
    """Try the cases, smallest first, until one breaks the law."""
    errors: dict[str, float] = {}
    for dtype, tolerance in tolerances.items():
        name = str(dtype).removeprefix("torch.")
        device = _device_of(model)
        if device.type == "mps" and dtype == torch.float64:
            continue  # which it does not have
        subject = copy.deepcopy(model).to(dtype)
        for case in cases(dim_in, dtype, seed, once=law.once, device=device):
            try:
                with torch.no_grad():
                    error = law.error(subject, case)
            except DescriptionError as obstacle:  # only the law of two processes needs a file
                return Finding(law.name, law.statement, NOT_APPLICABLE, {}, reason=str(obstacle))
            except Exception as raised:  # whatever a model raises breaks the law
                known = diagnose(subject, case.elements, law.name)
                reason = known or f"{type(raised).__name__}: {raised}"
                return Finding(law.name, law.statement, FAILS, errors, case.describe(), reason)
            errors[name] = max(errors.get(name, 0.0), error)
            if not error <= law.slack * tolerance:
                reason = diagnose(subject, case.elements, law.name) or ""
                return Finding(law.name, law.statement, FAILS, errors, case.describe(), reason)
    return Finding(law.name, law.statement, HOLDS, errors)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The cases are small: threads would only wait for each other."""
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
    """Random cases, from a single element to some dozens."""
    draw = torch.Generator().manual_seed(seed)
    for batch, length in SIZES[-2:-1] if once else SIZES:
        elements = torch.randn(batch, length, dim_in, generator=draw, dtype=torch.float64)
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
    """Cut a length at random places, some of them the same: empty chunks must do no harm."""
    number = min(length, 4)
    cuts: Tensor = torch.randint(length + 1, (number,), generator=draw).sort().values
    edges = [0, *cuts.tolist(), length]
    return tuple(stop - start for start, stop in pairwise(edges))
