"""
Plain against drafted decoding on one machine: accepted length, tokens per forward, wall-clock ratio, equality.

Every prompt is decoded plain and with the drafter in one process, in alternating order, and gives one ratio of
wall-clock times; a task's ratio is the median over its prompts, with a bootstrap interval over prompts. Absolute times
are reported but mean little on a shared machine.

    python benchmarks/decoding.py --tasks path/to/tasks --samples 20 --dtype bfloat16

A task is a file `NAME.jsonl` whose lines hold `turns`, a list of user messages; the first is decoded.
"""

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path

import torch
import transformers
from transformers import DynamicCache

import hf_dspark
from hf_dspark.hub import embedded_drafter, embedded_source, embedded_target, load_embedded_target


TASKS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=Path, required=True, help="folder of NAME.jsonl files")
    parser.add_argument("--drafter", default=None, help="folder or Hub id; the embedded drafter by default")
    parser.add_argument("--samples", type=int, default=20, help="prompts per task (a fixed random sample)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the target")
    parser.add_argument("--drafter-dtype", choices=("float32", "bfloat16"), default=None, help="the target's if unset")
    parser.add_argument("--num-assistant-tokens", type=int, default=None, help="drafts a round; the drafter's own")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None, help="results.json to write")
    return parser.parse_args()


def load_prompts(folder: Path, samples: int, seed: int) -> list[tuple[str, str]]:
    """A fixed sample of first turns per task, interleaved so that a drifting machine touches all tasks alike."""
    per_task = {}
    for task in TASKS:
        lines = [json.loads(line) for line in (folder / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()]
        random.Random(seed).shuffle(lines)
        per_task[task] = [(task, line["turns"][0]) for line in lines[:samples]]
    return [prompts[i] for i in range(samples) for prompts in per_task.values() if i < len(prompts)]


def timed(function, *args, **kwargs):
    start = time.perf_counter()
    output = function(*args, **kwargs)
    return output, time.perf_counter() - start


def first_mismatch(a: torch.Tensor, b: torch.Tensor) -> int | None:
    for i, (x, y) in enumerate(zip(a.tolist(), b.tolist())):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def is_tie(target, inputs, plain: torch.Tensor, other: torch.Tensor, position: int) -> bool:
    """Whether plain decoding's logits of the two tokens are within 2 units in the last place of bfloat16."""
    if position >= min(len(plain), len(other)):
        return False
    with torch.no_grad():
        logits = target(input_ids=plain[None, :position]).logits[0, -1]
    ours, theirs = (float(logits[sequence[position]]) for sequence in (plain, other))
    # bfloat16 has 8 significant bits.
    unit = 2.0 ** (torch.frexp(torch.tensor(max(abs(ours), abs(theirs)))).exponent.item() - 8)
    return abs(ours - theirs) <= 2 * unit


def measure(target, tokenizer, drafter, prompts, args) -> list[dict]:
    common = {"max_new_tokens": args.max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
    common["pad_token_id"] = tokenizer.pad_token_id
    drafted = {"assistant_model": drafter, "num_assistant_tokens": args.num_assistant_tokens}
    rows = []
    for index, (task, prompt) in enumerate([prompts[0], *prompts]):
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        runs = {"plain": {}, "drafted": drafted}
        order = list(runs) if index % 2 else list(reversed(runs))
        results = {name: timed(target.generate, **inputs, **common, **runs[name]) for name in order}
        if index == 0:
            continue  # warm-up
        (plain, plain_seconds), (output, seconds) = results["plain"], results["drafted"]
        mismatch = first_mismatch(plain.sequences[0], output.sequences[0])
        stats = output.speculation
        rows.append(
            {
                "task": task,
                "new_tokens": stats.generated_tokens,
                "plain_tokens": plain.sequences.shape[1] - inputs["input_ids"].shape[1],
                "plain_seconds": plain_seconds,
                "drafted_seconds": seconds,
                "draft_seconds": stats.draft_seconds,
                "target_seconds": stats.target_seconds,
                "total_seconds": stats.total_seconds,
                "accepted_lengths": stats.accepted_lengths[0],
                "target_forwards": stats.target_forwards,
                "proposed": stats.proposed,
                "verified": stats.verified,
                "accepted": stats.accepted,
                "equal": mismatch is None,
                "tie": mismatch is not None
                and is_tie(target, inputs, plain.sequences[0], output.sequences[0], mismatch),
            }
        )
        print(f"\r{index}/{len(prompts)}", end="", flush=True)
    print("\r", end="")
    return rows


def forward_costs(
    target, context: int = 200, sizes: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8), repeats: int = 9
) -> dict:
    """Median cost of a target forward over n tokens behind a context, in forwards over one; sizes interleaved."""
    cache = DynamicCache(config=target.config)
    tokens = torch.randint(
        target.config.vocab_size, (1, context + max(sizes)), generator=torch.Generator().manual_seed(0)
    )
    seconds = {size: [] for size in sizes}
    with torch.no_grad():
        target(tokens[:, :context], cache=cache, use_cache=True)
        for _ in range(repeats):
            for size in sizes:
                _, spent = timed(target, tokens[:, context : context + size], cache=cache, use_cache=True)
                cache.crop(-size)
                seconds[size].append(spent)
    one = statistics.median(seconds[1])
    return {size: statistics.median(values) / one for size, values in seconds.items()}


def speed_ratio(row: dict) -> float:
    """Drafted over plain tokens per second: outputs may differ in length after a tie in bfloat16."""
    plain_speed, drafted_speed = row["plain_tokens"] / row["plain_seconds"], row["new_tokens"] / row["drafted_seconds"]
    return drafted_speed / plain_speed


def bootstrap_median(values: list[float], seed: int, draws: int = 2000) -> tuple[float, float]:
    """95 % interval of the median, resampling prompts."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def summarise(rows: list[dict], seed: int) -> dict:
    ratios = [speed_ratio(row) for row in rows]
    lengths = [length for row in rows for length in row["accepted_lengths"]]
    total = sum(row["total_seconds"] for row in rows)
    verified = [sum(c) for c in zip(*(pad(row["verified"]) for row in rows))]
    accepted = [sum(c) for c in zip(*(pad(row["accepted"]) for row in rows))]
    return {
        "prompts": len(rows),
        "accepted_length": sum(lengths) / len(lengths),
        "tokens_per_forward": sum(r["new_tokens"] for r in rows) / sum(r["target_forwards"] for r in rows),
        "ratio": statistics.median(ratios),
        "ratio_interval": bootstrap_median(ratios, seed),
        "marginal_acceptance": [a / v for a, v in zip(accepted, verified) if v],
        "target_share": sum(row["target_seconds"] for row in rows) / total,
        "draft_share": sum(row["draft_seconds"] for row in rows) / total,
        "other_share": 1 - sum(row["target_seconds"] + row["draft_seconds"] for row in rows) / total,
        "equal": sum(row["equal"] for row in rows),
        "ties": sum(row["tie"] for row in rows),
    }


def pad(counts: list[int], length: int = 32) -> list[int]:
    return counts + [0] * (length - len(counts))


def main() -> None:
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    target, tokenizer = load_embedded_target(getattr(torch, args.dtype))
    drafter_dtype = getattr(torch, args.drafter_dtype or args.dtype)
    drafter = hf_dspark.AutoDrafter.from_pretrained(args.drafter or embedded_drafter(), dtype=drafter_dtype)
    rows = measure(target, tokenizer, drafter, load_prompts(args.tasks, args.samples, args.seed), args)
    summary = {task: summarise([r for r in rows if r["task"] == task], args.seed) for task in TASKS}
    summary["all"] = summarise(rows, args.seed)
    costs = forward_costs(target)
    report = {
        "settings": {key: str(value) for key, value in vars(args).items()},
        "versions": {
            "hf_dspark": hf_dspark.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "machine": {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
        "target": embedded_source(embedded_target()),
        "forward_costs": costs,
        "summary": summary,
        "prompts": rows,
    }
    print(f"{'task':10} {'prompts':>7} {'τ':>5} {'tok/fwd':>7} {'ratio':>6}  95 % interval   equal  ties")
    for task, s in summary.items():
        low, high = s["ratio_interval"]
        print(
            f"{task:10} {s['prompts']:7} {s['accepted_length']:5.2f} {s['tokens_per_forward']:7.2f} {s['ratio']:6.2f}"
            f"  {low:.2f} to {high:.2f}   {s['equal']:5} {s['ties']:5}"
        )
    s = summary["all"]
    print(
        f"time: target {s['target_share']:.1%}, draft {s['draft_share']:.1%}, everything else {s['other_share']:.1%}; "
        f"acceptance by position {', '.join(f'{a:.2f}' for a in s['marginal_acceptance'])}"
    )
    print("a forward over n tokens, in forwards over one: " + ", ".join(f"{n}: {c:.2f}" for n, c in costs.items()))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
