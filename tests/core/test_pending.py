from __future__ import annotations

import contextlib
import copy
import pickle
import threading

import pytest
import torch

import setfold
from setfold.core.state import SetState
from tests.small import AGGREGATES, assert_same_state, draw, make


@torch.no_grad()
def put_aside(encoder, *chunks):
    """The state of chunks that still wait to be absorbed."""
    state = encoder.initial_state(chunks[0].shape[0])
    for chunk in chunks:
        state = encoder.update(state, chunk)
    assert state.pending is not None
    return state


def absorbed(encoder, *chunks):
    """The state of the same chunks, absorbed at once."""
    state = encoder.initial_state(chunks[0].shape[0])
    for chunk in chunks:
        state = encoder.update(state, chunk)
    assert state.pending is None
    return state


@pytest.mark.parametrize("aggregate", AGGREGATES, ids=str)
def test_what_is_put_aside_reads_as_if_absorbed(aggregate):
    encoder = make(aggregate=aggregate)
    chunks = [draw(2, n, 3, seed=n) for n in (1, 4, 2)]
    waiting = put_aside(encoder, *chunks)
    assert waiting.count.tolist() == [7, 7]
    assert_same_state(waiting, absorbed(encoder, *chunks).detach())
    assert waiting.pending is None


def test_a_long_stream_of_single_elements_is_the_whole_set(monkeypatch):
    monkeypatch.setattr("setfold.core.encoder.PENDING_BYTES", 4000)
    encoder, elements = make(aggregate=["mean", "max"]), draw(1, 1300, 3)
    with torch.no_grad():
        state = encoder.initial_state()
        for element in elements.split(1, 1):
            state = encoder.update(state, element)
            assert state.pending is None or state.pending.bytes <= 4000
        torch.testing.assert_close(
            encoder.readout(state), encoder(elements), rtol=1e-12, atol=1e-12
        )


def test_the_caller_may_overwrite_a_chunk_that_was_put_aside():
    encoder, chunk = make(), draw(1, 4, 3)
    expected = absorbed(encoder, chunk.clone()).detach()
    waiting = put_aside(encoder, chunk)
    chunk.fill_(7)
    assert_same_state(waiting, expected)


def test_a_state_that_waits_stays_as_it_was_when_it_is_updated():
    encoder, first, second = make(), draw(1, 4, 3), draw(1, 2, 3, seed=1)
    waiting = put_aside(encoder, first)
    with torch.no_grad():
        encoder.update(waiting, second)
        encoder.update(waiting, second, mask=torch.ones(1, 2, dtype=torch.bool))
    assert_same_state(waiting, absorbed(encoder, first).detach())


USES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "to": lambda state: state.to("cpu"),
    "detach": SetState.detach,
    "index": lambda state: SetState.stack([state[0], state[1]]),
    "merge": lambda state: state.merge(state[:]),
    "repr": lambda state: (repr(state), state)[1],
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_what_waits_is_not_lost(use):
    encoder, chunks = make(aggregate=["sum", "max"]), [draw(2, n, 3, seed=n) for n in (1, 3)]
    expected = use(absorbed(encoder, *chunks).detach())
    assert_same_state(use(put_aside(encoder, *chunks)), expected)


def test_what_waits_is_saved(tmp_path):
    encoder, chunk = make(), draw(1, 3, 3)
    put_aside(encoder, chunk).save(tmp_path / "state")
    assert_same_state(SetState.load(tmp_path / "state"), absorbed(encoder, chunk).detach())


def test_what_waits_can_be_removed_again():
    encoder, first, second = make(), draw(1, 3, 3), draw(1, 2, 3, seed=1)
    with torch.no_grad():
        left = encoder.remove(put_aside(encoder, first, second), second)
    assert_same_state(left, absorbed(encoder, first).detach())


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("aggregate", AGGREGATES, ids=str)
@pytest.mark.parametrize("dim_out", [1, 5])  # sums of elements, sums of values
def test_weights_that_change_meanwhile_do_not_change_what_was_seen(aggregate, similarity, dim_out):
    torch.manual_seed(0)
    encoder = setfold.SlotSetEncoder(3, 4, 6, dim_out, aggregate, similarity=similarity).double()
    encoder.eval()
    chunk = draw(1, 3, 3)
    expected = absorbed(encoder, chunk).detach()
    waiting = put_aside(encoder, chunk)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(1).mul_(-2)
    assert_same_state(waiting, expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_small_chunk_that_is_not_finite_raises_at_once(bad):
    encoder, chunk = make(), draw(1, 3, 3)
    waiting = put_aside(encoder, chunk)
    broken = draw(1, 2, 3)
    broken[0, 1, 2] = bad
    with torch.no_grad(), pytest.raises(setfold.NonFiniteError, match=r"elements\[0, 1, 2\]"):
        encoder.update(waiting, broken)
    assert_same_state(waiting, absorbed(encoder, chunk).detach())


def test_huge_numbers_are_not_put_aside_and_not_spoilt():
    encoder = make().float()
    huge = torch.full((1, 2, 3), 1e35)
    with torch.no_grad():
        state = encoder.update(put_aside(encoder, draw(1, 3, 3).float()), huge)
        assert state.pending is None
        total = state.statistics["sum"][0].sum(1)[0]  # over slots, weights sum to 1
    torch.testing.assert_close(
        total, torch.tensor([2e35, 2e35, 2e35, 5.0]).double(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_that_waits_does_not_overflow(dtype):
    pool = setfold.Pool(3, "mean").to(dtype)
    with torch.no_grad():
        state = pool.initial_state()
        for _ in range(300):
            state = pool.update(state, torch.full((1, 1, 3), 1024.0, dtype=dtype))
        torch.testing.assert_close(pool.readout(state), torch.full((1, 3), 1024.0, dtype=dtype))


def test_slot_sums_in_half_precision_that_wait_do_not_overflow():
    encoder = make(aggregate="mean").half()
    with torch.no_grad():
        state = encoder.initial_state()
        for _ in range(300):
            state = encoder.update(state, torch.full((1, 1, 3), 1024.0, dtype=torch.float16))
        assert state.statistics["sum"][0].isfinite().all()


def test_two_threads_may_read_a_state_that_waits():
    encoder, chunk = make(), draw(1, 3, 3)
    waiting = put_aside(encoder, chunk)
    both_here = threading.Barrier(2, timeout=1)
    absorb = waiting.pending.absorb

    def absorb_slowly(elements):
        with contextlib.suppress(threading.BrokenBarrierError):  # one kept out is fine too
            both_here.wait()
        return absorb(elements)

    waiting.pending = waiting.pending._replace(absorb=absorb_slowly)
    threads = [threading.Thread(target=lambda: waiting.statistics) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same_state(waiting, absorbed(encoder, chunk).detach())
