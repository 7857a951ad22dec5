"""The converters of original checkpoints, installed as `txl_hf.conversion`, with the command `txl-convert`."""
