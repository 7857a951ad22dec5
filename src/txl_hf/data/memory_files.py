"""Memories as files: a text is read once, and any later process continues from its memory.

A file is safetensors: the tensors of `mems`, or those of a `MemoryCache` or `StaticMemoryCache`. Its metadata hold the
format's version, the model's name and fingerprint, the counts of a cache, and the SHA-256 of all contents.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from ..files import disk_errors, is_repo_id, name_of, whole_file
from ..memories import memory_of_tensors, named_tensors
from ..transfo_xl.attention_transfo_xl import OPERATORS
from ..transfo_xl.cache_transfo_xl import (
    CACHE_NAME,
    DecodingState,
    MemoryCache,
    chosen_cache,
    decoding_state_of,
    remembered_mask,
    static_address,
    text_length,
)
from ..transfo_xl.configuration_transfo_xl import TransfoXLConfig

FORMAT, PREFIX = "1", "mems."
CACHES = ("MemoryCache", "StaticMemoryCache")
# Configuration fields that the states of a text depend on. Sizes are left out, because the weights' shapes show them,
# and the lengths that each call may choose.
FIELDS = (
    *("attn_type", "n_head", "d_head", "pre_lnorm", "layer_norm_epsilon"),
    *("same_length_counts_self", "mlp_output_relu", "initial_memory", "decay_len"),
)


class HeldCache(NamedTuple):
    """A copy of a cache's keys and values, without unused columns, from which `restore` makes any number of caches.

    Attributes:
        kind: the name of its class.
        counts: `mem_len`; `length`, the number of keys that it has read; `initial_length`, those of a memory before
            the text among them; `projected`, as in `DecodingState`.
        tensors: `keys.i` and `values.i` of each layer, (B, H, n, Dh) with n ≤ M, in order of time; `mask`, (B, n)
            bool, if some are not real; `padding` as in `DecodingState`, if there is any.
    """

    kind: str
    counts: dict[str, int]
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @classmethod
    def of(cls, cache: Any) -> "HeldCache":
        """Copy a cache. Raises a ValueError if it is empty or of a class outside `CACHES`."""
        kind = type(cache).__name__
        if kind not in CACHES or not cache.layers[0].is_initialized:
            raise ValueError(
                f"past_key_values, a {kind}, are no filled {' or '.join(CACHES)}: give what a call with "
                "use_cache=True returned"
            )
        cache.sort_keys()
        mem_len, state = cache.layers[0].get_max_length() - 1, decoding_state_of(cache)
        tensors = {}
        for i, layer in enumerate(cache.layers):
            for name in ("keys", "values"):
                tensors[f"{name}.{i}"] = getattr(layer, name)[:, :, -mem_len:].detach().clone()
        held = {"mask": remembered_mask(cache, tensors["keys.0"].shape[2]), "padding": state.padding}
        tensors |= {name: tensor.clone() for name, tensor in held.items() if tensor is not None}
        counts = {"mem_len": mem_len, "length": state.initial_length + text_length(cache)}
        counts |= {"initial_length": state.initial_length, "projected": state.projected}
        return cls(kind, counts, tensors)

    @torch.no_grad()
    def restore(self, config: TransfoXLConfig) -> Any:
        """A new cache with these contents, on the device of the tensors."""
        counts, tensors = self.counts, self.tensors
        # The kernels, which this wing does not import, register the class of the static cache.
        make_cache: Any = MemoryCache if self.kind == "MemoryCache" else OPERATORS.static_cache
        cache = make_cache(config, counts["mem_len"])
        for i, layer in enumerate(cache.layers):
            layer.update(tensors[f"keys.{i}"], tensors[f"values.{i}"])
            setattr(layer, "written_together" if cache.is_compileable else "cumulative_length", counts["length"])
        mask = tensors.get("mask")
        if mask is not None and cache.is_compileable:
            # CUDA graphs write into the mask, so it is a copy at a fixed address.
            mask = static_address(mask.clone())
        end, padding = counts["length"] - counts["initial_length"], tensors.get("padding")
        state = DecodingState(counts["initial_length"], mask, end, padding, projected=counts["projected"])
        cache.decoding_state = state
        return cache


def save_memory(path: str | os.PathLike, model: PreTrainedModel, outputs: Mapping[str, Any]) -> None:
    """Write the memory that a call has returned to a file of safetensors, complete or not at all.

    Args:
        path: of the file; an existing file is replaced.
        model: the model that was called. All of its weights are read, for its fingerprint.
        outputs: of the model, of `generate(…, return_dict_in_generate=True)` or of `load_memory`: with `mems` and
            `mems_mask`, or a `MemoryCache` or `StaticMemoryCache` as `past_key_values`.

    Raises:
        ValueError: the outputs have no memory, or a cache of another class.
        OSError: the file cannot be written.
    """
    given = outputs if isinstance(outputs, Mapping) else {}
    cache = chosen_cache(given.get("past_key_values"), given.get("cache"))
    if cache is not None:
        held = HeldCache.of(cache)
    elif tensors := named_tensors(given, PREFIX):
        held = HeldCache("mems", {}, tensors)
    else:
        raise ValueError(
            f"outputs, a {type(outputs).__name__}, hold neither mems nor past_key_values: give what the model "
            "returned, or generate with return_dict_in_generate=True; a model with mem_len=0 remembers nothing"
        )
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in held.tensors.items()}
    record = {"model": _describe(model), "fingerprint": _fingerprint(model), "kind": held.kind, "counts": held.counts}
    text = json.dumps(record)
    metadata = {"memory_format": FORMAT, "memory": text, "sha256": _hash(text, sorted(tensors.items()))}
    with whole_file(path) as aside, disk_errors(path):
        save_file(tensors, aside, metadata=metadata)


def load_memory(path: str | os.PathLike, model: PreTrainedModel) -> dict[str, Any]:
    """The memory of a file of `save_memory` as keyword arguments of a call, `model(ids, **load_memory(path, model))`:
    `mems` and `mems_mask`, or `past_key_values`, on the device of the model, of the type that they were saved in.

    Args:
        model: with the configuration and weights of the one that was called; lengths and head may differ. Weights are
            compared in bfloat16, so float32 weights may have been rounded to bfloat16 in between.

    Raises:
        ValueError: the file is damaged or of another kind, or holds the memory of another model, which is named.
        OSError: there is no such file, or it cannot be read.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if (version := metadata.get("memory_format")) != FORMAT:
                raise ValueError(
                    f"{path} holds no memory that this version of txl_hf reads: its memory_format is {version}, and "
                    f"txl_hf.save_memory writes {FORMAT}"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged, truncated or no file of safetensors: {error}") from error
    text = metadata.get("memory", "")
    if metadata.get("sha256") != _hash(text, sorted(tensors.items())):
        raise ValueError(f"{path} is damaged: its contents are not what was written")
    record = json.loads(text)
    if record["fingerprint"] != (fingerprint := _fingerprint(model)):
        raise ValueError(
            f"{path} is the memory of {record['model']}, with the fingerprint {record['fingerprint']}, but this model "
            f"is {_describe(model)}, with {fingerprint}: load the model that read the text, or read it again with "
            "this one"
        )
    tensors = {name: tensor.to(model.device, copy=True) for name, tensor in tensors.items()}
    if record["kind"] == "mems":
        return memory_of_tensors(tensors, PREFIX)
    return {CACHE_NAME: HeldCache(record["kind"], record["counts"], tensors).restore(model.config)}


def _describe(model: PreTrainedModel) -> str:
    """The name of a model, without the folder that it was loaded from, and its size."""
    name, config = model.name_or_path, model.config
    name = type(model).__name__ if not name else name if is_repo_id(name) else name_of(name)
    return f"{name} ({config.n_layer} layers of {config.d_model})"


def _fingerprint(model: PreTrainedModel) -> str:
    """A hash of `FIELDS` and of the body's weights, which the states of a text depend on; the same for any head."""
    fields = json.dumps([getattr(model.config, name) for name in FIELDS])
    named = model.base_model.named_parameters()
    return _hash(fields, ((name, weight.detach().to(torch.bfloat16)) for name, weight in named))[:16]


def _hash(text: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of a text, and of the names, types, shapes and numbers of tensors."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
