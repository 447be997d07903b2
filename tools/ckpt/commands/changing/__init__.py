"""Commands that publish, copy or delete: the options of each, its call, and its small page."""
