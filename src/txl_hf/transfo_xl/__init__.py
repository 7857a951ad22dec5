"""The paper: the files that `save_pretrained` copies beside the weights, so that `trust_remote_code` needs no install.

They import one another as flat siblings (`from .x import y`) and nothing else of this package, because
`dynamic_module_utils` of transformers copies them into one folder by name.
"""
