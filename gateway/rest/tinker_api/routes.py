"""All routes of the Tinker API, below `/api/v1`."""

from fastapi import APIRouter

from gateway.rest.tinker_api import futures, models, samplers, service
from gateway.rest.tinker_api.management import checkpoints, copies, exports, listing, session_search

router = APIRouter(prefix="/api/v1")
for routes in (service, models, samplers, futures, listing, session_search, checkpoints, exports, copies):
    router.include_router(routes.router)
