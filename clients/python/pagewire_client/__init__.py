"""Client of Pagewire's public API: `Client`, `AsyncClient` and typed exceptions.

Owns: the shape of calls in Python. Does not know: the server's insides; imports protos and grpc.
"""

from pagewire_client.async_client import AsyncBatch, AsyncClient, AsyncGeneration
from pagewire_client.client import Batch, Client, Generation
from pagewire_client.errors import (
    AbortedError,
    CancelledError,
    DeadlineError,
    DuplicateRequestError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PagewireError,
    SlowClientError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedFeatureError,
)
from pagewire_client.requests import GenerateOptions, Prompt, build_request
from pagewire_client.results import (
    BatchResult,
    Chunk,
    Completion,
    GenerationLog,
    Model,
    Output,
    Usage,
)
from pagewire_client.resume import ResumePolicy
from protos.tls_files import TlsFiles

__all__ = [
    "AbortedError",
    "AsyncBatch",
    "AsyncClient",
    "AsyncGeneration",
    "Batch",
    "BatchResult",
    "CancelledError",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineError",
    "DuplicateRequestError",
    "GenerateOptions",
    "Generation",
    "GenerationLog",
    "InvalidRequestError",
    "Model",
    "NotFoundError",
    "Output",
    "OverloadedError",
    "PagewireError",
    "Prompt",
    "ResumePolicy",
    "SlowClientError",
    "TlsFiles",
    "UnauthenticatedError",
    "UnavailableError",
    "UnsupportedFeatureError",
    "Usage",
    "build_request",
]
