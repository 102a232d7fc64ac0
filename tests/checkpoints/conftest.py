"""A drafter's folder in each of several formats, undamaged."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_files import weights_of
from conftest import make_target
from safetensors.torch import save_file

from hf_dspark import DFlashDrafter, DSparkDrafter, Eagle3Drafter


@pytest.fixture(scope="session")
def target():
    return make_target("qwen3")


@pytest.fixture
def ours(target, tmp_path) -> Path:
    """A DSpark drafter in our own format."""
    drafter = DSparkDrafter.from_target(target, mask_token_id=63, markov_rank=8, block_size=4)
    drafter.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def ours_reduced(target, tmp_path) -> Path:
    """An EAGLE-3 drafter with a reduced vocabulary in our own format."""
    counts = torch.arange(64) % 7
    drafter = Eagle3Drafter.from_target(
        target, draft_vocab_size=16, token_counts=counts, target_layer_ids=[1, 1, 0], init_from_target=False
    )
    drafter.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def zlab(target, tmp_path) -> Path:
    """A DFlash drafter as z-lab writes them."""
    drafter = DFlashDrafter.from_target(target, mask_token_id=63, block_size=4, sample_from_anchor=False)
    drafter.save_pretrained(tmp_path)
    nested = {"mask_token_id": 63, "target_layer_ids": drafter.config.target_layer_ids}
    theirs = {"architectures": ["DFlashDraftModel"], "num_target_layers": 4, "block_size": 4, "dflash_config": nested}
    (tmp_path / "config.json").write_text(json.dumps(drafter.config.text_config.to_dict() | theirs))
    return tmp_path


@pytest.fixture
def speculators(target, tmp_path) -> Path:
    """A DSpark drafter with a reduced vocabulary as speculators writes them."""
    drafter = DSparkDrafter.from_target(
        target,
        mask_token_id=63,
        markov_rank=8,
        block_size=4,
        draft_vocab_size=16,
        token_counts=torch.arange(64) % 7,
    )
    drafter.save_pretrained(tmp_path)
    config = drafter.config
    theirs = {
        "architectures": ["DSparkDraftModel"],
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "block_size": 4,
        "confidence_head_with_markov": True,
        "draft_vocab_size": 16,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": 8,
        "mask_token_id": 63,
        "sample_from_anchor": True,
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}]},
        "speculators_model_type": "dspark",
        "speculators_version": "0.8.0",
        "transformer_layer_config": config.text_config.to_dict(),
    }
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    return tmp_path


@pytest.fixture
def eagle(ours_reduced) -> Path:
    """An EAGLE-3 drafter as the method's authors write them."""
    config = json.loads((ours_reduced / "config.json").read_text())
    theirs = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 16}
    (ours_reduced / "config.json").write_text(json.dumps(config["text_config"] | theirs))
    weights = {k.replace("layers.0.", "midlayer."): t for k, t in weights_of(ours_reduced).items()}
    save_file(weights, ours_reduced / "model.safetensors")
    return ours_reduced


@pytest.fixture(params=["ours", "zlab", "speculators"])
def any_folder(request) -> Path:
    return request.getfixturevalue(request.param)
