"""Random drafters of every kind and variant, and which formats can carry each."""

import torch
from transformers import LlamaConfig, Qwen3Config

from hf_dspark import (
    DFlashConfig,
    DFlashDrafter,
    DSparkConfig,
    DSparkDrafter,
    Eagle3Config,
    Eagle3Drafter,
)
from hf_dspark.models.vocabulary import draft_vocabulary


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}
KINDS = {"dspark": (DSparkConfig, DSparkDrafter), "dflash": (DFlashConfig, DFlashDrafter)}
KINDS |= {"eagle3": (Eagle3Config, Eagle3Drafter)}
LETTERS = {"h": "hf-dspark", "d": "deepspec", "v": "speculators", "s": "sglang", "z": "zlab"}
# Kind, family, fields of the config, fields of the transformer, and the formats that can carry it, by their letters.
CASES = {
    "dspark": ("dspark", "qwen3", {}, {}, "hdvs"),
    "dspark_llama": ("dspark", "llama", {}, {}, "h"),
    "dspark_gated": ("dspark", "qwen3", {"markov_head_type": "gated"}, {}, "hdvs"),
    "dspark_rnn": ("dspark", "qwen3", {"markov_head_type": "rnn"}, {}, "hdvs"),
    "dspark_no_serial_head": ("dspark", "qwen3", {"markov_rank": 0}, {}, "hdv"),
    "dspark_no_heads": ("dspark", "qwen3", {"markov_rank": 0, "enable_confidence_head": False}, {}, "hv"),
    "dspark_no_confidence": ("dspark", "qwen3", {"enable_confidence_head": False}, {}, "hdvs"),
    "dspark_confidence_alone": ("dspark", "qwen3", {"confidence_head_with_markov": False}, {}, "hdvs"),
    "dspark_masks_only": ("dspark", "qwen3", {"sample_from_anchor": False}, {}, "hv"),
    "dspark_rnn_masks_only": ("dspark", "qwen3", {"sample_from_anchor": False, "markov_head_type": "rnn"}, {}, "h"),
    "dspark_draft_vocabulary": ("dspark", "qwen3", {"draft_vocab_size": 24}, {}, "hv"),
    "dspark_own_parts": ("dspark", "qwen3", {"own_embedding": True, "own_head": True}, {}, "hdv"),
    "dflash": ("dflash", "qwen3", {}, {}, "hdv"),
    "dflash_masks_only": ("dflash", "qwen3", {"sample_from_anchor": False}, {}, "hvsz"),
    "dflash_scaled_rotary": ("dflash", "qwen3", {"sample_from_anchor": False}, {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 64
    }}, "hvsz"),
    "dflash_partial_rotary": ("dflash", "qwen3", {"sample_from_anchor": False}, {"rope_parameters": {
        "rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.5
    }}, "hvsz"),
    "dflash_draft_vocabulary": ("dflash", "qwen3", {"draft_vocab_size": 24}, {}, "hv"),
    "dflash_window": ("dflash", "qwen3", {"sample_from_anchor": False}, SLIDING, "hsz"),
    "dflash_window_causal": (
        "dflash", "qwen3", {"sample_from_anchor": False, "sliding_causal": True}, SLIDING, "hs",
    ),
    "dflash_window_from_anchor": (
        "dflash", "qwen3", {"window_from_anchor": True, "sample_from_anchor": False}, SLIDING, "hv",
    ),
    "dspark_window_from_anchor_causal": (
        "dspark", "qwen3", {"window_from_anchor": True, "sliding_causal": True}, SLIDING, "hv",
    ),
    "eagle3": ("eagle3", "llama", {}, {}, "hvs"),
    "eagle3_few_drafts": ("eagle3", "llama", {"num_drafts": 3}, {}, "hvs"),
    "eagle3_qwen3": ("eagle3", "qwen3", {"num_drafts": 9}, {}, "hdv"),
    "eagle3_draft_vocabulary": ("eagle3", "llama", {"draft_vocab_size": 24}, {}, "hvs"),
    "eagle3_own_head": ("eagle3", "llama", {"own_head": True}, {}, "hvs"),
    "eagle3_own_embedding": ("eagle3", "llama", {"own_embedding": True}, {}, "hv"),
    "eagle3_own_parts_qwen3": ("eagle3", "qwen3", {"own_embedding": True, "own_head": True}, {}, "hdv"),
    "eagle3_unknown_depth": ("eagle3", "llama", {"target_layer_ids": "eagle3", "num_target_layers": None}, {}, "hvs"),
    "eagle3_fc_norm": ("eagle3", "llama", {"fc_norm": True}, {}, "hvs"),
    "eagle3_norm_before_fc": ("eagle3", "llama", {"norm_before_fc": True}, {}, "hv"),
    "eagle3_norm_before_residual": ("eagle3", "llama", {"norm_before_residual": True}, {}, "hv"),
    "eagle3_norm_output": ("eagle3", "qwen3", {"norm_output": True}, {}, "hv"),
}  # fmt: skip
TRANSFORMER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "tie_word_embeddings": False,
}


def make_drafter(case: str):
    """A random drafter; none of its tensors is trivial."""
    kind, family, fields, text, _ = CASES[case]
    text = TRANSFORMER | {"num_hidden_layers": 1 if kind == "eagle3" else 2} | text
    text = (Qwen3Config if family == "qwen3" else LlamaConfig)(**text)
    shared = {"text_config": text, "target_layer_ids": [0, 1, 2], "num_target_layers": 4}
    block = {} if kind == "eagle3" else {"block_size": 5, "mask_token_id": 63}
    heads = {"markov_rank": 8} if kind == "dspark" else {}
    config_class, drafter_class = KINDS[kind]
    torch.manual_seed(1)
    drafter = drafter_class(config_class(**(shared | block | heads | fields))).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(mean=float(parameter.dim() == 1), std=0.3)
    if drafter.config.draft_vocab_size:
        d2t, t2d = draft_vocabulary(torch.rand(64), 24)
        drafter.d2t.copy_(d2t)
        drafter.t2d.copy_(t2d)
    return drafter


def formats_of(case: str) -> list[str]:
    return [LETTERS[letter] for letter in CASES[case][-1]]
