"""Convert an original Transformer-XL checkpoint to a folder that `AutoModelForCausalLM.from_pretrained` loads.

    txl-convert --from kimiyoung-tf --checkpoint tf_wt103/model/model.ckpt-0 --output wt103
    txl-convert --from kimiyoung-pytorch --checkpoint model.pt --corpus cache.pt --output lm
    txl-convert --from nvidia --checkpoint checkpoint_best.pt --output base
    txl-convert --from transformers --checkpoint transfo-xl-wt103 --output wt103
    txl-convert --from remi --checkpoint REMI-tempo-checkpoint --output pop

`python conversion/convert.py` is the same command. The work is done in `command_line.py`; what is here, and in
`arguments.py`, comes before its imports, which take seconds.
"""

import importlib
import signal
import sys


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    # A batch system's end and a lost terminal are cleaned up after like Ctrl-C.
    for number in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, number) and signal.getsignal(getattr(signal, number)) is not signal.SIG_IGN:
            signal.signal(getattr(signal, number), signal.default_int_handler)
    try:
        # Help, and options and names that cannot be, need nothing of what follows.
        options = importlib.import_module("txl_hf.conversion.arguments")
        if (problem := options.path_problem(options.parse_arguments(argv))) is not None:
            print(f"txl-convert: {problem}", file=sys.stderr)
            return 1
        command_line = importlib.import_module("txl_hf.conversion.command_line")
    except KeyboardInterrupt:
        print("txl-convert: interrupted", file=sys.stderr)
        return 1
    return command_line.main(argv)


if __name__ == "__main__":
    sys.exit(main())
