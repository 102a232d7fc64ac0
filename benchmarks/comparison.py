"""
The matched comparison of DSpark, DFlash and EAGLE-3 on the embedded target: same answers in the same order, same
feature layers, same draft vocabulary, block of 7, same optimiser settings. Then accepted length at temperatures 0 and
1 on the tasks of a folder, and the acceptance at each draft position as a plot (DSpark paper, figure 2).

    python benchmarks/comparison.py answers.jsonl --tasks tasks/ --output runs/comparison --updates 1500
    python benchmarks/comparison.py answers.jsonl --tasks tasks/ --output runs/comparison --updates 1500 --stage plot

    python benchmarks/comparison.py answers.jsonl --tasks tasks/ --output runs/longer --start runs/comparison

Every stage can be killed and started again with the same command: training goes on from the last checkpoint, the
evaluation from the last prompt. With `--start`, each drafter begins as an earlier comparison left it, with a new
schedule of the learning rate, and the tokens that it saw there are counted. The target runs once over the answers,
since its features are kept in `OUTPUT/features` (about 7 kB a token) and serve all drafters.

Answers are lines with `prompt_ids` and `completion_ids`, as `examples/write_answers.py` makes them. A task is a file
`NAME.jsonl` whose lines hold `turns`, a list of user messages; the first is decoded.

What differs is what defines the methods: EAGLE-3 has one layer and unrolls 7 steps over every supervised position; the
block drafters have `--layers` and `--anchors` blocks a sequence; each has the loss of its paper (`dspark-ce` is DSpark
with more cross-entropy: 0.5 / 0.9 / 0.5). All begin as the target's own last layers. `dspark-parallel`, named behind
`dspark`, is that drafter with its serial head taken out after training: what the head does for each draft position.
"""

import argparse
import copy
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers.trainer_utils import get_last_checkpoint

from hf_dspark import AutoDrafter, DFlashDrafter, DraftConfig, DraftTrainer, DSparkDrafter, Eagle3Drafter
from hf_dspark.evaluation.bootstrap import estimate, ratio, ratios, resamples
from hf_dspark.evaluation.tasks import load_tasks
from hf_dspark.files import write_whole
from hf_dspark.hub import embedded_source, embedded_target, load_embedded_target
from hf_dspark.machine import versions


BLOCK = 7
FEWEST = 50  # rounds that reached a position, for its share to be drawn
# class, fields of its config, loss settings of its training
DRAFTERS: dict[str, tuple[type, dict[str, Any], dict[str, float]]] = {
    "dspark": (DSparkDrafter, {"block_size": BLOCK}, {}),
    "dflash": (DFlashDrafter, {"block_size": BLOCK}, {}),
    "eagle3": (Eagle3Drafter, {"num_drafts": BLOCK}, {}),
    "dspark-ce": (
        DSparkDrafter,
        {"block_size": BLOCK},
        {"cross_entropy_weight": 0.5, "l1_weight": 0.9, "confidence_weight": 0.5},
    ),
}
PARALLEL = "dspark-parallel"  # derived, not trained
LABELS = {
    "dspark": "DSpark",
    "dflash": "DFlash",
    "eagle3": "EAGLE-3",
    "dspark-ce": "DSpark, more cross-entropy",
    PARALLEL: "DSpark, serial head taken out",
}
DOMAINS = {"math": ("gsm8k", "math500"), "code": ("humaneval", "mbpp"), "chat": ("mt-bench",)}
STAGES = ("train", "evaluate", "plot")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path, nargs="+", help="jsonl files with `prompt_ids` and `completion_ids`")
    parser.add_argument("--tasks", type=Path, required=True, help="folder of NAME.jsonl files")
    parser.add_argument("--output", type=Path, required=True, help="folder of checkpoints, results and plot")
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all", help="default: %(default)s")
    parser.add_argument(
        "--drafters", nargs="+", choices=LABELS, default=["dspark", "dflash", "eagle3"], help="in this order"
    )
    parser.add_argument("--updates", type=int, default=1500, help="optimiser steps of each (default: %(default)s)")
    parser.add_argument("--start", type=Path, help="folder of an earlier comparison, whose drafters are trained on")
    parser.add_argument("--batch", type=int, default=8, help="sequences an update (default: %(default)s)")
    parser.add_argument("--anchors", type=int, default=64, help="blocks a sequence (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="layers of block drafters (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=48, help="rank of the Markov head (default: %(default)s)")
    parser.add_argument("--draft-vocab-size", type=int, default=8192, help="default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="default: %(default)s")
    parser.add_argument(
        "--bf16", action="store_true", help="autocast in training, and weights in evaluation, in bfloat16"
    )
    parser.add_argument("--max-length", type=int, default=512, help="tokens of an example (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=64, help="answers kept out of training (default: %(default)s)")
    parser.add_argument(
        "--save-steps", type=int, default=50, help="updates between checkpoints (default: %(default)s)"
    )
    parser.add_argument(
        "--samples", type=int, default=20, help="prompts a task, a fixed sample (default: %(default)s)"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; torch's own choice by default")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.start is not None and args.start.resolve() == args.output.resolve():
        parser.error("--output must be another folder than --start, whose drafters stay as they are")
    is_there = (args.output / "dspark" / "final" / "training.json").exists()
    if PARALLEL in args.drafters and not is_there and "dspark" not in args.drafters[: args.drafters.index(PARALLEL)]:
        parser.error(f"{PARALLEL} is made of the trained dspark: name that before it")
    return args


# ---------------------------------------------------------------------- train


def load_answers(args: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """One example per prompt in a fixed random order: those to train on, those held out."""
    examples = {}
    for file in args.answers:
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if len(row["completion_ids"]) >= 4:
                examples.setdefault(tuple(row["prompt_ids"]), row)
    examples = list(examples.values())
    random.Random(args.seed).shuffle(examples)
    return examples[args.held_out :], examples[: args.held_out]


def to_dataset(rows: list[dict]) -> Dataset:
    return Dataset.from_list(
        [
            {
                "input_ids": row["prompt_ids"] + row["completion_ids"],
                "loss_mask": [0] * len(row["prompt_ids"]) + [1] * len(row["completion_ids"]),
            }
            for row in rows
        ]
    )


def fresh_drafter(name: str, target: Any, tokenizer: Any, rows: list[dict], args: argparse.Namespace) -> Any:
    counts = torch.zeros(target.config.vocab_size, dtype=torch.long)
    for row in rows:
        counts += torch.bincount(torch.tensor(row["completion_ids"]), minlength=len(counts))
    drafter_class, fields, _ = DRAFTERS[name]
    if drafter_class is not Eagle3Drafter:
        mask = tokenizer.convert_tokens_to_ids("<repo_name>")
        fields = fields | {"num_hidden_layers": args.layers, "mask_token_id": mask}
    if drafter_class is DSparkDrafter:
        fields = fields | {"markov_rank": args.rank}
    torch.manual_seed(args.seed)
    return drafter_class.from_target(
        target, tokenizer=tokenizer, draft_vocab_size=args.draft_vocab_size, token_counts=counts, **fields
    )


def seen_before(name: str, args: argparse.Namespace) -> int:
    """Answer tokens that the drafter saw in the comparison it begins from."""
    if args.start is None:
        return 0
    return json.loads((args.start / name / "final" / "training.json").read_text())["answer_tokens_seen"]


def train(name: str, args: argparse.Namespace) -> None:
    folder = args.output / name
    if (folder / "final" / "training.json").exists():
        print(f"{name}: trained already")
        return
    target, tokenizer = load_embedded_target()
    rows, held_out = load_answers(args)
    if args.start is None:
        drafter = fresh_drafter(name, target, tokenizer, rows, args)
    else:
        drafter = AutoDrafter.from_pretrained(args.start / name / "final", dtype=torch.float32)
    seen = seen_before(name, args)
    trainer = DraftTrainer(
        model=drafter,
        target_model=target,
        args=DraftConfig(
            output_dir=str(folder),
            per_device_train_batch_size=args.batch,
            per_device_eval_batch_size=args.batch,
            max_steps=args.updates,
            num_anchors=args.anchors,
            learning_rate=args.learning_rate,
            adam_beta2=0.98,
            max_length=args.max_length,
            bf16=args.bf16 or None,  # `None` leaves it to the device
            use_cpu=not torch.accelerator.is_available(),  # else transformers refuses bfloat16 there
            train_sampling_strategy="group_by_length",
            feature_store=str(args.output / "features"),
            eval_strategy="steps" if held_out else "no",
            eval_steps=max(args.updates // 5, 1),
            eval_prompts=0,  # decoding has a stage of its own
            save_steps=args.save_steps,
            save_total_limit=2,
            seed=args.seed + (1 if args.start is None else 2),  # another order than the start had
            report_to="none",
            disable_tqdm=True,
            **DRAFTERS[name][2],
        ),
        train_dataset=to_dataset(rows),
        eval_dataset=to_dataset(held_out) if held_out else None,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.is_dir() else None)
    parameters = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    drafter.to(torch.bfloat16).save_pretrained(folder / "final")
    tokens = sum(len(row["completion_ids"]) for row in rows)
    record = {
        "drafter": name,
        "parameters": parameters,
        "answers": len(rows),
        "answer_tokens": tokens,
        "answer_tokens_seen": seen + round(tokens * args.updates * args.batch / len(rows)),
        "log": trainer.state.log_history,
    }
    write_whole(folder / "final" / "training.json", json.dumps(record, indent=1) + "\n")


def take_out_serial_head(args: argparse.Namespace) -> None:
    """The trained DSpark drafter without its serial head, and without the confidence head that reads from it."""
    trained = AutoDrafter.from_pretrained(args.output / "dspark" / "final", dtype=torch.bfloat16)
    config = copy.deepcopy(trained.config)
    config.markov_rank, config.enable_confidence_head = 0, False
    drafter = DSparkDrafter(config).to(torch.bfloat16)
    kept = drafter.state_dict().keys()
    drafter.load_state_dict({name: value for name, value in trained.state_dict().items() if name in kept})
    folder = args.output / PARALLEL / "final"
    drafter.save_pretrained(folder)
    record = json.loads((args.output / "dspark" / "final" / "training.json").read_text())
    record |= {"drafter": PARALLEL, "parameters": sum(p.numel() for p in drafter.parameters() if p.requires_grad)}
    write_whole(folder / "training.json", json.dumps(record, indent=1) + "\n")


# ---------------------------------------------------------------------- evaluate


def load_prompts(args: argparse.Namespace) -> list[tuple[str, int, str]]:
    """Task, number and text of a fixed sample of first turns."""
    prompts = []
    for task in load_tasks([args.tasks]):
        # Drawn here, so that numbers in results of earlier runs name the same prompts.
        random.Random(args.seed).shuffle(task.prompts)
        prompts += [(task.name, i, prompt.turns[0]) for i, prompt in enumerate(task.prompts[: args.samples])]
    return prompts


def read_results(args: argparse.Namespace) -> list[dict]:
    file = args.output / "evaluation.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    results = []
    for line in lines:
        try:
            results.append(json.loads(line))
        except json.JSONDecodeError:  # the line that a killed run was writing
            continue
    return results


def key(result: dict) -> tuple:
    names = ("drafter", "temperature", "task", "number", "max_new_tokens")
    return tuple(result[name] for name in names)


def evaluate(args: argparse.Namespace) -> None:
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    target, tokenizer = load_embedded_target(dtype=dtype)
    done = {key(result) for result in read_results(args)}
    prompts = load_prompts(args)
    for name in args.drafters:
        drafter = AutoDrafter.from_pretrained(args.output / name / "final", dtype=dtype)
        for temperature in args.temperatures:
            sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
            for task, number, text in prompts:
                result = {"drafter": name, "temperature": temperature, "task": task, "number": number}
                result["max_new_tokens"] = args.max_new_tokens
                if key(result) in done:
                    continue
                inputs = tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}],
                    add_generation_prompt=True,
                    return_dict=True,
                    return_tensors="pt",
                )
                torch.manual_seed(number)
                started = time.perf_counter()
                output = target.generate(
                    **inputs,
                    assistant_model=drafter,
                    verification_schedule="fixed",
                    prompt_lookup_num_tokens=0,
                    max_new_tokens=args.max_new_tokens,
                    pad_token_id=tokenizer.pad_token_id,
                    return_dict_in_generate=True,
                    **sampling,
                )
                stats = output.speculation
                for field in ("accepted_lengths", "verified", "reached", "accepted", "generated_tokens"):
                    result[field] = getattr(stats, field)
                result["seconds"] = time.perf_counter() - started
                # A line of its own: what a killed run leaves half-written does not spoil the next.
                with open(args.output / "evaluation.jsonl", "a", encoding="utf-8") as file:
                    file.write("\n" * bool(file.tell()) + json.dumps(result))
            print(f"{name}, temperature {temperature:g}: {accepted_length(args, name, temperature):.2f}", flush=True)


def accepted_length(args: argparse.Namespace, name: str, temperature: float) -> float:
    chosen = [r for r in read_results(args) if r["drafter"] == name and r["temperature"] == temperature]
    return pooled(chosen)["accepted_length"]


def pooled(results: list[dict]) -> dict[str, Any]:
    """The metrics over all rounds of some prompts."""
    lengths = [n for result in results for row in result["accepted_lengths"] for n in row]
    totals = {}
    for field in ("verified", "reached", "accepted"):
        totals[field] = [sum(r[field][k] if k < len(r[field]) else 0 for r in results) for k in range(BLOCK)]
    return {
        "prompts": len(results),
        "rounds": len(lengths),
        "accepted_length": sum(lengths) / len(lengths) if lengths else float("nan"),
        "reached": totals["reached"],
        "conditional_acceptance": [a / n if n else None for a, n in zip(totals["accepted"], totals["reached"])],
        "marginal_acceptance": [a / n if n else None for a, n in zip(totals["accepted"], totals["verified"])],
    }


def difference(results: list[dict], ours: str, theirs: str, seed: int) -> tuple[float, ...]:
    """
    By how much the accepted length of one drafter, as the mean over tasks, exceeds another's, with a 95 % interval
    over prompts: both drafters are resampled on the same prompts.
    """
    totals = {}  # tokens and rounds of each drafter, task and prompt
    for result in results:
        lengths = [n for row in result["accepted_lengths"] for n in row]
        totals[result["drafter"], result["task"], result["number"]] = sum(lengths), len(lengths)
    shared: dict[str, list[int]] = {}
    for name, task, number in totals:
        if name == ours and (theirs, task, number) in totals:
            shared.setdefault(task, []).append(number)
    if not shared:
        return (float("nan"),) * 3
    means = {}
    for name in (ours, theirs):
        values, drawn = [], []
        for i, (task, numbers) in enumerate(sorted(shared.items())):
            tokens, rounds = np.array([totals[name, task, number] for number in sorted(numbers)]).T
            values.append(ratio(tokens, rounds))
            drawn.append(ratios(tokens, rounds, resamples(len(numbers), seed + i)))
        means[name] = np.mean(values), np.mean(drawn, axis=0)
    excess, drawn = (first / second - 1 for first, second in zip(means[ours], means[theirs]))
    return tuple(estimate(float(excess), drawn).values())


def chosen_results(args: argparse.Namespace) -> list[dict]:
    """Those of this call's prompts and drafters: a shorter or longer evaluation in the same folder is another one."""
    numbers = {(task, number) for task, number, _ in load_prompts(args)}
    results = [r for r in read_results(args) if r["max_new_tokens"] == args.max_new_tokens]
    return [r for r in results if (r["task"], r["number"]) in numbers and r["drafter"] in args.drafters]


def report(args: argparse.Namespace) -> dict[str, Any]:
    results = chosen_results(args)
    tasks = sorted({result["task"] for result in results})
    table: dict[str, Any] = {}
    print(f"\n{'accepted length':28}" + "".join(f"{task:>11}" for task in tasks) + f"{'mean':>9}")
    for temperature in args.temperatures:
        here = [r for r in results if r["temperature"] == temperature]
        scores = table[f"temperature {temperature:g}"] = {}
        for name in args.drafters:
            per_task = {t: pooled([r for r in here if r["drafter"] == name and r["task"] == t]) for t in tasks}
            means = [p["accepted_length"] for p in per_task.values() if p["rounds"]]
            scores[name] = {"mean": statistics.mean(means) if means else None, "tasks": per_task}
            row = "".join(f"{per_task[t]['accepted_length']:11.2f}" for t in tasks)
            print(f"T={temperature:<4g}{LABELS[name]:22} {row}{scores[name]['mean'] or float('nan'):9.2f}")
        first = args.drafters[0]
        for name in args.drafters[1:]:
            excess, low, high = difference(here, first, name, args.seed)
            scores[name][f"{first} exceeds it by"] = [excess, low, high]
            print(f"      {LABELS[first]} over {LABELS[name]}: {excess:+.1%} ({low:+.1%} to {high:+.1%})")
    training = {}
    for name in args.drafters:
        file = args.output / name / "final" / "training.json"
        training[name] = json.loads(file.read_text()) if file.exists() else None
    summary = {
        "settings": {name: str(value) for name, value in vars(args).items()},
        "versions": versions(),
        "target": embedded_source(embedded_target()),
        "results": table,
        "training": training,
    }
    write_whole(args.output / "comparison.json", json.dumps(summary, indent=1) + "\n")
    return summary


# ---------------------------------------------------------------------- plot


def plot(args: argparse.Namespace) -> None:
    """
    Conditional acceptance against draft position, a line per drafter, a panel per domain and temperature. Positions
    that few rounds reached are left out: their shares are chance.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    report(args)
    results = chosen_results(args)
    tasks = {result["task"] for result in results}
    domains = {domain: names for domain, names in DOMAINS.items() if tasks & set(names)}
    known = {task for names in DOMAINS.values() for task in names}
    domains |= {task: (task,) for task in sorted(tasks - known)}
    figure, panels = pyplot.subplots(
        len(args.temperatures),
        len(domains),
        figsize=(3.4 * len(domains), 2.9 * len(args.temperatures)),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    positions = range(1, BLOCK + 1)
    for row, temperature in zip(panels, args.temperatures):
        for panel, (domain, names) in zip(row, domains.items()):
            for drafter, marker in zip(args.drafters, "os^Dv"):
                chosen = [r for r in results if r["drafter"] == drafter and r["temperature"] == temperature]
                found = pooled([r for r in chosen if r["task"] in names])
                shares = [
                    share if n >= FEWEST else float("nan")
                    for share, n in zip(found["conditional_acceptance"], found["reached"])
                ]
                panel.plot(positions, shares, marker=marker, markersize=4, label=LABELS[drafter])
            panel.set_title(f"{domain}, temperature {temperature:g}", fontsize=10)
            panel.set_ylim(0, 1)
            panel.set_xticks(positions)
            panel.grid(alpha=0.3)
    for panel in panels[-1]:
        panel.set_xlabel("draft position")
    for row in panels:
        row[0].set_ylabel("conditional acceptance")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=9, loc="upper center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    file = args.output / "conditional_acceptance.png"
    figure.savefig(file, dpi=150)
    print(f"\n{file}")


def main() -> None:
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    args.output.mkdir(parents=True, exist_ok=True)
    stages = STAGES if args.stage == "all" else (args.stage,)
    if "train" in stages:
        for name in args.drafters:
            if name == PARALLEL:
                take_out_serial_head(args)
            else:
                train(name, args)
    if "evaluate" in stages:
        evaluate(args)
    if "plot" in stages:
        plot(args)


if __name__ == "__main__":
    main()
