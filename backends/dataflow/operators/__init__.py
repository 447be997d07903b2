"""Ready-made operators. Sources and sinks are in ``stateformat.backends.connectors``.

Read ``row_steps`` first; ``window`` and ``deduplicate`` build on ``aggregate``. ``per_key`` is a
separate package: it calls plain Python for each key.
"""
