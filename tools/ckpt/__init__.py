"""The ``ckpt`` command: inspects, validates, explains, rescales and rewrites checkpoints.

Read ``main``, one of ``commands``, then what it uses: ``options`` for its arguments, ``documents``
for what it finds out, ``text`` for its page, ``output`` for where that goes. ``exit_status`` maps
errors.
"""
