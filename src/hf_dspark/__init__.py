"""
Trainable speculative decoding for transformers.

Importing this package registers DSpark, DFlash and EAGLE-3 drafters with `AutoConfig` and `AutoModel` and lets
`generate` take one as `assistant_model`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .auto import register


__version__ = "0.1.0"

_PUBLIC = {
    "AutoDrafter": "auto",
    "DFlashConfig": "models.dflash.configuration_dflash",
    "DFlashDrafter": "models.dflash.modeling_dflash",
    "DSparkConfig": "models.dspark.configuration_dspark",
    "DSparkDrafter": "models.dspark.modeling_dspark",
    "DraftConfig": "training.config",
    "DraftTrainer": "training.trainer",
    "Eagle3Config": "models.eagle3.configuration_eagle3",
    "Eagle3Drafter": "models.eagle3.modeling_eagle3",
    "EvaluationConfig": "evaluation.benchmark",
    "evaluate_drafter": "evaluation.benchmark",
    "ThroughputProfile": "generation.profile",
    "calibrate_confidence": "evaluation.calibration",
    "profile_throughput": "generation.profiling",
    "fast_linear_layers": "generation.cpu_linear",
    "Endpoint": "training.endpoint",
    "regenerate": "training.regenerate",
    "publish_drafter": "hub.publishing",
    "speculative_decoding": "generation.decoding",
}
__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from .auto import AutoDrafter
    from .evaluation.benchmark import EvaluationConfig, evaluate_drafter
    from .evaluation.calibration import calibrate_confidence
    from .generation.cpu_linear import fast_linear_layers
    from .generation.decoding import speculative_decoding
    from .generation.profile import ThroughputProfile
    from .generation.profiling import profile_throughput
    from .hub.publishing import publish_drafter
    from .models.dflash.configuration_dflash import DFlashConfig
    from .models.dflash.modeling_dflash import DFlashDrafter
    from .models.dspark.configuration_dspark import DSparkConfig
    from .models.dspark.modeling_dspark import DSparkDrafter
    from .models.eagle3.configuration_eagle3 import Eagle3Config
    from .models.eagle3.modeling_eagle3 import Eagle3Drafter
    from .training.config import DraftConfig
    from .training.endpoint import Endpoint
    from .training.regenerate import regenerate
    from .training.trainer import DraftTrainer


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


register()
