"""Training of a language model from a recipe: `txl-train`, which examples/train_lm.py starts too.

`command` reads a recipe and the command line, whose options `arguments` declares; `setup` makes what a run needs,
`loop` is the training itself, `results` what a run leaves.
"""
