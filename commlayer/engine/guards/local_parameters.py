"""Names the parameters that an optimizer updates although no session averages their gradients."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Collection

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from commlayer.engine.guards.model_checks import is_averaged
from commlayer.errors import append_code

log = logging.getLogger("commlayer")
NAMED = 3
"""Largest number of parameters that one log line names."""
_looked_at: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""Maps an optimizer to its number of parameters when a session last looked for parameters that are not averaged."""


class LocalParameters:
    """Logs which parameters of an optimizer belong to no attached model. It does so at the optimizer's first step, when its
    models are attached, and again if the optimizer receives more parameters."""

    def __init__(self) -> None:
        self._logged: set[tuple[object, ...]] = set()
        """Kind and shapes of what was logged, because a script can create an equal optimizer many times."""

    def look(self, optimizer: Optimizer) -> None:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if _looked_at.get(optimizer) == count:
            return
        _looked_at[optimizer] = count
        others = {id(p): (p, group.get("param_names", ())[place:place + 1], number, place)
                  for number, group in enumerate(optimizer.param_groups) for place, p in enumerate(group["params"])
                  if p.requires_grad and not is_averaged(p)}
        kind = (type(optimizer), *(p.shape for p, *_ in others.values()))
        if not others or kind in self._logged:
            return
        self._logged.add(kind)
        names, by_ddp = _find(others)
        texts = [f"{(*own, names.get(key, 'a parameter'))[0]} (parameter {place} of group {number}, shape {tuple(p.shape)})"
                 for key, (p, own, number, place) in others.items() if key not in by_ddp]
        if texts:
            log.warning("%s", append_code(
                "E-PARAMETER-LOCAL",
                f"{type(optimizer).__name__} updates {len(texts)} parameters that belong to no attached model: "
                f"{', '.join(texts[:NAMED])}{', ...' if len(texts) > NAMED else ''}. Their gradients are not averaged, so each "
                "rank trains its own copy: attach a module that contains them, unless each rank should train its own"))


def _find(wanted: Collection[int]) -> tuple[dict[int, str], set[int]]:
    """Searches all modules of the process for parameters, given by id. Returns their names, which begin with the class of the
    outermost module, and the ids of those that a DistributedDataParallel module averages. Takes about 0.1 s."""
    # isinstance() would read the attribute __class__ of every object, which can run code.
    modules = [thing for thing in gc.get_objects() if nn.Module in type(thing).__mro__]
    parents = {id(child): (module, name) for module in modules for name, child in vars(module).get("_modules", {}).items()}
    names = {}
    for module in modules:
        for name, p in vars(module).get("_parameters", {}).items():
            if id(p) in wanted:
                path, outer, passed = [name], module, {id(module)}
                while id(outer) in parents and id(parents[id(outer)][0]) not in passed:
                    outer, inside = parents[id(outer)]
                    passed.add(id(outer))
                    path.append(inside)
                names[id(p)] = ".".join([type(outer).__name__, *reversed(path)])
    return names, {id(p) for module in modules if isinstance(module, DistributedDataParallel) for p in module.parameters()}
