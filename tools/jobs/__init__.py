"""Programs for spark-submit: ``run`` runs a dataflow, ``rewrite`` rewrites a checkpoint."""
