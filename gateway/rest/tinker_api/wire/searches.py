"""The body of the SDK's search for sessions."""

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from gateway.rest.bodies import RestBody
from gateway.rest.tinker_api.wire.bodies import LONGEST_TEXT, TinkerBody


class OwnQuery(RestBody):
    type: Literal["own", "accessible"] = "own"


class UserQuery(RestBody):
    type: Literal["user"]
    owner_urns: list[Annotated[str, Field(max_length=LONGEST_TEXT)]] = Field(min_length=1, max_length=10)


class StateQuery(RestBody):
    type: Literal["active", "cancelled", "failed"]


class ClientFinishedQuery(RestBody):
    type: Literal["client_finished"]
    reasons: list[Literal["success", "errored", "interrupted"]] | None = Field(None, min_length=1)


class SearchCursor(RestBody):
    last_created_at: AwareDatetime = Field(strict=False)
    last_session_id: str = Field(max_length=150)


class SessionSearchBody(TinkerBody):
    session_id: str | None = Field(None, max_length=150)
    project_ids: list[str] | None = Field(None, max_length=100)
    user_metadata: dict[str, str] = Field({}, max_length=100)
    display_name: str | None = Field(None, min_length=1, max_length=1000)
    owner: Annotated[OwnQuery | UserQuery, Field(discriminator="type")] = OwnQuery()
    statuses: list[Annotated[StateQuery | ClientFinishedQuery, Field(discriminator="type")]] | None = Field(
        None, min_length=1
    )
    limit: int = Field(50, ge=1, le=200)
    cursor: SearchCursor | None = None
