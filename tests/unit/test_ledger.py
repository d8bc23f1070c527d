"""A bucket's ledger: applied averages plus residuals are the gradients that were put in, element by element."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from commlayer.compressors import parse, wrap
from commlayer.compressors.feedback import ResidualSlice
from commlayer.engine.ledger import Ledger
from commlayer.records import Slice, Spec

SLICES = (Slice(0, 0, 40), Slice(1, 0, 25), Slice(2, 5, 35))
NUMEL = 95
EDGES = (0, 40, 65, 95)


def elements(mask: int) -> torch.Tensor:
    return torch.cat([torch.full((stop - start,), float(mask >> i & 1))
                      for i, (start, stop) in enumerate(pairwise(EDGES))])


def residual_of(ledger: Ledger) -> torch.Tensor:
    total, start = torch.zeros(NUMEL), {0: 0, 1: 40, 2: 65 - 5}
    for part in ledger.residuals():
        at = start[part.tensor] + part.start
        total[at : at + len(part.values)] += torch.as_tensor(part.values)
    return total


@pytest.mark.parametrize("text", ["topk(0.1)", "int4()", "onebit(64)", "identity()"])
@pytest.mark.parametrize("twice", [False, True])
def test_applied_and_residuals_are_what_was_put_in(text: str, twice: bool) -> None:
    """`twice`: rolled back between two steps already, and more is discarded after that."""
    codec, ledger, chance = wrap(parse(text)), Ledger(SLICES), random.Random(3)
    state = codec.init(Spec((NUMEL,)))
    ledger.encoders = [((0, NUMEL), state)]
    ledger.carry([ResidualSlice(0, 10, np.ones(20, np.float32)), ResidualSlice(2, 0, np.ones(10, np.float32))], 0.5)
    put, applied = residual_of(ledger), torch.zeros(NUMEL)
    assert put.sum() == 12.5, "the elements of other buckets are left out"
    generator, memory = torch.Generator().manual_seed(0), [memoryview(bytearray(codec.bound(Spec((NUMEL,))))) for _ in range(2)]
    for step in range(30):
        ledger.roll_back()
        gradient = torch.randn(NUMEL, generator=generator)
        x, y, out = gradient.clone(), torch.empty(NUMEL), memory[step % 2]
        ledger.open(x, 1.0)
        nbytes = codec.start(x.numpy(), state, out)
        ledger.record(lambda cut, x=x: codec.undo(state, x.numpy(), cut))
        assert codec.decode(out[:nbytes], state, y.numpy())
        used, cleared = chance.randrange(8), chance.choice([0, 0, 1, 6, 7])
        ledger.discarded = ledger.all_slices & ~used
        ledger.applied(used, 1.0)
        if twice:
            ledger.roll_back()
        ledger.discard(cleared & used)
        kept = elements(used & ~cleared)
        put += gradient * kept
        applied += y * kept
        assert step % 7 or ledger.report() >= 0
    ledger.roll_back()
    torch.testing.assert_close(applied + residual_of(ledger), put, rtol=1e-4, atol=1e-4)


def test_an_inherited_residual_that_reached_the_mean_in_part_is_sent_again() -> None:
    ledger, x = Ledger(SLICES), torch.zeros(NUMEL)
    ledger.carry([ResidualSlice(0, 0, np.ones(40, np.float32)), ResidualSlice(1, 0, np.ones(25, np.float32))], 1.0)
    ledger.open(x, 2.0)
    assert torch.equal(x, 2.0 * elements(0b011))
    ledger.discarded = 0b110
    ledger.applied(0b001, 0.75)
    ledger.roll_back()
    assert ledger.report() == 0b110
    assert ledger.report() == 0
    torch.testing.assert_close(residual_of(ledger), elements(0b001) * 0.25 + elements(0b010))


def test_replaced_states_leave_nothing_to_roll_back() -> None:
    ledger = Ledger(SLICES)
    ledger.open(torch.zeros(NUMEL), 1.0)
    ledger.record(lambda cut: pytest.fail("codec states were replaced"))
    ledger.discard(0b111)
    ledger.forget()
    assert ledger.roll_back() == 0
    assert ledger.report() == 0
