"""Commands that run a job, follow it, or ask something of it: one file for each.

A file has the options of its command, its call, and its small page.
"""
