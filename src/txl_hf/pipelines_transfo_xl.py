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
    theirs = module.PipelineIterator.loader_batch_item
    if getattr(theirs, "leaves_out_mems", False):
        return

    @wraps(theirs)
    def loader_batch_item(self):
        data = self._loader_batch_data
        if isinstance(data, dict) and isinstance(data.get("mems"), tuple):
            kept = {name: value for name, value in data.items() if name not in ("mems", "mems_mask")}
            self._loader_batch_data = type(data)(kept)
        return theirs(self)

    loader_batch_item.leaves_out_mems = True  # type: ignore[attr-defined]
    module.PipelineIterator.loader_batch_item = loader_batch_item
