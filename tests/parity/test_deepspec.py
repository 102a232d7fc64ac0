"""
DeepSpec checkpoints compute here what they compute there: recorded tensors of inference and training, and greedy
decodes round by round. Four small cases travel with the repository (`data/`); the others are used where at hand.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_dspark import AutoDrafter, DFlashDrafter, DSparkDrafter, Eagle3Drafter


HERE = Path(__file__).resolve().parent / "data"
SHARED = (
    Path(os.environ.get("HF_DSPARK_SHARED", Path(__file__).resolve().parents[3] / "shared")) / "golden" / "deepspec"
)
LOCAL = ("qwen3_dspark_vanilla", "qwen3_dspark_rnn", "qwen3_dflash", "qwen3_eagle3")
OTHERS = (
    "qwen3_dspark_conf_nomarkov",
    "qwen3_dspark_gated",
    "qwen3_dspark_noconf",
    "qwen3_dspark_ownhead",
    "gemma4_dflash",
    "gemma4_dspark_keqv",
    "gemma4_dspark_kv",
    "gemma4_eagle3",
    "gemma4_unified_dspark",
)
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no further recorded cases in {SHARED}")
CASES = [*LOCAL, *(pytest.param(name, marks=needs_shared) for name in OTHERS)]
EAGLE_CASES = ["qwen3_eagle3", pytest.param("gemma4_eagle3", marks=needs_shared)]
BLOCK_CASES = [case for case in CASES if "eagle3" not in str(case)]
KINDS = {"dspark": DSparkDrafter, "dflash": DFlashDrafter, "eagle3": Eagle3Drafter}
VALUES, GRADIENTS = 1e-4, 1e-3


def folder(case: str) -> Path:
    return (HERE if case in LOCAL else SHARED) / case


def load_drafter(case: str):
    return AutoDrafter.from_pretrained(folder(case) / "drafter").eval()


def kind_of(case: str) -> str:
    return next(kind for kind in KINDS if kind in case.split("_"))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    assert ours.shape == theirs.shape, what
    worst = (ours.float() - theirs.float()).abs().max().item()
    assert worst <= VALUES, f"{what} differs by {worst:.2e}"


def greedy_draw_that_records(scores: list[torch.Tensor]):
    """A draw that takes the most likely token, as no draw does, and keeps what it was shown."""

    def draw(slot_scores, drafted):
        scores.append(slot_scores)
        return slot_scores.argmax(-1), None

    return draw


def test_all_recorded_cases_are_tested():
    if not SHARED.is_dir():
        pytest.skip(f"no further recorded cases in {SHARED}")
    assert {path.name for path in SHARED.glob("*_*") if (path / "meta.json").exists()} == {*LOCAL, *OTHERS}


@pytest.mark.parametrize("case", CASES)
def test_class_and_conventions_are_recognised(case):
    drafter = load_drafter(case)
    kind = KINDS[kind_of(case)]
    assert type(drafter) is kind
    meta = json.loads((folder(case) / "meta.json").read_text())["model_args"]
    recorded = json.loads((folder(case) / "drafter" / "config.json").read_text())
    assert drafter.config.target_layer_ids == recorded["target_layer_ids"]
    assert drafter.config.source_format == "deepspec"
    if kind is not Eagle3Drafter:
        assert drafter.config.sample_from_anchor is True
        assert (drafter.config.block_size, drafter.config.mask_token_id) == (meta["block_size"], meta["mask_token_id"])
    if kind is DSparkDrafter:
        assert drafter.config.markov_head_type == recorded["markov_head_type"]
        assert drafter.config.markov_rank == recorded["markov_rank"]
        assert drafter.config.enable_confidence_head == recorded["enable_confidence_head"]


@pytest.mark.parametrize("case", BLOCK_CASES)
@torch.no_grad()
def test_block_inference(case):
    drafter, recorded = load_drafter(case), load_file(folder(case) / "inference.safetensors")
    rounds = sorted({name.rsplit(".", 1)[0] for name in recorded if name.endswith(".anchor_ids")})
    assert len(rounds) == 8
    cache, sequence = None, None
    for name in rounds:
        of = {key.rsplit(".", 1)[1]: tensor for key, tensor in recorded.items() if key.startswith(name + ".")}
        if name.split(".")[0] != sequence:
            sequence, cache = name.split(".")[0], drafter.new_cache()
        assert cache.get_seq_length() == of["draft_cache_len_before"]
        assert_close(drafter.project_context(of["context_features"]), of["context_projected"], f"{name} context")
        ids = recorded[f"{sequence}.input_ids"]
        start, new = int(of["start"]), of["context_features"].shape[1]
        drafter.extend(cache, of["context_features"], ids[:, start - new + 1 : start + 1])
        assert cache.get_seq_length() == of["draft_cache_len_after"]

        hidden = drafter.block_hidden(cache, of["anchor_ids"])
        assert_close(hidden, of["block_hidden"], f"{name} hidden states")
        assert_close(drafter.base_logits(hidden), of["base_logits"], f"{name} base logits")

        scores = []
        drawn = drafter.propose(cache, of["anchor_ids"], draw=greedy_draw_that_records(scores))
        assert_close(torch.stack(scores, dim=1), of["corrected_logits"], f"{name} corrected logits")
        proposal = drafter.propose(cache, of["anchor_ids"])
        assert torch.equal(proposal.tokens, of["draft_tokens"])
        assert torch.equal(drawn.tokens, of["draft_tokens"])
        if "confidence_logits" in of:
            assert_close(proposal.confidences, of["confidence_logits"].sigmoid(), f"{name} confidences")
            for threshold, length in zip((0.0, 0.5, 0.9), of["verify_lengths"].tolist()):
                kept = (proposal.confidences[0] >= threshold).long().cumprod(0).sum()
                assert int(kept) == length, f"{name} length at threshold {threshold}"
        # The block leaves nothing behind.
        assert cache.get_seq_length() == of["draft_cache_len_after"]


@pytest.mark.parametrize("sequence", ["s0", "s1"])
@pytest.mark.parametrize("case", EAGLE_CASES)
@torch.no_grad()
def test_eagle3_inference(case, sequence):
    drafter, everything = load_drafter(case), load_file(folder(case) / "inference.safetensors")
    recorded = {k.removeprefix(sequence + "."): t for k, t in everything.items() if k.startswith(sequence + ".")}
    cache = drafter.new_cache()
    drafter.extend(cache, recorded["prefill.context_features"], recorded["prefill.input_ids"])
    assert_close(cache.carried, recorded["prefill.draft_hidden_last"][:, 0], "hidden state after the prompt")
    rounds = sorted(k.split(".")[0] for k in recorded if k.endswith(".draft_tokens"))
    assert len(rounds) == {"s0": 2, "s1": 4}[sequence]
    for name in rounds:
        of = {key.rsplit(".", 1)[1]: tensor for key, tensor in recorded.items() if key.startswith(name + ".")}
        assert cache.get_seq_length() == of["draft_cache_len_before"]
        scores = []
        proposal = drafter.propose(cache, of["verify_input_ids"][:, 0], draw=greedy_draw_that_records(scores))
        assert torch.equal(proposal.tokens, of["draft_tokens"])
        assert_close(torch.stack(scores, dim=1), of["draft_logits"], f"{name} logits")
        # Drafts leave nothing behind.
        assert cache.get_seq_length() == of["draft_cache_len_before"]
        if "committed_features" in of:
            drafter.extend(cache, of["committed_features"], of["committed_tokens"])
            assert cache.get_seq_length() == of["draft_cache_len_after_update"]
            assert_close(cache.carried, of["draft_hidden_after_update"][:, 0], f"{name} hidden state after update")


def training_step(case: str, **kwargs):
    drafter, recorded = load_drafter(case), load_file(folder(case) / "training.safetensors")
    if kind_of(case) == "eagle3":
        inputs = {"attention_mask": recorded["attention_mask"]}
    else:
        inputs = {"anchors": recorded["anchor_positions"], "anchor_mask": recorded["block_keep_mask"].bool()}
    output = drafter(
        recorded["input_ids"],
        recorded["target_hidden_states"],
        recorded["target_last_hidden_states"],
        recorded["loss_mask"],
        **inputs,
        **kwargs,
    )
    return drafter, recorded, output


@pytest.mark.parametrize("case", CASES)
def test_training_gradients(case):
    # A chunk size that does not divide the number of supervised drafts.
    drafter, recorded, output = training_step(case, chunk_size=13)
    assert_close(output.loss, recorded["loss.total"], "loss")
    output.loss.backward()
    parameters = dict(drafter.named_parameters())
    gradients = {k.removeprefix("grad."): g for k, g in recorded.items() if k.startswith("grad.")}
    # Copies of the target's embedding and head are frozen there, and here come from the target.
    assert set(parameters) - set(gradients) <= {"embed_tokens.weight", "lm_head.weight"}
    assert set(gradients) <= set(parameters)
    for name, theirs in gradients.items():
        worst = (parameters[name].grad - theirs).abs().max() / theirs.abs().max()
        assert worst <= GRADIENTS, f"gradient of {name} is off by {worst:.2e} of its largest entry"


@pytest.mark.parametrize("case", BLOCK_CASES)
def test_block_loss_terms(case):
    from hf_dspark.models.losses import LossWeights

    mixes = {
        "loss.total": (None, 4.0),
        "loss.alt_ce_only_nogamma": (LossWeights(1.0, 0.0, 0.0), None),
        "loss.alt_equal_gamma7": (LossWeights(1.0, 1.0, 1.0), 7.0),
        "loss.alt_dspark": (LossWeights(0.1, 0.9, 1.0), 4.0),
    }
    for name, (mix, decay) in mixes.items():
        _, recorded, output = training_step(case, loss_weights=mix, loss_decay=decay)
        assert_close(output.loss, recorded[name], name)
        if name == "loss.alt_dspark":
            assert_close(output.terms["cross_entropy"], recorded["loss.ce"], "cross-entropy")
            assert_close(output.terms["l1"], recorded["loss.l1"], "L1")
            if "confidence_pred" in recorded:
                assert_close(output.terms["confidence"], recorded["loss.confidence"], "confidence loss")


@pytest.mark.parametrize("case", EAGLE_CASES)
def test_eagle3_loss_terms(case):
    _, recorded, output = training_step(case)
    assert_close(output.terms["step_losses"], recorded["loss.steps"], "loss of the unrolled steps")


@pytest.mark.parametrize("case", CASES)
def test_decoding(case):
    """Through the public calls alone: same ids, and the same number of tokens committed round by round."""
    target = AutoModelForCausalLM.from_pretrained(folder(case) / "target")
    target.generation_config.eos_token_id = None
    drafter = AutoDrafter.from_pretrained(folder(case) / "drafter")
    runs = {
        "speculative": {},
        "speculative_threshold_0.5": {"assistant_confidence_threshold": 0.5},
        "speculative_threshold_0.9": {"assistant_confidence_threshold": 0.9},
        "stop_variant": {},
    }
    seen = set()
    for prompt in json.loads((folder(case) / "decode.json").read_text())["prompts"]:
        ids = torch.tensor([prompt["prompt_ids"]])
        for name in runs.keys() & prompt.keys():
            theirs = prompt[name]
            output = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=drafter,
                max_new_tokens=48,
                do_sample=False,
                eos_token_id=theirs.get("stop_token_ids"),
                return_dict_in_generate=True,
                **runs[name],
            )
            assert output.sequences[0].tolist() == theirs["output_ids"], name
            ours, lengths = output.speculation.accepted_lengths[0], theirs["acceptance_lengths"]
            # The last round is cut at the end here and counted whole there, and landing exactly on the end they run
            # one more.
            assert ours[:-1] == lengths[: len(ours) - 1], name
            assert len(lengths) - len(ours) in (0, 1), name
            seen.add(name)
    with_confidence = kind_of(case) == "dspark" and "noconf" not in case
    assert seen == (set(runs) if with_confidence else {"speculative", "stop_variant"})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("attached", [False, True], ids=["unattached", "attached"])
@torch.no_grad()
def test_saved_as_ours(case, attached, tmp_path):
    """Nothing is lost on the way into our own format: equal tensors, and the same proposals."""
    target = AutoModelForCausalLM.from_pretrained(folder(case) / "target")
    drafter = load_drafter(case)
    if attached:
        drafter.attach(target)
    drafter.save_pretrained(tmp_path)
    again = AutoDrafter.from_pretrained(tmp_path).eval()
    ours, theirs = again.state_dict(), drafter.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    recorded = load_file(folder(case) / "inference.safetensors")
    features = next(tensor for key, tensor in recorded.items() if key.endswith("context_features"))
    proposals = []
    for each in (drafter, again.attach(target)):
        cache = each.new_cache()
        each.extend(cache, features, torch.full(features.shape[:2], 5))
        proposals.append(each.propose(cache, torch.tensor([5])))
    assert torch.equal(proposals[0].tokens, proposals[1].tokens)
    assert_close(proposals[1].confidences, proposals[0].confidences, "confidences")
