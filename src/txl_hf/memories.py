"""A memory on its way from one call to the next: taken from the outputs, cut, copied, masked.

It is a dict of arguments of the next call, `mems` and `mems_mask` as `TransfoXLModel` returns them; {}: none.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .transfo_xl.masks_transfo_xl import can_look


def memory_of(outputs: Mapping[str, Any], compiled: bool = False) -> dict[str, Any]:
    """The memory that a call has returned; {} where there is none.

    Where NaN without a mask is an error, a mask of True replaces None, because NaN from a diverging training must not
    be reported as padding whose mask was lost; not if the next call is `compiled`, which would compute with that mask.
    """
    mems, mems_mask = outputs.get("mems"), outputs.get("mems_mask")
    if mems is None:
        return {}
    is_asked = not compiled and can_look(mems[0])
    return {"mems": mems, "mems_mask": real_states(mems, mems_mask) if is_asked else mems_mask}


def latest_states(memory: dict[str, Any], mem_len: int) -> dict[str, Any]:
    """The last `mem_len` states, which is all that a shorter memory holds."""
    if memory.get("mems") is None or memory["mems"][0].shape[1] <= mem_len:
        return memory
    return _changed(memory, lambda tensor: tensor[:, -mem_len:]) if mem_len > 0 else {}


def cloned_states(memory: dict[str, Any]) -> dict[str, Any]:
    """The memory in tensors of its own, because a captured graph writes its outputs to the same place at every
    step."""
    return _changed(memory, torch.clone) if memory else memory


def _changed(memory: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    mask = memory.get("mems_mask")
    return {"mems": tuple(map(change, memory["mems"])), "mems_mask": None if mask is None else change(mask)}


def real_states(mems: tuple[Tensor, ...], mems_mask: Tensor | None = None) -> Tensor:
    """`mems_mask`, or True for all states in place of None: (B, m) bool."""
    if mems_mask is not None:
        return mems_mask
    return torch.ones(mems[0].shape[:2], dtype=torch.bool, device=mems[0].device)


def mask_overflow(mems: tuple[Tensor, ...], mems_mask: Tensor | None = None) -> Tensor | None:
    """`mems_mask` that also hides states which are not finite in some layer, as an overflow in fp16 leaves them: a
    stream that continues from them would stay non-finite. The host waits for the device.

    Args:
        mems: n_layer tensors (B, m, D). mems_mask: (B, m) bool or None.

    Returns:
        (B, m) bool, or None: all are real.
    """
    device = mems[0].device if mems_mask is None else mems_mask.device
    finite = torch.stack([states.isfinite().all(dim=-1).to(device) for states in mems]).all(dim=0)
    if mems_mask is None:
        return None if finite.all() else finite
    return mems_mask & finite
