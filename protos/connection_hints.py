"""What grpc says of connections that cannot be, in words that say what to do about it.

Owns: the signs, which come without a code of their own. Does not know: who dials whom.
"""

from __future__ import annotations

# In this order: the first that fits is the most exact.
_HINTS = (
    ("WRONG_VERSION_NUMBER", "It does not speak TLS there: leave the TLS options out."),
    ("certificate has expired", "Its certificate has expired: whoever runs it has to renew it."),
    ("certificate is not yet valid", "Its certificate is not valid yet: compare the clocks."),
    ("CERTIFICATE_VERIFY_FAILED", "Its certificate descends from none that was given as CA."),
    (
        "Hostname Verification",
        "Its certificate is for another host: name it as that does, in its subjectAltName.",
    ),
    ("Socket closed", "It may speak TLS, want a certificate of the client, or be closing."),
    ("Failed parsing HTTP/2", "What listens there speaks no gRPC; a metrics port does not."),
)
_NO_SUCH_METHOD = "Method not found!"


def connection_hint(details: str) -> str | None:
    """What may be wrong with a connection that grpc describes like this; None: nobody knows."""
    return next((hint for sign, hint in _HINTS if sign in details), None)


def is_other_service(details: str) -> bool:
    """Whether a gRPC server answered, but one without the service that was called."""
    return details == _NO_SUCH_METHOD
