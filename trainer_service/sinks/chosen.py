"""Opens the sinks that the settings ask for."""

from trainer_service.settings import TrainerSettings
from trainer_service.sinks.json_lines import JsonLines
from trainer_service.sinks.sink import Sink
from trainer_service.sinks.tensorboard import TensorBoard
from trainer_service.sinks.weights_and_biases import WeightsAndBiases


def chosen_sinks(settings: TrainerSettings) -> list[Sink]:
    """Raises SystemExit with the reason if the run at Weights & Biases cannot be started."""
    sinks: list[Sink] = []
    if settings.metrics_path is not None:
        sinks.append(JsonLines(settings.metrics_path))
    if settings.tensorboard_dir is not None:
        sinks.append(TensorBoard(settings.tensorboard_dir))
    if settings.wandb is not None:
        algorithm = settings.algorithm.model_dump(mode="json")
        sinks.append(WeightsAndBiases(settings.wandb, algorithm, settings.metrics_path))
    return sinks
