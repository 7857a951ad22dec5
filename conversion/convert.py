"""Convert an original Transformer-XL checkpoint to a folder that `AutoModelForCausalLM.from_pretrained` loads.

    txl-convert --from kimiyoung-tf --checkpoint tf_wt103/model/model.ckpt-0 --output wt103
    txl-convert --from kimiyoung-pytorch --checkpoint model.pt --corpus cache.pt --output lm
    txl-convert --from nvidia --checkpoint checkpoint_best.pt --output base
    txl-convert --from transformers --checkpoint transfo-xl-wt103 --output wt103
    txl-convert --from remi --checkpoint REMI-tempo-checkpoint --output pop

`python conversion/convert.py` is the same command.
"""

import sys

from txl_hf.conversion.command_line import main  # type: ignore[import-not-found]  # its name once installed

if __name__ == "__main__":
    sys.exit(main())
