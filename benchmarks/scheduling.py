"""
Schedules on one machine: throughput by load, thresholds, transformers' own DFlash, and where the time goes.

    python benchmarks/scheduling.py load --data FOLDER --output runs/scheduling --threads 2
    python benchmarks/scheduling.py thresholds --data FOLDER --output runs/scheduling --threads 2
    python benchmarks/scheduling.py overhead --data FOLDER --output runs/scheduling --threads 2
    python benchmarks/scheduling.py dflash --data FOLDER --output runs/scheduling --threads 2 --dflash DRAFTER

FOLDER holds `NAME.jsonl` files whose lines have `turns`, a list of user messages; the first is decoded. Every part
writes into OUTPUT/results.json as it goes, and goes on where it was stopped when called again with the same options.

- load: plain decoding, plain decoding with the packed linear layers that a drafter brings on some CPUs, the whole
  block, the confidence and the throughput schedule, for several numbers of rows. A block is one batch of prompts
  decoded by all in turn, in an order that rotates; rates are of decoding alone, the prompts' own forward apart. Ratios
  are medians over blocks, with bootstrap intervals over blocks; the best other is one of plain decoding, whole block
  and confidence, and packed layers are compared with apart. The machine is measured first (`hf-dspark profile`),
  unless it has been.
- thresholds: accepted and rejected drafts a round and the acceptance rate for thresholds 0 to 0.9, by domain.
- overhead: what is neither target nor draft forward at 1 and 16 rows, and drafting's share of a round by context.
- dflash: a masks-only DFlash drafter in our loop against transformers' own loop around the same weights, batch 1.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from transformers.utils import ModelOutput

import hf_dspark
from hf_dspark import fast_linear_layers
from hf_dspark.evaluation.plots import save, style
from hf_dspark.files import write_whole
from hf_dspark.generation.profile import pair_conditions, stored_profile
from hf_dspark.generation.profiling import profile_throughput
from hf_dspark.hub import embedded_drafter, embedded_source, embedded_target, load_embedded_target
from hf_dspark.machine import versions


PLAIN, PACKED = "plain", "plain, packed layers"
DOMAINS = {"math": ("gsm8k", "math500"), "code": ("humaneval", "mbpp"), "chat": ("mt-bench",)}
PARTS = ("load", "thresholds", "overhead", "dflash")
CONSOLE = Console(highlight=False)
if not CONSOLE.is_terminal:
    CONSOLE.width = 140  # tables in a log are not to be squeezed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--data", type=Path, required=True, help="folder of NAME.jsonl files")
    parser.add_argument("--output", type=Path, required=True, help="folder for results.json and plots")
    parser.add_argument("--drafter", default=None, help="folder or Hub id; the embedded drafter by default")
    parser.add_argument("--dflash", default=None, help="masks-only DFlash drafter, for that part")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--blocks", type=int, default=5, help="batches for each number of rows; fewer from 8 rows on")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-prompt-tokens", type=int, default=128, help="longer prompts are left out")
    parser.add_argument("--threshold", type=float, default=0.5, help="of the confidence schedule under load")
    parser.add_argument("--samples", type=int, default=3, help="prompts a domain (thresholds) or in all (dflash)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 6000])
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


# ---------------------------------------------------------------------- prompts, results


def load_prompts(args: argparse.Namespace, tokenizer: Any) -> dict[str, list[str]]:
    """Per domain the chat prompts that are short enough, shuffled; tasks take turns within a domain."""
    files = {file.stem: file for file in sorted(args.data.glob("*.jsonl"))} if args.data.is_dir() else {}
    if not files:
        raise SystemExit(f"No NAME.jsonl in {args.data}. Name a folder of them with --data; their lines hold `turns`.")
    domain_of = {task: domain for domain, tasks in DOMAINS.items() for task in tasks}
    prompts: dict[str, list[tuple[int, str]]] = {}
    for task, file in files.items():
        turns = [json.loads(line)["turns"][0] for line in file.read_text(encoding="utf-8").splitlines()]
        random.Random(args.seed).shuffle(turns)
        chats = (
            tokenizer.apply_chat_template(
                [{"role": "user", "content": turn}], tokenize=False, add_generation_prompt=True
            )
            for turn in turns
        )
        short = [chat for chat in chats if len(tokenizer(chat)["input_ids"]) <= args.max_prompt_tokens]
        prompts.setdefault(domain_of.get(task, task), []).extend(enumerate(short))
    return {domain: [chat for _, chat in sorted(chats)] for domain, chats in prompts.items()}


def mixed(prompts: dict[str, list[str]], count: int) -> list[str]:
    """Prompts of all domains in turns; they come round again if there are too few."""
    most = max(map(len, prompts.values()))
    turns = [chats[i] for i in range(most) for chats in prompts.values() if i < len(chats)]
    return [turns[i % len(turns)] for i in range(count)]


class Results:
    """results.json, written whole after every step; with other settings a part starts anew."""

    def __init__(self, args: argparse.Namespace, target: Any) -> None:
        self.file = args.output / "results.json"
        self.content = json.loads(self.file.read_text()) if self.file.exists() else {}
        about = {
            "settings": {k: str(v) for k, v in vars(args).items() if k not in ("part", "output", "blocks", "rows")},
            "versions": versions(),
            "machine": pair_conditions(target, None),
            "target": embedded_source(embedded_target()),
        }
        part = self.content.get(args.part)
        if part is None or part["about"] != about:
            part = self.content[args.part] = {"about": about, "runs": []}
        self.runs = part["runs"]
        self.part = part

    def find(self, **key: Any) -> list[dict[str, Any]]:
        return [run for run in self.runs if all(run[name] == value for name, value in key.items())]

    def add(self, run: dict[str, Any]) -> None:
        self.runs.append(run)
        self.write()

    def write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.file, json.dumps(self.content, indent=1))


# ---------------------------------------------------------------------- decoding


class PrefillClock:
    """Notes when the first forward of a target, that over the prompts, ended."""

    def __init__(self, target: nn.Module) -> None:
        self.target = target

    def __enter__(self) -> "PrefillClock":
        self.ended: float | None = None
        self.handle = self.target.register_forward_hook(self._note)
        return self

    def _note(self, *_: Any) -> None:
        self.ended = time.perf_counter() if self.ended is None else self.ended

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()


def decode(target: Any, tokenizer: Any, chats: list[str], args: argparse.Namespace, **kwargs: Any) -> dict[str, Any]:
    """Greedy answers to a batch, and the seconds of decoding them, prompts apart."""
    inputs = tokenizer(chats, return_tensors="pt", padding=True, padding_side="left")
    with PrefillClock(target) as clock:
        output = target.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=args.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            return_dict_in_generate=True,
            **kwargs,
        )
        seconds = time.perf_counter() - clock.ended
    answers = output.sequences[:, inputs["input_ids"].shape[1] :]
    ends = torch.tensor(tokenizer.eos_token_id)
    tokens = sum(int((row == ends).nonzero()[0]) + 1 if bool((row == ends).any()) else len(row) for row in answers)
    run: dict[str, Any] = {"tokens": tokens, "seconds": seconds}
    if hasattr(output, "speculation"):
        stats = output.speculation
        steps = sum(len(each.rows) for each in stats.history)
        run |= {
            "verified": sum(stats.verified) / max(steps, 1),
            "accepted": sum(stats.accepted) / max(steps, 1),
            "drafting_rounds": sum(each.proposed > 0 for each in stats.history) / max(len(stats.history), 1),
            "accepted_length": stats.mean_accepted_length,
            "draft_seconds": stats.draft_seconds,
            "target_seconds": stats.target_seconds,
            "total_seconds": stats.total_seconds,
        }
    return run


def bootstrap_median(values: list[float], seed: int, draws: int = 2000) -> tuple[float, float]:
    """95 % interval of the median, resampling blocks."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


# ---------------------------------------------------------------------- load


def run_load(args: argparse.Namespace, target: Any, tokenizer: Any, results: Results) -> None:
    drafter = load_drafter(args.drafter, target)
    if stored_profile(target, drafter.attach(target)) is None:
        profile_throughput(target, drafter, args.rows)
    profile = stored_profile(target, drafter)
    results.part["profile"] = {"step_seconds": profile.step_seconds, "draft_seconds": profile.draft_seconds}
    contenders = {
        PLAIN: {},
        PACKED: {},
        "whole block": {"verification_schedule": "fixed"},
        "confidence": {"verification_schedule": "confidence", "assistant_confidence_threshold": args.threshold},
        "throughput": {"verification_schedule": "throughput"},
    }
    for name in ("whole block", "confidence", "throughput"):
        contenders[name]["num_assistant_tokens"] = drafter.num_drafts
    prompts = load_prompts(args, tokenizer)
    work = [(rows, block) for rows in args.rows for block in range(blocks_of(args, rows))]
    decode(target, tokenizer, mixed(prompts, 1), args, assistant_model=drafter)  # warm-up
    for rows, block in track(work, "Decoding", console=CONSOLE):
        if results.find(rows=rows, block=block):
            continue
        chats = mixed(prompts, (block + 1) * rows)[block * rows :]
        names = list(contenders)
        names = names[block % len(names) :] + names[: block % len(names)]
        runs = {}
        for name in names:
            extra = {"assistant_model": drafter, **contenders[name]} if contenders[name] else {}
            with fast_linear_layers(target if name == PACKED else None):
                runs[name] = decode(target, tokenizer, chats, args, **extra)
        results.add({"rows": rows, "block": block, "order": names, "runs": runs})
    results.part["summary"] = summary = [summarise_load(args, results.find(rows=rows), rows) for rows in args.rows]
    results.write()
    CONSOLE.print(load_table(summary, list(contenders)))
    save(load_plot(summary, list(contenders)), args.output / "load.png")


def blocks_of(args: argparse.Namespace, rows: int) -> int:
    """Large batches are steadier and take longer."""
    return args.blocks if rows < 8 else max(2, args.blocks // 2)


def summarise_load(args: argparse.Namespace, blocks: list[dict[str, Any]], rows: int) -> dict[str, Any]:
    """Rates and ratios of each contender at one number of rows, paired by block."""
    summary: dict[str, Any] = {"rows": rows, "blocks": len(blocks), "contenders": {}}
    rates = {
        name: [b["runs"][name]["tokens"] / b["runs"][name]["seconds"] for b in blocks] for name in blocks[0]["runs"]
    }
    medians = {name: statistics.median(values) for name, values in rates.items()}
    # Packed layers are told apart: they come with a drafter, but plain decoding can have them alone.
    best = max((name for name in rates if name not in ("throughput", PACKED)), key=medians.get)
    for name, values in rates.items():
        ratios = {}
        for against, other in (("to_plain", PLAIN), ("to_best_other", best), ("to_packed", PACKED)):
            paired = [rate / theirs for rate, theirs in zip(values, rates[other])]
            ratios |= {against: statistics.median(paired), f"{against}_interval": bootstrap_median(paired, args.seed)}
        summary["contenders"][name] = {
            "tokens_per_second": medians[name],
            **ratios,
            "verified": statistics.mean(b["runs"][name].get("verified", 0.0) for b in blocks),
            "drafting_rounds": statistics.mean(b["runs"][name].get("drafting_rounds", 0.0) for b in blocks),
            "accepted_length": statistics.mean(b["runs"][name].get("accepted_length", 1.0) for b in blocks),
        }
    return summary | {"best_other": best}


def load_table(summary: list[dict[str, Any]], names: list[str]) -> Table:
    table = Table(title="Tokens a second by rows, and throughput's ratios (95 % interval)", title_justify="left")
    for column in ("rows", *names, "/ plain", "/ best other", "/ packed", "verified a row"):
        table.add_column(column, justify="right")
    for each in summary:
        of = each["contenders"]
        ours = of["throughput"]
        ratios = []
        for other in ("to_plain", "to_best_other", "to_packed"):
            low, high = ours[f"{other}_interval"]
            ratios.append(f"{ours[other]:.3f} ({low:.3f} to {high:.3f})")
        rates = (f"{of[name]['tokens_per_second']:.1f}" for name in names)
        table.add_row(str(each["rows"]), *rates, *ratios, f"{ours['verified']:.2f}")
    return table


def load_plot(summary: list[dict[str, Any]], names: list[str]) -> Any:
    """The axes of the DSpark paper's figure 8: throughput, and below it the mean verified drafts, against load."""
    rows = [each["rows"] for each in summary]
    with style() as plt:
        figure, (above, below) = plt.subplots(2, 1, figsize=(5.2, 5.0), sharex=True, height_ratios=(2, 1))
        for name in names:
            of = [each["contenders"][name] for each in summary]
            above.plot(rows, [each["tokens_per_second"] for each in of], marker="o", markersize=4, label=name)
            if name not in (PLAIN, PACKED):
                color = above.lines[-1].get_color()
                below.plot(rows, [each["verified"] for each in of], marker="o", markersize=4, color=color)
        above.set(ylabel="tokens a second, all rows", ylim=(0, None))
        above.legend()
        below.set(xlabel="rows decoding together", ylabel="verified drafts a row", ylim=(0, None))
        below.set_xscale("log", base=2)
        below.set_xticks(rows, [str(number) for number in rows])
        below.minorticks_off()
        return figure


# ---------------------------------------------------------------------- thresholds


def run_thresholds(args: argparse.Namespace, target: Any, tokenizer: Any, results: Results) -> None:
    drafter = load_drafter(args.drafter, target)
    prompts = load_prompts(args, tokenizer)
    thresholds = [round(0.1 * i, 1) for i in range(10)]
    work = [(domain, i, t) for domain in prompts for i in range(args.samples) for t in thresholds]
    for domain, sample, threshold in track(work, "Decoding", console=CONSOLE):
        if results.find(domain=domain, sample=sample, threshold=threshold):
            continue
        schedule = {"assistant_confidence_threshold": threshold, "num_assistant_tokens": drafter.num_drafts}
        chats = mixed({domain: prompts[domain]}, sample + 1)[sample:]
        run = decode(target, tokenizer, chats, args, assistant_model=drafter, **schedule)
        results.add({"domain": domain, "sample": sample, "threshold": threshold, **run})
    table = Table(title="Drafts a round by threshold: accepted + rejected (acceptance rate)", title_justify="left")
    table.add_column("threshold", justify="right")
    summary: dict[str, list[tuple[float, float]]] = {}
    for domain in prompts:
        table.add_column(domain, justify="right")
        runs = [results.find(domain=domain, threshold=t) for t in thresholds]
        summary[domain] = [
            tuple(statistics.mean(run[what] for run in group) for what in ("accepted", "verified")) for group in runs
        ]
    for i, threshold in enumerate(thresholds):
        cells = ((accepted, verified) for accepted, verified in (summary[domain][i] for domain in prompts))
        table.add_row(
            f"{threshold:.1f}", *(f"{a:.2f} + {v - a:.2f} ({f'{a / v:.0%}' if v else '-'})" for a, v in cells)
        )
    results.part["summary"] = summary
    results.write()
    CONSOLE.print(table)
    save(threshold_plot(summary, thresholds), args.output / "thresholds.png")


def threshold_plot(summary: dict[str, list[tuple[float, float]]], thresholds: list[float]) -> Any:
    """The DSpark paper's figure 5."""
    with style() as plt:
        figure, axes = plt.subplots(1, len(summary), figsize=(3.1 * len(summary), 3.0), sharey=True, squeeze=False)
        for i, (panel, (domain, values)) in enumerate(zip(axes[0], summary.items())):
            accepted, rejected = [a for a, _ in values], [v - a for a, v in values]
            panel.bar(thresholds, accepted, width=0.07, label="accepted")
            panel.bar(thresholds, rejected, width=0.07, bottom=accepted, label="rejected", alpha=0.6)
            panel.set(title=domain, xlabel="threshold")
            rate = panel.twinx()
            rate.plot(
                thresholds,
                [a / v if v else float("nan") for a, v in values],
                color="#333333",
                marker="o",
                markersize=3,
                label="acceptance rate",
            )
            rate.set(ylim=(0, 1))
            rate.grid(False)
            if i == 0:
                panel.set_ylabel("drafts a round")
            if i == len(summary) - 1:
                rate.set_ylabel("acceptance rate")
                rate.spines["right"].set_visible(True)
            else:
                rate.set_yticklabels([])
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
        return figure


# ---------------------------------------------------------------------- overhead and long contexts


def run_overhead(args: argparse.Namespace, target: Any, tokenizer: Any, results: Results) -> None:
    drafter = load_drafter(args.drafter, target)
    prompts = load_prompts(args, tokenizer)
    for rows in track((1, 16), "Overhead", console=CONSOLE):
        for block in range(3):
            if not results.find(kind="overhead", rows=rows, block=block):
                chats = mixed(prompts, (block + 1) * rows)[block * rows :]
                run = decode(target, tokenizer, chats, args, assistant_model=drafter, verification_schedule="fixed")
                results.add({"kind": "overhead", "rows": rows, "block": block, **run})
    for context in track(args.contexts, "Contexts", console=CONSOLE):
        if not results.find(kind="context", context=context):
            profile = profile_throughput(target, drafter, (1,), context, seconds=0, progress=False, store=False)
            number = drafter.num_drafts
            draft, step = profile.draft_seconds[1][number], profile.step_seconds[1][number + 1]
            results.add({"kind": "context", "context": context, "draft": draft, "step": step})
    table = Table(title="Neither target nor draft forward", title_justify="left")
    table.add_column("rows", justify="right")
    table.add_column("share of the time", justify="right")
    for rows in (1, 16):
        runs = results.find(kind="overhead", rows=rows)
        shares = [1 - (r["draft_seconds"] + r["target_seconds"]) / r["total_seconds"] for r in runs]
        table.add_row(str(rows), f"{statistics.median(shares):.1%}")
    CONSOLE.print(table)
    contexts = sorted(results.find(kind="context"), key=lambda run: run["context"])
    table = Table(title="A round over the whole block, by context", title_justify="left")
    for column in ("context", "drafting, ms", "step, ms", "drafting's share"):
        table.add_column(column, justify="right")
    for run in contexts:
        share = run["draft"] / (run["draft"] + run["step"])
        table.add_row(str(run["context"]), f"{1000 * run['draft']:.1f}", f"{1000 * run['step']:.1f}", f"{share:.1%}")
    CONSOLE.print(table)
    with style() as plt:
        figure, axes = plt.subplots(figsize=(4.6, 3.0))
        shares = [run["draft"] / (run["draft"] + run["step"]) for run in contexts]
        axes.plot([run["context"] for run in contexts], shares, marker="o", markersize=4)
        axes.set(xlabel="context, tokens", ylabel="drafting's share of a round", ylim=(0, None))
        save(figure, args.output / "contexts.png")


# ---------------------------------------------------------------------- transformers' own DFlash


class DFlashAssistant(nn.Module):
    """
    Our DFlash drafter as transformers' DFlash loop calls an assistant: same weights, same forward, their loop. Their
    cache is told how many positions there are and otherwise left alone; ours holds the keys and values.
    """

    def __init__(self, drafter: Any) -> None:
        super().__init__()
        self.config, self.generation_config = drafter.config, drafter.generation_config
        object.__setattr__(self, "drafter", drafter)

    @property
    def device(self) -> torch.device:
        return self.drafter.device

    @property
    def dtype(self) -> torch.dtype:
        return self.drafter.dtype

    def forward(self, noise_embeds: torch.Tensor, context_hidden_states: torch.Tensor, cache: Any, **_: Any) -> Any:
        if not hasattr(cache, "ours"):
            cache.ours = self.drafter.new_cache()
        self.drafter.extend(cache.ours, context_hidden_states, None)
        anchors = torch.zeros(1, dtype=torch.long, device=noise_embeds.device)
        self.drafter.block_input = lambda _: noise_embeds
        try:
            hidden = self.drafter.block_hidden(cache.ours, anchors)
        finally:
            del self.drafter.block_input
        return ModelOutput(last_hidden_state=hidden)


def run_dflash(args: argparse.Namespace, target: Any, tokenizer: Any, results: Results) -> None:
    if args.dflash is None:
        raise SystemExit("Name a masks-only DFlash drafter with --dflash.")
    drafter = load_drafter(args.dflash, target).attach(target)
    if drafter.config.model_type != "dflash" or drafter.config.sample_from_anchor:
        raise SystemExit(f"{args.dflash} is no masks-only DFlash drafter; transformers' loop takes no other.")
    contenders = {
        "ours": {"assistant_model": drafter, "verification_schedule": "fixed"},
        "transformers": {"assistant_model": DFlashAssistant(drafter), "speculation_type": "dflash"},
    }
    chats = mixed(load_prompts(args, tokenizer), args.samples)
    for name in contenders:  # warm-up
        decode(target, tokenizer, chats[:1], args, **contenders[name])
    for sample, chat in enumerate(track(chats, "Decoding", console=CONSOLE)):
        if results.find(sample=sample):
            continue
        names = list(contenders) if sample % 2 else list(reversed(contenders))
        runs = {}
        for name in names:
            with Forwards(target) as forwards:
                runs[name] = decode(target, tokenizer, [chat], args, **contenders[name])
            # Committed tokens a round: one forward is the prompt's, whose token belongs to no round.
            runs[name]["accepted_length"] = (runs[name]["tokens"] - 1) / max(forwards.count - 1, 1)
        results.add({"sample": sample, "runs": runs})
    ratios = [r["runs"]["transformers"]["seconds"] / r["runs"]["ours"]["seconds"] for r in results.runs]
    low, high = bootstrap_median(ratios, args.seed)
    table = Table(title="The same DFlash weights, batch 1", title_justify="left")
    for column in ("loop", "accepted length", "tokens a second"):
        table.add_column(column, justify="right")
    for name in contenders:
        runs = [r["runs"][name] for r in results.runs]
        rate = sum(run["tokens"] for run in runs) / sum(run["seconds"] for run in runs)
        table.add_row(name, f"{statistics.mean(run['accepted_length'] for run in runs):.3f}", f"{rate:.1f}")
    CONSOLE.print(table)
    CONSOLE.print(f"Ours is {statistics.median(ratios):.3f} (95 % interval {low:.3f} to {high:.3f}) times as fast.")


class Forwards:
    """Counts the forwards of a target."""

    def __init__(self, target: nn.Module) -> None:
        self.target = target

    def __enter__(self) -> "Forwards":
        self.count = 0
        self.handle = self.target.register_forward_pre_hook(self._note)
        return self

    def _note(self, *_: Any) -> None:
        self.count += 1

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()


def load_drafter(name: str | None, target: Any) -> Any:
    drafter = hf_dspark.AutoDrafter.from_pretrained(name or embedded_drafter(), dtype=target.dtype).eval()
    # What is measured is drafting; copies from the text would come on top.
    drafter.generation_config.prompt_lookup_num_tokens = None
    return drafter


def main() -> None:
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    target, tokenizer = load_embedded_target(getattr(torch, args.dtype))
    run = {"load": run_load, "thresholds": run_thresholds, "overhead": run_overhead, "dflash": run_dflash}[args.part]
    run(args, target, tokenizer, Results(args, target))
    CONSOLE.print(f"{args.output / 'results.json'} holds every run.", soft_wrap=True)


if __name__ == "__main__":
    main()
