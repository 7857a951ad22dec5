"""The likelihood of a text, read in segments with memory.

Imports `transfo_xl`, `kernels`, `legacy` and `data`.
"""
