"""The project's own comparisons: ``python -m tools.bench`` in a clone. Users measure with :mod:`monai_gds.bench`."""
