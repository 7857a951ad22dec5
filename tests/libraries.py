"""Imports of the process from which the tests' processes are forked, which saves seconds for each."""

# ruff: noqa: F401 -- what is imported is there to be forked, and used by others.

import gc

import accelerate
import datasets
import matplotlib.pyplot
import peft
import torch.distributed.fsdp
import transformers.models.auto.modeling_auto
import transformers.trainer

import libraries_torch
import txl_hf.commands.train_lm
import txl_hf.training.trainer

# Half a million objects that stay: each search for garbage among them takes a third of a second.
gc.freeze()
