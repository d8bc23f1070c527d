"""Stops a DistributedDataParallel module from averaging gradients and copying buffers, because attach() does both.

DDP decides in its forward pass whether the next backward pass averages gradients. DDP also communicates in the forward pass.
DDP's flags are therefore off during each forward pass, as inside its own no_sync(), and the script's values are restored
afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from commlayer.errors import InvalidInput


class QuietDDP:
    def __init__(self, ddp: DistributedDataParallel) -> None:
        """Adds hooks around the module's forward pass, which run before existing hooks."""
        self._ddp, self._said = ddp, (True, True)
        self.syncing = True
        """True: the script wants the current backward pass to be averaged, so it is not inside `ddp.no_sync()`."""
        self._handles = [ddp.register_forward_pre_hook(self._silence, prepend=True),
                         ddp.register_forward_hook(self._restore, always_call=True)]

    def _silence(self, ddp: Any, _args: Any) -> None:
        if not self._handles:
            return  # a hook before this one has called `remove`
        if ddp._join_config.enable:
            raise InvalidInput("E-DDP-UNSUPPORTED",
                               "DistributedDataParallel's join() does not work with an attached module, whose gradients "
                               "DistributedDataParallel does not average: use `with session.join():`")
        if torch.is_grad_enabled():
            self.syncing = ddp.require_backward_grad_sync
        # With a static graph, the first pass ends with a reduction of all gradients, even in no_sync().
        self._said = ddp.require_backward_grad_sync, getattr(ddp, "_static_graph_delay_allreduce_enqueued", True)
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = False
        ddp._static_graph_delay_allreduce_enqueued = True

    def _restore(self, ddp: Any, _args: Any, _output: Any) -> None:
        ddp.require_backward_grad_sync, ddp._static_graph_delay_allreduce_enqueued = self._said

    def remove(self) -> None:
        """Removes the hooks. The module then averages gradients and broadcasts buffers as without commlayer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._ddp.require_forward_param_sync = True


def check_silenceable(ddp: DistributedDataParallel) -> None:
    """Raises ValueError for a module whose training would change if attach() averaged its gradients instead of DDP. The
    only hook that it may have is commlayer's own, which is attaching the module."""
    if ignored := sorted(getattr(ddp, "parameters_to_ignore", ())):
        raise InvalidInput("E-DDP-UNSUPPORTED",
                           f"DistributedDataParallel ignores the parameter {ignored[0]}, but attach() would average it: freeze "
                           "the parameter")
    if ddp.mixed_precision is not None:
        raise InvalidInput("E-DDP-UNSUPPORTED",
                           "attach() does not support DistributedDataParallel(mixed_precision=...), which replaces weights "
                           "around its own averaging: use torch.autocast")
    if any(not getattr(state, "attaching", False) for _, state in ddp._comm_hooks):
        raise InvalidInput("E-DDP-UNSUPPORTED",
                           "the DistributedDataParallel module has a communication hook, but attach() averages gradients "
                           "without it: create the module without the hook")
