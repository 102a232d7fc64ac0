"""
Answers for the embedded drafter: the target answers questions and prompts that it writes itself, half of each greedily
and half sampled at temperature 0.4.

    python examples/write_answers.py --self-prompts 2000 --output answers
    python examples/write_answers.py --questions gsm8k-train.jsonl --output answers

`train_embedded_drafter.py` takes the two files, `answers/greedy/train.jsonl` and `answers/sampled/train.jsonl`. An
interrupted run goes on when it is started again. A questions file holds one `{"prompt": "..."}` a line.
"""

import argparse
import random
from pathlib import Path

from hf_dspark import regenerate
from hf_dspark.hub import load_embedded_target
from hf_dspark.training.local_target import LocalTarget
from hf_dspark.training.self_prompts import write_prompts
from hf_dspark.training.sources import load_examples


BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
# How a user turn begins; the target writes the rest. An empty opener leaves it everything.
OPENERS = {
    "code": (
        "Write a function to",
        "Write a Python function that",
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\ndef ",
        "Implement a",
        "Complete the following code:\n",
        "Write a Python program",
    ),
    "math": ("What is the value of", "Find the", "How many", "If $", "Solve", "Compute", "Simplify", "Evaluate $"),
    "chat": ("", "Write", "Explain", "Compose", "Describe", "Imagine", "What", "Give", "How", "You are", "Why"),
}
SHARES = {"code": 0.45, "math": 0.25, "chat": 0.3}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the answers")
    parser.add_argument("--questions", type=Path, help="jsonl file with a `prompt` a line")
    parser.add_argument("--self-prompts", type=int, default=0, help="prompts that the target writes itself")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    target, tokenizer = load_embedded_target()
    chance, prompts = random.Random(args.seed), []

    def add(text: str, boxed_share: float, source: str) -> None:
        prompts.append({"prompt": text + (BOXED if chance.random() < boxed_share else ""), "source": source})

    for row in load_examples(args.questions) if args.questions else []:
        add(row["prompt"], 0.8, "questions")
    for domain, share in SHARES.items():
        number, kept = round(share * args.self_prompts), args.output / f"{domain}-prompts.jsonl"
        writer = LocalTarget(target, tokenizer)
        for text in write_prompts(writer, number, kept, OPENERS[domain], args.batch_size, args.seed) if number else []:
            add(text, 0.6 if domain == "math" else 0.0, "self-written")
    chance.shuffle(prompts)
    halves = {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.4, "top_k": 50}}
    for i, (name, sampling) in enumerate(halves.items()):
        answers = regenerate(
            target,
            prompts[i::2],
            args.output / name,
            tokenizer=tokenizer,
            max_new_tokens=args.max_new_tokens,
            batch_size=args.batch_size,
            seed=args.seed,
            **sampling,
        )
        print(f"{len(answers)} {name} answers in {args.output / name / 'train.jsonl'}")


if __name__ == "__main__":
    main()
