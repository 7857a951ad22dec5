"""Training with memory: `TransfoXLTrainer`, and `txl-train`, which reads a recipe into it.

`trainer` is the loop, with `arguments`, `memory`, `optimizers`, `regularization`, `checkpoints`, `cards` and `steps`
(compiled layers, captured steps). `recipe` reads a recipe and the command line, `command` runs a training, `report`
writes its output.
"""
