"""Training arguments: the paper's defaults, and what is refused."""

import pytest
import torch

from hf_dspark import DFlashDrafter, DraftConfig, DSparkDrafter
from hf_dspark.models.losses import LossWeights


def test_defaults_are_the_papers(tmp_path):
    args = DraftConfig(output_dir=str(tmp_path))
    assert (args.learning_rate, args.num_train_epochs, args.warmup_steps, args.num_anchors) == (6e-4, 10, 0.04, 512)
    assert args.loss_weights(DSparkDrafter.default_loss) == LossWeights(0.1, 0.9, 1.0)
    assert args.loss_weights(DFlashDrafter.default_loss) == LossWeights(1.0, 0.0, 0.0)


def test_a_given_weight_wins_over_the_drafters_also_when_it_is_zero(tmp_path):
    args = DraftConfig(output_dir=str(tmp_path), confidence_weight=0.0, l1_weight=0.5)
    assert args.loss_weights(DSparkDrafter.default_loss) == LossWeights(0.1, 0.5, 0.0)


def test_autocast_is_on_only_where_the_gpu_has_bfloat16(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert DraftConfig(output_dir=str(tmp_path)).bf16 is False
    assert DraftConfig(output_dir=str(tmp_path), bf16=True, use_cpu=True).bf16 is True


@pytest.mark.parametrize("argument", [{"num_anchors": 0}, {"max_length": 1}, {"logits_chunk_size": 0}])
def test_numbers_that_train_nothing_are_refused(tmp_path, argument):
    with pytest.raises(ValueError, match="must be at least"):
        DraftConfig(output_dir=str(tmp_path), **argument)


def test_no_memory_is_pinned_where_there_is_no_accelerator(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert DraftConfig(output_dir=str(tmp_path)).dataloader_pin_memory is False
