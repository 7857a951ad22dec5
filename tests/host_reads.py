"""How often the host reads a number of a tensor, and would wait for a GPU."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from txl_hf import memories
from txl_hf.transfo_xl import adaptive_transfo_xl, masks_transfo_xl, memory_transfo_xl


class HostReads(TorchDispatchMode):
    """Within it the numbers that `item`, `int` or `bool` read are counted, in `count`."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def count_host_reads(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """A list to which every call of `owner.name` appends how many numbers it has read.

    The model looks at ids and masks on a CPU alone; here it does not.
    """
    monkeypatch.setattr(adaptive_transfo_xl, "_check_range", lambda *args: None)
    for module in (masks_transfo_xl, memory_transfo_xl, memories):
        monkeypatch.setattr(module, "can_look", lambda tensor, gpu=False: False)
    function, counts = getattr(owner, name), []

    def counted(*args, **kwargs):
        with HostReads() as reads:
            result = function(*args, **kwargs)
        counts.append(reads.count)
        return result

    monkeypatch.setattr(owner, name, counted)
    return counts
