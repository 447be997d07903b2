"""Checkpoints that have lost segments: what remains, and how to continue (SPEC.md section 8.4).

Read ``without`` (handles without lost segments, pure), ``losing`` (which are lost), ``elsewhere``
(which places still have them), ``going_on`` (putting back, giving up, publishing), ``document``.
``stateformat.publication`` deals with records and manifests that are damaged or lost.
"""

from __future__ import annotations

from .document import (
    given_up_document as given_up_document,
    losses_document as losses_document,
    put_back_document as put_back_document,
)
from .elsewhere import listed_in as listed_in, savepoints_of as savepoints_of
from .going_on import GoneOn as GoneOn, go_on as go_on, losses_of as losses_of, why_not as why_not
from .losing import Losses as Losses, LostSegment as LostSegment, lost_segments as lost_segments
from .without import Loss as Loss, Scope as Scope, without_lost as without_lost
