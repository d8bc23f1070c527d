"""Checks in every step that all trained parameters are averaged.

A parameter that is unfrozen, added or replaced after attach() would not be averaged, and ranks would silently diverge. A
parameter that is frozen or removed later counts as unused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import methodcaller
from typing import Any

import torch
from torch import nn

from commlayer.engine.guards.model_checks import is_averaged
from commlayer.errors import InvalidInput

REMEDY = "session.close(), then attach again"


class AttachedModel:
    """The parameters of one session's model and optimizer when attach() was called. `check` runs in every step and takes
    microseconds."""

    def __init__(
        self, model: nn.Module, named: Sequence[tuple[str, torch.Tensor]], optimizer: Any,
    ) -> None:
        """`named`: the averaged parameters with their names."""
        self._model, self._optimizer = model, optimizer
        self._names, self._named = {name for name, _ in named}, {id(p) for _, p in named}
        self._kept = [p for _, p in named]  # keeps their ids from being reused
        self._known = {id(p) for group in self._groups() for p in group}
        self._frozen: list[torch.Tensor] = []
        self._look()

    def _look(self) -> None:
        """Records the current parameters, modules and optimizer groups, for later comparison."""
        self._within: list[Mapping[str, Any]] = [table for module in self._model.modules()
                                                 for table in (module._parameters, module._modules)]
        self._seen = self._marks()
        self._frozen = [p for _, p in self._others()]
        self._grouped = [[*map(id, group)] for group in self._groups()]

    def check(self, latch: Callable[[BaseException], None], stranger: Any = None) -> None:
        """Raises ValueError with the name of a parameter that is trained but not averaged. The error is also passed to `latch`,
        so that no further step is possible.

        `stranger`: an optimizer without averaged parameters that is about to step; it is checked only if it has another
        parameter of this model. None: all parameters are checked.
        """
        try:
            if self._changed() and (stranger is None or self._holds_others(stranger)):
                self._check()
        except ValueError as error:
            latch(error)
            raise

    def _changed(self) -> bool:
        grouped = [[*map(id, group)] for group in self._groups()]
        return grouped != self._grouped or any(p.requires_grad for p in self._frozen) or self._marks() != self._seen

    def _holds_others(self, optimizer: Any) -> bool:
        others = {id(p) for _, p in self._others()}
        return any(id(p) in others for group in optimizer.param_groups for p in group["params"])

    def _check(self) -> None:
        for name, p in self._others():
            if p.requires_grad:
                how = ("was frozen when the model was attached, and no longer is" if any(p is old for old in self._frozen) else
                       "replaced another parameter" if name in self._names else "was added")
                raise InvalidInput("E-MODEL-CHANGED",
                                   f"parameter {name} {how}: its gradient is not averaged, so each rank would train its own "
                                   f"copy; call {REMEDY}")
        for number, group in enumerate(self._groups()):
            for place, p in enumerate(group):
                if p.requires_grad and id(p) not in self._known and not is_averaged(p):
                    raise InvalidInput("E-MODEL-CHANGED",
                                       f"parameter {place} of the optimizer's group {number}, of shape {tuple(p.shape)}, "
                                       "was added after attach() and belongs to no attached model: its gradient is not "
                                       f"averaged; call {REMEDY}, with a model that contains the parameter")
        self._look()

    def _marks(self) -> list[int]:
        """Returns the Python ids of all parameters and submodules of the model's modules."""
        return [*map(id, chain.from_iterable(map(methodcaller("values"), self._within)))]

    def _others(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, p in self._model.named_parameters():
            if id(p) not in self._named:
                yield name, p

    def _groups(self) -> list[list[Any]]:
        return [group["params"] for group in getattr(self._optimizer, "param_groups", ())]
