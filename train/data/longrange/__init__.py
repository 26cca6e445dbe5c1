"""Long-range classification: the data of the Long-Range Arena's five tasks.

Start at ``tasks.py``. ``listops.py`` generates its data, ``files.py`` reads what is published,
``corpus.py`` holds the sequences.

Source: Tay et al. 2021, "Long Range Arena" (arXiv:2011.04006).
"""
