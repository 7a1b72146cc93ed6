"""Which client ids are in use, and how one call takes a request over from another.

Owns: (principal, request id) -> live request. Does not know: what a request does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from control_plane.errors import DuplicateRequestError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(eq=False, slots=True)
class Claim:
    """A client's id while its request is live.

    Attributes:
        on_replaced: Ends the request at once, from within.
        is_replaced: A resume took the id over.
    """

    principal: str
    request_id: str
    on_replaced: Callable[[], None]
    is_replaced: bool = False


class LiveRequests:
    """Ids of different principals never meet."""

    def __init__(self) -> None:
        self._claims: dict[tuple[str, str], Claim] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def claim(
        self, principal: str, request_id: str, *, replace: bool, on_replaced: Callable[[], None]
    ) -> Claim:
        """Take an id, from a live request if `replace`.

        Raises:
            DuplicateRequestError: It is in use and not to be replaced.
        """
        key = (principal, request_id)
        holder = self._claims.get(key)
        if holder is not None:
            if not replace:
                raise DuplicateRequestError(
                    f"request_id {request_id!r} is live. Wait for its end, choose another id, or "
                    "set resume to take it over.",
                    field="request_id",
                    value=request_id,
                    limit="unique among live requests",
                )
            holder.is_replaced = True
            holder.on_replaced()
        claim = self._claims[key] = Claim(principal, request_id, on_replaced)
        return claim

    def release(self, claim: Claim) -> None:
        """Give an id back, unless somebody has taken it over."""
        key = (claim.principal, claim.request_id)
        if self._claims.get(key) is claim:
            del self._claims[key]
