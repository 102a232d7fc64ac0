"""
The recipe of `model_cards/smollm2-135m-instruct-dspark`: a DSpark drafter of two layers for SmolLM2-135M-Instruct,
trained on answers that the target wrote itself (see `write_answers.py`), and on the prompts that it wrote.

    python examples/train_embedded_drafter.py answers/*/train.jsonl --output runs/my-drafter
    python examples/train_embedded_drafter.py answers/*/train.jsonl --output runs/my-drafter --resume

Hours on a CPU, so it saves often and resumes. The drafter ends up in `OUTPUT/final`, in bfloat16.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from datasets import Dataset
from write_answers import BOXED

from hf_dspark import DraftConfig, DraftTrainer, DSparkDrafter
from hf_dspark.hub import load_embedded_target
from hf_dspark.training.chat import around_user


# Behind the first drafts of a block too few are right for a target this small: a longer block trains for nothing.
BLOCK = 4


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path, nargs="+", help="jsonl files with `prompt_ids` and `completion_ids`")
    parser.add_argument("--output", type=Path, required=True, help="folder of checkpoints and of the result")
    parser.add_argument("--sources", nargs="*", help="keep only examples with one of these in `source`")
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--held-out", type=int, default=64, help="examples kept for evaluation")
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--from", dest="start", type=Path, help="go on from this drafter instead of a fresh one")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--feature-store", help="folder for the target's features: later epochs run twice as fast")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in OUTPUT")
    return parser.parse_args()


def load_examples(files: list[Path], sources: list[str] | None) -> list[dict]:
    """One example per prompt, in a fixed random order."""
    examples = {}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if len(row["completion_ids"]) >= 4 and (not sources or row["source"] in sources):
                examples.setdefault(tuple(row["prompt_ids"]), row)
    examples = list(examples.values())
    random.Random(0).shuffle(examples)
    return examples


def to_dataset(rows: list[dict], tokenizer) -> Dataset:
    """Tokens, of which those that the target wrote are supervised."""
    before, after = around_user(tokenizer, add_generation_prompt=True)
    ends = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, BOXED + after, after)]
    return Dataset.from_list(
        [
            {
                "input_ids": row["prompt_ids"] + row["completion_ids"],
                "loss_mask": prompt_mask(row, *ends) + [1] * len(row["completion_ids"]),
            }
            for row in rows
        ]
    )


def prompt_mask(row: dict, before: list[int], boxed: list[int], after: list[int]) -> list[int]:
    """Marks a prompt's tokens that the target wrote: what a template or this recipe put around them is not its own."""
    prompt = row["prompt_ids"]
    if row.get("source") != "self-written":
        return [0] * len(prompt)
    behind = len(boxed) if prompt[-len(boxed) :] == boxed else len(after)
    return [0] * len(before) + [1] * (len(prompt) - len(before) - behind) + [0] * behind


def fresh_drafter(target, tokenizer, examples: list[dict], draft_vocab_size: int) -> DSparkDrafter:
    """Two layers, begun as the target's last two, over the tokens that its answers use most."""
    counts = torch.zeros(target.config.vocab_size, dtype=torch.long)
    for row in examples:
        counts += torch.bincount(torch.tensor(row["completion_ids"]), minlength=len(counts))
    print(f"{int(counts.sum())} answer tokens in {len(examples)} examples")
    return DSparkDrafter.from_target(
        target,
        mask_token_id=tokenizer.convert_tokens_to_ids("<repo_name>"),
        num_hidden_layers=2,
        block_size=BLOCK,
        markov_rank=48,
        draft_vocab_size=draft_vocab_size,
        token_counts=counts,
        target_name_or_path="HuggingFaceTB/SmolLM2-135M-Instruct",
    )


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    target, tokenizer = load_embedded_target()
    examples = load_examples(args.answers, args.sources)
    if args.start:
        drafter = DSparkDrafter.from_pretrained(args.start, block_size=BLOCK)
    else:
        drafter = fresh_drafter(target, tokenizer, examples, args.draft_vocab_size)
    config = DraftConfig(
        output_dir=str(args.output),
        per_device_train_batch_size=6,
        # Nearly every position: the target's distributions, which are costly, then serve several blocks.
        num_anchors=112,
        loss_decay=2.0,
        num_train_epochs=args.epochs,
        max_steps=args.max_steps,
        learning_rate=args.learning_rate,
        adam_beta2=0.98,
        # On a short run the L1 distance alone starts slowly: the paper's mix has 0.1 of cross-entropy.
        cross_entropy_weight=0.5,
        l1_weight=0.9,
        confidence_weight=0.5,
        max_length=512,
        train_sampling_strategy="group_by_length",
        feature_store=args.feature_store,
        eval_strategy="steps" if args.held_out else "no",
        eval_steps=150,
        save_steps=100,
        save_total_limit=2,
        seed=1,
        report_to="none",
    )
    trainer = DraftTrainer(
        model=drafter,
        target_model=target,
        args=config,
        train_dataset=to_dataset(examples[args.held_out :], tokenizer),
        eval_dataset=to_dataset(examples[: args.held_out], tokenizer) if args.held_out else None,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    drafter.to(torch.bfloat16).save_pretrained(args.output / "final")
    (args.output / "final" / "training.json").write_text(json.dumps(trainer.state.log_history, indent=1))
    print(f"The drafter is in {args.output / 'final'}.")


if __name__ == "__main__":
    main()
