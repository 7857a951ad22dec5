"""Replaces CUDA graphs on a CPU: as with these, a recorded step returns the same tensors every time."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class Recorder:
    """Counts what it has recorded and how often that ran."""

    def __init__(self, fails: bool = False):
        self.fails, self.recorded, self.runs = fails, 0, 0
        self.shared, self.last = [], None

    def __call__(self, step, device, draws=False):
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.recorded += 1
        with_gradients, result = torch.is_grad_enabled(), []
        if draws:
            self.shared.append(result)

        def run():
            self.runs += 1
            # Steps share their memory; of another one than the last nothing may be expected.
            for other in self.shared:
                if draws and other is not result and other is not self.last:
                    for place in tree_leaves(other):
                        if place is not None:
                            place.copy_(torch.full_like(place, 7))
            self.last = result
            # What is replayed does what was done when it was recorded.
            with torch.set_grad_enabled(with_gradients):
                found = step()
            if not result:
                result.append(tree_map(copied, found))
            for place, tensor in zip(tree_leaves(result[0]), tree_leaves(found), strict=True):
                if place is not None:
                    place.copy_(tensor)
            return result[0]

        return run


def copied(tensor):
    return None if tensor is None else tensor.detach().clone()


def let_the_host_wait(monkeypatch, model) -> list[float]:
    """Have each forward pass read a number, which it may not while it is captured; what was read."""
    forward, found = type(model.transformer).forward, []

    def forward_that_waits(self, *args, **kwargs):
        outputs = forward(self, *args, **kwargs)
        found.append(outputs.last_hidden_state.sum().item())
        return outputs

    monkeypatch.setattr(type(model.transformer), "forward", forward_that_waits)
    return found


class Tape:
    """Plays the operators that it has recorded on the tensors that it has recorded, as a CUDA graph does: no line of
    Python runs again, nothing is computed while it records, and no number of a tensor may be read meanwhile."""

    def __init__(self):
        self.recorded, self.runs, self.operators = 0, 0, 0

    def __call__(self, step, device):
        self.recorded += 1
        tape = _Taping()
        try:
            with tape:
                found = step()
        finally:
            tape.undo()
        self.operators = len(tape.calls)

        def run():
            self.runs += 1
            for function, args, kwargs, result in tape.calls:
                if function is torch.ops.aten.copy_.default and _share_storage(*args[:2]):
                    # In the other order than a CPU, because a GPU copies in any.
                    for place, tensor in reversed(list(zip(args[0].unbind(-2), args[1].unbind(-2), strict=True))):
                        place.copy_(tensor)
                    continue
                for place, tensor in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs)), strict=True):
                    if isinstance(place, torch.Tensor) and place.data_ptr() != tensor.data_ptr():
                        place.copy_(tensor)
            return found

        return run


def _share_storage(*tensors):
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


class _Taping(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self._before = [], {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        for schema, value in (*zip(function._schema.arguments, args, strict=False), *self._named(function, kwargs)):
            if schema.alias_info is not None and schema.alias_info.is_write:
                for tensor in tree_leaves(value):
                    storage = tensor.untyped_storage()
                    self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, result))
        return result

    @staticmethod
    def _named(function, kwargs):
        return [(schema, kwargs[schema.name]) for schema in function._schema.arguments if schema.name in kwargs]

    def undo(self):
        """Restore the tensors that were written to."""
        for storage, before in self._before.values():
            storage.copy_(before)
