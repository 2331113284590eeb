"""`GET /admin/pipeline`: what sessions, groups and the trainer wait for."""

from dataclasses import asdict

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from gateway.operators.pipeline_report import PipelineReport
from gateway.parts import parts_of

router = APIRouter()


@router.get("/pipeline", responses={200: {"model": PipelineReport}})
async def pipeline(request: Request) -> Response:
    """Sessions by state and verdict, what groups and the trainer wait for, and a summary in sentences."""
    return JSONResponse(asdict(await parts_of(request).pipeline.report()))
