"""The rows about a model's files: which are its weights, which ones nobody reads, which tensors it has."""

import hashlib

from rollout_queue.base_model.headers import FLOATS, BrokenWeights, StoredTensor
from rollout_queue.base_model.model_files import CONFIG, INDEX, SUFFIX, ModelFiles, named, text_config
from rollout_queue.protocol.model_checks import ModelCheck

QUANTIZATIONS = ("quantization_config", "compression_config")
TENSORS = "tensors"
"""The row whose detail is the same for trainer and engines that have the same model."""


def files_check(model: ModelFiles) -> ModelCheck:
    """The weights of the model, and the sets of weights beside them."""
    used = {path.name for path in model.weights}
    others = sorted({path.name for path in model.directory.glob(f"*{SUFFIX}")} - used)
    chosen = f", which {INDEX} names" if (model.directory / INDEX).exists() else ""
    if not others:
        return ModelCheck(check="weights", outcome="right", detail=f"{named(sorted(used))}{chosen}")
    detail = f"{named(sorted(used))}{chosen}; nobody reads {named(others)}"
    return ModelCheck(check="weights", outcome="differs", detail=detail)


def tensors_check(model: ModelFiles) -> ModelCheck:
    """Names, shapes and types, with a digest by which two services can be compared."""
    digest, types = hashlib.sha256(), set[str]()
    for name, (_, tensor) in sorted(model.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        types.add(tensor.dtype)
    count = f"{len(model.tensors)} tensors, {', '.join(sorted(types))}"
    return ModelCheck(check=TENSORS, outcome="right", detail=f"{count}, digest {digest.hexdigest()[:8]}")


def refuse_quantized(model: ModelFiles) -> None:
    """Raises BrokenWeights for quantized weights. Whole numbers in other models are buffers."""
    config = text_config(model.config)
    if (said := next(filter(config.get, QUANTIZATIONS), None)) is None:
        return
    for path, tensor in model.tensors.values():
        if tensor.dtype not in (*FLOATS, "F64"):
            raise BrokenWeights(quantized(tensor), file=path.name, tensor=tensor.name)
    reason = f"has {said}, and no weight is quantized: remove it, else engines quantize what is trained"
    raise BrokenWeights(reason, file=CONFIG)


def quantized(tensor: StoredTensor) -> str:
    return (
        f"is {tensor.dtype}, and quantized weights cannot be trained: give a copy of the model with "
        f"{', '.join(FLOATS)} tensors"
    )
