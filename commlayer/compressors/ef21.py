"""EF21 (Richtarik et al. 2021), both ways: estimates that differences correct, instead of a residual. Knows no format.

A worker sends C(x - estimate) and adds what it sent to its estimate; the server's estimate is the sum of theirs. Back go the
coded differences to what the workers hold, which is the result: C is applied twice, and the bytes are C's in both directions.
C must bring every input nearer to zero (topk, int8, onebit do; unbiased codecs of few bits do not).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from commlayer.compressors import inputs, kernels, payload
from commlayer.compressors.codec import Buffer, Codec, Cut, Out, Round, State, ranges
from commlayer.compressors.feedback import Limited, heed
from commlayer.compressors.one_round import NAN, accumulator, check_numel
from commlayer.compressors.wrapper import Wrapper, check_plain
from commlayer.records import Spec

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

FADE = 1.0 - 2.0**-12
"""Estimates fade a little with each step, on both sides alike. What rounding has set apart between the sum of the workers'
estimates and the server's heals, which nothing else would do."""

MOST = kernels.MOST["fp32"]


class EF21(Wrapper, frozen=True):
    """State: `estimate`, `held` (the result so far, the same bits at all workers and the server), and the inner state.

    `_sent` and `_added` are as error feedback's. An abandoned step takes its differences back from the estimates; what the
    workers hold stays, since it is common knowledge, and later differences are to it.
    """

    name: ClassVar[str] = "ef21"
    biased: ClassVar[bool] = False
    keeps: ClassVar[bool] = True

    def init(self, spec: Spec) -> State:
        n = check_numel(spec)
        return {"estimate": torch.zeros(n), "held": torch.zeros(n), "inner": self.inner.init(spec),
                "_sent": None, "_added": None, "_scratch": torch.empty(n)}

    def init_server(self, spec: Spec) -> State:
        return {**self.init(spec), "inner": self.inner.init_server(spec)}

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        state["_sent"] = None
        inputs.check(self.name, "x", x, state["estimate"].numel(), state["estimate"].device)
        estimate = state["estimate"].mul_(FADE)
        nbytes = self._start(x, estimate, state, out)
        # A flagged payload has moved nothing but what fades.
        state["_sent"] = out[: nbytes if self._follow(out[:nbytes], estimate) else 0]
        return nbytes

    def decode(self, result: Buffer, state: State, out: torch.Tensor) -> bool:
        inputs.check(self.name, "out", out, state["held"].numel(), state["held"].device)
        if not self._follow(result, state["held"]):
            out.fill_(NAN)
            return False
        out.copy_(state["held"])
        return True

    def undo(self, state: State, x: torch.Tensor, cut: Cut = None) -> None:
        if state["_sent"] is not None:
            sent = state["_scratch"].zero_()
            if len(state["_sent"]):
                self.inner.decode(state["_sent"], state["inner"], sent)
            _take_back(state["estimate"], sent, cut)
            state["_sent"] = None if cut is None else state["_sent"]

    def undo_server(self, state: State, cut: Cut = None) -> None:
        if state["_added"] is not None:
            _take_back(state["estimate"], state["_added"], cut)
            state["_added"] = None if cut is None else state["_added"]

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        state["_added"] = None
        total, estimate = acc["sum"], state["estimate"].mul_(FADE)
        if not kernels.all_finite(total, estimate):
            state["_added"] = torch.zeros_like(estimate)
            return payload.write_flagged(out, self.id, total.numel())
        # Those whose difference is not flagged have added it to their own estimate.
        estimate += total
        state["_added"] = total
        if acc["flagged"][0]:
            return payload.write_flagged(out, self.id, total.numel())
        heed(self.inner, acc, state["inner"])
        nbytes = self._start(estimate, state["held"], state, out)
        self._follow(out[:nbytes], state["held"])
        return nbytes

    def _start(self, x: torch.Tensor, known: torch.Tensor, state: State, out: Out) -> int:
        """Codes x - known, cut to what the inner codec can hold."""
        difference = torch.sub(x, known, out=state["_scratch"])
        if not kernels.all_finite(difference):
            return payload.write_flagged(out, self.id, x.numel())
        if isinstance(self.inner, Limited):
            difference.clamp_(-self.inner.most, self.inner.most)
        return int(self.inner.start(difference, state["inner"], out))

    def _follow(self, message: Buffer, known: torch.Tensor) -> bool:
        """known += what the message says. False if it is flagged. The same bits for all who do it."""
        acc = accumulator(known)
        self.inner.add(0, message, acc, first=False)
        if not kernels.all_finite(known):
            known.clamp_(-MOST, MOST).nan_to_num_()
        return not acc["flagged"][0]


def _take_back(estimate: torch.Tensor, added: torch.Tensor, cut: Cut) -> None:
    """As it was before it faded and before that was added."""
    for start, stop in ranges(cut, estimate.numel()):
        estimate[start:stop].sub_(added[start:stop]).div_(FADE)


def ef21(inner: Codec) -> EF21:
    """Around a codec whose payloads are decoded by the server (GATHER)."""
    if check_plain("ef21", inner).rounds != (Round.GATHER,):
        raise ValueError(f"ef21: inner is {inner}, allowed is a codec that servers decode (GATHER), such as topk or int8")
    return EF21(inner)
