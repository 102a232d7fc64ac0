"""What is published and fetched: the embedded pair, model cards, Hub repositories."""

from .embedded import embedded_drafter, embedded_source, embedded_target, load_embedded_target


__all__ = ["embedded_drafter", "embedded_source", "embedded_target", "load_embedded_target"]
