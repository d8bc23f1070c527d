"""torch's object collectives for groups that span homes, without pickle.

`install` replaces torch's functions. A group that spans homes encodes its objects with object_codec.py; other groups work as
before. Each size that a rank names is checked before any rank allocates memory for it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from commlayer.cluster.processes import object_codec
from commlayer.errors import CommError, InvalidInput, check_nbytes

OBJECT_NBYTES = 64 << 20
"""Largest size of an object between homes, in addition to what `allow` permits."""
_model_nbytes, _backend = 0, ""
ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
"""The module of ZeroRedundancyOptimizer, which sends its state as pickles in tensors."""
_UNUSABLE, _GONE = -1, -2
"""Sizes that are sent if the object cannot be sent, and if the rank that should send it is gone."""


def allow(nbytes: int) -> None:
    """Permits objects that contain the state of a model with this size. Call it when the script has made its optimizer."""
    global _model_nbytes
    _model_nbytes = max(_model_nbytes, nbytes)
    zero: Any = sys.modules.get(ZERO)  # not imported for this, since that takes a second
    if _backend and zero is not None and not hasattr(zero._broadcast_object, "commlayer"):
        zero._broadcast_object = _replace(zero._broadcast_object, _zero_state, _backend)


def install(backend: str) -> None:
    """Replaces torch's object collectives for groups of this backend. Idempotent."""
    global _backend
    if _backend:
        return
    _backend = backend
    for name, replacement in (("all_gather_object", _all_gather), ("gather_object", _gather), ("scatter_object_list", _scatter),
                              ("broadcast_object_list", _broadcast), ("send_object_list", _refuse),
                              ("recv_object_list", _refuse), ("_object_to_tensor", _refuse), ("_tensor_to_object", _refuse)):
        wrapper = _replace(getattr(distributed_c10d, name), replacement, backend)
        for module in (dist, distributed_c10d):
            if hasattr(module, name):
                setattr(module, name, wrapper)


def _replace(original: Callable[..., Any], replacement: Callable[..., Any], backend: str) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **more: Any) -> Any:
        bound = signature.bind(*args, **more)
        group = bound.arguments.get("group") or dist.group.WORLD
        if group in (None, dist.GroupMember.NON_GROUP_MEMBER) or dist.get_backend(group) != backend:
            return original(*args, **more)
        bound.apply_defaults()
        return replacement(group, bound.arguments)

    call.commlayer = True  # type: ignore[attr-defined]
    return call


def _all_gather(group: Any, arguments: dict[str, Any]) -> None:
    arguments["object_list"][:] = _exchange_objects(group, arguments["obj"])


def _gather(group: Any, arguments: dict[str, Any]) -> None:
    objects = _exchange_objects(group, arguments["obj"])
    if group.rank() == _root(group, arguments, "dst"):
        arguments["object_gather_list"][:] = objects


def _broadcast(group: Any, arguments: dict[str, Any]) -> None:
    objects = arguments["object_list"]
    objects[:] = _share_objects(group, _root(group, arguments, "src"), list(objects), len(objects))


def _scatter(group: Any, arguments: dict[str, Any]) -> None:
    objects = _share_objects(group, _root(group, arguments, "src"), arguments["scatter_object_input_list"], group.size())
    arguments["scatter_object_output_list"][0] = objects[group.rank()]


def _zero_state(group: Any, arguments: dict[str, Any]) -> Any:
    """Sends the state of a shard."""
    (state,) = _share_objects(group, dist.get_group_rank(group, arguments["src_rank"]), [arguments["obj"]], 1)
    return state


def _refuse(group: Any, arguments: dict[str, Any]) -> None:
    raise InvalidInput("E-OBJECT", "this call would send pickled objects between homes, allowed: all_gather_object, "
                                   "gather_object, broadcast_object_list and scatter_object_list")


def _exchange_objects(group: Any, value: Any) -> list[Any]:
    """Returns the objects of all members, in member order."""
    data = _encode(value, lambda size: _all_gather_rows(group, torch.tensor([size]), wait=False))
    named = _all_gather_rows(group, torch.tensor([len(data)]))
    sizes = [_check_size(group, member, int(row)) for member, row in enumerate(named)]
    rows = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    group.allgather_unequal(rows, torch.frombuffer(data, dtype=torch.uint8)).wait()
    return [_decode(group, member, row) for member, row in enumerate(rows)]


def _share_objects(group: Any, root: int, objects: list[Any] | None, count: int) -> list[Any]:
    """Returns the list of `count` objects that the member `root` sends."""
    at_root = group.rank() == root
    data = bytearray()
    if at_root:
        data = _encode(objects, lambda size: _broadcast_from(group, root, torch.tensor([size]), wait=False))
    size = _check_size(group, root, int(_broadcast_from(group, root, torch.tensor([len(data) if at_root else _GONE]))))
    body = torch.frombuffer(data, dtype=torch.uint8) if at_root else torch.zeros(size, dtype=torch.uint8)
    sent = _decode(group, root, _broadcast_from(group, root, body))
    if not isinstance(sent, list) or len(sent) != count:
        raise CommError(f"sends an object that is not a list of {count} objects", peer=_name(group, root), code="E-OBJECT")
    return objects if at_root and objects is not None else sent


def _all_gather_rows(group: Any, x: torch.Tensor, *, wait: bool = True) -> list[torch.Tensor]:
    rows = [torch.empty_like(x) for _ in range(group.size())]
    work = group.allgather([rows], [x])
    if wait:
        work.wait()
    return rows


def _broadcast_from(group: Any, root: int, x: torch.Tensor, *, wait: bool = True) -> torch.Tensor:
    options = dist.BroadcastOptions()
    options.rootRank = root
    work = group.broadcast([x], options)
    if wait:
        work.wait()
    return x


def _encode(value: Any, send_size: Callable[[int], object]) -> bytearray:
    """Encodes an object. If the value cannot be sent, sends the other members a size that marks the failure, and raises an
    error."""
    try:
        data = object_codec.encode(value)
    except ValueError as error:
        send_size(_UNUSABLE)
        raise InvalidInput("E-OBJECT", f"an object cannot be sent between homes: {error}") from None
    if len(data) > _most_nbytes():
        send_size(len(data))
        raise InvalidInput("E-OBJECT", f"an object cannot be sent between homes: it has {len(data)} bytes, allowed "
                                       f"{_most_nbytes()}: send its tensors with a collective for tensors")
    return data


def _check_size(group: Any, member: int, size: int) -> int:
    """Returns the size that a member named. Raises CommError if there is no object of this size."""
    if size in (_UNUSABLE, _GONE):
        why = "cannot send its object: see the error on that rank" if size == _UNUSABLE else "left before it sent its object"
        raise CommError(why, peer=_name(group, member), code="E-OBJECT")
    return check_nbytes(size, _most_nbytes(), "an object", _name(group, member))


def _decode(group: Any, member: int, row: torch.Tensor) -> Any:
    try:
        return object_codec.decode(row.numpy())
    except ValueError as error:
        raise CommError(f"sends an object that this rank cannot read: {error}", peer=_name(group, member),
                        code="E-OBJECT") from None


def _most_nbytes() -> int:
    return OBJECT_NBYTES + _model_nbytes


def _name(group: Any, member: int) -> str:
    return f"rank {dist.get_global_rank(group, member)}"


def _root(group: Any, arguments: dict[str, Any], name: str) -> int:
    """Returns the member of the group that a call names as `src` or `dst`."""
    if (member := arguments.get(f"group_{name}")) is not None:
        return int(member)
    return int(dist.get_group_rank(group, arguments.get(name) or 0))
