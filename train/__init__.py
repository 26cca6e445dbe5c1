"""Training: one torchrun script per model, and the engine that they share.

Start at ``vit.py``. ``flags.py`` names the settings, ``data.py`` the data sets, ``parallel.py``
spreads a model over processes, ``engine.py`` is the loop, ``checkpoint.py`` saves and resumes it,
``report.py`` says how it went, and ``plots.py`` draws it.
"""
