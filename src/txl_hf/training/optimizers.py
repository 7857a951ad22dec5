"""The optimizers that a training names, and an average of the weights that they leave."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from .arguments import TransfoXLTrainingArguments

# File of the average in a checkpoint.
AVERAGE_NAME = "average.pt"


def make_optimizer(
    model: nn.Module, arguments: TransfoXLTrainingArguments, compiled: bool = False
) -> torch.optim.Optimizer:
    """The optimizer that `arguments.optimizer` names, with a separate group for the tables of embeddings.

    Args:
        model: Transformer-XL with any head; parameters without `requires_grad` are left out.
        compiled: whether LAMB's update is compiled; PyTorch's optimizers are fused in any case.
    """
    # A model that reads vectors has no tables. For mypy every attribute of an `nn.Module` is a tensor or a module.
    embedding = model.get_input_embeddings() if model.config.vocab_size else None  # type: ignore[operator,union-attr]
    tables = [] if embedding is None else [table for table in embedding.emb_layers.parameters() if table.requires_grad]
    of_tables = set(map(id, tables))
    others = [weight for weight in model.parameters() if weight.requires_grad and id(weight) not in of_tables]
    groups: list[dict[str, Any]] = [{"params": others}]
    if tables:
        groups.append({"params": tables, "lr": arguments.learning_rate * arguments.embedding_lr_factor})
    settings: dict[str, Any] = {
        "lr": arguments.learning_rate,
        "betas": (arguments.adam_beta1, arguments.adam_beta2),
        "weight_decay": arguments.weight_decay,
        "eps": arguments.adam_epsilon,
    }
    if arguments.optimizer == "muon":
        return make_muon(model, groups, arguments)
    if arguments.optimizer == "lamb":
        return make_lamb(groups, compiled, **settings)
    kinds: dict[str | None, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}  # with Adam's settings
    # `fused`: one pass over the weights in place of one for each operation.
    return kinds[arguments.optimizer](groups, fused=True, **settings)


def make_lamb(groups: list, compiled: bool = False, **settings) -> torch.optim.Optimizer:
    """LAMB (You et al., 2019, https://arxiv.org/abs/1904.00962) as NVIDIA trained: the moments are not corrected for
    their bias, the norm of the weights counts up to 10, and the trust ratio applies without weight decay too.

    Compiled, an update reads and writes 44 bytes for each weight, 48 with weight decay, in place of about 100.
    """
    from pytorch_optimizer import Lamb

    optimizer = Lamb(groups, adam_debias=True, weight_decouple=False, **settings)
    if compiled:
        # As `pytorch_optimizer.create_optimizer(compile=True)` does, which takes no groups.
        optimizer._compile_foreach({"dynamic": False})
    return optimizer


def make_muon(
    model: nn.Module, groups: list[dict[str, Any]], arguments: TransfoXLTrainingArguments
) -> torch.optim.Optimizer:
    """Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) for the matrices of the layers, whose
    momentum it makes orthogonal, and AdamW for the rest. A step of Muon is made as long as AdamW's are (Liu et al.,
    2025, https://arxiv.org/abs/2502.16982, Section 2.2), so that one learning rate does for both.
    """
    from pytorch_optimizer import Muon

    transformer: Any = getattr(model, "transformer", model)
    layers = {id(parameter) for parameter in transformer.layers.parameters() if parameter.dim() == 2}
    # The biases u and v are no matrices, though they have two dimensions.
    layers -= {id(parameter) for name, parameter in model.named_parameters() if name.endswith("_bias")}
    matrices = [parameter for group in groups for parameter in group["params"] if id(parameter) in layers]
    rest = [group | {"params": [p for p in group["params"] if id(p) not in layers]} for group in groups]
    rate, decay = arguments.learning_rate, arguments.weight_decay
    return Muon(
        [{"params": matrices, "use_muon": True}, *(group | {"use_muon": False} for group in rest)],
        lr=rate,
        weight_decay=decay,
        use_adjusted_lr=True,
        adamw_lr=rate,
        adamw_betas=(arguments.adam_beta1, arguments.adam_beta2),
        adamw_wd=decay,
        adamw_eps=arguments.adam_epsilon,
    )


class ScaledByLength(TrainerCallback):
    """The learning rate of each step times its segment's length over the stream's `segment_length`."""

    def __init__(self, stream: Any):
        self.stream = stream

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        # To count labels the host would wait for the device.
        begin, end = self.stream.segment(state.global_step % self.stream.steps)
        for group in optimizer.param_groups:
            # The schedule replaces it after the step.
            group["lr"] *= (end - begin) / self.stream.segment_length


class Averaging(TrainerCallback):
    """The mean of a model's weights after each step, or their exponential moving average.

    `torch.optim.swa_utils.AveragedModel` counts on the device, for which the host would wait at each step.

    Args:
        decay: factor of the older average at each step; None: all steps count alike.
        start: step after which the average begins.

    Attributes:
        weights: the average, in the order of the model's parameters; empty before `start`.
        steps: number of steps that have been averaged.
    """

    def __init__(self, decay: float | None = None, start: int = 0):
        self.decay, self.start, self.steps = decay, start, 0
        self.weights: list[Tensor] = []

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step <= self.start:
            return
        now = [weight.detach() for weight in model.parameters()]
        if not self.weights:
            self.weights = [weight.clone() for weight in now]
        share = 1 / (self.steps + 1) if self.decay is None or self.steps == 0 else 1 - self.decay
        torch._foreach_lerp_(self.weights, now, share)
        self.steps += 1

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """A context in which the model has the average as its weights, once the average has begun."""
        weights, before = [weight.data for weight in model.parameters()], []
        if self.weights:
            before = [weight.clone() for weight in weights]
            torch._foreach_copy_(weights, self.weights)
        try:
            yield
        finally:
            if before:
                torch._foreach_copy_(weights, before)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        # Now the model has the weights of that checkpoint.
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self.load(Path(state.best_model_checkpoint), model)

    def save(self, checkpoint: Path) -> None:
        torch.save({"steps": self.steps, "decay": self.decay, "weights": self.weights}, checkpoint / AVERAGE_NAME)

    def load(self, checkpoint: Path, model: nn.Module) -> None:
        """Load the average of a checkpoint, if it has one."""
        if (path := checkpoint / AVERAGE_NAME).is_file():
            state = torch.load(path, map_location="cpu", weights_only=True)
            pairs = zip(state["weights"], model.parameters(), strict=False)
            self.steps, self.weights = state["steps"], [saved.to(weight.device) for saved, weight in pairs]
