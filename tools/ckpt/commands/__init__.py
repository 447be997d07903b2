"""The commands, by what they do to a store; ``main`` imports the file of the one that runs."""
