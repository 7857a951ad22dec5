"""Imports of the process from which those are forked whose other libraries read an environment of their own."""

import atexit
import gc

import torch._dynamo  # noqa: F401 -- the first optimiser does so.

gc.freeze()
# At the end, triton counts what is left.
atexit.register(gc.unfreeze)
