"""What goes between driver and workers: ``frames``, ``messages``, ``restore_point``, ``dataframe_input``."""

from __future__ import annotations

from . import frames
from .dataframe_input import DataFrameInput, InputEncoder, input_channel
from .driver_task import ENDED, DriverTask, is_for_core, is_work
from .frames import DDL, ROWS, Address, EpochBroken, compare, join_small
from .messages import EpochLink, Setup, Spec, TaskReport
from .remote_errors import pack
from .restore_point import RestorePoint, read_task, restore_points

__all__ = [
    "DDL",
    "ENDED",
    "ROWS",
    "Address",
    "DataFrameInput",
    "DriverTask",
    "EpochBroken",
    "EpochLink",
    "InputEncoder",
    "RestorePoint",
    "Setup",
    "Spec",
    "TaskReport",
    "compare",
    "frames",
    "input_channel",
    "is_for_core",
    "is_work",
    "join_small",
    "pack",
    "read_task",
    "restore_points",
]
