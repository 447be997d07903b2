"""Commands that publish, copy or delete: one file for each.

A file has the options of its command, its call, and its small page. ``_published`` has the page of
all commands that publish.
"""
