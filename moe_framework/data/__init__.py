"""Genome data: FASTA to tokens, packed rows, a shuffled order by arithmetic, and batches for each data rank.

Everything up to `loader.py` is numpy; torch tensors appear at the batch edge only.
"""
