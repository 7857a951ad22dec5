"""Programs of others that use the model: lm_eval, ONNX, servers.

Imports every wing but the commands.
"""
