"""Training and evaluation: recipes, batches, the loop with exact resume, full-ranking metrics."""

from zoo.training.config import RECIPES, TrainConfig, recipe
from zoo.training.evaluate import EvalReport, evaluate
from zoo.training.loop import train

__all__ = ["RECIPES", "EvalReport", "TrainConfig", "evaluate", "recipe", "train"]
