"""What a store costs on its storage, by folder, checkpoint and state.

``naming`` reads each record and manifest once and says who names which objects; ``document`` makes
the sums; ``foreign`` does what can be done for other systems' checkpoints.
"""

from __future__ import annotations

from .document import shared_bytes as shared_bytes, sizes_document as sizes_document
