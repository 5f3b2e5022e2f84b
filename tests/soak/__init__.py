"""Campaigns of faults against the cache: each tries for as long as it may, has its own oracle, and keeps a tally.

``make soak`` runs all of them for ``MINUTES`` in all. ``tests/soak/test_soak.py`` gives each a second or two in every
run of the tests. A campaign is a module of this folder with a function ``run(soak)``, and a row in ``campaigns.py``.
"""
