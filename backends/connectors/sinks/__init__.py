"""Sinks into files and into the driver's memory.

``file_sink`` is the sink of Parquet files. What it asks of a place is in ``directory``; the places
are ``local_directory`` and ``s3_directory``. ``part_names`` and ``uploads`` are what a committable
names. ``collect`` stands alone.
"""
