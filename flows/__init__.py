"""Flows: deployable entry points, when and where the pipeline runs."""
