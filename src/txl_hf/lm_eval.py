"""The model `txl` for EleutherAI's lm-evaluation-harness: it reads with memory, however long the text is.

    python -m txl_hf.lm_eval --model txl --model_args pretrained=FOLDER,segment_length=64,memory_length=640 --tasks …

registers the model and runs `lm_eval`'s own command; after `import txl_hf.lm_eval` it is also there for
`lm_eval.simple_evaluate(model="txl", model_args=…)`. An installed lm_eval that looks for entry points finds it by
itself. lm_eval's `hf` cuts a text into windows and has no memory from one to the next.
"""

from contextlib import nullcontext

from .command_line import one_line_errors

# Without lm_eval the command ends in one line, and an import raises as usual.
with one_line_errors() if __name__ == "__main__" else nullcontext():
    # Registers lm_eval's own models, because lm_eval does so by itself only while no model is registered.
    import lm_eval.models  # noqa: F401
    from lm_eval.api.registry import model_registry

from .integrations.lm_eval_model import TransfoXLLM

# Run as a command, this module may be imported a second time, by its name.
if "txl" not in model_registry:
    model_registry.register("txl", target=TransfoXLLM)

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
