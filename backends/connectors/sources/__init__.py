"""Sources of rows in files, in memory, or made up.

``enumerators`` deals splits, for all of them. ``files`` is what ``csv`` and ``parquet`` share.
``memory`` and ``rate`` stand alone.
"""
