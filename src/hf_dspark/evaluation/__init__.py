"""Measuring drafters on tasks, and telling what they are worth on a machine."""

from pathlib import Path


def metric_path() -> str:
    """
    Where `evaluate.load` finds the metrics of speculative decoding; no network is needed.

    Returns:
        `str`: a folder of the installed package.

    Example:

    ```python
    >>> import evaluate
    >>> from hf_dspark.evaluation import metric_path

    >>> metric = evaluate.load(metric_path())  # doctest: +SKIP
    ```
    """
    return str(Path(__file__).parent / "speculation_metric")
