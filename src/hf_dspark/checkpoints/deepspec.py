"""
Checkpoints of deepseek-ai/DeepSpec. Their `model_type` is the target's, the drafter shows in `architectures` alone,
and a DFlash drafter is a DSpark one without heads. They always hold copies of the target's embedding and LM head.
"""

from typing import Any


BLOCK_ARCHITECTURES = {"Qwen3DSparkModel"}
EAGLE_ARCHITECTURES = {"Qwen3Eagle3Model"}

# Fields of their config that describe the drafter rather than the transformer.
DRAFTER_FIELDS = {
    "architectures",
    "block_size",
    "confidence_head_with_markov",
    "draft_num_hidden_layers",
    "enable_confidence_head",
    "markov_head_type",
    "markov_rank",
    "mask_token_id",
    "num_anchors",
    "num_target_layers",
    "step_loss_decay",
    "target_layer_ids",
    "target_model_name_or_path",
    "transformers_version",
    "ttt_length",
}


def _architecture(config: dict[str, Any]) -> str | None:
    return next(iter(config.get("architectures") or []), None)


def recognise(config: dict[str, Any]) -> bool:
    """Whether a config.json is DeepSpec's."""
    return _architecture(config) in BLOCK_ARCHITECTURES | EAGLE_ARCHITECTURES


def read_config(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Our model type and config fields for their config.json."""
    text = {k: v for k, v in config.items() if k not in DRAFTER_FIELDS}
    text["tie_word_embeddings"] = False
    fields = {
        "text_config": text,
        "target_layer_ids": config.get("target_layer_ids"),
        "num_target_layers": config.get("num_target_layers"),
        "target_name_or_path": config.get("target_model_name_or_path"),
        "dtype": config.get("dtype"),
        "own_embedding": True,
        "own_head": True,
        "source_format": "deepspec",
    }
    if _architecture(config) in EAGLE_ARCHITECTURES:
        return "eagle3", fields | _present(config, num_drafts="ttt_length", step_loss_decay="step_loss_decay")
    # All slots of a block propose in this project; the config does not say so.
    fields |= _present(config, block_size="block_size", mask_token_id="mask_token_id") | {"sample_from_anchor": True}
    if not config.get("markov_rank") and not config.get("enable_confidence_head"):
        return "dflash", fields
    fields |= _present(
        config,
        markov_rank="markov_rank",
        markov_head_type="markov_head_type",
        enable_confidence_head="enable_confidence_head",
        confidence_head_with_markov="confidence_head_with_markov",
    )
    return "dspark", fields


def _present(config: dict[str, Any], **names: str) -> dict[str, Any]:
    return {ours: config[theirs] for ours, theirs in names.items() if theirs in config}


def read_weights(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Our state dict of theirs: the names are the same."""
    return state_dict
