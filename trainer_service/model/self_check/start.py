"""Checks the base model when a trainer has loaded it, and logs the table of checks."""

import logging
from functools import partial
from typing import Any

import torch

from trainer_service.model.attention.packed_attention import check_can_share
from trainer_service.model.self_check.checks import check_model
from trainer_service.model.self_check.outcome import CheckedModel
from trainer_service.model.settings import ModelSettings
from trainer_service.model.sharding.parallel import Parallel
from trainer_service.model.sharding.zero import uses_cuda

logger = logging.getLogger(__name__)


def check_at_start(model: Any, settings: ModelSettings, parallel: Parallel) -> CheckedModel:
    """Check a model that `load_base` has made, on this rank's device. Every rank must call it; all take the
    same decision. Raises SystemExit for a model that cannot be trained with these settings."""
    device = torch.device("cuda", torch.cuda.current_device()) if uses_cuda() else torch.device("cpu")
    if settings.sharding_stage < 3:  # else each rank has its part of each weight there
        model.to(device)
    agree = partial(parallel.agree, device=device)
    checked = check_model(model, device, agree, settings.share_prefixes)
    for each in checked.checks if parallel.rank == 0 else ():
        logger.log(logging.INFO if each.outcome == "right" else logging.WARNING, "%s", each.line)
    check_can_share(model, checked.packing, settings.sequence_parallel)
    return checked
