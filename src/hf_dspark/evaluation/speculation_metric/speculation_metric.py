"""
Metrics of speculative decoding, as a module of the `evaluate` library.

It is loaded from the installed package, without a network: `evaluate.load(hf_dspark.evaluation.metric_path())`.
"""

import datasets
import evaluate

from hf_dspark.generation.statistics import accepted_histogram, count_rounds


_DESCRIPTION = """
Accepted length, verification efficiency and acceptance by draft position, from the rounds of speculative decoding. A
round is one forward of the target over the last token and some drafts: it accepts the leading ones and adds one token.
"""

_KWARGS_DESCRIPTION = """
Args:
    proposed (list of list of int): Per row, the drafts proposed in each round.
    verified (list of list of int): Per row, the drafts that the target checked in each round.
    accepted (list of list of int): Per row, the accepted drafts that were committed in each round.
    committed (list of list of int): Per row, the tokens committed in each round, the target's own included; what a
        stop or the length limit cut off does not count.
    target_forwards (list of int): Per row, the target's forwards, the prefill included.

Returns:
    accepted_length (float): Committed tokens a round.
    tokens_per_forward (float): New tokens, the prefill's own included, per target forward.
    verification_efficiency (float): Accepted drafts per verified one.
    marginal_acceptance, conditional_acceptance (list of float): Per draft position, the share of rounds that verified
        it and accepted it; and the same among rounds that accepted everything before it.
    accepted_histogram (list of int): Rounds that committed 1, 2, 3, ... tokens.
    rounds (int): How many there were.

Examples:
    >>> metric = evaluate.load(hf_dspark.evaluation.metric_path())
    >>> rounds = {"proposed": [[3, 3]], "verified": [[3, 3]], "accepted": [[2, 0]], "committed": [[3, 1]]}
    >>> metric.compute(**rounds, target_forwards=[3])["accepted_length"]
    2.0
"""

_CITATION = """
@article{dspark2026, title = {DSpark}, author = {DeepSeek-AI and Peking University}, journal = {arXiv:2607.05147},
    year = {2026}}
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class SpeculationMetric(evaluate.Metric):
    """See the module's description."""

    def _info(self) -> evaluate.MetricInfo:
        counts = datasets.Sequence(datasets.Value("int64"))
        rounds = dict.fromkeys(("proposed", "verified", "accepted", "committed"), counts)
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features({**rounds, "target_forwards": datasets.Value("int64")}),
        )

    def _compute(self, proposed, verified, accepted, committed, target_forwards):
        rows = list(zip(proposed, verified, accepted, committed))
        for i, row in enumerate(rows):
            if len({len(counts) for counts in row}) > 1:
                raise ValueError(f"Row {i} names different numbers of rounds in its lists.")
            for k, (p, v, a, c) in enumerate(zip(*row)):
                if not (0 <= a <= v <= p and c >= 1 and a <= c <= a + 1):
                    raise ValueError(
                        f"Row {i}, round {k} can't be: {p} proposed, {v} verified, {a} accepted, {c} committed. "
                        "None of the first three is above the one before it, and committed are the accepted drafts "
                        "and at most one token of the target's own."
                    )
        stats = count_rounds([zip(*row) for row in rows])
        # The prefill's token belongs to no round.
        stats.generated_tokens = sum(map(sum, committed)) + len(rows)
        stats.target_forwards = sum(target_forwards)
        return {
            "accepted_length": stats.mean_accepted_length,
            "tokens_per_forward": stats.tokens_per_forward,
            "verification_efficiency": stats.verification_efficiency,
            "marginal_acceptance": stats.marginal_acceptance,
            "conditional_acceptance": stats.conditional_acceptance,
            "accepted_histogram": accepted_histogram(stats),
            "rounds": stats.rounds,
        }
