"""A memory between two calls: taken from the outputs, changed, as named tensors.

It is a dict of arguments of the next call, `mems` and `mems_mask` as `TransfoXLModel` returns them; {}: none. Loops
that train or evaluate pass it on; this module cuts, casts, copies, masks and names its tensors.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .transfo_xl.masks_transfo_xl import can_look

# Name of the mask in a file.
MASK = "mask"


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


def map_memory(memory: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The memory with each tensor changed: the states of a layer, (B, m, D), and their mask, (B, m) bool."""
    if not memory:
        return {}
    mask = memory.get("mems_mask")
    return {"mems": tuple(map(change, memory["mems"])), "mems_mask": None if mask is None else change(mask)}


def latest_states(memory: dict[str, Any], mem_len: int) -> dict[str, Any]:
    """The last `mem_len` states, which is all that a shorter memory holds."""
    if memory.get("mems") is None or memory["mems"][0].shape[1] <= mem_len:
        return memory
    return map_memory(memory, lambda tensor: tensor[:, -mem_len:]) if mem_len > 0 else {}


def repeat_rows(memory: dict[str, Any], rows: int) -> dict[str, Any]:
    """The memory of one text, (1, m, D), for `rows` texts that continue it."""
    return map_memory(memory, lambda tensor: tensor.expand(rows, *tensor.shape[1:]))


def dtype_between_calls(model: Any, mixed_precision: str) -> torch.dtype:
    """The type of a training's states between two calls: autocast's without `pre_lnorm`, because the model rounded
    them to it before accelerate cast them to fp32; else the model's.

    Args:
        model: a Transformer-XL with any head. mixed_precision: that of accelerate, "no", "bf16", "fp16" or another.
    """
    dtype = model.first_parameter.dtype
    if model.config.pre_lnorm:
        return dtype
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision, dtype)


def cast_states(memory: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The memory, which is not {}, with states of another floating-point type."""
    return memory | {"mems": tuple(states.to(dtype) for states in memory["mems"])}


def cloned_states(memory: dict[str, Any]) -> dict[str, Any]:
    """The memory in new tensors, because a captured graph writes its outputs to the same place at every step. On one
    device the states of all layers, of one type, share storage."""
    if len({states.device for states in memory.get("mems", ())}) != 1:
        return map_memory(memory, torch.clone)
    # The states of all layers by one launch.
    mask = memory.get("mems_mask")
    return {"mems": torch.stack(memory["mems"]).unbind(), "mems_mask": None if mask is None else mask.clone()}


def named_tensors(memory: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    """The tensors of a memory as a file holds them: the states by prefix and number of the layer, and `mask`, if there
    is one; {} without a memory."""
    mems, mask = memory.get("mems"), memory.get("mems_mask")
    if mems is None:
        return {}
    tensors = {f"{prefix}{layer}": states for layer, states in enumerate(mems)}
    return tensors if mask is None else tensors | {MASK: mask}


def memory_of_tensors(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    """The memory of `named_tensors`; {} where there are none."""
    mems = tuple(tensors[f"{prefix}{layer}"] for layer in range(len(tensors.keys() - {MASK})))
    return {"mems": mems, "mems_mask": tensors.get(MASK)} if mems else {}


def with_mask(memory: dict[str, Any]) -> dict[str, Any]:
    """The memory, which is not {}, with a mask, of True where it had none."""
    return memory | {"mems_mask": real_states(**memory)}


def hide_overflow(memory: dict[str, Any]) -> dict[str, Any]:
    """The memory, which is not {}, with the mask of `mask_overflow`."""
    return memory | {"mems_mask": mask_overflow(**memory)}


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
