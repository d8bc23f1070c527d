"""What all ranks had of a bucket's buffers after the last exchange: who has nothing else says so. Knows no peers.

A mean of equal values is not that value to the last bit: weights round, and so a buffer that nobody changes would wander. A
buffer's `used` flag says that this rank has changed it. It goes with every path, and what nobody has changed stays as it was.
What all have changed alike an all-reduce of float64 brings back to the bits of narrower types; servers sum float32, which holds
whole numbers of samples times whole values (of a counter), and rounds others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from commlayer.compressors.debts import spread

if TYPE_CHECKING:
    from commlayer.runtime.flow import Flow


class SharedBuffers:
    """Of one flow of buffers. `values` are in the flow's own order, and the same on all ranks."""

    def __init__(self, flow: Flow) -> None:
        self.values, self._own = torch.zeros_like(flow.x), torch.zeros_like(flow.x)
        self._own_views = flow.views_of(self._own)
        self._sizes = [s.numel for s in flow.bucket.slices]
        self._repeats = torch.tensor(self._sizes, device=flow.x.device)

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        """By slice, whether this rank's values are others. On the device: the host waits for nothing."""
        return torch.stack([part.any() for part in torch.ne(x, self.values).split(self._sizes)])

    def commit(self, flow: Flow, factor: float | torch.Tensor, targets: Sequence[torch.Tensor | None]) -> None:
        """Writes the means into the targets, or what was agreed where nobody changed it. If a rank has values that are not
        finite, each keeps its own."""
        finite = torch.isfinite(flow.y).all()
        into = [target.detach() for _, target in flow.parts(targets, flow.views_y)]
        torch._foreach_copy_([own for own, _ in flow.parts(targets, self._own_views)], into)
        changed = torch.repeat_interleave(flow.flags() > 0, self._repeats, output_size=flow.numel)
        mean = torch.where(changed, flow.y.double() * factor, self.values)
        flow.y.copy_(torch.where(finite, mean, self._own))  # rounded once
        views = [view for view, _ in flow.parts(targets, flow.views_y)]
        torch._foreach_copy_(into, views)
        torch._foreach_copy_(views, into)  # as the buffers' own dtype has them
        self.values.copy_(torch.where(finite, flow.y, self.values))


def agree(flows: Sequence[Flow], tensors: Sequence[torch.Tensor | None]) -> None:
    """All ranks have the same buffers now. Tensors are by their numbers; what is none is left out."""
    for flow in flows:
        if flow.agreed is not None:
            for view, tensor in flow.parts([tensors[s.tensor] for s in flow.bucket.slices], flow.views_of(flow.agreed.values)):
                view.copy_(tensor.detach())


def pass_on(before: Sequence[Flow], after: Sequence[Flow]) -> None:
    """What was agreed under one plan, to the flows of the next."""
    known = [part for flow in before if flow.agreed is not None
             for part in spread(flow.bucket.slices, 0, flow.agreed.values)]
    for flow in after:
        at = 0
        for s in flow.bucket.slices if flow.agreed is not None else ():
            assert flow.agreed is not None
            for part in known:
                low, high = max(s.start, part.start), min(s.stop, part.stop)
                if part.tensor == s.tensor and low < high:
                    place = at - s.start
                    flow.agreed.values[place + low : place + high] = part.values[low - part.start : high - part.start]
            at += s.numel


def snapshot(flows: Sequence[Flow]) -> dict[str, torch.Tensor]:
    """For a checkpoint: between two exchanges of local steps no model's file holds it."""
    return {f"agreed.{flow.bucket.id}": flow.agreed.values.cpu().clone() for flow in flows if flow.agreed is not None}


def restore(flows: Sequence[Flow], tensors: Mapping[str, torch.Tensor]) -> None:
    """The reverse. What is not there stays as it is."""
    for flow in flows:
        if flow.agreed is not None and (saved := tensors.get(f"agreed.{flow.bucket.id}")) is not None:
            flow.agreed.values.copy_(saved)
