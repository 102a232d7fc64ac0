"""The chunked losses are the naive ones, which hold all logits at once: same values, same gradients."""

import pytest
import torch
import torch.nn.functional as F
from conftest import make_target

from hf_dspark import DFlashDrafter, DSparkDrafter, Eagle3Drafter
from hf_dspark.models.losses import LossWeights, block_loss_terms, chunked_loss, soft_cross_entropy_rows
from hf_dspark.training.trainer import freeze_borrowed


BATCH, LENGTH, DRAFTS = 3, 24, 4
MIX = LossWeights(cross_entropy=0.3, l1=0.9, confidence=0.7)


def make_drafter(kind, vocabulary: int | None = None, **overrides):
    target = make_target().requires_grad_(False)
    if vocabulary:
        counts = torch.randint(0, 100, (64,), generator=torch.Generator().manual_seed(5))
        overrides |= {"draft_vocab_size": vocabulary, "token_counts": counts}
    overrides |= {"num_drafts": DRAFTS} if kind is Eagle3Drafter else {"block_size": DRAFTS, "mask_token_id": 1}
    if kind is DSparkDrafter:
        overrides = {"markov_rank": 8} | overrides
    torch.manual_seed(1)
    drafter = kind.from_target(target, num_hidden_layers=1, **overrides)
    for name, parameter in drafter.named_parameters():
        if "markov" in name or "confidence" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    freeze_borrowed(drafter)
    return drafter, target


def make_batch(target, layer_ids: list[int]) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    input_ids = torch.randint(2, 64, (BATCH, LENGTH))
    outputs = target(input_ids, output_hidden_states=True)
    features = torch.cat([outputs.hidden_states[i + 1] for i in layer_ids], dim=-1)
    loss_mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    loss_mask[:, :6] = 0
    loss_mask[0, 12] = 0
    return {
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "features": features,
        "last_hidden": outputs.hidden_states[-1],
        "teacher": torch.softmax(outputs.logits, -1),
        "anchors": torch.tensor([[6, 9, 13], [7, 8, 20], [10, 21, 0]]),
        "anchor_mask": torch.tensor([[True, True, True], [True, True, True], [True, True, False]]),
    }


def naive_block_loss(drafter, batch, mix, decay: float = 4.0) -> tuple[torch.Tensor, dict[str, float]]:
    """The paper's loss, one draft after the other, over all logits of all blocks."""
    ids, anchors = batch["input_ids"], batch["anchors"]
    hidden = drafter.training_hidden(ids, batch["features"], anchors)
    kept = torch.arange(64) if drafter.draft_ids is None else drafter.draft_ids
    logits = hidden @ drafter.head_weight().T
    labels = torch.stack([ids.gather(1, (anchors + k).clamp_max(LENGTH - 1)) for k in range(DRAFTS + 1)], dim=-1)
    confidence = None
    if drafter.markov_head is not None:
        embedded = drafter.markov_head.markov_w1(labels[..., :-1])
        logits = logits + drafter.markov_head.markov_w2(drafter.markov_head.latents(embedded, hidden))
        confidence = drafter.confidence_logits(hidden, embedded)
    sums = {"cross_entropy": 0.0, "l1": 0.0, "confidence": 0.0, "acceptance": 0.0, "weight": 0.0}
    for b in range(BATCH):
        for n in range(anchors.shape[1]):
            for k in range(DRAFTS):
                place = int(anchors[b, n]) + 1 + k
                if not batch["anchor_mask"][b, n] or place >= LENGTH or not batch["loss_mask"][b, place]:
                    break
                weight = torch.exp(torch.tensor(-k / decay))
                draft = torch.zeros(64).index_copy(0, kept, torch.softmax(logits[b, n, k], -1))
                target = batch["teacher"][b, place - 1]
                distance = (draft - target).abs().sum()
                accepted = (1 - distance / 2).detach()
                label = int(ids[b, place])
                if label in kept.tolist():
                    sums["cross_entropy"] = sums["cross_entropy"] - weight * draft[label].log()
                sums["l1"] = sums["l1"] + weight * distance
                sums["acceptance"] = sums["acceptance"] + weight * accepted
                if confidence is not None:
                    score = confidence[b, n, k]
                    bce = -accepted * F.logsigmoid(score) - (1 - accepted) * F.logsigmoid(-score)
                    sums["confidence"] = sums["confidence"] + weight * bce
                sums["weight"] = sums["weight"] + weight
    terms = {name: value / sums["weight"] for name, value in sums.items() if name != "weight"}
    loss = mix.cross_entropy * terms["cross_entropy"] + mix.l1 * terms["l1"] + mix.confidence * terms["confidence"]
    return loss, terms


def gradients(drafter, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    drafter.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


def assert_same_gradients(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    assert any(gradient.abs().max() > 1e-3 for gradient in theirs.values())
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


BLOCK_DRAFTERS = [
    pytest.param(DSparkDrafter, None, {"markov_head_type": "vanilla"}, MIX, id="dspark"),
    pytest.param(DSparkDrafter, None, {"markov_head_type": "gated"}, MIX, id="dspark gated"),
    pytest.param(DSparkDrafter, 20, {"markov_head_type": "rnn"}, MIX, id="dspark rnn, reduced vocabulary"),
    pytest.param(DFlashDrafter, None, {}, LossWeights(1.0, 0.0, 0.0), id="dflash"),
    pytest.param(DFlashDrafter, 20, {}, LossWeights(0.5, 0.5, 0.0), id="dflash, reduced vocabulary"),
]


@pytest.mark.parametrize("chunk_size", [1, 5, 1000])
@pytest.mark.parametrize("kind,vocabulary,overrides,mix", BLOCK_DRAFTERS)
def test_block_loss_is_the_naive_one(kind, vocabulary, overrides, mix, chunk_size):
    drafter, target = make_drafter(kind, vocabulary, **overrides)
    batch = make_batch(target, drafter.config.target_layer_ids)
    expected, expected_terms = naive_block_loss(drafter, batch, mix)
    output = drafter(
        input_ids=batch["input_ids"],
        target_features=batch["features"],
        target_last_hidden=batch["last_hidden"],
        loss_mask=batch["loss_mask"],
        anchors=batch["anchors"],
        anchor_mask=batch["anchor_mask"],
        loss_weights=mix,
        chunk_size=chunk_size,
    )
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-5)
    assert "cross_entropy" in output.terms
    for name, value in output.terms.items():
        torch.testing.assert_close(value, expected_terms[name].detach(), rtol=1e-4, atol=1e-5)
    assert_same_gradients(gradients(drafter, output.loss), gradients(drafter, expected))


def naive_eagle_loss(drafter, batch, attention_mask) -> torch.Tensor:
    kept = torch.arange(64) if drafter.draft_ids is None else drafter.draft_ids
    total, count = 0.0, 0
    for k, hidden in enumerate(drafter.unroll(batch["input_ids"], batch["features"])):
        log_probabilities = torch.log_softmax(drafter.norm(hidden) @ drafter.head_weight().T, -1)
        for b in range(BATCH):
            for t in range(LENGTH):
                # Step k at position t stands for the sequence up to t + k + 1.
                if t + k + 1 >= LENGTH or not (batch["loss_mask"][b, t + k] and attention_mask[b, t + k + 1]):
                    continue
                teacher = batch["teacher"][b, t + k + 1][kept]
                total = total - drafter.config.step_loss_decay**k * (teacher * log_probabilities[b, t]).sum()
                count += k == 0
    return total / count


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
@pytest.mark.parametrize("vocabulary", [None, 20], ids=["full", "reduced"])
def test_eagle3_loss_is_the_naive_one(vocabulary, chunk_size):
    drafter, target = make_drafter(Eagle3Drafter, vocabulary)
    batch = make_batch(target, drafter.config.target_layer_ids)
    attention_mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    attention_mask[1, 18:] = 0
    batch["loss_mask"][1, 18:] = 0
    expected = naive_eagle_loss(drafter, batch, attention_mask)
    output = drafter(
        input_ids=batch["input_ids"],
        target_features=batch["features"],
        target_last_hidden=batch["last_hidden"],
        loss_mask=batch["loss_mask"],
        attention_mask=attention_mask,
        normalizer=(batch["loss_mask"][:, :-1] * attention_mask[:, 1:]).sum(),
        chunk_size=chunk_size,
    )
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(drafter, output.loss), gradients(drafter, expected))


@pytest.mark.parametrize("chunk_size", [1, 4, 10, 64])
def test_no_more_rows_than_a_chunk_have_logits_at_once(chunk_size):
    seen = []

    def chunk_loss(part, hidden, head):
        seen.append(len(hidden))
        logits = hidden @ head.T
        return logits.logsumexp(-1).sum(), []

    hidden, head = torch.randn(10, 4, requires_grad=True), torch.randn(8, 4)
    loss, _ = chunked_loss(chunk_loss, [hidden], [head], chunk_size)
    loss.backward()
    assert sum(seen) == 10 and max(seen) <= chunk_size
    copy = hidden.detach().requires_grad_()
    (copy @ head.T).logsumexp(-1).sum().backward()
    torch.testing.assert_close(hidden.grad, copy.grad)


def test_evaluation_computes_no_gradients():
    building = []

    def chunk_loss(part, hidden, head):
        building.append(torch.is_grad_enabled())
        return (hidden @ head.T).sum(), []

    hidden, head = torch.randn(6, 4), torch.randn(8, 4, requires_grad=True)
    with torch.no_grad():
        loss, _ = chunked_loss(chunk_loss, [hidden], [head], 4)
    assert building == [False, False]
    torch.testing.assert_close(loss, (hidden @ head.T).sum().detach())
    assert not loss.requires_grad


# ---------------------------------------------------------------------- the terms


def rows(count: int = 5, size: int = 7):
    torch.manual_seed(0)
    logits = torch.randn(count, size, requires_grad=True)
    teacher = torch.softmax(torch.randn(count, size), -1)
    weights = torch.rand(count) + 0.1
    return logits, teacher, weights / weights.sum()


def test_labels_outside_the_draft_vocabulary_carry_no_cross_entropy():
    logits, _, weights = rows()
    labels = torch.tensor([3, -1, 0, -1, 6])
    total, _ = block_loss_terms(logits, None, labels, weights, None, None, LossWeights(1.0, 0.0, 0.0))
    total.backward()
    per_row = -torch.log_softmax(logits, -1)[[0, 2, 4], [3, 0, 6]]
    torch.testing.assert_close(total, (weights[[0, 2, 4]] * per_row).sum())
    assert torch.all(logits.grad[[1, 3]] == 0) and torch.all(logits.grad[[0, 2, 4]].abs().sum(-1) > 0)


def test_target_mass_outside_the_draft_vocabulary_counts_as_unmatched():
    """A draft that is right about all it can propose is accepted as often as the target stays inside."""
    inside = torch.tensor([[0.4, 0.2], [0.1, 0.3]])
    outside = 1 - inside.sum(-1)
    logits = (inside / inside.sum(-1, keepdim=True)).log()
    weights, labels = torch.full((2,), 0.5), torch.tensor([0, 1])
    _, terms = block_loss_terms(logits, None, labels, weights, inside, outside, LossWeights(0.0, 1.0, 0.0))
    torch.testing.assert_close(terms[3], torch.tensor(0.5))  # the mean of 0.6 and 0.4
    torch.testing.assert_close(terms[1], 2 * (1 - terms[3]))  # the distance over the whole vocabulary
    _, eagle_acceptance = soft_cross_entropy_rows(logits, inside, outside)
    torch.testing.assert_close((weights * eagle_acceptance).sum(), torch.tensor(0.5))


def test_the_confidence_loss_gives_no_gradient_through_its_label():
    logits, teacher, weights = rows()
    confidence = torch.randn(5, requires_grad=True)
    labels = torch.zeros(5, dtype=torch.long)
    total, _ = block_loss_terms(logits, confidence, labels, weights, teacher, None, LossWeights(0.0, 0.0, 1.0))
    gradient = torch.autograd.grad(total, [logits, confidence], allow_unused=True)
    assert gradient[0] is None or torch.all(gradient[0] == 0)
    accepted = 1 - 0.5 * (torch.softmax(logits, -1) - teacher).abs().sum(-1)
    torch.testing.assert_close(gradient[1], (weights * (confidence.sigmoid() - accepted)).detach())


def test_the_confidence_loss_trains_the_confidence_head_and_leaves_the_serial_output_alone():
    drafter, target = make_drafter(DSparkDrafter)
    batch = make_batch(target, drafter.config.target_layer_ids)
    output = drafter(
        input_ids=batch["input_ids"],
        target_features=batch["features"],
        target_last_hidden=batch["last_hidden"],
        anchors=batch["anchors"],
        loss_weights=LossWeights(0.0, 0.0, 1.0),
    )
    output.loss.backward()
    assert drafter.confidence_head.proj.weight.grad.abs().max() > 0
    # The head's output only reaches the loss through the label.
    assert torch.all(drafter.markov_head.markov_w2.weight.grad == 0)


def test_terms_that_compare_with_the_target_need_its_states():
    drafter, target = make_drafter(DSparkDrafter)
    batch = make_batch(target, drafter.config.target_layer_ids)
    with pytest.raises(ValueError, match="pass `target_last_hidden`"):
        drafter(input_ids=batch["input_ids"], target_features=batch["features"], anchors=batch["anchors"])
