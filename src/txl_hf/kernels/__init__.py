"""Faster implementations of what `transfo_xl` computes, with the same results. Imports `transfo_xl` alone.

Importing this package registers them: attention backends by `attention_transfo_xl.register`, everything else by
setting the fields of `attention_transfo_xl.OPERATORS`.
"""

from . import (  # noqa: F401 -- they register themselves with the model
    attention_blocks,
    attention_cpu,
    attention_gpu,
    attention_triton,
    best_tokens,
    cache_layers,
    decoding,
    operators,
    softmax,
    static_cache,
)
