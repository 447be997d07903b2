"""Commands that only read: one file for each.

A file has the options of its command, its call, and its small page; ``text`` draws what is large.
"""
