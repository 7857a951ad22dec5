"""Write a text together with a model: what it generates appears as it is generated, and it remembers all turns.

    python examples/by_feature/streaming_generation.py --model demo-output
    python examples/by_feature/streaming_generation.py --model demo-output --prompt "import os" "class Parser"
    python examples/by_feature/streaming_generation.py --smoke

Without --prompt the turns are typed at the terminal, an empty one to let the model go on, Ctrl-D to stop. What is
added to plain generation: a `TextStreamer` prints tokens as they come, and `past_key_values`, the memory as projected
keys and values, goes from one call of `generate` to the next. So every token is read once, however long the text
grows, and the memory holds `mem_len` states of it at most. `generate` is given the whole text again, but as ids alone:
how much of it the memory has seen tells which are new.
"""

from collections.abc import Iterator
from pathlib import Path

import common
from txl_hf.command_line import at_least_one, at_least_zero, hub_or_folder, not_negative, one_line_errors

PARSER = common.Parser(__doc__)
PARSER.add_argument("--model", type=hub_or_folder, required=True, help="a checkpoint: a folder, or a name on the Hub")
PARSER.add_argument("--prompt", nargs="+", help="the turns; by default they are asked for")
PARSER.add_argument("--max_new_tokens", type=at_least_one, default=200, help="generated in a turn (%(default)s)")
PARSER.add_argument(
    "--temperature", type=not_negative, default=0.9, help="0: always the likeliest token (%(default)s)"
)
PARSER.add_argument("--seed", type=at_least_zero, default=0, help="(%(default)s)")

if __name__ == "__main__":
    PARSER.refuse_first()

import torch
from transformers import AutoModelForCausalLM, TextStreamer, set_seed


def smoke(folder: Path) -> list[str | Path]:
    turns = ["def main():", "    return ", "", "class "]
    return ["--model", common.tiny_checkpoint(folder), "--max_new_tokens", "80", "--prompt", *turns]


class Story:
    """A text that is continued turn by turn.

    Attributes:
        text: (1, n) ids of all that was given and generated.
        memory: the cache that has seen all of it but the last token, or None in the beginning.
        tokens_read: how many tokens have gone through the model.
    """

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model.eval(), tokenizer
        self.text = torch.empty(1, 0, dtype=torch.long, device=model.device)
        self.memory = None
        self.tokens_read = 0
        model.get_input_embeddings().register_forward_hook(self._count)

    def go_on(self, prompt: str, **settings) -> str:
        """Read a prompt and print, and return, what follows it.

        Raises:
            ValueError: there is nothing to go on from, or the prompt has a symbol that the vocabulary lacks.
        """
        ids = self.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        text = torch.cat([self.text, ids.long().to(self.text.device)], dim=1)
        if text.shape[1] == 0:
            raise ValueError("the first prompt is empty: there is nothing to go on from")
        output = self.model.generate(
            text,
            # No token is padding, not even one that the tokenizer would pad by.
            attention_mask=torch.ones_like(text),
            past_key_values=self.memory,
            streamer=TextStreamer(self.tokenizer, skip_prompt=True),
            return_dict_in_generate=True,
            **settings,
        )
        self.text, self.memory = output.sequences, output.past_key_values
        return self.tokenizer.decode(self.text[0, text.shape[1] :])

    def _count(self, module, args, output):
        self.tokens_read += args[0].shape[1]


def ask() -> Iterator[str]:
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            return


def main():
    arguments = common.parse_arguments(PARSER, smoke)
    settings = {"max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.temperature > 0}
    if arguments.temperature > 0:
        settings["temperature"] = arguments.temperature
    with one_line_errors():
        set_seed(arguments.seed)
        story = Story(*common.load(AutoModelForCausalLM, arguments.model))
        for prompt in arguments.prompt or ask():
            if arguments.prompt:
                print(f"> {prompt}")
            story.go_on(prompt, **settings)
    print(f"A text of {story.text.shape[1]} tokens; the model has read {story.tokens_read}.")


if __name__ == "__main__":
    main()
