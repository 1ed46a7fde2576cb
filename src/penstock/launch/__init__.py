"""`penstock run`: runs an unedited training script with penstock's DataLoader in place of torch's."""

from penstock.launch.outputs import Outputs
from penstock.launch.run import run

__all__ = ["Outputs", "run"]
