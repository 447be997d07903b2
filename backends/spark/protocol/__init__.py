"""What driver and workers send each other. Read ``messages`` first: what a task gets and reports.

``restore_point`` and ``driver_task`` hold what the driver knows about a task between epochs. Tasks
send each other ``frames``; ``dataframe_input`` makes frames of a DataFrame's rows.
"""

from __future__ import annotations

from . import frames as frames
from .dataframe_input import (
    DataFrameInput as DataFrameInput,
    InputEncoder as InputEncoder,
    input_channel as input_channel,
)
from .driver_task import ENDED as ENDED, DriverTask as DriverTask, is_for_core as is_for_core, is_work as is_work
from .frames import EpochBroken as EpochBroken
from .messages import Epoch as Epoch, EpochLink as EpochLink, Setup as Setup, Spec as Spec, TaskReport as TaskReport
from .remote_errors import RemoteError as RemoteError, pack_error as pack_error, unpack_error as unpack_error
from .restore_point import RestorePoint as RestorePoint, read_task as read_task, restore_points as restore_points
