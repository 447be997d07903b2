"""Checkpoints that have lost segments: which, and putting them back (SPEC.md section 8.4).

Read ``losing`` (which are lost), then ``elsewhere`` (which places still have them; putting back).
``stateformat.publication`` deals with records and manifests that are damaged or lost.
"""

from __future__ import annotations

from .elsewhere import listed_in as listed_in, put_back as put_back, savepoints_of as savepoints_of
from .losing import Losses as Losses, LostSegment as LostSegment, losses_of as losses_of, why_not as why_not
