"""Texts: corpora and their tokens on the disk, and the streams of segments that are read from them.

Imports `transfo_xl`, `legacy` and `files`.
"""
