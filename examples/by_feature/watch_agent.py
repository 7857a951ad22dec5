"""An episode of a trained agent, and a picture of which observations it attends to.

    python examples/by_feature/watch_agent.py --agent AGENT --env recall --output seen.png

The agent is the folder `agent` of a run of `memory_agent.py`. A column of the picture is a step, a row the distance of
an observation, 0 of the present one: the attention over the memory, the mean of the heads of the last layer.
"""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LogNorm
from transformers import AutoModelForTokenClassification

import common
from memory_agent import HELD_OUT, TASKS, Environments
from txl_hf.command_line import new_path, one_line_errors
from txl_hf.files import whole_file
from txl_hf.memories import memory_of


@torch.no_grad()
def watch(agent, environments: Environments) -> tuple[torch.Tensor, float]:
    """The attention at each step over distances (T, m + 1), and the return of the episode."""
    observation, memory = environments.reset([(HELD_OUT, 0)]), dict[str, Any]()
    attended, returned = [], None
    while returned is None:
        outputs = agent(inputs_embeds=observation[:, None], output_attentions=True, **memory)
        memory = memory_of(outputs)
        attended.append(outputs.attentions[-1][0, :, 0].mean(0).flip(0))
        observation, _, _, [returned] = environments.step(outputs.logits[:, 0].argmax(-1))
    return torch.nn.utils.rnn.pad_sequence(attended, batch_first=True), returned


def main():
    parser = common.Parser(__doc__)
    parser.add_argument("--agent", type=Path, required=True, help="folder that memory_agent.py wrote")
    parser.add_argument("--env", choices=TASKS, required=True)
    parser.add_argument("--output", type=new_path, required=True, metavar="PNG")
    options = parser.parse_args()
    with one_line_errors():
        agent = AutoModelForTokenClassification.from_pretrained(options.agent)
        attended, returned = watch(agent, Environments(options.env, 1))
        figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
        image = axis.imshow(attended.T, aspect="auto", origin="lower", cmap="magma", norm=LogNorm(1e-3, 1, clip=True))
        axis.set_title(f"{options.env.replace('_', ' ')}: return {returned:.3f}", fontsize=15)
        axis.set_xlabel("step", fontsize=14)
        axis.set_ylabel("distance, observations", fontsize=14)
        axis.tick_params(labelsize=13)
        bar = figure.colorbar(image)
        bar.set_label("attention, black: 0.001 or less", fontsize=14)
        bar.ax.tick_params(labelsize=13)
        with whole_file(options.output) as aside:
            figure.savefig(aside, dpi=110, format="png")
    print(f"return {returned:.3f}")


if __name__ == "__main__":
    main()
