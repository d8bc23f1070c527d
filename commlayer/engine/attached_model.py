"""Checks in every step that the trained parameters are still the attached ones.

A parameter that is unfrozen, added or replaced later would not be averaged, and ranks would silently diverge. A parameter that
is frozen or removed later counts as unused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from commlayer.errors import InvalidInput

log = logging.getLogger("commlayer")

REMEDY = "session.close(), then attach again"
NAMED = 3
"""Parameters named in one log line."""

_averaged: Any = WeakIdKeyDictionary()
"""The parameters that any session of this process averages."""


def is_averaged(parameter: torch.Tensor) -> bool:
    """Whether a session of this process averages its gradients."""
    return parameter in _averaged


class AttachedModel:
    """The parameters of one session. `check` runs in every step, so it compares only what takes microseconds."""

    def __init__(
        self, model: nn.Module | None, named: Sequence[tuple[str, torch.Tensor]], optimizer: Any = None,
        ignored: Collection[str] = (),
    ) -> None:
        """`named`: the averaged parameters. `ignored`: names of parameters that each rank keeps for itself on purpose."""
        self._model, self._optimizer, self._ignored = model, optimizer, ignored
        self._names, self._named = {name for name, _ in named}, {id(p) for _, p in named}
        self._kept = [p for _, p in named]  # keeps their ids from being reused
        _averaged.update((p, None) for p in self._kept)
        self._stepped = [p for group in self._groups() for p in group]
        self._known = {id(p) for p in self._stepped}
        self._asked = False
        self._frozen: list[torch.Tensor] = []
        self._look()

    def _look(self) -> None:
        """Records the current state."""
        modules = [*self._model.modules()] if self._model is not None else []
        self._within: list[dict[str, Any]] = [table for module in modules for table in (module._parameters, module._modules)]
        self._seen = self._marks()
        self._frozen = [p for _, p in self._others()]
        self._grouped = [[*map(id, group)] for group in self._groups()]

    def check(self, latch: Callable[[BaseException], None], stranger: Any = None) -> None:
        """Raises ValueError with the name of a parameter that is trained but not averaged, and latches it: no step can follow.

        `stranger`: an optimizer without averaged parameters that is about to step. It matters if it holds another parameter of
        this model.
        """
        try:
            if stranger is None:
                self._tell_others_once()
            if self._changed() and (stranger is None or self._holds_others(stranger)):
                self._check()
        except ValueError as error:
            latch(error)
            raise

    def _changed(self) -> bool:
        grouped = [[*map(id, group)] for group in self._groups()]
        return grouped != self._grouped or any(map(_trained, self._frozen)) or self._marks() != self._seen

    def _holds_others(self, optimizer: Any) -> bool:
        others = {id(p) for _, p in self._others()}
        return any(id(p) in others for group in optimizer.param_groups for p in group["params"])

    def _check(self) -> None:
        for name, p in self._others():
            if p.requires_grad:
                how = ("was frozen when the model was attached, and no longer is" if any(p is old for old in self._frozen) else
                       "took the place of another parameter" if name in self._names else "was added")
                raise InvalidInput("E-MODEL-CHANGED",
                                   f"parameter {name} {how}: nobody averages its gradient, so each rank would train its own; "
                                   f"remedy: {REMEDY}")
        for number, group in enumerate(self._groups()):
            for place, p in enumerate(group):
                if p.requires_grad and id(p) not in self._known and not is_averaged(p):
                    raise InvalidInput("E-MODEL-CHANGED",
                                       f"parameter {place} of the optimizer's group {number}, of shape {tuple(p.shape)}, was "
                                       "added and is in no attached model: nobody averages its gradient; remedy: "
                                       f"{REMEDY}, with a model that holds it")
        self._look()

    def remove(self) -> None:
        for p in self._kept:
            _averaged.pop(p, None)
        self._kept.clear()

    def _marks(self) -> list[int]:
        """The ids of the parameters and modules in each module."""
        return [*map(id, chain.from_iterable(map(dict.values, self._within)))]

    def _others(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, p in self._model.named_parameters() if self._model is not None else ():
            if id(p) not in self._named and name not in self._ignored:
                yield name, p

    def _groups(self) -> list[list[Any]]:
        return [group["params"] for group in getattr(self._optimizer, "param_groups", ())]

    def _tell_others_once(self) -> None:
        """Runs at the first step, when other models of the same optimizer are attached, too."""
        if self._asked:
            return
        self._asked = True
        model = {id(p) for p in self._model.parameters()} if self._model is not None else set()
        others = [p for p in self._stepped if p.requires_grad and id(p) not in model and not is_averaged(p)]
        if others and self._model is not None:
            names = self._names_in_groups()
            listed = ", ".join(names[id(p)] for p in others[:NAMED]) + (", ..." if len(others) > NAMED else "")
            log.warning("the optimizer steps %d parameters that are in no attached model: %s. Their gradients are not "
                        "averaged, so each rank trains its own", len(others), listed)

    def _names_in_groups(self) -> dict[int, str]:
        """By id, a description by which a user finds a parameter of no attached model."""
        descriptions = {}
        for number, group in enumerate(getattr(self._optimizer, "param_groups", ())):
            names = group.get("param_names", ())
            for place, p in enumerate(group["params"]):
                name = f"{names[place]} (" if place < len(names) else f"parameter {place} of group {number} ("
                descriptions[id(p)] = f"{name}shape {tuple(p.shape)})"
        return descriptions


def _trained(p: torch.Tensor) -> bool:
    return p.requires_grad
