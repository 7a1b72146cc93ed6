"""What can be wrong with a model directory."""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot be served as it is; the message says why and what would help."""
