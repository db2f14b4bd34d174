"""Graphs on disk, importers, partitioners and samplers."""
