"""What the process has imported that all those of the tests are forked from: seconds less for each of them."""

import atexit
import gc

import accelerate  # noqa: F401
import datasets  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import peft  # noqa: F401
import torch._dynamo  # noqa: F401 - by the first optimiser
import torch.distributed.fsdp  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
import transformers.models.auto.modeling_auto  # noqa: F401
import transformers.trainer  # noqa: F401

import txl_hf.trainer  # noqa: F401
import txl_hf.training.loop  # noqa: F401

# Half a million objects that stay: each search for garbage among them takes a third of a second.
gc.freeze()
# At the end, triton counts what is left.
atexit.register(gc.unfreeze)
