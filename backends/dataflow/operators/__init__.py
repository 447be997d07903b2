"""Ready-made operators. Sources and sinks are in ``stateformat.backends.connectors``.

Read ``row_steps`` first; ``aggregate`` and ``window`` share ``accumulators``. ``per_key`` is a
separate package: it calls plain Python for each key.
"""
