"""
What loading a drafter costs in memory and time, beside plain transformers loading as many bytes.

Random bfloat16 weights stand in for a DeepSpec checkpoint with the real shapes of `dspark_qwen3_4b_block7` (2.8 GB; it
holds copies of its target's embedding and LM head), for a Qwen3 model of the same size in bytes, and for a target that
shares embedding and head. Each is loaded in a process of its own, in turn, and everything is read once. Times
depend on whether the files are in the page cache.

    python benchmarks/loading.py [--folder FOLDER] [--repeats 5] [--scale 1]

Memory is the process's resident set beyond what it was after the imports, at its peak and at the end. Pages of a
mapped file that were read count into it, although the system can drop them at any time; `own` is without those.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


# dspark_qwen3_4b_block7, as its config.json has it.
TRANSFORMER = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 5,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    "tie_word_embeddings": False,
}
BLOCK = {"block_size": 7, "mask_token_id": 151669, "markov_rank": 256, "target_layer_ids": [1, 9, 17, 25, 33]}
NUM_TARGET_LAYERS = 36
# What a process does; each kind is one line of the result.
KINDS = {
    "transformers: a model": "as many bytes, plain transformers",
    "drafter": "AutoDrafter.from_pretrained",
    "target": "the target alone",
    "target + drafter": "the target, then the drafter attached to it",
}


def scaled(scale: int) -> dict:
    """The transformer's fields with every width divided by `scale`."""
    names = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads")
    return TRANSFORMER | {name: TRANSFORMER[name] // scale for name in names}


def make_checkpoints(folder: Path, scale: int) -> None:
    """The three checkpoints, unless they are there."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from hf_dspark import DSparkConfig, DSparkDrafter

    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    fields = scaled(scale)
    small = {"intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    target = Qwen3ForCausalLM(Qwen3Config(**(fields | small | {"num_hidden_layers": NUM_TARGET_LAYERS})))
    if not (folder / "target").exists():
        target.save_pretrained(folder / "target")
    if not (folder / "drafter").exists():
        block = BLOCK | {"mask_token_id": fields["vocab_size"] - 1}
        config = DSparkConfig(text_config=Qwen3Config(**fields), num_target_layers=NUM_TARGET_LAYERS, **block)
        DSparkDrafter(config).attach(target).export(folder / "drafter", format="deepspec")
    if not (folder / "model").exists():
        wanted = size_of(folder / "drafter")
        fields |= {"num_hidden_layers": fields["num_hidden_layers"] + 1}
        with torch.device("meta"):
            missing = wanted // 2 - Qwen3ForCausalLM(Qwen3Config(**fields)).num_parameters()
        fields["intermediate_size"] += missing // (3 * fields["hidden_size"] * fields["num_hidden_layers"])
        Qwen3ForCausalLM(Qwen3Config(**fields)).save_pretrained(folder / "model")


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def resident() -> dict[str, int]:
    """The process's memory in bytes: its peak, what it holds now, and what of that is no page of a mapped file."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    names = {"peak": "VmHWM", "held": "VmRSS", "own": "RssAnon"}
    return {name: int(fields[field].split()[0]) * 1024 for name, field in names.items()}


def read_all(model) -> None:
    """Reads one value of every page of memory that a model's weights are in."""
    import torch

    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.flatten()[:: max(1, 4096 // tensor.element_size())].sum()


def measure(kind: str, folder: Path) -> dict[str, float]:
    """One load in this process."""
    from transformers import Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from hf_dspark import AutoDrafter

    disable_progress_bar()
    before, start, models = resident(), time.perf_counter(), []
    if kind == "transformers: a model":
        models.append(Qwen3ForCausalLM.from_pretrained(folder / "model", dtype="auto"))
    if kind.startswith("target"):
        models.append(Qwen3ForCausalLM.from_pretrained(folder / "target", dtype="auto"))
    if kind.endswith("drafter"):
        drafter = AutoDrafter.from_pretrained(folder / "drafter", dtype="auto")
        models.append(drafter.attach(models[0]) if models else drafter)
    loaded = time.perf_counter() - start
    for model in models:
        read_all(model)
    found = {name: value - before["held" if name == "peak" else name] for name, value in resident().items()}
    return found | {"seconds": loaded, "seconds_read": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "hf-dspark-loading", help="for the checkpoints"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=int, default=1, help="divides every width, to try the script")
    parser.add_argument("--output", type=Path, default=None, help="results.json to write")
    parser.add_argument("--measure", choices=KINDS, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.folder)))
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    make_checkpoints(arguments.folder, arguments.scale)
    command = [sys.executable, __file__, "--folder", str(arguments.folder), "--measure"]
    runs = {kind: [] for kind in KINDS}
    for _ in range(arguments.repeats):
        for kind, measured in runs.items():
            done = subprocess.run([*command, kind], capture_output=True, text=True, check=True)
            measured.append(json.loads(done.stdout.splitlines()[-1]))
    medians = {
        kind: {name: statistics.median(run[name] for run in measured) for name in measured[0]}
        for kind, measured in runs.items()
    }
    sizes = {name: size_of(arguments.folder / name) for name in ("model", "drafter", "target")}
    report(medians, sizes, arguments.repeats)
    if arguments.output:
        result = {"medians": medians, "runs": runs, "file_bytes": sizes}
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def report(medians: dict, sizes: dict[str, int], repeats: int) -> None:
    files = {kind: sum(sizes[name] for name in sizes if name in kind.split(": a ")[-1]) for kind in KINDS}
    print(f"medians of {repeats} runs; GB; peak / file in parentheses")
    print(f"{'':24}{'file':>6} {'peak':>13} {'held':>6} {'own':>6} {'loaded s':>9} {'read s':>7}")
    for kind, found in medians.items():
        file, (peak, held, own) = files[kind], (found[name] / 1e9 for name in ("peak", "held", "own"))
        memory = f"{peak:6.2f} ({peak * 1e9 / file:.2f}) {held:6.2f} {own:6.2f}"
        print(f"{kind:24}{file / 1e9:6.2f} {memory} {found['seconds']:9.2f} {found['seconds_read']:7.2f}")
    added = {name: (medians["target + drafter"][name] - medians["target"][name]) / 1e9 for name in ("held", "own")}
    print(
        f"A drafter of {sizes['drafter'] / 1e9:.2f} GB adds to its target {added['own']:.2f} GB of its own memory and "
        f"{added['held'] - added['own']:.2f} GB of pages of its file, which the system drops when it needs the room."
    )


if __name__ == "__main__":
    main()
