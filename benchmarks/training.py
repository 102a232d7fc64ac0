"""
One training step of a DSpark drafter: this library against a naive version that materialises all logits, and, with
`--speculators`, against the training forward and backward of the `speculators` package at the same shapes.

The first two compute the same loss for the same drafter, target and batch, forward, backward and AdamW included. The
naive one holds the draft logits [batch, blocks, drafts, vocabulary] and the teacher's [batch, length, vocabulary], as
a first implementation does; the library computes logits for supervised drafts only, a chunk at a time. Every
measurement is a process of its own, so that its peak memory is its own, and the kinds take turns, so that a busy
machine slows all alike. The tokens are random: neither time nor memory depends on them.

    python benchmarks/training.py                                # the embedded target, its full vocabulary
    python benchmarks/training.py --vocab 8192                   # a reduced draft vocabulary
    python benchmarks/training.py --target Qwen/Qwen3-0.6B --batch 8 --length 1024 --anchors 256
    python benchmarks/training.py --speculators ~/.cache/hf-dspark/speculators-0.9.0

`speculators` pins another transformers, so it runs in an environment of its own in the given folder, which is made if
it is not there. It gets this library's drafter in its own format and the same tokens; the sequences of a batch are
packed into one, as its trainer does, attention is sdpa, its losses are the eager ones (its default is a GPU kernel),
and it draws its own anchors, as many. Its loss has another normaliser, so losses are not compared with it.

Columns of the report: `peak` is the most memory that the process held (resident memory; on a GPU, allocated memory),
`step` the part of it that came after models and batch were loaded (activations, logits, gradients, optimizer states),
`seconds` the time of one step after a warm-up step. Medians over `--repeats` processes of each kind; `ratio` is the
median of the ratios of neighbouring processes. The floor is what the multiplications of a step need at the rate that
this machine reaches on a large matrix product: the target's forward, the drafter's forward and backward, both heads.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any


KINDS = ("naive", "hf-dspark")
SPECULATORS = "speculators"
# torch comes first and stays pinned: an open range would fetch another one, without a GPU one of gigabytes.
SPECULATORS_PACKAGES = (("torch==2.13.0",), ("torch==2.13.0", "speculators==0.9.0"))
CPU_INDEX = ("--extra-index-url", "https://download.pytorch.org/whl/cpu")


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
    parser.add_argument(
        "--speculators", type=Path, default=None, help="folder of an environment with the speculators package"
    )
    parser.add_argument("--output", type=Path, default=Path("training.json"), help="results (default: %(default)s)")
    parser.add_argument("--measure", choices=(*KINDS, SPECULATORS), default=None, help=argparse.SUPPRESS)
    parser.add_argument("--case", type=Path, default=None, help=argparse.SUPPRESS)
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
    if args.speculators:
        # The draft layers that its format has, of the target's sizes.
        reduced["text_config"] = qwen3_layers(target.config.get_text_config(), args.layers)
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


def qwen3_layers(text: Any, layers: int) -> Any:
    from transformers import AutoConfig

    from hf_dspark.models.fresh import LAYER_FIELDS

    fields = {name: getattr(text, name) for name in LAYER_FIELDS if getattr(text, name, None) is not None}
    fields.pop("mlp_bias", None)
    return AutoConfig.for_model("qwen3", num_hidden_layers=layers, tie_word_embeddings=False, **fields)


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


def write_case(args: argparse.Namespace, folder: Path) -> None:
    """What the process of the other package needs: the drafter in its format, the target's name, the batch."""
    from safetensors.torch import save_file

    from hf_dspark.hub import embedded_target

    _, drafter, batch = load(args)
    # Its reader looks for the target's weights there.
    drafter.config.target_name_or_path = args.target or str(embedded_target())
    drafter.export(folder / "drafter", format="speculators")
    (folder / "target").write_text(drafter.config.target_name_or_path)
    save_file({name: batch[name].contiguous() for name in ("input_ids", "loss_mask")}, folder / "batch.safetensors")


def load_speculators(args: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    import torch
    from safetensors.torch import load_file
    from speculators import SpeculatorModel, SpeculatorModelConfig
    from transformers import AutoModelForCausalLM

    name = (args.case / "target").read_text()
    target = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval().requires_grad_(False)
    config = SpeculatorModelConfig.from_pretrained(args.case / "drafter")
    config.transformer_layer_config._attn_implementation = "sdpa"
    drafter = SpeculatorModel.from_pretrained(args.case / "drafter", config=config).float().train()
    return target, drafter, load_file(args.case / "batch.safetensors")


def speculators_loss(target: Any, drafter: Any, batch: dict[str, Any], args: argparse.Namespace) -> Any:
    import torch
    from speculators.losses import resolve_loss_config

    layers = drafter.config.aux_hidden_state_layer_ids
    with torch.no_grad():
        states = target.base_model(batch["input_ids"], output_hidden_states=True, use_cache=False)
        # Its layer ids are indices of `hidden_states`.
        features = torch.cat([states.hidden_states[i] for i in layers], dim=-1)
    rows, length = batch["input_ids"].shape
    packed = lambda x: x.reshape(1, rows * length, *x.shape[2:])  # noqa: E731
    return drafter(
        hidden_states=packed(features),
        input_ids=packed(batch["input_ids"]),
        loss_mask=packed(batch["loss_mask"]),
        verifier_last_hidden_states=packed(states.last_hidden_state),
        document_ids=torch.arange(rows).repeat_interleave(length)[None],
        position_ids=torch.arange(length).repeat(rows)[None],
        loss_config=resolve_loss_config('{"ce": 0.1, "tv": 0.9}', "eager"),
        tv_loss_fn=resolve_loss_config("tv", "eager")["tv"][0],
        max_anchors=rows * args.anchors,
    )[1]


def operations(target: Any, drafter: Any, batch: dict[str, Any], args: argparse.Namespace) -> float:
    """Multiplications and additions of the matrix products that no training step of this drafter can do without."""
    from hf_dspark.models.blocks import block_supervision

    config = drafter.config
    inputs = (batch[name] for name in ("input_ids", "loss_mask", "anchors", "anchor_mask"))
    positions, _, weights = block_supervision(*inputs, args.block, None)
    rows = int((weights > 0).sum())
    sequence = positions + batch["input_ids"].shape[1] * (positions * 0 + 1).cumsum(0)
    teachers = len(sequence[weights > 0].unique())
    tokens, slots = batch["input_ids"].numel(), batch["anchors"].numel() * args.block
    size = lambda module: sum(p.numel() for p in module.parameters() if p.dim() > 1)  # noqa: E731
    width, vocabulary = config.hidden_size, target.config.get_text_config().vocab_size
    context = sum(size(layer.self_attn.k_proj) + size(layer.self_attn.v_proj) for layer in drafter.layers)
    return (
        2 * tokens * size(target.get_decoder().layers)  # forward
        + 6 * tokens * (size(drafter.fc) + context)  # forward, and backward to inputs and weights
        + 6 * slots * size(drafter.layers)
        + 4 * rows * width * config.output_size  # the head's weights are frozen
        + 6 * rows * config.markov_rank * config.output_size
        + 2 * teachers * width * vocabulary
    )


def multiplication_rate(size: int = 1536) -> float:
    """Operations a second that this process reaches on a large float32 matrix product."""
    import torch

    a, b = torch.rand(size, size), torch.rand(size, size)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    target, drafter, batch = load_speculators(args) if args.measure == SPECULATORS else load(args)
    # Weights may still be mapped from their file: touch them all before counting.
    sum(float(parameter.detach().sum()) for model in (target, drafter) for parameter in model.parameters())
    trained = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=6e-4)
    compute = {"naive": naive_loss, "hf-dspark": library_loss, SPECULATORS: speculators_loss}[args.measure]
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
    floor = {}
    if args.measure == "hf-dspark" and args.device == "cpu":
        floor = {"operations": operations(target, drafter, batch, args), "rate": multiplication_rate()}
    return {
        **floor,
        "peak_bytes": peak,
        "step_bytes": peak - loaded,
        "seconds": statistics.median(seconds[1:]),
        "losses": losses,
        "gradient_norms": norms,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in trained),
        "target": target.config.name_or_path,
        "vocabulary": target.config.get_text_config().vocab_size,
    }


# ---------------------------------------------------------------------- the comparison


def python_of(folder: Path) -> Path:
    """The Python of an environment with the speculators package, which is made if it is not there."""
    python = folder / "bin" / "python"
    installed = (
        python.exists() and not subprocess.run([python, "-c", "import speculators"], capture_output=True).returncode
    )
    if not installed:
        print(f"Installing speculators in {folder}, which takes minutes.", file=sys.stderr)
        venv.create(folder, with_pip=True)
        for packages in SPECULATORS_PACKAGES:
            subprocess.run([python, "-m", "pip", "install", "-q", *packages, *CPU_INDEX], check=True)
    return python


def run_child(kind: str, args: argparse.Namespace, case: Path) -> dict[str, Any]:
    python = python_of(args.speculators) if kind == SPECULATORS else sys.executable
    command = [python, __file__, *sys.argv[1:], "--measure", kind, "--case", case]
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
    summary = {kind: {n: statistics.median(run[n] for run in found) for n in names} for kind, found in runs.items()}
    for other in [kind for kind in runs if kind != "hf-dspark"]:
        pairs = list(zip(runs[other], runs["hf-dspark"]))
        summary[f"ratio to {other}"] = {n: statistics.median(o[n] / t[n] for t, o in pairs) for n in names}
    summary["largest_relative_difference"] = {n: largest_difference(runs, n) for n in ("losses", "gradient_norms")}
    floors = [run["operations"] / run["rate"] for run in runs["hf-dspark"] if "rate" in run]
    if floors:
        summary["floor_seconds"] = statistics.median(floors)
        summary["step_in_floors"] = statistics.median(
            run["seconds"] * run["rate"] / run["operations"] for run in runs["hf-dspark"]
        )
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
    if SPECULATORS in report["runs"]:
        print(f"{SPECULATORS} with torch {report['runs'][SPECULATORS][0]['torch']}")
    print(f"\n{'':33}{'peak':>10}{'step':>10}{'seconds':>10}")
    for kind in report["runs"]:
        row = summary[kind]
        peak, step = (f"{row[n] / 2**30:.2f} GiB" for n in ("peak_bytes", "step_bytes"))
        print(f"{kind:33}{peak:>10}{step:>10}{row['seconds']:>10.2f}")
    for name, ratio in summary.items():
        if name.startswith("ratio"):
            print(f"{'hf-dspark, ' + name:33}" + "".join(f"{value:>10.2f}" for value in ratio.values()))
    if "floor_seconds" in summary:
        print(
            f"\nfloor: {run['operations'] / 1e9:.0f} billion operations, {summary['floor_seconds']:.2f} s at "
            f"{run['rate'] / 1e9:.0f} billion a second; a step takes {summary['step_in_floors']:.2f} times that"
        )
    difference = summary["largest_relative_difference"]
    print(f"\nlargest relative difference: loss {difference['losses']:.1e}, ", end="")
    print(f"gradient norm {difference['gradient_norms']:.1e}")


def main() -> None:
    args = parse_arguments()
    if args.measure:
        print(json.dumps(measure(args)))
        return
    kinds = (*KINDS, SPECULATORS) if args.speculators else KINDS
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        if args.speculators:
            write_case(args, Path(folder))
        for i in range(args.repeats):
            # Neither kind always goes first.
            for kind in kinds if i % 2 == 0 else reversed(kinds):
                runs[kind].append(run_child(kind, args, Path(folder)))
                print(f"{kind}, {i + 1} of {args.repeats}: {runs[kind][-1]['seconds']:.2f} s", file=sys.stderr)
    settings = {
        name: value for name, value in vars(args).items() if name not in ("measure", "output", "case", "speculators")
    }
    report = {"settings": settings, "versions": versions(), "summary": summarise(runs), "runs": runs}
    args.output.write_text(json.dumps(report, indent=2) + "\n")
    print_report(report)
    worst = max(report["summary"]["largest_relative_difference"].values())
    if worst > 1e-3:
        raise SystemExit(f"The two kinds do not compute the same: they differ by {worst:.1e}.")


if __name__ == "__main__":
    main()
