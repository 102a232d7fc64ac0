"""Names of weights."""

import torch

from hf_dspark.models.fingerprint import weights_fingerprint


def test_weights_have_a_name_of_their_own(tiny_target):
    before = weights_fingerprint(tiny_target)
    assert weights_fingerprint(tiny_target.bfloat16().float()) != before  # rounded
    rounded = weights_fingerprint(tiny_target)
    assert weights_fingerprint(tiny_target.bfloat16()) == rounded
    with torch.no_grad():
        tiny_target.lm_head.weight += 1
    assert weights_fingerprint(tiny_target) != rounded
