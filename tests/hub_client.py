"""Use the Hub in a process that `test_hub.py` starts: `python hub_client.py ROLE FOLDER`.

Each role is a list of steps. The result of each, or its error, goes to FOLDER/ROLE.pt, so that one process, most of
whose time goes into imports, serves many tests.
"""

import os
import sys
import traceback
from pathlib import Path

import torch

TEXT = "the cat sat on the mat , and so did the dog"
IDS = torch.arange(1, 25).view(2, 12)


# ---- an author, who has the package --------------------------------------------------------------------------------


def build(seed: int = 0):
    """A language model and a classifier with outputs far from uniform."""
    from txl_hf import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLForSequenceClassification

    torch.manual_seed(seed)
    config = TransfoXLConfig(
        vocab_size=61,
        cutoffs=[10, 30],
        d_model=32,
        d_embed=32,
        n_head=4,
        d_head=8,
        d_inner=48,
        div_val=2,
        n_layer=2,
        mem_len=8,
        clamp_len=6,
        init_std=0.2,
        proj_init_std=0.2,
        pad_token_id=0,
        num_labels=3,
    )
    return TransfoXLForCausalLM(config).eval(), TransfoXLForSequenceClassification(config).eval()


def push(folder: Path):
    model, classifier = build()
    model.push_to_hub("user/name")
    classifier.push_to_hub("user/classifier")
    return outputs_of(model.transformer, model, classifier)


def push_tokenizer(folder: Path):
    from txl_hf import TransfoXLTokenizer

    build()[0].push_to_hub("user/spoken")
    tokenizer = TransfoXLTokenizer.train_from_iterator([TEXT], mode="whitespace")
    tokenizer.push_to_hub("user/spoken")
    return tokenizer(TEXT)["input_ids"]


def push_over_an_edited_card(folder: Path):
    from huggingface_hub import HfApi

    build(seed=0)[0].push_to_hub("user/edited")
    card = b"---\nlicense: mit\ntags:\n- mine\n---\n\n# Edited by hand\n"
    HfApi().upload_file(path_or_fileobj=card, path_in_repo="README.md", repo_id="user/edited")
    build(seed=1)[0].push_to_hub("user/edited", commit_message="Train longer", tags=["longer"])


def push_while_saving(folder: Path):
    # The token comes as an argument alone, as where nobody is logged in.
    token = os.environ.pop("HF_TOKEN")
    try:
        arguments = {"repo_id": "user/saved", "commit_message": "From a folder", "private": True}
        build()[0].save_pretrained(folder / "saved", push_to_hub=True, token=token, **arguments)
    finally:
        os.environ["HF_TOKEN"] = token


def push_a_derived_class(folder: Path):
    from txl_hf import TransfoXLForCausalLM

    class Derived(TransfoXLForCausalLM):
        pass

    model = Derived(build()[0].config)
    model.push_to_hub("user/derived")


def push_in_shards(folder: Path):
    build()[0].save_pretrained(folder / "shards", push_to_hub=True, repo_id="user/shards", max_shard_size="30KB")


def push_beside_main(folder: Path):
    model, _ = build()
    model.push_to_hub("user/branches", revision="experiment")
    model.push_to_hub("user/branches", create_pr=True)


def push_from_trainer(folder: Path):
    from transformers import Trainer, TrainingArguments

    arguments = {"push_to_hub": True, "hub_model_id": "user/trained", "save_strategy": "no", "report_to": "none"}
    arguments |= {"max_steps": 2, "use_cpu": True, "disable_tqdm": True}
    data = [{"input_ids": row, "labels": row} for row in IDS]
    trainer = Trainer(build()[0], TrainingArguments(str(folder / "trained"), **arguments), train_dataset=data)
    trainer.train()
    trainer.push_to_hub()
    with torch.no_grad():
        return trainer.model.eval()(IDS).logits


def push_in_training(folder: Path):
    """No further than the last save, to where a card is of other weights, or by hand."""
    from transformers import TrainingArguments

    from txl_hf import TokenStream, TransfoXLTokenizer, TransfoXLTrainer
    from txl_hf.evaluation.cards import write_model_card

    arguments = {"push_to_hub": True, "save_steps": 1, "max_steps": 1, "per_device_train_batch_size": 2}
    arguments |= {"label_names": ["shift_labels"], "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    tokenizer, trained = TransfoXLTokenizer.train_from_iterator([TEXT], mode="whitespace"), {}
    write_model_card(folder / "others.md", build(1)[0])
    of_others = (folder / "others.md").read_text(encoding="utf-8")
    for name, card in (("begun", of_others), ("begun-with-memory", "# By hand\n")):
        (folder / name).mkdir()
        (folder / name / "README.md").write_text(card, encoding="utf-8")
        settings = TrainingArguments(str(folder / name), hub_model_id=f"user/{name}", **arguments)
        data = TokenStream(IDS.flatten(), segment_length=4, batch_size=2)
        trainer = TransfoXLTrainer(build()[0], settings, train_dataset=data, processing_class=tokenizer)
        trainer.train()
        with torch.no_grad():
            trained[name] = trainer.model.eval()(IDS).logits
    return trained


def push_without_rights(folder: Path):
    token = os.environ["HF_TOKEN"]
    os.environ["HF_TOKEN"] = "hf_token_of_guest"
    try:
        build()[0].push_to_hub("user/name")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ["HF_TOKEN"] = token


# ---- a reader, with the package or without -------------------------------------------------------------------------


def outputs_of(base, model, classifier) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {
            "AutoModel": base(IDS).last_hidden_state,
            "AutoModelForCausalLM": model(IDS).logits,
            "AutoModelForSequenceClassification": classifier(IDS, attention_mask=torch.ones_like(IDS)).logits,
            "mems": torch.stack(model(IDS).mems),
            "generate": model.generate(IDS, max_new_tokens=12, do_sample=False, eos_token_id=None),
        }


def load(repository: str, classifier: str):
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    return (
        AutoModel.from_pretrained(repository, **OPTIONS).eval(),
        AutoModelForCausalLM.from_pretrained(repository, **OPTIONS).eval(),
        AutoModelForSequenceClassification.from_pretrained(classifier, **OPTIONS).eval(),
    )


def load_without_trust(folder: Path):
    from transformers import AutoModelForCausalLM

    try:
        AutoModelForCausalLM.from_pretrained("user/name")
    except ValueError as error:
        return str(error)


def read(folder: Path):

    models = load("user/name", "user/classifier")
    # By this `Trainer` knows whose labels to shift.
    return outputs_of(*models)


def read_trained(folder: Path):
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained("user/trained", **OPTIONS).eval()(IDS).logits


def read_what_is_in_training(folder: Path):
    from transformers import AutoModelForCausalLM

    names = ("begun", "begun-with-memory")
    with torch.no_grad():
        return {
            name: AutoModelForCausalLM.from_pretrained(f"user/{name}", **OPTIONS).eval()(IDS).logits for name in names
        }


def read_config(folder: Path):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained("user/name", **OPTIONS)
    return type(config).__name__, config.d_model, config.cutoffs


def read_tokenizer(folder: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("user/spoken", **OPTIONS)
    model = AutoModelForCausalLM.from_pretrained("user/spoken", **OPTIONS)
    inputs = tokenizer(TEXT, return_tensors="pt")
    model.generate(**inputs, max_new_tokens=3)
    ids = inputs["input_ids"][0].tolist()
    return type(tokenizer).__name__, ids, tokenizer.decode(ids)


def save_again(folder: Path):
    _, model, classifier = load("user/name", "user/classifier")
    model.save_pretrained(folder / "again")
    classifier.save_pretrained(folder / "again-classifier")
    model.push_to_hub("user/again")


def read_again_from_folder(folder: Path):
    return outputs_of(*load(str(folder / "again"), str(folder / "again-classifier")))


def read_again_from_hub(folder: Path):
    return outputs_of(*load("user/again", str(folder / "again-classifier")))


READ = [
    read,
    read_trained,
    read_what_is_in_training,
    read_config,
    read_tokenizer,
]
ROLES = {
    "author": [
        push,
        push_tokenizer,
        push_over_an_edited_card,
        push_while_saving,
        push_a_derived_class,
        push_in_shards,
        push_beside_main,
        push_from_trainer,
        push_in_training,
        push_without_rights,
    ],
    "reader": READ,
    "stranger": [load_without_trust, *READ, save_again],
    "next_stranger": [read_again_from_folder, read_again_from_hub],
}

if __name__ == "__main__":
    role, output = sys.argv[1], Path(sys.argv[2])
    if "stranger" in role:
        # An entry of None makes importing fail as for a package that is not installed.
        sys.modules["txl_hf"] = sys.modules["triton"] = None
        OPTIONS = {"trust_remote_code": True}
    else:
        import txl_hf  # noqa: F401  (registers the Auto classes)

        OPTIONS = {}
    results = {}
    for function in ROLES[role]:
        try:
            results[function.__name__] = function(output)
        except Exception:
            results[function.__name__] = RuntimeError(traceback.format_exc())
    torch.save(results, output / f"{role}.pt")
