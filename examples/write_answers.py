"""
Lets the embedded target write training data for its drafter: it answers questions, and it writes prompts of its own by
continuing a user turn that was just begun, and answers those too.

    python examples/write_answers.py --self-prompts 2000 --output answers.jsonl
    python examples/write_answers.py --questions gsm8k-train.jsonl --output answers.jsonl

Lines are appended, so an interrupted run is simply started again with another `--seed`. A questions file holds one
`{"prompt": "..."}` a line. Half of the answers are greedy, half are sampled at temperature 0.4.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from tqdm import tqdm

from hf_dspark.hub import load_embedded_target


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
    parser.add_argument("--output", type=Path, required=True, help="jsonl file that answers are appended to")
    parser.add_argument("--questions", type=Path, help="jsonl file with a `prompt` a line")
    parser.add_argument("--self-prompts", type=int, default=0, help="prompts that the target writes itself")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Writer:
    """The target, its chat template cut around the user's text, and a way to continue many texts at once."""

    def __init__(self) -> None:
        self.target, self.tokenizer = load_embedded_target()
        self.tokenizer.padding_side = "left"
        chat = [{"role": "user", "content": "\0"}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        self.before, self.after = text.split("\0")

    def continue_texts(self, texts: list[str], **settings) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of the texts, and of what follows, end of turn included."""
        batch = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        output = self.target.generate(**batch, pad_token_id=self.tokenizer.pad_token_id, **settings)
        prompts = [ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"])]
        return prompts, [self._until_end(row.tolist()) for row in output[:, batch["input_ids"].shape[1] :]]

    def _until_end(self, ids: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        return ids[: ids.index(end) + 1] if end in ids else ids

    def write_prompts(self, openers: list[str], asks_boxed: list[bool]) -> list[str]:
        """User turns that begin with the openers; those that did not end are dropped."""
        _, rests = self.continue_texts(
            [self.before + opener for opener in openers],
            do_sample=True,
            temperature=1.0,
            top_k=100,
            max_new_tokens=110,
        )
        written = []
        for opener, rest, boxed in zip(openers, rests, asks_boxed):
            if rest[-1] == self.tokenizer.eos_token_id:
                written.append(opener + self.tokenizer.decode(rest[:-1]) + (BOXED if boxed else ""))
        return [text for text in written if len(text) >= 8]

    def answer(self, prompts: list[str], greedy: bool, max_new_tokens: int) -> list[dict]:
        """Training examples, as exact tokens."""
        sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 0.4, "top_k": 50}
        texts = [self.before + prompt + self.after for prompt in prompts]
        asked, answers = self.continue_texts(texts, max_new_tokens=max_new_tokens, **sampling)
        return [
            {"prompt": text, "prompt_ids": before, "completion_ids": after, "greedy": greedy}
            for text, before, after in zip(prompts, asked, answers)
        ]


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    writer = Writer()
    questions = []
    if args.questions:
        lines = args.questions.read_text(encoding="utf-8").splitlines()
        questions = [json.loads(line)["prompt"] + (BOXED if rng.random() < 0.8 else "") for line in lines]
        rng.shuffle(questions)
    total = len(questions) + args.self_prompts
    with args.output.open("a", encoding="utf-8") as file, tqdm(total=total, unit="prompt") as progress:
        for start in range(0, total, args.batch_size):
            size = min(args.batch_size, total - start)
            prompts, source = questions[start : start + size], "questions"
            if not prompts:
                kinds = rng.choices(list(SHARES), weights=list(SHARES.values()), k=size)
                openers = [rng.choice(OPENERS[kind]) for kind in kinds]
                boxed = [kind == "math" and rng.random() < 0.6 for kind in kinds]
                prompts, source = writer.write_prompts(openers, boxed), "self-written"
            greedy = (start // args.batch_size) % 2 == 0
            for example in writer.answer(prompts, greedy, args.max_new_tokens) if prompts else []:
                file.write(json.dumps({"source": source, **example}) + "\n")
            file.flush()
            progress.update(size)


if __name__ == "__main__":
    main()
