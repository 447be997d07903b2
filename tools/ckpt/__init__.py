"""The ``ckpt`` command: inspects, validates, explains, rescales and rewrites checkpoints."""
