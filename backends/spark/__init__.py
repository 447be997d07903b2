"""What runs on Spark: how a session is made right, and the executor side of the rewrite job. Needs the extra ``spark``."""
