"""The rules of a checkpoint that need no file, for publishing, validation, reading and planning.

Read ``statuses`` (what the graph requires of finished operators), ``graph`` (operators, edges and
states by themselves), then ``content`` (handles compared with graph and states).
"""
