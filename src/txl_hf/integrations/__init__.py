"""Programs of others that use the model: lm_eval, ONNX, a server.

Imports every wing but the commands.
"""
