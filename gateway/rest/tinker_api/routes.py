"""All routes of the Tinker API, below `/api/v1`."""

from fastapi import APIRouter

from gateway.rest.tinker_api import checkpoints, futures, management, models, samplers, service

router = APIRouter(prefix="/api/v1")
for routes in (service, models, samplers, futures, management, checkpoints):
    router.include_router(routes.router)
