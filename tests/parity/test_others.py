"""
Checkpoints of other projects compute here what they compute there: recorded tensors of two drafting rounds and of a
training forward, and greedy decodes round by round.
"""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_dspark import AutoDrafter, DFlashDrafter, DSparkDrafter, Eagle3Drafter


EAGLE = (
    "eagle3_official",
    "specforge_eagle3",
    "specforge_eagle3_fc_norm",
    "speculators_eagle3",
    "speculators_eagle3_fc_norm_norm_output",
    "speculators_eagle3_norm_before_fc",
    "speculators_eagle3_norm_before_residual",
)
BLOCK = (
    "specforge_dflash",
    "specforge_dspark_gated",
    "specforge_dspark_rnn",
    "specforge_dspark_vanilla",
    "speculators_dflash",
    "speculators_dflash_draft_vocab",
    "speculators_dspark_gated_no_anchor",
    "speculators_dspark_rnn",
    "speculators_dspark_vanilla_draft_vocab",
    "transformers_native_dflash",
    "transformers_native_dflash_swa",
    "zlab_dflash_llama_target",
    "zlab_dflash_nested_swa",
    "zlab_dflash_qwen3",
)
# The window of these is recorded in training alone.
TRAINING_ONLY = ("specforge_dflash_swa_training", "speculators_dflash_swa_training")
BLOCK_TRAINING = (*(case for case in BLOCK if case.startswith("spec")), *TRAINING_ONLY)
FORMATS = {"zlab": "zlab", "specforge": "specforge", "eagle3": "eagle", "speculators": "speculators"}
FORMATS |= {"transformers": "transformers"}
# The reference ran this one on a CPU, where its window has no effect, and once more with the window applied.
WINDOWED = "zlab_dflash_nested_swa"
VALUES = 1e-4
# Each draft of a chain feeds the next, and the rounding of two processors grows with it: one recording in float32
# differs by 9e-5 from the same chain in float64, and by 3e-5 or 1.4e-4 from it in float32, by the processor's kernels.
CHAINED_VALUES = 2e-4


@pytest.fixture
def folder(shared, request) -> Path:
    return shared / "golden" / "others" / request.getfixturevalue("case")


@pytest.fixture
def target(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "target")
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def drafter(folder, target):
    return AutoDrafter.from_pretrained(folder / "drafter").eval().attach(target)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, what: str, most: float = VALUES) -> None:
    assert ours.shape == theirs.shape, what
    # Scattered logits are -inf where nothing can be drafted.
    assert torch.equal(ours.isinf(), theirs.isinf()), what
    worst = (ours - theirs).masked_fill(theirs.isinf(), 0).abs().max().item()
    assert worst <= most, f"{what} differs by {worst:.2e}"


def recorded_rounds(folder: Path, prefix: str = ""):
    recorded = load_file(folder / "inference.safetensors")
    for name in ("r1", "r2"):
        plain = {k.removeprefix(f"{name}."): t for k, t in recorded.items() if k.startswith(f"{name}.")}
        start = f"{prefix}{name}."
        yield name, plain | {k.removeprefix(start): t for k, t in recorded.items() if k.startswith(start)}


def greedy_draw_that_records(scores: list[torch.Tensor]):
    def draw(slot_scores, drafted):
        scores.append(slot_scores)
        return slot_scores.argmax(-1), None

    return draw


def assert_proposal(drafter, cache, of, name: str, num_drafts: int, most: float = VALUES) -> None:
    """Both ways of proposing give the recorded logits, tokens and confidences, and leave nothing in the cache."""
    length, scores = cache.get_seq_length(), []
    drawn = drafter.propose(cache, of["anchor_token"], num_drafts, draw=greedy_draw_that_records(scores))
    theirs = of.get("draft_logits_target_vocab", of["draft_logits"])
    assert_close(torch.stack(scores, dim=1), theirs[:, :num_drafts], f"{name} logits", most)
    proposal = drafter.propose(cache, of["anchor_token"], num_drafts)
    assert torch.equal(proposal.tokens, of["draft_tokens"][:, :num_drafts])
    assert torch.equal(drawn.tokens, proposal.tokens)
    if "confidence_logits" in of:
        assert_close(proposal.confidences, of["confidence_logits"].sigmoid(), f"{name} confidences")
    assert cache.get_seq_length() == length


@pytest.mark.parametrize("case", [*EAGLE, *BLOCK, *TRAINING_ONLY])
def test_class_and_conventions_are_recognised(case, drafter):
    kind = {"dspark": DSparkDrafter, "dflash": DFlashDrafter, "eagle3": Eagle3Drafter}
    method = next(name for name in kind if name in case)
    assert type(drafter) is kind[method]
    config = drafter.config
    assert config.source_format == FORMATS[case.split("_")[0]]
    # Everything else was said.
    assumed = set(config.assumed)
    expected = {"target_layer_ids"} if case.startswith(("eagle3", "specforge_eagle3")) else set()
    expected |= {"rope_theta"} if case == "eagle3_official" else set()
    expected |= {"sliding_causal"} if case in (WINDOWED, "specforge_dflash_swa_training") else set()
    assert assumed == expected
    # Copies of the target's embedding and head are gone; what was trained or is of another size stays.
    assert drafter.embed_tokens is None or not torch.equal(
        drafter.embed_tokens.weight, drafter._target.embedding.weight
    )
    if case == "speculators_eagle3":
        assert config.own_head


@pytest.mark.parametrize("case", [*EAGLE, *BLOCK, *TRAINING_ONLY])
def test_saved_in_our_format_it_is_the_same(case, folder, tmp_path):
    """Never attached, so that nothing has come from a target yet."""
    drafter = AutoDrafter.from_pretrained(folder / "drafter")
    drafter.save_pretrained(tmp_path)
    again = type(drafter).from_pretrained(tmp_path)
    ours, theirs = again.state_dict(), drafter.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    first, second = drafter.config.to_dict(), again.config.to_dict()
    changed = {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}
    assert changed <= {"architectures", "dtype", "transformers_version", "_name_or_path"}


@pytest.mark.parametrize("case", ["eagle3_official"])
@pytest.mark.parametrize("layout", ["safetensors", "shards", "pickled_shards"])
def test_eagle3_in_every_file_layout(case, folder, tmp_path, layout):
    drafter, tensors = AutoDrafter.from_pretrained(folder / "drafter"), None
    source = folder / "drafter_safetensors"
    if layout != "safetensors":
        tensors, source = load_file(source / "model.safetensors"), tmp_path
        shutil.copy(folder / "drafter" / "config.json", tmp_path)
        stem, suffix = ("pytorch_model", ".bin") if layout == "pickled_shards" else ("model", ".safetensors")
        weight_map = {}
        for i, keys in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
            name = f"{stem}-0000{i + 1}-of-00002{suffix}"
            weight_map |= dict.fromkeys(keys, name)
            (torch.save if suffix == ".bin" else save_file)({k: tensors[k] for k in keys}, tmp_path / name)
        (tmp_path / f"{stem}{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    again = AutoDrafter.from_pretrained(source)
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in drafter.state_dict().items())


@pytest.mark.parametrize("case", BLOCK)
@torch.no_grad()
def test_block_inference(case, folder, drafter):
    cache = drafter.new_cache()
    for name, of in recorded_rounds(folder, "windowed." if case == WINDOWED else ""):
        assert cache.get_seq_length() == of["position_ids"][0, 0]
        drafter.extend(cache, of["context_features"], None)
        hidden = drafter.block_hidden(cache, of["anchor_token"])
        # transformers' own loop shortens its last blocks.
        assert_close(hidden[:, : of["block_hidden"].shape[1]], of["block_hidden"], f"{name} hidden states")
        first = 0 if drafter.config.sample_from_anchor else 1
        if "base_logits" in of:
            assert_close(drafter.base_logits(hidden[:, first:]), of["base_logits"], f"{name} base logits")
        assert_proposal(drafter, cache, of, name, of["draft_tokens"].shape[1])


@pytest.mark.parametrize("case", EAGLE)
@torch.no_grad()
def test_eagle3_inference(case, folder, drafter):
    cache = drafter.new_cache()
    for name, of in recorded_rounds(folder):
        projected = drafter.project_features(of["context_features"])
        assert_close(projected, of["projected_features"], f"{name} projected features")
        drafter.extend(cache, of["context_features"], of["context_token_ids"])
        state = drafter._recycled(cache.carried)
        assert_close(state, of["step_hidden"][:, 0], f"{name} state behind the context")
        assert_proposal(drafter, cache, of, name, 5, CHAINED_VALUES)


@pytest.mark.parametrize("case", [*EAGLE, *BLOCK])
def test_decoding(case, folder, target):
    """Through the public calls alone: same ids, and the same number of tokens committed round by round."""
    drafter = AutoDrafter.from_pretrained(folder / "drafter")
    recorded = json.loads((folder / "decode.json").read_text())
    settings = {"num_assistant_tokens": 5} if case in EAGLE else {}
    rows = recorded["rows_windowed" if case == WINDOWED else "rows"]
    assert len(rows) == 4
    for row in rows:
        ids = torch.tensor([row["prompt_ids"]])
        output = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=drafter,
            max_new_tokens=48,
            do_sample=False,
            return_dict_in_generate=True,
            **settings,
        )
        assert output.sequences[0].tolist() == row["output_ids"] == row["target_greedy_ids"]
        ours, theirs = output.speculation.accepted_lengths[0], row["acceptance_lengths"]
        # The last round is cut at the end here and counted whole there, and landing exactly on the end they run one
        # more.
        assert ours[:-1] == theirs[: len(ours) - 1]
        assert len(theirs) - len(ours) in (0, 1)


@pytest.mark.parametrize("case", BLOCK_TRAINING)
@torch.no_grad()
def test_block_training_logits(case, folder, drafter):
    of = load_file(folder / "training.safetensors")
    hidden = drafter.training_hidden(of["input_ids"], of["hidden_states"], of["anchor_positions"])
    assert_close(hidden, of["output_hidden"], "hidden states")
    logits = drafter.base_logits(hidden)
    if not isinstance(drafter, DSparkDrafter):
        assert_close(logits, of["logits"], "logits")
        return
    assert_close(logits, of["base_logits"], "base logits")
    first = 0 if drafter.config.sample_from_anchor else 1
    slots = of["anchor_positions"][..., None] + torch.arange(hidden.shape[2] - first)
    previous = of["input_ids"][:, slots[0].clamp_max(of["input_ids"].shape[1] - 1)]
    latents, confidence = drafter.serial_terms(hidden[:, :, first:], previous)
    logits = logits[:, :, first:] + drafter.markov_head.markov_w2(latents)
    inside = slots < of["input_ids"].shape[1]
    assert_close(logits[inside], of["logits"][:, :, first:][inside], "logits")
    assert_close(confidence[inside], of["confidence_logits"][:, :, first:][inside], "confidence logits")


@pytest.mark.parametrize("case", EAGLE)
@torch.no_grad()
def test_eagle3_training_logits(case, folder, drafter):
    of = load_file(folder / "training.safetensors")
    ids, features = of["input_ids"], of["hidden_states"]
    if case.startswith("speculators"):
        # Their tokens are already those behind the features. What is put in at both ends touches the last row alone.
        ids = torch.cat([ids[:, :1], ids], dim=1)
        features = torch.cat([features, features[:, -1:]], dim=1)
    for k, hidden in enumerate(itertools.islice(drafter.unroll(ids, features), of["logits"].shape[0])):
        logits = drafter.base_logits(drafter.norm(hidden))
        # Rows whose tokens lie beyond the end are filled differently.
        rows = of["logits"].shape[2] - 1 - k
        assert_close(logits[:, :rows], of["logits"][k, :, :rows], f"logits of step {k}")


@pytest.mark.parametrize("case", [*EAGLE, *BLOCK_TRAINING])
def test_they_can_be_trained_further(case, folder, drafter):
    of = load_file(folder / "training.safetensors")
    ids, features = of["input_ids"], of["hidden_states"]
    last_hidden = features[..., : drafter.config.target_hidden_size]
    blocks = {} if case in EAGLE else {"anchors": of["anchor_positions"]}
    drafter(ids, features, last_hidden, **blocks).loss.backward()
    frozen = {"embed_tokens.weight", "lm_head.weight"}
    without = [name for name, p in drafter.named_parameters() if name not in frozen and p.grad is None]
    assert without == []
    assert all(p.grad.isfinite().all() for p in drafter.parameters() if p.grad is not None)
