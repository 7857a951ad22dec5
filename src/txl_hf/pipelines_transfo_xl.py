"""What pipelines of transformers are told of outputs with a memory; it goes with the weights, as the model does."""

from functools import wraps
from types import ModuleType

__all__ = ["leave_out_mems"]


def leave_out_mems(module: ModuleType) -> None:
    """Let pipelines deal out a batch of any size row by row: they know of no `mems`, a tensor for each layer.

    Nothing goes on from those of a pipeline, so that they are left out. This is done once, though both this package
    and code that came with weights may ask for it.

    Args:
        module: `transformers.pipelines.pt_utils`.
    """
    iterator = module.PipelineIterator
    if getattr(iterator, "leaves_out_mems", False):
        return
    theirs = iterator.loader_batch_item

    @wraps(theirs)
    def loader_batch_item(self):
        data = self._loader_batch_data
        if isinstance(data, dict) and isinstance(data.get("mems"), tuple):
            kept = {name: value for name, value in data.items() if name not in ("mems", "mems_mask")}
            self._loader_batch_data = type(data)(kept)
        return theirs(self)

    iterator.loader_batch_item, iterator.leaves_out_mems = loader_batch_item, True
