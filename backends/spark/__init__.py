"""What runs on Spark: the runtime for dataflows, its sources, and the engine of the rewrite job.

Needs the extra ``spark``.
"""
