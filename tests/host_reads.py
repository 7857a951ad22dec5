"""How often the host reads a number of a tensor, and would wait for a GPU."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from txl_hf import memories
from txl_hf.transfo_xl import adaptive_transfo_xl, masks_transfo_xl, memory_transfo_xl


class HostReads(TorchDispatchMode):
    """Within it the numbers that `item`, `int` or `bool` read are counted, in `count`; with `everything` also each
    `tolist`, and each `nonzero`, for whose shape the host waits. In custom operators `tolist` alone is counted,
    because dispatch modes are off there."""

    def __init__(self, everything: bool = False):
        super().__init__()
        self.count, self.everything, self._tolist = 0, everything, torch.Tensor.tolist

    def __enter__(self):
        if self.everything:

            def tolist(tensor):
                self.count += 1
                return self._tolist(tensor)

            torch.Tensor.tolist = tolist
        return super().__enter__()

    def __exit__(self, *error):
        torch.Tensor.tolist = self._tolist
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        self.count += self.everything and func is torch.ops.aten.nonzero.default
        return func(*args, **(kwargs or {}))


def count_host_reads(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, everything: bool = False) -> list[int]:
    """A list to which every call of `owner.name` appends how many numbers it has read, as `HostReads` counts.

    The model looks at ids and masks on a CPU alone; here it does not.
    """
    monkeypatch.setattr(adaptive_transfo_xl, "_check_range", lambda *args: None)
    for module in (masks_transfo_xl, memory_transfo_xl, memories):
        monkeypatch.setattr(module, "can_look", lambda tensor, gpu=False: False)
    function, counts = getattr(owner, name), []

    def counted(*args, **kwargs):
        with HostReads(everything) as reads:
            result = function(*args, **kwargs)
        counts.append(reads.count)
        return result

    monkeypatch.setattr(owner, name, counted)
    return counts
