"""What becomes of a step's averages once they are written, told to the flows they came by. Knows flows; no optimizer.

Flows keep in bits, slice by slice, where their last average was not applied. It is taken back ahead of their next exchange, and
servers hear it with that, or between steps when somebody asks (`undone`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from commlayer.runtime.flow import Flow
from commlayer.runtime.routes.staged import Staged


class Unapplied:
    """A worker's, of its last step."""

    flows: list[Flow]
    _by_tensor: list[list[tuple[Flow, int]]]
    _staged: Staged
    settle: Callable[[], None]
    """Who watches what becomes of averages tells it of those that were cleared."""
    tentative: bool
    """Whether the last step was not finite somewhere, and so is one to skip, unless an optimizer steps all the same."""

    def cleared(self, tensor: int) -> None:
        """The average that the last step wrote for this tensor was thrown away."""
        for flow, i in self._by_tensor[tensor]:
            flow.unapplied |= 1 << i

    def applied(self, tensors: Collection[int]) -> None:
        """An optimizer has stepped with these averages: also in a step of which others were not finite."""
        for tensor in tensors if self.tentative else ():
            for flow, i in self._by_tensor[tensor]:
                if flow.sound:
                    flow.unapplied &= ~(1 << i)

    def undone(self) -> dict[int, int]:
        """By bucket, what of the last step was not applied and servers have not heard, between steps. The same on all ranks."""
        self.settle()
        for flow in self.flows:
            if flow.held is None:
                self._take_back(flow)
        return {flow.bucket.id: flow.undone for flow in self.flows if flow.undone and flow.bucket.path == "service"}

    def heard(self) -> None:
        """The servers have heard it."""
        for flow in self.flows:
            flow.undone = 0

    def _take_back(self, flow: Flow) -> bool:
        """Whether there was something to take back."""
        if back := flow.take_back():
            self._staged.undo(flow, back)
        return back != 0
