"""
What `export(format="speculators")` writes loads in the `speculators` package of PyPI, and its training forward gives
the same logits as ours. The package pins another transformers, so it has a virtual environment of its own, made once
in the user's cache; `speculators_check.py` runs there.
"""

import itertools
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from conftest import make_target
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen3Config

from hf_dspark import DFlashConfig, DFlashDrafter, DSparkConfig, DSparkDrafter, Eagle3Config, Eagle3Drafter
from hf_dspark.checkpoints.speculators import VERSION
from hf_dspark.models.vocabulary import draft_vocabulary


CHECK = Path(__file__).with_name("speculators_check.py")
KINDS = {
    "dspark": (DSparkConfig, DSparkDrafter),
    "dflash": (DFlashConfig, DFlashDrafter),
    "eagle3": (Eagle3Config, Eagle3Drafter),
}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
# Name: kind, fields of our config, fields of the draft transformer.
CASES = {
    "dspark": ("dspark", {}, {}),
    "dspark_gated": ("dspark", {"markov_head_type": "gated"}, {}),
    "dspark_rnn": ("dspark", {"markov_head_type": "rnn"}, {}),
    "dspark_no_confidence": ("dspark", {"enable_confidence_head": False}, {}),
    "dspark_plain_confidence": ("dspark", {"confidence_head_with_markov": False}, {}),
    "dspark_masks_only": ("dspark", {"sample_from_anchor": False}, {}),
    "dspark_gated_masks_only": ("dspark", {"sample_from_anchor": False, "markov_head_type": "gated"}, {}),
    "dspark_draft_vocabulary": ("dspark", {"draft_vocab_size": 24}, {}),
    "dflash": ("dflash", {}, {}),
    "dflash_masks_only": ("dflash", {"sample_from_anchor": False}, {}),
    "dflash_draft_vocabulary": ("dflash", {"draft_vocab_size": 24, "sample_from_anchor": False}, {}),
    "dflash_window": ("dflash", {"window_from_anchor": True}, WINDOW),
    "dflash_window_causal": ("dflash", {"window_from_anchor": True, "sliding_causal": True}, WINDOW),
    "eagle3": ("eagle3", {}, {}),
    "eagle3_llama": ("eagle3", {}, {"family": "llama"}),
    "eagle3_own_parts": ("eagle3", {"own_embedding": True, "own_head": True}, {}),
    "eagle3_draft_vocabulary": ("eagle3", {"draft_vocab_size": 24, "own_head": True}, {}),
    "eagle3_norms": ("eagle3", {"norm_before_residual": True, "fc_norm": True, "norm_output": True}, {}),
    "eagle3_norm_before_fc": ("eagle3", {"norm_before_fc": True}, {}),
}
LENGTH, STEPS = 24, 3
CPU_INDEX = ("--extra-index-url", "https://download.pytorch.org/whl/cpu")


def make_drafter(name: str):
    """A random drafter for a target of `make_target("qwen3")`."""
    kind, fields, text = CASES[name]
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False, "pad_token_id": 0}
    sizes |= {"num_hidden_layers": 1 if kind == "eagle3" else 2}
    text = dict(text)
    family = {"llama": LlamaConfig, "qwen3": Qwen3Config}[text.pop("family", "qwen3")]
    shared = {"text_config": family(**(sizes | text)), "target_layer_ids": [0, 1, 2], "num_target_layers": 4}
    if kind != "eagle3":
        shared |= {"mask_token_id": 63, "block_size": 5}
    if kind == "dspark":
        shared |= {"markov_rank": 8}
    config_class, drafter_class = KINDS[kind]
    torch.manual_seed(1)
    drafter = drafter_class(config_class(**(shared | fields))).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(mean=float(parameter.dim() == 1), std=0.3)
    if drafter.config.draft_vocab_size:
        for buffer, values in zip((drafter.d2t, drafter.t2d), draft_vocabulary(torch.rand(64), 24)):
            buffer.copy_(values)
    return drafter


@torch.no_grad()
def block_outputs(drafter, ids, features, anchors) -> dict[str, torch.Tensor]:
    """Training logits of every slot, those that propose nothing included, and confidence logits."""
    hidden = drafter.training_hidden(ids, features, anchors)
    logits = drafter.base_logits(hidden)
    if not isinstance(drafter, DSparkDrafter):
        return {"logits": logits.flatten(1, 2)}
    slots = anchors[0][:, None] + torch.arange(drafter.config.block_size)
    if not drafter.config.sample_from_anchor:
        # The token before the first mask is the anchor itself; its own slot proposes nothing.
        slots = torch.cat([slots[:, :1], slots[:, :-1]], dim=1)
    latents, confidence = drafter.serial_terms(hidden, ids[:, slots])
    outputs = {"logits": (logits + drafter.markov_head.markov_w2(latents)).flatten(1, 2)}
    return outputs | ({} if confidence is None else {"confidences": confidence.flatten(1)})


@torch.no_grad()
def eagle3_outputs(drafter, ids, features) -> dict[str, torch.Tensor]:
    """Training logits of each step. The package's tokens are shifted already: row `t` has the one after."""
    ids = torch.cat([ids[:, :1], ids], dim=1)
    features = torch.cat([features, features[:, -1:]], dim=1)
    steps = itertools.islice(drafter.unroll(ids, features), STEPS)
    logits = [drafter.base_logits(drafter.norm(hidden)) for hidden in steps]
    # Rows whose tokens lie beyond the end are filled differently.
    return {f"logits.{k}": step[:, : LENGTH - k] for k, step in enumerate(logits)}


def write_case(name: str, target, target_folder: Path, folder: Path) -> Path:
    generator = torch.Generator().manual_seed(3)
    drafter = make_drafter(name)
    drafter.config.target_name_or_path = str(target_folder)
    drafter.attach(target).export(folder / name / "drafter", format="speculators")
    ids = torch.randint(63, (1, LENGTH), generator=generator)
    case = {
        "input_ids": ids,
        "features": torch.randn(1, LENGTH, 96, generator=generator),
        "last_hidden": torch.randn(1, LENGTH, 32, generator=generator),
    }
    if isinstance(drafter, Eagle3Drafter):
        case["steps"] = torch.tensor(STEPS)
        expected = eagle3_outputs(drafter, ids, case["features"])
    else:
        case["anchors"] = torch.tensor([[2, 3, 7, 12, 17]])
        expected = block_outputs(drafter, ids, case["features"], case["anchors"])
    case |= {f"expected.{key}": tensor.contiguous() for key, tensor in expected.items()}
    save_file(case, folder / name / "case.safetensors")
    return folder / name


@pytest.fixture(scope="session")
def python_of_speculators() -> Path:
    """
    A Python with `speculators` installed: that of an environment named in HF_DSPARK_SPECULATORS_VENV, or of one in the
    user's cache, which is made if it is not there.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hf-dspark"
    folder = Path(os.environ.get("HF_DSPARK_SPECULATORS_VENV", cache / f"speculators-{VERSION}"))
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    venv.create(folder, with_pip=True, clear=True)
    # torch first, and pinned: an open range would fetch gigabytes of CUDA libraries where there is no GPU. Its CPU
    # build is taken from where pip already looks, else from PyTorch's own index.
    plain = torch.__version__.split("+")[0]
    cpu = [] if torch.cuda.is_available() else [[f"torch=={plain}+cpu"], [f"torch=={plain}+cpu", *CPU_INDEX]]
    for attempts in ([*cpu, [f"torch=={plain}"]], [[f"speculators=={VERSION}"]]):
        for arguments in attempts:
            command = [python, "-m", "pip", "install", "-q", *arguments]
            pip = subprocess.run(command, capture_output=True, text=True)
            if pip.returncode == 0:
                break
        else:
            said = (pip.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            pytest.skip(f"{arguments[0]} could not be installed in {folder}; is PyPI in reach? {said}")
    (folder / "complete").touch()
    return python


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the environment's Python is looked for in bin/")
def test_the_package_computes_the_same(python_of_speculators, tmp_path):
    target = make_target("qwen3")
    target.save_pretrained(tmp_path / "target")
    folders = [write_case(name, target, tmp_path / "target", tmp_path) for name in CASES]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [python_of_speculators, CHECK, *folders]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    print(run.stdout)
    assert run.returncode == 0, run.stdout or run.stderr
    assert f"{len(CASES)} of {len(CASES)} within" in run.stdout
