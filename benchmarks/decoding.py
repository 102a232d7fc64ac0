"""
The embedded pair on a machine, as `hf-dspark evaluate` measures it, with what a step of its target costs by tokens.

    python benchmarks/decoding.py --tasks path/to/tasks --samples 20 --dtype bfloat16

`path/to/tasks` is a folder of files `NAME.jsonl` whose lines hold `turns`, a list of user messages. Ratios to plain
decoding are medians over prompts, decoded plain and drafted in one process and in alternating order. Absolute times
are in the results too, but mean little on a shared machine.
"""

import argparse
from pathlib import Path

import torch

from hf_dspark import AutoDrafter, EvaluationConfig, evaluate_drafter
from hf_dspark.evaluation.report import estimate_text, reported
from hf_dspark.hub import embedded_drafter, load_embedded_target


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=Path, required=True, help="folder of NAME.jsonl files")
    parser.add_argument("--drafter", default=None, help="folder or Hub id; the embedded drafter by default")
    parser.add_argument("--samples", type=int, default=20, help="prompts per task (a fixed random sample)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the target")
    parser.add_argument("--drafter-dtype", choices=("float32", "bfloat16"), default=None, help="the target's if unset")
    parser.add_argument(
        "--num-assistant-tokens",
        type=int,
        default=None,
        help="drafts a round, beside the whole block; with and without copies",
    )
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/decoding"), help="folder of the results")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    target, tokenizer = load_embedded_target(getattr(torch, args.dtype))
    drafter_dtype = getattr(torch, args.drafter_dtype or args.dtype)
    drafter = AutoDrafter.from_pretrained(args.drafter or embedded_drafter(), dtype=drafter_dtype)
    number = args.num_assistant_tokens
    config = EvaluationConfig(
        schedules=["fixed", *([f"fixed:{number}", f"fixed:{number}+lookup:5"] if number else [])],
        samples=args.samples,
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
    )
    results = evaluate_drafter(
        target,
        drafter,
        [args.tasks],
        args.output,
        config,
        tokenizer=tokenizer,
        progress=lambda done, of: print(f"\r{done}/{of}", end="", flush=True),
    )
    print("\r", end="")
    for each in (e for e in reported(results) if e["accepted_length"]):
        numbers = (each[name] for name in ("accepted_length", "tokens_per_forward", "speedup"))
        print(f"{each['contender']:40} {each['task']:10}", *(f"{estimate_text(number):20}" for number in numbers))
    for costs in results["cost_model"]["costs"]:
        one = costs["steps"]["1"]
        steps = ", ".join(f"{tokens}: {seconds / one:.2f}" for tokens, seconds in costs["steps"].items())
        print(f"a step over n tokens, in steps over one: {steps}")
    print(args.output / "report.md")


if __name__ == "__main__":
    main()
