"""Writing an artifact: the pipeline, the part file, its journal, and shares of one artifact."""
