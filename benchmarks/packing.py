"""
Padded against packed verification: what a target forward costs when rows verify unequal numbers of drafts.

Rows with contexts of unequal length each verify their own number of drafts. Packed, the forward sees those tokens
alone; padded, every row is filled up to the longest. Both go through the same cache and attention, in alternating
order, so only the layout differs. A shape's ratio is the median of its pairs, with a bootstrap interval.

    python benchmarks/packing.py --rows 2 4 8 16 --repeats 15

Processor time (`--clock process`, one thread) is steadier than wall time on a machine that others use too.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch

from hf_dspark.generation.attention import RowAttention
from hf_dspark.hub import load_embedded_target
from hf_dspark.models.rows import Layout, RowCache, RowLayer


CLOCKS = {"wall": time.perf_counter, "process": time.process_time}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--drafts", type=int, default=7, help="the longest schedule")
    parser.add_argument("--context", type=int, nargs=2, default=[50, 400], help="shortest and longest context")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None, help="results.json to write")
    return parser.parse_args()


def filled_cache(target, lengths: list[int]) -> RowCache:
    """A cache of random keys and values; what they hold costs nothing."""
    config = target.config.get_text_config()
    cache = RowCache([RowLayer() for _ in range(config.num_hidden_layers)], lengths)
    layout = Layout([0] * len(lengths), lengths, target.device)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in cache.layers:
        keys = torch.randn(1, config.num_key_value_heads, layout.total, head_dim, dtype=target.dtype)
        layer.write(keys, keys, layout)
    return cache


def forward(target, attention: RowAttention, cache: RowCache, counts: list[int]) -> None:
    layout = cache.open(counts, target.device)
    with attention.over(cache), torch.no_grad():
        target(
            input_ids=layout.positions[None] % target.config.vocab_size,
            position_ids=layout.positions[None],
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
            cache=cache,
            use_cache=True,
        )


def compare(target, attention: RowAttention, rows: int, args: argparse.Namespace, rng: random.Random) -> dict:
    clock, pairs, real = CLOCKS[args.clock], [], []
    for repeat in range(args.repeats + 1):
        cache = filled_cache(target, [rng.randint(*args.context) for _ in range(rows)])
        # As a confidence schedule leaves them: many short, some whole.
        packed = [1 + min(args.drafts, int(rng.expovariate(1 / 3))) for _ in range(rows)]
        padded = [max(packed)] * rows
        seconds = {}
        for name in ("packed", "padded") if repeat % 2 else ("padded", "packed"):
            start = clock()
            forward(target, attention, cache, packed if name == "packed" else padded)
            seconds[name] = clock() - start
        if repeat:  # the first warms up
            pairs.append(seconds["padded"] / seconds["packed"])
            real.append(sum(packed) / sum(padded))
    medians = sorted(statistics.median(rng.choices(pairs, k=len(pairs))) for _ in range(2000))
    return {
        "rows": rows,
        "tokens that are no padding": statistics.mean(real),
        "padded over packed": statistics.median(pairs),
        "interval": (medians[50], medians[1949]),
    }


def main() -> None:
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    target, _ = load_embedded_target(getattr(torch, args.dtype))
    rng, attention = random.Random(args.seed), RowAttention(target)
    torch.manual_seed(args.seed)
    results = []
    print("rows  real tokens  padded / packed time  95 % interval")
    for rows in args.rows:
        result = compare(target, attention, rows, args, rng)
        results.append(result)
        low, high = result["interval"]
        print(
            f"{rows:4}  {result['tokens that are no padding']:11.0%}  {result['padded over packed']:20.2f}  "
            f"{low:.2f} to {high:.2f}",
            flush=True,
        )
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps({"settings": {k: str(v) for k, v in vars(args).items()}, "rows": results}))


if __name__ == "__main__":
    main()
