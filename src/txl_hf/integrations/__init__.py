"""Programs of others that use the model: lm_eval, ONNX, servers.

Imports all that `evaluation` does, and `evaluation`.
"""
