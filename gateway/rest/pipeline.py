"""`GET /admin/pipeline`: what waits for what, on the way from an open session to trained weights."""

from dataclasses import asdict

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from gateway.operators.pipeline_report import PipelineReport
from gateway.wiring import parts_of

router = APIRouter()


@router.get("/pipeline", responses={200: {"model": PipelineReport}})
async def pipeline(request: Request) -> Response:
    """Counts by state and verdict, groups and the trainer with what they wait for, and all of it in words."""
    return JSONResponse(asdict(await parts_of(request).pipeline.report()))
