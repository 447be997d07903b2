"""The ``ckpt`` command: what is in a checkpoint, is it whole, can it be restored, and make another of it."""
