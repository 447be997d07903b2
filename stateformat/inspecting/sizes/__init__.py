"""What a store costs on its storage, by folder, checkpoint and state.

``naming`` reads each record and manifest once and finds which objects each refers to; ``document``
computes the sums; ``foreign`` does what is possible for other systems' checkpoints.
"""

from __future__ import annotations

from .document import shared_bytes as shared_bytes, sizes_document as sizes_document
