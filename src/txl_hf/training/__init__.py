"""Training with memory: `TransfoXLTrainer`, and `txl-train`, which reads a recipe into it.

Imports `transfo_xl`, `kernels`, `data` and `evaluation`. `trainer` is the loop, with `arguments`, `optimizers`,
`memory`, `regularization`, `checkpoints`, `cards` and `steps` (whether layers are compiled and steps captured).
`recipe` reads a recipe and the command line, `command` runs a training, `report` writes its output.
"""
