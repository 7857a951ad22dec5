"""Fine-tune a checkpoint on a text of your own with low-rank adapters (LoRA, through PEFT), with memory.

    python examples/by_feature/lora.py --model demo-output --text book.txt --output book-lora
    python examples/by_feature/lora.py --smoke

What is added to plain training: `get_peft_model` puts small matrices beside W_q and W_v of every layer and freezes the
rest. `TransfoXLTrainer` carries the memory from segment to segment as for a whole model. The output folder holds the
adapter alone; PEFT puts it on the checkpoint again.
"""

import argparse
from pathlib import Path

import common
from txl_hf.command_line import at_least_one, existing_file, hub_or_folder, new_path, one_line_errors, positive

PARSER = common.Parser(__doc__)
PARSER.add_argument("--model", type=hub_or_folder, required=True, help="a checkpoint: a folder, or a name on the Hub")
PARSER.add_argument("--text", type=existing_file, required=True, help="a UTF-8 text; its last tenth is held out")
PARSER.add_argument("--output", type=new_path, required=True, help="a new folder for the adapter")
PARSER.add_argument("--rank", type=at_least_one, default=8, help="of the adapters' matrices (%(default)s)")
PARSER.add_argument("--steps", type=at_least_one, default=500, help="(%(default)s)")
PARSER.add_argument("--batch_size", type=at_least_one, default=8, help="parallel streams of text (%(default)s)")
PARSER.add_argument("--segment_length", type=at_least_one, help="by default the checkpoint's")
PARSER.add_argument("--learning_rate", type=positive, default=1e-3, help="(%(default)s)")

if __name__ == "__main__":
    PARSER.refuse_first()

import torch
from transformers import AutoModelForCausalLM, TrainingArguments, set_seed

from txl_hf import TokenStream, TransfoXLTrainer
from txl_hf.data.texts import encode_text
from txl_hf.files import whole_folder

with one_line_errors():
    from peft import LoraConfig, PeftModel, get_peft_model


def smoke(folder: Path) -> list[str | Path]:
    text = folder / "text.txt"
    text.write_text(common.standard_library("keyword") + common.standard_library("textwrap"), encoding="utf-8")
    sizes = ["--steps", "60", "--learning_rate", "1e-2"]
    return ["--model", common.tiny_checkpoint(folder), "--text", text, "--output", folder / "adapter", *sizes]


def main():
    arguments = common.parse_arguments(PARSER, smoke)
    # The adapter's weights are drawn before Trainer takes a seed.
    set_seed(0)
    with one_line_errors():
        text = common.read_text(arguments.text)
        model, tokenizer = common.load(AutoModelForCausalLM, arguments.model)
        training, held_out = make_streams(encode_text(tokenizer, text), model.config, arguments)
    # k_proj, r_proj, o_proj, up_proj and down_proj can have adapters too.
    config = LoraConfig(r=arguments.rank, lora_alpha=2 * arguments.rank, target_modules=["q_proj", "v_proj"])
    adapted = get_peft_model(model, config)

    with whole_folder(arguments.output) as folder:
        trainer = TransfoXLTrainer(
            adapted, training_arguments(arguments, folder), train_dataset=training, eval_dataset=held_out
        )
        before = trainer.evaluate()["eval_bits_per_token"]
        trainer.train()
        after = trainer.evaluate()["eval_bits_per_token"]
        adapted.save_pretrained(folder)
        difference = reload(adapted, arguments.model, folder, held_out)
    share = adapted.num_parameters(only_trainable=True) / adapted.num_parameters()
    print(f"Held-out bits per token: {before:.3f} before, {after:.3f} after training {share:.1%} of the parameters.")
    print(f"Saved in {arguments.output}; loaded again, its log-probabilities differ by {difference:.0e} at most.")


def make_streams(token_ids, config, arguments: argparse.Namespace) -> tuple[TokenStream, TokenStream]:
    """For training and for evaluation."""
    segment_length, end = arguments.segment_length or config.tgt_len, len(token_ids) * 9 // 10
    return (
        TokenStream(token_ids[:end], segment_length, arguments.batch_size),
        TokenStream(token_ids[end:], segment_length, arguments.batch_size, keep_remainder=True),
    )


def training_arguments(arguments: argparse.Namespace, folder: Path) -> TrainingArguments:
    return TrainingArguments(
        str(folder),
        max_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="cosine",
        per_device_train_batch_size=arguments.batch_size,
        per_device_eval_batch_size=arguments.batch_size,
        logging_steps=max(1, arguments.steps // 10),
        save_strategy="no",
        report_to=[],
    )


def reload(adapted: PeftModel, base: str, folder: Path, held_out: TokenStream) -> float:
    """Put the saved adapter on the checkpoint; by how much its log-probabilities differ from the trained model's."""
    reloaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    input_ids = held_out[0]["input_ids"][None]
    with torch.no_grad():
        trained = adapted.eval()(input_ids.to(adapted.device)).logits.cpu()
        return (reloaded(input_ids).logits - trained).abs().max().item()


if __name__ == "__main__":
    main()
