"""Model configurations, checkpoints and the forward pass.

Owns: reading config.json, safetensors and GGUF files, weights in memory, the layer arithmetic.
Does not know: plans, rows, sampling parameters, how a KV block is laid out (the attention backend
does) or where a request comes from.
"""

from data_plane.models.config import ModelConfig
from data_plane.models.errors import ModelError
from data_plane.models.llama import LlamaModel
from data_plane.models.loader import LoadedModel, load_model

__all__ = ["LlamaModel", "LoadedModel", "ModelConfig", "ModelError", "load_model"]
