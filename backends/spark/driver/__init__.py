"""The driver of a job on Spark. Read ``run``, then ``epoch``, then ``split_assignment``."""
