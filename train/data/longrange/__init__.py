"""Long-range classification: the data of the Long-Range Arena's five tasks.

Start at ``tasks.py``. ``listops.py`` and ``pathfinder.py`` generate their data, ``files.py`` reads
what is published for the others, ``corpus.py`` holds the sequences.

Source: Tay et al. 2021, "Long Range Arena" (arXiv:2011.04006).
"""
