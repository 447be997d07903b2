"""One file per command: its options, its call, its small page. ``main`` imports the one that runs.

``_published`` has the page of all commands that publish. ``documents`` and ``text`` have what is
large.
"""
