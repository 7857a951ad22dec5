"""The weights that the products of a captured step read, cast and padded together.

Under autocast each product casts its weight, and the gradient is cast back: 18 kernels a layer. Where the width of
heads is no multiple of 16, attention pads its inputs: 12 kernels more. Here one call casts the weights without
padding, and two kernels cast and pad the others of a kind, stacked over all layers; gradients are stacked too.

Letters: n weights of a kind, D = `d_model`, H heads, Dh head width, W = Dh rounded up to a multiple of 16.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# The axis of a weight that is divided into heads: rows, columns, or none.
_ROWS, _COLUMNS, _NOWHERE = "rows", "columns", "nowhere"
KINDS = {
    **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight", "r_proj.weight"), _ROWS),
    **dict.fromkeys(("o_proj.weight", "content_bias", "position_bias"), _COLUMNS),
    **{f"{name}_proj.{part}": _NOWHERE for name in ("up", "down") for part in ("weight", "bias")},
}
MULTIPLE = 16


class _Kind(NamedTuple):
    """The weights of a kind: their names, the shape of one with an axis of heads and as a product reads it, and (n, …)
    copies of all; `inside` is a view of the copies without padding."""

    names: list[str]
    apart: tuple[int, ...]
    read: tuple[int, ...]
    copies: Tensor
    inside: Tensor


class ProductWeights:
    """Copies of the weights of a Transformer-XL's layers in the dtype of products, biases u and v in their own dtype.

    Args:
        weights: a model's parameters, by name. config: the model's. dtype: that of products.
    """

    def __init__(self, weights: Mapping[str, Tensor], config: Any, dtype: torch.dtype):
        self._weights, self._kinds = weights, list[_Kind]()
        heads, width = config.n_head, config.d_head
        # Learned keys of distances have the width of heads and are no weight of a product: no padding.
        wide = width + (-width % MULTIPLE if config.attn_type == 0 else 0)
        found: dict[str, list[str]] = {}
        for name in weights:
            kind = ".".join(name.split(".")[-2:])
            # Biases u and v are copied only where they are padded.
            kind = kind if kind in KINDS or wide == width else name.split(".")[-1]
            if kind in KINDS:
                found.setdefault(kind, []).append(name)
        for kind, names in found.items():
            first = weights[names[0]]
            apart = read = tuple(first.shape)
            axis = 0
            if KINDS[kind] == _ROWS:
                apart, read, axis = (heads, width, first.shape[1]), (-1, first.shape[1]), 1
            elif KINDS[kind] == _COLUMNS:
                apart, read, axis = (first.shape[0], first.shape[1] // width, width), (first.shape[0], -1), 2
            padded = [wide if axis and place == axis else size for place, size in enumerate(apart)]
            kept = first.dtype if kind.endswith("_bias") else dtype
            copies = torch.zeros(len(names), *padded, dtype=kept, device=first.device)
            is_padded = copies.shape[1:] != apart
            inside = copies.narrow(axis + 1, 0, apart[axis]) if is_padded else copies
            self._kinds.append(_Kind(names, apart, read, copies, inside))

    def leaves(self) -> dict[str, nn.Parameter]:
        """The copies by name, as leaves without a gradient; `renew` sets their values."""
        found: dict[str, nn.Parameter] = {}
        for kind in self._kinds:
            found |= {
                name: nn.Parameter(copy.view(kind.read)) for name, copy in zip(kind.names, kind.copies, strict=True)
            }
        return found

    @torch.no_grad()
    def renew(self) -> None:
        """Copy the current values of the weights."""
        places: list[Tensor] = []
        taken: list[Tensor] = []
        for kind in self._kinds:
            weights = [self._weights[name] for name in kind.names]
            if kind.inside is kind.copies:
                places += kind.copies.view(len(weights), *weights[0].shape).unbind()
                taken += weights
            else:
                kind.inside.copy_(torch.stack(weights).view(len(weights), *kind.apart))
        torch._foreach_copy_(places, taken)

    def of_weights(self, gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The gradients of leaves, by name, in the shapes and dtypes of the weights; other gradients unchanged."""
        found = dict(gradients)
        for kind in self._kinds:
            given = [gradient for name in kind.names if (gradient := gradients[name]) is not None]
            if len(given) == len(kind.names):
                first = self._weights[kind.names[0]]
                stacked = torch.stack(given).view(kind.copies.shape)
                inside = stacked.as_strided(kind.inside.shape, kind.inside.stride())
                inside = inside.to(first.dtype, memory_format=torch.contiguous_format)
                found |= zip(kind.names, inside.view(len(given), *first.shape), strict=True)
        return found
