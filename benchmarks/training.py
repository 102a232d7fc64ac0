"""
One training step of a DSpark drafter: this library against a naive version that materialises all logits.

Both compute the same loss for the same drafter, target and batch, forward, backward and AdamW included. The naive one
holds the draft logits [batch, blocks, drafts, vocabulary] and the teacher's [batch, length, vocabulary], as a first
implementation does; the library computes logits for supervised drafts only, a chunk at a time. Every measurement is a
process of its own, so that its peak memory is its own, and the two kinds take turns, so that a busy machine slows both
alike. The tokens are random: neither time nor memory depends on them.

    python benchmarks/training.py                                # the embedded target, its full vocabulary
    python benchmarks/training.py --vocab 8192                   # a reduced draft vocabulary
    python benchmarks/training.py --target Qwen/Qwen3-0.6B --batch 8 --length 1024 --anchors 256

Columns of the report: `peak` is the most memory that the process held (resident memory; on a GPU, allocated memory),
`step` the part of it that came after models and batch were loaded (activations, logits, gradients, optimizer states),
`seconds` the time of one step after a warm-up step. Medians over `--repeats` processes of each kind; `ratio` is the
median of the ratios of neighbouring processes.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


KINDS = ("naive", "hf-dspark")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=None, help="folder or Hub id; the embedded target by default")
    parser.add_argument("--batch", type=int, default=4, help="sequences per step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens per sequence (default: %(default)s)")
    parser.add_argument("--anchors", type=int, default=64, help="blocks per sequence (default: %(default)s)")
    parser.add_argument("--block", type=int, default=7, help="drafts per block (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=0, help="reduced draft vocabulary; 0 is the full one (default)")
    parser.add_argument("--layers", type=int, default=2, help="layers of the drafter (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=64, help="rank of its Markov head (default: %(default)s)")
    parser.add_argument(
        "--chunk", type=int, default=512, help="drafts whose logits exist at once (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=1, help="timed steps per process (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each kind (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; torch's own choice by default")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("training.json"), help="results (default: %(default)s)")
    parser.add_argument("--measure", choices=KINDS, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


# ---------------------------------------------------------------------- one process


def load(args: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    """Target, drafter and batch, the same in every process."""
    import torch
    from transformers import AutoModelForCausalLM

    from hf_dspark import DSparkDrafter
    from hf_dspark.hub import load_embedded_target
    from hf_dspark.training.data import DraftCollator

    if args.target is None:
        target, _ = load_embedded_target("float32")
    else:
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    target = target.eval().requires_grad_(False).to(args.device)
    vocabulary = target.config.get_text_config().vocab_size
    reduced = {}
    if args.vocab:
        reduced = {"draft_vocab_size": args.vocab, "token_counts": torch.arange(vocabulary, 0, -1)}
    torch.manual_seed(0)
    drafter = DSparkDrafter.from_target(
        target,
        mask_token_id=0,
        num_hidden_layers=args.layers,
        markov_rank=args.rank,
        block_size=args.block,
        **reduced,
    ).train()
    tokens = torch.randint(0, vocabulary, (args.batch, args.length))
    prompt = args.length // 4
    mask = [0] * prompt + [1] * (args.length - prompt)
    collate = DraftCollator(pad_token_id=0, num_anchors=args.anchors, seed=0)
    batch = collate([{"input_ids": row, "loss_mask": mask} for row in tokens.tolist()])
    return target, drafter, {name: tensor.to(args.device) for name, tensor in batch.items()}


def library_loss(target: Any, drafter: Any, batch: dict[str, Any], args: argparse.Namespace) -> Any:
    import torch

    from hf_dspark.generation.features import concatenate_features, hidden_state_indices

    layers = drafter.config.target_layer_ids
    with torch.no_grad():
        states = target.base_model(
            batch["input_ids"], output_hidden_states=hidden_state_indices(layers), use_cache=False
        )
    return drafter(
        input_ids=batch["input_ids"],
        target_features=concatenate_features(states.hidden_states, layers),
        target_last_hidden=states.last_hidden_state,
        loss_mask=batch["loss_mask"],
        anchors=batch["anchors"],
        anchor_mask=batch["anchor_mask"],
        chunk_size=args.chunk,
    ).loss


def naive_loss(target: Any, drafter: Any, batch: dict[str, Any], args: argparse.Namespace) -> Any:
    import torch
    import torch.nn.functional as F

    from hf_dspark.models.blocks import block_supervision

    ids, anchors = batch["input_ids"], batch["anchors"]
    with torch.no_grad():
        outputs = target(ids, output_hidden_states=True, use_cache=False)
        teacher = torch.softmax(outputs.logits.float(), dim=-1)  # [batch, length, vocabulary]
        features = torch.cat([outputs.hidden_states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    positions, labels, weights = block_supervision(
        ids, batch["loss_mask"], anchors, batch["anchor_mask"], args.block, 4.0
    )
    hidden = drafter.training_hidden(ids, features, anchors)
    previous = torch.cat([ids.gather(1, anchors)[..., None], labels[..., :-1]], dim=-1)
    latents, confidence = drafter.serial_terms(hidden, previous)
    # [batch, blocks, drafts, vocabulary]
    logits = drafter.base_logits(hidden) + drafter.markov_head.markov_w2(latents).float()
    rows = torch.arange(len(ids), device=ids.device)[:, None, None]
    teacher = teacher[rows, positions - 1]
    distance = 0
    if drafter.config.draft_vocab_size:
        teacher = teacher[..., drafter.draft_ids]
        distance = (1 - teacher.sum(-1)).clamp_min(0)
    distance = distance + (torch.softmax(logits, dim=-1) - teacher).abs().sum(-1)
    labels = drafter.to_draft_ids(labels)
    cross_entropy = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none", ignore_index=-1)
    accepted = (1 - 0.5 * distance.detach()).clamp(0, 1)
    confidence_loss = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
    mix = drafter.default_loss
    loss = mix.cross_entropy * cross_entropy.view_as(weights) + mix.l1 * distance + mix.confidence * confidence_loss
    return (weights * loss).sum() / (weights.sum() + 1e-6)


def resident_bytes() -> int:
    """Memory of this process now, in bytes."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return peak_bytes("cpu")


def peak_bytes(device: str) -> int:
    """The most memory that this process had, in bytes."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    target, drafter, batch = load(args)
    # Weights may still be mapped from their file: touch them all before counting.
    sum(float(parameter.detach().sum()) for model in (target, drafter) for parameter in model.parameters())
    trained = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=6e-4)
    compute = {"naive": naive_loss, "hf-dspark": library_loss}[args.measure]
    synchronize = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    loaded = torch.cuda.memory_allocated() if args.device == "cuda" else resident_bytes()
    losses, norms, seconds = [], [], []
    for _ in range(1 + args.steps):
        synchronize()
        start = time.perf_counter()
        loss = compute(target, drafter, batch, args)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss.detach()))
    peak = peak_bytes(args.device)
    return {
        "peak_bytes": peak,
        "step_bytes": peak - loaded,
        "seconds": statistics.median(seconds[1:]),
        "losses": losses,
        "gradient_norms": norms,
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in trained),
        "target": target.config.name_or_path,
        "vocabulary": target.config.get_text_config().vocab_size,
    }


# ---------------------------------------------------------------------- the comparison


def run_child(kind: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", kind]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        raise SystemExit(f"The {kind} measurement failed (exit status {result.returncode}); its error is above.")
    return json.loads(result.stdout.splitlines()[-1])


def largest_difference(runs: dict[str, list[dict[str, Any]]], name: str) -> float:
    """Between neighbouring processes of the two kinds, relative, over all steps."""
    pairs = zip(*(runs[kind] for kind in KINDS))
    return max(abs(a - b) / abs(a) for naive, ours in pairs for a, b in zip(naive[name], ours[name]))


def summarise(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    names = ("peak_bytes", "step_bytes", "seconds")
    summary = {kind: {n: statistics.median(run[n] for run in runs[kind]) for n in names} for kind in KINDS}
    pairs = list(zip(*(runs[kind] for kind in KINDS)))
    summary["ratio"] = {n: statistics.median(ours[n] / naive[n] for naive, ours in pairs) for n in names}
    summary["largest_relative_difference"] = {n: largest_difference(runs, n) for n in ("losses", "gradient_norms")}
    return summary


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "machine": f"{platform.machine()}, {os.cpu_count()} CPUs"}
    for package in ("torch", "transformers", "hf-dspark"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "source tree"
    return found


def print_report(report: dict[str, Any]) -> None:
    settings, summary, run = report["settings"], report["summary"], report["runs"][KINDS[1]][0]
    print(
        f"\nbatch {settings['batch']}, length {settings['length']}, {settings['anchors']} anchors, block "
        f"{settings['block']}, draft vocabulary {settings['vocab'] or run['vocabulary']} of {run['vocabulary']}, "
        f"{run['parameters'] / 1e6:.1f} M trained parameters, float32, {run['threads']} threads, {settings['device']}"
    )
    print(", ".join(f"{name} {value}" for name, value in report["versions"].items()))
    print(f"\n{'':12}{'peak':>10}{'step':>10}{'seconds':>10}")
    for kind in KINDS:
        row = summary[kind]
        peak, step = (f"{row[n] / 2**30:.2f} GiB" for n in ("peak_bytes", "step_bytes"))
        print(f"{kind:12}{peak:>10}{step:>10}{row['seconds']:>10.2f}")
    print(f"{'ratio':12}" + "".join(f"{value:>10.2f}" for value in summary["ratio"].values()))
    difference = summary["largest_relative_difference"]
    print(f"\nlargest relative difference: loss {difference['losses']:.1e}, ", end="")
    print(f"gradient norm {difference['gradient_norms']:.1e}")


def main() -> None:
    args = parse_arguments()
    if args.measure:
        print(json.dumps(measure(args)))
        return
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for i in range(args.repeats):
        # Neither kind always goes first.
        for kind in KINDS if i % 2 == 0 else reversed(KINDS):
            runs[kind].append(run_child(kind))
            print(f"{kind}, {i + 1} of {args.repeats}: {runs[kind][-1]['seconds']:.2f} s", file=sys.stderr)
    settings = {name: value for name, value in vars(args).items() if name not in ("measure", "output")}
    report = {"settings": settings, "versions": versions(), "summary": summarise(runs), "runs": runs}
    args.output.write_text(json.dumps(report, indent=2) + "\n")
    print_report(report)
    worst = max(report["summary"]["largest_relative_difference"].values())
    if worst > 1e-3:
        raise SystemExit(f"The two kinds do not compute the same: they differ by {worst:.1e}.")


if __name__ == "__main__":
    main()
