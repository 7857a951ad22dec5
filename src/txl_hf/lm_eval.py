"""The model `txl` for EleutherAI's lm-evaluation-harness: it reads with memory, however long the text is.

    python -m txl_hf.lm_eval --model txl --model_args pretrained=FOLDER,segment_length=64,memory_length=640 --tasks …

registers the model and runs `lm_eval`'s own command; after `import txl_hf.lm_eval` it is also there for
`lm_eval.simple_evaluate(model="txl", model_args=…)`. Where the installed lm_eval looks for entry points, it finds it
by itself. The model that lm_eval has for causal models in general, `hf`, cuts a text into windows and remembers
nothing from one to the next.

Nothing slow is imported before the model is made: it is in `lm_eval_model`.
"""

from contextlib import nullcontext
from typing import TYPE_CHECKING

from .command_line import one_line_errors

# Without lm_eval, the command ends with one line; an import fails as any.
with one_line_errors() if __name__ == "__main__" else nullcontext():
    # It enters its own models, which it does by itself only where there is none yet.
    import lm_eval.models  # noqa: F401
    from lm_eval.api.registry import model_registry

if TYPE_CHECKING:
    from .integrations.lm_eval_model import TransfoXLLM

__all__ = ["TransfoXLLM", "main"]

# Run as a command, this module may be imported a second time, by its name.
if "txl" not in model_registry:
    model_registry.register("txl", target="txl_hf.integrations.lm_eval_model:TransfoXLLM")


def __getattr__(name: str):
    if name != "TransfoXLLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .integrations.lm_eval_model import TransfoXLLM

    return TransfoXLLM


def main():
    """`lm_eval`'s own command, with the model `txl`."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
