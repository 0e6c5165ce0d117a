"""The config's blocks of monitors, which figures of every step are written to: DeepSpeed's, with its defaults."""

from __future__ import annotations

from typing import Annotated

from infinity.config.blocks import Block, key
from infinity.config.rules import AnyText, ExperimentMode, Flag, Positive, Secret, Text, choice


class FileMonitorConfig(Block):
    """What the monitors say that write files."""

    enabled: Flag = key(False, "Whether every step is written there, by rank 0.")
    output_path: AnyText = key("", "Folder of all jobs; where empty, the one that the training is started in.")
    job_name: Text = key("DeepSpeedJobName", "Folder in it, for this training.")


class TensorboardConfig(FileMonitorConfig):
    """A monitor: files for TensorBoard, by torch.utils.tensorboard. Needs the package tensorboard."""


class CsvMonitorConfig(FileMonitorConfig):
    """A monitor: text files, one for each event, with the columns samples (`step`) and value."""


class WandbConfig(Block):
    """A monitor: a run at Weights & Biases. Needs the package wandb; its environment variables, such as WANDB_MODE, count."""

    enabled: Flag = key(False, "Whether every step is logged there, by rank 0.")
    group: AnyText | None = key(None, "Group of the run.")
    team: AnyText | None = key(None, "Team or user whose run it is; the user's own default when absent.")
    project: Text = key("deepspeed", "Project of the run.")


class CometConfig(Block):
    """A monitor: an experiment at Comet. Needs the package comet_ml; what is absent is left to Comet's own configuration."""

    enabled: Flag = key(False, "Whether steps are logged there, by rank 0.")
    samples_log_interval: Positive = key(
        100, "An event is logged when so many samples have passed since it last was.", unit="samples"
    )
    project: Text | None = key(None, "Project of the experiment.")
    workspace: Text | None = key(None, "Workspace of the project.")
    api_key: Secret | None = key(None, "Key of the user's account; `dump_state` does not show it.")
    experiment_name: Text | None = key(None, "Name of the experiment.")
    experiment_key: Text | None = key(None, "Key of the experiment: 32 to 50 letters and digits.")
    online: Flag | None = key(None, "Whether it is sent to Comet, rather than kept in a file here; sent when absent.")
    mode: Annotated[ExperimentMode, choice(ExperimentMode)] | None = key(
        None, "Whether to go on with the experiment of this key, or to make a new one; absent is either."
    )
