"""Training with memory: `TransfoXLTrainer`.

`trainer` is the loop, with `arguments`, `memory`, `optimizers`, `regularization`, `checkpoints`, `cards` and `steps`
(compiled layers, captured steps). Imports all that `evaluation` does, and `evaluation`.
"""
