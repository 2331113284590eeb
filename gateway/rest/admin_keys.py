"""`/admin/keys`: operators make, list, rotate, limit and revoke API keys."""

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field

from gateway.callers.key_store import NAME, ApiKey, KeyLimits, KeyUse
from gateway.parts import parts_of
from gateway.rest.bodies import RestBody
from gateway.rest.shapes import KeyPage, KeySecret, KeyShape, NewKeySecret
from rollout_queue import clock
from rollout_queue.http.callers import Role
from rollout_queue.http.json_routes import JsonRoute

router = APIRouter(route_class=JsonRoute)
KeyName = Annotated[str, Field(pattern=f"^{NAME.pattern}$", max_length=63)]
Limit = Annotated[int | None, Field(ge=1, le=2**53)]
UNUSED = KeyUse()


class LimitsBody(RestBody):
    """Limits of one key; null: the limit of the deployment, if it has one."""

    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    token_budget: Limit = None

    def limits(self) -> KeyLimits:
        return KeyLimits(self.requests_per_minute, self.tokens_per_minute, self.token_budget)


class NewKeyBody(LimitsBody):
    name: KeyName
    role: Role = "client"


class RotateBody(RestBody):
    keep_s: Annotated[float, Field(ge=0, le=366 * 86400, allow_inf_nan=False)] = 86400.0
    """How long the earlier secrets are still accepted."""


@router.get("/keys")
async def list_keys(request: Request) -> KeyPage:
    """Every key with its limits and its use, without secrets; revoked keys are listed, too."""
    gateway = parts_of(request)
    await gateway.keys.refresh()
    usage = await gateway.key_changes.usage()
    keys = sorted(gateway.keys.all, key=lambda key: key.name)
    return KeyPage(data=[_shape(key, usage.get(key.name, UNUSED)) for key in keys])


@router.post("/keys", status_code=201)
async def create_key(body: NewKeyBody, request: Request) -> NewKeySecret:
    """Make a key. The reply is the only one that has its secret."""
    made = await parts_of(request).key_changes.create(body.name, body.role, body.limits())
    return _with_secret(*made)


@router.post("/keys/{name}/rotate")
async def rotate_key(name: str, body: RotateBody, request: Request) -> NewKeySecret:
    """Give a key a new secret. Its sessions, limits and budget stay."""
    return _with_secret(*await parts_of(request).key_changes.rotate(name, body.keep_s))


@router.put("/keys/{name}/limits")
async def limit_key(name: str, body: LimitsBody, request: Request) -> KeyShape:
    """Set all limits of a key."""
    changes = parts_of(request).key_changes
    return _shape(await changes.limit(name, body.limits()), (await changes.usage()).get(name, UNUSED))


@router.delete("/keys/{name}")
async def revoke_key(name: str, request: Request) -> KeyShape:
    """Refuse a key from now on, and the session keys of its sessions. Its name is never used again."""
    changes = parts_of(request).key_changes
    return _shape(await changes.revoke(name), (await changes.usage()).get(name, UNUSED))


def _shape(key: ApiKey, usage: KeyUse) -> KeyShape:
    return KeyShape(
        name=key.name,
        role=key.role,
        source=key.source,
        secrets=[
            KeySecret(sha256=one.digest[:8], created_at=one.created_at or None, expires_at=one.expires_at)
            for one in key.accepted_secrets(clock.now())
        ],
        requests_per_minute=key.limits.requests_per_minute,
        tokens_per_minute=key.limits.tokens_per_minute,
        token_budget=key.limits.token_budget,
        tokens_used=usage.tokens,
        created_at=key.created_at or None,
        last_used_at=usage.at or None,
        revoked_at=key.revoked_at,
    )


def _with_secret(key: ApiKey, secret: str) -> NewKeySecret:
    return NewKeySecret(name=key.name, role=key.role, api_key=secret)
