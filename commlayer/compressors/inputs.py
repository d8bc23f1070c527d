"""Checks that a caller's tensor fits the codec's state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commlayer.errors import InvalidInput

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch



def check(codec: str, what: str, tensor: torch.Tensor, numel: int, device: torch.device | None = None) -> None:
    """Raises unless the tensor is float32, contiguous, one-dimensional, of `numel` elements, and on `device` if given."""
    fits = tensor.dtype == torch.float32 and tensor.dim() == 1 and tensor.numel() == numel and tensor.is_contiguous()
    if fits and (device is None or tensor.device == device):
        return
    place = "" if device is None else f" on {device}"
    raise InvalidInput("E-CODEC-INPUT",
                       f"{codec}: {what} is {_told(tensor)}; its state was made for {numel} elements of float32, contiguous "
                       f"and one-dimensional{place}")


def _told(tensor: torch.Tensor) -> str:
    laid = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)} on {tensor.device}{laid}"
